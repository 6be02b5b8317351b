"""Short lives that known bugs spoil: for ``make mutants``; each passes with the code as it is.

The bug is seen by the byte oracle, by the books, or by the server's counters; often by the
standing checks alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from books import (
    World,
    await_lookup,
    part_bytes,
    text,
    wait_until,
)

from kvledger.sim import SimulatedEngine
from kvledger.vllm.transfer import TransferError

SIDE = "kvledger.vllm.scheduler_side"


def test_edges(world: World) -> None:
    """Requests that end in every position relative to a block; the next turn reads them back."""
    engine = world.engine(num_blocks=128)
    for prompt, generated in itertools.product((30, 31, 32), (1, 2, 3)):
        first = engine.add(text(f"edge {prompt} {generated}", prompt), max_tokens=generated)
        engine.run()
        engine.reset_prefix_cache()
        whole = text(f"edge {prompt} {generated}", prompt) + engine.outputs[first]
        second = engine.add([*whole, 7, 7, 7])
        engine.run()
        assert engine.external_hit(second) == (prompt + generated - 1) // 16 * 16
        engine.reset_prefix_cache()


def test_failing_load(world: World) -> None:
    """A load fails; the output must not show it."""
    engine = world.engine(num_blocks=64)
    prompt = text("failing", 160)
    first = engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer

    def fail(*_: Any) -> int:
        del transfer.load
        raise TransferError("a copy that a test lets fail")

    transfer.load = fail
    second = engine.add(prompt)
    engine.run()
    assert engine.outputs[first] == engine.outputs[second]


def test_replaced_server(world: World) -> None:
    """A load is under way when the server is replaced; the new arena holds somebody else's KV."""
    world.lossy = True
    engine = world.engine(num_blocks=64)
    prompt = text("replaced", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    engine.workers.ranks[0].connector.worker._load_budget_bytes = part_bytes(engine)
    engine.add(prompt)
    engine.step()
    world.server.replace()
    other = world.engine(num_blocks=64, options={"namespace": "other"})
    other.add(text("foreign", 400))
    other.run()
    wait_until(lambda: bool(world.status_of(engine).get("namespace")), "the engine is back")
    engine.run()


def test_evicted_while_loading(small_world: World) -> None:
    """A long load, and another engine that fills the small server meanwhile."""
    world = small_world
    shape = {"layers": 4, "heads": 12, "num_blocks": 256, "max_batched_tokens": 4096}
    engine = world.engine(options={"chunk_tokens": 256}, **shape)
    filler = world.engine(options={"chunk_tokens": 256}, **shape)
    prompt = text("loading", 2560)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    engine.workers.ranks[0].connector.worker._load_budget_bytes = part_bytes(engine)
    request = engine.add(prompt)
    engine.step()
    for n in range(30):
        filler.add(text(f"fill {n}", 2560))
        filler.run()
        filler.reset_prefix_cache()
    engine.run()
    assert engine.external_hit(request) == 2560


def test_slot_of_a_failed_rank(world: World) -> None:
    """Rank 0 cannot copy and says so; before rank 1 writes, another engine asks for slots."""
    engine = world.engine(num_blocks=64, ranks=2)
    other = world.engine(num_blocks=64, ranks=2, options={"namespace": "other"})
    foreign = text("foreign", 160)
    ranks = [rank.connector for rank in engine.workers.ranks]
    transfer = ranks[0].worker._attachment.transfer
    save = ranks[1].wait_for_save
    before = world.server.totals()["aborted"]

    def fail(*_: Any) -> int:
        raise TransferError("a copy that a test lets fail")

    def save_late() -> None:
        ranks[1].wait_for_save = save
        wait_until(lambda: world.server.totals()["aborted"] != before, "rank 0 has given up")
        other.add(foreign)
        other.run()
        world.settle(other)
        save()

    transfer.store, ranks[1].wait_for_save = fail, save_late
    engine.add(text("failing rank", 160))
    engine.run()
    other.reset_prefix_cache()
    again = other.add(foreign)
    other.run()
    assert other.external_hit(again) == 160


def test_slow_rank(world: World) -> None:
    """Rank 1 has not written yet when a second engine asks for the same prompt."""
    engine = world.engine(num_blocks=64, ranks=2)
    reader = world.engine(num_blocks=64, ranks=2)
    prompt = text("slow rank", 160)
    last = engine.workers.ranks[1].connector
    save = last.wait_for_save

    def save_late() -> None:
        last.wait_for_save = save
        for _ in range(3):
            world.server.totals()  # the first rank's commit has been read before the last of these
        reader.add(prompt)
        reader.run()
        save()

    last.wait_for_save = save_late
    engine.add(prompt)
    engine.run()


def test_late_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots come a step late, when the request is over and its blocks are another's already."""
    monkeypatch.setattr(f"{SIDE}.ANSWER_WAIT_SECONDS", 0.0)
    engine = world.engine(num_blocks=14, max_requests=1, prefix_caching=False)
    prompts = [text(f"late {n}", 200) for n in range(4)]
    requests = [engine.add(prompt) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert world.runs(engine, request) == [("stored", 12)]
        assert world.stored_chunks(engine, prompt) == 12


def test_preempted_while_owing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slots come at all until the request has been preempted and resumed in other blocks."""
    monkeypatch.setattr(f"{SIDE}.ANSWER_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(f"{SIDE}.LAST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr("kvledger.vllm.lookups.FIRST_WAIT_SECONDS", 0.0)
    engine = world.engine(options={"lookup_deadline_ms": 50.0}, num_blocks=10, prefix_caching=False)
    engine.add(text("grower", 60), max_tokens=40)
    engine.step()
    prompt = text("victim", 72)
    victim = engine.add(prompt, max_tokens=50)
    await_lookup(engine, victim)
    world.server.pause()
    while len(engine.allocations(victim)) < 2:
        engine.step()
    first, second = (set(admission.block_ids[0]) for admission in engine.allocations(victim))
    assert first != second
    world.server.resume()
    world.server.totals()
    engine.run()

    def nothing_reserved() -> bool:
        world.nudge(engine)  # an idle engine does not hear late answers
        return not world.server.totals()["reservations"]

    wait_until(nothing_reserved, "slots that came too late are given back")
    whole = prompt + engine.outputs[victim]
    assert world.stored_chunks(engine, whole) == (72 + 50 - 1) // 16


def test_new_weights(world: World) -> None:
    engine = world.engine(num_blocks=64)
    prompt = text("weights", 160)
    engine.add(prompt)
    world.settle(engine)
    engine.update_weights("new")
    engine.add(prompt)
    engine.run()


def test_aborted_in_the_queue(world: World) -> None:
    engine = world.engine(num_blocks=64)
    prompt = text("abort", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    request = engine.add(prompt)
    wait_until(lambda: world.server.totals()["leases"] == 1, "the hit is leased")
    engine.abort(request)


def test_two_rounds(world: World) -> None:
    """An external hit, and then more than one step of prefill."""
    engine = world.engine(num_blocks=256, max_batched_tokens=256)
    prompt = text("rounds", 1024)
    engine.add(prompt[:512])
    engine.run()
    engine.reset_prefix_cache()
    request = engine.add(prompt)
    engine.run()
    assert world.runs(engine, request) == [("loaded", 32), ("stored", 32)]


def test_ranks_and_layout(world: World) -> None:
    """Parts of 6 KiB, so that two of them do not fit where one does."""
    engine = world.engine(num_blocks=64, ranks=2, layers=4, heads=12)
    prompt = text("parts", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    engine.add(prompt)
    engine.run()


def test_the_oracle_is_not_easily_content() -> None:
    """Control: an engine without a server stores nothing."""
    with SimulatedEngine(None, num_blocks=64) as engine:
        engine.add(text("control", 160))
        engine.run()
        assert engine.connector is None
