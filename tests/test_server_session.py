"""One session on a loop of its own, where deadlines can be short."""

from __future__ import annotations

import asyncio
import os
import select
import socket

import uvloop

from conversation import hello
from kvledger.protocol import Request, Role, encode
from kvledger.server.peers import Peer
from kvledger.server.session import Session


class Owner:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def handle(self, session: Session, request: Request) -> None:
        raise RuntimeError(f"a bug at {request} of {session}")

    def session_closed(self, session: Session) -> None:
        assert session.closed
        self.closed.set()


def test_who_says_nothing_is_closed() -> None:
    async def scenario() -> bytes:
        one, other = socket.socketpair()
        one.setblocking(False)
        owner = Owner()
        loop = asyncio.get_running_loop()
        session = Session(one, Peer(1, 1, 1), loop, owner, hello_deadline_seconds=0.02)
        await asyncio.wait_for(owner.closed.wait(), 10)
        assert session.closed
        with other:
            return other.recv(1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == b""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_descriptor_is_taken_however_many_come() -> None:
    async def scenario() -> None:
        one, other = socket.socketpair()
        one.setblocking(False)
        owner = Owner()
        loop = asyncio.get_running_loop()
        session = Session(one, Peer(1, 1, 1), loop, owner, hello_deadline_seconds=60)
        before = open_files()
        for _ in range(3):
            socket.send_fds(other, [b"\x10"], [0, 1, 2])
            while select.select([one], [], [], 0)[0]:
                await asyncio.sleep(0)
            assert open_files() == before + 1
        taken = session.take_descriptor()
        assert taken is not None
        os.close(taken)
        assert session.take_descriptor() is None
        session.close()
        other.close()
        assert open_files() == before - 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_bug_in_the_owner_closes_that_session_only() -> None:
    async def scenario() -> None:
        one, other = socket.socketpair()
        one.setblocking(False)
        owner = Owner()
        loop = asyncio.get_running_loop()
        Session(one, Peer(1, 1, 1), loop, owner, hello_deadline_seconds=60)
        other.send(encode(hello("", Role.CLIENT)))
        await asyncio.wait_for(owner.closed.wait(), 10)
        other.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
