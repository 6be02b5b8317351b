"""Gives the arena its memory, page by page, on a thread of its own.

A page is instantiated by the server before any slot in it is handed out. Before each page the
thread looks whether the machine and the control group have room; while they have not, it waits,
looks again each second, and says so. It ends when the last page is there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from enum import StrEnum

from kvledger.arena import Arena
from kvledger.config import format_size
from kvledger.errors import ArenaError
from kvledger.server.machine import MemoryReading, read_memory

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
MAX_MARGIN_BYTES = 1 << 30
MARGIN_SHARE = 32
"""1/32 of the memory, at most 1 GiB, is left to everyone else."""
NICENESS = 10
"""Growing yields to everything that serves."""


class GrowthState(StrEnum):
    """Where the arena stands; the word is shown in status and metrics."""

    GROWING = "growing"
    LIMITED = "limited"
    COMPLETE = "complete"
    FAILED = "failed"


class Growth:
    """The thread and its state.

    Args:
        arena: what grows.
        page_ready: called on the growing thread after each page; must be safe to call there.
        read: where the memory readings come from.
    """

    def __init__(
        self,
        arena: Arena,
        page_ready: Callable[[], None],
        *,
        read: Callable[[], MemoryReading] = read_memory,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._arena = arena
        self._page_ready = page_ready
        self._read = read
        self._retry_seconds = retry_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvledger-growth", daemon=True)
        self.state = GrowthState.GROWING
        self.limited_by = ""
        """Why growth waits or has ended, as a sentence; empty unless it is LIMITED or FAILED."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for the page that is being instantiated."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            _be_nice()
            self._grow()
        except Exception as error:
            logger.exception("the arena does not grow any more")
            self.limited_by = f"an internal error: {error!r}; see the log, and restart the server"
            self.state = GrowthState.FAILED

    def _grow(self) -> None:
        page = 0
        while page < self._arena.pages:
            if self._stopping.is_set():
                return
            obstacle = self._shortage() or self._instantiate(page)
            if obstacle:
                self._limit(obstacle)
                self._stopping.wait(self._retry_seconds)
                continue
            self._resume()
            self._page_ready()
            page += 1
        self.state = GrowthState.COMPLETE

    def _shortage(self) -> str:
        """Why the next page would not fit; empty if it does."""
        reading = self._read()
        margin_bytes = min(reading.limit_bytes // MARGIN_SHARE, MAX_MARGIN_BYTES)
        if reading.available_bytes >= self._arena.page_bytes + margin_bytes:
            return ""
        return (
            f"the {reading.bound_by} has {format_size(reading.available_bytes)} left, "
            f"and {format_size(margin_bytes)} of it are not touched"
        )

    def _instantiate(self, page: int) -> str:
        try:
            self._arena.instantiate(page)
        except ArenaError as error:
            return str(error)
        return ""

    def _limit(self, sentence: str) -> None:
        if self.state is not GrowthState.LIMITED:
            logger.warning("the arena cannot grow for now: %s", sentence)
        self.limited_by = sentence
        self.state = GrowthState.LIMITED

    def _resume(self) -> None:
        if self.state is GrowthState.LIMITED:
            logger.info("the arena grows again")
            self.state = GrowthState.GROWING
            self.limited_by = ""


def _be_nice() -> None:
    """Let others go first. A process that is nicer already stays as it is: no user may go back."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
