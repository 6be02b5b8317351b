"""The account of one request: what became of every full chunk of it.

The engine's own absolute numbers say which chunks are *valid* (all their tokens' KV is computed or
loaded); the account owns only the *fate* of each, which changes through
:data:`kvledger.fates.TRANSITIONS` and in no other way.

When the request ends, every chunk that was ever valid has exactly one final fate: PRESENT, LOADED,
STORED, or SKIPPED with a reason. That is what *balanced* means (:meth:`Account.imbalance`).

Pure: no I/O, no clock, no torch, no vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvledger.fates import FINAL, TRANSITIONS, Event, Fate, LedgerError
from kvledger.reasons import Reason

MAX_HEALS = 3
"""How often a running request stores its chain anew because its head was evicted meanwhile."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A slot that the server reserved for one chunk."""

    reservation: int
    offset: int


@dataclass(frozen=True, slots=True)
class StoreRule:
    """Which chunks of a request may be stored.

    Attributes:
        chunks: only chunks before this index; None is no bound.
        reason: why the others are not.
    """

    chunks: int | None = None
    reason: Reason = Reason.STORE_DISABLED


class Account:
    """Fates of the chunks of one request in one KV-cache group.

    Attributes:
        request_id: the engine's id of the request.
        fates: one for each chunk that was ever valid, or is being loaded.
        reasons: reason of each skipped chunk.
        valid_chunks: chunks that are valid now, in the blocks the request holds now.
        ever_valid: high-water mark of ``valid_chunks``.
        known_chunks: leading chunks the server had at the last look-up.
        grants: slots of granted and in-flight chunks.
        ended: the request is over; only what is under way can still change.
        frozen: set by a reset of the cache: nothing more is stored or loaded.
    """

    def __init__(
        self, request_id: str, *, chunk_tokens: int, blocks_per_chunk: int, rule: StoreRule
    ) -> None:
        self.request_id = request_id
        self.chunk_tokens = chunk_tokens
        self.blocks_per_chunk = blocks_per_chunk
        self.rule = rule
        self.fates: list[Fate] = []
        self.reasons: dict[int, Reason] = {}
        self.valid_chunks = 0
        self.ever_valid = 0
        self.known_chunks = 0
        self.grants: dict[int, Grant] = {}
        self.ended = False
        self.frozen: Reason | None = None
        self.dropped: Counter[str] = Counter()
        """final fates of chunks whose tokens were cut off again (streaming input)"""
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._asked: dict[int, int] = {}  # chunk → number of the question that asked for it
        self._settled = 0  # every chunk before this index has a final fate
        self._heals = 0

    # ------------------------------------------------------------ what the engine did

    def advance(self, valid_tokens: int) -> None:
        """The engine's numbers of this step: the KV of so many tokens is valid at its end.

        Chunks that are valid for the first time are owed, unless the server is known to have
        them or a rule forbids storing them.
        """
        self.valid_chunks = valid_tokens // self.chunk_tokens
        for chunk in range(len(self.fates), self.valid_chunks):
            if chunk < self.known_chunks and self.frozen is None:
                self.fates.append(Fate.PRESENT)
                continue
            self.fates.append(Fate.OWED)
            forbidden = self._forbidden(chunk)
            if forbidden is not None:
                self._apply(chunk, Event.GIVE_UP, forbidden)
        self.ever_valid = max(self.ever_valid, self.valid_chunks)

    def _forbidden(self, chunk: int) -> Reason | None:
        if self.frozen is not None:
            return self.frozen
        if self.rule.chunks is not None and chunk >= self.rule.chunks:
            return self.rule.reason
        return None

    def is_closed_at(self, valid_tokens: int) -> bool:
        """Whether every chunk among so many valid tokens has its final fate, and no other exists.

        Then a step has nothing to do for this request; most decode steps are such steps.
        """
        return valid_tokens // self.chunk_tokens == len(self.fates) == self._settled

    @property
    def needs_table(self) -> bool:
        """Whether some owed chunk is valid and its engine blocks are not known yet."""
        return any(chunk not in self._blocks for chunk in self._owed())

    def capture(self, table: Sequence[int]) -> None:
        """Remember the engine blocks of the owed chunks, from the request's block table."""
        width = self.blocks_per_chunk
        for chunk in self._owed():
            blocks = tuple(table[chunk * width : (chunk + 1) * width])
            if len(blocks) == width and all(blocks):  # 0 is vLLM's null block: never read it
                self._blocks[chunk] = blocks

    def lose_blocks(self) -> None:
        """The request has been preempted: its blocks belong to others from the next step on.

        They can still be read before anything of that step writes; then :meth:`forget_blocks`.
        """
        self.valid_chunks = 0

    def forget_blocks(self) -> list[int]:
        """The moment has passed. Returns reservations that are not going to be used."""
        unused: list[int] = []
        for chunk in list(self._unsettled()):
            fate = self.fates[chunk]
            if fate is Fate.GRANTED:
                unused.append(self.grants.pop(chunk).reservation)
            if fate in (Fate.GRANTED, Fate.ASKED):
                self._owe(chunk, Event.FORGET)
        self._blocks.clear()
        return unused

    def truncate(self, tokens: int) -> list[int]:
        """The request's tokens were cut back: chunks beyond have no name any more.

        Returns reservations that are not going to be used.
        """
        keep = tokens // self.chunk_tokens
        unused: list[int] = []
        for chunk in range(keep, len(self.fates)):
            grant = self.grants.pop(chunk, None)
            if grant is not None and self.fates[chunk] is Fate.GRANTED:
                unused.append(grant.reservation)
            final = self.fates[chunk] if self.fates[chunk] in FINAL else Fate.SKIPPED
            reason = self.reasons.pop(chunk, Reason.TOKENS_TRUNCATED)
            self.dropped[f"{final}:{reason}" if final is Fate.SKIPPED else final] += 1
            self._blocks.pop(chunk, None)
            self._asked.pop(chunk, None)
        del self.fates[keep:]
        self.valid_chunks = min(self.valid_chunks, keep)
        self.ever_valid = min(self.ever_valid, keep)
        self.known_chunks = min(self.known_chunks, keep)
        self._settled = min(self._settled, keep)
        return unused

    # ------------------------------------------------------------ loads

    def begin_load(self, first: int, stop: int) -> None:
        """Chunks ``first .. stop - 1`` are being loaded; those before are local and known."""
        for chunk in range(first, stop):
            if chunk == len(self.fates):
                self.fates.append(Fate.OWED)
            elif chunk > len(self.fates):
                self.advance(chunk * self.chunk_tokens)
                self.fates.append(Fate.OWED)
            self._apply(chunk, Event.LOAD)
            self._blocks.pop(chunk, None)

    def end_load(self, *, arrived: bool) -> None:
        """The load is complete, or it failed and nothing of it may be believed: what was never
        valid leaves the account."""
        if arrived:
            for chunk, fate in enumerate(self.fates):
                if fate is Fate.LOADING:
                    self._apply(chunk, Event.ARRIVE)
            self.ever_valid = max(self.ever_valid, len(self.fates))
            return
        self.known_chunks = 0
        del self.fates[self.ever_valid :]
        self._settled = min(self._settled, self.ever_valid)
        for chunk, fate in enumerate(self.fates):
            if fate is Fate.LOADING:
                self._owe(chunk, Event.FAIL)
            elif fate is Fate.PRESENT:
                self._owe(chunk, Event.FORGET)

    # ------------------------------------------------------------ stores

    def runs_to_ask(self) -> Iterator[range]:
        """Runs of consecutive chunks that want a slot and whose bytes can be read."""
        start = stop = -1
        for chunk in self._unsettled():
            if self.fates[chunk] is not Fate.OWED or chunk not in self._blocks:
                continue
            if chunk != stop:
                if stop > start:
                    yield range(start, stop)
                start = chunk
            stop = chunk + 1
        if stop > start:
            yield range(start, stop)

    def ask(self, chunks: range, question: int) -> None:
        """A reserve for these chunks has been sent; its number is not used twice."""
        for chunk in chunks:
            self._apply(chunk, Event.ASK)
            self._asked[chunk] = question

    def answer(
        self, chunks: range, question: int, present: int, grants: Sequence[Grant]
    ) -> list[int]:
        """The server's answer to :meth:`ask`: leading ``present`` ones are there, the next got
        ``grants``, the rest was refused.

        The answer may come late, after the request has moved on; the chunk may even have another
        name by then. Returns reservations that are not going to be used.
        """
        unused: list[int] = []
        for position, chunk in enumerate(chunks):
            grant = grants[position - present] if 0 <= position - present < len(grants) else None
            if self._asked.get(chunk) != question:
                if grant is not None:
                    unused.append(grant.reservation)
            elif position < present:
                self._apply(chunk, Event.FOUND)
            elif grant is None:
                self._apply(chunk, Event.REFUSE)
            elif chunk not in self._blocks:
                unused.append(grant.reservation)
                self._apply(chunk, Event.REFUSE)
            else:
                self._apply(chunk, Event.GRANT)
                self.grants[chunk] = grant
        return unused

    def heal(self) -> bool:
        """A parent of a chunk is gone from the server: the whole chain is owed again.

        False, and nothing changes, if that has happened too often or the blocks are gone.
        """
        if self.ended or not self.valid_chunks or self._heals >= MAX_HEALS:
            return False
        self._heals += 1
        self.known_chunks = 0
        for chunk in range(min(self.valid_chunks, len(self.fates))):
            fate = self.fates[chunk]
            if fate in FINAL and self._forbidden(chunk) is None:
                self._apply(chunk, Event.FORGET)
        return True

    def take_granted(self) -> list[tuple[int, Grant, tuple[int, ...]]]:
        """Chunks to copy in this step: (chunk, slot, engine blocks); they are in flight now."""
        taken: list[tuple[int, Grant, tuple[int, ...]]] = []
        for chunk in list(self._unsettled()):
            if self.fates[chunk] is Fate.GRANTED:
                self._apply(chunk, Event.DISPATCH)
                taken.append((chunk, self.grants[chunk], self._blocks.pop(chunk)))
        return taken

    def settle(self, chunk: int, reservation: int, failure: Reason | None) -> bool:
        """The server has ended a reservation: stored, or given up for ``failure``.

        Ignored if the chunk has moved on (its tokens were cut, or the server was lost). Returns
        whether no worker was told of the slot, so that none will say that it let go of it.
        """
        grant = self.grants.get(chunk)
        if grant is None or grant.reservation != reservation:
            return False
        del self.grants[chunk]
        untold = self.fates[chunk] is Fate.GRANTED
        if failure is None:
            self._apply(chunk, Event.COMMIT)
        else:
            self._apply(chunk, Event.ABANDON, self.frozen or failure)
        return untold

    def lose_server(self) -> None:
        """The server is gone, and with it all that it knew of this request."""
        self.known_chunks = 0
        self.grants.clear()
        for chunk, fate in enumerate(self.fates):
            if not (self.ended and fate in FINAL):
                self._owe(chunk, Event.FORGET)

    # ------------------------------------------------------------ ends

    def freeze(self, reason: Reason) -> list[int]:
        """Store and load nothing more. Returns reservations that are not going to be used."""
        self.frozen = reason
        self.known_chunks = 0
        return self.give_up(reason)

    def end(self) -> None:
        """The request is over."""
        self.ended = True

    def give_up(self, reason: Reason) -> list[int]:
        """Skip every chunk whose bytes have not been handed to the workers.

        Returns reservations that are not going to be used.
        """
        unused: list[int] = []
        for chunk in list(self._unsettled()):
            if (self.fates[chunk], Event.GIVE_UP) in TRANSITIONS:
                grant = self.grants.pop(chunk, None)
                if grant is not None:
                    unused.append(grant.reservation)
                self._apply(chunk, Event.GIVE_UP, reason)
        self._blocks.clear()
        return unused

    # ------------------------------------------------------------ reading

    @property
    def open_chunks(self) -> int:
        """Chunks without a final fate."""
        return sum(1 for _ in self._unsettled())

    @property
    def loading(self) -> bool:
        return any(self.fates[chunk] is Fate.LOADING for chunk in self._unsettled())

    def balance(self) -> Counter[str]:
        """How many chunks have each fate; skipped ones as ``skipped:reason``."""
        counts = Counter(self.dropped)
        for chunk, fate in enumerate(self.fates):
            reason = self.reasons.get(chunk)
            counts[fate if reason is None else f"{fate}:{reason}"] += 1
        return counts

    def imbalance(self) -> str | None:
        """Why the books of an ended request do not balance; None if they do."""
        if len(self.fates) != self.ever_valid:
            return f"{self.ever_valid} chunks were valid, {len(self.fates)} are accounted for"
        unsettled = [chunk for chunk, fate in enumerate(self.fates) if fate not in FINAL]
        if unsettled:
            return f"chunks {unsettled[:8]} have no final fate"
        skipped = {chunk for chunk, fate in enumerate(self.fates) if fate is Fate.SKIPPED}
        if skipped != self.reasons.keys():
            return "a reason and a skipped chunk do not match"
        if self.grants:
            return f"slots are still held for chunks {sorted(self.grants)[:8]}"
        return None

    # ------------------------------------------------------------ inside

    def _unsettled(self) -> Iterator[int]:
        fates = self.fates
        while self._settled < len(fates) and fates[self._settled] in FINAL:
            self._settled += 1
        return (c for c in range(self._settled, len(fates)) if fates[c] not in FINAL)

    def _owed(self) -> Iterator[int]:
        """Owed chunks that are valid in the blocks the request holds now."""
        valid = self.valid_chunks
        return (c for c in self._unsettled() if c < valid and self.fates[c] is Fate.OWED)

    def _owe(self, chunk: int, event: Event) -> None:
        """An event that makes a chunk owed again, unless it must not be stored."""
        self._apply(chunk, event)
        reason = self._forbidden(chunk)
        if reason is not None and self.fates[chunk] is Fate.OWED:
            self._apply(chunk, Event.GIVE_UP, reason)

    def _apply(self, chunk: int, event: Event, reason: Reason | None = None) -> None:
        fate = self.fates[chunk]
        after = TRANSITIONS.get((fate, event))
        if after is None:
            raise LedgerError(
                f"request {self.request_id}, chunk {chunk}: {event} cannot happen to what is {fate}"
            )
        self.fates[chunk] = after
        if fate is Fate.ASKED:
            del self._asked[chunk]
        if after is Fate.SKIPPED:
            assert reason is not None, "a skipped chunk has a reason"
            self.reasons[chunk] = reason
        else:
            self.reasons.pop(chunk, None)
            if after not in FINAL:
                self._settled = min(self._settled, chunk)
