"""A connection that comes back by itself."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

from kvledger.connection import Connection
from kvledger.errors import KVLedgerError, ServerUnavailableError
from kvledger.protocol import Hello, Request

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 0.5
CLOSE_SECONDS = 0.2
"""An engine that ends waits so long for an attempt under way; one at a server that is stopped takes
until the handshake's deadline, and its thread then ends behind the engine's back."""


class Link:
    """Keeps a connection to a server that may come and go; a daemon thread does the waiting.

    An operator is warned once when there is no server, and told once when there is one again. A
    connection that ends and is made again at once is no such case: a server ends all connections
    of an engine when one of its processes goes, as the first of them does at every orderly end.

    Args:
        socket_path: where the server listens.
        make_hello: called on the thread before each attempt.
        on_connected: called on the thread with a new connection before it is published. What it
            returns is sent once it is: a worker describes itself so, and an idle engine attaches
            again by itself; but no slot is given to an engine of which a rank cannot know yet.
            If it raises, the connection is closed and the attempt counts as failed.
        announce: tell the operator that the server is absent, and back; one process of an engine
            does.

    Attributes:
        connects: connections made so far.
        last_error: why the latest attempt failed, as a sentence; empty after a success.
    """

    def __init__(
        self,
        socket_path: str,
        make_hello: Callable[[], Hello],
        *,
        on_connected: Callable[[Connection], Request | None] | None = None,
        announce: bool = True,
    ) -> None:
        self.connects = 0
        self.last_error = ""
        self._socket_path = socket_path
        self._make_hello = make_hello
        self._on_connected = on_connected
        self._connection: Connection | None = None
        self._greeting: Request | None = None
        self._absence_level = logging.WARNING if announce else logging.INFO
        self._told_level = logging.NOTSET
        self._closing = False
        self._end_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvledger-link", daemon=True)
        self._thread.start()

    @property
    def connection(self) -> Connection | None:
        """The connection in use, or None without a server. Never blocks."""
        connection = self._connection
        usable = connection is not None and not connection.closed and not self._closing
        return connection if usable else None

    def close(self) -> None:
        """End the thread and the connection. Idempotent.

        Waits for at most :data:`CLOSE_SECONDS`; an attempt that takes longer comes to nothing.
        """
        with self._end_lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_SECONDS)

    # ------------------------------------------------------------ thread

    def _run(self) -> None:
        self._keep_connected()
        with self._end_lock:  # close() has written to it, and nobody will again
            os.close(self._wake_fd)

    def _keep_connected(self) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        while not self._closing:
            connection = self._attempt()
            if connection is None:
                self._sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, LAST_RETRY_SECONDS)
                continue
            retry_seconds = FIRST_RETRY_SECONDS
            watched_fd = os.dup(connection.fileno())  # stays valid if its user closes it
            self._connection = connection
            if self._greeting is not None:
                connection.send(self._greeting)
            self._watch(watched_fd)
            self._connection = None
            connection.close()
            os.close(watched_fd)
            if not self._closing:
                logger.info("lost the kvledger server on %s", self._socket_path)
                self._sleep(FIRST_RETRY_SECONDS)

    def _attempt(self) -> Connection | None:
        connection: Connection | None = None
        try:
            connection = Connection.open(self._socket_path, self._make_hello())
            if self._closing:
                connection.close()
                return None
            if self._on_connected is not None:
                self._greeting = self._on_connected(connection)
            if connection.closed:
                raise ServerUnavailableError("the server closed the connection at once")
        except Exception as error:
            self._report(error)
            if connection is not None:
                connection.close()
            return None
        self.connects += 1
        self.last_error = ""
        if self._told_level:
            there = "the kvledger server on %s is there"
            logger.log(self._told_level, there, self._socket_path)
            self._told_level = logging.NOTSET
        return connection

    def _report(self, error: Exception) -> None:
        """Log a failure once until the next success; with a traceback if we did not expect it."""
        expected = isinstance(error, KVLedgerError)
        self.last_error = str(error) if expected else repr(error)
        absent = isinstance(error, ServerUnavailableError)
        level = self._absence_level if absent else logging.WARNING
        if level <= self._told_level or self._closing:
            return
        self._told_level = level
        trace = None if expected else error
        logger.log(level, "going on without cache: %s", self.last_error, exc_info=trace)

    def _watch(self, watched_fd: int) -> None:
        """Sleep until the connection breaks or the link is closed."""
        poll = select.poll()
        poll.register(watched_fd, select.POLLRDHUP)
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll()

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll(seconds * 1000)
