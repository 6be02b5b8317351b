"""I7: a load that fails is not a fact. Nothing computed from it is stored, and nothing loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from books import World, cold_output, count_events, lookups, text

from kvledger.sim import Kind, SimulatedEngine
from kvledger.vllm.transfer import TransferError

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def break_loads(engine: SimulatedEngine, *, times: int = 1, rank: int = 0) -> Callable[[], int]:
    """Let the next ``times`` copies of a rank fail; returns a counter of failures so far."""
    transfer = engine.workers.ranks[rank].connector.worker._attachment.transfer
    load = transfer.load
    failures = 0

    def failing(*arguments: Any) -> int:
        nonlocal failures
        if failures < times:
            failures += 1
            raise TransferError("a copy that a test lets fail")
        return int(load(*arguments))

    transfer.load = failing
    return lambda: failures


@CHUNKS
@SCHEDULERS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.pitfall(17, 30, 34, 46)
def test_failed_load_is_recomputed(world: World, chunk: int, is_async: bool, ranks: int) -> None:
    """Right output, one look-up more and no loop; nothing is stored anew, and others may load."""
    engine = world.engine(
        options={"chunk_tokens": chunk}, num_blocks=128, async_scheduling=is_async, ranks=ranks
    )
    prompt = text("failing", 330)
    engine.add(prompt[:256], max_tokens=1)
    engine.run()
    engine.reset_prefix_cache()
    failures = break_loads(engine, rank=ranks - 1)
    request = engine.add(prompt, max_tokens=4)
    engine.run()
    assert failures() == 1
    assert count_events(engine, Kind.LOAD_FAILED, request) == 1
    answers = [tokens for tokens in lookups(engine, request) if tokens is not None]
    assert answers == [256, 0]
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4, ranks=ranks)
    assert world.runs(engine, request) == [
        ("present", 256 // chunk),
        ("stored", 333 // chunk - 256 // chunk),
    ]
    engine.reset_prefix_cache()
    again = engine.add(prompt)
    engine.run()
    assert engine.external_hit(again) == 330 // chunk * chunk


@pytest.mark.pitfall(6)
def test_failed_load_with_policy_fail(world: World) -> None:
    """``keep_failure_policy`` leaves vLLM's own: the request ends with an error, nobody else."""
    engine = world.engine(
        options={"keep_failure_policy": True}, load_failure_policy="fail", num_blocks=64
    )
    prompt = text("policy", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    break_loads(engine)
    failed = engine.add(prompt)
    engine.run()
    assert engine.outputs[failed] == []
    again = engine.add(prompt)
    engine.run()
    assert engine.external_hit(again) == 160
    assert engine.outputs[again] == cold_output(prompt)
    assert world.accounts(engine)[failed]["fates"] == []


@pytest.mark.pitfall(6)
def test_policy_is_set_to_recompute(world: World) -> None:
    """Without the option the connector sets the policy; vLLM's scheduler reads it afterwards."""
    engine = world.engine(load_failure_policy="fail", num_blocks=64)
    prompt = text("set", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    break_loads(engine)
    request = engine.add(prompt)
    engine.run()
    assert engine.outputs[request] == cold_output(prompt)


@SCHEDULERS
def test_waiting_twin_of_a_failed_load_loads_for_itself(world: World, is_async: bool) -> None:
    """The second request waits for the first one's load; that fails; the second's own succeeds."""
    engine = world.engine(num_blocks=128, async_scheduling=is_async)
    prompt = text("twin", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    break_loads(engine)
    requests = [engine.add(prompt) for _ in range(2)]
    engine.run()
    for request in requests:
        assert engine.outputs[request] == cold_output(prompt)
    assert count_events(engine, Kind.LOAD_FAILED) == 1
    assert world.runs(engine, requests[0]) == [("present", 10)]


@pytest.mark.pitfall(45)
def test_tainted_blocks_are_never_stored(world: World) -> None:
    """A load that fails half-way has written some blocks: no chunk of them may reach the server."""
    engine = world.engine(num_blocks=64)
    prompt = text("taint", 320)
    engine.add(prompt)
    engine.run()
    world.server.clear()
    engine.reset_prefix_cache()
    engine.add(prompt[:160])
    engine.run()
    engine.reset_prefix_cache()
    worker = engine.workers.ranks[0].connector.worker
    transfer = worker._attachment.transfer
    load = transfer.load

    def half(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        load(group, block_ids[:5], offsets[:5][::-1], part_offset)  # wrong bytes, then a failure
        transfer.load = load
        raise TransferError("a copy that a test lets fail half-way")

    transfer.load = half
    request = engine.add(prompt)
    engine.run()
    assert engine.outputs[request] == cold_output(prompt)
    assert world.runs(engine, request) == [("present", 10), ("stored", 10)]
    assert world.stored_chunks(engine, prompt) == 20


@pytest.mark.bounds
def test_load_deadline(world: World) -> None:
    """A load whose slots the server does not name in time has failed, and is computed."""
    engine = world.engine(options={"load_deadline_ms": 50.0}, num_blocks=64)
    prompt = text("deadline", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    request = engine.add(prompt)
    scheduler = engine.connector.scheduler
    while not scheduler.live[request].lookup.answered:
        scheduler.channel.poll(0.01)
    world.server.pause()
    engine.run()
    world.server.resume()
    assert count_events(engine, Kind.LOAD_FAILED, request) == 1
    assert engine.outputs[request] == cold_output(prompt)
    assert scheduler.accounts.failed_loads == 1


@pytest.mark.pitfall(34)
def test_load_under_way_is_cancelled_at_its_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that the workers have begun and cannot complete in time is reported as failed once."""
    engine = world.engine(options={"load_deadline_ms": 60.0}, num_blocks=256)
    prompt = text("cancel", 1600)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    worker = engine.workers.ranks[0].connector.worker
    monkeypatch.setattr(worker, "_load_budget_bytes", 0)
    request = engine.add(prompt)
    engine.run()
    assert count_events(engine, Kind.LOAD_FAILED, request) == 1
    assert engine.outputs[request] == cold_output(prompt)
    assert world.runs(engine, request) == [("present", 100)]
