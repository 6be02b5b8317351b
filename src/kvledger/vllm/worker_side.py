"""The worker's half of the connector: it follows the plan of each step, byte by byte.

Stores are copied before the hook returns in which the blocks can be read; loads are copied inline,
within a budget of bytes a step. A plan of another boot of the server, or of another arena, is never
followed: its stores are skipped and its loads fail. Each load is answered exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvledger.client import Connection
from kvledger.errors import KVLedgerError
from kvledger.protocol import (
    Abort,
    Closed,
    Commit,
    Describe,
    Error,
    Opened,
    Request,
    Settled,
    Welcome,
)
from kvledger.reasons import Reason
from kvledger.vllm.channel import Channel, Listener
from kvledger.vllm.metadata import CopyPlan, LoadPlan, StepPlan
from kvledger.vllm.transfer import Transfer

logger = logging.getLogger("kvledger")

LOAD_BUDGET_BYTES = 256 << 20
"""Loaded in one step, some 30 ms on a CPU: other requests' tokens wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One server's arena, mapped by this rank.

    Attributes:
        boot: the server's run.
        arena_generation: its arena.
        transfer: copies between that arena and this rank's KV tensors.
    """

    boot: str
    arena_generation: int
    transfer: Transfer


@dataclass(slots=True)
class ActiveLoad:
    """A load under way: the copies still to make."""

    plan: LoadPlan
    boot: str
    arena_generation: int
    copy: int = 0
    chunk: int = 0


MakeTransfer = Callable[[Connection], Transfer]
"""Maps a server's arena; may raise KVLedgerError."""


