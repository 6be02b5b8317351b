"""Every sequence of events over a small universe, compared with the specification.

Four names (a→b→c and a→d), an engine of two ranks and one of one rank, three slots. States are
explored breadth first and recognised by a canonical form: times become ranks, reservation and slot
numbers go, the two ranks of an engine are interchangeable. The exploration ends when no event leads
to a new state, so sequences of any length are covered.

The negative controls are catalogs with one rule broken each; the same exploration must find a
sequence that shows it, by the specification alone.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from catalog_checked import CheckedCatalog
from catalog_spec import SpecViolation
from exploration_report import describe, explored
from kvledger.catalog import Catalog
from kvledger.entries import EngineBooks, Entry, Reservation, Settlement
from kvledger.naming import Name, NamespaceId, name_of
from kvledger.space import Space

NAMESPACE = NamespaceId("small")
NAMES: dict[str, Name] = {letter: name_of(letter.encode()) for letter in "abcd"}
LETTERS = {name: letter for letter, name in NAMES.items()}
WORLD = {"X": 2, "Y": 1}
RESERVATION_STEPS = 64
RESERVES = [("", "a"), ("", "ab"), ("", "abc"), ("", "ad"), ("a", "bc"), ("a", "d"), ("b", "c")]
MATCHES = ["abc", "ad"]

MAX_STATES = 100_000
"""A bound on the exploration, which ends by itself far below."""

Event = tuple[str, ...]
Mask = tuple[int, ...]


def new_world(kind: type[Catalog], slots: int) -> CheckedCatalog:
    catalog = kind(pages=1, page_bytes=slots, max_entries=64, reservation_steps=RESERVATION_STEPS)
    catalog.add_page()
    catalog.open_namespace(NAMESPACE, [1])
    world = CheckedCatalog(catalog, slots=slots, audit=kind is Catalog)
    for engine, ranks in WORLD.items():
        world.attach(engine, NAMESPACE, ranks)
    return world


def events(world: CheckedCatalog) -> Iterable[Event]:
    """What may happen next. An engine that lost a rank does nothing until it attaches anew."""
    for engine, ranks in WORLD.items():
        for rank in range(ranks):
            yield ("rank_gone", engine, str(rank))
        yield ("drop", engine)
        yield ("forget", engine)
        for after, letters in RESERVES:
            yield ("reserve", engine, after, letters)
        yield ("expire", engine)
        for letters in MATCHES:
            yield ("match", engine, letters)
        if world.spec.engines[engine].leases:
            yield ("release", engine)
    for number, writer in world.spec.writers.items():
        for rank in range(WORLD[writer.engine]):
            yield ("commit", writer.engine, str(rank), str(number))
            yield ("abort", writer.engine, str(rank), str(number))
            if not writer.open:
                yield ("acknowledge", writer.engine, str(rank))
        yield ("scheduler_abort", writer.engine, str(number))
    yield ("clear",)


def apply(world: CheckedCatalog, event: Event) -> None:
    kind, *arguments = event
    if kind == "clear":
        world.clear(None)
        return
    engine, *rest = arguments
    if kind == "rank_gone":
        world.rank_gone(engine, int(rest[0]))
        world.attach(engine, NAMESPACE, WORLD[engine])
    elif kind == "drop":
        world.drop(engine)
    elif kind == "forget":
        world.forget(engine)
        world.attach(engine, NAMESPACE, WORLD[engine])
    elif kind == "reserve":
        after = NAMES[rest[0]] if rest[0] else b""
        world.reserve(engine, 0, after, [NAMES[letter] for letter in rest[1]])
    elif kind == "expire":
        world.reserve(engine, 0, b"", [], steps_on=RESERVATION_STEPS + 1)
    elif kind == "match":
        world.match(engine, 1, 0, [NAMES[letter] for letter in rest[0]])
    elif kind == "release":
        world.release(engine, 1)
    elif kind == "commit":
        world.commit(engine, int(rest[0]), int(rest[1]))
    elif kind == "abort":
        world.abort(engine, int(rest[0]), int(rest[1]))
    elif kind == "acknowledge":
        world.acknowledge(engine, int(rest[0]))
    else:
        assert kind == "scheduler_abort"
        world.abort(engine, None, int(rest[0]))


def canonical(world: CheckedCatalog) -> object:
    """The same for two states exactly if nothing that may follow can tell them apart.

    Left out: ghosts and steps, which only change what is reported, and what the leaf queues keep of
    the past, which their own tests cover.
    """
    return min(form(world, swapped=False), form(world, swapped=True))


def form(world: CheckedCatalog, *, swapped: bool) -> tuple[object, ...]:
    def mask(reservation: Reservation, engine: str) -> int:
        waiting = reservation.waiting_ranks
        return (0, 2, 1, 3)[waiting] if swapped and engine == "X" else waiting

    catalog = world.catalog
    entries = catalog.space.indexes[NAMESPACE][0].entries
    times = sorted({entry.last_used for entry in entries.values()})
    writing = {
        reservation.entry: (engine, mask(reservation, engine))
        for engine, books in catalog.engines.items()
        for reservation in books.open.values()
    }
    present = tuple(
        (
            LETTERS[Name(name)],
            times.index(entry.last_used),
            writing.get(entry, ("", 0)),
            entry.leases,
        )
        for name, entry in sorted(entries.items())
    )
    leases = tuple(
        (engine, tuple((number, LETTERS[tail.name]) for number, tail in books.leases.items()))
        for engine, books in sorted(catalog.engines.items())
    )
    quarantine = sorted(
        (engine, mask(reservation, engine))
        for engine, books in catalog.engines.items()
        for reservation in books.quarantine.values()
    )
    return present, leases, tuple(quarantine)


@dataclass
class Exploration:
    states: int
    transitions: int
    longest: int
    """Events on the way to the state that is farthest from the start."""


def explore(kind: type[Catalog], slots: int) -> Exploration:
    """Breadth first, to the end. Raises SpecViolation with the sequence that led there."""
    first = new_world(kind, slots)
    seen = {canonical(first)}
    queue: deque[tuple[bytes, object, int]] = deque([(pickle.dumps(first), (), 0)])
    transitions = depth = 0
    while queue:
        frozen, path, depth = queue.popleft()
        for event in list(events(pickle.loads(frozen))):
            world = pickle.loads(frozen)
            transitions += 1
            try:
                apply(world, event)
                world.check()
                state = canonical(world)
                if state not in seen:
                    seen.add(state)
                    queue.append((pickle.dumps(world), (path, event), depth + 1))
                    world.check_nothing_leaks()
            except SpecViolation as violation:
                raise SpecViolation(f"{violation}, after {describe(path, event)}") from violation
        assert len(seen) <= MAX_STATES, "the universe has grown: is the form still canonical?"
    return Exploration(len(seen), transitions, depth)


@pytest.mark.parametrize(
    ("slots", "least_states"),
    [(2, 150), (3, 2_000), pytest.param(4, 10_000, marks=pytest.mark.full)],
)
def test_every_sequence_of_events_keeps_the_books(slots: int, least_states: int) -> None:
    found = explore(Catalog, slots)
    universe = f"catalog: 4 names, 2 engines, 3 ranks, {slots} slots, paths of {found.longest}"
    explored(universe, found.states, found.transitions, complete=True)
    assert found.states >= least_states, "the universe has shrunk"


# ---------------------------------------------------------------- negative controls


class FreesAtAbort(Catalog):
    """Hands a slot out again while ranks may still be writing it."""

    def _quarantine(self, books: EngineBooks, reservation: Reservation) -> None:  # noqa: ARG002
        self.space.slots.free(reservation.offset)


class ShowsAtFirstCommit(Catalog):
    """Takes the commit of one rank for that of all."""

    def commit(
        self, engine: str, rank: int, reservations: Iterable[int], now: float
    ) -> list[Settlement]:
        numbers = list(reservations)
        for number in numbers:
            reservation = self.engines[engine].open.get(number)
            if reservation is not None:
                reservation.waiting_ranks &= 1 << rank
        return super().commit(engine, rank, numbers, now)


class ShowsWithoutParent(Catalog):
    """Makes a complete entry visible though what is before it is not."""

    def _show(self, books: EngineBooks, entry: Entry, stored: list[int], now: float) -> None:
        parent = entry.parent
        if parent is not None and not parent.visible:
            entry.parent = None
            super()._show(books, entry, stored, now)
            entry.parent = parent
        else:
            super()._show(books, entry, stored, now)


class HeadFirstSpace(Space):
    """Evicts the head of a chain before its tail."""

    def evict(self, entry: Entry, now: float) -> None:
        head = entry.parent
        if head is None or head.parent is not None or head.leases:
            super().evict(entry, now)
            return
        orphans = list(head.iterate_children())
        for orphan in orphans:
            head.remove_child(orphan)
            orphan.parent = None
        super().evict(head, now)


class EvictsParents(Catalog):
    """See HeadFirstSpace."""

    def __init__(self, *, pages: int, page_bytes: int, max_entries: int, **_: int) -> None:
        super().__init__(pages=pages, page_bytes=page_bytes, max_entries=max_entries)
        self.space = HeadFirstSpace(
            pages=pages, page_bytes=page_bytes, max_entries=max_entries, namespace_floor=0.0
        )


class KeepsLeasesAfterDrop(Catalog):
    """Forgets an engine and not its leases."""

    def drop_engine(self, engine: str) -> list[Settlement]:
        books = self.engines.get(engine)
        if books is None:
            return []
        books.leases.clear()
        return super().drop_engine(engine)


class ReleasesWithTheFirstLease(Catalog):
    """Lets an entry go when the first of its leases is given back."""

    def release(self, engine: str, leases: Iterable[int]) -> None:
        books = self.engines[engine]
        for lease in list(leases):
            tail = books.leases.get(lease)
            if tail is not None:
                tail.leases = 1
            super().release(engine, [lease])


class IgnoresLateCommits(Catalog):
    """Leaves a slot in quarantine though its writer has said that it is done."""

    def _acknowledge(self, books: EngineBooks, number: int, rank: int) -> None:
        pass


class BelievesLateCommits(Catalog):
    """Takes an acknowledgement of one rank for that of all."""

    def _leave_quarantine(self, books: EngineBooks, reservation: Reservation, ranks: int) -> None:  # noqa: ARG002
        super()._leave_quarantine(books, reservation, -1)


class ClearsWhatIsLeased(Catalog):
    """Drops leased objects."""

    def clear(self, namespace: NamespaceId | None) -> int:
        for books in self.engines.values():
            for tail in books.leases.values():
                tail.leases = 0
                tail.index.leaves.offer(tail)
        return super().clear(namespace)


MUTANTS = [
    FreesAtAbort,
    ShowsAtFirstCommit,
    ShowsWithoutParent,
    EvictsParents,
    KeepsLeasesAfterDrop,
    ReleasesWithTheFirstLease,
    IgnoresLateCommits,
    BelievesLateCommits,
    ClearsWhatIsLeased,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_found(mutant: type[Catalog]) -> None:
    with pytest.raises(SpecViolation, match="after") as caught:
        explore(mutant, slots=2)
    print(f"{mutant.__doc__} {caught.value}")
