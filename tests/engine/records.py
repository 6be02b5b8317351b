"""Reads what ``recording_connector`` has written: which hook runs now, and how long hooks took."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER_VARIABLE = "KVLEDGER_TEST_RECORDS"
NOW_BYTES = 64
_SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True)
class Hook:
    """All calls of one hook in one process.

    Attributes:
        process: "scheduler-PID" or "worker-PID".
        longest: seconds and copied bytes of the longest calls.
    """

    process: str
    name: str
    calls: int
    seconds: float
    longest: list[tuple[float, int]]

    def longest_seconds(self, bytes_per_second: float) -> float:
        """The longest call, less the time in which memory copies as many bytes."""
        return max(seconds - copied / bytes_per_second for seconds, copied in self.longest)


class Records:
    """The folder into which the processes of recorded engines write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def connector(self, connector: Mapping[str, object]) -> dict[str, object]:
        """The same configuration, with the recording connector in place of the real one."""
        recording = {
            "kv_connector": "RecordingConnector",
            "kv_connector_module_path": "recording_connector",
        }
        return {**connector, **recording}

    def environment(self) -> dict[str, str]:
        """What an engine with :meth:`connector` needs."""
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            FOLDER_VARIABLE: str(self._folder),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }

    def hook_now(self, role: str, pid: int) -> str:
        """The hook in which a process is; empty between hooks."""
        marker = (self._folder / f"{role}-{pid}.now").read_bytes()
        return marker.rstrip(b"\0").decode()

    def hooks(self) -> list[Hook]:
        """All that was recorded, of every process."""
        found: list[Hook] = []
        for path, document in self._documents().items():
            for name, hook in document["hooks"].items():
                longest = [(seconds, copied) for seconds, copied in hook["longest"]]
                found.append(Hook(path.stem, name, hook["calls"], hook["seconds"], longest))
        return found

    def failures(self) -> int:
        """Hooks that raised, in all processes."""
        return sum(document["failures"] for document in self._documents().values())

    def scheduled_tokens(self) -> int:
        """Tokens that vLLM has scheduled, in all steps."""
        return sum(document["scheduled_tokens"] for document in self._documents().values())

    def _documents(self) -> dict[Path, dict[str, object]]:
        return {path: json.loads(path.read_text()) for path in self._folder.glob("*.json")}


def copy_rate() -> float:
    """Bytes per second at which this machine copies memory now."""
    source = np.ones(_SAMPLE_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    begin = time.perf_counter()
    np.copyto(target, source)
    return _SAMPLE_BYTES / (time.perf_counter() - begin)


def table(hooks: list[Hook], bytes_per_second: float) -> str:
    """For people: the hooks that took longest."""
    rows = sorted(hooks, key=lambda hook: -hook.longest_seconds(bytes_per_second))
    lines = [
        f"{hook.process:20} {hook.name:28} {hook.calls:6} calls {hook.seconds * 1e3:9.1f} ms "
        f"in all, longest {hook.longest_seconds(bytes_per_second) * 1e3:7.2f} ms"
        for hook in rows
    ]
    return f"copy rate {bytes_per_second / 1e9:.1f} GB/s\n" + "\n".join(lines)
