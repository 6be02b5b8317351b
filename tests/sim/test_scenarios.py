"""Faults that users of such caches have really met, each with its numbers.

The row numbers are those of the list of scenarios that the project keeps. B is the engine's block
size, C the chunk in tokens. Each test ends with the standing checks: books, bytes, leases, events.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from books import (
    NO_LOAD,
    NO_STORE,
    World,
    cold_output,
    count_events,
    lookups,
    text,
)

from kvledger.sim import Kind, SimulatedEngine

SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def scheduled(engine: SimulatedEngine, request_id: str) -> list[int]:
    return [step.scheduled[request_id] for step in engine.steps if request_id in step.scheduled]


def make(world: World, chunk: int = 256, block: int = 16, **fields: Any) -> SimulatedEngine:
    given = {"num_blocks": 160, "max_batched_tokens": 2048, **fields}
    return world.engine(options={"chunk_tokens": chunk}, block_size=block, **given)


def fill_server(engine: SimulatedEngine, tokens: list[int]) -> None:
    """The server holds the text, the engine's own cache is empty."""
    engine.add(tokens)
    engine.run()
    engine.reset_prefix_cache()


def fill_local(engine: SimulatedEngine, tokens: list[int]) -> None:
    """The engine's own cache holds the text; nothing new reaches the server."""
    engine.add(tokens, transfer_params=NO_STORE | NO_LOAD)
    engine.run()


@SCHEDULERS
def test_scenario_01_progress_over_several_steps(world: World, is_async: bool) -> None:
    """Prompt 1024 in steps of 128 and 896: chunks 0 to 3. Wrong: only the first."""
    engine = make(world, num_blocks=256, async_scheduling=is_async)
    other = engine.add(text("other", 1920))  # leaves 128 of 2048 tokens in the first step
    request = engine.add(text("row 1", 1024))
    engine.run()
    assert scheduled(engine, request) == [128, 896]
    assert world.runs(engine, request) == [("stored", 4)]
    assert world.runs(engine, other) == [("stored", 7)]
    assert world.stored_chunks(engine, text("row 1", 1024)) == 4


@SCHEDULERS
def test_scenario_02_external_hit_counts_in_the_bound(world: World, is_async: bool) -> None:
    """External 512, then one step of 512: [512, 1024) is stored. Wrong: nothing."""
    engine = make(world, async_scheduling=is_async)
    prompt = text("row 2", 1024)
    fill_server(engine, prompt[:512])
    request = engine.add(prompt)
    engine.run()
    assert engine.external_hit(request) == 512
    assert scheduled(engine, request) == [512]
    assert world.runs(engine, request) == [("loaded", 2), ("stored", 2)]
    assert world.stored_chunks(engine, prompt) == 4


@pytest.mark.parametrize(("local", "steps"), [(768, [256, 256]), (704, [256, 256, 64])])
def test_scenario_03_overlapping_hits(world: World, local: int, steps: list[int]) -> None:
    """External 512 below a longer local hit: [512, 1280) is stored. Wrong: a hole, or no end."""
    engine = make(world, max_batched_tokens=256)
    prompt = text("row 3", 1280)
    fill_server(engine, prompt[:512])
    fill_local(engine, prompt[:local])
    request = engine.add(prompt)
    engine.run()
    assert (engine.local_hit(request), engine.external_hit(request)) == (local, 0)
    assert scheduled(engine, request) == steps
    assert world.runs(engine, request) == [("present", 2), ("stored", 3)]
    assert world.stored_chunks(engine, prompt) == 5


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_scenario_04_look_up_is_retried(world: World, failures: int) -> None:
    """Allocation fails 1, 2, 5 times: every look-up answers 512, and [512, 1280) is stored."""
    engine = make(world)
    prompt = text("row 4", 1280)
    fill_server(engine, prompt[:512])
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    refused = 0

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        nonlocal refused
        if refused < failures:
            refused += 1
            return None
        return allocate(*arguments, **keywords)

    manager.allocate_slots = refuse
    before = world.server.totals()["lookups"]
    request = engine.add(prompt)
    engine.run()
    assert lookups(engine, request) == [512] * (failures + 1)
    assert world.server.totals()["lookups"] == before + 1
    assert scheduled(engine, request) == [768]
    assert world.runs(engine, request) == [("loaded", 2), ("stored", 3)]
    assert world.stored_chunks(engine, prompt) == 5


def test_scenario_06_many_stores_in_flight(world: World) -> None:
    """Prompt 4096 in eight steps of 512: 256 chunks. (Commits out of order: test_stores.py.)"""
    engine = make(world, chunk=16, num_blocks=300, max_batched_tokens=512, max_model_len=8192)
    request = engine.add(text("row 6", 4096))
    engine.run()
    assert scheduled(engine, request) == [512] * 8
    assert world.runs(engine, request) == [("stored", 256)]
    assert count_events(engine, Kind.SEND_FINISHED) == 0
    assert world.stored_chunks(engine, text("row 6", 4096)) == 256


@SCHEDULERS
@pytest.mark.parametrize("length", [512, 513])
def test_scenario_07_full_prompt_hit(world: World, length: int, is_async: bool) -> None:
    """512 → all 512, one token computed, nothing stored anew; 513 → 512."""
    engine = make(world, async_scheduling=is_async)
    prompt = text("row 7", length)
    fill_server(engine, prompt)
    stored = world.server.totals()["stored"]
    request = engine.add(prompt)
    engine.run()
    assert engine.external_hit(request) == 512
    assert scheduled(engine, request) == [1]
    assert world.server.totals()["stored"] == stored
    assert engine.outputs[request] == cold_output(prompt)


