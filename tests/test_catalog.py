"""Each rule of the catalog by example; the sequences are in test_catalog_exhaustive.py."""

from __future__ import annotations

import pytest

from catalog_books import OBJECT_BYTES, ONE, PAGE_BYTES, SLOTS_PER_PAGE, TWO, Books, names
from kvledger import catalog as catalog_module
from kvledger.audit import catalog_statistics, check_catalog
from kvledger.entries import ChainResult, MatchResult, Settlement
from kvledger.naming import NamespaceId, pack_names
from kvledger.protocol import Chain
from kvledger.reasons import Reason
from kvledger.space import ObjectTooLargeError

# ---------------------------------------------------------------- writing


def test_stored_once_and_found_by_everybody() -> None:
    books = Books()
    chain = names("a", 3)
    first = books.reserve("e", chain)
    assert (first.present, len(first.reservations), first.reason) == (0, 3, None)
    assert len(set(first.offsets)) == 3
    assert all(offset % OBJECT_BYTES == 0 for offset in first.offsets)
    assert books.commit("e", first.reservations) == [Settlement("e", first.reservations, [])]
    longer = [*chain, *names("b", 2)]
    assert books.match("f", longer) == MatchResult(3, Reason.NEVER_SEEN)
    assert books.catalog.locate("f", 1, 0, 3) == first.offsets
    second = books.reserve("f", longer)
    assert (second.present, len(second.reservations), second.reason) == (3, 2, None)
    assert not set(second.offsets) & set(first.offsets)


def test_what_another_engine_writes_is_not_written_again() -> None:
    books = Books()
    chain = names("a", 2)
    books.reserve("e", chain)
    assert books.reserve("f", chain) == ChainResult(0, [], [], Reason.BEING_WRITTEN)
    after = books.reserve("f", names("b", 1), parent=chain[1])
    assert after == ChainResult(0, [], [], Reason.BEING_WRITTEN)
    assert books.match("f", chain) == MatchResult(0, Reason.BEING_WRITTEN)
    assert len(books.reserve("e", names("b", 1), parent=chain[1]).reservations) == 1


def test_the_chunk_before_must_be_there() -> None:
    books = Books()
    chain = names("a", 3)
    missing = books.reserve("e", chain[1:], parent=chain[0])
    assert missing == ChainResult(0, [], [], Reason.PARENT_MISSING)
    books.store("e", chain[:2])
    misplaced = books.reserve("e", [chain[1]])  # not a root
    assert misplaced == ChainResult(0, [], [], Reason.PARENT_MISSING)
    assert books.reserve("e", [chain[0], chain[0]]).reason is Reason.PARENT_MISSING


@pytest.mark.pitfall(16, 57)
def test_visible_only_after_every_rank_has_committed() -> None:
    books = Books()
    chain = names("a", 2)
    numbers = books.reserve("w", chain).reservations
    assert books.commit("w", numbers, rank=1) == []
    assert books.peek(chain) == 0
    assert books.commit("w", numbers, rank=1) == []  # the same rank again counts once
    assert books.peek(chain) == 0
    assert books.commit("w", numbers, rank=0) == [Settlement("w", numbers, [])]
    assert books.peek(chain) == 2


def test_commits_out_of_order_become_visible_in_order() -> None:
    books = Books()
    chain = names("a", 4)
    numbers = books.reserve("e", chain).reservations
    for number in (numbers[3], numbers[1], numbers[2]):
        assert books.commit("e", [number]) == []
    assert books.match("e", chain) == MatchResult(0, Reason.BEING_WRITTEN)
    assert books.commit("e", [numbers[0]]) == [Settlement("e", numbers, [])]
    assert books.peek(chain) == 4
    assert books.catalog.stored == 4


def test_several_chains_of_one_reserve() -> None:
    books = Books()
    trunk = names("a", 2)
    chains = [
        Chain(parent=b"", names=pack_names(trunk)),
        Chain(parent=trunk[1], names=pack_names(names("b", 2))),
        Chain(parent=names("x", 1)[0], names=pack_names(names("c", 1))),
    ]
    results, settlements = books.catalog.reserve("e", 0, 0, chains, 1.0)
    assert [len(result.reservations) for result in results] == [2, 2, 0]
    assert [result.reason for result in results] == [None, None, Reason.PARENT_MISSING]
    assert not settlements
    assert books.catalog.refused == {Reason.PARENT_MISSING: 1}


