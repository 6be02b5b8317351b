"""Engines and servers go in every way; the books of a real server after each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from conversation import (
    SCHEDULER_FIELDS,
    WORKER_FIELDS,
    EngineProcess,
    Talker,
    attach,
    held,
    hello,
    names,
    reserve,
    store,
)
from kvledger.client import Client
from kvledger.errors import RefusedError
from kvledger.protocol import (
    Chain,
    Closed,
    Commit,
    Describe,
    Error,
    ErrorCode,
    Locate,
    Located,
    Match,
    Opened,
    Reserve,
    Role,
    Settled,
    pack_u64,
    unpack_u64,
)
from servers import RunningServer, StartServer, wait_until


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


@pytest.mark.pitfall(59)
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


@pytest.mark.pitfall(59)
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
