"""One process' conversation with the server: pipelined, and never waiting longer than told.

Wraps the reconnecting link. Replies find the callback of their request; pushes and the loss of a
connection go to one listener. A *breaker* keeps a silent server from costing anything: once a
wait has been in vain, or an answer is overdue, nothing is sent or waited for until the server has
been heard again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvledger.client import Connection, Link
from kvledger.protocol import Closed, Error, Opened, Reply, Request, Settled, Welcome

SILENCE_SECONDS = 0.1
"""An answer takes 0.1 ms. A server that has said nothing for so long, though it owes an answer, is
stopped or drowning."""

ReplyHandler = Callable[[Reply], None]
"""Gets the reply, or the Error, that answers a request."""


class Listener:
    """Hears what the server says unasked, and when it is gone."""

    def on_connected(self, welcome: Welcome) -> None:
        """A new connection is in use; nothing that was known of an older one holds."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """The connection has ended; requests that were not answered never will be."""
        raise NotImplementedError

    def on_push(self, push: Opened | Closed | Settled) -> None:
        """The server said something unasked."""
        raise NotImplementedError

    def on_refused(self, error: Error) -> None:
        """The server refused something whose answer nobody waits for: a description, mostly."""
        raise NotImplementedError


class Channel:
    """See the module. Owned by one thread; only the link has a thread of its own."""

    def __init__(
        self, link: Link, listener: Listener, *, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._silence_seconds = silence_seconds
        self._link = link
        self._listener = listener
        self._connection: Connection | None = None
        self._handlers: dict[int, ReplyHandler] = {}
        self._silent = False
        self._owing_since = 0.0

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> Connection | None:
        """The connection in use; a new object for each server."""
        return self._connection

    @property
    def silent(self) -> bool:
        """Whether the breaker is open: the server owes an answer for too long."""
        return self._silent

    @property
    def usable(self) -> bool:
        """Whether it makes sense to send something now."""
        return self._connection is not None and not self._silent

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Handle all that has arrived; with a timeout, wait at most that long for something."""
        self._follow_link()
        connection = self._connection
        if connection is None:
            return
        replies = connection.receive(timeout_seconds)
        if replies:
            self._silent = False
            self._owing_since = time.monotonic()
        elif self._handlers and time.monotonic() - self._owing_since > self._silence_seconds:
            self._silent = True
        for reply in replies:
            self._dispatch(reply)
        if connection.closed:
            self._lose()

    def send(self, make: Callable[[int], Request], on_reply: ReplyHandler | None = None) -> bool:
        """Send ``make(id)``; False if there is no server to send it to. Never blocks."""
        connection = self._connection
        if connection is None or self._silent:
            return False
        number = connection.next_id()
        if not connection.send(make(number)):
            if connection.closed:
                self._lose()
            else:
                self._silent = True  # megabytes are waiting to go out: the server does not read
            return False
        if on_reply is not None:
            if not self._handlers:
                self._owing_since = time.monotonic()
            self._handlers[number] = on_reply
        return True

    def wait_until(self, done: Callable[[], bool], seconds: float, *, trip: bool) -> bool:
        """Poll until ``done`` or the time is over. ``trip``: open the breaker if it is in vain."""
        if done():
            return True
        deadline = time.perf_counter() + seconds
        while self.usable:
            left = deadline - time.perf_counter()
            if left <= 0:
                self._silent = self._silent or trip
                break
            self.poll(left)
            if done():
                return True
        return done()

    def trip(self) -> None:
        """Open the breaker: an answer is overdue."""
        if self._handlers:
            self._silent = True

    def close(self) -> None:
        """End the conversation and the link's thread."""
        self._link.close()
        self._connection = None
        self._handlers.clear()

    def _follow_link(self) -> None:
        current = self._link.connection
        if current is self._connection:
            return
        if self._connection is not None:
            self._lose()
        if current is not None and not current.closed:
            self._connection = current
            self._silent = False
            self._listener.on_connected(current.welcome)

    def _lose(self) -> None:
        self._connection = None
        self._handlers.clear()
        self._silent = False
        self._listener.on_lost()

    def _dispatch(self, reply: Reply) -> None:
        if isinstance(reply, Opened | Closed | Settled):
            self._listener.on_push(reply)
            return
        handler = self._handlers.pop(reply.id, None)
        if handler is not None:
            handler(reply)
        elif isinstance(reply, Error):
            self._listener.on_refused(reply)
