"""Loads against a real server: told once, answered once, and failed rather than late."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

from conversation import names
from kvledger.naming import unpack_names
from kvledger.protocol import unpack_u64
from kvledger.vllm.accounts import run_lengths
from kvledger.vllm.loads import Loads
from kvledger.vllm.lookups import Lookups
from kvledger.vllm.metadata import SKIP_BLOCK, LoadPlan
from kvledger.vllm.tracked import Tracked
from servers import RunningServer, StartServer, wait_until
from vllm_desk import BLOCK_TOKENS, Desk, go_on, names_of, stop, tracked

LONG_SECONDS = 30.0


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def desk(running: RunningServer) -> Iterator[Desk]:
    with Desk(running.socket_path) as desk:
        desk.open()
        yield desk


class Loading:
    """Loads and the look-ups they stand on, of one engine."""

    def __init__(self, desk: Desk, blocks_per_chunk: int, deadline_seconds: float) -> None:
        self.desk = desk
        self.blocks_per_chunk = blocks_per_chunk
        self.lookups = Lookups(desk.channel, LONG_SECONDS)
        self.loads = Loads(
            desk.channel,
            chunk_tokens=BLOCK_TOKENS * blocks_per_chunk,
            deadline_seconds=deadline_seconds,
        )

    def stored(self, item: Tracked) -> list[int]:
        """The server has all chunks of the request; offsets of their slots."""
        return self.desk.store(b"".join(names_of(item)))

    def look_up(self, item: Tracked) -> None:
        lookup = self.lookups.ask(names_of(item), None)
        self.desk.poll_until(lambda: lookup.answered)
        item.lookup = lookup

    def begin(self, item: Tracked, local_tokens: int = 0) -> list[int]:
        """vLLM admits the request; its block table."""
        assert item.lookup is not None
        chunk_tokens = BLOCK_TOKENS * self.blocks_per_chunk
        external = (item.lookup.chunks or 0) * chunk_tokens - local_tokens
        table = list(range(101, 101 + item.named_chunks * self.blocks_per_chunk))
        item.local_tokens = local_tokens
        item.account.known_chunks = item.lookup.chunks or 0
        self.loads.begin(item, table, external)
        return table

    def located(self) -> None:
        self.desk.poll_until(lambda: not self.loads.waiting)


@pytest.fixture
def loading(desk: Desk) -> Loading:
    return Loading(desk, 1, LONG_SECONDS)


def request(chunks: int, blocks_per_chunk: int = 1, text: str = "a") -> Tracked:
    return tracked(chunks, text=text, blocks_per_chunk=blocks_per_chunk, valid=False)


def begun(loading: Loading, chunks: int = 3, text: str = "a") -> Tracked:
    """A load whose slots are known."""
    item = request(chunks, text=text)
    loading.stored(item)
    loading.look_up(item)
    loading.begin(item)
    loading.located()
    return item


# ---------------------------------------------------------------- plans


def test_a_load_is_told_once_and_names_its_slots(loading: Loading) -> None:
    item = request(3)
    offsets = loading.stored(item)
    loading.look_up(item)
    table = loading.begin(item)
    assert run_lengths(item.account) == [("loading", 3)]
    loading.located()
    plans, failed, cancelled = loading.loads.take()
    ((request_id, (copies,)),) = [(plan.request_id, plan.copies) for plan in plans]
    assert request_id == item.request.request_id
    assert unpack_u64(copies.offsets) == offsets
    assert np.frombuffer(copies.block_ids, np.int32).tolist() == table
    assert copies.reservations == b""
    assert (failed, cancelled) == ((), ())
    assert loading.loads.take() == ((), (), ())
    assert loading.loads.end(request_id, arrived=True) is item
    assert run_lengths(item.account) == [("loaded", 3)]
    assert item.external_tokens == 3 * BLOCK_TOKENS
    assert item.load is None
    assert loading.loads.end(request_id, arrived=True) is None, "each load ends once"


def test_local_blocks_are_not_written(desk: Desk) -> None:
    """Chunks of 4 blocks; the local hit ends anywhere in them."""
    width, chunks = 4, 3
    loading = Loading(desk, width, LONG_SECONDS)
    for local_blocks in range(width * chunks):
        item = request(chunks, width, text=f"local {local_blocks}")
        offsets = loading.stored(item)
        loading.look_up(item)
        table = loading.begin(item, local_tokens=local_blocks * BLOCK_TOKENS)
        loading.located()
        ((plan,), _, _) = loading.loads.take()
        (copies,) = plan.copies
        first = local_blocks // width
        wanted = [table[b] if b >= local_blocks else SKIP_BLOCK for b in range(width * chunks)]
        assert np.frombuffer(copies.block_ids, np.int32).tolist() == wanted[first * width :]
        assert unpack_u64(copies.offsets) == offsets[first:]
        assert len(offsets[first:]) == chunks - first
        loading.loads.end(plan.request_id, arrived=True)
        assert item.external_tokens == (width * chunks - local_blocks) * BLOCK_TOKENS


def test_nobody_else_loads_what_is_being_loaded(loading: Loading) -> None:
    item = begun(loading)
    mine, other = names_of(item), unpack_names(names("other", 1))[0]
    assert all(loading.loads.loading(name) for name in mine)
    assert not loading.loads.loading(other)
    loading.loads.take()
    loading.loads.end(item.request.request_id, arrived=True)
    assert not any(loading.loads.loading(name) for name in mine)


# ---------------------------------------------------------------- failures


def test_a_hit_that_was_let_go_is_not_loaded(loading: Loading) -> None:
    item = request(3)
    loading.stored(item)
    loading.look_up(item)
    assert item.lookup is not None
    loading.lookups.release(item.lookup)
    loading.begin(item)
    assert loading.loads.waiting == 0, "the server is not asked"
    name = item.request.request_id
    assert loading.loads.take() == ((), (name,), ())
    plans, failed, _ = loading.loads.take()
    assert (plans, failed) == ((), ()), "it fails once"
    loading.loads.end(name, arrived=False)
    assert item.account.fates == []
    assert item.external_tokens == 0
    assert loading.loads.active == {}


@pytest.mark.pitfall(58)
def test_a_lease_that_the_server_does_not_know_fails(loading: Loading) -> None:
    item = request(3)
    loading.stored(item)
    loading.look_up(item)
    assert item.lookup is not None
    item.lookup.lease += 1000
    loading.begin(item)
    loading.located()
    assert loading.loads.take() == ((), (item.request.request_id,), ())


def test_slots_that_are_not_known_in_time_fail(desk: Desk, running: RunningServer) -> None:
    loading = Loading(desk, 1, deadline_seconds=0.02)
    item = request(3)
    loading.stored(item)
    loading.look_up(item)
    stop(running)
    loading.begin(item)
    begin = time.monotonic()
    taken: list[tuple[tuple[LoadPlan, ...], tuple[str, ...], tuple[str, ...]]] = []

    def failed() -> bool:
        taken.append(loading.loads.take())
        return taken[-1] != ((), (), ())

    wait_until(failed)
    assert time.monotonic() - begin >= 0.02
    assert taken[-1] == ((), (item.request.request_id,), ())
    go_on(running)
    loading.located()
    plans, again, _ = loading.loads.take()
    assert (plans, again) == ((), ()), "slots that come too late start nothing"
    loading.loads.end(item.request.request_id, arrived=False)
    assert loading.loads.take() == ((), (), ())


def test_a_load_that_takes_too_long_is_cancelled_until_it_is_answered(loading: Loading) -> None:
    item = begun(loading)
    name = item.request.request_id
    plans, _, _ = loading.loads.take()
    assert [plan.request_id for plan in plans] == [name]
    assert item.load is not None
    assert LONG_SECONDS / 2 < item.load.deadline - time.monotonic() <= LONG_SECONDS
    item.load.deadline = time.monotonic() - 1e-3
    assert loading.loads.take() == ((), (), (name,))
    assert loading.loads.take() == ((), (), (name,)), "not answered yet"
    loading.loads.end(name, arrived=False)
    assert loading.loads.take() == ((), (), ())
    assert item.account.fates == []


def test_a_reset_fails_all(loading: Loading) -> None:
    told = begun(loading, text="told")
    loading.loads.take()
    untold = begun(loading, text="untold")
    loading.loads.fail_all()
    assert loading.loads.take() == (
        (),
        (untold.request.request_id,),
        (told.request.request_id,),
    )


def test_a_lost_server_fails_what_no_worker_was_told(
    loading: Loading, desk: Desk, running: RunningServer
) -> None:
    told = begun(loading, text="told")
    loading.loads.take()
    untold = begun(loading, text="untold")
    desk.on_gone = loading.loads.lost
    running.kill()
    desk.poll_until(lambda: desk.count("lost"))
    assert loading.loads.take() == ((), (untold.request.request_id,), ())
    assert loading.loads.end(told.request.request_id, arrived=True) is told
    assert run_lengths(told.account) == [("loaded", 3)]


def test_a_server_that_is_gone_is_not_asked(
    loading: Loading, desk: Desk, running: RunningServer
) -> None:
    item = request(3)
    loading.stored(item)
    loading.look_up(item)
    running.kill()
    desk.poll_until(lambda: desk.count("lost"))
    loading.begin(item)
    assert loading.loads.waiting == 0
    assert loading.loads.take() == ((), (item.request.request_id,), ())


def test_loads_we_know_nothing_of_fail_once(loading: Loading) -> None:
    loading.loads.orphans.append("unknown")
    assert loading.loads.take() == ((), ("unknown",), ())
    assert loading.loads.take() == ((), (), ())
    assert loading.loads.end("unknown", arrived=False) is None
