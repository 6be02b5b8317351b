"""Connections and links against servers that stop, die and come back."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from conversation import SCHEDULER_FIELDS, WORKER_FIELDS, Talker, attach, hello, names
from kvledger.client import Client, Connection, Link
from kvledger.connection import HANDSHAKE_SECONDS
from kvledger.errors import ArenaError, ProtocolError, ServerUnavailableError
from kvledger.protocol import MAX_FRAME_BYTES, Describe, Hello, Match, Opened, Role, Status
from servers import RunningServer, StartServer, wait_until

MakeLink = Callable[..., Link]


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    links: list[Link] = []

    def make(path: str, role: Role = Role.CLIENT, **options: object) -> Link:
        engine = "" if role is Role.CLIENT else "e"
        links.append(Link(path, lambda: hello(engine, role), **options))
        return links[-1]

    yield make
    for link in links:
        link.close()


def test_a_connection_knows_the_arena(server: StartServer) -> None:
    running = server(memory="64MiB")
    scheduler, (worker,) = attach(running.socket_path)
    welcome = worker.connection.welcome
    assert welcome.boot == scheduler.connection.welcome.boot
    assert len(worker.connection.map_arena()) == welcome.arena_bytes == 63 << 20
    with Client(running.socket_path) as client:
        assert client.status()["server"]["boot"] == welcome.boot


def test_clients_get_no_arena(server: StartServer) -> None:
    connection = Connection.open(server().socket_path, hello("", Role.CLIENT))
    assert connection.arena_fd == -1
    with pytest.raises(ArenaError, match="client"):
        connection.map_arena()
    connection.close()


def test_receive_waits_no_longer_than_told(server: StartServer) -> None:
    connection = Connection.open(server().socket_path, hello("", Role.CLIENT))
    begin = time.perf_counter()
    assert connection.receive() == []
    assert connection.receive(0.05) == []
    assert 0.05 <= time.perf_counter() - begin < 0.5
    connection.close()


def test_after_close_nothing_is_sent_or_received(server: StartServer) -> None:
    connection = Connection.open(server().socket_path, hello("", Role.CLIENT))
    connection.close()
    connection.close()
    assert connection.closed
    assert not connection.send(Status(id=2))
    assert connection.receive(1.0) == []


def test_a_message_larger_than_a_frame_is_an_error_of_the_caller(server: StartServer) -> None:
    connection = Connection.open(server().socket_path, hello("", Role.CLIENT))
    with pytest.raises(ProtocolError, match="fewer names"):
        connection.send(Match(id=2, lease=1, group=0, names=bytes(MAX_FRAME_BYTES)))
    assert connection.send(Status(id=3))
    connection.close()


def test_a_stopped_server_never_blocks(server: StartServer) -> None:
    running = server()
    scheduler, _workers = attach(running.socket_path)
    connection = scheduler.connection
    os.kill(running.process.pid, signal.SIGSTOP)
    packed = names("a", 4096)
    slowest = 0.0
    sent = 0
    while True:
        begin = time.perf_counter()
        took = connection.send(Match(id=sent + 100, lease=1, group=0, names=packed))
        connection.receive()
        slowest = max(slowest, time.perf_counter() - begin)
        if not took:
            break
        sent += 1
    assert not connection.closed
    assert 4 << 20 < sent * len(packed) < 16 << 20
    assert slowest < 5
    os.kill(running.process.pid, signal.SIGCONT)
    answered: list[int] = []
    end = time.monotonic() + 20
    while len(answered) < sent and time.monotonic() < end:
        answered += [reply.id for reply in connection.receive(0.5)]
    assert answered == list(range(100, 100 + sent))


def test_client_says_what_to_do_without_a_server(tmp_path: object) -> None:
    with pytest.raises(ServerUnavailableError, match="kvledger serve"):
        Client(f"{tmp_path}/none.sock")


def test_client_gives_up_on_a_stopped_server(server: StartServer) -> None:
    running = server()
    os.kill(running.process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(ServerUnavailableError, match="stopped"):
        Client(running.socket_path, timeout_seconds=0.2)
    assert time.monotonic() - begin < 5


def test_a_link_follows_the_server(
    server: StartServer, make_link: MakeLink, caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    path = f"{tmp_path}/later.sock"
    with caplog.at_level(logging.INFO, logger="kvledger"):
        link = make_link(path)
        wait_until(lambda: bool(link.last_error))
        assert link.connection is None
        first = server(socket_path=path)
        wait_until(lambda: link.connection is not None)
        before = link.connection
        assert before is not None
        assert link.last_error == ""
        first.kill()
        wait_until(lambda: bool(link.last_error))
        assert link.connection is None
        assert before.closed
        server(socket_path=path)
        wait_until(lambda: link.connection is not None)
    after = link.connection
    assert after is not None
    assert after.welcome.boot != before.welcome.boot
    assert link.connects == 2
    said = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    absent = ("WARNING", "going on without cache")
    there = ("WARNING", f"the kvledger server on {path} is there")
    lost = ("INFO", f"lost the kvledger server on {path}")
    assert said == [absent, there, lost, absent, there]


@pytest.mark.pitfall(41)
def test_an_idle_engine_attaches_again_by_itself(
    server: StartServer, make_link: MakeLink, tmp_path: object
) -> None:
    path = f"{tmp_path}/again.sock"

    def describe(fields: dict[str, str], parts: list[int]) -> Callable[[Connection], None]:
        return lambda connection: (
            connection.send(Describe(id=connection.next_id(), fields=fields, part_bytes=parts)),
            None,
        )[1]

    first = server(socket_path=path)
    scheduler = make_link(path, Role.SCHEDULER, on_connected=describe(SCHEDULER_FIELDS, []))
    worker = make_link(path, Role.WORKER, on_connected=describe(WORKER_FIELDS, [4096]))
    wait_until(lambda: scheduler.connection is not None and worker.connection is not None)

    def is_open(running: RunningServer) -> bool:
        with Client(running.socket_path) as client:
            return [bool(e["namespace"]) for e in client.status()["engines"]] == [True]

    wait_until(lambda: is_open(first))
    first.kill()
    second = server(socket_path=path)
    wait_until(lambda: is_open(second))


def test_one_process_of_an_engine_announces_an_absent_server(
    make_link: MakeLink, caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    links = [make_link(f"{tmp_path}/none.sock", announce=announce) for announce in (True, False)]
    wait_until(lambda: all(link.last_error for link in links))
    assert len(caplog.records) == 1


def test_a_link_reconnects_when_its_user_closes_the_connection(
    server: StartServer, make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    link = make_link(server().socket_path)
    wait_until(lambda: link.connection is not None)
    before = link.connection
    assert before is not None
    before.close()
    assert link.connection is None
    wait_until(lambda: link.connection is not None)
    assert link.connects == 2
    assert not caplog.records, "a server that is there again at once is no news for an operator"


def test_a_link_to_a_stopped_server_closes_at_once(
    server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    running = server()
    os.kill(running.process.pid, signal.SIGSTOP)
    attempted = threading.Event()

    def make_hello() -> Hello:
        attempted.set()
        return hello("", Role.CLIENT)

    link = Link(running.socket_path, make_hello)
    assert attempted.wait(20)
    begin = time.monotonic()
    link.close()
    assert time.monotonic() - begin < HANDSHAKE_SECONDS / 2
    assert not caplog.records


def test_a_failing_callback_counts_as_a_failed_attempt(
    server: StartServer, make_link: MakeLink
) -> None:
    attempts: list[Connection] = []

    def fail_once(connection: Connection) -> None:
        attempts.append(connection)
        if len(attempts) == 1:
            raise ArenaError("cannot map")

    link = make_link(server().socket_path, on_connected=fail_once)
    wait_until(lambda: link.connection is not None)
    assert attempts[0].closed
    assert link.connection is attempts[1]
    assert link.connects == 1


def test_a_refused_link_says_why_and_goes_on_trying(
    server: StartServer, make_link: MakeLink
) -> None:
    running = server()
    holder = os.fork()
    if holder == 0:
        kept = Talker(running.socket_path, hello("e", Role.WORKER))
        assert kept.connection.arena_fd >= 0
        signal.pause()
    try:

        def held() -> bool:
            with Client(running.socket_path) as client:
                return bool(client.status()["engines"])

        wait_until(held)
        link = make_link(running.socket_path, Role.WORKER)
        wait_until(lambda: "alive" in link.last_error)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    wait_until(lambda: link.connection is not None)


def test_an_idle_link_uses_no_processor_time(server: StartServer, make_link: MakeLink) -> None:
    running = server()
    links = [make_link(running.socket_path) for _ in range(8)]
    wait_until(lambda: all(link.connection is not None for link in links))
    begin = time.process_time()
    time.sleep(1.0)  # what is measured is this second of idleness
    assert time.process_time() - begin < 0.05


def test_closing_a_link_ends_its_thread_and_connection(server: StartServer) -> None:
    running = server()
    link = Link(running.socket_path, lambda: hello("", Role.CLIENT))
    wait_until(lambda: link.connection is not None)
    link.close()
    link.close()
    assert link.connection is None

    def sessions() -> int:
        with Client(running.socket_path) as client:
            count: int = client.status()["server"]["sessions"]
            return count

    wait_until(lambda: sessions() == 1)


def test_a_descriptor_free_engine_sees_opened_again_after_a_restart(
    server: StartServer, tmp_path: object
) -> None:
    path = f"{tmp_path}/boot.sock"
    first = server(socket_path=path)
    scheduler, workers = attach(path)
    boot = scheduler.connection.welcome.boot
    first.kill()
    scheduler.wait_closed()
    workers[0].wait_closed()
    server(socket_path=path)
    again, again_workers = attach(path)
    assert again.connection.welcome.boot != boot
    assert not any(isinstance(push, Opened) for push in again.pushes)
    assert again_workers
