"""A small catalog to write examples with, and names for its chains."""

from __future__ import annotations

import hashlib

from kvledger.audit import check_catalog
from kvledger.catalog import Catalog
from kvledger.entries import ChainResult, MatchResult, Settlement
from kvledger.naming import Name, NamespaceId, pack_names
from kvledger.protocol import Chain
from kvledger.reasons import Reason

ONE = NamespaceId("one")
TWO = NamespaceId("two")
SLOTS_PER_PAGE = 4
OBJECT_BYTES = 64
PAGE_BYTES = SLOTS_PER_PAGE * OBJECT_BYTES


def names(chain: str, count: int) -> list[Name]:
    """Names of the first chunks of a chain; another chain has other names."""
    return [Name(hashlib.sha256(f"{chain}/{i}".encode()).digest()) for i in range(count)]


class Books:
    """A catalog with engines e (one rank), f (one rank) and w (two ranks) in namespace ONE."""

    def __init__(self, pages: int = 4, *, ready: int | None = None, **options: float) -> None:
        self.catalog = Catalog(
            pages=pages,
            page_bytes=PAGE_BYTES,
            max_entries=int(options.get("max_entries", 1000)),
            namespace_floor=options.get("namespace_floor", 0.0),
            max_reservations=int(options.get("max_reservations", 100)),
            reservation_steps=int(options.get("reservation_steps", 10)),
        )
        for _ in range(pages if ready is None else ready):
            self.catalog.add_page()
        self.catalog.open_namespace(ONE, [OBJECT_BYTES])
        for engine, ranks in (("e", 1), ("f", 1), ("w", 2)):
            self.catalog.attach_engine(engine, ONE, ranks)
        self.now = 0.0

    def reserve(
        self, engine: str, chain: list[Name], *, parent: bytes = b"", step: int = 0, group: int = 0
    ) -> ChainResult:
        self.now += 1
        request = Chain(parent=parent, names=pack_names(chain))
        (result,), _ = self.catalog.reserve(engine, group, step, [request], self.now)
        check_catalog(self.catalog)
        return result

    def commit(self, engine: str, numbers: list[int], rank: int = 0) -> list[Settlement]:
        self.now += 1
        settlements = self.catalog.commit(engine, rank, numbers, self.now)
        check_catalog(self.catalog)
        return settlements

    def abort(self, engine: str, numbers: list[int], rank: int | None = 0) -> list[Settlement]:
        settlements = self.catalog.abort(engine, rank, numbers, Reason.WRITER_FAILED)
        check_catalog(self.catalog)
        return settlements

    def store(
        self, engine: str, chain: list[Name], *, parent: bytes = b"", group: int = 0
    ) -> ChainResult:
        result = self.reserve(engine, chain, parent=parent, group=group)
        self.commit(engine, result.reservations)
        return result

    def match(self, engine: str, chain: list[Name], lease: int = 1, group: int = 0) -> MatchResult:
        self.now += 1
        result = self.catalog.match(engine, lease, group, pack_names(chain), self.now)
        check_catalog(self.catalog)
        return result

    def peek(self, chain: list[Name], engine: str = "e") -> int:
        """Length of a hit, leaving no lease behind."""
        chunks = self.match(engine, chain, lease=999).chunks
        self.catalog.release(engine, [999])
        return chunks

    def quarantined(self, engine: str) -> set[int]:
        return {r.offset for r in self.catalog.engines[engine].quarantine.values()}


def two_models(pages: int, floor: float, second_bytes: int = OBJECT_BYTES) -> Books:
    books = Books(pages=pages, namespace_floor=floor)
    books.catalog.open_namespace(TWO, [second_bytes])
    books.catalog.attach_engine("other", TWO, 1)
    return books


def fill(books: Books, engine: str, chains: int, *, length: int = 1, salt: str = "") -> None:
    for k in range(chains):
        books.store(engine, names(f"{engine}{salt}{k}", length))
