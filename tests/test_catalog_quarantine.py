"""Two ranks that may both be writing: each lets go for itself only."""

from __future__ import annotations

import pytest

from catalog_books import Books, names


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("word", ["commit", "abort", "acknowledge"])
def test_one_rank_does_not_speak_for_the_other(first: int, word: str) -> None:
    books = Books()
    reserved = books.reserve("w", names("a", 1))
    books.catalog.drop_engine("w")
    assert books.quarantined("w") == set(reserved.offsets)

    def let_go(rank: int) -> None:
        if word == "commit":
            assert books.commit("w", reserved.reservations, rank) == []
        elif word == "abort":
            assert books.abort("w", reserved.reservations, rank) == []
        else:
            books.catalog.rank_acknowledged("w", rank)

    let_go(first)
    assert books.quarantined("w") == set(reserved.offsets), "the other may still be writing"
    let_go(1 - first)
    assert not books.quarantined("w")
    assert books.catalog.space.slots.used_slots == 0
