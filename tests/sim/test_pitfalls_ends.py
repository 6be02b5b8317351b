"""Pitfalls of ends, of pins and of numbers that people read (docs/conformance.md)."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from books import (
    World,
    cold_output,
    count_events,
    text,
    wait_until,
    warm,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import PrefixCacheStats

from kvledger.sim import Kind, SimulatedEngine
from kvledger.vllm.transfer import TransferError

SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])

SHUTDOWN_SECONDS = 10.0
"""A shutdown takes milliseconds; this is a bound of liveness."""


def fail_next_copy(engine: SimulatedEngine) -> None:
    """The next copy from the server fails."""
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer

    def failing(*_: Any) -> int:
        del transfer.load
        raise TransferError("a copy that a test lets fail")

    transfer.load = failing


# ---------------------------------------------------------------- blocks are not kept


@pytest.mark.pitfall(36)
@SCHEDULERS
def test_no_end_asks_vllm_to_keep_blocks(world: World, is_async: bool) -> None:
    """Stopped, at its length, aborted in the queue, while running and while loading, or ended by
    an error: the answer is no, and nothing is ever reported as sent."""
    prompt = text("kept", 160)
    options = {"keep_failure_policy": True}
    engine = warm(
        world, prompt, options=options, load_failure_policy="fail", async_scheduling=is_async
    )
    end, ends = engine.connector.request_finished_all_groups, []

    def noted(request: Any, block_ids: Any) -> Any:
        answer = end(request, block_ids)
        ends.append((request.status.name, answer))
        return answer

    engine.connector.request_finished_all_groups = noted
    engine.add(text("length", 100), max_tokens=3)
    engine.add(text("stopped", 100), max_tokens=100, stop_token_ids=range(0, 512, 4))
    engine.run()
    engine.abort(engine.add(text("queued", 100)))
    running = engine.add(text("running", 100), max_tokens=50)
    engine.step()
    engine.abort(running)
    loading = engine.add(prompt)
    engine.begin_step()
    engine.abort(loading)
    engine.run()
    engine.reset_prefix_cache()
    fail_next_copy(engine)
    engine.add(prompt)
    engine.run()
    assert {status for status, _ in ends} == {
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_STOPPED",
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
    }
    assert len(ends) == 6
    assert all(answer == (False, None) for _, answer in ends)
    assert count_events(engine, Kind.SEND_FINISHED) == 0


@pytest.mark.pitfall(60, 42)
@pytest.mark.bounds
def test_no_block_is_pinned_for_a_store(world: World) -> None:
    """The server stands still and every store with it; vLLM has all its blocks back at once."""
    engine = world.engine(options={"lookup_deadline_ms": 60.0}, num_blocks=64)
    world.server.pause()
    pool = engine.scheduler.kv_cache_manager.block_pool
    for number in range(5):
        engine.add(text(f"pin {number}", 200), max_tokens=20)
        while not engine.is_idle:
            engine.step()
            assert not engine.connector.has_pending_block_frees()
        assert pool.get_num_free_blocks() == 63
    assert engine.reset_prefix_cache()
    world.server.resume()

    def is_heard() -> bool:
        world.nudge(engine)
        return not engine.connector.scheduler.channel.silent

    wait_until(is_heard, "the server is heard again")
    world.nudge(engine)  # a step more, to tell it what it has missed


@pytest.mark.pitfall(5)
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_a_preempted_request_keeps_what_it_has_sampled(world: World, role: str) -> None:
    """A cache owes nobody a delivery, so vLLM need not throw away what is in flight; for a
    producer that says nothing it does (negative control)."""
    dropped = []
    for owes in (None, True):
        engine = world.engine(
            num_blocks=34, max_batched_tokens=64, async_scheduling=True, kv_role=role
        )
        if owes is not None:
            engine.scheduler.requires_kv_delivery = owes
        requests = [engine.add(text(f"owed {n}", 60 + n), max_tokens=80) for n in range(6)]
        engine.run()
        assert count_events(engine, Kind.PREEMPTED) > 0
        sampled = Counter[str]()
        for step in engine.steps:
            sampled.update({name: len(tokens) for name, tokens in step.sampled.items()})
        dropped.append(sum(sampled[request] - 80 for request in requests))
    assert dropped[0] == 0
    assert dropped[1] > 0 or role == "kv_both"


# ---------------------------------------------------------------- no further step


@pytest.mark.pitfall(41)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_stores_all_and_needs_no_other(world: World, ranks: int) -> None:
    """After its last token the engine never steps again; all is stored, and nothing is held."""
    engine = world.engine(num_blocks=64, ranks=ranks)
    before = world.server.totals()["stored"]
    request = engine.add(text("idle", 100), max_tokens=61)
    while request in engine.scheduler.requests:
        engine.step()

    def is_all_stored() -> bool:
        totals = world.server.totals()
        return totals["stored"] - before == 160 // 16 and not totals["reservations"]

    wait_until(is_all_stored, "the last step's blocks are stored")
    assert world.server.totals()["leases"] == 0


@pytest.mark.pitfall(59)
def test_a_shutdown_loses_nothing_that_was_computed(world: World) -> None:
    """At once after the last step; the server reads what was committed before it hangs up."""
    engine = world.engine(num_blocks=64)
    prompt = text("last", 160)
    engine.add(prompt)
    engine.run()
    world.engines.remove(engine)
    engine.close()
    other = world.engine(num_blocks=64)
    wait_until(lambda: not world.server.totals()["reservations"], "the server has heard the end")
    request = other.add(prompt)
    other.run()
    assert other.external_hit(request) == 160


@pytest.mark.pitfall(59)
@pytest.mark.bounds
@pytest.mark.parametrize("state", ["silent", "dead", "well"])
def test_a_shutdown_does_not_hang(world: World, state: str) -> None:
    """In the middle of a load and of stores, whatever the server does."""
    prompt = text("hang", 160)
    engine = warm(world, prompt)
    engine.workers.ranks[0].connector.worker._load_budget_bytes = 0
    engine.add(prompt)
    engine.add(text("other", 200), max_tokens=50)
    for _ in range(4):
        engine.step()
    if state == "silent":
        world.server.pause()
    if state == "dead":
        world.server.kill()
    world.engines.remove(engine)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < SHUTDOWN_SECONDS
    world.server.resume()
    if state != "dead":
        world.check_nothing_held()


# ---------------------------------------------------------------- numbers


@pytest.mark.pitfall(61, 62, 64)
@pytest.mark.parametrize("ranks", [1, 2])
def test_neither_stats_nor_events_pile_up(world: World, ranks: int) -> None:
    """None are made in this version: the same nothing on both sides, at every step."""
    prompt = text("stats", 160)
    engine = warm(world, prompt, ranks=ranks, pickle_metadata=True)
    sides = [engine.connector, *(rank.connector for rank in engine.workers.ranks)]
    engine.add(prompt, max_tokens=20)
    while not engine.is_idle:
        engine.step()
        for side in sides:
            assert side.get_kv_connector_stats() is None
            assert side.get_kv_connector_kv_cache_events() is None
        assert list(engine.connector.take_events()) == []


@pytest.mark.pitfall(63)
def test_hits_are_attributed_to_host_memory(world: World) -> None:
    """vLLM's own statistics: all that is loaded came from the host, and the sum is right."""
    prompt = text("sources", 160)
    engine = warm(world, prompt)
    stats = engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
    engine.add(prompt)
    engine.add([*prompt[:80], *text("branch", 80)])
    engine.run()
    assert stats.hits >= 160
    assert stats.hits_by_source == {CacheHitSource.HOST: stats.hits}


@pytest.mark.pitfall(65, 17)
def test_a_failed_load_is_not_counted_as_loaded(world: World) -> None:
    """vLLM's number of cached tokens is not corrected; the account's is, and says why."""
    prompt = text("counted", 160)
    engine = warm(world, prompt)
    fail_next_copy(engine)
    request = engine.add(prompt)
    vllm_request = engine.scheduler.requests[request]
    engine.step()
    assert vllm_request.prefill_stats.num_external_cached_tokens == 160
    engine.run()
    account = world.accounts(engine)[request]
    assert account["external_tokens"] == 0
    assert account["miss"] == "load_failed"
    assert engine.outputs[request] == cold_output(prompt)
    assert engine.connector.scheduler.accounts.failed_loads == 1
    engine.reset_prefix_cache()
    again = engine.add(prompt)
    engine.run()
    assert world.accounts(engine)[again]["external_tokens"] == 160
