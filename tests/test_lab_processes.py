"""Processes seen through /proc. The tree of a real engine is tested in tests/engine/test_lab.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from kvledger.lab.processes import (
    cpu_seconds,
    engine_pids,
    is_running,
    is_stopped,
    kill_group,
    resident_bytes,
)


def ticks(seconds: float) -> int:
    """Whole clock ticks, the unit of both sources: sums of seconds differ in the last bit."""
    return round(seconds * os.sysconf("SC_CLK_TCK"))


def test_cpu_seconds_grow_with_work() -> None:
    before = ticks(cpu_seconds(os.getpid()))
    while ticks(cpu_seconds(os.getpid())) < before + ticks(0.1):
        sum(range(100_000))
    times = os.times()
    assert ticks(times.user + times.system) >= before + ticks(0.1)


def test_resident_bytes_grow_with_memory() -> None:
    before = resident_bytes(os.getpid())
    held = b"\1" * (64 << 20)
    assert resident_bytes(os.getpid()) - before > len(held) // 2


def test_a_process_that_is_gone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ProcessLookupError, match=str(gone.pid)):
        cpu_seconds(gone.pid)
    with pytest.raises(ProcessLookupError, match=str(gone.pid)):
        resident_bytes(gone.pid)


def test_a_stopped_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not is_stopped(process.pid):
            assert time.monotonic() < deadline
        process.kill()
    assert not is_stopped(process.pid)


def test_a_process_without_an_engine() -> None:
    assert engine_pids(os.getpid()) is None


def test_a_group_is_killed_with_its_grandchildren() -> None:
    sleeper = "import time; time.sleep(600)"
    leader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys\n"
            f"child = subprocess.Popen([sys.executable, '-c', '{sleeper}'])\n"
            "print(child.pid, flush=True)\n"
            "child.wait()",
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    grandchild = int(leader.stdout.readline())
    assert is_running(leader.pid)
    assert is_running(grandchild)
    kill_group(leader.pid)
    assert not is_running(grandchild)
    assert not is_running(leader.pid), "it has ended, and waits to be reaped"
    leader.wait()
    leader.stdout.close()