def test_a_refused_request_changes_nothing() -> None:
    books = Books(reservation_steps=1)
    chain = names("a", 2)
    old = books.reserve("e", chain, step=0).reservations
    good = Chain(parent=b"", names=pack_names(names("b", 1)))
    bad = Chain(parent=b"", names=b"short")
    with pytest.raises(ValueError, match="32s of bytes"):
        books.catalog.reserve("e", 0, 50, [good, bad], 1.0)
    with pytest.raises(IndexError):
        books.catalog.reserve("e", 7, 50, [good], 1.0)
    assert list(books.catalog.engines["e"].open) == old
    books.commit("e", old)
    books.match("e", chain)
    with pytest.raises(ValueError, match="32s of bytes"):
        books.catalog.match("e", 1, 0, b"short", 1.0)
    assert books.catalog.locate("e", 1, 0, 2) is not None


# ---------------------------------------------------------------- aborting, quarantine


def test_an_abort_takes_all_that_hangs_on_it() -> None:
    books = Books()
    chain = names("a", 4)
    numbers = books.reserve("e", chain).reservations
    books.commit("e", numbers[:1])
    (settlement,) = books.abort("e", [numbers[1]])
    assert settlement.stored == []
    assert sorted(settlement.aborted) == numbers[1:]
    assert settlement.reason is Reason.WRITER_FAILED
    assert books.peek(chain) == 1
    assert books.catalog.aborted == {Reason.WRITER_FAILED: 3}
    # Rank 0 has let go of the one it named only; the two behind it may still be written.
    assert len(books.quarantined("e")) == 2


def test_the_scheduler_aborts_what_no_rank_was_told_of() -> None:
    books = Books()
    numbers = books.reserve("w", names("a", 3)).reservations
    (settlement,) = books.abort("w", numbers, rank=None)
    assert sorted(settlement.aborted) == numbers
    assert not books.quarantined("w")
    assert books.catalog.space.slots.used_slots == 0


def lift_by_commit(books: Books, number: int) -> None:
    assert books.commit("w", [number], rank=1) == []


def lift_by_abort(books: Books, number: int) -> None:
    assert books.abort("w", [number], rank=1) == []


def lift_by_end(books: Books, number: int) -> None:  # noqa: ARG001
    assert books.catalog.rank_gone("w", 1) == []


def lift_by_acknowledgement(books: Books, number: int) -> None:  # noqa: ARG001
    books.catalog.rank_acknowledged("w", 1)


@pytest.mark.parametrize(
    "lift", [lift_by_commit, lift_by_abort, lift_by_end, lift_by_acknowledgement]
)
def test_a_slot_that_a_rank_may_be_writing_waits_for_that_rank(lift: object) -> None:
    books = Books(pages=1)
    chain = names("a", 1)
    reserved = books.reserve("w", chain)
    books.store("e", names("b", SLOTS_PER_PAGE - 1))
    assert books.abort("w", reserved.reservations, rank=0) == [
        Settlement("w", [], reserved.reservations, Reason.WRITER_FAILED)
    ]
    assert books.quarantined("w") == set(reserved.offsets)
    # Engines can fill the rest and evict each other, and never get this slot.
    for k in range(6):
        assert set(books.store("e", names(f"c{k}", 3)).offsets).isdisjoint(reserved.offsets)
    assert callable(lift)
    lift(books, reserved.reservations[0])
    assert not books.quarantined("w")
    check_catalog(books.catalog)
    assert books.peek(chain) == 0
    assert books.reserve("e", names("d", 1)).offsets == reserved.offsets


def test_a_dropped_engine_keeps_its_writers_slots() -> None:
    books = Books()
    numbers = books.reserve("w", names("a", 2)).reservations
    books.commit("w", numbers, rank=0)
    (settlement,) = books.catalog.drop_engine("w")
    assert sorted(settlement.aborted) == numbers
    assert settlement.reason is Reason.WRITER_GONE
    assert len(books.quarantined("w")) == 2
    books.catalog.rank_acknowledged("w", 0)
    assert len(books.quarantined("w")) == 2, "rank 0 had committed; it is rank 1 that may write"
    assert books.commit("w", numbers[:1], rank=1) == []
    assert len(books.quarantined("w")) == 1
    assert books.peek(names("a", 2)) == 0
    assert books.catalog.forget_engine("w") == []
    assert books.catalog.space.slots.used_slots == 0


