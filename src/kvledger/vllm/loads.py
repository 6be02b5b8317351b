"""Asynchronous loads, from vLLM's allocation to the one answer that each of them owes.

A load is told to the workers once the server has named its slots, normally in the same step. What
cannot be made in time is reported as failed, and vLLM computes the tokens. Nobody else loads a
name that is being loaded: requests with the same prefix are asked to wait for it.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence

from kvledger.naming import Name
from kvledger.protocol import Locate, Located, Reply, unpack_u64
from kvledger.vllm.channel import Channel
from kvledger.vllm.metadata import SKIP_BLOCK, CopyPlan, LoadPlan
from kvledger.vllm.tracked import Load, Tracked


class Loads:
    """All loads of one engine that vLLM still waits for."""

    def __init__(self, channel: Channel, *, chunk_tokens: int, deadline_seconds: float) -> None:
        self._channel = channel
        self._chunk_tokens = chunk_tokens
        self._deadline_seconds = deadline_seconds
        self._names: Counter[Name] = Counter()
        self.active: dict[str, Tracked] = {}
        self.orphans: list[str] = []
        """requests that wait for a load we know nothing of; they are told that it failed"""
        self.waiting = 0
        """locate requests that are not answered yet"""

    def begin(self, tracked: Tracked, table: Sequence[int], external_tokens: int) -> None:
        """vLLM has allocated blocks and waits for tokens ``local .. local + external - 1``."""
        account = tracked.account
        local = tracked.local_tokens
        stop_token = local + external_tokens
        first, stop = local // self._chunk_tokens, -(-stop_token // self._chunk_tokens)
        width = account.blocks_per_chunk
        block_tokens = self._chunk_tokens // width
        wanted = range(local // block_tokens, stop_token // block_tokens)
        block_ids = [
            table[block] if block in wanted else SKIP_BLOCK
            for block in range(first * width, stop * width)
        ]
        load = Load(
            first=first,
            stop=stop,
            local_tokens=local,
            block_ids=block_ids,
            deadline=time.monotonic() + self._deadline_seconds,
        )
        # First: if anything below fails, a load that is not active would never be answered.
        self.active[tracked.request.request_id] = tracked
        tracked.load = load
        account.begin_load(first, stop)
        tracked.loading_names = tracked.names(first, stop)
        self._names.update(tracked.loading_names)
        lookup = tracked.lookup
        if lookup is None or lookup.released or not lookup.chunks or lookup.chunks < stop:
            load.failed = True
            return
        lease = lookup.lease
        sent = self._channel.send(
            lambda number: Locate(id=number, lease=lease, first=first, count=stop - first),
            lambda reply: self._located(load, reply),
        )
        if sent:
            self.waiting += 1
        else:
            load.failed = True

    def loading(self, name: Name) -> bool:
        """Whether some request is loading this chunk now."""
        return self._names[name] > 0

    def take(self) -> tuple[tuple[LoadPlan, ...], tuple[str, ...], tuple[str, ...]]:
        """For the metadata of this step: loads to start, loads that failed before any worker was
        told, and begun loads that must not complete. Each load is handed out once."""
        plans: list[LoadPlan] = []
        failed, self.orphans = self.orphans, []
        cancelled: list[str] = []
        now = time.monotonic()
        for request_id, tracked in self.active.items():
            load = tracked.load
            assert load is not None
            late = now > load.deadline
            if load.dispatched:
                if load.failed or late:
                    cancelled.append(request_id)
            elif load.failed or late:
                load.dispatched = load.failed = True
                failed.append(request_id)
            elif load.offsets is not None:
                load.dispatched = True
                plans.append(LoadPlan(request_id, (_copies(load),)))
        return tuple(plans), tuple(failed), tuple(cancelled)

    def end(self, request_id: str, *, arrived: bool) -> Tracked | None:
        """The workers have answered; None if this load is not ours."""
        tracked = self.active.pop(request_id, None)
        if tracked is None or tracked.load is None:
            return None
        if arrived:
            load = tracked.load
            written = sum(block != SKIP_BLOCK for block in load.block_ids)
            tracked.external_tokens += (
                written * self._chunk_tokens // tracked.account.blocks_per_chunk
            )
        tracked.load = None
        tracked.account.end_load(arrived=arrived)
        self._names.subtract(tracked.loading_names)
        self._names = +self._names
        tracked.loading_names = []
        return tracked

    def fail_all(self) -> None:
        """None of these may complete (the cache was reset, or the server was lost in time)."""
        for tracked in self.active.values():
            if tracked.load is not None:
                tracked.load.failed = True

    def lost(self) -> None:
        """The server is gone. What the workers were told of they answer themselves; the rest has
        failed."""
        self.waiting = 0
        for tracked in self.active.values():
            if tracked.load is not None and not tracked.load.dispatched:
                tracked.load.failed = True

    def _located(self, load: Load, reply: Reply) -> None:
        self.waiting -= 1
        if isinstance(reply, Located):
            load.offsets = unpack_u64(reply.offsets)
        if load.offsets is None or len(load.offsets) != load.stop - load.first:
            load.failed = True


def _copies(load: Load) -> CopyPlan:
    assert load.offsets is not None
    return CopyPlan(
        group=0,
        offsets=array("Q", load.offsets).tobytes(),
        block_ids=array("i", load.block_ids).tobytes(),
    )
