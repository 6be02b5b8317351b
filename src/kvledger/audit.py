"""Looking at the catalog from outside: totals for people, invariants for tests. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvledger.catalog import Catalog
from kvledger.entries import Entry
from kvledger.naming import NamespaceId
from kvledger.reasons import Reason
from kvledger.space import Space


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    """What one namespace holds."""

    namespace: NamespaceId
    objects: int
    used_bytes: int
    object_bytes: list[int]


@dataclass(frozen=True, slots=True)
class CatalogStatistics:
    """Totals since the start, and what is held now."""

    pages: int
    pages_ready: int
    page_bytes: int
    objects: int
    bytes_used: int
    leases: int
    reservations: int
    quarantined: int
    lookups: int
    hit_chunks: int
    missed_chunks: int
    stored: int
    evicted: int
    aborted: dict[Reason, int]
    refused: dict[Reason, int]
    namespaces: list[NamespaceStatistics]


def catalog_statistics(catalog: Catalog) -> CatalogStatistics:
    """A snapshot; costs time in the number of namespaces and engines, not of objects."""
    namespaces = [
        NamespaceStatistics(
            namespace,
            sum(len(index.entries) for index in group),
            catalog.space.used_bytes(namespace),
            [index.object_bytes for index in group],
        )
        for namespace, group in catalog.space.indexes.items()
    ]
    engines = catalog.engines.values()
    return CatalogStatistics(
        pages=catalog.space.slots.pages,
        pages_ready=catalog.space.slots.ready_pages,
        page_bytes=catalog.space.slots.page_bytes,
        objects=sum(n.objects for n in namespaces),
        bytes_used=sum(n.used_bytes for n in namespaces),
        leases=sum(len(books.leases) for books in engines),
        reservations=sum(len(books.open) for books in engines),
        quarantined=sum(len(books.quarantine) for books in engines),
        lookups=catalog.lookups,
        hit_chunks=catalog.hit_chunks,
        missed_chunks=catalog.missed_chunks,
        stored=catalog.stored,
        evicted=catalog.space.evicted,
        aborted=dict(catalog.aborted),
        refused=dict(catalog.refused),
        namespaces=namespaces,
    )


def check_catalog(catalog: Catalog, examine: Callable[[Entry], None] | None = None) -> None:
    """Recompute from the entries all that is kept beside them, and compare."""
    space = catalog.space
    space.slots.check()
    entries = [entry for index in space.all_indexes() for entry in index.entries.values()]
    assert len(entries) == space.total_entries <= space.max_entries
    leased = Counter(id(t) for books in catalog.engines.values() for t in books.leases.values())
    reserved = {r.offset for b in catalog.engines.values() for r in b.open.values()}
    quarantined = {r.offset for b in catalog.engines.values() for r in b.quarantine.values()}
    offsets = {entry.offset for entry in entries}
    assert space.slots.used_slots == len(entries) + len(quarantined), "a slot nobody answers for"
    check_ghosts(space)
    assert len(offsets) == len(entries), "two entries share a slot"
    assert not offsets & quarantined, "a slot was handed out while a rank may write it"
    assert {entry.offset for entry in entries if entry.reservation} == reserved
    for entry in entries:
        assert entry.leases == leased[id(entry)]
        assert space.slots.page_of(entry.offset).object_bytes == entry.index.object_bytes
        assert entry.visible == (entry.reservation is None)
        assert not entry.leases or entry.visible, "a lease on what is not visible"
        if entry.parent is not None:
            assert entry.index.entries.get(entry.parent.name) is entry.parent
            assert entry.parent.depth == entry.depth - 1
            assert entry in entry.parent.iterate_children()
            assert not entry.visible or entry.parent.visible, "a hole in a chain"
        else:
            assert entry.depth == 0
        assert not entry.evictable or entry.queued, "a leaf that eviction cannot find"
        if examine is not None:
            examine(entry)
    for books in catalog.engines.values():
        for reservation in books.quarantine.values():
            assert reservation.entry is None
            assert reservation.waiting_ranks
    for owner_page in {space.slots.page_of(offset).number for offset in offsets | quarantined}:
        assert owner_page < space.slots.ready_pages, "a slot in a page not instantiated"


def check_ghosts(space: Space) -> None:
    """Assert that evicted names are counted, and that none of them is present."""
    assert space.total_ghosts == sum(len(index.ghosts) for index in space.all_indexes())
    for index in space.all_indexes():
        assert not index.ghosts.keys() & index.entries.keys(), "evicted and present"
