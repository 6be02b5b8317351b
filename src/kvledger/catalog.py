"""The books of the server: names → slots, leases, reservations, and who may still touch what.

One object's life::

    absent --reserve--> reserved --commit by every rank--> complete --parent visible--> visible
                           |                                                              |
                           +--abort, writer gone, expired--> quarantined, then free       +--evict

Rules that everything else rests on:

* An entry is *visible* only if it is complete and its parent is visible. So along a chain presence
  is monotone, and a half-written block is never a hit.
* Only visible, unleased entries without children are evicted. So a lease on the last entry of a
  prefix protects all of it, and a head is never lost before its tail.
* A slot that a rank may be writing is never handed out again before that rank has committed, let
  go, or ended (quarantine).
* Leases and reservations belong to an engine and end with it.

Pure: no clock, no sockets. Time comes in as an argument, effects go out as values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvledger.entries import (
    ChainResult,
    EngineBooks,
    Entry,
    GroupIndex,
    MatchResult,
    Reservation,
    Settlement,
)
from kvledger.naming import NAME_BYTES, Name, NamespaceId, count_names, unpack_names
from kvledger.protocol import Chain
from kvledger.reasons import Reason
from kvledger.space import Space

ENTRY_COST_BYTES = 560
"""Python memory of one entry with its name, index slot, heap item and share of ghosts, where it is
dearest (chains of one chunk: 524); measured in tests/test_catalog.py, rounded up."""
MAX_LEASES = 65_536
"""Leases an engine may hold: one for each live request, far beyond any batch."""


class Catalog:
    """See the module.

    Args:
        pages: pages of the arena.
        page_bytes: size of each.
        max_entries: entries that the catalog's own memory allows.
        namespace_floor: share of the arena that others may not take from one that is in use.
        max_reservations: open and quarantined reservations an engine may hold.
        reservation_steps: a reservation that its engine has not settled after so many of its own
            steps is aborted.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_bytes: int,
        max_entries: int,
        namespace_floor: float = 1 / 16,
        max_reservations: int = 4096,
        reservation_steps: int = 64,
    ) -> None:
        self.space = Space(
            pages=pages,
            page_bytes=page_bytes,
            max_entries=max_entries,
            namespace_floor=namespace_floor,
        )
        self.engines: dict[str, EngineBooks] = {}
        self.max_reservations = max_reservations
        self.reservation_steps = reservation_steps
        self._next_reservation = 1
        self.lookups = self.hit_chunks = self.missed_chunks = self.stored = 0
        self.aborted: Counter[Reason] = Counter()
        self.refused: Counter[Reason] = Counter()

    def add_page(self) -> None:
        """The next page of the arena is instantiated: its slots may be handed out."""
        self.space.slots.add_page()

    def open_namespace(self, namespace: NamespaceId, object_bytes: Sequence[int]) -> None:
        """Make a namespace known, with the size of an object of each group. Idempotent.

        Raises:
            ObjectTooLargeError: an object does not fit in a page.
        """
        self.space.open_namespace(namespace, object_bytes)

    def attach_engine(self, engine: str, namespace: NamespaceId, world_size: int) -> None:
        """From now on the engine works in this namespace. It must hold nothing in another."""
        books = self.engines.get(engine)
        if books is not None and (books.leases or books.open):
            raise ValueError(f"engine {engine} must be dropped before it changes its namespace")
        self.space.attach(namespace)
        if books is None:
            self.engines[engine] = EngineBooks(namespace, world_size)
        else:
            self.space.detach(books.namespace)  # after attach: it may be the same one
            books.namespace, books.world_size = namespace, world_size

    # ------------------------------------------------------------ reading

    def match(self, engine: str, lease: int, group: int, names: bytes, now: float) -> MatchResult:
        """Longest visible prefix of ``names``; its tail is leased under ``lease``.

        Replaces what that lease held before, so asking again changes nothing.
        """
        books = self.engines[engine]
        index = self._index(books, group)
        total = count_names(names)
        self.release(engine, [lease])
        tail = index.visible_prefix(names)
        if tail is not None and len(books.leases) >= MAX_LEASES:
            return MatchResult(0, Reason.TOO_MANY_RESERVATIONS)
        chunks = 0 if tail is None else tail.depth + 1
        self.lookups += 1
        self.hit_chunks += chunks
        self.missed_chunks += total - chunks
        if tail is not None:
            books.leases[lease] = tail
            tail.leases += 1
            self._touch(tail, now)
        if chunks == total:
            return MatchResult(chunks)
        missing = names[chunks * NAME_BYTES : (chunks + 1) * NAME_BYTES]
        return MatchResult(chunks, *index.why_missing(missing, now))

    def locate(self, engine: str, lease: int, first: int, count: int) -> list[int] | None:
        """Arena offsets of the leased chunks ``first .. first + count - 1``, in order.

        None if the lease is unknown or does not reach that far.
        """
        tail = self.engines[engine].leases.get(lease)
        if tail is None or first < 0 or count < 0 or first + count > tail.depth + 1:
            return None
        return tail.offsets_to_here(first)[:count]

    def release(self, engine: str, leases: Iterable[int]) -> None:
        """Give leases back; unknown ones are ignored."""
        books = self.engines[engine]
        for lease in leases:
            tail = books.leases.pop(lease, None)
            if tail is not None:
                tail.leases -= 1
                tail.index.leaves.offer(tail)

    # ------------------------------------------------------------ writing

    def reserve(
        self, engine: str, group: int, step: int, chains: Sequence[Chain], now: float
    ) -> tuple[list[ChainResult], list[Settlement]]:
        """Slots for the chunks of each chain that are not there yet.

        Also aborts this engine's reservations that are too old; the settlements tell.
        """
        books = self.engines[engine]
        index = self._index(books, group)
        names = [unpack_names(chain.names) for chain in chains]  # may raise: before any change
        late = books.reserved_before(step - self.reservation_steps)
        expired = self._abort(engine, books, late, Reason.RESERVATION_EXPIRED)
        results = [
            self._reserve_chain(books, index, step, chain.parent, chunks, now)
            for chain, chunks in zip(chains, names, strict=True)
        ]
        for result in results:
            if result.reason is not None:
                self.refused[result.reason] += 1
        return results, expired

    def commit(
        self, engine: str, rank: int, reservations: Iterable[int], now: float
    ) -> list[Settlement]:
        """A rank has written its part of these and touches them no more."""
        books = self.engines[engine]
        stored: list[int] = []
        for number in reservations:
            reservation = books.open.get(number)
            if reservation is None:
                self._acknowledge(books, number, rank)
                continue
            reservation.waiting_ranks &= ~(1 << rank)
            assert reservation.entry is not None
            if not reservation.waiting_ranks:
                self._show(books, reservation.entry, stored, now)
        return [Settlement(engine, stored, [])] if stored else []

    def abort(
        self, engine: str, rank: int | None, reservations: Iterable[int], reason: Reason
    ) -> list[Settlement]:
        """These are not going to be committed by ``rank``, which touches them no more.

        ``rank`` None is the scheduler, and means that no rank was ever told of them.
        """
        books = self.engines[engine]
        let_go = -1 if rank is None else 1 << rank
        settlements: list[Settlement] = []
        for number in reservations:
            reservation = books.open.get(number)
            if reservation is not None:
                reservation.waiting_ranks &= ~let_go
                settlements += self._abort(engine, books, [reservation], reason)
            elif rank is None:
                quarantined = books.quarantine.get(number)
                if quarantined is not None:
                    self._leave_quarantine(books, quarantined, let_go)
            else:
                self._acknowledge(books, number, rank)
        return settlements

    # ------------------------------------------------------------ lifetimes

    def rank_gone(self, engine: str, rank: int) -> list[Settlement]:
        """The process of a rank has ended: nothing of the engine's can be completed any more."""
        if engine not in self.engines:
            return []
        self.rank_acknowledged(engine, rank)
        for reservation in self.engines[engine].open.values():
            reservation.waiting_ranks &= ~(1 << rank)
        return self.drop_engine(engine)

    def drop_engine(self, engine: str) -> list[Settlement]:
        """Release the engine's leases and abort its reservations; slots that ranks may still be
        writing stay quarantined. For a scheduler that went away, and for a new epoch."""
        books = self.engines.get(engine)
        if books is None:
            return []
        self.release(engine, list(books.leases))
        return self._abort(engine, books, list(books.open.values()), Reason.WRITER_GONE)

    def rank_acknowledged(self, engine: str, rank: int) -> None:
        """The rank follows no plan of before: its share of the quarantine is lifted."""
        books = self.engines.get(engine)
        if books is not None:
            for reservation in list(books.quarantine.values()):
                self._leave_quarantine(books, reservation, 1 << rank)

    def forget_engine(self, engine: str) -> list[Settlement]:
        """All processes of the engine have ended."""
        settlements = self.drop_engine(engine)
        books = self.engines.pop(engine, None)
        if books is not None:
            self.space.detach(books.namespace)
            for reservation in list(books.quarantine.values()):
                self._leave_quarantine(books, reservation, -1)
        return settlements

    def clear(self, namespace: NamespaceId | None) -> int:
        """Drop every unleased object of one namespace, or of all; number of objects dropped.

        What is leased or being written stays, with what it hangs on.
        """
        dropped = 0
        for index in list(self.space.all_indexes()):
            if namespace is None or index.namespace == namespace:
                index.ghosts.clear()
                while (leaf := index.leaves.peek()) is not None:
                    assert isinstance(leaf, Entry)
                    self.space.remove(leaf)
                    dropped += 1
        self.space.total_ghosts = sum(len(index.ghosts) for index in self.space.all_indexes())
        return dropped

    # ------------------------------------------------------------ inside

    def _index(self, books: EngineBooks, group: int) -> GroupIndex:
        return self.space.indexes[books.namespace][group]

    def _touch(self, entry: Entry, now: float) -> None:
        entry.last_used = now
        self.space.slots.page_of(entry.offset).last_used = now

    def _reserve_chain(
        self,
        books: EngineBooks,
        index: GroupIndex,
        step: int,
        after: bytes,
        names: Sequence[Name],
        now: float,
    ) -> ChainResult:
        parent = index.entries.get(after) if after else None
        if after and parent is None:
            return ChainResult(0, [], [], Reason.PARENT_MISSING)
        if parent is not None and not self._own(books, parent):
            return ChainResult(0, [], [], Reason.BEING_WRITTEN)
        present = 0
        numbers: list[int] = []
        offsets: list[int] = []
        for name in names:
            entry = index.entries.get(name)
            if entry is None:
                entry = Entry(name, index, parent, now)
                reason = self._place(books, entry, step, now)
                if reason is not None:
                    return ChainResult(present, numbers, offsets, reason)
                assert entry.reservation is not None
                numbers.append(entry.reservation.number)
                offsets.append(entry.offset)
            elif entry.parent is not parent or numbers:
                return ChainResult(present, numbers, offsets, Reason.PARENT_MISSING)
            elif not entry.visible:
                return ChainResult(present, numbers, offsets, Reason.BEING_WRITTEN)
            else:
                present += 1
                self._touch(entry, now)
            parent = entry
        return ChainResult(present, numbers, offsets)

    def _own(self, books: EngineBooks, entry: Entry) -> bool:
        """Whether the engine may hang a chunk on this entry: it is visible, or its own."""
        reservation = entry.reservation
        return entry.visible or (reservation is not None and reservation.number in books.open)

    def _place(self, books: EngineBooks, entry: Entry, step: int, now: float) -> Reason | None:
        """Reserve a slot for a new entry and hang it on its parent."""
        if len(books.open) + len(books.quarantine) >= self.max_reservations:
            return Reason.TOO_MANY_RESERVATIONS
        parent = entry.parent
        if parent is not None:
            parent.add_child(entry)  # before anything is evicted: the parent is no leaf from now on
            parent.last_used = now
        reason = self.space.place(entry, now)
        if reason is not None:
            if parent is not None:
                parent.remove_child(entry)
                entry.index.leaves.offer(parent)
            return reason
        number = self._next_reservation
        self._next_reservation += 1
        all_ranks = (1 << books.world_size) - 1
        entry.reservation = Reservation(number, entry, entry.offset, step, all_ranks)
        books.open[number] = entry.reservation
        return None

    def _show(self, books: EngineBooks, entry: Entry, stored: list[int], now: float) -> None:
        """Make a complete entry visible if its parent is, and then its complete children."""
        stack = [entry]
        while stack:
            entry = stack.pop()
            reservation = entry.reservation
            if reservation is None or reservation.waiting_ranks:
                continue
            if entry.parent is not None and not entry.parent.visible:
                continue
            entry.visible = True
            entry.last_used = now
            entry.reservation = None
            del books.open[reservation.number]
            stored.append(reservation.number)
            self.stored += 1
            entry.index.leaves.offer(entry)
            stack.extend(entry.iterate_children())

    def _abort(
        self, engine: str, books: EngineBooks, reservations: list[Reservation], reason: Reason
    ) -> list[Settlement]:
        """Take the entries out, with all that hangs on them (of the same engine, not visible)."""
        aborted: list[int] = []
        for root in reservations:
            if root.entry is None:
                continue
            for entry in reversed(list(root.entry.subtree())):
                reservation = entry.reservation
                assert reservation is not None, "something visible hangs on what is not"
                self.space.remove(entry, free_slot=False)
                del books.open[reservation.number]
                entry.reservation = reservation.entry = None
                aborted.append(reservation.number)
                self._quarantine(books, reservation)
        if not aborted:
            return []
        self.aborted[reason] += len(aborted)
        return [Settlement(engine, [], aborted, reason)]

    def _quarantine(self, books: EngineBooks, reservation: Reservation) -> None:
        if reservation.waiting_ranks:
            self.space.slots.change_owner(reservation.offset, reservation)
            books.quarantine[reservation.number] = reservation
        else:
            self.space.slots.free(reservation.offset)

    def _acknowledge(self, books: EngineBooks, number: int, rank: int) -> None:
        reservation = books.quarantine.get(number)
        if reservation is not None:
            self._leave_quarantine(books, reservation, 1 << rank)

    def _leave_quarantine(self, books: EngineBooks, reservation: Reservation, ranks: int) -> None:
        reservation.waiting_ranks &= ~ranks
        if not reservation.waiting_ranks:
            del books.quarantine[reservation.number]
            self.space.slots.free(reservation.offset)
