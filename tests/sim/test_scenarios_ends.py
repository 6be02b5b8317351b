"""More faults that users have really met: aborts, hits not needed, failed loads, edges.

See test_scenarios.py for the conventions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from books import (
    World,
    cold_output,
    count_events,
    loaded_bytes,
    lookups,
    part_bytes,
    text,
    wait_until,
)
from test_scenarios import SCHEDULERS, fill_local, fill_server, make

from kvledger.protocol import Error, ErrorCode, Locate, Located, Reply, pack_u64
from kvledger.sim import Kind, SimulatedEngine
from kvledger.vllm.transfer import TransferError


@pytest.mark.parametrize("salt", [None, "salt"])
def test_scenario_17_abort_between_look_up_and_allocation(world: World, salt: str | None) -> None:
    """Prompt 2048, external 8 chunks of 256; nothing is leased afterwards, all can be evicted."""
    engine = make(world)
    prompt = text("row 17", 2048)
    engine.add(prompt, salt=salt)
    engine.run()
    engine.reset_prefix_cache()
    blocker = engine.add(text("blocker", 1000), max_tokens=20)
    engine.step()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    request = engine.add(prompt, salt=salt)

    def refuse(asked: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if asked.request_id == request else allocate(asked, *arguments, **keywords)

    manager.allocate_slots = refuse
    engine.begin_step()
    assert lookups(engine, request) == [2048]
    manager.allocate_slots = allocate
    assert world.server.totals()["leases"] == 1
    engine.abort(request)
    engine.run_workers()
    engine.finish_step()
    world.check_nothing_held()
    engine.run()
    assert len(engine.outputs[blocker]) == 20
    world.server.clear()
    assert world.server.totals()["objects"] == 0


@pytest.mark.parametrize(("local", "external"), [(1024, 0), (640, 384)])
def test_scenario_18_hit_that_vllm_does_not_need(world: World, local: int, external: int) -> None:
    """External 1024 with local 1024: the lease goes at admission, before the request ends. With
    640: blocks of chunks 2 and 3 only are read (640 lies inside chunk 2); the lease goes after."""
    engine = make(world)
    prompt = text("row 18", 1100)
    fill_server(engine, prompt[:1024])
    fill_local(engine, prompt[:local])
    before = loaded_bytes(engine)
    request = engine.add(prompt, max_tokens=30)
    engine.step()
    while engine.external_hit(request) and not count_events(engine, Kind.LOAD_FINISHED, request):
        engine.step()
    wait_until(lambda: world.server.totals()["leases"] == 0, "the lease is given back")
    assert request in engine.scheduler.requests
    engine.run()
    assert (engine.local_hit(request), engine.external_hit(request)) == (local, external)
    assert loaded_bytes(engine) - before == part_bytes(engine) * external // 256
    loaded = [("loaded", 2)] if external else []
    assert world.runs(engine, request) == [("present", 4 - len(loaded) * 2), *loaded]


@SCHEDULERS
@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("first", [0, 1])
def test_scenario_19_abort_during_a_load(
    world: World, moment: int, first: int, is_async: bool
) -> None:
    """Two requests load; both are aborted, in either order: before the workers are told, before
    their answer is taken, after it, or when a load has taken some steps. The engine survives,
    each load is answered once, blocks are freed once, nothing is ever reported as sent."""
    engine = make(world, async_scheduling=is_async)
    prompts = [text(f"row 19 {n}", 1024) for n in range(2)]
    for prompt in prompts:
        fill_server(engine, prompt)
    if moment == 3:
        engine.workers.ranks[0].connector.worker._load_budget_bytes = part_bytes(engine)
    requests = [engine.add(prompt) for prompt in prompts]
    engine.begin_step()
    if moment > 0:
        engine.run_workers()
    if moment > 1:
        engine.finish_step()
    if moment > 2:
        engine.step()
    engine.abort(requests[first])
    engine.abort(requests[1 - first])
    engine.run()
    engine.check()
    for request in requests:
        answers = count_events(engine, Kind.LOAD_FINISHED, request)
        assert answers + count_events(engine, Kind.LOAD_FAILED, request) == 1
    assert count_events(engine, Kind.SEND_FINISHED) == 0


def first_rank(engine: SimulatedEngine) -> Any:
    """The first worker's connector."""
    return engine.workers.ranks[0].connector


Fault = Callable[[SimulatedEngine, pytest.MonkeyPatch], None]


