"""How much memory this machine, or the control group we live in, still has. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What may be used in all, and what is left of it now.

    Attributes:
        limit_bytes: the machine's memory, or the control group's limit if that is lower.
        available_bytes: what can still be allocated without swapping or being killed.
        bound_by: "machine" or "control group", whichever leaves less available.
    """

    limit_bytes: int
    available_bytes: int
    bound_by: str


def read_memory(proc: Path = PROC, control_groups: Path = CONTROL_GROUPS) -> MemoryReading:
    """A reading of this moment; costs some tens of microseconds."""
    limit_bytes, available_bytes = _machine(proc)
    bound_by = "machine"
    for group_limit, group_available in _control_groups(proc, control_groups):
        limit_bytes = min(limit_bytes, group_limit)
        if group_available < available_bytes:
            available_bytes, bound_by = group_available, "control group"
    return MemoryReading(
        limit_bytes=limit_bytes, available_bytes=available_bytes, bound_by=bound_by
    )


def _machine(proc: Path) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    kibibytes = {key: int(fields[key].split()[0]) for key in ("MemTotal", "MemAvailable")}
    return kibibytes["MemTotal"] << 10, kibibytes["MemAvailable"] << 10


def _control_groups(proc: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Limit and headroom of each control group above us, of either version."""
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for membership in memberships:
        hierarchy, controllers, path = membership.split(":", 2)
        if hierarchy == "0":
            yield from _ancestors(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _ancestors(
                mount / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _ancestors(
    mount: Path, path: str, limit_name: str, usage_name: str, reclaimable_name: str
) -> Iterator[tuple[int, int]]:
    directory = mount / path.lstrip("/")
    if not directory.is_dir():  # a container sees the path of its host, but only its own mount
        directory = mount
    while True:
        reading = _one_group(directory, limit_name, usage_name, reclaimable_name)
        if reading is not None:
            yield reading
        if directory == mount:
            return
        directory = directory.parent


def _one_group(
    directory: Path, limit_name: str, usage_name: str, reclaimable_name: str
) -> tuple[int, int] | None:
    try:
        limit = (directory / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage_bytes = int((directory / usage_name).read_text())
        statistics = (directory / "memory.stat").read_text().split()
    except FileNotFoundError:
        return None
    counters = dict(zip(statistics[::2], statistics[1::2], strict=False))
    reclaimable_bytes = int(counters.get(reclaimable_name, "0"))
    limit_bytes = int(limit)
    return limit_bytes, max(0, limit_bytes - usage_bytes + reclaimable_bytes)
