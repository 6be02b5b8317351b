"""The server by itself: how fast it starts, what it takes, and what it does when idle."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvledger.bench.lookup import wait_grown
from kvledger.bench.machine import BenchError, own_resident_bytes
from kvledger.bench.results import ServerFigures
from kvledger.bench.statistics import median_of
from kvledger.lab.processes import cpu_seconds
from kvledger.lab.server import ServerProcess

MEMORY = "256MiB"


def measure_server(
    scratch: Path,
    *,
    starts: int = 9,
    idle_seconds: float = 10.0,
    announce: Callable[[str], None] = lambda _: None,
) -> ServerFigures:
    """Start servers, one after the other, and watch one of them do nothing.

    Args:
        scratch: directory for sockets and logs.
        starts: servers to start.
        idle_seconds: how long to watch; processor time is counted in hundredths of a second.
        announce: told what is being measured.

    Raises:
        BenchError, ServerError: a server does not start.
    """
    announce(f"{starts} starts of the server")
    seconds = [_start_seconds(scratch, number) for number in range(starts)]
    announce("an idle server")
    with ServerProcess(scratch / "idle.sock", memory=MEMORY) as server:
        wait_grown(server.socket_path)
        resident_bytes = own_resident_bytes(server.pid)
        (idle_cores,) = idle_use([[server.pid]], idle_seconds)
    return ServerFigures(
        start_seconds=median_of(seconds),
        resident_bytes=resident_bytes,
        idle_cores=idle_cores,
        idle_seconds=idle_seconds,
    )


def idle_use(groups: list[list[int]], seconds: float) -> list[float]:
    """Cores that each group of processes uses over the next ``seconds``. Blocks as long."""
    start = time.monotonic()
    before = [sum(map(cpu_seconds, group)) for group in groups]
    time.sleep(seconds)
    after = [sum(map(cpu_seconds, group)) for group in groups]
    elapsed = time.monotonic() - start
    return [(late - early) / elapsed for early, late in zip(before, after, strict=True)]


def _start_seconds(scratch: Path, number: int) -> float:
    """From the creation of the process to its ready line."""
    command = [sys.executable, "-m", "kvledger", "serve", "--memory", MEMORY, "--http", "off"]
    command += ["--socket", str(scratch / f"start{number}.sock")]
    with open(scratch / "starts.log", "ab") as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline()
            seconds = time.perf_counter() - start
            process.kill()
            process.wait()
    if b"listening" not in line:
        log_text = (scratch / "starts.log").read_text(errors="replace")
        raise BenchError(f"the server does not start:\n{log_text[-2000:]}")
    return seconds
