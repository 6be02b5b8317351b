"""Slots and pages: no overlap, no loss, and pages change their size only when empty."""

from __future__ import annotations

import random

import pytest

from kvledger.slabs import SlotAllocator

PAGES = 4
PAGE_BYTES = 100


def ready(pages: int = PAGES) -> SlotAllocator[str]:
    slots: SlotAllocator[str] = SlotAllocator(pages=pages, page_bytes=PAGE_BYTES)
    for _ in range(pages):
        slots.add_page()
    return slots


def test_nothing_is_handed_out_before_its_page_is_ready() -> None:
    slots: SlotAllocator[str] = SlotAllocator(pages=2, page_bytes=PAGE_BYTES)
    assert slots.growing
    assert slots.allocate(50, "a", 0.0) is None
    slots.add_page()
    assert [slots.allocate(50, "a", 0.0) for _ in range(3)] == [0, 50, None]
    slots.add_page()
    assert not slots.growing
    assert slots.allocate(50, "a", 0.0) == PAGE_BYTES
    with pytest.raises(ValueError, match="has 2 pages"):
        slots.add_page()


@pytest.mark.parametrize("size", [1, 7, 33, 50, 51, 100])
def test_a_size_that_does_not_divide_the_page_wastes_the_rest_only(size: int) -> None:
    slots = ready()
    offsets: list[int] = []
    while (offset := slots.allocate(size, "x", 1.0)) is not None:
        offsets.append(offset)
    assert len(offsets) == len(set(offsets)) == PAGES * (PAGE_BYTES // size)
    assert all(offset % PAGE_BYTES + size <= PAGE_BYTES for offset in offsets)
    assert slots.used_slots == len(offsets)
    for offset in offsets:
        slots.free(offset)
    slots.check()
    assert slots.used_slots == 0


def test_an_emptied_page_serves_any_size() -> None:
    slots = ready(1)
    first = slots.allocate(50, "a", 1.0)
    second = slots.allocate(50, "b", 2.0)
    assert slots.allocate(100, "c", 3.0) is None
    assert first is not None
    assert second is not None
    slots.free(first)
    assert slots.allocate(100, "c", 3.0) is None, "one slot is still in use"
    slots.free(second)
    assert slots.allocate(100, "c", 3.0) == 0
    assert [page.object_bytes for page in slots.pages_of(100)] == [100]
    assert slots.pages_of(50) == []


def test_a_slot_is_freed_once() -> None:
    slots = ready()
    kept, freed = slots.allocate(10, "a", 1.0), slots.allocate(10, "b", 1.0)
    assert kept is not None
    assert freed is not None
    slots.free(freed)
    with pytest.raises(ValueError, match="free already"):
        slots.free(freed)
    assert list(slots.page_of(kept).occupants()) == ["a"]


def test_owners_are_found_from_inside_and_can_change() -> None:
    slots = ready(1)
    offsets = [slots.allocate(30, owner, 1.0) for owner in "abc"]
    assert offsets == [0, 30, 60]
    slots.change_owner(30, "B")
    assert sorted(slots.page_of(0).occupants()) == ["B", "a", "c"]
    assert slots.page_of(60).last_used == 1.0


def test_random_traffic_never_overlaps_and_loses_nothing() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        slots = ready()
        held: dict[int, int] = {}
        for now in range(400):
            if held and chance.random() < 0.45:
                offset = chance.choice(sorted(held))
                del held[offset]
                slots.free(offset)
            else:
                size = chance.choice([9, 20, 50, 100])
                offset_or_none = slots.allocate(size, "x", float(now))
                if offset_or_none is not None:
                    start = offset_or_none
                    for other, length in held.items():
                        assert start + size <= other or other + length <= start, f"seed {seed}"
                    held[start] = size
                else:
                    free_pages = PAGES - len({offset // PAGE_BYTES for offset in held})
                    same = [o for o, s in held.items() if s == size]
                    pages = {o // PAGE_BYTES for o in same}
                    assert free_pages == 0, f"seed {seed}"
                    assert len(same) == len(pages) * (PAGE_BYTES // size), f"seed {seed}"
            slots.check()
            assert slots.used_slots == len(held)


def test_check_notices_what_is_wrong() -> None:
    slots = ready(1)
    slots.allocate(50, "a", 1.0)
    slots.page_of(0).owners[0] = None
    with pytest.raises(AssertionError):
        slots.check()