def test_a_rank_that_ends_takes_the_reservations_of_all_ranks_with_it() -> None:
    books = Books()
    chain = names("a", 1)
    reserved = books.reserve("w", chain)
    (settlement,) = books.catalog.rank_gone("w", 0)
    assert settlement.aborted == reserved.reservations
    assert books.quarantined("w") == set(reserved.offsets), "rank 1 lives and may be writing"
    books.catalog.attach_engine("w", ONE, 2)
    again = books.reserve("w", chain)
    assert set(again.offsets).isdisjoint(reserved.offsets)
    assert books.catalog.rank_gone("w", 1) == [
        Settlement("w", [], again.reservations, Reason.WRITER_GONE)
    ]
    assert books.catalog.rank_gone("nobody", 0) == []
    assert books.catalog.drop_engine("nobody") == []
    assert books.catalog.forget_engine("nobody") == []


def test_reservations_expire_by_the_steps_of_their_own_engine() -> None:
    steps = 10
    books = Books(reservation_steps=steps)
    chain = names("a", 2)
    old = books.reserve("e", chain[:1], step=5).reservations
    young = books.reserve("e", chain[1:], parent=chain[0], step=5 + steps).reservations
    books.reserve("f", names("b", 1), step=1000)
    assert list(books.catalog.engines["e"].open) == [*old, *young]
    nothing: list[Chain] = []
    _, settlements = books.catalog.reserve("e", 0, 5 + steps, nothing, 1.0)
    assert settlements == []
    _, (settlement,) = books.catalog.reserve("e", 0, 5 + steps + 1, nothing, 1.0)
    assert sorted(settlement.aborted) == [*old, *young], "the young one hangs on the old one"
    assert settlement.reason is Reason.RESERVATION_EXPIRED
    assert len(books.quarantined("e")) == 2
    assert books.commit("e", [*old, *young]) == []
    assert not books.quarantined("e")
    assert books.peek(chain) == 0


# ---------------------------------------------------------------- leases


def test_the_lease_of_a_tail_protects_the_whole_chain() -> None:
    books = Books(pages=1)
    chain = names("a", 3)
    stored = books.store("e", chain)
    assert books.match("f", chain) == MatchResult(3)
    for k in range(5):
        result = books.store("e", names(f"b{k}", 2))
        assert (len(result.reservations), result.reason) == (1, Reason.NO_ROOM)
    assert books.catalog.locate("f", 1, 0, 3) == stored.offsets
    books.catalog.release("f", [1])
    books.catalog.release("f", [1, 77])  # twice, and an unknown one
    assert books.store("e", names("c", 4)).reason is None
    assert books.peek(chain) == 0


def test_matching_again_replaces_the_lease() -> None:
    books = Books()
    chain, other = names("a", 4), names("b", 2)
    books.store("e", chain)
    books.store("e", other)
    for _ in range(3):
        assert books.match("e", chain) == MatchResult(4)
    assert catalog_statistics(books.catalog).leases == 1
    assert books.match("e", other) == MatchResult(2)
    assert catalog_statistics(books.catalog).leases == 1
    assert books.catalog.clear(None) == 4, "the other chain is leased"
    assert books.match("e", chain) == MatchResult(0, Reason.NEVER_SEEN)
    assert catalog_statistics(books.catalog).leases == 0, "a miss leases nothing"


def test_leases_end_with_their_engine() -> None:
    books = Books(pages=1)
    chain = names("a", 4)
    books.store("e", chain)
    books.match("f", chain, lease=1)
    books.match("f", chain[:2], lease=2)
    books.match("e", chain[:1], lease=1)
    assert books.catalog.clear(None) == 0
    books.catalog.forget_engine("f")
    assert books.catalog.clear(None) == 3, "e holds the first chunk"


def test_locate_answers_for_leased_chunks_only() -> None:
    books = Books()
    chain = names("a", 5)
    offsets = books.store("e", chain).offsets
    books.match("e", chain[:4])
    for first in range(6):
        for count in range(6):
            expected = offsets[first : first + count] if first + count <= 4 else None
            assert books.catalog.locate("e", 1, first, count) == expected
    assert books.catalog.locate("e", 1, -1, 1) is None
    assert books.catalog.locate("e", 1, 0, -1) is None
    assert books.catalog.locate("e", 2, 0, 1) is None
    assert books.catalog.locate("f", 1, 0, 1) is None, "a lease belongs to its engine"


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("stored", [0, 1, 2, 5, 8, 100])
def test_a_look_up_finds_the_longest_prefix(length: int, stored: int) -> None:
    books = Books(pages=30)
    chain = names("a", max(length, stored))
    if stored:
        books.store("e", chain[:stored])
    result = books.match("f", chain[:length])
    assert result.chunks == min(length, stored)
    assert (result.reason is None) == (stored >= length)


