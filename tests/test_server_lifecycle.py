"""Engines come, work, and go in every way: the books of a real server after each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import RunningServer, StartServer, wait_until
from conversation import (
    SCHEDULER_FIELDS,
    WORKER_FIELDS,
    EngineProcess,
    Talker,
    attach,
    hello,
    names,
)
from kvledger.client import Client
from kvledger.errors import RefusedError
from kvledger.protocol import (
    Abort,
    Chain,
    Closed,
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

OBJECT_BYTES = 8192


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def spawn() -> Iterator[Callable[[], EngineProcess]]:
    started: list[EngineProcess] = []

    def start() -> EngineProcess:
        started.append(EngineProcess())
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def totals(running: RunningServer) -> dict[str, Any]:
    with Client(running.socket_path) as client:
        return client.status()["totals"]


def held(running: RunningServer) -> tuple[int, int, int]:
    """Leases, open reservations, quarantined slots."""
    now = totals(running)
    return now["leases"], now["reservations"], now["quarantined"]


def reserve(scheduler: Talker, packed: bytes, parent: bytes = b"", step: int = 1) -> list[int]:
    reply = scheduler.ask(Reserve, step=step, group=0, chains=[Chain(parent=parent, names=packed)])
    assert isinstance(reply, Reserved)
    return unpack_u64(reply.chains[0].reservations)


def store(scheduler: Talker, workers: list[Talker], packed: bytes) -> None:
    """Wait for room, reserve, and commit on every rank."""
    numbers: list[int] = []

    def reserved() -> bool:
        numbers.extend(reserve(scheduler, packed))
        return bool(numbers)

    wait_until(reserved)
    for worker in workers:
        assert isinstance(worker.ask(Commit, reservations=pack_u64(numbers)), Done)
    settled = scheduler.wait_push(Settled)
    assert isinstance(settled, Settled)
    assert unpack_u64(settled.stored) == numbers


# ---------------------------------------------------------------- opening


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


# ---------------------------------------------------------------- working


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


# ---------------------------------------------------------------- going


def attach_process(
    process: EngineProcess, path: str, engine: str = "e", ranks: int = 1, world_size: int = 1
) -> None:
    """Scheduler and ``ranks`` workers of one engine, all in one other process."""
    assert process.open("s", path, hello(engine, Role.SCHEDULER, 0, world_size)) == ""
    process.ask("s", Describe, fields=SCHEDULER_FIELDS)
    for rank in range(ranks):
        process.open(f"w{rank}", path, hello(engine, Role.WORKER, rank, world_size))
        process.ask(f"w{rank}", Describe, fields=WORKER_FIELDS, part_bytes=[4096])


def occupy(process: EngineProcess) -> None:
    """Hold one lease and two reservations."""
    chain = Chain(parent=b"", names=names("held", 1))
    numbers: list[int] = []

    def reserved() -> bool:
        reply = process.ask("s", Reserve, step=1, group=0, chains=[chain])
        numbers.extend(unpack_u64(reply.chains[0].reservations))
        return bool(numbers)

    wait_until(reserved)
    process.ask("w0", Commit, reservations=pack_u64(numbers))
    process.ask("s", Match, lease=1, group=0, names=names("held", 1))
    chain = Chain(parent=b"", names=names("open", 2))
    process.ask("s", Reserve, step=1, group=0, chains=[chain])


def test_a_killed_engine_holds_nothing(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    engine = spawn()
    attach_process(engine, running.socket_path)
    occupy(engine)
    assert held(running) == (1, 2, 0)
    engine.kill()
    wait_until(lambda: held(running) == (0, 0, 0))
    with Client(running.socket_path) as client:
        assert client.status()["engines"] == []


def test_a_stopped_engine_keeps_what_it_holds(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    """Control: it is the end of the process that frees, not its silence."""
    engine = spawn()
    attach_process(engine, running.socket_path)
    occupy(engine)
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGSTOP)
    other, workers = attach(running.socket_path, "other")
    store(other, workers, names("meanwhile", 2))
    assert held(running) == (1, 2, 0)
    os.kill(engine.process.pid, signal.SIGCONT)
    assert engine.ask("s", Match, lease=1, group=0, names=names("held", 1)).chunks == 1


def test_a_closed_connection_frees_no_slot_while_the_process_lives(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    engine = spawn()
    attach_process(engine, running.socket_path)
    occupy(engine)
    engine.close("w0")
    wait_until(lambda: held(running) == (0, 0, 2))
    with Client(running.socket_path) as client:
        (known,) = client.status()["engines"]
    assert (known["namespace"], known["ranks_attached"]) == ("", [])
    assert engine.wait_push("s", Closed).reason
    engine.kill()
    wait_until(lambda: held(running) == (0, 0, 0))


def test_a_rank_that_attaches_again_lifts_its_quarantine_and_the_generation_changes(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    engine = spawn()
    attach_process(engine, running.socket_path)
    occupy(engine)
    engine.close("w0")
    wait_until(lambda: held(running) == (0, 0, 2))
    attach_process(engine, running.socket_path)
    engine.wait_push("s", Opened)
    assert held(running) == (0, 0, 0)
    found = engine.ask("s", Match, lease=1, group=0, names=names("held", 1))
    assert found.chunks == 1


def test_all_processes_of_an_engine_get_one_new_generation(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path, world_size=2)
    before = {t.connection.welcome.arena_generation for t in [scheduler, *workers]}
    workers[1].connection.close()
    scheduler.wait_closed()
    workers[0].wait_closed()
    scheduler, workers = attach(running.socket_path, world_size=2)
    after = {t.connection.welcome.arena_generation for t in [scheduler, *workers]}
    assert len(before) == len(after) == 1
    assert before != after


def test_the_end_of_one_rank_closes_the_engine(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    rank = spawn()
    scheduler = Talker(running.socket_path, hello("e", Role.SCHEDULER, 0, 2))
    worker = Talker(running.socket_path, hello("e", Role.WORKER, 0, 2))
    rank.open("w", running.socket_path, hello("e", Role.WORKER, 1, 2))
    scheduler.ask(Describe, fields=SCHEDULER_FIELDS)
    worker.ask(Describe, fields=WORKER_FIELDS, part_bytes=[4096])
    rank.ask("w", Describe, fields=WORKER_FIELDS, part_bytes=[4096])
    scheduler.wait_push(Opened)
    wait_until(lambda: bool(reserve(scheduler, names("a", 1))))
    rank.kill()
    scheduler.wait_push(Closed)
    scheduler.wait_closed()
    # Rank 0 lives, and may be writing.
    wait_until(lambda: held(running) == (0, 0, 1))
    again = Talker(running.socket_path, hello("e", Role.WORKER, 0, 2))
    assert held(running) == (0, 0, 1)  # connecting says nothing about what it still writes
    again.ask(Describe, fields=WORKER_FIELDS, part_bytes=[4096])
    wait_until(lambda: held(running) == (0, 0, 0))


def test_death_is_noticed_though_a_child_holds_the_socket(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    engine = spawn()
    attach_process(engine, running.socket_path)
    occupy(engine)
    child = engine.fork_holder("s")
    try:
        engine.kill()
        wait_until(lambda: held(running) == (0, 0, 0))
        os.kill(child, 0)  # it still lives, and still holds the socket
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_engine_id_belongs_to_living_processes(
    running: RunningServer, spawn: Callable[[], EngineProcess]
) -> None:
    engine = spawn()
    attach_process(engine, running.socket_path)
    for greeting in (hello("e", Role.SCHEDULER), hello("e", Role.WORKER)):
        with pytest.raises(RefusedError) as caught:
            Talker(running.socket_path, greeting)
        assert caught.value.code == ErrorCode.ENGINE_ID_IN_USE
    with pytest.raises(RefusedError, match="world_size"):
        Talker(running.socket_path, hello("e", Role.WORKER, 1, 2))
    engine.kill()
    engine.join()
    attach(running.socket_path)


def test_a_new_epoch_is_a_new_namespace(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path)
    store(scheduler, workers, names("a", 2))
    scheduler.ask(Match, lease=1, group=0, names=names("a", 2))
    numbers = reserve(scheduler, names("b", 2))
    scheduler.ask(Describe, fields={**SCHEDULER_FIELDS, "weights.epoch": "1"})
    settled = scheduler.wait_push(Settled)
    assert sorted(unpack_u64(settled.aborted)) == numbers
    assert workers[0].wait_push(Closed).reason
    assert workers[0].wait_push(Opened).namespace == scheduler.wait_push(Opened).namespace
    assert held(running) == (0, 0, 2)
    missed = scheduler.ask(Match, lease=1, group=0, names=names("a", 2))
    assert missed.chunks == 0
    workers[0].ask(Commit, reservations=pack_u64(numbers))
    assert held(running) == (0, 0, 0)
    scheduler.ask(Describe, fields=SCHEDULER_FIELDS)
    scheduler.wait_push(Opened)
    assert scheduler.ask(Match, lease=1, group=0, names=names("a", 2)).chunks == 2


def test_the_same_description_again_changes_nothing(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path)
    store(scheduler, workers, names("a", 2))
    scheduler.ask(Match, lease=1, group=0, names=names("a", 2))
    scheduler.ask(Describe, fields=SCHEDULER_FIELDS)
    assert held(running) == (1, 0, 0)
    assert isinstance(scheduler.ask(Locate, lease=1, first=0, count=2), Located)


# ---------------------------------------------------------------- draining


def test_draining_waits_for_open_reservations(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    store(scheduler, [worker], names("warm", 1))
    numbers = reserve(scheduler, names("a", 1))
    running.process.terminate()
    wait_until(lambda: not os.path.exists(running.socket_path))
    for reply in (
        scheduler.ask(Match, lease=1, group=0, names=names("a", 1)),
        scheduler.ask(Reserve, step=2, group=0, chains=[]),
    ):
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.DRAINING
    assert running.process.poll() is None
    worker.ask(Commit, reservations=pack_u64(numbers))
    assert isinstance(scheduler.wait_push(Settled), Settled)
    assert running.process.wait(10) == 0


def test_draining_does_not_wait_for_ever(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    store(scheduler, [worker], names("warm", 1))
    reserve(scheduler, names("a", 1))
    assert running.terminate() == 0


def test_leases_do_not_hold_up_the_end(running: RunningServer) -> None:
    scheduler, workers = attach(running.socket_path)
    store(scheduler, workers, names("a", 1))
    scheduler.ask(Match, lease=1, group=0, names=names("a", 1))
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 0
    assert not os.path.exists(running.socket_path)
