"""One conversation with a server, as engines hold it: pipelined, and never blocking unasked.

A stopped or missing server costs its user nothing: sending never waits, receiving waits as long
as it is told, and whatever breaks only sets :attr:`Connection.closed`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import socket
import threading
import time

from kvledger.arena import map_arena
from kvledger.errors import ProtocolError, RefusedError, ServerUnavailableError
from kvledger.native import wait_for_socket
from kvledger.protocol import (
    Error,
    FrameBuffer,
    Hello,
    Reply,
    Request,
    Role,
    Welcome,
    decode_reply,
    encode,
)

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 2.0
MAX_WAITING_BYTES = 4 << 20
"""More than this waiting to go out means that the server does not read: nothing is added."""
READ_BYTES = 256 << 10
MAX_READ_BYTES = 1 << 20
"""One receive takes in at most this much, so that its caller gets its turn."""


class Connection:
    """One established conversation with a server; made by :meth:`open`.

    ``send`` may be called from any thread, ``receive`` from one at a time.

    Attributes:
        welcome: what the server said at the start.
        arena_fd: the arena's memfd, open as long as the connection; -1 for clients.
        closed: nothing can be sent or received any more.
    """

    def __init__(
        self, stream: socket.socket, frames: FrameBuffer, welcome: Welcome, arena_fd: int
    ) -> None:
        """Not for callers: use :meth:`open`."""
        self.welcome = welcome
        self.arena_fd = arena_fd
        self.closed = False
        self._stream = stream
        self._fd = stream.fileno()
        self._frames = frames
        self._outgoing = bytearray()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._ids = itertools.count(1)

    @classmethod
    def open(
        cls, socket_path: str, hello: Hello, *, deadline_seconds: float = HANDSHAKE_SECONDS
    ) -> Connection:
        """Connect and say hello; blocks for at most about ``deadline_seconds``.

        Raises:
            ServerUnavailableError: nobody answers there in time.
            RefusedError: the server does not want this process.
            ProtocolError: what answers there is not a kvledger server.
        """
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        descriptors: list[int] = []
        try:
            stream.settimeout(deadline_seconds)
            stream.connect(socket_path)
            _send_hello(stream, hello)
            frames = FrameBuffer()
            welcome = _receive_welcome(stream, frames, descriptors, deadline_seconds)
            stream.setblocking(False)
            arena_fd = descriptors[0] if descriptors else -1
            return cls(stream, frames, welcome, arena_fd)
        except OSError as error:
            _close_all(stream, descriptors)
            raise ServerUnavailableError(_absence(socket_path, error)) from error
        except BaseException:
            _close_all(stream, descriptors)
            raise

    def next_id(self) -> int:
        """A request id not used before on this connection."""
        return next(self._ids)

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._fd

    def send(self, message: Request) -> bool:
        """Send a message, or queue what does not fit. Never blocks.

        False if the connection is closed, or if too much is waiting already: the message is then
        dropped.

        Raises:
            ProtocolError: the message is larger than a frame may be.
        """
        frame = encode(message)
        with self._send_lock:
            if self.closed or len(self._outgoing) > MAX_WAITING_BYTES:
                return False
            if self._outgoing:
                self._outgoing += frame
                self._flush()
            else:
                self._outgoing += frame[self._write(frame) :]
            return not self.closed

    def receive(self, timeout_seconds: float = 0.0) -> list[Reply]:
        """Replies and pushes that have arrived, in order.

        Waits at most ``timeout_seconds`` for the first byte. Empty if nothing came, and once the
        connection is closed.
        """
        with self._receive_lock:
            if self.closed:
                return []
            if self._outgoing:
                with self._send_lock:
                    self._flush()
            data = self._read()
            if not data and timeout_seconds > 0 and not self.closed:
                waiting = bool(self._outgoing)
                if wait_for_socket(self._fd, timeout_seconds, also_writable=waiting):
                    data = self._read()
            return self._decode(data)

    def map_arena(self, *, writable: bool = True) -> mmap.mmap:
        """Map the server's arena; the mapping outlives the connection.

        Raises:
            ArenaError: it is not safe to map, or the connection is closed.
        """
        with self._send_lock:
            return map_arena(self.arena_fd, self.welcome.arena_bytes, writable=writable)

    def close(self) -> None:
        """Close; a receive that is waiting on another thread returns. Idempotent."""
        self._break()
        with self._receive_lock, self._send_lock:
            if self._fd < 0:
                return
            self._fd = -1
            self._stream.close()
            if self.arena_fd >= 0:
                os.close(self.arena_fd)
                self.arena_fd = -1

    def __del__(self) -> None:
        """A connection that nobody holds gives its arena back, as its socket does by itself."""
        if self.arena_fd >= 0:
            os.close(self.arena_fd)

    # ------------------------------------------------------------ inside

    def _break(self) -> None:
        """Mark closed, and wake whoever waits on the socket; the descriptors stay open."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def _write(self, data: bytes | bytearray) -> int:
        """Bytes the kernel took."""
        try:
            return self._stream.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._break()
            return 0

    def _flush(self) -> None:
        del self._outgoing[: self._write(self._outgoing)]

    def _read(self) -> bytes:
        """What is there now, up to a bound; notices the end of the stream.

        Reads on after a short piece: the end of the stream, or a word that ends our claim on a
        slot, may stand right behind it, and whoever has copied a slot relies on seeing it.
        """
        pieces: list[bytes] = []
        length = 0
        while length < MAX_READ_BYTES:
            try:
                piece = self._stream.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                piece = b""
            if not piece:
                self._break()
                break
            pieces.append(piece)
            length += len(piece)
        return b"".join(pieces)

    def _decode(self, data: bytes) -> list[Reply]:
        if not data:
            return []
        replies: list[Reply] = []
        try:
            replies.extend(decode_reply(payload) for payload in self._frames.feed(data))
        except ProtocolError as error:
            logger.error("closing the connection to the kvledger server: %s", error)
            self._break()
        return replies


