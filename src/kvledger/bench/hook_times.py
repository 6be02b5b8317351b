"""Times of hooks, kept in a small file that both the engine and the bench have mapped.

Writing costs the engine a few hundred nanoseconds and no system call, and the bench can read at
any moment. The file begins with the hooks' names as JSON; each hook then has two numbers, calls
and nanoseconds, in the order of the names. Two more numbers say how many bytes were copied.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

DIRECTORY_KEY = "bench.hook_times"
"""Key of the connector's extra config: directory for these files, one for each process."""
SUFFIX = ".times"
_NAMES_BYTES = 4096
_CELL = struct.Struct("QQ")


class HookTimesWriter:
    """The engine's side. Owned by one thread.

    Args:
        path: the file to make.
        hooks: names of the hooks; their indexes are used from now on.
    """

    def __init__(self, path: Path, hooks: Sequence[str]) -> None:
        names = json.dumps(list(hooks)).encode()
        if len(names) > _NAMES_BYTES:
            raise ValueError(f"the names of the hooks take {len(names)} of {_NAMES_BYTES} bytes")
        self._totals = [[0, 0] for _ in hooks]
        size = _NAMES_BYTES + (len(hooks) + 1) * _CELL.size
        path.write_bytes(names.ljust(_NAMES_BYTES) + bytes(size - _NAMES_BYTES))
        with open(path, "r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), size)

    def add(self, hook: int, nanoseconds: int) -> None:
        """One more call of this hook has taken so long."""
        total = self._totals[hook]
        total[0] += 1
        total[1] += nanoseconds
        _CELL.pack_into(self._mapping, _NAMES_BYTES + hook * _CELL.size, *total)

    def set_bytes(self, *, stored: int, loaded: int) -> None:
        """So many bytes have been copied since the start."""
        _CELL.pack_into(
            self._mapping, _NAMES_BYTES + len(self._totals) * _CELL.size, stored, loaded
        )


@dataclass(frozen=True, slots=True)
class HookTimes:
    """Totals since the start of the engine, of all its processes.

    Attributes:
        calls: of each hook.
        seconds: in each hook.
        stored_bytes, loaded_bytes: copied to and from the arena.
    """

    calls: dict[str, int]
    seconds: dict[str, float]
    stored_bytes: int
    loaded_bytes: int

    @property
    def total_seconds(self) -> float:
        """In all hooks."""
        return sum(self.seconds.values())

    def since(self, earlier: Self) -> HookTimes:
        """What has been added since an earlier reading."""
        return HookTimes(
            {hook: calls - earlier.calls.get(hook, 0) for hook, calls in self.calls.items()},
            {hook: time - earlier.seconds.get(hook, 0.0) for hook, time in self.seconds.items()},
            self.stored_bytes - earlier.stored_bytes,
            self.loaded_bytes - earlier.loaded_bytes,
        )


def read_hook_times(directory: Path) -> HookTimes:
    """Sum of all files in the directory, as they are now."""
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    stored = loaded = 0
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        data = path.read_bytes()
        hooks: list[str] = json.loads(data[:_NAMES_BYTES])
        cells = list(_CELL.iter_unpack(data[_NAMES_BYTES:]))
        for hook, (count, nanoseconds) in zip(hooks, cells[:-1], strict=True):
            calls[hook] = calls.get(hook, 0) + count
            seconds[hook] = seconds.get(hook, 0.0) + nanoseconds / 1e9
        stored, loaded = stored + cells[-1][0], loaded + cells[-1][1]
    return HookTimes(calls, seconds, stored, loaded)
