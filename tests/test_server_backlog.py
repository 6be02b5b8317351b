"""A session whose peer does not read for a while: what is kept for it, and for how long."""

from __future__ import annotations

import asyncio
import socket

import uvloop

from conversation import hello
from kvledger.protocol import (
    Error,
    ErrorCode,
    FrameBuffer,
    Request,
    Role,
    StatusReply,
    decode_reply,
    encode,
)
from kvledger.server.peers import Peer
from kvledger.server.session import MAX_OUTGOING_BYTES, Session

DOCUMENT_BYTES = 100_000


class Owner:
    """Accepts whoever says hello; notes when the session is closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def handle(self, session: Session, _request: Request) -> None:
        session.is_client = True
        session.introduce()
        session.send(Error(id=1, code=ErrorCode.INTERNAL, message="accepted"))

    def session_closed(self, _session: Session) -> None:
        self.closed.set()


async def introduced(owner: Owner) -> tuple[Session, socket.socket]:
    """A session and its peer, which has said hello and read the answer."""
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    loop = asyncio.get_running_loop()
    session = Session(one, Peer(1, 1, 1), loop, owner, hello_deadline_seconds=60)
    await loop.sock_sendall(other, encode(hello("", Role.CLIENT)))
    await asyncio.wait_for(loop.sock_recv(other, 4096), 10)
    return session, other


def document(number: int) -> StatusReply:
    return StatusReply(id=number, document=number.to_bytes(4, "little") * (DOCUMENT_BYTES // 4))


def test_a_late_reader_gets_everything_in_order() -> None:
    async def scenario() -> None:
        session, other = await introduced(Owner())
        count = MAX_OUTGOING_BYTES // DOCUMENT_BYTES // 2
        for number in range(count):
            session.send(document(number))
        assert session.has_backlog
        frames, got = FrameBuffer(), 0
        loop = asyncio.get_running_loop()
        while got < count:
            data = await asyncio.wait_for(loop.sock_recv(other, 1 << 16), 10)
            assert data, "the session was closed"
            for payload in frames.feed(data):
                assert decode_reply(payload) == document(got)
                got += 1
        assert not session.has_backlog
        session.close()
        other.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_no_more_is_kept_than_the_bound() -> None:
    async def scenario() -> None:
        owner = Owner()
        session, other = await introduced(owner)
        sent = 0
        while not session.closed and sent <= 2 * MAX_OUTGOING_BYTES:
            session.send(document(1))
            sent += DOCUMENT_BYTES
        assert owner.closed.is_set()
        assert sent > MAX_OUTGOING_BYTES, "closed too early"
        other.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