# ---------------------------------------------------------------- limits


def test_no_more_reservations_than_allowed() -> None:
    books = Books(max_reservations=3)
    first = books.reserve("w", names("a", 5))
    assert (len(first.reservations), first.reason) == (3, Reason.TOO_MANY_RESERVATIONS)
    books.abort("w", first.reservations[2:], rank=0)
    again = books.reserve("w", names("b", 1))
    assert again == ChainResult(0, [], [], Reason.TOO_MANY_RESERVATIONS), "quarantine counts"
    books.abort("w", first.reservations[2:], rank=1)
    assert len(books.reserve("w", names("b", 1)).reservations) == 1
    assert len(books.reserve("e", names("c", 9)).reservations) == 3, "each engine has its own"


def test_no_more_entries_than_allowed() -> None:
    books = Books(max_entries=6)
    books.store("e", names("a", 6))
    assert books.store("e", names("b", 2)).reason is None
    assert books.catalog.space.total_entries == 6
    assert books.peek(names("a", 6)) == 4
    books.match("e", names("a", 4), lease=1)
    books.match("e", names("b", 2), lease=2)
    assert books.reserve("e", names("c", 1)).reason is Reason.NO_ROOM


def test_no_more_leases_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MAX_LEASES", 2)
    books = Books()
    chain = names("a", 2)
    books.store("e", chain)
    assert books.match("e", chain, lease=1).chunks == 2
    assert books.match("e", chain, lease=2).chunks == 2
    assert books.match("e", chain, lease=3) == MatchResult(0, Reason.TOO_MANY_RESERVATIONS)
    assert books.match("e", chain, lease=2).chunks == 2
    assert books.match("f", chain, lease=1).chunks == 2
    assert books.catalog.hit_chunks == 4 * 2, "what was refused is no hit"


def test_an_object_must_fit_in_a_page() -> None:
    books = Books()
    with pytest.raises(ObjectTooLargeError, match=r"takes 257 bytes.*has 256 .*chunk_tokens"):
        books.catalog.open_namespace(TWO, [8, PAGE_BYTES + 1])
    books.catalog.open_namespace(TWO, [8, PAGE_BYTES])
    books.catalog.open_namespace(TWO, [8, PAGE_BYTES])
    with pytest.raises(ValueError, match="not"):
        books.catalog.open_namespace(TWO, [8, PAGE_BYTES - 1])
    for sizes in ([], [0], [8, -1]):
        with pytest.raises(ValueError, match="1 byte"):
            books.catalog.open_namespace(NamespaceId("three"), sizes)


def test_an_engine_changes_its_namespace_only_with_empty_hands() -> None:
    books = Books()
    books.catalog.open_namespace(TWO, [OBJECT_BYTES])
    chain = names("a", 1)
    books.store("e", chain)
    books.match("e", chain)
    with pytest.raises(ValueError, match="must be dropped"):
        books.catalog.attach_engine("e", TWO, 1)
    books.catalog.drop_engine("e")
    books.catalog.attach_engine("e", TWO, 1)
    assert books.match("e", chain).chunks == 0, "names mean nothing across namespaces"
    assert books.match("f", chain).chunks == 1


# ---------------------------------------------------------------- clearing


def test_clear_leaves_what_is_leased_or_being_written() -> None:
    books = Books(pages=8)
    books.catalog.open_namespace(TWO, [OBJECT_BYTES])
    books.catalog.attach_engine("other", TWO, 1)
    leased, plain, growing = names("a", 4), names("b", 3), names("c", 2)
    for chain in (leased, plain, growing):
        books.store("e", chain)
    books.store("other", plain)
    books.match("f", leased[:2])
    numbers = books.reserve("e", names("d", 1), parent=growing[1]).reservations
    assert books.catalog.clear(ONE) == len(leased) - 2 + len(plain)
    check_catalog(books.catalog)
    assert books.match("other", plain).chunks == 3
    books.commit("e", numbers)
    assert books.peek([*growing, *names("d", 1)]) == 3
    books.catalog.release("f", [1])
    books.catalog.release("other", [1])
    assert books.catalog.clear(None) == 2 + 3 + 3
    assert books.catalog.space.slots.used_slots == 0
    assert books.match("e", plain) == MatchResult(0, Reason.NEVER_SEEN), "no ghosts either"
