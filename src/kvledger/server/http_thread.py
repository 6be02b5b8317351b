"""The thread that serves HTTP. The web framework is imported on it: the start need not wait."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable

from kvledger.server.status import StatusDocument

logger = logging.getLogger(__name__)

STOP_SECONDS = 2.0


class HttpThread:
    """See the module.

    Args:
        listener: a listening socket, owned from now on.
        loop: the server's loop, which makes the snapshots.
        snapshot: called on that loop.
        arena_is_intact: called on that loop.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        snapshot: Callable[[], StatusDocument],
        arena_is_intact: Callable[[], bool],
    ) -> None:
        self._listener = listener
        self._loop = loop
        self._snapshot = snapshot
        self._arena_is_intact = arena_is_intact
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvledger-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for answers under way, at most two seconds."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            from kvledger.server.admin import SnapshotSource, serve_http

            source = SnapshotSource(self._loop, self._snapshot, self._arena_is_intact)
            serve_http(self._listener, source, self._stop_fd)
        except Exception:
            logger.exception("HTTP has ended; everything else goes on")
