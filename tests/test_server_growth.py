"""The thread that instantiates the arena: nobody's limits may end it unseen."""

from __future__ import annotations

import os
import threading

import pytest

from kvledger.arena import Arena
from kvledger.server.growth import NICENESS, Growth, GrowthState
from servers import wait_until

PAGE_BYTES = 4096


def _grown(arena: Arena) -> tuple[Growth, list[int]]:
    pages: list[int] = []
    growth = Growth(arena, lambda: pages.append(1))
    growth.start()
    wait_until(lambda: growth.state in (GrowthState.COMPLETE, GrowthState.FAILED))
    growth.stop()
    return growth, pages


def test_a_process_that_is_nicer_already_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user may raise its niceness only: a server under `nice -n 15` must still grow."""

    def getpriority(_which: int, _who: int) -> int:
        return NICENESS + 5

    def setpriority(_which: int, _who: int, niceness: int) -> None:
        raise PermissionError(13, f"an ordinary user may not go back to {niceness}")

    monkeypatch.setattr(os, "getpriority", getpriority)
    monkeypatch.setattr(os, "setpriority", setpriority)
    growth, pages = _grown(Arena(pages=3, page_bytes=PAGE_BYTES))
    assert growth.state is GrowthState.COMPLETE
    assert len(pages) == 3


def test_the_thread_is_nicer_than_the_server() -> None:
    seen: list[int] = []
    growth = Growth(
        Arena(pages=1, page_bytes=PAGE_BYTES),
        lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
    )
    growth.start()
    wait_until(lambda: bool(seen))
    growth.stop()
    assert seen == [max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))]


def test_an_unexpected_error_is_a_state_that_people_see() -> None:
    class Broken(Arena):
        def instantiate(self, page: int) -> None:
            raise RuntimeError(f"page {page} is haunted")

    growth, pages = _grown(Broken(pages=2, page_bytes=PAGE_BYTES))
    assert growth.state is GrowthState.FAILED
    assert "haunted" in growth.limited_by
    assert not pages
