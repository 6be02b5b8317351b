"""Faults that users have really met, of stored objects: what is evicted, half written, too late.

See test_scenarios.py for the conventions.
"""

from __future__ import annotations

from typing import Any

import pytest
from books import (
    NO_STORE,
    World,
    cold_output,
    loaded_bytes,
    part_bytes,
    text,
    wait_until,
)
from test_scenarios import HeldCommits, fill_server, make

from kvledger.sim import SimulatedEngine
from kvledger.vllm.transfer import TransferError

ROOM = 64
"""Chunks in the smallest arena, one to a page, for the engines of :func:`tight`."""


def tight(world: World, ranks: int = 1, **fields: Any) -> SimulatedEngine:
    """An engine 64 chunks of which (256 tokens each) fill the small server, whatever the ranks."""
    shape = {"layers": 8, "heads": 12 // ranks, "ranks": ranks, "max_model_len": 20_000}
    fields = {"num_blocks": 128, "max_batched_tokens": 512, **shape, **fields}
    return world.engine(options={"chunk_tokens": 256}, **fields)


def leave_room(world: World, chunks: int, **fields: Any) -> tuple[SimulatedEngine, str]:
    """Fill the small server with a leased chain but for so many chunks. Returns the engine that
    holds the lease, and the request to abort in the end."""
    memory = world.server.status()["memory"]
    ballast = tight(world, num_blocks=1100, max_batched_tokens=4096, **fields)
    assert memory["pages"] == ROOM
    assert part_bytes(ballast) * ballast.options.ranks <= memory["page_bytes"]
    assert 2 * part_bytes(ballast) * ballast.options.ranks > memory["page_bytes"]
    prompt = text("ballast", (ROOM - chunks) * 256)
    fill_server(ballast, prompt)
    request = ballast.add(prompt)
    wait_until(lambda: world.server.totals()["leases"] == 1, "the ballast is leased")
    return ballast, request


@pytest.mark.parametrize("touch", [False, True], ids=["stored", "middle-touched"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_scenario_23_eviction_order(small_world: World, ranks: int, touch: bool) -> None:
    """Room for eight chunks; A stores six in three steps of two, then B stores four: two of A's
    go, and a look-up of A finds four. (Wrong: none, since the head went first.) A look-up that
    touches A's middle two before changes nothing. Row 25: with four ranks a chunk is four parts,
    and they go together."""
    world = small_world
    ballast, leased = leave_room(world, 8, ranks=ranks)
    engine, evicted = tight(world, ranks=ranks), world.server.totals()["evicted"]
    prompt = text("row 23", 1536)
    first = engine.add(prompt)
    engine.run()
    assert [step.scheduled[first] for step in engine.steps if first in step.scheduled] == [512] * 3
    engine.reset_prefix_cache()
    if touch:
        engine.add([*prompt[:1024], 1, 2, 3], transfer_params=NO_STORE)
        engine.run()
        engine.reset_prefix_cache()
    assert world.server.totals()["evicted"] == evicted
    second = engine.add(text("row 23, B", 1024))
    engine.run()
    engine.reset_prefix_cache()
    assert world.runs(engine, second) == [("stored", 4)]
    assert world.server.totals()["evicted"] == evicted + 2
    before = loaded_bytes(engine)
    for tokens, chunks in ((prompt, 4), (text("row 23, B", 1024), 4)):
        request = engine.add(tokens, transfer_params=NO_STORE)
        engine.run()
        assert engine.external_hit(request) == chunks * 256
    for rank in engine.workers.ranks:
        loaded = rank.connector.worker.loaded_bytes - before * (rank is engine.workers.ranks[0])
        assert loaded % part_bytes(engine) == 0
        assert loaded >= 8 * part_bytes(engine)
    ballast.abort(leased)


@pytest.mark.parametrize("broken", range(4))
def test_scenario_25_one_rank_has_not_written(world: World, broken: int) -> None:
    """Four ranks; one of them cannot write from the third chunk on: those chunks are a miss on
    every rank, without an exception, and they may be stored again."""
    engine = make(world, ranks=4, max_batched_tokens=256)
    prompt = text("row 25", 1024)
    transfer = engine.workers.ranks[broken].connector.worker._attachment.transfer
    store, copies = transfer.store, 0

    def fail_from_third(*arguments: Any) -> int:
        nonlocal copies
        copies += 1
        if copies >= 3:
            raise TransferError("a copy that a test lets fail")
        return int(store(*arguments))

    transfer.store = fail_from_third
    first = engine.add(prompt)
    engine.run()
    fates = world.fates(engine, first)
    assert fates["skipped:writer_failed"] == 2
    assert fates.total() == 4
    transfer.store = store
    before = [rank.connector.worker.loaded_bytes for rank in engine.workers.ranks]
    engine.reset_prefix_cache()
    second = engine.add(prompt)
    engine.run()
    assert engine.external_hit(second) == 512
    loaded = {
        rank.connector.worker.loaded_bytes - earlier
        for rank, earlier in zip(engine.workers.ranks, before, strict=True)
    }
    assert loaded == {part_bytes(engine) * 2}
    assert world.stored_chunks(engine, prompt) == 4


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


def test_scenario_26_reader_in_the_middle_of_a_write(world: World) -> None:
    """Half of the chunks are copied when another engine asks for the prompt: it computes all of
    it, and is told that somebody is writing; a later one finds the whole."""
    writer, reader = (make(world, chunk=16) for _ in range(2))
    prompt = text("row 26, middle", 512)
    transfer = writer.workers.ranks[0].connector.worker._attachment.transfer
    store, seen = transfer.store, []

    def pausing(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        transfer.store = store
        half = len(offsets) // 2
        done = store(group, block_ids[:half], offsets[:half], part_offset)
        seen.append(reader.add(prompt, max_tokens=4))
        reader.run()
        return int(done + store(group, block_ids[half:], offsets[half:], part_offset))

    transfer.store = pausing
    request = writer.add(prompt, max_tokens=4)
    writer.run()
    assert reader.external_hit(seen[0]) == 0
    assert world.accounts(reader)[seen[0]]["miss"] == "being_written"
    assert reader.outputs[seen[0]] == writer.outputs[request] == cold_output(prompt, max_tokens=4)
    assert world.fates(reader, seen[0]) == {"skipped:being_written": 32}
    assert world.fates(writer, request) == {"stored": 32}
    assert world.stored_chunks(writer, prompt) == 32


def test_scenario_26_write_that_outlives_its_reservation(world: World) -> None:
    """A rank goes many steps on without a commit: the reservation ends, nothing of it is ever
    readable, the slot belongs to nobody else until that rank has spoken, and its late commit
    publishes nothing."""
    engine = make(world, chunk=16, ranks=2)
    prompt = text("row 26, late", 512)
    held = HeldCommits(engine, rank=1, count=1)
    lost = engine.add(prompt)
    engine.run(max_steps=3)
    engine.add(text("row 26, long", 40), max_tokens=150)  # asks for a slot at every 16th step
    engine.run()
    assert world.server.totals()["quarantined"] == 32
    assert world.fates(engine, lost) == {"skipped:reservation_expired": 32}
    engine.reset_prefix_cache()
    again = engine.add(prompt)
    engine.run()
    assert engine.external_hit(again) == 0
    assert world.runs(engine, again) == [("stored", 32)]
    stored = world.server.totals()["stored"]
    held.release()
    wait_until(lambda: not world.server.totals()["quarantined"], "the slots are free")
    assert world.server.totals()["stored"] == stored
    assert world.stored_chunks(engine, prompt) == 32


def test_scenario_26_late_writer_harms_nobody(small_world: World) -> None:
    """One rank has failed, the other has not written yet when a second engine wants all the
    memory there is: the late write hits no slot of the second engine's."""
    world = small_world
    engine, other = (tight(world, ranks=2, max_batched_tokens=4096) for _ in range(2))
    foreign = text("row 26, foreign", 60 * 256)
    late = engine.workers.ranks[1].connector
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer
    save, before = late.wait_for_save, world.server.totals()

    def fail(*_: Any) -> int:
        raise TransferError("a copy that a test lets fail")

    def save_late() -> None:
        late.wait_for_save = save
        wait_until(
            lambda: world.server.totals()["aborted"] != before["aborted"], "rank 0 has given up"
        )
        for n in range(20):
            other.add(foreign[n * 768 : n * 768 + 1024])
            other.run()
            other.reset_prefix_cache()
        world.settle(other)
        assert world.server.totals()["evicted"] > before["evicted"]
        assert world.server.totals()["quarantined"] == 6
        save()

    transfer.store, late.wait_for_save = fail, save_late
    engine.add(text("row 26, writer", 6 * 256))
    engine.run()
    del transfer.store
    hits = 0
    for n in range(20):
        request = other.add(foreign[n * 768 : n * 768 + 1024], transfer_params=NO_STORE)
        other.run()  # the oracle compares each block
        other.reset_prefix_cache()
        hits += other.external_hit(request) // 256
    assert hits >= ROOM - 6 - 4
