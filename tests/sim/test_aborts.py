"""A client that goes away: at every stage of a request's life nothing of it stays behind.

The standing checks (no lease, no reservation, no block held, balanced books) end every test.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from books import World, count_events, part_bytes, text, wait_until

from kvledger.sim import Kind, SimulatedEngine

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
SALTS = pytest.mark.parametrize("salt", [None, "pepper"])

PROMPT = 512


def warm(world: World, chunk: int, is_async: bool, salt: str | None) -> SimulatedEngine:
    """An engine whose server holds the prompt, and whose own cache is empty."""
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=128,
        max_batched_tokens=128,
        async_scheduling=is_async,
    )
    engine.add(text("abort", PROMPT), salt=salt)
    engine.run()
    engine.reset_prefix_cache()
    return engine


def ends_clean(world: World, engine: SimulatedEngine, chunk: int, salt: str | None) -> None:
    """Idle, nothing held, everything evictable; and the same prompt is a hit as before."""
    engine.run()
    world.settle(engine)
    world.check_nothing_held()
    engine.reset_prefix_cache()
    again = engine.add(text("abort", PROMPT), salt=salt)
    engine.run()
    assert engine.external_hit(again) == PROMPT // chunk * chunk
    objects = world.server.totals()["objects"]
    world.check_nothing_held()
    world.server.clear()
    assert world.server.totals()["objects"] == 0 < objects


@CHUNKS
@SALTS
@pytest.mark.pitfall(41)
def test_queued_before_the_answer(world: World, chunk: int, salt: str | None) -> None:
    """The server has not answered: the late answer's lease is given back."""
    engine = warm(world, chunk, False, salt)
    world.server.pause()
    request = engine.add(text("abort", PROMPT), salt=salt)
    engine.abort(request)
    world.server.resume()
    ends_clean(world, engine, chunk, salt)


@CHUNKS
@SALTS
def test_queued_after_the_answer(world: World, chunk: int, salt: str | None) -> None:
    """The hit is leased while the request is queued, and not any more after."""
    engine = warm(world, chunk, False, salt)
    request = engine.add(text("abort", PROMPT), salt=salt)
    wait_until(lambda: world.server.totals()["leases"] == 1, "the hit is leased")
    engine.abort(request)
    ends_clean(world, engine, chunk, salt)


@CHUNKS
@SALTS
@SCHEDULERS
@pytest.mark.parametrize("when", ["before the workers", "before the update", "steps later"])
@pytest.mark.pitfall(34, 35, 36)
def test_during_a_load(
    world: World, chunk: int, salt: str | None, is_async: bool, when: str
) -> None:
    """vLLM keeps the blocks until the load is answered: it is, exactly once."""
    engine = warm(world, chunk, is_async, salt)
    if when == "steps later":
        engine.workers.ranks[0].connector.worker._load_budget_bytes = part_bytes(engine)
    request = engine.add(text("abort", PROMPT), salt=salt)
    engine.begin_step()
    assert engine.external_hit(request) == PROMPT
    if when != "before the workers":
        engine.run_workers()
    if when == "steps later":
        engine.finish_step()
        engine.step()
    engine.abort(request)
    ends_clean(world, engine, chunk, salt)
    answers = count_events(engine, Kind.LOAD_FINISHED, request)
    answers += count_events(engine, Kind.LOAD_FAILED, request)
    assert answers == 1


def phases(engine: SimulatedEngine) -> dict[str, Callable[[], object]]:
    return {
        "scheduled": engine.begin_step,
        "executed": engine.run_workers,
        "updated": engine.finish_step,
    }


@CHUNKS
@SCHEDULERS
@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("phase", ["scheduled", "executed", "updated"])
def test_at_every_phase_of_a_cold_life(
    world: World, chunk: int, is_async: bool, step: int, phase: str
) -> None:
    """Chunked prefill in four steps, then decoding; the abort comes after each phase of each.

    What was valid by then is stored or skipped with a reason, and what is stored is right.
    """
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=64,
        max_batched_tokens=64,
        async_scheduling=is_async,
    )
    prompt = text("phases", 250)
    request = engine.add(prompt, max_tokens=20)
    for _ in range(step):
        for run in phases(engine).values():
            run()
    for name, run in phases(engine).items():
        run()
        if name == phase:
            engine.abort(request)
    engine.run()
    valid = min(64 * (step + (phase != "scheduled")), 250) + max(0, step - 3)
    fates = world.fates(engine, request)
    assert fates.total() <= (250 + 20) // chunk
    assert fates["stored"] >= min(64 * step, 250) // chunk
    assert set(fates) <= {"stored", "skipped:engine_idle", "skipped:reserve_deadline"}
    found = world.stored_chunks(engine, prompt)
    assert found >= min(valid, 250) // chunk - (phase == "scheduled")


@pytest.mark.parametrize("drafts", [0, 3])
def test_after_it_has_finished_in_flight(world: World, drafts: int) -> None:
    """Asynchronous scheduling: another step with the request is in flight when it ends; the
    client's abort comes between, or after, and changes nothing."""
    engine = world.engine(num_blocks=64, async_scheduling=True, drafts=drafts)
    prompt = text("flight", 100)
    for late in (False, True):
        request = engine.add(prompt, max_tokens=40, stop_token_ids=range(0, 512, 16))
        while request in engine.scheduler.requests:
            engine.step()
        if late:
            engine.run()
        engine.abort(request)
        engine.run()
        chunks = (len(prompt) + len(engine.outputs[request]) - 1) // 16
        assert world.fates(engine, request).total() == chunks


@SCHEDULERS
def test_many_aborts_of_waiting_twins(world: World, is_async: bool) -> None:
    """Equal prompts wait for the first one's load; each is aborted in turn, the last one lives."""
    engine = warm(world, 16, is_async, None)
    engine.workers.ranks[0].connector.worker._load_budget_bytes = 4 * part_bytes(engine)
    requests = [engine.add(text("abort", PROMPT), max_tokens=3) for _ in range(5)]
    for request in requests[:-1]:
        engine.step()
        engine.abort(request)
    engine.run()
    assert len(engine.outputs[requests[-1]]) == 3
    ends_clean(world, engine, 16, None)
