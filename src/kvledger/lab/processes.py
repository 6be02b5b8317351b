"""The processes of one engine, found and measured through /proc."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class EnginePids:
    """Process ids of one engine.

    Attributes:
        api: the front end, which is also the leader of the process group.
        core: the engine core with the scheduler.
        workers: one for each rank, in the order in which they were started.
    """

    api: int
    core: int
    workers: tuple[int, ...]

    def all(self) -> tuple[int, ...]:
        """Every process, the front end first."""
        return (self.api, self.core, *self.workers)


def engine_pids(api: int) -> EnginePids | None:
    """The processes below the front end ``api``, or None while they are not all there.

    vLLM spawns the core from the front end and the workers from the core. Python's resource
    trackers are also among the children; they do not run ``spawn_main``.
    """
    children = _children()
    cores = [pid for pid in children.get(api, []) if _is_spawned(pid)]
    if len(cores) != 1:
        return None
    workers = tuple(pid for pid in children.get(cores[0], []) if _is_spawned(pid))
    return EnginePids(api=api, core=cores[0], workers=workers) if workers else None


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that waits to be reaped has."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether the process exists and every thread of it has been stopped by a signal."""
    threads = Path(f"/proc/{pid}/task")
    try:
        states = [(thread / "stat").read_text() for thread in threads.iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return all(text[text.rindex(")") + 2] == "T" for text in states)


def kill_group(leader: int) -> None:
    """Kill every process of the group and wait until all have ended.

    The leader must not be reaped yet: until then nobody else can be given the group's number.
    """
    with contextlib.ExitStack() as stack:
        watched: list[int] = []
        for pid in _group_members(leader):
            with contextlib.suppress(ProcessLookupError):
                watched.append(os.pidfd_open(pid))
                stack.callback(os.close, watched[-1])
        os.killpg(leader, signal.SIGKILL)
        for pidfd in watched:
            select.select([pidfd], [], [])


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, user and system, all threads.

    Raises:
        ProcessLookupError: there is no such process.
    """
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included.

    Raises:
        ProcessLookupError: there is no such process.
    """
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on; None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, and may itself hold blanks and parentheses.
    return text[text.rindex(")") + 2 :].split()


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _group_members(leader: int) -> list[int]:
    found = ((pid, _stat(pid)) for pid in _pids())
    return [pid for pid, fields in found if fields is not None and int(fields[2]) == leader]


def _children() -> dict[int, list[int]]:
    """Children of every process, in order of their ids."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    return children


def _is_spawned(pid: int) -> bool:
    """Whether this is a process of the engine (vLLM may have given it a title) and no helper."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"spawn_main" in command or command.startswith(b"VLLM::")
