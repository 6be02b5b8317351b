"""Room for new objects: slots, and whom to evict when there are none.

Owns every index and the slot allocator. Eviction happens on allocation only, by bytes. The oldest
leaf of all groups goes first, except that a namespace may not be pushed below its floor for the
sake of another. If that leaf has another size, a whole page of its size goes instead, with all
that hangs on its objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvledger.entries import Entry, GroupIndex, Reservation
from kvledger.errors import KVLedgerError
from kvledger.naming import NamespaceId
from kvledger.reasons import Reason
from kvledger.slabs import Page, SlotAllocator

PAGE_CANDIDATES = 4
"""Pages looked at before one is given to another size: each look walks what hangs on the page."""
GHOST_SHARE = 4
"""One evicted name is remembered for every so many entries the catalog may hold."""


class ObjectTooLargeError(KVLedgerError):
    """An object of the namespace does not fit in a page of the arena."""


class Space:
    """Indexes and slots; see the module.

    Args:
        pages: number of pages of the arena.
        page_bytes: size of each.
        max_entries: entries the catalog's own memory allows.
        namespace_floor: share of the arena below which no other namespace may push one.
    """

    def __init__(
        self, *, pages: int, page_bytes: int, max_entries: int, namespace_floor: float
    ) -> None:
        self.slots: SlotAllocator[Entry | Reservation] = SlotAllocator(
            pages=pages, page_bytes=page_bytes
        )
        self.max_entries = max_entries
        self.floor_bytes = int(pages * page_bytes * namespace_floor)
        self.indexes: dict[NamespaceId, list[GroupIndex]] = {}
        self.total_entries = 0
        self.total_ghosts = 0
        self.evicted = 0

    def open_namespace(self, namespace: NamespaceId, object_bytes: Sequence[int]) -> None:
        """Make the namespace known. Idempotent.

        Raises:
            ObjectTooLargeError: an object is larger than a page.
        """
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

    def all_indexes(self) -> Iterator[GroupIndex]:
        return (index for group in self.indexes.values() for index in group)

    def used_bytes(self, namespace: NamespaceId) -> int:
        """Bytes of slots that the namespace's entries occupy."""
        return sum(index.used_bytes for index in self.indexes[namespace])

    def place(self, entry: Entry, now: float) -> Reason | None:
        """Give a new entry a slot and put it into its index, evicting others if need be.

        Modifies nothing and returns the reason if there is no room. The caller has made sure that
        what the entry hangs on cannot be evicted meanwhile.
        """
        index = entry.index
        if self.total_entries >= self.max_entries and not self._evict_for(index, leaf_only=True):
            return Reason.NO_ROOM
        offset = self.slots.allocate(index.object_bytes, entry, now)
        if offset is None:
            if self.slots.growing:
                return Reason.ARENA_GROWING
            if not self._evict_for(index, leaf_only=False):
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

    def evict(self, entry: Entry) -> None:
        """Remove a leaf to make room, and remember its name."""
        self.remove(entry)
        self.evicted += 1
        ghosts = entry.index.ghosts
        ghosts[entry.name] = entry.last_used
        self.total_ghosts += 1
        while self.total_ghosts > max(1, self.max_entries // GHOST_SHARE):
            longest = max(self.all_indexes(), key=lambda index: len(index.ghosts))
            longest.ghosts.popitem(last=False)
            self.total_ghosts -= 1

    def _evict_for(self, wanting: GroupIndex, *, leaf_only: bool) -> bool:
        """Free a slot of the wanted size (or, ``leaf_only``, any one entry)."""
        for leaf in sorted(self._oldest_leaves(wanting), key=lambda leaf: leaf.last_used):
            if leaf_only or leaf.index.object_bytes == wanting.object_bytes:
                self.evict(leaf)
                return True
            if self._reclaim_page(leaf.index.object_bytes, wanting):
                return True
        return False

    def _oldest_leaves(self, wanting: GroupIndex) -> Iterator[Entry]:
        for namespace, group in self.indexes.items():
            if namespace != wanting.namespace and self.used_bytes(namespace) <= self.floor_bytes:
                continue
            for index in group:
                leaf = index.leaves.peek()
                if leaf is not None:
                    assert isinstance(leaf, Entry)
                    yield leaf

    def _reclaim_page(self, object_bytes: int, wanting: GroupIndex) -> bool:
        """Empty the page of ``object_bytes`` that was used least lately; False if none may go."""
        pages = sorted(self.slots.pages_of(object_bytes), key=lambda page: page.last_used)
        best: tuple[float, list[Entry]] | None = None
        for page in islice(pages, PAGE_CANDIDATES):
            doomed = self._doomed_with(page, wanting)
            if doomed is None:
                continue
            last_used = max(entry.last_used for entry in doomed)
            if best is None or last_used < best[0]:
                best = (last_used, doomed)
        if best is None:
            return False
        for entry in reversed(best[1]):
            self.evict(entry)
        return True

    def _doomed_with(
        self, page: Page[Entry | Reservation], wanting: GroupIndex
    ) -> list[Entry] | None:
        """All that goes if the page goes, parents before children; None if something must stay."""
        doomed: dict[Entry, None] = {}
        for owner in page.occupants():
            if not isinstance(owner, Entry):
                return None
            protected = owner.index.namespace != wanting.namespace and (
                self.used_bytes(owner.index.namespace) <= self.floor_bytes
            )
            if protected:
                return None
            for entry in owner.subtree():
                if entry.leases or not entry.visible:
                    return None
                doomed[entry] = None
        return sorted(doomed, key=lambda entry: entry.depth)
