"""Long random histories of a larger world, compared with the specification after each event.

Three namespaces with objects of different sizes (one of them hybrid, with two groups), floors,
pages that change their size, an arena that grows, five engines. Chains are branches of a tree, as
prompts are: each name has one parent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from catalog_checked import CheckedCatalog
from kvledger.catalog import Catalog
from kvledger.entries import Entry, GroupIndex, Reservation
from kvledger.naming import Name, NamespaceId, name_of
from kvledger.slabs import Page
from kvledger.space import Space

PAGES = 8
PAGE_BYTES = 24
ARENA_BYTES = PAGES * PAGE_BYTES
FLOOR = 1 / 4
MAX_RESERVATIONS = 12
RESERVATION_STEPS = 5
SIZES = {NamespaceId("one"): [4], NamespaceId("two"): [6, 3], NamespaceId("three"): [24]}
ENGINES = {
    "A": (NamespaceId("one"), 1),
    "B": (NamespaceId("one"), 1),
    "C": (NamespaceId("two"), 2),
    "D": (NamespaceId("two"), 2),
    "E": (NamespaceId("three"), 3),
}
LEASES = 3
DEPTH = 8
BRANCHES = 3

engines = st.sampled_from(sorted(ENGINES))
depths = st.integers(1, DEPTH)


def prompt(branch: int, split: int) -> list[Name]:
    """A path through a tree: the trunk as far as ``split``, then a branch of its own."""
    labels = [f"trunk/{i}" if i < split else f"{branch}/{split}/{i}" for i in range(DEPTH)]
    return [name_of(label.encode()) for label in labels]


prompts = st.builds(prompt, st.integers(0, BRANCHES - 1), st.sampled_from([0, 3, 6]))


class CatalogMachine(RuleBasedStateMachine):
    """Engines that match, reserve, commit, fail and die, in any order."""

    kind: type[Catalog] = Catalog

    @initialize(pages=st.sampled_from([2, PAGES]), max_entries=st.sampled_from([1000, 20]))
    def start(self, pages: int, max_entries: int) -> None:
        catalog = self.kind(
            pages=PAGES,
            page_bytes=PAGE_BYTES,
            max_entries=max_entries,
            namespace_floor=FLOOR,
            max_reservations=MAX_RESERVATIONS,
            reservation_steps=RESERVATION_STEPS,
        )
        for namespace, sizes in SIZES.items():
            catalog.open_namespace(namespace, sizes)
        for _ in range(pages):
            catalog.add_page()
        self.world = CheckedCatalog(catalog, slots=None, audit=self.kind is Catalog)
        self.world.spec.remembers_all = max_entries == 1000

    @precondition(lambda self: self.world.catalog.space.slots.growing)
    @rule()
    def grow(self) -> None:
        self.world.catalog.add_page()

    def attached(self, engine: str) -> bool:
        return engine in self.world.spec.engines

    def use(self, engine: str) -> None:
        if not self.attached(engine):
            self.world.attach(engine, *ENGINES[engine])

    def group(self, engine: str, choice: int) -> int:
        return choice % len(SIZES[ENGINES[engine][0]])

    @rule(engine=engines, names=prompts, depth=depths, lease=st.integers(1, LEASES), g=depths)
    def match(self, engine: str, names: list[Name], depth: int, lease: int, g: int) -> None:
        self.use(engine)
        self.world.match(engine, lease, self.group(engine, g), names[:depth])

    @rule(engine=engines, lease=st.integers(1, LEASES))
    def release(self, engine: str, lease: int) -> None:
        self.use(engine)
        self.world.release(engine, lease)

    @rule(
        engine=engines, names=prompts, depth=depths, g=depths, steps_on=st.integers(0, 2),
        first=st.integers(0, DEPTH - 1), random_seed=st.integers(0, 3),
    )  # fmt: skip
    def reserve_and_perhaps_commit(
        self, engine: str, names: list[Name], depth: int, g: int, steps_on: int, first: int,
        random_seed: int,
    ) -> None:  # fmt: skip
        """The usual course of things, so that the arena fills; seed 0 leaves all open."""
        self.use(engine)
        group = self.group(engine, g)
        first = first if random_seed == 3 else 0
        parent = names[first - 1] if first else b""
        lost_before = self.floors(engine)
        result = self.world.reserve(engine, group, parent, names[first:depth], steps_on=steps_on)
        self.require_floors(lost_before)
        if random_seed:
            work = [
                (rank, number)
                for number in result.reservations
                for rank in range(ENGINES[engine][1])
            ]
            random.Random(random_seed).shuffle(work)
            for rank, number in work:
                self.world.commit(engine, rank, number)

    @rule(seed=st.integers(0, 1_000_000), times=st.integers(5, 15))
    def work_for_a_while(self, seed: int, times: int) -> None:
        """Prompts of all engines, looked up, stored and committed: the arena is soon full."""
        chance = random.Random(seed)
        for _ in range(times):
            engine = chance.choice(sorted(ENGINES))
            names = prompt(chance.randrange(BRANCHES), chance.choice([0, 3, 6]))
            depth = chance.randint(1, DEPTH)
            group = chance.randrange(2)
            if chance.random() < 0.5:
                lease = chance.randint(1, LEASES)
                self.match(engine, names, depth, lease, group)
                if chance.random() < 0.8:
                    self.release(engine, lease)
            seed = chance.choice([1, 1, 1, 0])
            self.reserve_and_perhaps_commit(engine, names, depth, group, 1, 0, seed)

    def floors(self, engine: str) -> dict[NamespaceId, int]:
        """Bytes each namespace that somebody else works in must still have afterwards."""
        in_use = {ENGINES[name][0] for name in self.world.spec.engines}
        floor = min(int(ARENA_BYTES * FLOOR), ARENA_BYTES // len(in_use))
        others = in_use - {ENGINES[engine][0]}
        return {namespace: min(floor, self.used(namespace)) for namespace in others}

    def used(self, namespace: NamespaceId) -> int:
        return sum(o.size for o in self.world.spec.objects.values() if o.key[0] == namespace)

    def require_floors(self, floors: dict[NamespaceId, int]) -> None:
        for namespace, least in floors.items():
            assert self.used(namespace) >= least, f"{namespace} was pushed below its floor"

    @precondition(lambda self: self.world.spec.writers)
    @rule(data=st.data(), what=st.sampled_from(["commit", "commit", "commit", "abort", "recall"]))
    def settle(self, data: st.DataObject, what: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.spec.writers)))
        engine = self.world.spec.writers[number].engine
        rank = data.draw(st.integers(0, ENGINES[engine][1] - 1))
        if what == "commit":
            self.world.commit(engine, rank, number)
        elif what == "abort":
            self.world.abort(engine, rank, number)
        else:
            self.world.abort(engine, None, number)

    @rule(engine=engines, rank=st.integers(0, 2))
    def lose_rank(self, engine: str, rank: int) -> None:
        if self.attached(engine):
            self.world.rank_gone(engine, rank % ENGINES[engine][1])
            self.world.attach(engine, *ENGINES[engine])

    @rule(engine=engines)
    def lose_scheduler(self, engine: str) -> None:
        if self.attached(engine):
            self.world.drop(engine)
            for rank in range(ENGINES[engine][1] - 1):
                self.world.acknowledge(engine, rank)

    @rule(engine=engines)
    def lose_engine(self, engine: str) -> None:
        if self.attached(engine):
            self.world.forget(engine)

    @rule(namespace=st.sampled_from([None, *SIZES]))
    def clear(self, namespace: NamespaceId | None) -> None:
        self.world.clear(namespace)

    @invariant()
    def books_agree(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.check_nothing_leaks()


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# ---------------------------------------------------------------- negative controls


def ignores_floors(space: Space) -> None:
    space.floor_bytes = 0


def ignores_leases(space: Space) -> None:
    """A page goes to another size with what is leased in it."""
    doomed_with = space._doomed_with

    def doomed_with_leased(
        page: Page[Entry | Reservation], wanting: GroupIndex
    ) -> list[Entry] | None:
        leased = [o for o in page.occupants() if isinstance(o, Entry) and o.leases]
        counts = [entry.leases for entry in leased]
        for entry in leased:
            entry.leases = 0
        doomed = doomed_with(page, wanting)
        for entry, count in zip(leased, counts, strict=True):
            entry.leases = count
        return doomed

    space._doomed_with = doomed_with_leased  # type: ignore[method-assign]


def forgets_eviction_time(space: Space) -> None:
    """Remembers when an evicted object was last used, instead of when it was evicted."""
    evict = space.evict

    def evict_at_last_use(entry: Entry, now: float) -> None:
        evict(entry, min(now, entry.last_used))

    space.evict = evict_at_last_use  # type: ignore[method-assign]


@pytest.mark.parametrize("break_rule", [ignores_floors, ignores_leases, forgets_eviction_time])
def test_a_broken_rule_is_found(break_rule: Callable[[Space], None]) -> None:
    class Broken(Catalog):
        def open_namespace(self, namespace: NamespaceId, object_bytes: Sequence[int]) -> None:
            super().open_namespace(namespace, object_bytes)
            if len(self.space.indexes) == 1:
                break_rule(self.space)

    class BrokenMachine(CatalogMachine):
        kind = Broken

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            BrokenMachine,
            settings=settings(
                max_examples=200,
                stateful_step_count=60,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
