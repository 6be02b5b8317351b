"""Fixtures shared by all tests."""

from __future__ import annotations

import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from servers import (
    START_SECONDS,
    RunningServer,
    StartServer,
    kvledger_command,
    kvledger_environment,
)


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


def pytest_configure(config: pytest.Config) -> None:
    """Marks of all tests."""
    config.addinivalue_line(
        "markers",
        "pitfall(*numbers): ways to get a vLLM connector wrong that the test would catch, as "
        "listed in docs/conformance.md",
    )
