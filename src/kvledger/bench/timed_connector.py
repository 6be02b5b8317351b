"""The connector with a clock around each hook; the bench's engines load it in its place.

Use it as vLLM uses any connector, ``"kv_connector": "TimedConnector"`` with
``"kv_connector_module_path": "kvledger.bench.timed_connector"``, and give a directory for the
times in the extra config, see :mod:`kvledger.bench.hook_times`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger.bench.hook_times import DIRECTORY_KEY, SUFFIX, HookTimesWriter
from kvledger.errors import ConfigurationError
from kvledger.vllm.connector import KVLedgerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

WITHIN_ANOTHER = frozenset({"request_finished"})
"""Hooks that only call another hook, where the time is counted."""

HOOKS = tuple(
    name
    for name, member in vars(KVLedgerConnector).items()
    if isfunction(member) and not name.startswith("_") and name not in WITHIN_ANOTHER
)
"""All of the connector's own; what it inherits does nothing."""


class TimedConnector(KVLedgerConnector):
    """Behaves as its base class does.

    Raises:
        ConfigurationError: the extra config names no directory for the times.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        directory = vllm_config.kv_transfer_config.kv_connector_extra_config.get(DIRECTORY_KEY)
        if not isinstance(directory, str):
            raise ConfigurationError(f"TimedConnector needs a directory under {DIRECTORY_KEY!r}")
        path = Path(directory) / f"{role.name.lower()}-{os.getpid()}{SUFFIX}"
        self.times = HookTimesWriter(path, HOOKS)

    def note_bytes(self) -> None:
        """Say how many bytes this rank has copied."""
        if self.worker is not None:
            self.times.set_bytes(stored=self.worker.stored_bytes, loaded=self.worker.loaded_bytes)


def _timed(
    index: int, hook: Callable[Concatenate[TimedConnector, Parameters], Returned]
) -> Callable[Concatenate[TimedConnector, Parameters], Returned]:
    @functools.wraps(hook)
    def timed(
        self: TimedConnector, /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Returned:
        start = time.perf_counter_ns()
        try:
            return hook(self, *args, **kwargs)
        finally:
            self.times.add(index, time.perf_counter_ns() - start)
            self.note_bytes()

    return timed


for _index, _name in enumerate(HOOKS):
    setattr(TimedConnector, _name, _timed(_index, getattr(KVLedgerConnector, _name)))