@pytest.mark.parametrize("length", [64, 65, 70])
def test_scenario_08_hit_on_an_exact_multiple(world: World, length: int) -> None:
    """C 16, attention only: 64, 64, 64, asynchronously; the output is a cold engine's."""
    engine = make(world, chunk=16)
    prompt = text("row 8", length)
    fill_server(engine, prompt)
    request = engine.add(prompt, max_tokens=4)
    engine.run()
    assert engine.external_hit(request) == 64
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4)


def test_scenario_09_local_hit_ends_inside_a_chunk(world: World) -> None:
    """External 512, local 288: 224 tokens, into blocks 18 to 31; blocks 0 to 17 are not written."""
    engine = make(world)
    prompt = text("row 9", 600)
    fill_server(engine, prompt[:512])
    fill_local(engine, prompt[:289])
    lanes = engine.workers.ranks[0].memory.lanes
    request = engine.add(prompt)
    engine.begin_step()
    table = list(engine.allocations(request)[0].block_ids[0])
    before = lanes[:, table].copy()
    engine.run_workers()
    changed = [
        index
        for index in range(len(table))
        if not np.array_equal(lanes[:, table[index]], before[:, index])
    ]
    assert engine.external_hit(request) == 224
    assert changed == list(range(18, 32))
    engine.run()
    assert world.runs(engine, request) == [("present", 1), ("loaded", 1)]


@SCHEDULERS
def test_scenario_11_shared_blocks_of_a_running_request(world: World, is_async: bool) -> None:
    """A decodes on blocks 0 to 17 while B, which shares them, loads the rest of 512, C 256."""
    engine = make(world, async_scheduling=is_async)
    prompt = text("row 11", 520)
    fill_server(engine, prompt[:512])
    first = engine.add(prompt[:288], max_tokens=30, transfer_params=NO_STORE | NO_LOAD)
    for _ in range(6):
        engine.step()
    shared = list(engine.allocations(first)[0].block_ids[0][:18])
    lanes = engine.workers.ranks[0].memory.lanes
    before = lanes[:, shared].copy()
    second = engine.add(prompt, max_tokens=30)
    engine.run()
    assert engine.local_hit(second) == 288
    assert engine.external_hit(second) == 224
    assert list(engine.allocations(second)[0].block_ids[0][:18]) == shared
    assert np.array_equal(lanes[:, shared], before)
    assert engine.outputs[first] == cold_output(prompt[:288], max_tokens=30)
    assert engine.outputs[second] == cold_output(prompt, max_tokens=30)


def test_scenario_12_promises_are_whole_blocks(world: World) -> None:
    """Prompt 100: no promise ends inside a block, so no token of a block is taken for computed."""
    engine = make(world, chunk=16)
    prompt = text("row 12", 100)
    fill_server(engine, prompt[:40])
    request = engine.add(prompt)
    engine.run()
    assert engine.external_hit(request) == 32
    assert scheduled(engine, request) == [68]


@SCHEDULERS
def test_scenario_13_preempt_and_resume(world: World, is_async: bool) -> None:
    """Seven blocks, two requests of 34 + 35 tokens: the victim's chunks are found on its resume."""
    engine = make(world, chunk=16, num_blocks=8, async_scheduling=is_async, prefix_caching=False)
    before = world.server.totals()["stored"]
    prompts = [text(f"row 13 {n}", 34) for n in range(2)]
    requests = [engine.add(prompt, max_tokens=35) for prompt in prompts]
    engine.run()
    assert count_events(engine, Kind.PREEMPTED) > 0
    victim = next(r for r in requests if count_events(engine, Kind.PREEMPTED, r))
    assert engine.allocations(victim)[-1].external >= 32
    for prompt, request in zip(prompts, requests, strict=True):
        assert engine.outputs[request] == cold_output(prompt, max_tokens=35)
        assert world.fates(engine, request).total() == (34 + 35 - 1) // 16
    world.settle(engine)
    assert world.server.totals()["stored"] - before == 2 * 4


@SCHEDULERS
def test_scenario_14_block_list_is_replaced(world: World, is_async: bool) -> None:
    """640 tokens preempted, resumed with other ids: stores come from these (see also
    test_preemption.py)."""
    engine = make(world, chunk=16, num_blocks=100, async_scheduling=is_async)
    request = engine.add(text("row 14", 636), max_tokens=60)
    while len(engine.outputs[request]) < 5:
        engine.step()
    while engine.in_flight:
        engine.finish_step()
    engine.reset_prefix_cache(running=True)
    engine.add(text("in its place", 600), max_tokens=4)
    engine.run()
    tables = [admission.block_ids[0] for admission in engine.allocations(request)]
    assert len(tables) == 2
    assert set(tables[0]) != set(tables[1])
    whole = text("row 14", 636) + engine.outputs[request]
    assert world.fates(engine, request).total() == (636 + 60 - 1) // 16
    assert world.stored_chunks(engine, whole) == (len(whole) - 1) // 16


def test_scenario_15_preempted_while_a_store_copies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose slots were late go to another request in the step that reads them: never a
    chunk with foreign bytes."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 0.0)
    engine = make(world, chunk=16, num_blocks=14, max_requests=4, prefix_caching=False)
    prompts = [text(f"row 15 {n}", 60 + n) for n in range(4)]
    requests = [engine.add(prompt, max_tokens=50) for prompt in prompts]
    engine.run()
    assert count_events(engine, Kind.PREEMPTED) > 0
    for prompt, request in zip(prompts, requests, strict=True):
        whole = prompt + engine.outputs[request]
        assert engine.outputs[request] == cold_output(prompt, max_tokens=50)
        assert world.stored_chunks(engine, whole) == (len(whole) - 1) // 16
