"""Room for new objects: slots, and whom to evict when there are none.

Owns every index and the slot allocator. Eviction happens on allocation only, by bytes. The oldest
leaf of all groups goes first, except that a namespace in use may not be pushed below its floor for
the sake of another. If that leaf has another size, a whole page of its size goes instead, with all
that hangs on its objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvledger.entries import Entry, GroupIndex, Reservation
from kvledger.errors import KVLedgerError
from kvledger.naming import NamespaceId
from kvledger.reasons import Reason
from kvledger.slabs import Page, SlotAllocator

PAGE_CANDIDATES = 4
"""Pages that may go, compared before one is given to another size: each is walked in full."""
GHOST_SHARE = 4
"""One evicted name is remembered for every so many entries the catalog may hold."""
LEAF_SLACK = 1024
"""Stale items of a leaf queue that are not worth a compaction, beside as many as live ones."""


class ObjectTooLargeError(KVLedgerError):
    """An object of the namespace does not fit in a page of the arena."""


class Space:
    """Indexes and slots; see the module.

    Args:
        pages: number of pages of the arena.
        page_bytes: size of each.
        max_entries: entries the catalog's own memory allows.
        namespace_floor: share of the arena below which no other namespace may push one that an
            engine works in; at most an equal share of the arena.
    """

    def __init__(
        self, *, pages: int, page_bytes: int, max_entries: int, namespace_floor: float
    ) -> None:
        self.slots: SlotAllocator[Entry | Reservation] = SlotAllocator(
            pages=pages, page_bytes=page_bytes
        )
        self.max_entries = max_entries
        self.floor_bytes = int(pages * page_bytes * namespace_floor)
        self.attached: Counter[NamespaceId] = Counter()
        """Engines that work in each namespace: what nobody works in has no floor, or the
        namespaces of past epochs would keep the arena from the present one."""
        self.indexes: dict[NamespaceId, list[GroupIndex]] = {}
        self.total_entries = 0
        self.total_ghosts = 0
        self.evicted = 0

    def open_namespace(self, namespace: NamespaceId, object_bytes: Sequence[int]) -> None:
        """Make the namespace known. Idempotent.

        Raises:
            ObjectTooLargeError: an object is larger than a page.
            ValueError: a size is not positive, or the namespace is open with other sizes.
        """
        if not object_bytes or min(object_bytes) < 1:
            raise ValueError(f"a namespace has groups with objects of ≥ 1 byte: {object_bytes}")
        largest = max(object_bytes)
        page_bytes = self.slots.page_bytes
        if largest > page_bytes:
            raise ObjectTooLargeError(
                f"one chunk of this model takes {largest:,} bytes, but a page of the arena has "
                f"{page_bytes:,} (at most 1/64 of --memory): start the server with more memory "
                f"or the engine with a smaller kvledger.chunk_tokens"
            )
        if namespace not in self.indexes:
            self.indexes[namespace] = [
                GroupIndex(namespace, group, size) for group, size in enumerate(object_bytes)
            ]
        known = [index.object_bytes for index in self.indexes[namespace]]
        if known != list(object_bytes):
            raise ValueError(f"the namespace has objects of {known} bytes, not {object_bytes}")

    def attach(self, namespace: NamespaceId) -> None:
        """One more engine works in the namespace."""
        self.attached[namespace] += 1

    def detach(self, namespace: NamespaceId) -> None:
        """One engine fewer works in the namespace."""
        self.attached[namespace] -= 1
        if not self.attached[namespace]:
            del self.attached[namespace]
            self._forget_if_void(namespace)

    def _forget_if_void(self, namespace: NamespaceId) -> None:
        """Drop a namespace that nobody works in and that holds nothing: each update of an engine's
        weights leaves one behind, and every eviction looks at all of them."""
        group = self.indexes.get(namespace, [])
        if namespace not in self.attached and not any(index.entries for index in group):
            self.total_ghosts -= sum(len(index.ghosts) for index in group)
            self.indexes.pop(namespace, None)

    def all_indexes(self) -> Iterator[GroupIndex]:
        return (index for group in self.indexes.values() for index in group)

    def used_bytes(self, namespace: NamespaceId) -> int:
        """Bytes of slots that the namespace's entries occupy."""
        return sum(index.used_bytes for index in self.indexes[namespace])

    def place(self, entry: Entry, now: float) -> Reason | None:
        """Give a new entry a slot and put it into its index, evicting others if need be.

        Returns the reason if there is no room; the entry is nowhere then. The caller has made sure
        that what the entry hangs on cannot be evicted meanwhile.
        """
        index = entry.index
        if self.total_entries >= self.max_entries and not self._evict_any(index, now):
            return Reason.NO_ROOM
        offset = self.slots.allocate(index.object_bytes, entry, now)
        if offset is None:
            if self.slots.growing:
                return Reason.ARENA_GROWING
            if not self._evict_for(index, now):
                return Reason.NO_ROOM
            offset = self.slots.allocate(index.object_bytes, entry, now)
            assert offset is not None, "evicting made no room"
        entry.offset = offset
        index.entries[entry.name] = entry
        self.total_entries += 1
        if index.ghosts.pop(entry.name, None) is not None:
            self.total_ghosts -= 1
        return None

    def remove(self, entry: Entry, *, free_slot: bool = True) -> None:
        """Take a childless entry out of its index and chain; its parent may become a leaf."""
        assert entry.children is None, "an entry with children is never removed"
        index, parent = entry.index, entry.parent
        del index.entries[entry.name]
        self.total_entries -= 1
        entry.visible = False
        if parent is not None:
            parent.remove_child(entry)
            parent.last_used = max(parent.last_used, entry.last_used)
            index.leaves.offer(parent)
            entry.parent = None
        if free_slot:
            self.slots.free(entry.offset)
        if not index.entries:
            self._forget_if_void(index.namespace)

    def evict(self, entry: Entry, now: float) -> None:
        """Remove a leaf to make room, and remember its name."""
        self.remove(entry)
        self.evicted += 1
        index = entry.index
        if index.namespace not in self.indexes:
            return
        if len(index.leaves) > 2 * len(index.entries) + LEAF_SLACK:
            index.leaves.compact()
        index.ghosts[entry.name] = now
        self.total_ghosts += 1
        while self.total_ghosts > max(1, self.max_entries // GHOST_SHARE):
            longest = max(self.all_indexes(), key=lambda index: len(index.ghosts))
            longest.ghosts.popitem(last=False)
            self.total_ghosts -= 1

    def _evict_any(self, wanting: GroupIndex, now: float) -> bool:
        """Evict the oldest leaf of any size."""
        leaf = next(iter(self._oldest_leaves(wanting)), None)
        if leaf is not None:
            self.evict(leaf, now)
        return leaf is not None

    def _evict_for(self, wanting: GroupIndex, now: float) -> bool:
        """Free a slot of the wanted size, or a page; False if nothing that would do may go."""
        futile: set[int] = set()
        for leaf in self._oldest_leaves(wanting):
            size = leaf.index.object_bytes
            if size == wanting.object_bytes:
                self.evict(leaf, now)
                return True
            if size not in futile and self._reclaim_page(size, wanting, now):
                return True
            futile.add(size)
        return False

    def _oldest_leaves(self, wanting: GroupIndex) -> list[Entry]:
        """The oldest leaf of each group that may lose one, the oldest of all first."""
        leaves: list[Entry] = []
        for index in self.all_indexes():
            if self._may_lose(index.namespace, index.object_bytes, wanting):
                leaf = index.leaves.peek()
                if leaf is not None:
                    assert isinstance(leaf, Entry)
                    leaves.append(leaf)
        return sorted(leaves, key=lambda leaf: leaf.last_used)

    def _may_lose(self, namespace: NamespaceId, lost_bytes: int, wanting: GroupIndex) -> bool:
        """Whether the namespace keeps its floor when it loses so much for the sake of another."""
        if namespace == wanting.namespace or namespace not in self.attached:
            return True
        equal_share = self.slots.pages * self.slots.page_bytes // len(self.attached)
        return self.used_bytes(namespace) - lost_bytes >= min(self.floor_bytes, equal_share)

    def _reclaim_page(self, object_bytes: int, wanting: GroupIndex, now: float) -> bool:
        """Empty the page of ``object_bytes`` that was used least lately; False if none may go."""
        candidates: list[tuple[float, list[Entry]]] = []
        for page in sorted(self.slots.pages_of(object_bytes), key=lambda page: page.last_used):
            doomed = self._doomed_with(page, wanting)
            if doomed is not None:
                candidates.append((max(entry.last_used for entry in doomed), doomed))
                if len(candidates) == PAGE_CANDIDATES:
                    break
        if not candidates:
            return False
        _, doomed = min(candidates, key=lambda candidate: candidate[0])
        for entry in reversed(doomed):
            self.evict(entry, now)
        return True

    def _doomed_with(
        self, page: Page[Entry | Reservation], wanting: GroupIndex
    ) -> list[Entry] | None:
        """All that goes if the page goes, parents before children; None if something must stay."""
        doomed: set[Entry] = set()
        lost: Counter[NamespaceId] = Counter()
        stack: list[Entry] = []
        for owner in page.occupants():
            if not isinstance(owner, Entry):
                return None
            stack.append(owner)
            while stack:
                entry = stack.pop()
                if entry in doomed:  # and so is all that hangs on it
                    continue
                if entry.leases or not entry.visible:
                    return None
                doomed.add(entry)
                lost[entry.index.namespace] += entry.index.object_bytes
                stack.extend(entry.iterate_children())
        if not all(self._may_lose(namespace, lost[namespace], wanting) for namespace in lost):
            return None
        return sorted(doomed, key=lambda entry: entry.depth)
