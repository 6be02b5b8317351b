"""More faults that users have really met: aborts, failures, evictions, deaths, edges.

See test_scenarios.py for the conventions.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from books import (
    NO_STORE,
    World,
    cold_output,
    count_events,
    lookups,
    part_bytes,
    text,
    wait_until,
)
from sim_server import SOURCE, Server
from test_scenarios import SCHEDULERS, fill_local, fill_server, make

from kvledger.sim import Kind
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
    """External 1024 with local 1024: the lease goes at admission. With 640: chunks 2 and 3 are
    read (640 lies inside chunk 2), and the lease goes after."""
    engine = make(world)
    prompt = text("row 18", 1100)
    fill_server(engine, prompt[:1024])
    fill_local(engine, prompt[:local])
    request = engine.add(prompt, max_tokens=30)
    engine.step()
    if not external:
        wait_until(lambda: world.server.totals()["leases"] == 0, "the lease is given back")
        assert request in engine.scheduler.requests
    engine.run()
    assert (engine.local_hit(request), engine.external_hit(request)) == (local, external)


@SCHEDULERS
def test_scenario_19_abort_during_a_load(world: World, is_async: bool) -> None:
    """The engine survives, blocks are freed once, nothing is ever reported as sent."""
    engine = make(world, async_scheduling=is_async)
    prompt = text("row 19", 1024)
    fill_server(engine, prompt)
    for moment in range(3):
        engine.workers.ranks[0].connector.worker._load_budget_bytes = part_bytes(engine)
        request = engine.add(prompt)
        engine.begin_step()
        if moment > 0:
            engine.run_workers()
        if moment > 1:
            engine.finish_step()
        engine.abort(request)
        engine.run()
        engine.check()
    assert count_events(engine, Kind.SEND_FINISHED) == 0


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_scenario_20_short_retrieve(world: World, arrived: int) -> None:
    """768 tokens promised; 0, 256 or 512 of them arrive, then an error: output of a cold run."""
    engine = make(world)
    prompt = text("row 20", 900)
    fill_server(engine, prompt[:768])
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer
    load = transfer.load

    def short(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        transfer.load = load
        if arrived:
            load(group, block_ids[:arrived], offsets[:arrived], part_offset)
        raise TransferError("a copy that a test lets end early")

    transfer.load = short
    request = engine.add(prompt, max_tokens=4)
    engine.run()
    assert count_events(engine, Kind.LOAD_FAILED, request) == 1
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4)
    assert world.runs(engine, request) == [("present", 3)]
    assert world.stored_chunks(engine, prompt) == 3


@pytest.mark.parametrize("touch", [False, True])
def test_scenario_23_eviction_order(small_world: World, touch: bool) -> None:
    """A stored in steps of two chunks, then others until A loses some: its head stays. A look-up
    that touches only A's middle does not change that."""
    world = small_world
    shape = {"layers": 4, "heads": 12, "num_blocks": 256, "max_batched_tokens": 512}
    engine = world.engine(options={"chunk_tokens": 256}, **shape)
    prompt = text("row 23", 1536)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    if touch:
        engine.add([*prompt[:1024], 1, 2, 3], transfer_params=NO_STORE)
        engine.run()
        engine.reset_prefix_cache()
    before, evicted = world.server.totals()["evicted"], 0
    for n in range(40):
        engine.add(text(f"filler {n}", 1024))
        engine.run()
        engine.reset_prefix_cache()
        evicted = world.server.totals()["evicted"] - before
        if evicted:
            break
    request = engine.add(prompt, transfer_params=NO_STORE)
    engine.run()
    assert 0 < evicted < 6
    assert engine.external_hit(request) // 256 == 6 - evicted


def test_scenario_25_siblings_of_a_chunk(small_world: World) -> None:
    """Ranks' parts go together; a chunk that one rank has not written is a miss for all."""
    world = small_world
    shape = {"layers": 4, "heads": 6, "num_blocks": 256, "max_batched_tokens": 2048, "ranks": 2}
    engine = world.engine(options={"chunk_tokens": 256}, **shape)
    broken = text("row 25 broken", 1024)
    transfer = engine.workers.ranks[1].connector.worker._attachment.transfer

    def fail(*_: Any) -> int:
        del transfer.store
        raise TransferError("a copy that a test lets fail")

    transfer.store = fail
    lost = engine.add(broken)
    engine.run()
    assert world.fates(engine, lost) == {"skipped:writer_failed": 4}
    engine.reset_prefix_cache()
    again = engine.add(broken)
    engine.run()
    assert engine.external_hit(again) == 0
    assert world.runs(engine, again) == [("stored", 4)]
    for n in range(40):
        engine.add(text(f"row 25 {n}", 1024))
        engine.run()
        engine.reset_prefix_cache()
    assert world.server.totals()["evicted"] > 0
    for n in range(40):
        request = engine.add(text(f"row 25 {n}", 1024), transfer_params=NO_STORE)
        engine.run()
        assert engine.external_hit(request) % 256 == 0
        engine.reset_prefix_cache()


