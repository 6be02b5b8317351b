"""An engine's life with a real server: opening its namespace, and working in it."""

from __future__ import annotations

import pytest

from conversation import (
    SCHEDULER_FIELDS,
    WORKER_FIELDS,
    Talker,
    attach,
    held,
    hello,
    names,
    reserve,
    store,
)
from kvledger.client import Client
from kvledger.protocol import (
    Abort,
    Chain,
    Commit,
    Describe,
    Done,
    Error,
    ErrorCode,
    Locate,
    Located,
    Match,
    Matched,
    Opened,
    Release,
    Report,
    Reserve,
    Reserved,
    Role,
    Settled,
    pack_u64,
    unpack_u64,
)
from kvledger.reasons import Reason
from servers import RunningServer, StartServer

OBJECT_BYTES = 8192


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


def test_the_namespace_opens_when_everyone_has_described(running: RunningServer) -> None:
    scheduler = Talker(running.socket_path, hello("e", Role.SCHEDULER, 0, 2))
    workers = [Talker(running.socket_path, hello("e", Role.WORKER, r, 2)) for r in (0, 1)]
    workers[1].ask(Describe, fields=WORKER_FIELDS, part_bytes=[100, 4096])
    scheduler.ask(Describe, fields=SCHEDULER_FIELDS)
    early = scheduler.ask(Match, lease=1, group=0, names=names("a", 1))
    assert isinstance(early, Error)
    assert early.code == ErrorCode.NAMESPACE_NOT_OPEN
    assert "rank 0" in early.message
    assert not scheduler.pushes
    workers[0].ask(Describe, fields=WORKER_FIELDS, part_bytes=[100, 4096])
    opened = [talker.wait_push(Opened) for talker in [scheduler, *workers]]
    assert len({push.namespace for push in opened}) == 1
    assert all(push.object_bytes == [4096, 8192] for push in opened)
    assert [push.part_offsets for push in opened] == [[], [0, 0], [128, 4096]]


def test_ranks_that_disagree_are_told_the_field(running: RunningServer) -> None:
    scheduler = Talker(running.socket_path, hello("e", Role.SCHEDULER, 0, 2))
    scheduler.ask(Describe, fields=SCHEDULER_FIELDS)
    first, second = (Talker(running.socket_path, hello("e", Role.WORKER, r, 2)) for r in (0, 1))
    first.ask(Describe, fields=WORKER_FIELDS, part_bytes=[64])
    wrong = {**WORKER_FIELDS, "worker.backend": "other"}
    reply = second.ask(Describe, fields=wrong, part_bytes=[64])
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.RANKS_DISAGREE
    assert "worker.backend" in reply.message
    assert isinstance(second.ask(Describe, fields=WORKER_FIELDS, part_bytes=[64]), Done)
    for talker in (scheduler, first, second):
        talker.wait_push(Opened)


def test_an_object_too_large_is_refused_with_a_remedy(running: RunningServer) -> None:
    scheduler = Talker(running.socket_path, hello("e", Role.SCHEDULER))
    worker = Talker(running.socket_path, hello("e", Role.WORKER))
    scheduler.ask(Describe, fields=SCHEDULER_FIELDS)
    assert isinstance(worker.ask(Describe, fields={}, part_bytes=[64 << 20]), Done)
    error = scheduler.wait_push(Error)
    assert isinstance(error, Error)
    assert error.code == ErrorCode.OBJECT_TOO_LARGE
    assert "memory" in error.message
    reply = scheduler.ask(Match, lease=1, group=0, names=b"")
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.NAMESPACE_NOT_OPEN
    with Client(running.socket_path) as client:
        (engine,) = client.status()["engines"]
    assert engine["trouble"] == error.message
    assert engine["trouble"] in reply.message


def test_equal_engines_share_and_different_ones_do_not(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path, "one")
    store(scheduler, workers, names("a", 3))
    same, same_workers = attach(running.socket_path, "two")
    changed = {**SCHEDULER_FIELDS, "weights.digest": "x"}
    other, other_workers = attach(running.socket_path, "three", scheduler_fields=changed)
    assert same_workers
    assert other_workers
    found = same.ask(Match, lease=1, group=0, names=names("a", 5))
    assert isinstance(found, Matched)
    assert (found.chunks, found.reason) == (3, Reason.NEVER_SEEN)
    missed = other.ask(Match, lease=1, group=0, names=names("a", 3))
    assert isinstance(missed, Matched)
    assert missed.chunks == 0
    with Client(running.socket_path) as client:
        namespaces = client.status()["namespaces"]
    assert [n["nearest"]["fields"] for n in namespaces] == [["weights.digest"]] * 2