class WorkerSide(Listener):
    """See the module.

    Args:
        make_channel: makes the channel for this listener.
        make_transfer: maps the arena of a connection and binds the engine's tensors to it.
        fields: this rank's part of the namespace descriptor.
        part_bytes: bytes of this rank's part of one object, for each KV-cache group.
        blocks_per_chunk: engine blocks of one chunk.
    """

    def __init__(
        self,
        *,
        make_transfer: MakeTransfer,
        fields: dict[str, str],
        part_bytes: list[int],
        blocks_per_chunk: int,
        load_budget_bytes: int = LOAD_BUDGET_BYTES,
    ) -> None:
        self._make_transfer = make_transfer
        self._fields = fields
        self._part_bytes = part_bytes
        self._blocks_per_chunk = blocks_per_chunk
        self._load_budget_bytes = load_budget_bytes
        self._channel: Channel | None = None
        self._mapped: dict[Connection, Attachment] = {}
        self._attachment: Attachment | None = None
        self._part_offsets: list[int] | None = None
        self._unsent: list[tuple[bytes, Reason | None]] = []
        self._to_store: tuple[StepPlan, tuple[CopyPlan, ...]] | None = None
        self._loads: dict[str, ActiveLoad] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self.stored_bytes = 0
        self.loaded_bytes = 0

    def attach(self, channel: Channel) -> None:
        """Use this channel from now on."""
        self._channel = channel

    # ------------------------------------------------------------ the link's thread

    def on_link_connected(self, connection: Connection) -> None:
        """Map the new server's arena and describe this rank, before any plan speaks of it."""
        transfer = self._make_transfer(connection)
        welcome = connection.welcome
        self._mapped = {connection: Attachment(welcome.boot, welcome.arena_generation, transfer)}
        connection.send(
            Describe(id=connection.next_id(), fields=self._fields, part_bytes=self._part_bytes)
        )

    # ------------------------------------------------------------ what the server says

    def on_connected(self, welcome: Welcome) -> None:  # noqa: ARG002
        """From now on plans of this boot can be followed."""
        assert self._channel is not None
        connection = self._channel.connection
        self._attachment = None if connection is None else self._mapped.get(connection)

    def on_lost(self) -> None:
        """The server is gone. Its arena stays mapped: loads of its plans can still be copied."""
        self._part_offsets = None
        self._unsent = []

    def on_push(self, push: Opened | Closed | Settled) -> None:
        """Where this rank's part lies within each object."""
        if isinstance(push, Opened):
            self._part_offsets = push.part_offsets

    def on_refused(self, error: Error) -> None:
        """The server refuses this rank; the scheduler's side tells the operator of the engine."""
        logger.warning("kvledger: the server refuses this rank: %s", error.message)

    # ------------------------------------------------------------ steps

    def before_step(self, plan: StepPlan) -> None:
        """Nothing of this step has been written yet: read what must be read now."""
        self._poll()
        self.store_planned()  # some ranks are never asked to save what a step computed
        self._store(plan, plan.rescues)

    def begin_step(self, plan: StepPlan) -> None:
        """The step is about to run; its complete blocks are stored by :meth:`store_planned`."""
        self._to_store = (plan, plan.stores)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin this step's loads and go on with earlier ones, within the budget."""
        for request_id in plan.failed_loads:
            self._answer(request_id, arrived=False)
        for request_id in plan.cancelled_loads:
            if request_id in self._loads:
                self._answer(request_id, arrived=False)
        for new in plan.loads:
            self._loads[new.request_id] = ActiveLoad(new, plan.boot, plan.arena_generation)
        budget = self._load_budget_bytes
        for load in list(self._loads.values()):
            if budget <= 0:
                break
            budget -= self._load_some(load, budget)

    def store_planned(self) -> None:
        """Copy the blocks that this step has completed, and commit them."""
        if self._to_store is not None:
            plan, copies = self._to_store
            self._to_store = None
            self._store(plan, copies)

    def take_results(self) -> tuple[set[str], set[str]]:
        """Loads answered since the last call: (all, those that failed)."""
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def fail_loads(self) -> None:
        """Answer every load under way with a failure."""
        for request_id in list(self._loads):
            self._answer(request_id, arrived=False)

    def shutdown(self) -> None:
        """The engine ends."""
        if self._channel is not None:
            self._flush()
            self._channel.close()

    # ------------------------------------------------------------ copies

    def _follows(self, boot: str, arena_generation: int) -> Attachment | None:
        """The attachment, if these plans are of the arena it maps."""
        attachment = self._attachment
        if (
            attachment is None
            or attachment.boot != boot
            or attachment.arena_generation != arena_generation
        ):
            return None
        return attachment

    def _store(self, plan: StepPlan, copies: tuple[CopyPlan, ...]) -> None:
        for copy in copies:
            attachment = self._follows(plan.boot, plan.arena_generation)
            stored = False
            if attachment is not None and self._part_offsets is not None:
                stored = self._store_one(attachment, copy, self._part_offsets[copy.group])
            self._unsent.append((copy.reservations, None if stored else Reason.WRITER_FAILED))
        if copies:
            self._flush()

    def _store_one(self, attachment: Attachment, copy: CopyPlan, part_offset: int) -> bool:
        block_ids, offsets = self._arrays(copy)
        try:
            self.stored_bytes += attachment.transfer.store(
                copy.group, block_ids, offsets, part_offset
            )
        except KVLedgerError as error:
            logger.error("kvledger: blocks were not stored: %s", error)
            return False
        return True

    def _load_some(self, load: ActiveLoad, budget: int) -> int:
        """Copy chunks of a load until it is complete or the budget is used; bytes copied."""
        attachment = self._follows(load.boot, load.arena_generation)
        if attachment is None or self._part_offsets is None:
            self._answer(load.plan.request_id, arrived=False)
            return 0
        copied = 0
        while load.copy < len(load.plan.copies):
            copy = load.plan.copies[load.copy]
            block_ids, offsets = self._arrays(copy)
            if load.chunk >= len(offsets):
                load.copy, load.chunk = load.copy + 1, 0
                continue
            part = self._part_bytes[copy.group]
            if copied >= budget:
                break
            stop = load.chunk + max(1, (budget - copied) // part)
            some = slice(load.chunk, stop)
            part_offset = self._part_offsets[copy.group]
            try:
                attachment.transfer.load(copy.group, block_ids[some], offsets[some], part_offset)
            except KVLedgerError as error:
                logger.error("kvledger: a load failed: %s", error)
                self._answer(load.plan.request_id, arrived=False)
                return copied
            done = min(stop, len(offsets)) - load.chunk
            copied += done * part
            load.chunk += done
        else:
            self._answer(load.plan.request_id, arrived=True)
        self.loaded_bytes += copied
        return copied

    def _arrays(self, copy: CopyPlan) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        block_ids = np.frombuffer(copy.block_ids, dtype=np.int32)
        offsets = np.frombuffer(copy.offsets, dtype=np.uint64)
        return block_ids.reshape(len(offsets), self._blocks_per_chunk), offsets

    def _answer(self, request_id: str, *, arrived: bool) -> None:
        self._loads.pop(request_id, None)
        self._finished.add(request_id)
        if not arrived:
            self._failed.add(request_id)

    # ------------------------------------------------------------ messages

    def _poll(self) -> None:
        if self._channel is not None:
            self._channel.poll()
            self._flush()

    def _flush(self) -> None:
        """Send what is to be said of reservations; kept while it cannot be sent."""
        channel = self._channel
        while self._unsent and channel is not None and channel.usable:
            if not channel.send(_verdict(*self._unsent[0])):
                break
            self._unsent.pop(0)


def _verdict(reservations: bytes, failure: Reason | None) -> Callable[[int], Request]:
    if failure is None:
        return lambda number: Commit(id=number, reservations=reservations)
    return lambda number: Abort(id=number, reservations=reservations, reason=failure)
