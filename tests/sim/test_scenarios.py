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
    wait_until,
)

from kvledger.protocol import Commit
from kvledger.sim import Kind, SimulatedEngine
from kvledger.vllm.layouts import UnsupportedLayoutError

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


class HeldCommits:
    """The first commits of one rank, one for each step that stores; the test sends them.

    Attributes:
        messages: those held back and not sent, in the order in which they were made.
    """

    def __init__(self, engine: SimulatedEngine, rank: int, count: int) -> None:
        self.messages: list[Any] = []
        self._channel = engine.workers.ranks[rank].connector.worker._channel
        self._send, self._left = self._channel.send, count
        self._channel.send = self._hold

    def _hold(self, make: Any, on_reply: Any = None) -> bool:
        if self._left and isinstance(make(0), Commit):
            self._left -= 1
            self.messages.append(make)
            return True
        return bool(self._send(make, on_reply))

    def release(self, position: int = 0) -> None:
        """Send one of those that are left."""
        assert self._send(self.messages.pop(position))


def test_scenario_06_many_stores_in_flight(world: World) -> None:
    """Prompt 4096 in eight steps of 512 whose commits arrive in the order 8, 1, 2 … 7: all 256
    chunks are readable, though other requests have long overwritten the blocks. No chunk is
    readable before those before it, and nothing is ever reported as sent."""
    engine = make(
        world, chunk=16, num_blocks=260, max_batched_tokens=512, max_model_len=8192, ranks=2
    )
    before = world.server.totals()["stored"]
    held = HeldCommits(engine, rank=1, count=8)
    blocks, requests = [], []
    for owner, length in enumerate((4096, 4000)):
        requests.append(engine.add(text(f"row 6, owner {owner}", length)))
        for _ in range(7):
            engine.step()
        blocks.append(set(engine.scheduler.kv_cache_manager.get_block_ids(requests[-1])[0]))
        engine.step()
    assert scheduled(engine, requests[0]) == [512] * 8
    assert len(held.messages) == 8
    assert len(blocks[0] & blocks[1]) > 180
    assert world.server.totals()["stored"] - before == 250
    held.release(7)
    for left in (224, 192, 160, 128, 96, 64, 0):
        held.release()
        wait_until(lambda n=left: world.server.totals()["reservations"] == n, "the commit is noted")
    assert world.runs(engine, requests[0]) == [("stored", 256)]
    assert count_events(engine, Kind.SEND_FINISHED) == 0
    assert world.stored_chunks(engine, text("row 6, owner 0", 4096)) == 256


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


@pytest.mark.parametrize(
    ("length", "hit"), [(100_352, 128 * 784), (94_864, 121 * 784), (90_112, 114 * 784)]
)
def test_scenario_08_long_prompts(world: World, length: int, hit: int) -> None:
    """C 784, attention only: 128, 121 and 114 chunks, and the output of a cold engine."""
    shape = {"layers": 1, "heads": 1, "num_blocks": 6400, "max_batched_tokens": 8192}
    engine = make(world, chunk=784, max_model_len=110_000, **shape)
    prompt = text("row 8, long", length)
    fill_server(engine, prompt)
    request = engine.add(prompt, max_tokens=2)
    engine.run()
    assert engine.external_hit(request) == hit
    assert engine.outputs[request] == cold_output(
        prompt, max_tokens=2, max_model_len=110_000, **shape
    )


def test_scenario_08_other_layers_are_refused(world: World) -> None:
    """Where layers of another kind would bound the hit, this version refuses to start."""
    with pytest.raises(UnsupportedLayoutError, match="2 KV-cache groups"):
        world.engine(windows=(None, 64))


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
    assert lookups(engine, request) == [32]
    assert engine.external_hit(request) == 32
    assert scheduled(engine, request) == [68]
    assert world.runs(engine, request) == [("loaded", 2), ("stored", 4)]


@SCHEDULERS
@pytest.mark.parametrize(("pool", "preempts"), [(7, True), (10, False), (20, False)])
def test_scenario_13_preempt_and_resume(
    world: World, pool: int, preempts: bool, is_async: bool
) -> None:
    """Seven blocks, two requests of 34 + 35 tokens: the victim's chunks are found on its resume,
    the texts are those of a pool of 20 blocks, and no chunk is stored twice."""
    # One more block, which vLLM keeps as the null block.
    engine = make(
        world, chunk=16, num_blocks=pool + 1, async_scheduling=is_async, prefix_caching=False
    )
    before = world.server.totals()["stored"]
    prompts = [text(f"row 13 {n}", 34) for n in range(2)]
    requests = [engine.add(prompt, max_tokens=35) for prompt in prompts]
    engine.run()
    victims = [r for r in requests if count_events(engine, Kind.PREEMPTED, r)]
    assert bool(victims) == preempts
    assert all(engine.allocations(victim)[-1].external >= 32 for victim in victims)
    for prompt, request in zip(prompts, requests, strict=True):
        assert engine.outputs[request] == cold_output(prompt, max_tokens=35, num_blocks=21)
        assert world.fates(engine, request).total() == (34 + 35 - 1) // 16
    world.settle(engine)
    assert world.server.totals()["stored"] - before == 2 * 4


@SCHEDULERS
@pytest.mark.parametrize(("switches", "ids"), [(NO_LOAD, 41), ({}, 40)], ids=["compute", "load"])
def test_scenario_14_block_list_is_replaced(
    world: World, switches: dict[str, Any], ids: int, is_async: bool
) -> None:
    """640 tokens preempted, resumed with 41 ids (to be loaded: with 40, and then another), all of
    them new: what is stored next is read from these. (Wrong: 81 ids, or the old ones.)"""
    engine = make(world, chunk=16, num_blocks=100, async_scheduling=is_async)
    prompt = text("row 14", 639)
    request = engine.add(prompt, max_tokens=60, transfer_params=switches)
    while len(engine.outputs[request]) < 2:
        engine.step()
    while engine.in_flight:
        engine.finish_step()
    engine.reset_prefix_cache(running=True)
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer
    store, read = transfer.store, []

    def noting(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        read.extend(block_ids[:, 0].tolist())
        return int(store(group, block_ids, offsets, part_offset))

    transfer.store = noting
    table: list[int] = []
    while request in engine.scheduler.requests:
        engine.step()
        held = engine.scheduler.kv_cache_manager.get_block_ids(request)
        table = list(held[0]) if any(held) else table
    engine.run()
    old, new = (admission.block_ids[0] for admission in engine.allocations(request))
    assert len(new) == ids
    assert list(new) == table[:ids]
    assert not set(old) & set(table[:41])
    assert engine.external_hit(request) == (0 if switches else 640)
    assert read == table[40 : (639 + 60 - 1) // 16]
    whole = prompt + engine.outputs[request]
    assert world.fates(engine, request).total() == (639 + 60 - 1) // 16
    assert world.stored_chunks(engine, whole) == (639 + 60 - 1) // 16


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
