"""A real server and what a socket can throw at it."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import threading

import msgspec
import pytest

from conversation import Talker, attach, hello, names
from kvledger.client import Client, Connection
from kvledger.errors import RefusedError, ServerUnavailableError
from kvledger.protocol import (
    MAX_FRAME_BYTES,
    Commit,
    Done,
    Error,
    ErrorCode,
    FrameBuffer,
    Hello,
    Match,
    Matched,
    Reply,
    Request,
    Role,
    Status,
    StatusReply,
    decode_reply,
    encode,
)
from kvledger.server.session import MAX_CLIENTS, MAX_SESSIONS
from servers import RunningServer, StartServer, wait_until


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


class RawSocket:
    """Bytes to and from the server, nothing checked."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(path)

    def replies_until_closed(self) -> list[Reply]:
        frames, replies = FrameBuffer(), []
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return replies
            if not data:
                return replies
            replies += [decode_reply(payload) for payload in frames.feed(data)]


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def client_hello() -> Hello:
    return hello("", Role.CLIENT)


def still_serves(running: RunningServer) -> None:
    with Client(running.socket_path) as client:
        assert client.status()["server"]["pid"] == running.process.pid


BAD_FIRST_BYTES = {
    "not msgpack": (frame(b"\xc1\xc1"), ErrorCode.BAD_MESSAGE),
    "empty frame": (frame(b""), ErrorCode.BAD_MESSAGE),
    "not a message": (frame(msgspec.msgpack.encode([1, 2, 3])), ErrorCode.BAD_MESSAGE),
    "oversize": (struct.pack("<I", MAX_FRAME_BYTES + 1), ErrorCode.BAD_MESSAGE),
    "status before hello": (encode(Status(id=7)), ErrorCode.HELLO_FIRST),
    "endless greeting": (struct.pack("<I", 1 << 20) + bytes(100_000), ErrorCode.HELLO_FIRST),
    "wrong version": (encode(hello("", Role.WORKER, protocol=99)), ErrorCode.WRONG_VERSION),
    "no pidfd": (encode(hello("e", Role.WORKER)), ErrorCode.NO_PIDFD),
    "impossible rank": (encode(hello("e", Role.WORKER, 1, 1)), ErrorCode.BAD_MESSAGE),
    "no engine id": (encode(hello("", Role.WORKER)), ErrorCode.BAD_MESSAGE),
}


@pytest.mark.parametrize("case", BAD_FIRST_BYTES)
def test_bad_first_bytes_get_one_error_and_the_end(running: RunningServer, case: str) -> None:
    data, code = BAD_FIRST_BYTES[case]
    raw = RawSocket(running.socket_path)
    raw.socket.sendall(data)
    (reply,) = raw.replies_until_closed()
    assert isinstance(reply, Error)
    assert reply.code == code
    assert reply.message
    still_serves(running)


def test_a_descriptor_that_is_no_pidfd_is_refused(running: RunningServer) -> None:
    raw = RawSocket(running.socket_path)
    fd = os.memfd_create("no pidfd")
    socket.send_fds(raw.socket, [encode(hello("e", Role.WORKER))], [fd])
    (reply,) = raw.replies_until_closed()
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.NO_PIDFD
    os.close(fd)


def test_a_pidfd_of_another_process_is_refused(running: RunningServer) -> None:
    raw = RawSocket(running.socket_path)
    fd = os.pidfd_open(running.process.pid)
    socket.send_fds(raw.socket, [encode(hello("e", Role.WORKER))], [fd])
    (reply,) = raw.replies_until_closed()
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.NO_PIDFD
    os.close(fd)


def test_descriptors_do_not_leak(running: RunningServer) -> None:
    def open_files() -> int:
        return len(os.listdir(f"/proc/{running.process.pid}/fd"))

    before = open_files()
    spare = [os.memfd_create(f"spare{i}") for i in range(4)]
    for _ in range(20):
        raw = RawSocket(running.socket_path)
        socket.send_fds(raw.socket, [encode(hello("e", Role.WORKER))], spare)
        raw.replies_until_closed()
        raw = RawSocket(running.socket_path)
        socket.send_fds(raw.socket, [b"\0"], spare)
        raw.socket.close()
        scheduler, workers = attach(running.socket_path)
        for talker in [scheduler, *workers]:
            talker.connection.close()
    for fd in spare:
        os.close(fd)
    # This process' two roles stay known, each by its pidfd: it lives, and was attached.
    wait_until(lambda: open_files() <= before + 2)


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_never_bring_it_down(running: RunningServer, seed: int) -> None:
    """Replay with the seed in the test's name."""
    rng = random.Random(seed)
    greeting = encode(client_hello())
    messages: list[Request] = [Status(id=3), Match(id=4, lease=1, group=0, names=b"x" * 32)]
    for _ in range(30):
        raw = RawSocket(running.socket_path)
        data = bytearray(greeting + b"".join(encode(rng.choice(messages)) for _ in range(3)))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = bytearray(rng.randbytes(rng.randint(1, 2000)))
        with_end = bytes(data[: rng.randint(1, len(data))])
        try:
            for start in range(0, len(with_end), 7):
                raw.socket.sendall(with_end[start : start + 7])
            raw.socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # closed at the first bytes that are no message
        for reply in raw.replies_until_closed():
            assert not (isinstance(reply, Error) and reply.code == ErrorCode.INTERNAL), reply
        raw.socket.close()
    still_serves(running)
    assert "Traceback" not in running.log()


