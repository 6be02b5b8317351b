"""Real servers in processes of their own, and patience."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kvledger

START_SECONDS = 20.0
SOURCE = Path(kvledger.__file__).parents[1]


@dataclass
class RunningServer:
    """A server process that has said it is ready.

    Attributes:
        process: the process.
        socket_path: its Unix socket.
        ready_line: what it printed.
        log_path: its standard error.
    """

    process: subprocess.Popen[bytes]
    socket_path: str
    ready_line: str
    log_path: Path

    @property
    def http(self) -> str:
        """Base address of its HTTP."""
        return self.ready_line.rsplit(", ", 1)[1].strip()

    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        """End it without warning, and wait."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """Ask it to end; its exit code."""
        self.process.terminate()
        return self.process.wait(START_SECONDS)


def kvledger_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvledger", *arguments]


def kvledger_environment() -> dict[str, str]:
    """The environment in which a child process finds the package under test."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}


StartServer = Callable[..., RunningServer]


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until the condition holds; fails if it does not within a generous deadline."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)
