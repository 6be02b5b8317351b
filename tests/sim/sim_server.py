"""A server process that tests may disturb."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import kvledger
from kvledger.client import Client
from kvledger.lab.server import ServerProcess

SOURCE = Path(kvledger.__file__).parents[1]
CLIENT_SECONDS = 30.0
"""How long a client waits for an answer of a busy machine's server."""


class Server:
    """A server that can be killed, replaced, stopped and continued; its socket stays the same."""

    def __init__(self, directory: Path, memory: str = "64MiB", *arguments: str) -> None:
        self.socket = directory / "kvledger.sock"
        self._memory = memory
        self._arguments = arguments
        self._process: ServerProcess | None = None
        self._stopped = False

    def start(self) -> None:
        """Start it and wait until all of its memory is there; a new boot each time."""
        path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
        self._process = ServerProcess(
            self.socket,
            memory=self._memory,
            arguments=self._arguments,
            env={"PYTHONPATH": path},
        ).wait_ready()
        self._stopped = False
        end = time.monotonic() + CLIENT_SECONDS
        while (memory := self.status()["memory"])["pages_ready"] < memory["pages"]:
            assert time.monotonic() < end, f"the arena does not grow: {memory}"
            time.sleep(0.005)

    def kill(self) -> None:
        """End it without warning."""
        if self._process is not None:
            self._process.kill()
            self._process = None
            self._stopped = False

    def close(self) -> None:
        """End it in order."""
        self.resume()
        if self._process is not None:
            self._process.close()
            self._process = None

    def replace(self) -> None:
        """Kill it and start another."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it is there and answers nothing."""
        if self._process is not None and not self._stopped:
            self._process.send_signal(signal.SIGSTOP)
            self._stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        if self._process is not None and self._stopped:
            self._process.send_signal(signal.SIGCONT)
            self._stopped = False

    @property
    def is_running(self) -> bool:
        """Whether there is a process, stopped or not."""
        return self._process is not None

    @property
    def is_up(self) -> bool:
        """Whether it runs and answers."""
        return self._process is not None and not self._stopped

    def status(self) -> dict[str, Any]:
        """The status document."""
        with Client(str(self.socket), timeout_seconds=CLIENT_SECONDS) as client:
            return client.status()

    def totals(self) -> dict[str, Any]:
        """What it holds now and has counted."""
        totals: dict[str, Any] = self.status()["totals"]
        return totals

    def explain(self, request: str = "") -> list[dict[str, Any]]:
        """The newest accounts."""
        with Client(str(self.socket), timeout_seconds=CLIENT_SECONDS) as client:
            return client.explain(request)

    def clear(self) -> None:
        """Drop everything it holds."""
        with Client(str(self.socket), timeout_seconds=CLIENT_SECONDS) as client:
            client.clear()
