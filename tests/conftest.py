"""Shared by all tests: real servers in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StartServer]:
    """Factory: ``server(memory="64MiB", *more_arguments, socket_path=None, http="off")``."""
    started: list[RunningServer] = []

    def start(
        *more_arguments: str,
        memory: str = "64MiB",
        socket_path: str | None = None,
        http: str = "off",
    ) -> RunningServer:
        number = len(started)
        path = socket_path or str(tmp_path / f"server{number}.sock")
        log_path = tmp_path / f"server{number}.log"
        arguments = ["serve", "--memory", memory, "--socket", path, "--http", http]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                kvledger_command(*arguments, *more_arguments),
                stdout=subprocess.PIPE,
                stderr=log,
                env=kvledger_environment(),
            )
        assert process.stdout is not None
        running = RunningServer(process, path, "", log_path)
        started.append(running)
        if select.select([process.stdout], [], [], START_SECONDS)[0]:
            running.ready_line = process.stdout.readline().decode()
        assert "listening" in running.ready_line, running.log()
        return running

    yield start
    for running in started:
        with suppress(ProcessLookupError):
            running.process.send_signal(signal.SIGCONT)
        running.kill()
        assert running.process.stdout is not None
        running.process.stdout.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until the condition holds; fails if it does not within a generous deadline."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)
