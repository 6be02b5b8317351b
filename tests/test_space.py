"""Room: who is evicted, whose floor holds, which page changes its size, and what it all costs."""

from __future__ import annotations

import gc
import math
import tracemalloc

import pytest

from catalog_books import (
    OBJECT_BYTES,
    ONE,
    PAGE_BYTES,
    SLOTS_PER_PAGE,
    TWO,
    Books,
    fill,
    names,
    two_models,
)
from kvledger import space as space_module
from kvledger.audit import catalog_statistics
from kvledger.catalog import ENTRY_COST_BYTES, Catalog
from kvledger.entries import ChainResult, MatchResult
from kvledger.eviction import LeafQueue
from kvledger.naming import NamespaceId, pack_names
from kvledger.protocol import Chain
from kvledger.reasons import Reason

# ---------------------------------------------------------------- eviction


def test_a_prefix_is_eaten_from_its_tail() -> None:
    """Scenario: 8 chunks of room; six of A stored in three steps of two; then four of B."""
    a_chunks, b_chunks, room = 6, 4, 8
    for touched in ([], names("a", a_chunks)[2:4]):
        books = Books(pages=room // SLOTS_PER_PAGE)
        a = names("a", a_chunks)
        for first in range(0, a_chunks, 2):
            books.store("e", a[first : first + 2], parent=a[first - 1] if first else b"")
        if touched:
            assert books.peek(touched) == 0, "the middle of a chain is no prefix"
        assert books.store("e", names("b", b_chunks)).reason is None
        assert books.peek(a) == a_chunks - (a_chunks + b_chunks - room) == 4
        assert books.peek(names("b", b_chunks)) == b_chunks


def test_the_least_recently_used_tail_goes_first() -> None:
    books = Books(pages=2)
    old, new = names("old", 4), names("new", 4)
    books.store("e", old)
    books.store("e", new)
    books.peek(old)  # now the other one is older
    books.store("e", names("c", 3))
    assert (books.peek(old), books.peek(new)) == (4, 1)


def test_all_parts_of_a_chunk_go_together() -> None:
    """Scenario: an object is whole or not there; a rank that is lost makes it a miss."""
    ranks = 4
    books = Books(pages=1)
    books.catalog.attach_engine("tp", ONE, ranks)
    chain = names("a", 3)
    numbers = books.reserve("tp", chain).reservations
    for rank in range(ranks - 1):
        books.commit("tp", numbers, rank=rank)
    books.commit("tp", numbers[:2], rank=ranks - 1)  # the last rank failed at the third chunk
    assert books.match("tp", chain) == MatchResult(2, Reason.BEING_WRITTEN)
    books.abort("tp", numbers[2:], rank=ranks - 1)
    assert books.match("tp", chain) == MatchResult(2, Reason.NEVER_SEEN)
    assert books.catalog.space.used_bytes(ONE) == 2 * OBJECT_BYTES
    assert not books.quarantined("tp"), "the other ranks had committed"


def test_an_evicted_name_says_when() -> None:
    books = Books(pages=1)
    chain = names("a", 4)
    books.store("e", chain)
    books.now = 100.0
    numbers = books.reserve("f", names("b", 1)).reservations  # at 101
    books.abort("f", numbers)
    books.now = 140.0
    assert books.match("f", chain) == MatchResult(3, Reason.EVICTED, 141.0 - 101.0)
    books.store("e", chain[3:], parent=chain[2])
    assert books.match("f", chain).chunks == 4, "what is stored again is no ghost"


def test_ghosts_are_bounded_and_the_oldest_are_forgotten() -> None:
    entries = 16
    books = Books(pages=4, max_entries=entries)
    stored = [names(f"c{k}", 1) for k in range(3 * entries)]
    for chain in stored:
        books.store("e", chain)
    remembered = entries // 4
    assert books.catalog.space.total_ghosts == remembered
    reasons = [books.match("e", chain).reason for chain in stored]
    never, evicted = Reason.NEVER_SEEN, Reason.EVICTED
    gone = 2 * entries - remembered
    assert reasons == [never] * gone + [evicted] * remembered + [None] * entries


def test_growing_is_not_the_same_as_full() -> None:
    books = Books(pages=2, ready=1)
    books.store("e", names("a", SLOTS_PER_PAGE))
    refused = books.reserve("e", names("b", 1))
    assert refused == ChainResult(0, [], [], Reason.ARENA_GROWING)
    assert books.peek(names("a", 4)) == 4, "nothing is evicted while memory is on its way"
    books.catalog.add_page()
    assert books.store("e", names("b", SLOTS_PER_PAGE)).reason is None
    assert books.reserve("e", names("c", 1)).reason is None
    books = Books(pages=1)
    books.reserve("e", names("a", SLOTS_PER_PAGE))
    assert books.reserve("f", names("b", 1)) == ChainResult(0, [], [], Reason.NO_ROOM)
    assert catalog_statistics(books.catalog).refused == {Reason.NO_ROOM: 1}
    with pytest.raises(ValueError, match="all are ready"):
        books.catalog.add_page()


# ---------------------------------------------------------------- several sizes and namespaces


@pytest.mark.parametrize("second_bytes", [OBJECT_BYTES, OBJECT_BYTES // 2, PAGE_BYTES])
def test_a_floor_keeps_one_model_from_flushing_another(second_bytes: int) -> None:
    pages, floor = 16, 1 / 4
    arena = pages * PAGE_BYTES
    books = two_models(pages, floor, second_bytes)
    fill(books, "e", arena // OBJECT_BYTES)
    fill(books, "other", 3 * arena // second_bytes)
    assert books.catalog.space.used_bytes(ONE) == arena * floor
    assert books.catalog.space.used_bytes(TWO) == arena * (1 - floor)
    # Its own objects have no floor: the model goes on within what is left to it.
    before = books.catalog.space.used_bytes(ONE)
    books.match("other", names("other0", 1))
    fill(books, "e", 5, salt="more")
    assert books.catalog.space.used_bytes(ONE) >= before


def test_what_nobody_works_in_has_no_floor() -> None:
    """Or the namespaces of past epochs would take the arena from the present one."""
    pages = 8
    books = Books(pages=pages, namespace_floor=1 / 4)
    arena_objects = pages * SLOTS_PER_PAGE
    for epoch in range(6):
        namespace = NamespaceId(f"epoch {epoch}")
        books.catalog.open_namespace(namespace, [OBJECT_BYTES])
        books.catalog.drop_engine("e")
        books.catalog.attach_engine("e", namespace, 1)
        fill(books, "e", arena_objects, salt=str(epoch))
        assert books.catalog.space.used_bytes(namespace) == arena_objects * OBJECT_BYTES


def test_many_models_share_though_their_floors_add_up_to_more_than_the_arena() -> None:
    pages, models = 8, 8
    books = Books(pages=pages, namespace_floor=1 / 4)
    for engine in ("e", "f", "w"):
        books.catalog.forget_engine(engine)
    share = pages * SLOTS_PER_PAGE // models
    for k in range(models):
        books.catalog.open_namespace(NamespaceId(f"m{k}"), [OBJECT_BYTES])
        books.catalog.attach_engine(f"m{k}", NamespaceId(f"m{k}"), 1)
    for k in range(models):
        fill(books, f"m{k}", pages * SLOTS_PER_PAGE)
    used = [books.catalog.space.used_bytes(NamespaceId(f"m{k}")) for k in range(models)]
    assert all(bytes_used >= share * OBJECT_BYTES for bytes_used in used)


def test_a_page_changes_its_size_with_all_that_hangs_on_it() -> None:
    pages = 64
    books = two_models(pages, 0.0, PAGE_BYTES)
    chains, length = pages, SLOTS_PER_PAGE
    fill(books, "e", chains, length=length)  # one chain a page
    books.peek(names("e0", length))  # the page of chain 1 is the oldest now
    assert books.store("other", names("x", 1)).reason is None
    kept = [books.peek(names(f"e{k}", length)) for k in range(chains)]
    assert kept == [length, 0, *[length] * (chains - 2)]
    assert catalog_statistics(books.catalog).evicted == length
    assert books.match("e", names("e1", 1)).reason is Reason.EVICTED


def test_descendants_on_other_pages_go_too() -> None:
    books = two_models(2, 0.0, PAGE_BYTES)
    chain = names("a", SLOTS_PER_PAGE + 2)
    books.store("e", chain)  # the first page, and two slots of the second
    assert books.store("other", names("x", 1)).reason is None
    # Whichever page went: the chain has no hole, and the head outlives the tail.
    assert books.peek(chain) in (0, SLOTS_PER_PAGE)
    used = books.catalog.space.used_bytes(ONE)
    assert used == books.peek(chain) * OBJECT_BYTES


def test_pages_that_must_stay_do_not_hide_those_that_may_go() -> None:
    pages = 64
    books = two_models(pages, 0.0, PAGE_BYTES)
    fill(books, "e", pages, length=SLOTS_PER_PAGE)
    held = 40
    for k in range(held):
        assert books.match("e", names(f"e{k}", 1), lease=k).chunks == 1
    for k in range(held, pages):  # all younger than the pages that are held
        books.peek(names(f"e{k}", SLOTS_PER_PAGE))
    results = [books.store("other", names(f"x{k}", 1)) for k in range(pages - held)]
    assert [result.reason for result in results] == [None] * (pages - held)
    books.match("other", names("x0", 1), lease=0)
    assert all(books.peek(names(f"e{k}", 1)) == 1 for k in range(held))


def test_a_page_that_a_rank_may_be_writing_stays() -> None:
    books = two_models(2, 0.0, PAGE_BYTES)
    books.store("e", names("a", SLOTS_PER_PAGE))
    numbers = books.reserve("f", names("b", 1)).reservations
    books.catalog.drop_engine("f")
    assert books.store("other", names("x", 1)).reason is None
    assert books.reserve("e", names("a", 1)).reason is None, "the other slots of the page serve on"
    assert books.quarantined("f")
    books.match("other", names("x", 1))
    assert books.reserve("other", names("y", 1)).reason is Reason.NO_ROOM
    books.commit("f", numbers)


def test_a_long_chain_in_one_page_is_walked_once() -> None:
    """Counted, not timed: a walk for every object would be quadratic in the page."""
    length = 2_000
    catalog = Catalog(pages=2, page_bytes=length, max_entries=10 * length)
    catalog.add_page()
    catalog.add_page()
    catalog.open_namespace(ONE, [1])
    catalog.open_namespace(TWO, [length])
    catalog.attach_engine("e", ONE, 1)
    catalog.attach_engine("other", TWO, 1)
    for chain in ("a", "b"):
        packed = pack_names(names(chain, length))
        (result,), _ = catalog.reserve("e", 0, 0, [Chain(parent=b"", names=packed)], 1.0)
        catalog.commit("e", 0, result.reservations, 2.0)
    visits = 0
    entry_type = type(next(iter(catalog.space.indexes[ONE][0].entries.values())))
    iterate = entry_type.iterate_children

    def counted(entry: object) -> object:
        nonlocal visits
        visits += 1
        return iterate(entry)  # type: ignore[arg-type]

    entry_type.iterate_children = counted  # type: ignore[method-assign,assignment]
    try:
        chain = Chain(parent=b"", names=pack_names(names("x", 1)))
        (result,), _ = catalog.reserve("other", 0, 0, [chain], 3.0)
    finally:
        entry_type.iterate_children = iterate  # type: ignore[method-assign]
    assert result.reason is None
    assert visits <= 2 * length


def test_groups_of_a_namespace_are_apart() -> None:
    books = Books(pages=8)
    books.catalog.open_namespace(TWO, [OBJECT_BYTES, 2 * OBJECT_BYTES])
    books.catalog.attach_engine("h", TWO, 1)
    chain = names("a", 2)
    books.store("h", chain, group=0)
    assert books.match("h", chain, group=1).chunks == 0
    books.store("h", chain[:1], group=1)
    assert books.match("h", chain, group=1, lease=2) == MatchResult(1, Reason.NEVER_SEEN)
    assert books.catalog.space.used_bytes(TWO) == (2 + 2) * OBJECT_BYTES
    (first, second) = catalog_statistics(books.catalog).namespaces
    assert (first.objects, second.objects) == (0, 3)
    assert second.object_bytes == [OBJECT_BYTES, 2 * OBJECT_BYTES]


def longest_queue(rounds: int) -> int:
    """Pages change their size to and fro, while the oldest leaf is on a page that must stay."""
    books = two_models(3, 0.0, PAGE_BYTES)
    books.store("e", names("oldest", 1))
    books.store("e", names("leased", 1))
    books.match("e", names("leased", 1), lease=5)
    fill(books, "e", 2 * SLOTS_PER_PAGE + 2)
    queue = books.catalog.space.indexes[ONE][0].leaves
    longest = 0
    for k in range(rounds):
        assert books.store("other", names(f"x{k}", 1)).reason is None
        books.catalog.clear(TWO)
        fill(books, "e", SLOTS_PER_PAGE, salt=f"round {k}")
        longest = max(longest, len(queue))
    assert books.peek(names("oldest", 1)) == 1
    return longest


def test_leaf_queues_do_not_keep_what_is_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "LEAF_SLACK", 8)
    assert longest_queue(rounds=60) <= 2 * (3 * SLOTS_PER_PAGE) + 8 + SLOTS_PER_PAGE
    monkeypatch.setattr(LeafQueue, "compact", lambda queue: None)  # noqa: ARG005
    assert longest_queue(rounds=60) > 100, "the example shows nothing"


# ---------------------------------------------------------------- memory


def bytes_per_entry(entries: int, length: int) -> float:
    """Python memory of a full catalog that has been through as many evictions again."""
    batch = 1_000 // length
    catalog = Catalog(
        pages=64,
        page_bytes=math.ceil(entries / 64),
        max_entries=entries,
        max_reservations=batch * length,
    )
    catalog.open_namespace(ONE, [1])
    catalog.attach_engine("e", ONE, 1)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(64):
            catalog.add_page()
        for first in range(0, 2 * entries // length, batch):
            packed = [pack_names(names(str(first + k), length)) for k in range(batch)]
            chains = [Chain(parent=b"", names=p) for p in packed]
            results, _ = catalog.reserve("e", 0, first, chains, first + 0.25)
            catalog.commit("e", 0, [n for r in results for n in r.reservations], first + 0.5)
            for k, chain in enumerate(packed):  # each at a time of its own, as in life
                catalog.match("e", 1, 0, chain, first + 0.5 + k / 1024)
        assert catalog.space.total_entries == entries
        assert catalog.space.total_ghosts == entries // 4
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / entries
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("entries", "length"), [(20_000, 1), (10_000, 50)])
def test_an_entry_costs_what_is_said(entries: int, length: int) -> None:
    """Chains of one chunk are the dearest: every entry is a candidate for eviction."""
    measured = bytes_per_entry(entries, length)
    print(f"chains of {length}: {measured:.0f} bytes an entry")
    assert measured <= ENTRY_COST_BYTES
    assert length > 1 or measured > 0.85 * ENTRY_COST_BYTES, "the constant can be smaller now"


def test_past_epochs_are_forgotten_once_they_hold_nothing() -> None:
    """Each update of an engine's weights opens a namespace; evictions must not look at them all."""
    books = Books()
    space = books.catalog.space
    for epoch in range(20):
        namespace = NamespaceId(f"epoch {epoch}")
        books.catalog.open_namespace(namespace, [OBJECT_BYTES])
        books.catalog.drop_engine("e")
        books.catalog.attach_engine("e", namespace, 1)
        books.catalog.attach_engine("e", namespace, 1)  # again: it is still in use
        assert namespace in space.indexes
    assert [n for n in space.indexes if n.startswith("epoch")] == ["epoch 19"]
    books.store("e", names("kept", 2))
    books.catalog.drop_engine("e")
    books.catalog.attach_engine("e", ONE, 1)
    assert NamespaceId("epoch 19") in space.indexes, "it holds two objects"
    books.catalog.clear(NamespaceId("epoch 19"))
    assert NamespaceId("epoch 19") not in space.indexes