def test_scenario_26_failed_writes(world: World) -> None:
    """Every n-th write fails: never readable, never gibberish, and it may be tried again."""
    engine = make(world, chunk=16, max_batched_tokens=64)
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer
    store = transfer.store
    prompt = text("row 26", 512)
    for n in range(1, 8):
        count = 0

        def fail_nth(*arguments: Any, n: int = n) -> int:
            nonlocal count
            count += 1
            if count == n:
                raise TransferError("a write that a test lets fail")
            return int(store(*arguments))

        transfer.store = fail_nth
        salt = f"write {n}"
        request = engine.add(prompt, salt=salt)
        engine.run()
        fates = world.fates(engine, request)
        assert fates.total() == 32
        engine.reset_prefix_cache()
        transfer.store = store
        again = engine.add(prompt, salt=salt)
        engine.run()
        assert engine.outputs[again] == engine.outputs[request]
        engine.reset_prefix_cache()
        last = engine.add(prompt, salt=salt)
        engine.run()
        assert engine.external_hit(last) == 512
        engine.reset_prefix_cache()


ENGINE_IN_A_PROCESS = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from books import World, text
from sim_server import Server
for file in Path({directory!r}).glob("model-*/*"):
    os.utime(file)  # younger than the process, as for the test's own engines
server = Server(Path({directory!r}))
world = World(server, {namespace!r})
engine = world.engine(num_blocks=160, max_batched_tokens=64)
engine.add(text("row 28", 512))
engine.run()
world.settle(engine)
engine.reset_prefix_cache()
engine.add(text("row 28", 512))
engine.add(text("row 28 more", 1024))
engine.begin_step()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def engine_process(world: World) -> Iterator[subprocess.Popen[str]]:
    """An engine in a process of its own, with a load and stores under way."""
    code = ENGINE_IN_A_PROCESS.format(
        path=[str(SOURCE), str(Path(__file__).parent)],
        directory=str(world.server.socket.parent),
        namespace=world.namespace,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            break
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_scenario_28_engine_is_killed(world: World, engine_process: subprocess.Popen[str]) -> None:
    """(ii) All that it held is free at once; what it had stored is there for others."""
    totals = world.server.totals()
    assert totals["leases"] or totals["reservations"]
    engine_process.send_signal(signal.SIGKILL)
    engine_process.wait()
    world.check_nothing_held()
    engine = world.engine(num_blocks=160, max_batched_tokens=64)
    request = engine.add(text("row 28", 512))
    engine.run()
    assert engine.external_hit(request) == 512


def test_scenario_28_server_is_restarted_at_once(tmp_path: Path) -> None:
    """(i) The next boot is recognised, however short the gap; (iii) no idle engine is forgotten."""
    server = Server(tmp_path)
    server.start()
    world = World(server, "row 28")
    world.lossy = True
    try:
        engine = make(world, chunk=16)
        prompt = text("row 28", 512)
        for _ in range(3):
            fill_server(engine, prompt)
            server.replace()
            wait_until(lambda: bool(world.status_of(engine).get("namespace")), "it is back")
            request = engine.add(prompt)
            engine.run()
            assert engine.external_hit(request) == 0
            world.settle(engine)
            engine.reset_prefix_cache()
            again = engine.add(prompt)
            engine.run()
            assert engine.external_hit(again) == 512
            engine.reset_prefix_cache()
        world.check()
    finally:
        for engine in world.engines:
            engine.close()
        server.close()


def test_scenario_29_identity(world: World) -> None:
    """The same tokens with another salt, boot of the hash root, epoch or version: all miss; in a
    fresh engine with the same everything: a hit. (More fields: test_sharing.py.)"""
    engine = make(world, chunk=16)
    prompt = text("row 29", 32)
    fill_server(engine, prompt)
    hits = {}
    for salt in ("a", "b", None):
        request = engine.add(prompt, salt=salt, transfer_params=NO_STORE)
        engine.run()
        hits[salt] = engine.external_hit(request)
        engine.reset_prefix_cache()
    same = make(world, chunk=16)
    request = same.add(prompt)
    same.run()
    hits["same"] = same.external_hit(request)
    engine.reset_prefix_cache(connector=True)
    world.attach(engine)
    request = engine.add(prompt)
    engine.run()
    hits["epoch"] = engine.external_hit(request)
    assert hits == {"a": 0, "b": 0, None: 32, "same": 32, "epoch": 0}


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
