"""The worker's half of the connector: it follows the plan of each step, byte by byte.

Stores are copied before the hook returns in which the blocks can be read; loads are copied inline,
within a budget of bytes a step. A plan of another boot of the server, of another arena or of
another namespace is never followed: its stores are skipped and its loads fail. Each load is
answered exactly once.

A slot that is being read is protected by a lease, and the server may have to drop it. It tells the
ranks first, so a rank looks once more *after* it has copied: if nothing was said, nobody else can
have been given the slot before the copy was complete. A slot that is being written is protected by
quarantine until this rank describes itself anew, which the link's thread does: so that thread and
the copies exclude each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


class Given(NamedTuple):
    """Under which attachment a plan's slots were given; all of it must still hold."""

    boot: str
    arena_generation: int
    namespace: str


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

    def has_given(self, given: Given) -> bool:
        """Whether slots and reservation numbers given there belong to this attachment."""
        return (self.boot, self.arena_generation) == (given.boot, given.arena_generation)


@dataclass(slots=True)
class ActiveLoad:
    """A load under way: the copies still to make."""

    plan: LoadPlan
    given: Given
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
        self._copying = threading.Lock()
        self._mapped: dict[Connection, Attachment] = {}
        self._attachment: Attachment | None = None
        self._namespace = ""
        self._part_offsets: list[int] = []
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

    def on_link_connected(self, connection: Connection) -> Describe:
        """Map the new server's arena, before any plan speaks of it; says how to describe us."""
        transfer = self._make_transfer(connection)
        welcome = connection.welcome
        attachment = Attachment(welcome.boot, welcome.arena_generation, transfer)
        with self._copying:  # from here on no slot of an earlier attachment is touched
            self._attachment = None
            self._mapped = {connection: attachment}
        return Describe(id=connection.next_id(), fields=self._fields, part_bytes=self._part_bytes)

    # ------------------------------------------------------------ what the server says

    def on_connected(self, welcome: Welcome) -> None:  # noqa: ARG002
        """From now on plans of this boot can be followed."""
        assert self._channel is not None
        connection = self._channel.connection
        self._attachment = None if connection is None else self._mapped.get(connection)

    def on_lost(self) -> None:
        """The server is gone, or has ended this attachment: no slot of it may be touched."""
        self._attachment = None
        self._namespace = ""
        self._unsent = []

    def on_push(self, push: Opened | Closed | Settled) -> None:
        """Where this rank's part lies within each object, or that no slot is ours any more."""
        if isinstance(push, Opened):
            self._namespace, self._part_offsets = push.namespace, push.part_offsets
        elif isinstance(push, Closed):
            self._namespace = ""

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
            self._loads[new.request_id] = ActiveLoad(new, _given(plan))
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

    def _follows(self, given: Given) -> Attachment | None:
        """The attachment, if these slots were given under it and are still ours."""
        attachment = self._attachment
        if attachment is None or not self._namespace:
            return None
        ours = attachment.has_given(given) and given.namespace == self._namespace
        return attachment if ours else None

    def _store(self, plan: StepPlan, copies: tuple[CopyPlan, ...]) -> None:
        for copy in copies:
            with self._copying:
                attachment = self._attachment
                if attachment is None or not attachment.has_given(_given(plan)):
                    continue  # reservation numbers of another attachment mean nothing to this one
                followed = self._follows(_given(plan))
                stored = followed is not None and self._store_one(followed, copy)
            self._unsent.append((copy.reservations, None if stored else Reason.WRITER_FAILED))
        if copies:
            self._flush()

    def _store_one(self, attachment: Attachment, copy: CopyPlan) -> bool:
        part_offset = self._part_offsets[copy.group]
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
        try:
            with self._copying:
                copied = self._copy_some(load, budget)
        except KVLedgerError as error:
            logger.error("kvledger: a load failed: %s", error)
            copied = None
        if copied is None:
            self._answer(load.plan.request_id, arrived=False)
            return 0
        self.loaded_bytes += copied
        if load.copy >= len(load.plan.copies):
            self._poll()  # see the module: the slots must have been ours until here
            arrived = self._follows(load.given) is not None
            self._answer(load.plan.request_id, arrived=arrived)
        return copied

    def _copy_some(self, load: ActiveLoad, budget: int) -> int | None:
        """Move a load on by at most the budget (but a chunk); None if its slots are not ours."""
        attachment = self._follows(load.given)
        if attachment is None:
            return None
        copied = 0
        while load.copy < len(load.plan.copies) and copied < budget:
            copy = load.plan.copies[load.copy]
            block_ids, offsets = self._arrays(copy)
            part_bytes = self._part_bytes[copy.group]
            stop = load.chunk + max(1, (budget - copied) // part_bytes)
            some = slice(load.chunk, min(stop, len(offsets)))
            copied += attachment.transfer.load(
                copy.group, block_ids[some], offsets[some], self._part_offsets[copy.group]
            )
            load.chunk = some.stop
            if load.chunk >= len(offsets):
                load.copy, load.chunk = load.copy + 1, 0
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


def _given(plan: StepPlan) -> Given:
    return Given(plan.boot, plan.arena_generation, plan.namespace)


def _verdict(reservations: bytes, failure: Reason | None) -> Callable[[int], Request]:
    if failure is None:
        return lambda number: Commit(id=number, reservations=reservations)
    return lambda number: Abort(id=number, reservations=reservations, reason=failure)
