"""One connected process: bytes in, requests out, replies back. Knows nothing of the catalog.

Non-blocking throughout. What a slow reader does not take is kept up to a bound, then the session
is closed; what a fast writer sends is answered in slices of a millisecond, so that one session
cannot keep the others waiting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvledger.errors import ProtocolError
from kvledger.protocol import (
    PUSH_ID,
    Error,
    ErrorCode,
    FrameBuffer,
    Reply,
    Request,
    decode_request,
    encode,
)
from kvledger.server.engines import Process
from kvledger.server.peers import Peer

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1024
MAX_CLIENTS = MAX_SESSIONS // 2
"""The other half is for engines."""
READ_BYTES = 256 << 10
MAX_OUTGOING_BYTES = 16 << 20
"""A process that lets so much pile up has stopped reading."""
MAX_GREETING_BYTES = 64 << 10
"""Before Hello a peer may not make us keep more than this."""
SLICE_SECONDS = 0.001
FLUSH_SECONDS = 2.0
"""A closing session's last words are kept for a peer that does not read for at most this long."""


class SessionOwner(Protocol):
    """What a session reports to."""

    def handle(self, session: Session, request: Request) -> None:
        """Answer one request; may close the session."""

    def session_closed(self, session: Session) -> None:
        """The session is closed (called once)."""


class Session:
    """See the module.

    Attributes:
        peer: credentials of the other end.
        process: the engine process it has introduced itself as; None before Hello and for clients.
        is_client: it has introduced itself as a client.
        closed: nothing is sent or received any more.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        loop: asyncio.AbstractEventLoop,
        owner: SessionOwner,
        *,
        hello_deadline_seconds: float,
    ) -> None:
        self.peer = peer
        self.process: Process | None = None
        self.is_client = False
        self.closed = False
        self._connection = connection
        self._fd = connection.fileno()
        self._loop = loop
        self._owner = owner
        self._frames = FrameBuffer()
        self._greeting_bytes = 0
        self._payloads: deque[bytes] = deque()
        self._descriptor: int | None = None
        self._outgoing = bytearray()
        self._closing = False
        self._reading = True
        loop.add_reader(self._fd, self._guarded, self._on_readable)
        self._deadline: asyncio.TimerHandle | None = loop.call_later(
            hello_deadline_seconds, self._on_silence
        )

    @property
    def introduced(self) -> bool:
        """Whether Hello has been accepted."""
        return self.is_client or self.process is not None

    @property
    def has_backlog(self) -> bool:
        """Whether something sent has not been taken by the kernel yet."""
        return bool(self._outgoing)

    # ------------------------------------------------------------ for the owner

    def take_descriptor(self) -> int | None:
        """The file descriptor that came with Hello, now the caller's; None if none did."""
        taken, self._descriptor = self._descriptor, None
        return taken

    def introduce(self) -> None:
        """Hello has been accepted: no deadline any more, and no descriptors are taken."""
        self._close_descriptor()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send(self, message: Reply, descriptor: int | None = None) -> None:
        """Queue one message, with a descriptor if given. Never blocks; drops it when closed."""
        if self.closed:
            return
        frame = encode(message)
        if descriptor is not None:
            assert not self._outgoing, "a descriptor goes with the first message of a session"
            frame = frame[self._try_send(frame, descriptor) :]
        elif not self._outgoing:
            frame = frame[self._try_send(frame, None) :]
        if not frame or self.closed:
            return
        if len(self._outgoing) + len(frame) > MAX_OUTGOING_BYTES:
            logger.warning("%s does not read its answers; closing it", self)
            self.close()
            return
        if not self._outgoing:
            self._loop.add_writer(self._fd, self._guarded, self._on_writable)
        self._outgoing += frame

    def refuse(self, code: ErrorCode, message: str, request_id: int = PUSH_ID) -> None:
        """Answer with an error and close once it is sent."""
        self.send(Error(id=request_id, code=code, message=message))
        self.close_after_flush()

    def close_after_flush(self) -> None:
        """Take nothing more in, and close as soon as all that is queued has been sent."""
        self._closing = True
        self._payloads.clear()
        if not self._outgoing:
            self.close()
            return
        if self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False
        if self._deadline is None:
            self._deadline = self._loop.call_later(FLUSH_SECONDS, self.close)

    def close(self) -> None:
        """Close now; what has not been sent is lost. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._reading:
            self._loop.remove_reader(self._fd)
        if self._outgoing:
            self._loop.remove_writer(self._fd)
            self._outgoing = bytearray()
        self._payloads.clear()
        self._close_descriptor()
        self._connection.close()
        self._owner.session_closed(self)

    # ------------------------------------------------------------ socket

    def _guarded(self, callback: Callable[[], None]) -> None:
        """Run a socket callback; whatever goes wrong in it ends this session, not the server."""
        try:
            callback()
        except Exception:
            logger.exception("internal error in %s; closing it", self)
            self.close()

    def _on_silence(self) -> None:
        self._deadline = None
        logger.info("%s has not said hello in time; closing it", self)
        self.close()

    def _on_readable(self) -> None:
        data = self._receive()
        if data is None:
            return
        if not data:
            self.close()
            return
        if not self.introduced:
            self._greeting_bytes += len(data)
        try:
            self._payloads += self._frames.feed(data)
        except ProtocolError as error:
            self.refuse(ErrorCode.BAD_MESSAGE, str(error))
            return
        self._work()
        if not self.closed and not self.introduced and self._greeting_bytes > MAX_GREETING_BYTES:
            self.refuse(ErrorCode.HELLO_FIRST, "more bytes than a Hello has, and no Hello in them")

    def _receive(self) -> bytes | None:
        """Bytes at hand; empty at the end of the stream, None if there are none."""
        try:
            if self.introduced:
                return self._connection.recv(READ_BYTES)
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, MAX_GREETING_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""  # reset by the peer: the same as its end of the stream
        for descriptor in descriptors:  # at most one: the kernel drops what we have no room for
            if self._descriptor is None:
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        return data

    def _work(self) -> None:
        """Answer what has come in, for at most a slice; the rest when the others had their turn."""
        end = time.monotonic() + SLICE_SECONDS
        while self._payloads and not self._closing and not self.closed:
            try:
                request = decode_request(self._payloads.popleft())
            except ProtocolError as error:
                self.refuse(ErrorCode.BAD_MESSAGE, str(error))
                return
            self._owner.handle(self, request)
            if time.monotonic() >= end:
                break
        if self.closed or self._closing:
            return
        if self._payloads and self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False
        if self._payloads:
            self._loop.call_soon(self._guarded, self._work)
        elif not self._reading:
            self._loop.add_reader(self._fd, self._guarded, self._on_readable)
            self._reading = True

    def _try_send(self, data: bytes | bytearray, descriptor: int | None) -> int:
        """Bytes the kernel took; closes the session if the peer is gone."""
        try:
            if descriptor is not None:
                return socket.send_fds(self._connection, [data], [descriptor], socket.MSG_NOSIGNAL)
            return self._connection.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.close()
            return 0

    def _on_writable(self) -> None:
        sent = self._try_send(self._outgoing, None)
        if self.closed:
            return
        del self._outgoing[:sent]
        if not self._outgoing:
            self._loop.remove_writer(self._fd)
            if self._closing:
                self.close()

    def _close_descriptor(self) -> None:
        descriptor = self.take_descriptor()
        if descriptor is not None:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"session of pid {self.peer.pid} (uid {self.peer.uid})"
