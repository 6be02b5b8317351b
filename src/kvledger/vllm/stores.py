"""Slots for owed chunks: one pipelined reserve a step, answered now or in a later step.

The answer is waited for by the caller, for about a millisecond. What is late is used in the next
step if the blocks can still be read then, and given back otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvledger.ledger import Grant
from kvledger.protocol import (
    Abort,
    Chain,
    ChainReserved,
    Error,
    Reply,
    Reserve,
    Reserved,
    Settled,
    pack_u64,
    unpack_u64,
)
from kvledger.reasons import Reason
from kvledger.vllm.channel import Channel
from kvledger.vllm.lookups import REASON_OF_ERROR
from kvledger.vllm.metadata import CopyPlan
from kvledger.vllm.tracked import Tracked

MAX_CHUNKS_PER_STEP = 4096
"""Names in one reserve: 128 KiB on the wire, and as many slots as an engine may hold."""
MAX_BACKOFF_STEPS = 64
"""A request that is refused again and again asks at most this seldom."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One chain of a reserve that is under way."""

    tracked: Tracked
    chunks: range
    question: int


class Stores:
    """Reservations of one engine, from the question to the settlement."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._owners: dict[int, tuple[Tracked, int]] = {}
        self._dispatched: set[int] = set()
        self._unused: list[int] = []
        self._questions = 0
        self.waiting = 0
        """reserves that are not answered yet"""

    @property
    def open_reservations(self) -> int:
        """Reservations that the server has granted and not settled."""
        return len(self._owners)

    @property
    def under_way(self) -> int:
        """Open reservations that workers were told of: they can settle without any step."""
        return len(self._dispatched)

    def ask(self, candidates: Iterable[Tracked], step: int) -> bool:
        """Ask for slots for all owed chunks of the candidates whose bytes can be read.

        Returns whether an answer is to be expected.
        """
        asked: list[Asked] = []
        chains: list[Chain] = []
        left = MAX_CHUNKS_PER_STEP - len(self._owners)
        self._questions += 1
        for tracked in candidates:
            for run in tracked.account.runs_to_ask():
                if left <= 0:
                    break
                chunks = run[:left]
                left -= len(chunks)
                names = tracked.names(max(chunks.start - 1, 0), chunks.stop)
                parent = names.pop(0) if chunks.start else b""
                chains.append(Chain(parent=parent, names=b"".join(names)))
                asked.append(Asked(tracked, chunks, self._questions))
        if not chains or not self._channel.send(
            lambda number: Reserve(id=number, step=step, group=0, chains=chains),
            lambda reply: self._answer(asked, reply, step),
        ):
            return False
        self.waiting += 1
        for item in asked:
            item.tracked.account.ask(item.chunks, item.question)
        return True

    def take(self, tracked: Iterable[Tracked], group: int = 0) -> tuple[CopyPlan, ...]:
        """The copies of all granted chunks of these requests; they are in flight from now on."""
        offsets = array("Q")
        reservations = array("Q")
        block_ids = array("i")
        for item in tracked:
            for _chunk, grant, blocks in item.account.take_granted():
                offsets.append(grant.offset)
                reservations.append(grant.reservation)
                block_ids.extend(blocks)
        self._dispatched.update(reservations)
        if not offsets:
            return ()
        return (CopyPlan(group, offsets.tobytes(), block_ids.tobytes(), reservations.tobytes()),)

    def give_back(self, reservations: Iterable[int]) -> None:
        """These slots are not going to be used; no worker was told of them."""
        for number in reservations:
            self._owners.pop(number, None)
            self._unused.append(number)

    def flush(self) -> None:
        """Send what is to be given back; kept while the server is silent."""
        if self._unused and self._channel.usable:
            packed = pack_u64(self._unused)
            if self._channel.send(
                lambda number: Abort(id=number, reservations=packed, reason=Reason.BLOCK_REUSED)
            ):
                self._unused = []

    def settle(self, push: Settled) -> None:
        """The server has ended some reservations."""
        for number in unpack_u64(push.stored):
            self._settle(number, None)
        failure = Reason(push.reason) if push.reason else Reason.WRITER_FAILED
        for number in unpack_u64(push.aborted):
            self._settle(number, failure)

    def lost(self) -> None:
        """The server is gone, and every reservation with it."""
        self._owners.clear()
        self._dispatched.clear()
        self._unused = []
        self.waiting = 0

    def _settle(self, number: int, failure: Reason | None) -> None:
        self._dispatched.discard(number)
        owner = self._owners.pop(number, None)
        if owner is None:
            return
        tracked, chunk = owner
        if tracked.account.settle(chunk, number, failure):
            self.give_back([number])  # given up before any worker was told: only we can let it go
        if failure is Reason.PARENT_MISSING:
            tracked.account.heal()

    def _answer(self, asked: list[Asked], reply: Reply, step: int) -> None:
        self.waiting -= 1
        if isinstance(reply, Reserved) and len(reply.chains) == len(asked):
            for item, result in zip(asked, reply.chains, strict=True):
                self._answer_chain(item, result, step)
            return
        code = reply.code if isinstance(reply, Error) else None
        reason = (REASON_OF_ERROR.get(code) if code else None) or Reason.SERVER_ABSENT
        for item in asked:
            item.tracked.account.answer(item.chunks, item.question, 0, [])
            _refuse(item.tracked, reason, step)

    def _answer_chain(self, item: Asked, result: ChainReserved, step: int) -> None:
        numbers = unpack_u64(result.reservations)
        offsets = unpack_u64(result.offsets)
        grants = [Grant(number, offset) for number, offset in zip(numbers, offsets, strict=True)]
        tracked, account = item.tracked, item.tracked.account
        for position, number in enumerate(numbers):
            self._owners[number] = (tracked, item.chunks.start + result.present + position)
        self.give_back(account.answer(item.chunks, item.question, result.present, grants))
        if not result.reason:
            tracked.refusals, tracked.retry_step = 0, 0
            return
        reason = Reason(result.reason)
        healed = reason is Reason.PARENT_MISSING and account.heal()
        if not healed:
            _refuse(tracked, reason, step)


def _refuse(tracked: Tracked, reason: Reason, step: int) -> None:
    """Remember why, and ask less and less often; another engine's write is soon over."""
    tracked.refusal = reason
    if reason is Reason.BEING_WRITTEN:
        tracked.retry_step = step + 1
        return
    tracked.refusals += 1
    tracked.retry_step = step + min(MAX_BACKOFF_STEPS, 1 << min(tracked.refusals, 10))