def test_store_find_locate_release(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path, world_size=2, part_bytes=(4096,))
    arena = workers[0].connection.map_arena()
    store(scheduler, workers[:1] + workers[1:], names("a", 4))
    found = scheduler.ask(Match, lease=9, group=0, names=names("a", 4))
    assert isinstance(found, Matched)
    assert (found.chunks, found.reason) == (4, "")
    located = scheduler.ask(Locate, lease=9, first=1, count=2)
    assert isinstance(located, Located)
    offsets = unpack_u64(located.offsets)
    assert len(set(offsets)) == 2
    assert all(offset % 4096 == 0 and offset + OBJECT_BYTES <= len(arena) for offset in offsets)
    for first, count, lease, code in (
        (3, 2, 9, ErrorCode.OUT_OF_RANGE),
        (0, 1, 8, ErrorCode.UNKNOWN_LEASE),
    ):
        reply = scheduler.ask(Locate, lease=lease, first=first, count=count)
        assert isinstance(reply, Error)
        assert reply.code == code
    assert held(running) == (1, 0, 0)
    assert isinstance(scheduler.ask(Release, leases=[9, 77]), Done)
    assert held(running) == (0, 0, 0)


def test_bytes_written_by_a_worker_are_read_by_another_engine(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path, "writer")
    store(scheduler, [worker], names("warm", 1))
    chain = Chain(parent=b"", names=names("a", 1))
    reserved = scheduler.ask(Reserve, step=1, group=0, chains=[chain])
    assert isinstance(reserved, Reserved)
    (offset,) = unpack_u64(reserved.chains[0].offsets)
    worker.connection.map_arena()[offset : offset + 5] = b"hello"
    worker.ask(Commit, reservations=reserved.chains[0].reservations)
    reader, (reading_worker,) = attach(running.socket_path, "reader")
    reader.ask(Match, lease=1, group=0, names=names("a", 1))
    located = reader.ask(Locate, lease=1, first=0, count=1)
    assert isinstance(located, Located)
    (found,) = unpack_u64(located.offsets)
    mapping = reading_worker.connection.map_arena(writable=False)
    assert mapping[found : found + 5] == b"hello"


def test_abort_settles_with_its_reason(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    store(scheduler, [worker], names("warm", 1))
    numbers = reserve(scheduler, names("a", 3))
    worker.ask(Abort, reservations=pack_u64(numbers[:1]), reason=Reason.WRITER_FAILED)
    settled = scheduler.wait_push(Settled)
    assert isinstance(settled, Settled)
    assert sorted(unpack_u64(settled.aborted)) == numbers
    assert settled.reason == Reason.WRITER_FAILED
    assert held(running) == (0, 0, 2)  # rank 0 may still be writing the two it was not asked about
    worker.ask(Commit, reservations=pack_u64(numbers[1:]))
    assert held(running) == (0, 0, 0)
    reply = worker.ask(Abort, reservations=b"", reason="no such word")
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.BAD_MESSAGE


def test_clear_is_for_clients_and_spares_what_is_leased(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path)
    store(scheduler, workers, names("a", 2))
    store(scheduler, workers, names("b", 3))
    scheduler.ask(Match, lease=1, group=0, names=names("a", 2))
    with Client(running.socket_path) as client:
        assert client.clear("no such namespace") == 0
        assert client.clear() == 3
        assert client.status()["totals"]["objects"] == 2


def test_reports_are_counted_and_explained(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    fields = {
        "tokens": 100,
        "chunk_tokens": 16,
        "local_tokens": 16,
        "external_tokens": 32,
        "miss": "",
        "dropped": {},
    }
    scheduler.ask(
        Report, request="r-1", fates=[("loaded", 2), ("stored", 4)], imbalance="", **fields
    )
    scheduler.ask(Report, request="r-2", fates=[("stored", 1)], imbalance="one short", **fields)
    refused = worker.ask(Report, request="r-3", fates=[], imbalance="", **fields)
    assert isinstance(refused, Error)
    assert refused.code == ErrorCode.WRONG_ROLE
    with Client(running.socket_path) as client:
        assert [a["request"] for a in client.explain()] == ["r-2", "r-1"]
        (account,) = client.explain("r-1")
        assert account["fates"] == [["loaded", 2], ["stored", 4]]
        accounts = client.status()["accounts"]
    assert (accounts["reports"], accounts["unbalanced"]) == (2, 1)
    assert accounts["fates"] == {"loaded": 2, "stored": 5}
