"""What a server says about itself and its engines, read as an operator would read it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engines import ask

from kvledger.client import Client
from kvledger.lab.engine import EngineProcess
from kvledger.lab.requests import Result
from kvledger.lab.server import ServerProcess

PATIENCE_SECONDS = 60.0
ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.01
_NUDGE_SECONDS = 1.0


def status(server: ServerProcess) -> dict[str, Any]:
    """The server's status document."""
    with Client(str(server.socket_path), timeout_seconds=ANSWER_SECONDS) as client:
        return client.status()


def totals(server: ServerProcess) -> dict[str, Any]:
    """What the server holds and has counted."""
    return status(server)["totals"]


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE_SECONDS
) -> float:
    """Poll until it holds; the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - begin


def holds_nothing(server: ServerProcess) -> bool:
    """Whether no engine has a lease, a reservation or a slot that it may still write."""
    now = totals(server)
    return now["leases"] == now["reservations"] == now["quarantined"] == 0


def account_of(
    engine: EngineProcess, server: ServerProcess, engine_id: str, result: Result
) -> dict[str, Any]:
    """The closed account of a request; an idle engine that still owes it gets one more step."""
    begin = time.monotonic()
    nudged = begin
    while True:
        with Client(str(server.socket_path), timeout_seconds=ANSWER_SECONDS) as client:
            found = client.explain(result.request_id)
        mine = [account for account in found if account["engine"] == engine_id]
        if mine:
            assert len(mine) == 1, mine
            return mine[0]
        now = time.monotonic()
        assert now - begin < PATIENCE_SECONDS, f"no account of {result.request_id}"
        if now - nudged > _NUDGE_SECONDS:
            ask(engine, [1], max_tokens=1)
            nudged = now
        time.sleep(_POLL_SECONDS)


def chunks(account: dict[str, Any], fate: str) -> int:
    """Chunks of an account that have met this fate."""
    return sum(count for word, count in account["fates"] if word == fate)


def troubles(log: str) -> list[str]:
    """Lines of an engine's log in which the connector wants the operator's attention."""
    words = ("WARNING", "ERROR", "Traceback")
    return [
        line
        for line in log.splitlines()
        if "kvledger" in line and any(word in line for word in words)
    ]
