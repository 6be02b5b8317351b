"""Mistakes that the rest of the suite had let live; see tests/mutants/second_mutants.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from conversation import SCHEDULER_FIELDS, Talker, attach, hello, names
from kvledger.client import Connection
from kvledger.fates import Fate
from kvledger.protocol import (
    PROTOCOL_VERSION,
    PUSH_ID,
    Chain,
    Closed,
    Commit,
    Describe,
    Done,
    FrameBuffer,
    Hello,
    Opened,
    Reply,
    Reserve,
    Reserved,
    Role,
    Settled,
    Status,
    StatusReply,
    Welcome,
    decode_request,
    encode,
    unpack_u64,
)
from ledger_steps import account, fates, step
from servers import RunningServer, StartServer, wait_until
from vllm_desk import status, total, tracked
from vllm_rank import World

# ---------------------------------------------------------------- connection


class LastWords:
    """A server that accepts one client, and at a sign says some last words and is gone."""

    def __init__(self, path: Path, words: list[Reply]) -> None:
        self.path = str(path)
        self.sign = threading.Event()
        self._words = words
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as client:
            frames = FrameBuffer()
            requests = [decode_request(p) for p in frames.feed(client.recv(1 << 16))]
            assert isinstance(requests[0], Hello)
            client.sendall(encode(welcome()))
            self.sign.wait()
            for word in self._words:
                client.sendall(encode(word))


def welcome() -> Welcome:
    return Welcome(
        id=1,
        protocol=PROTOCOL_VERSION,
        version="test",
        boot="b",
        arena_generation=1,
        arena_bytes=0,
        max_names=1,
        max_reservations=1,
    )


@pytest.mark.parametrize("words", [0, 1, 3])
def test_one_look_sees_the_last_words_and_the_end(tmp_path: Path, words: int) -> None:
    """A rank looks once after a copy: whoever closes has given its slots away."""
    said: list[Reply] = [Closed(id=PUSH_ID, reason=f"word {n}") for n in range(words)]
    server = LastWords(tmp_path / "s", said)
    connection = Connection.open(server.path, hello("", Role.CLIENT))
    assert connection.receive() == []
    assert not connection.closed, "negative control: the server is there"
    server.sign.set()
    server.thread.join()
    assert connection.receive() == said
    assert connection.closed
    connection.close()


# ---------------------------------------------------------------- the server and a rank


def reserve_one(running: RunningServer, scheduler: Talker) -> bytes:
    """A slot for one chunk, once the arena has room; its packed reservation."""
    wait_until(lambda: status(running.socket_path)["memory"]["pages_ready"] > 0)
    chain = Chain(parent=b"", names=names("a", 1))
    reserved = scheduler.ask(Reserve, step=1, group=0, chains=[chain])
    assert isinstance(reserved, Reserved)
    numbers = reserved.chains[0].reservations
    assert len(unpack_u64(numbers)) == 1
    return numbers


BACKLOG_BYTES = 2 << 20
"""Ten times what the kernel keeps for a peer that does not read."""


def fill_backlog(running: RunningServer, scheduler: Talker, worker: Talker) -> None:
    """The worker asks for much and reads nothing; when this returns, all of it has been said."""
    numbers = reserve_one(running, scheduler)
    document = worker.ask(Status)
    assert isinstance(document, StatusReply)
    connection = worker.connection
    for _ in range(BACKLOG_BYTES // len(document.document)):
        assert connection.send(Status(id=connection.next_id()))
    assert connection.send(Commit(id=connection.next_id(), reservations=numbers))

    def committed() -> bool:
        # What the kernel did not take is sent with the next message.
        assert connection.send(Commit(id=connection.next_id(), reservations=b""))
        scheduler.pushes += scheduler.connection.receive()
        return any(isinstance(push, Settled) for push in scheduler.pushes)

    wait_until(committed)


@pytest.mark.parametrize("reads", [False, True])
def test_a_rank_that_cannot_be_told_loses_its_connection(server: StartServer, reads: bool) -> None:
    """At an epoch's end a rank is told before its slots go to others, or its connection ends, and
    with it its engine's. A rank that reads (the negative control) keeps it."""
    running = server()
    scheduler, (worker,) = attach(running.socket_path)
    if not reads:
        fill_backlog(running, scheduler, worker)
    connection = scheduler.connection
    fields = {**SCHEDULER_FIELDS, "weights.epoch": "1"}
    assert connection.send(Describe(id=connection.next_id(), fields=fields))
    if reads:
        worker.wait_push(Closed)
        worker.wait_push(Opened)
    else:
        scheduler.wait_closed()
        worker.wait_closed()


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def world(running: RunningServer) -> Iterator[World]:
    opened = World.open(running)
    yield opened
    opened.close()


def test_a_commit_that_was_not_heard_is_not_repeated_to_another_server(
    world: World, running: RunningServer, server: StartServer
) -> None:
    """Each server counts reservations from one, and the new one's first slot is empty."""
    before = world.reserved(tracked(1))
    world.rank.compute([1])
    running.kill()
    world.rank.side.begin_step(world.plan(stores=(before,)))
    world.rank.side.store_planned()  # the copy is made; there is nobody to tell
    assert world.rank.side.stored_bytes > 0
    assert not world.rank.channel.connected
    other = server(socket_path=running.socket_path)
    world.desk.poll_until(lambda: world.desk.count("lost"))
    world.desk.open(times=2)
    item = tracked(1)
    after = world.reserved(item)
    assert after.reservations == before.reservations, "the numbers mean two slots"

    def heard_out() -> bool:
        """The server has read all that the rank had to say."""
        answers: list[Reply] = []
        world.rank.step(world.plan())
        if not world.rank.channel.send(lambda n: Commit(id=n, reservations=b""), answers.append):
            return False
        world.desk.poll_until(lambda: world.rank.channel.poll() or answers)
        return isinstance(answers[0], Done)

    world.desk.poll_until(heard_out)
    assert total(other, "reservations") == 1, "nobody has written it"
    world.rank.step(world.plan(stores=(after,)))
    world.settled()
    assert item.account.fates == [Fate.STORED]


# ---------------------------------------------------------------- accounts


def test_what_was_known_beyond_a_cut_is_not_known_of_other_tokens() -> None:
    """Two of four chunks are cut off; what comes in their place has never been looked up."""
    books = account()
    books.known_chunks = 4
    step(books, 4 * 16)
    assert fates(books) == "PPPP"
    assert books.truncate(2 * 16 + 5) == []
    step(books, 4 * 16)
    assert fates(books) == "PPoo"
