"""What is stored, when, and what the account says of the rest.

The expectations follow from token counts: a chunk is due as soon as the KV of its last token is
valid, and no chunk is due for the last token that was sampled (it was never fed).
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from books import (
    World,
    await_lookup,
    part_bytes,
    text,
    wait_until,
)

from kvledger.protocol import Commit
from kvledger.vllm.transfer import TransferError

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])


@CHUNKS
@pytest.mark.parametrize("budget", [16, 40, 1024])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.pitfall(43)
def test_chunked_prefill(world: World, chunk: int, budget: int, is_async: bool) -> None:
    """Any budget stores the same chunks: the whole ones, once each."""
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=256,
        max_batched_tokens=budget,
        async_scheduling=is_async,
    )
    lengths = [1, 15, 16, 17, 63, 64, 65, 300]
    requests = {n: engine.add(text(f"prefill {n}", n)) for n in lengths}
    engine.run()
    expected = {n: [("stored", n // chunk)] if n >= chunk else [] for n in lengths}
    assert {n: world.runs(engine, request) for n, request in requests.items()} == expected
    assert world.stored_chunks(engine, text("prefill 300", 300)) == 300 // chunk


@CHUNKS
def test_every_step_stores_what_it_has_made_valid(world: World, chunk: int) -> None:
    """After each step the server holds exactly the chunks that are valid by then."""
    engine = world.engine(
        options={"chunk_tokens": chunk}, num_blocks=128, max_batched_tokens=56, max_requests=1
    )
    before = world.server.totals()["stored"]
    request = engine.add(text("steps", 400), max_tokens=60)
    valid = 0
    while not engine.is_idle:
        record = engine.step()
        assert record is not None
        valid += record.scheduled.get(request, 0)
        assert world.server.totals()["stored"] - before == valid // chunk
    assert valid == 400 + 60 - 1


@CHUNKS
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_multi_turn_finds_generated_tokens(world: World, chunk: int, is_async: bool) -> None:
    """The next turn loads ⌊(prompt + generated − 1) / chunk⌋ chunks of the last one."""
    engine = world.engine(
        options={"chunk_tokens": chunk}, num_blocks=256, async_scheduling=is_async
    )
    history = text("turns", 50)
    known = 0
    for turn in range(4):
        engine.reset_prefix_cache()
        request = engine.add(history, max_tokens=45)
        engine.run()
        assert engine.external_hit(request) == known * chunk
        chunks = (len(history) + 45 - 1) // chunk
        assert (
            world.fates(engine, request)
            == Counter({"loaded": known, "stored": chunks - known}) - Counter()
        )
        history = history + engine.outputs[request] + text(f"turn {turn}", 20)
        known = chunks


@pytest.mark.pitfall(16, 57)
def test_many_stores_in_flight_for_one_request(world: World) -> None:
    """Eight stores of one request, committed by the second rank in the order 8, 1, 2 … 7.

    Nothing is readable before its last commit, and everything is after.
    """
    engine = world.engine(num_blocks=300, max_batched_tokens=512, max_model_len=8192, ranks=2)
    held: list[Any] = []
    channel = engine.workers.ranks[1].connector.worker._channel
    send = channel.send

    def hold_commits(make: Any, on_reply: Any = None) -> bool:
        if isinstance(make(0), Commit):
            held.append(make)
            return True
        return bool(send(make, on_reply))

    channel.send = hold_commits
    before = world.server.totals()["stored"]
    request = engine.add(text("in flight", 4096), max_tokens=1)
    for _ in range(8):
        engine.step()
    assert len(held) == 8
    assert world.server.totals()["stored"] == before
    assert world.server.totals()["reservations"] == 256
    channel.send = send
    # The eighth batch is complete first, but nobody can read it without what precedes it.
    left = [256, 224, 192, 160, 128, 96, 64, 0]
    for make, reservations in zip([held[7], *held[:7]], left, strict=True):
        assert send(make)
        wait_until(
            lambda n=reservations: world.server.totals()["reservations"] == n,
            "the commit is taken note of",
        )
    assert world.runs(engine, request) == [("stored", 256)]
    assert world.stored_chunks(engine, text("in flight", 4096)) == 256


@pytest.mark.pitfall(16, 57)
def test_orphaned_chunks_are_not_readable_before_their_parents(world: World) -> None:
    """While only the eighth of eight stores is complete, a look-up finds nothing."""
    engine = world.engine(num_blocks=300, max_batched_tokens=512, max_model_len=8192, ranks=2)
    held: list[Any] = []
    channel = engine.workers.ranks[1].connector.worker._channel
    send = channel.send

    def hold_commits(make: Any, on_reply: Any = None) -> bool:
        if isinstance(make(0), Commit) and len(held) < 7:
            held.append(make)
            return True
        return bool(send(make, on_reply))

    channel.send = hold_commits
    prompt = text("orphans", 4096)
    request = engine.add(prompt, max_tokens=1)
    for _ in range(8):
        engine.step()
    assert world.stored_chunks(engine, prompt, settled=False) == 0
    channel.send = send
    for make in held:
        assert send(make)
    assert world.runs(engine, request) == [("stored", 256)]
    assert world.stored_chunks(engine, prompt) == 256


# ---------------------------------------------------------------- rescue list


@CHUNKS
@pytest.mark.parametrize("ranks", [1, 2])
def test_rescue_of_a_finished_request(
    world: World, chunk: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots come after the request's last step: its blocks are read before the next one."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 1e-3)
    engine = world.engine(options={"chunk_tokens": chunk}, num_blocks=64, ranks=ranks)
    prompt = text("rescue", 200)
    request = engine.add(prompt)
    await_lookup(engine, request)
    world.server.pause()
    engine.step()
    assert engine.outputs[request]
    world.server.resume()
    engine.run()
    assert world.runs(engine, request) == [("stored", 200 // chunk)]
    assert world.stored_chunks(engine, prompt) == 200 // chunk


@pytest.mark.pitfall(42)
def test_rescue_reads_before_the_new_owner_writes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks go to another request in the very step that reads them."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 1e-3)
    engine = world.engine(num_blocks=14, prefix_caching=False)
    first, second = text("first", 200), text("second", 200)
    request = engine.add(first)
    await_lookup(engine, request)
    world.server.pause()
    engine.step()
    assert engine.outputs[request]
    world.server.resume()
    other = engine.add(second)
    engine.run()
    shared = set(engine.allocations(request)[0].block_ids[0]) & set(
        engine.allocations(other)[0].block_ids[0]
    )
    assert len(shared) >= 12
    assert world.runs(engine, request) == [("stored", 12)]
    assert world.runs(engine, other) == [("stored", 12)]
    assert world.stored_chunks(engine, first) == 12
    assert world.stored_chunks(engine, second) == 12


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model_runner", [1, 2])
@pytest.mark.pitfall(29, 54)
def test_accepted_drafts_of_the_last_step(world: World, is_async: bool, model_runner: int) -> None:
    """What the last step's accepted drafts complete is stored too, rejected ones never are."""
    engine = world.engine(
        num_blocks=256,
        drafts=4,
        draft_acceptance=0.8,
        async_scheduling=is_async,
        model_runner=model_runner,
    )
    requests = {
        n: engine.add(text(f"drafts {n}", 40 + n), max_tokens=20 + n % 7) for n in range(40)
    }
    engine.run()
    for n, request in requests.items():
        chunks = (40 + n + 20 + n % 7 - 1) // 16
        assert world.runs(engine, request) == [("stored", chunks)]
        if n % 10 == 0:
            whole = text(f"drafts {n}", 40 + n) + engine.outputs[request]
            assert world.stored_chunks(engine, whole) == chunks