def arrives(tokens: int, error: type[Exception] = TransferError) -> Fault:
    """The next load ends with an error when so many of its tokens have arrived."""

    def spoil(engine: SimulatedEngine, _: pytest.MonkeyPatch) -> None:
        rank = engine.workers.ranks[0]
        transfer, lanes = rank.connector.worker._attachment.transfer, rank.memory.lanes
        load = transfer.load

        def short(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
            transfer.load = load
            blocks = block_ids.reshape(-1)
            kept = lanes[:, blocks].copy()
            load(group, block_ids, offsets, part_offset)
            whole, rest = divmod(tokens, 16)
            lanes[:, blocks[whole + 1 :]] = kept[:, whole + 1 :]
            if whole < len(blocks):
                lanes[:, blocks[whole], :, rest:] = kept[:, whole, :, rest:]
            raise error("a copy that a test lets end early")

        transfer.load = short

    return spoil


def never_arrives(engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are never made; the deadline passes."""
    monkeypatch.setattr(engine.connector.scheduler.loads, "_deadline_seconds", 0.05)
    monkeypatch.setattr(first_rank(engine).worker, "_load_budget_bytes", 0)


def answers(make_reply: Callable[[int, int], Reply]) -> Fault:
    """The server's next answer to "where are these chunks" is another."""

    def spoil(engine: SimulatedEngine, _: pytest.MonkeyPatch) -> None:
        channel = engine.connector.scheduler.channel
        send = channel.send

        def send_and_twist(make: Any, on_reply: Any = None) -> bool:
            message = make(0)
            if not isinstance(message, Locate):
                return bool(send(make, on_reply))
            channel.send = send
            on_reply(make_reply(message.first, message.count))
            return True

        channel.send = send_and_twist

    return spoil


FAULTS: dict[str, Fault] = {
    "arrived-0": arrives(0),
    "arrived-256": arrives(256),
    "arrived-651": arrives(651),
    "arrived-768": arrives(768),
    "crash-at-651": arrives(651, RuntimeError),
    "timeout": never_arrives,
    "no-lease": answers(lambda *_: Error(id=0, code=ErrorCode.UNKNOWN_LEASE, message="a test")),
    "two-slots-of-three": answers(
        lambda _, count: Located(id=0, offsets=pack_u64([0] * (count - 1)))
    ),
}


@SCHEDULERS
@pytest.mark.parametrize("fault", FAULTS)
def test_scenario_20_short_retrieve(
    world: World, fault: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """768 tokens promised; 0, 256, 651 or all of them arrive before an error, the worker's code
    crashes, the deadline passes, the server refuses or names too few slots: the load is reported
    as failed, once, no block of it is believed, and the output is that of a cold run."""
    engine = make(world, async_scheduling=is_async)
    prompt = text("row 20", 900)
    fill_server(engine, prompt[:768])
    FAULTS[fault](engine, monkeypatch)
    request = engine.add(prompt, max_tokens=4)
    engine.run()
    assert count_events(engine, Kind.LOAD_FAILED, request) == 1
    assert [tokens for tokens in lookups(engine, request) if tokens is not None] == [768, 0]
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4)
    assert world.runs(engine, request) == [("present", 3)]
    guard = first_rank(engine).guard
    assert guard.failures == (fault == "crash-at-651")
    guard.failures = 0  # counted as it should be; the standing checks want none
    assert world.stored_chunks(engine, prompt) == 3


def test_scenario_30_edges(world: World) -> None:
    """C 256, prompt 290, then 100 and 250 tokens: the second chunk comes with 512 valid tokens."""
    engine = make(world)
    prompt = text("row 30", 290)
    for generated, runs in ((100, [("stored", 1)]), (250, [("present", 1), ("stored", 1)])):
        request = engine.add(prompt, max_tokens=generated)
        engine.run()
        assert world.runs(engine, request) == runs
    before = world.server.totals()["stored"]
    for _ in range(3):
        engine.add(prompt, max_tokens=100)
        engine.run()
    world.settle(engine)
    assert world.server.totals()["stored"] == before


def test_scenario_30_prompt_only(world: World) -> None:
    """``kvledger.store`` "prompt": one chunk, and no growth on repeats."""
    engine = world.engine(options={"chunk_tokens": 256, "store": "prompt"}, num_blocks=160)
    before = world.server.totals()["stored"]
    for generated in (100, 250, 250):
        engine.add(text("row 30", 290), max_tokens=generated)
        engine.run()
    world.settle(engine)
    assert world.server.totals()["stored"] - before == 1


def test_scenario_30_shorter_than_a_chunk(world: World) -> None:
    """Prompt 34, C 544: nothing is stored, and the account says that there is no full chunk."""
    engine = make(world, chunk=544)
    request = engine.add(text("row 30", 34))
    engine.run()
    account = world.accounts(engine)[request]
    assert (account["fates"], account["miss"]) == ([], "no_full_chunk")


def test_scenario_30_finish_on_a_block(world: World) -> None:
    """B 16, prompt 30, three output tokens: KV exists for 32 tokens, and both blocks are stored."""
    engine = make(world, chunk=16)
    request = engine.add(text("row 30", 30), max_tokens=3)
    engine.run()
    assert world.runs(engine, request) == [("stored", 2)]


def test_scenario_30_consumer(world: World) -> None:
    """A consumer stores nothing."""
    engine = make(world, chunk=16, kv_role="kv_consumer")
    before = world.server.totals()["stored"]
    engine.add(text("row 30", 290), max_tokens=50)
    engine.run()
    world.settle(engine)
    assert world.server.totals()["stored"] == before


@SCHEDULERS
def test_scenario_30_last_block_goes_to_another(world: World, is_async: bool) -> None:
    """The same in a pool of two blocks and the null block: the next request gets the blocks in
    the very next step, and what was stored is what the first one had computed."""
    engine = make(world, chunk=16, num_blocks=4, async_scheduling=is_async, prefix_caching=False)
    prompts = [text(f"row 30, owner {n}", 30) for n in range(4)]
    requests = [engine.add(prompt, max_tokens=3) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert world.fates(engine, request) == {"stored": 2}
        assert world.stored_chunks(engine, prompt + engine.outputs[request]) == 2


def test_scenario_30_order_of_lengths(world: World) -> None:
    """C 256: the same chain grows with 100, 250 and 490 generated tokens; nothing twice."""
    engine = make(world)
    before, prompt = world.server.totals()["stored"], text("row 30, growing", 290)
    for generated in (250, 100, 490, 250, 490):
        engine.add(prompt, max_tokens=generated)
        engine.run()
    world.settle(engine)
    assert world.server.totals()["stored"] - before == (290 + 490 - 1) // 256
