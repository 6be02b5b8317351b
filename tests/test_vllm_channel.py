"""The channel against a real server: answers, loss, and the breaker that keeps silence cheap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from conversation import names
from kvledger.protocol import (
    Error,
    ErrorCode,
    Match,
    Matched,
    Opened,
    Release,
    Reply,
    Request,
    Welcome,
)
from kvledger.vllm.channel import SILENCE_SECONDS
from servers import RunningServer, StartServer
from vllm_desk import Desk, go_on, stop, total

LONG_SECONDS = 10.0
MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk() -> Iterator[MakeDesk]:
    desks: list[Desk] = []

    def make(running: RunningServer | str, **options: object) -> Desk:
        path = running if isinstance(running, str) else running.socket_path
        desks.append(Desk(path, **options))  # type: ignore[arg-type]
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def desk(running: RunningServer, make_desk: MakeDesk) -> Desk:
    desk = make_desk(running)
    desk.open()
    return desk


def match(lease: int = 1) -> Callable[[int], Request]:
    return lambda number: Match(id=number, lease=lease, group=0, names=names("x", 3))


# ---------------------------------------------------------------- talking


def test_every_reply_finds_its_request(desk: Desk) -> None:
    got: list[tuple[int, Reply]] = []
    for number in range(20):
        asked = number % 3 + 1
        assert desk.channel.send(
            lambda i, n=asked: Match(id=i, lease=n, group=0, names=names(f"y{n}", n)),
            lambda reply, n=number: got.append((n, reply)),
        )
    desk.poll_until(lambda: len(got) == 20)
    assert [number for number, _ in got] == list(range(20)), "in the order of the questions"
    assert all(isinstance(reply, Matched) for _, reply in got)


def test_a_refusal_goes_to_who_asked_and_else_to_the_listener(
    running: RunningServer, make_desk: MakeDesk
) -> None:
    desk = make_desk(running, engine="lonely", with_worker=False)
    desk.poll_until(lambda: desk.channel.connected)
    got: list[Reply] = []
    desk.channel.send(match(), got.append)
    desk.poll_until(lambda: got)
    assert isinstance(got[0], Error)
    assert got[0].code is ErrorCode.NAMESPACE_NOT_OPEN
    assert desk.count(Error) == 0
    desk.channel.send(match())
    desk.poll_until(lambda: desk.count(Error))
    assert len(got) == 1


def test_without_a_server_nothing_waits(tmp_path, make_desk: MakeDesk) -> None:
    desk = make_desk(str(tmp_path / "nobody.sock"))
    begin = time.perf_counter()
    desk.channel.poll(LONG_SECONDS)
    assert not desk.channel.wait_until(lambda: False, LONG_SECONDS, trip=True)
    assert not desk.channel.send(match(), lambda _: pytest.fail("nobody can have answered"))
    assert not desk.channel.connected
    assert not desk.channel.usable
    assert not desk.channel.silent, "absent is not silent"
    assert time.perf_counter() - begin < LONG_SECONDS / 2
    assert desk.heard == []


def test_wait_until_ends_with_the_answer_or_the_time(desk: Desk) -> None:
    got: list[Reply] = []
    desk.channel.send(match(), got.append)
    assert desk.channel.wait_until(lambda: bool(got), LONG_SECONDS, trip=True)
    assert not desk.channel.silent
    begin = time.perf_counter()
    assert not desk.channel.wait_until(lambda: False, 0.02, trip=False)
    assert time.perf_counter() - begin >= 0.02
    assert not desk.channel.silent
    assert desk.channel.wait_until(lambda: True, 0.0, trip=True), "done is done, without waiting"


# ---------------------------------------------------------------- loss


def test_a_killed_server_is_lost_once_and_a_new_one_is_found(
    desk: Desk, running: RunningServer, server: StartServer
) -> None:
    (first,) = [heard for heard in desk.heard if isinstance(heard, Welcome)]
    stop(running)
    unanswered: list[Reply] = []
    assert desk.channel.send(match(), unanswered.append)
    running.kill()
    desk.poll_until(lambda: desk.count("lost"))
    assert not desk.channel.connected
    assert not desk.channel.send(match(), unanswered.append)
    server(socket_path=running.socket_path)
    desk.poll_until(lambda: desk.count(Welcome) == 2)
    second = [heard for heard in desk.heard if isinstance(heard, Welcome)][-1]
    assert second.boot != first.boot
    desk.open(times=2)
    assert desk.count("lost") == 1
    got: list[Reply] = []
    for _ in range(5):  # numbers that the old connection has used too
        assert desk.channel.send(match())
    assert desk.channel.send(match(), got.append)
    desk.poll_until(lambda: got)
    assert unanswered == [], "what the old server was asked is never answered by the new one"


def test_waiting_ends_when_the_server_dies(desk: Desk, running: RunningServer) -> None:
    stop(running)
    assert desk.channel.send(match(), lambda _: pytest.fail("it cannot have answered"))
    running.kill()
    begin = time.perf_counter()
    assert not desk.channel.wait_until(lambda: False, LONG_SECONDS, trip=True)
    assert time.perf_counter() - begin < LONG_SECONDS / 2
    assert desk.count("lost") == 1


def test_closing_ends_the_conversation(desk: Desk) -> None:
    desk.channel.close()
    assert not desk.channel.connected
    assert not desk.channel.send(match())
    desk.channel.poll(LONG_SECONDS)
    desk.channel.close()


# ---------------------------------------------------------------- breaker


def test_the_breaker_opens_in_vain_and_closes_when_heard(
    desk: Desk, running: RunningServer
) -> None:
    before = total(running, "lookups")
    got: list[Reply] = []
    stop(running)
    assert desk.channel.send(match(), got.append)
    assert not desk.channel.wait_until(lambda: bool(got), 0.01, trip=True)
    assert desk.channel.silent
    assert not desk.channel.usable
    for _ in range(50):
        assert not desk.channel.send(match(), got.append)
    begin = time.perf_counter()
    assert not desk.channel.wait_until(lambda: bool(got), LONG_SECONDS, trip=True)
    assert time.perf_counter() - begin < LONG_SECONDS / 2, "silence is not waited for again"
    go_on(running)
    desk.poll_until(lambda: got)
    assert not desk.channel.silent
    assert len(got) == 1
    assert total(running, "lookups") == before + 1, "nothing was sent while it was silent"
    assert desk.channel.send(match(), got.append)
    desk.poll_until(lambda: len(got) == 2)
    assert desk.count("lost") == 0


def test_the_breaker_opens_by_itself_when_answers_are_overdue(
    running: RunningServer, make_desk: MakeDesk
) -> None:
    desk = make_desk(running, silence_seconds=SILENCE_SECONDS)
    desk.open()
    got: list[Reply] = []
    stop(running)
    begin = time.monotonic()
    assert desk.channel.send(match(), got.append)
    desk.poll_until(lambda: desk.channel.silent)
    assert time.monotonic() - begin >= SILENCE_SECONDS
    go_on(running)
    desk.poll_until(lambda: not desk.channel.silent)
    desk.poll_until(lambda: got)


def test_a_server_that_owes_nothing_may_be_quiet(
    running: RunningServer, make_desk: MakeDesk
) -> None:
    desk = make_desk(running, silence_seconds=SILENCE_SECONDS)
    desk.open()
    got: list[Reply] = []
    desk.channel.send(match(), got.append)
    desk.poll_until(lambda: got)
    end = time.monotonic() + 2 * SILENCE_SECONDS
    while time.monotonic() < end:
        desk.channel.poll(0.01)
        desk.channel.trip()
        assert not desk.channel.silent


def test_a_server_that_does_not_read_costs_a_bounded_buffer(
    desk: Desk, running: RunningServer
) -> None:
    stop(running)
    leases = list(range(1_000_000, 1_200_000))  # a megabyte a message
    sent = 0
    begin = time.perf_counter()
    while desk.channel.send(lambda i: Release(id=i, leases=leases)):
        sent += 1
        assert sent < 20, "the buffer has no bound"
    assert time.perf_counter() - begin < LONG_SECONDS, "sending never waits"
    assert sent >= 2
    assert desk.channel.silent
    go_on(running)
    desk.poll_until(lambda: desk.channel.usable)
    got: list[Reply] = []
    desk.poll_until(lambda: got or not desk.channel.send(match(), got.append) or got)
    assert desk.count("lost") == 0
    assert desk.count(Opened) == 1