def test_rescue_behind_a_chunk_that_is_just_being_committed(world: World) -> None:
    """Two prompts with one head end in the same step; the second's tail waits for the first's
    head. Its last chance comes while the commit of the head is still on its way: it asks again."""
    engine = world.engine(num_blocks=128, max_batched_tokens=1024)
    worker, stores = engine.workers.ranks[0].connector.worker, engine.connector.scheduler.stores
    send, ask = worker._channel.send, stores.ask
    held: list[Any] = []

    def hold_commits(make: Any, _on_reply: Any = None) -> bool:
        held.append(make)
        return True

    def ask_and_let_go(*arguments: Any) -> bool:
        asked = ask(*arguments)
        if engine.step_count > first_step:
            while held:
                send(held.pop(0))  # the server reads this after the question
        return bool(asked)

    worker._channel.send, stores.ask = hold_commits, ask_and_let_go
    head = text("head", 160)
    requests = [engine.add(head + text(f"tail {n}", 80)) for n in range(2)]
    first_step = engine.step_count + 1
    engine.step()
    worker._channel.send = send
    engine.run()
    assert world.runs(engine, requests[0]) == [("stored", 15)]
    assert world.runs(engine, requests[1]) == [("present", 10), ("stored", 5)]


def test_slot_that_is_given_up_before_the_workers_are_told(world: World) -> None:
    """The head's copy fails; the server gives the next chunk's slot up between its grant and the
    plan. No worker will ever let go of that slot, so the scheduler's side must."""
    engine = world.engine(num_blocks=64, max_batched_tokens=32)
    worker, stores = engine.workers.ranks[0].connector.worker, engine.connector.scheduler.stores
    send, ask = worker._channel.send, stores.ask
    transfer = worker._attachment.transfer
    held: list[Any] = []
    before = world.server.totals()["aborted"].get("writer_failed", 0)

    def hold(make: Any, on_reply: Any = None) -> bool:
        held.append((make, on_reply))
        return True

    def fail(*_: Any) -> int:
        del transfer.store
        raise TransferError("a copy that a test lets fail")

    def ask_and_let_go(*arguments: Any) -> bool:
        asked = ask(*arguments)
        if held:
            assert send(*held.pop(0))
            wait_until(
                lambda: world.server.totals()["aborted"].get("writer_failed", 0) == before + 4,
                "the server gives up what hangs on the failed chunk",
            )
        return bool(asked)

    transfer.store, worker._channel.send, stores.ask = fail, hold, ask_and_let_go
    request = engine.add(text("given up", 128))
    engine.step()
    worker._channel.send = send
    engine.step()
    engine.run()
    assert world.fates(engine, request).total() == 8
    world.check_nothing_held()


