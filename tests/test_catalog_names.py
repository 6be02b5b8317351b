"""Look-ups with names that are no chain: a name counts only at its own depth."""

from __future__ import annotations

import random

import pytest

from catalog_books import Books, names


@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_chain_without_its_root_is_not_found(first: int) -> None:
    books = Books()
    chain = names("a", 5)
    books.store("e", chain)
    assert books.match("f", chain[first:]).chunks == 0
    assert not books.catalog.engines["f"].leases


def test_names_in_any_order_are_found_at_their_own_depth_only() -> None:
    """The search looks at some of the names; the last one that it finds is where it belongs."""
    books = Books()
    chains = [names("a", 8), names("b", 4)]
    for chain in chains:
        books.store("e", chain)
    known = [*chains[0], *chains[1], *names("c", 2)]
    depth = {name: depth for chain in chains for depth, name in enumerate(chain)}
    rng = random.Random(1)
    hits = 0
    for _ in range(300):
        asked = [rng.choice(known) for _ in range(rng.randrange(1, 8))]
        found = books.match("f", asked).chunks
        hits += found > 0
        assert found <= len(asked)
        assert not found or depth[asked[found - 1]] == found - 1
    assert hits