def _send_hello(stream: socket.socket, hello: Hello) -> None:
    """Send Hello with our own pidfd, which lets the server know at once when we end.

    A server that has closed the connection already may have said why, so that is no error here.
    """
    frame = encode(hello)
    sent = 0
    with contextlib.suppress(BrokenPipeError):
        if hello.role is not Role.CLIENT:
            pidfd = os.pidfd_open(os.getpid())
            try:
                sent = socket.send_fds(stream, [frame], [pidfd], socket.MSG_NOSIGNAL)
            finally:
                os.close(pidfd)
        if sent < len(frame):
            stream.sendall(frame[sent:], socket.MSG_NOSIGNAL)


def _receive_welcome(
    stream: socket.socket, frames: FrameBuffer, descriptors: list[int], deadline_seconds: float
) -> Welcome:
    """Wait for the answer to Hello; collects the descriptors that come with it."""
    end = time.monotonic() + deadline_seconds
    while True:
        left_seconds = end - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError("no answer in time")
        stream.settimeout(left_seconds)
        # One frame at most: the server says nothing more before it has heard from us.
        data, received, _, _ = socket.recv_fds(stream, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        descriptors += received
        if not data:
            raise ConnectionResetError("the server closed the connection")
        for payload in frames.feed(data):
            reply = decode_reply(payload)
            if isinstance(reply, Error):
                raise RefusedError(reply.code, reply.message)
            if not isinstance(reply, Welcome):
                raise ProtocolError(f"expected Welcome, the server sent {type(reply).__name__}")
            return reply


def _absence(socket_path: str, error: OSError) -> str:
    """Why no server could be reached, and what to do."""
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        cause = "no kvledger server listens"
        remedy = (
            "start one with `kvledger serve --memory 8GiB`, or give its path with --socket "
            "(an engine: kvledger.socket)"
        )
    elif isinstance(error, PermissionError):
        cause = "this user may not connect"
        remedy = (
            "run as the server's user, start the server with --group, or give another path with "
            "--socket (an engine: kvledger.socket)"
        )
    elif isinstance(error, ConnectionResetError | BrokenPipeError):
        cause = "the server closed the connection (its log says why)"
        remedy = "run as the server's user, or start the server with --group"
    else:
        cause = f"no answer ({error})"
        remedy = "the server may be stopped or overloaded; try again, or restart it"
    return f"{cause} on {socket_path}: {remedy}"


def _close_all(stream: socket.socket, descriptors: list[int]) -> None:
    stream.close()
    for descriptor in descriptors:
        os.close(descriptor)