# ---------------------------------------------------------------- I3: once


def test_equal_prompts_are_stored_once(world: World) -> None:
    """Four equal prompts in one batch: each chunk is copied out once."""
    engine = world.engine(num_blocks=128, max_batched_tokens=1024, prefix_caching=False)
    worker = engine.workers.ranks[0].connector.worker
    before = worker.stored_bytes
    prompts = [text("same", 160)] * 4
    requests = [engine.add(prompt) for prompt in prompts]
    engine.run()
    assert worker.stored_bytes - before == 10 * part_bytes(engine)
    total = sum((world.fates(engine, request) for request in requests), Counter[str]())
    assert total["stored"] == 10
    assert total.total() == 40
    assert set(total) <= {"stored", "present", "skipped:being_written", "loaded"}


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.pitfall(4, 49)
def test_layouts_and_ranks(world: World, layout: str, ranks: int) -> None:
    """Every layout of the KV tensors comes back byte for byte."""
    engine = world.engine(
        options={"chunk_tokens": 32}, num_blocks=64, layers=3, ranks=ranks, layout=layout
    )
    prompt = text("layout", 330)
    first = engine.add(prompt, max_tokens=3)
    engine.run()
    engine.reset_prefix_cache()
    second = engine.add(prompt, max_tokens=3)
    engine.run()
    assert engine.external_hit(second) == 320
    assert engine.outputs[first] == engine.outputs[second]
    worker = engine.workers.ranks[ranks - 1].connector.worker
    assert worker.stored_bytes == worker.loaded_bytes == 10 * part_bytes(engine)


@pytest.mark.pitfall(31)
def test_finish_on_a_block_boundary(world: World) -> None:
    """For every way a request's end can lie relative to a block: the last full block is stored."""
    engine = world.engine(num_blocks=128)
    for prompt, generated in itertools.product((30, 31, 32, 33), (1, 2, 3, 17)):
        request = engine.add(text(f"edge {prompt} {generated}", prompt), max_tokens=generated)
        engine.run()
        chunks = (prompt + generated - 1) // 16
        assert world.runs(engine, request) == [("stored", chunks)]
