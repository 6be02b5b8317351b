"""Slots carved from equal pages of the arena. Pure bookkeeping over byte offsets.

A page serves objects of one size at a time. It joins a size when that size needs room, and leaves
it when its last slot is freed, so an arena shared by several models fragments by whole pages only.
Each occupied slot has an *owner* (opaque here), so that a page can be looked through from inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Page(Generic[Owner]):
    """One page that currently serves objects of ``object_bytes``.

    Attributes:
        number: position in the arena.
        object_bytes: size of each of its slots.
        owners: owner of each slot; None is a free slot.
        last_used: when a slot of it was last allocated or touched.
    """

    __slots__ = ("_free", "last_used", "number", "object_bytes", "owners")

    def __init__(self, number: int, object_bytes: int, slots: int) -> None:
        self.number = number
        self.object_bytes = object_bytes
        self.owners: list[Owner | None] = [None] * slots
        self.last_used = 0.0
        self._free = list(range(slots - 1, -1, -1))

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def is_empty(self) -> bool:
        return len(self._free) == len(self.owners)

    def occupy(self, owner: Owner) -> int:
        index = self._free.pop()
        self.owners[index] = owner
        return index

    def vacate(self, index: int) -> None:
        if self.owners[index] is None:
            raise ValueError(f"slot {index} of page {self.number} is free already")
        self.owners[index] = None
        self._free.append(index)

    def occupants(self) -> Iterator[Owner]:
        return (owner for owner in self.owners if owner is not None)


class SlotAllocator(Generic[Owner]):
    """Allocates slots of any size up to a page, from the pages made ready so far.

    Args:
        pages: number of pages of the arena.
        page_bytes: size of each.
    """

    def __init__(self, *, pages: int, page_bytes: int) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self.ready_pages = 0
        self._free_pages: list[int] = []
        self._in_use: dict[int, Page[Owner]] = {}
        self._with_room: dict[int, dict[int, Page[Owner]]] = {}

    @property
    def growing(self) -> bool:
        """Whether some pages are still to be instantiated."""
        return self.ready_pages < self.pages

    def add_page(self) -> None:
        """The next page of the arena is instantiated and can be handed out."""
        if not self.growing:
            raise ValueError(f"the arena has {self.pages} pages, and all are ready already")
        self._free_pages.append(self.ready_pages)
        self.ready_pages += 1

    def allocate(self, object_bytes: int, owner: Owner, now: float) -> int | None:
        """Byte offset of a slot that ``owner`` now occupies, or None if there is no room."""
        with_room = self._with_room.setdefault(object_bytes, {})
        if with_room:
            page = next(iter(with_room.values()))
        elif self._free_pages:
            number = self._free_pages.pop()
            page = Page(number, object_bytes, self.page_bytes // object_bytes)
            self._in_use[number] = page
            with_room[number] = page
        else:
            return None
        index = page.occupy(owner)
        page.last_used = now
        if not page.has_room:
            del with_room[page.number]
        return page.number * self.page_bytes + index * object_bytes

    def free(self, offset: int) -> None:
        """Give back the slot at ``offset``; an emptied page becomes free for any size."""
        page = self.page_of(offset)
        page.vacate(offset % self.page_bytes // page.object_bytes)
        with_room = self._with_room[page.object_bytes]
        if page.is_empty:
            with_room.pop(page.number, None)
            del self._in_use[page.number]
            self._free_pages.append(page.number)
        else:
            with_room[page.number] = page

    def change_owner(self, offset: int, owner: Owner) -> None:
        """The occupied slot at ``offset`` belongs to ``owner`` from now on."""
        page = self.page_of(offset)
        page.owners[offset % self.page_bytes // page.object_bytes] = owner

    @property
    def used_slots(self) -> int:
        """Slots that are occupied."""
        return sum(len(page.owners) - page.free_slots for page in self._in_use.values())

    def page_of(self, offset: int) -> Page[Owner]:
        """The page in use that holds ``offset``."""
        return self._in_use[offset // self.page_bytes]

    def pages_of(self, object_bytes: int) -> list[Page[Owner]]:
        """Pages serving this size."""
        return [page for page in self._in_use.values() if page.object_bytes == object_bytes]

    def check(self) -> None:
        """Assert that every ready page is either free or in use, and room is found where it is."""
        assert len(self._free_pages) + len(self._in_use) == self.ready_pages
        assert len(set(self._free_pages)) == len(self._free_pages)
        assert not set(self._free_pages) & self._in_use.keys()
        for number, page in self._in_use.items():
            assert page.number == number
            assert not page.is_empty
            listed = number in self._with_room.get(page.object_bytes, {})
            assert listed == page.has_room
            assert page.object_bytes * len(page.owners) <= self.page_bytes
            occupied = sum(owner is not None for owner in page.owners)
            assert occupied + page.free_slots == len(page.owners)
