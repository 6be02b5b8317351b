"""A catalog and its specification, driven together and compared at each step."""

from __future__ import annotations

from collections.abc import Sequence

from catalog_spec import Key, Spec, require
from kvledger.audit import check_catalog
from kvledger.catalog import Catalog
from kvledger.entries import ChainResult
from kvledger.naming import Name, NamespaceId, pack_names
from kvledger.protocol import Chain
from kvledger.reasons import Reason


class CheckedCatalog:
    """A catalog and its specification, driven together."""

    def __init__(self, catalog: Catalog, *, slots: int | None, audit: bool = True) -> None:
        self.catalog = catalog
        self.audit = audit
        self.spec = Spec(
            slots=slots,
            reservation_steps=catalog.reservation_steps,
            max_reservations=catalog.max_reservations,
        )
        self.sizes = {
            namespace: [index.object_bytes for index in group]
            for namespace, group in catalog.space.indexes.items()
        }
        self.now = 0.0
        self.steps: dict[str, int] = {}

    def key(self, engine: str, group: int, name: bytes) -> Key:
        return (self.spec.engines[engine].namespace, group, name)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def attach(self, engine: str, namespace: NamespaceId, world: int) -> None:
        self.catalog.open_namespace(namespace, self.sizes[namespace])  # it may be forgotten
        self.catalog.attach_engine(engine, namespace, world)
        self.spec.attach(engine, namespace, world)
        self.steps.setdefault(engine, 0)

    def match(self, engine: str, lease: int, group: int, names: Sequence[Name]) -> None:
        now = self.tick()
        answer = self.catalog.match(engine, lease, group, pack_names(names), now)
        self.spec.match(engine, lease, [self.key(engine, group, n) for n in names], now, answer)
        for first in range(answer.chunks + 1):
            for count in (answer.chunks - first, answer.chunks - first + 1):
                offsets = self.catalog.locate(engine, lease, first, count)
                self.spec.locate(engine, lease, first, count, offsets)

    def release(self, engine: str, lease: int) -> None:
        self.catalog.release(engine, [lease])
        self.spec.engines[engine].leases.pop(lease, None)

    def reserve(
        self, engine: str, group: int, parent: bytes, names: Sequence[Name], *, steps_on: int = 0
    ) -> ChainResult:
        now = self.tick()
        self.steps[engine] += steps_on
        before = self.present()
        chain = Chain(parent=parent, names=pack_names(names))
        step = self.steps[engine]
        results, expired = self.catalog.reserve(engine, group, step, [chain], now)
        aborted = {
            self.spec.writers[number].key for s in expired for number in s.aborted
        }  # fmt: skip
        gone = before - self.present() - aborted
        keys = [self.key(engine, group, name) for name in names]
        size = self.catalog.space.indexes[self.spec.engines[engine].namespace][group].object_bytes
        after = self.key(engine, group, parent) if parent else None
        self.spec.reserve(engine, step, after, keys, size, now, results[0], gone, expired)
        return results[0]

    def commit(self, engine: str, rank: int, number: int) -> None:
        now = self.tick()
        answer = self.catalog.commit(engine, rank, [number], now)
        self.spec.commit(engine, rank, number, now, answer)

    def abort(self, engine: str, rank: int | None, number: int) -> None:
        answer = self.catalog.abort(engine, rank, [number], Reason.WRITER_FAILED)
        self.spec.abort(engine, rank, number, Reason.WRITER_FAILED, answer)

    def rank_gone(self, engine: str, rank: int) -> None:
        self.spec.drop(engine, rank, self.catalog.rank_gone(engine, rank))

    def drop(self, engine: str) -> None:
        self.spec.drop(engine, None, self.catalog.drop_engine(engine))

    def acknowledge(self, engine: str, rank: int) -> None:
        self.catalog.rank_acknowledged(engine, rank)
        self.spec.let_go(engine, rank)

    def forget(self, engine: str) -> None:
        self.spec.forget(engine, self.catalog.forget_engine(engine))

    def clear(self, namespace: NamespaceId | None) -> None:
        self.spec.clear(namespace, self.catalog.clear(namespace))

    def present(self) -> set[Key]:
        indexes = self.catalog.space.all_indexes()
        return {(i.namespace, i.group, name) for i in indexes for name in i.entries}

    def check(self) -> None:
        """The books of both agree, and every reader of a leased chain reads what was named."""
        if self.audit:
            check_catalog(self.catalog)
        spec = self.spec
        for index in self.catalog.space.all_indexes():
            for name, entry in index.entries.items():
                found = spec.objects.get((index.namespace, index.group, name))
                require(found is not None, f"{name!r} is in the catalog and should not be")
                assert found is not None
                require(entry.offset == found.offset, f"{name!r} has moved")
                require(entry.visible == found.visible, f"{name!r} visible: {entry.visible}")
                parent = entry.parent.name if entry.parent else None
                expected = found.parent[2] if found.parent else None
                require(parent == expected, f"{name!r} hangs on {parent!r}")
        require(len(self.present()) == len(spec.objects), "the catalog has lost something")
        for engine in spec.engines.values():
            for chain in engine.leases.values():
                for key in chain:
                    require(key in spec.objects, f"{key} is leased and gone")
                    spec.require_bytes(key, spec.objects[key].offset)
        self.check_slots()

    def check_slots(self) -> None:
        """Every occupied slot has an object or a writer, and every engine holds what it should."""
        spec = self.spec
        quarantined = sum(not writer.open for writer in spec.writers.values())
        used = self.catalog.space.slots.used_slots
        require(used == len(spec.objects) + quarantined, f"{used} slots are occupied")
        for name, engine in spec.engines.items():
            books = self.catalog.engines[name]
            require(books.leases.keys() == engine.leases.keys(), "leases differ")
            held = [(n, w.open) for n, w in spec.writers.items() if w.engine == name]
            require(set(books.open) == {n for n, is_open in held if is_open}, "open differ")
            require(
                set(books.quarantine) == {n for n, is_open in held if not is_open}, "quarantine"
            )

    def check_nothing_leaks(self) -> None:
        """Destroys the world: once all engines are gone and all is cleared, nothing is left."""
        for engine in list(self.spec.engines):
            self.forget(engine)
        self.check()
        require(not self.spec.writers, "somebody still writes")
        self.clear(None)
        require(not self.present(), f"left behind: {self.present()}")
        require(self.catalog.space.slots.used_slots == 0, "slots are lost")
        require(not self.catalog.engines, "an engine is left")
