"""Every sequence of events of two engines, three requests and one catalog, up to a bound.

The world is that of ledger_catalog_world.py: four names, three slots (and two, so that more is
evicted), real accounts and the real catalog, which is compared with its specification at each step.
Breadth first, states recognised by a canonical form. After each event I1 to I4 are asked as far as
ledger and catalog can state them, and from each state everything is brought to its end: then every
account balances, and nothing is leased, reserved, quarantined or lost.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from catalog_spec import SpecViolation
from exploration_report import describe, explored
from kvledger.catalog import Catalog
from kvledger.entries import ChainResult, EngineBooks, Entry, GroupIndex, Reservation
from kvledger.fates import Fate, LedgerError
from kvledger.ledger import Account
from kvledger.naming import Name
from kvledger.reasons import Reason
from ledger_catalog_world import TEXTS, WORLD, Joint

Event = tuple[str, ...]


@dataclass(frozen=True)
class Bounds:
    """How often the rare events may happen along one path, and how many states are visited."""

    states: int
    deaths: int = 1
    failures: int = 1
    preemptions: int = 1


def events(world: Joint, bounds: Bounds) -> Iterator[Event]:
    """Everything that may happen now."""
    for name, live in world.requests.items():
        if live.phase == "new":
            yield ("admit" if live.failed_load else "look_up", name)
        elif live.phase == "asked":
            yield ("admit", name)
        elif live.phase == "loading":
            yield ("load", name)
            if world.failures < bounds.failures:
                yield ("load_fails", name)
            continue  # vLLM keeps the blocks until the load is answered
        elif live.phase == "running":
            if live.valid < len(TEXTS[name]):
                yield ("compute", name)
            if any(live.account.runs_to_ask()):
                yield ("ask", name)
            if Fate.GRANTED in live.account.fates:
                yield ("copy", name)
            if world.preemptions < bounds.preemptions:
                yield ("preempt", name)
        if live.phase not in ("ended", "closed"):
            yield ("end", name)
    for number in world.in_hand:
        yield ("commit", str(number))
        if world.failures < bounds.failures:
            yield ("fail", str(number))
    for engine in WORLD:
        if world.deaths < bounds.deaths:
            yield ("die", engine)
    yield ("clear",)


def apply(world: Joint, event: Event) -> None:
    kind, *rest = event
    if kind in ("commit", "fail"):
        world.settle(int(rest[0]), fails=kind == "fail")
    elif kind in ("load", "load_fails"):
        world.failures += kind == "load_fails"
        world.load(rest[0], arrives=kind == "load")
    else:
        getattr(world, kind)(*rest)


def walk(first: Joint, bounds: Bounds) -> tuple[int, int, bool]:
    """(states, transitions, whether these are all).

    Raises:
        SpecViolation: with a shortest sequence that leads there.
    """
    seen = {first.key()}
    queue: deque[tuple[bytes, object]] = deque([(pickle.dumps(first), ())])
    transitions = 0
    while queue:
        frozen, path = queue.popleft()
        for event in list(events(pickle.loads(frozen), bounds)):
            world = pickle.loads(frozen)
            transitions += 1
            try:
                apply(world, event)
                world.check()
                key = world.key()
                if key in seen:
                    continue
                if len(seen) >= bounds.states:
                    return len(seen), transitions, False
                seen.add(key)
                queue.append((pickle.dumps(world), (path, event)))
                world.drain()
            except (SpecViolation, LedgerError, AssertionError) as error:
                raise SpecViolation(f"{error!r}, after {describe(path, event)}") from error
    return len(seen), transitions, True


NEVER = {"deaths": 0, "failures": 0, "preemptions": 0}

# Requests, slots, bounds, and whether these are all states.
UNIVERSES = [
    ("pq", 2, Bounds(4_000, **NEVER), True),
    ("pqr", 3, Bounds(3_000), False),
]
LARGE_UNIVERSES = [
    ("pq", 3, Bounds(10_000, **NEVER), True),
    ("pq", 2, Bounds(10_000, **NEVER | {"deaths": 1}), True),
    ("pq", 2, Bounds(12_000, **NEVER | {"failures": 1}), True),
    ("pq", 2, Bounds(40_000, **NEVER | {"preemptions": 1}), True),
    ("pr", 2, Bounds(12_000, **NEVER), True),
    ("qr", 2, Bounds(15_000), False),
    ("pqr", 2, Bounds(25_000), False),
    ("pqr", 3, Bounds(25_000), False),
]


@pytest.mark.parametrize(
    ("requests", "slots", "bounds", "is_all"),
    [*UNIVERSES, *(pytest.param(*large, marks=pytest.mark.full) for large in LARGE_UNIVERSES)],
)
def test_every_sequence_keeps_all_books(
    requests: str, slots: int, bounds: Bounds, is_all: bool
) -> None:
    states, transitions, complete = walk(Joint(slots, requests), bounds)
    explored(
        f"ledger and catalog: requests {', '.join(requests)}, {slots} slots, "
        f"{bounds.deaths} deaths, {bounds.failures} failures, {bounds.preemptions} preemptions",
        states,
        transitions,
        complete=complete,
    )
    assert complete or not is_all, "the universe has grown"
    assert states >= 3_000, "the universe has shrunk"


# ---------------------------------------------------------------- negative controls


class StoresAhead(Account):
    """I1: takes the chunk for valid that the next step is going to compute."""

    def advance(self, valid_tokens: int) -> None:
        super().advance(valid_tokens + self.chunk_tokens)


class ReadsOldBlocks(Account):
    """I1: reads blocks that were taken from the request."""

    def forget_blocks(self) -> list[int]:
        blocks = dict(self._blocks)
        unused = super().forget_blocks()
        self._blocks = blocks
        return unused


class EndsInSilence(Account):
    """I2: forgets what it still owes at the end."""

    def give_up(self, reason: Reason) -> list[int]:
        owed = [chunk for chunk, fate in enumerate(self.fates) if fate is Fate.OWED]
        unused = super().give_up(reason)
        for chunk in reversed(owed):
            del self.fates[chunk], self.reasons[chunk]
        return unused


class KeepsSlots(Account):
    """I4: says nothing of the slots that it does not need any more."""

    def give_up(self, reason: Reason) -> list[int]:
        super().give_up(reason)
        return []

    def forget_blocks(self) -> list[int]:
        super().forget_blocks()
        return []


class BelievesFailedLoads(Account):
    """I7: takes what a failed load was to bring for loaded."""

    def end_load(self, *, arrived: bool) -> None:  # noqa: ARG002
        super().end_load(arrived=True)


class ShowsUnwritten(Catalog):
    """I1: lets a chunk be found as soon as it is reserved."""

    def _place(self, books: EngineBooks, entry: Entry, step: int, now: float) -> Reason | None:
        reason = super()._place(books, entry, step, now)
        entry.visible = reason is None
        return reason


class CopiesAgain(Catalog):
    """I3: hands out a second slot for a chunk that is there."""

    def _reserve_chain(
        self, books: EngineBooks, index: GroupIndex, step: int, after: bytes,
        names: Sequence[Name], now: float,
    ) -> ChainResult:  # fmt: skip
        for name in names:
            entry = index.entries.get(name)
            if entry is not None and entry.evictable:
                self.space.remove(entry)
        return super()._reserve_chain(books, index, step, after, names, now)


class KeepsLeases(Catalog):
    """I4: a lease is never given back."""

    def release(self, engine: str, leases: Iterable[int]) -> None:
        pass


class ReusesSlotsOfLateWriters(Catalog):
    """Hands out the slots of a given-up chain while a rank may be writing to them."""

    def _quarantine(self, books: EngineBooks, reservation: Reservation) -> None:  # noqa: ARG002
        self.space.slots.free(reservation.offset)


WRONG_ACCOUNTS = [StoresAhead, ReadsOldBlocks, EndsInSilence, KeepsSlots, BelievesFailedLoads]
WRONG_CATALOGS = [ShowsUnwritten, CopiesAgain, KeepsLeases, ReusesSlotsOfLateWriters]


@pytest.mark.parametrize("mutant", WRONG_ACCOUNTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_account_is_found(mutant: type[Account]) -> None:
    with pytest.raises(SpecViolation, match="after") as caught:
        walk(Joint(2, "pq", account=mutant), Bounds(3_000))
    print(f"{mutant.__doc__} {caught.value}")


@pytest.mark.parametrize("mutant", WRONG_CATALOGS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_catalog_is_found(mutant: type[Catalog]) -> None:
    with pytest.raises(SpecViolation, match="after") as caught:
        walk(Joint(2, "pq", catalog=mutant), Bounds(3_000))
    print(f"{mutant.__doc__} {caught.value}")
