"""The connector with a stop-watch on every hook; vLLM loads it in place of the real one.

Each process of the engine writes two files into the folder ``KVLEDGER_TEST_RECORDS``:
``ROLE-PID.now`` holds the name of the hook that is running, and ``ROLE-PID.json`` how often each
hook ran, for how long in all, and its longest calls with the bytes that were copied in them. The
scheduler's also holds the number of tokens that vLLM has scheduled.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from records import FOLDER_VARIABLE, NOW_BYTES

from kvledger.vllm.connector import KVLedgerConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

LONGEST = 5
HOOKS = (
    "bind_connector_metadata",
    "bind_kv_cache_manager",
    "get_num_new_matched_tokens",
    "get_transfer_results",
    "handle_preemptions",
    "on_new_request",
    "register_kv_caches",
    "request_finished_all_groups",
    "reset_cache",
    "shutdown",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_save",
)
LAST_HOOKS_OF_A_STEP = ("request_finished_all_groups", "wait_for_save")


class Recorder:
    """Times calls of one process; see the module."""

    def __init__(self, role: str) -> None:
        base = Path(os.environ[FOLDER_VARIABLE]) / f"{role}-{os.getpid()}"
        self._json = base.with_suffix(".json")
        now = base.with_suffix(".now")
        now.write_bytes(bytes(NOW_BYTES))
        with now.open("r+b") as file:
            self._now = mmap.mmap(file.fileno(), NOW_BYTES)
        self._hooks: dict[str, dict[str, object]] = {}
        self.scheduled_tokens = 0

    @contextmanager
    def call(self, name: str, copied_bytes: Callable[[], int]) -> Iterator[None]:
        """Time what is done inside."""
        self._now[:] = name.encode().ljust(NOW_BYTES, b"\0")
        before, begin = copied_bytes(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self._now[:] = bytes(NOW_BYTES)
            hook = self._hooks.setdefault(name, {"calls": 0, "seconds": 0.0, "longest": []})
            hook["calls"] += 1
            hook["seconds"] += seconds
            longest = [*hook["longest"], (seconds, copied_bytes() - before)]
            hook["longest"] = sorted(longest, reverse=True)[:LONGEST]

    def write(self, failures: int) -> None:
        """Publish what was recorded."""
        part = self._json.with_suffix(".part")
        document = {
            "failures": failures,
            "scheduled_tokens": self.scheduled_tokens,
            "hooks": self._hooks,
        }
        part.write_text(json.dumps(document))
        os.replace(part, self._json)


class RecordingConnector(KVLedgerConnector):
    """See the module."""

    def __init__(self, vllm_config: object, role: object, kv_cache_config: object = None) -> None:
        self.recorder = Recorder(role.name.lower())
        self.worker = None
        with self.recorder.call("__init__", self.copied_bytes):
            super().__init__(vllm_config, role, kv_cache_config)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Counts the step's tokens."""
        self.recorder.scheduled_tokens += scheduler_output.total_num_scheduled_tokens
        with self.recorder.call("build_connector_meta", self.copied_bytes):
            plan = super().build_connector_meta(scheduler_output)
        self.recorder.write(self.guard.failures)
        return plan

    def copied_bytes(self) -> int:
        """Bytes stored and loaded so far by this rank."""
        return 0 if self.worker is None else self.worker.stored_bytes + self.worker.loaded_bytes


def _recorded(name: str) -> Callable[..., object]:
    def hook(self: RecordingConnector, *args: object, **options: object) -> object:
        with self.recorder.call(name, self.copied_bytes):
            result = getattr(super(RecordingConnector, self), name)(*args, **options)
        if name in LAST_HOOKS_OF_A_STEP:
            self.recorder.write(self.guard.failures)
        return result

    return hook


for _name in HOOKS:
    setattr(RecordingConnector, _name, _recorded(_name))
