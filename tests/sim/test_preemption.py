"""Preempted requests: looked up again, loaded again, and nothing they owed is lost.

The outputs of an engine without a connector and with blocks to spare are the yardstick.
"""

from __future__ import annotations

from collections import Counter

import pytest
from books import (
    World,
    await_lookup,
    count_events,
    text,
)

from kvledger.sim import Kind, SimulatedEngine

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])

Prompts = dict[str, tuple[list[int], int]]


def workload() -> Prompts:
    """Six requests that grow past the small pools below."""
    return {f"w{n}": (text(f"work {n}", 60 + 13 * n), 60 + 7 * n) for n in range(6)}


def expected_outputs(prompts: Prompts, ranks: int = 1) -> dict[str, list[int]]:
    with SimulatedEngine(None, num_blocks=512, ranks=ranks) as engine:
        for name, (prompt, count) in prompts.items():
            engine.add(prompt, max_tokens=count, request_id=name)
        engine.run()
        return {name: engine.outputs[name] for name in prompts}


def play(engine: SimulatedEngine, prompts: Prompts) -> dict[str, list[int]]:
    for name, (prompt, count) in prompts.items():
        engine.add(prompt, max_tokens=count, request_id=name)
    while not engine.is_idle:
        engine.step()
        if not engine.waits_for_workers:
            engine.check()
    return {name: engine.outputs[name] for name in prompts}


@CHUNKS
@SCHEDULERS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.pitfall(24, 30, 54)
def test_tiny_pool_gives_the_same_output(
    world: World, chunk: int, is_async: bool, ranks: int, drafts: int
) -> None:
    """Preemptions reload what was stored; every chunk of every request is accounted for, once
    each, and the server can give all of them back."""
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=34,
        max_batched_tokens=64,
        async_scheduling=is_async,
        ranks=ranks,
        drafts=drafts,
    )
    prompts = workload()
    assert play(engine, prompts) == expected_outputs(prompts, ranks)
    assert count_events(engine, Kind.PREEMPTED) > 0
    reloaded = [
        admission.external
        for name in prompts
        for admission in engine.allocations(name)[1:]
        if admission.external
    ]
    assert reloaded, "no preempted request was loaded again"
    for name, (prompt, count) in prompts.items():
        fates = world.fates(engine, name)
        assert set(fates) <= {"stored", "loaded", "present"}
        assert fates.total() == (len(prompt) + count - 1) // chunk
    name, (prompt, count) = list(prompts.items())[-1]
    whole = prompt + engine.outputs[name]
    assert world.stored_chunks(engine, whole) == (len(whole) - 1) // chunk


@CHUNKS
@SCHEDULERS
@pytest.mark.parametrize("drafts", [0, 3])
def test_every_answer_comes_a_step_late(
    world: World, chunk: int, is_async: bool, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits for its slots, so every block is stored a step later, and what a finished or
    preempted request still owes is read by the rescue list. Nothing is lost by it."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 0.0)
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=34,
        max_batched_tokens=64,
        async_scheduling=is_async,
        drafts=drafts,
    )
    prompts = workload()
    assert play(engine, prompts) == expected_outputs(prompts)
    assert count_events(engine, Kind.PREEMPTED) > 0
    total: Counter[str] = Counter()
    for name in prompts:
        total += world.fates(engine, name)
    assert set(total) <= {"stored", "loaded", "present"}
    due = sum((len(prompt) + count - 1) // chunk for prompt, count in prompts.values())
    assert total.total() == due
    for name, (prompt, _) in prompts.items():
        whole = prompt + engine.outputs[name]
        assert world.stored_chunks(engine, whole) == (len(whole) - 1) // chunk


@pytest.mark.pitfall(42)
def test_preempted_while_its_slots_are_on_the_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the preempted request go to another, which overwrites them in that very step:
    what is stored is what the victim had computed."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 1e-3)
    engine = world.engine(num_blocks=10, prefix_caching=False)
    grower = engine.add(text("grower", 60), max_tokens=40)
    engine.step()
    victim_prompt = text("victim", 72)
    victim = engine.add(victim_prompt, max_tokens=20)
    await_lookup(engine, victim)
    world.server.pause()
    while not count_events(engine, Kind.PREEMPTED, victim):
        in_use = [list(ids) for ids in engine.scheduler.kv_cache_manager.get_block_ids(victim)]
        if engine.scheduler.requests[grower].num_tokens == 64:
            world.server.resume()  # the next step needs a block, and takes the victim's
        engine.step()
    taken = set(engine.scheduler.kv_cache_manager.get_block_ids(grower)[0])
    assert taken & set(in_use[0]), "the grower did not get a block of the victim's"
    engine.run()
    assert world.fates(engine, victim).total() == (72 + 20 - 1) // 16
    assert not any("skipped" in fate for fate in world.fates(engine, victim))
    whole = victim_prompt + engine.outputs[victim]
    assert world.stored_chunks(engine, whole) == (72 + 20 - 1) // 16


@SCHEDULERS
@pytest.mark.parametrize("model_runner", [1, 2])
@pytest.mark.pitfall(23, 24)
def test_block_table_is_replaced_on_resume(world: World, is_async: bool, model_runner: int) -> None:
    """640 tokens, preempted, resumed in 41 other blocks: what is stored next comes from these."""
    engine = world.engine(
        num_blocks=128,
        max_batched_tokens=1024,
        async_scheduling=is_async,
        model_runner=model_runner,
    )
    prompt = text("resume", 639)
    request = engine.add(prompt, max_tokens=70)
    while len(engine.outputs[request]) < 5 or engine.in_flight:
        if engine.in_flight and len(engine.outputs[request]) >= 4:
            engine.finish_step()
        else:
            engine.step()
    engine.reset_prefix_cache(running=True)
    other = engine.add(text("other", 700), max_tokens=60, priority=-1)
    engine.run()
    first, *later = engine.allocations(request)
    assert later, "the request was not preempted"
    old, new = set(first.block_ids[0]), set(later[-1].block_ids[0])
    assert len(new) >= 40
    assert old != new
    assert later[-1].external >= 640
    assert engine.outputs[other]
    whole = prompt + engine.outputs[request]
    assert world.stored_chunks(engine, whole) == (len(whole) - 1) // 16
    assert world.fates(engine, request).total() == (639 + 70 - 1) // 16


@CHUNKS
def test_nothing_is_stored_twice(world: World, chunk: int) -> None:
    """I3: preemption after preemption, the server has stored each name once."""
    engine = world.engine(options={"chunk_tokens": chunk}, num_blocks=34, max_batched_tokens=64)
    before = world.server.totals()["stored"]
    prompts = workload()
    play(engine, prompts)
    assert count_events(engine, Kind.PREEMPTED) > 0
    world.settle(engine)
    due = sum((len(prompt) + count - 1) // chunk for prompt, count in prompts.values())
    assert world.server.totals()["stored"] - before == due