def test_a_truncated_frame_harms_nobody(running: RunningServer) -> None:
    raw = RawSocket(running.socket_path)
    raw.socket.sendall(encode(client_hello()) + encode(Status(id=2))[:-1])
    still_serves(running)
    raw.socket.close()
    still_serves(running)


def test_bytes_may_come_one_by_one(running: RunningServer) -> None:
    raw = RawSocket(running.socket_path)
    for byte in encode(client_hello()) + encode(Status(id=2)):
        raw.socket.sendall(bytes([byte]))
    raw.socket.shutdown(socket.SHUT_WR)
    replies = raw.replies_until_closed()
    assert [reply.id for reply in replies] == [1, 2]


def test_pipelined_requests_are_each_answered_once_in_order(running: RunningServer) -> None:
    raw = RawSocket(running.socket_path)
    count = 20_000
    data = encode(client_hello()) + b"".join(
        encode(Status(id=i)) if i % 1000 == 0 else encode(Commit(id=i, reservations=b""))
        for i in range(2, count)
    )
    sender = threading.Thread(target=lambda: raw.socket.sendall(data))
    sender.start()
    frames, replies = FrameBuffer(), []
    while len(replies) < count - 1:
        replies += [decode_reply(p) for p in frames.feed(raw.socket.recv(1 << 16))]
    sender.join()
    assert [reply.id for reply in replies] == list(range(1, count))
    assert all(
        isinstance(r, StatusReply) if r.id % 1000 == 0 else isinstance(r, Error)
        for r in replies[1:]
    )


def test_who_does_not_read_is_closed_and_the_others_go_on(running: RunningServer) -> None:
    raw = RawSocket(running.socket_path)
    raw.socket.sendall(encode(client_hello()))
    flood = encode(Status(id=2)) * 1000

    def send_for_ever() -> None:
        while True:
            raw.socket.sendall(flood)

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        send_for_ever()
    still_serves(running)
    assert "does not read" in running.log()


def test_roles(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    client = Talker(running.socket_path, client_hello())
    asked = [
        client.ask(Match, lease=1, group=0, names=b""),
        worker.ask(Match, lease=1, group=0, names=b""),
        scheduler.ask(Commit, reservations=b""),
    ]
    for reply in asked:
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.WRONG_ROLE
    assert isinstance(worker.ask(Commit, reservations=b""), Done)


def test_bad_values_are_refused_and_the_session_goes_on(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    for reply, code in (
        (scheduler.ask(Match, lease=1, group=0, names=b"short"), ErrorCode.BAD_MESSAGE),
        (scheduler.ask(Match, lease=1, group=1, names=b""), ErrorCode.OUT_OF_RANGE),
        (scheduler.ask(Match, lease=1, group=-1, names=b""), ErrorCode.OUT_OF_RANGE),
        (worker.ask(Commit, reservations=b"1234567"), ErrorCode.BAD_MESSAGE),
    ):
        assert isinstance(reply, Error)
        assert reply.code == code
    assert isinstance(scheduler.ask(Match, lease=1, group=0, names=names("a", 1)), Matched)


def test_too_many_names_are_refused(running: RunningServer) -> None:
    scheduler, _ = attach(running.socket_path)
    limit = scheduler.connection.welcome.max_names
    reply = scheduler.ask(Match, lease=1, group=0, names=bytes(32 * limit))
    assert isinstance(reply, Matched)
    reply = scheduler.ask(Match, lease=1, group=0, names=bytes(32 * (limit + 1)))
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.LIMIT_REACHED


def test_the_number_of_sessions_is_bounded(running: RunningServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        silent = [RawSocket(running.socket_path) for _ in range(MAX_SESSIONS)]
        one_more = RawSocket(running.socket_path)
        assert one_more.replies_until_closed() == []
        for raw in silent:
            raw.socket.close()
        wait_until(lambda: can_connect(running))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def can_connect(running: RunningServer) -> bool:
    try:
        still_serves(running)
    except ServerUnavailableError:
        return False
    return True


def test_clients_leave_half_of_the_sessions_to_engines(running: RunningServer) -> None:
    clients = [
        Connection.open(running.socket_path, hello("", Role.CLIENT)) for _ in range(MAX_CLIENTS)
    ]
    with pytest.raises(RefusedError) as caught:
        Connection.open(running.socket_path, hello("", Role.CLIENT))
    assert caught.value.code == ErrorCode.LIMIT_REACHED
    assert attach(running.socket_path)
    for client in clients:
        client.close()
    wait_until(lambda: is_admitted(running.socket_path))


def is_admitted(socket_path: str) -> bool:
    try:
        Connection.open(socket_path, hello("", Role.CLIENT)).close()
    except RefusedError:
        return False
    return True
