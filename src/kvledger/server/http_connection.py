"""One HTTP connection, with an end in sight: few at a time, and none that only waits.

Engines need the file descriptors that idle HTTP peers would otherwise hold. So a new connection
beyond the limit takes the place of the one that has stood still for longest, and a health check
gets through however many connections somebody leaves open.
"""

from __future__ import annotations

import asyncio
import math

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 128
PATIENCE_SECONDS = 5.0
"""For a request to arrive in full, and again for its answer to be taken."""


class BoundedConnection(H11Protocol):
    """See the module.

    Attributes:
        moved_at: loop time of the last whole request or answer, or of the connection itself.
    """

    moved_at = math.inf
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._moved()
        if len(self.connections) > MAX_CONNECTIONS:
            peers = [peer for peer in self.connections if isinstance(peer, BoundedConnection)]
            min(peers, key=lambda peer: peer.moved_at).abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._moved()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._moved()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End it now; what has not been sent is lost."""
        self.moved_at = math.inf
        self.transport.abort()

    def _moved(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.moved_at = self.loop.time()
        self._deadline = self.loop.call_later(PATIENCE_SECONDS, self.abort)
