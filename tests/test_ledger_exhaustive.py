"""Every sequence of events that a scheduler and a server can bring upon one account.

Breadth first over the states of :mod:`ledger_world`, up to renaming of numbers. Small universes are
walked to the end; the large one up to a number of states. After each event the account is compared
with books kept independently, and from each state the request is ended: then it must balance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations_with_replacement

import pytest

from exploration_report import explored
from kvledger import ledger
from kvledger.fates import TRANSITIONS, Event, Fate, LedgerError
from kvledger.ledger import Account, StoreRule
from kvledger.reasons import Reason
from ledger_events import events
from ledger_world import Limits, World, start

Path = tuple[str, ...]
ALL = StoreRule()
PROMPT = StoreRule(1, Reason.GENERATED_NOT_STORED)
CONSUMER = StoreRule(0, Reason.STORE_DISABLED)
RARE = ("preempts", "losses", "freezes", "truncates", "heals", "loads")


def only(chunks: int, questions: int = 2, **counts: int) -> Limits:
    """A universe in which the rare events that are not named do not happen."""
    return Limits(chunks, questions=questions, **{**dict.fromkeys(RARE, 0), **counts})


class Violation(AssertionError):
    """An invariant does not hold; names the events that lead there."""


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except (AssertionError, LedgerError, KeyError, IndexError) as error:
        raise Violation(f"{' > '.join(path)}: {error!r}") from error


def walk(world: World, *, most_states: int) -> tuple[int, int, bool]:
    """(states, transitions, whether these are all).

    Raises:
        Violation: with a shortest path to it.
    """
    seen = {world.key()}
    queue: deque[tuple[World, Path]] = deque([(world, ())])
    transitions = 0
    while queue:
        state, path = queue.popleft()
        for label, event in events(state):
            following, trace = state.clone(), (*path, label)
            transitions += 1
            with explaining(trace):
                event(following)
                following.check()
            key = following.key()
            if key in seen:
                continue
            if len(seen) >= most_states:
                return len(seen), transitions, False
            seen.add(key)
            queue.append((following, trace))
            with explaining((*trace, "the end")):
                for arrived in (True, False) if following.load is not None else (True,):
                    following.clone().drain(arrived)
    return len(seen), transitions, True


class Recorder(Account):
    """Remembers which entries of the table have been used."""

    used: set[tuple[Fate, Event]]

    def _apply(self, chunk: int, event: Event, reason: Reason | None = None) -> None:
        self.used.add((self.fates[chunk], event))
        super()._apply(chunk, event, reason)


# Walked to the end: universe, rule.
COMPLETE = {
    "three chunks": (only(3, questions=1, loads=1), ALL),
    "loads and preemption": (only(2, questions=1, loads=1, preempts=1), ALL),
    "loads twice": (only(1, loads=2, preempts=1), ALL),
    "server lost and preemption": (only(1, losses=1, preempts=1), ALL),
    "server lost and reset": (only(2, losses=1, freezes=1), ALL),
    "server lost and load": (only(2, losses=1, loads=1), ALL),
    "server lost and parent gone": (only(2, losses=1, heals=1), ALL),
    "reset and load": (only(2, freezes=1, loads=1), ALL),
    "parent gone and load": (only(2, heals=1, loads=1), ALL),
    "tokens replaced": (only(2, truncates=1), ALL),
    "prompt only": (only(2, losses=1, loads=1), PROMPT),
    "consumer": (only(2, losses=1, loads=1, freezes=1), CONSUMER),
}


def test_small_universes_to_the_end() -> None:
    Recorder.used = set()
    for what, (limits, rule) in COMPLETE.items():
        states, transitions, complete = walk(start(limits, rule, Recorder), most_states=40_000)
        explored(f"ledger: {what}", states, transitions, complete=complete)
        assert complete, f"{what}: more states than expected"
        assert states > 100, f"{what}: nothing happens"
    unused = TRANSITIONS.keys() - Recorder.used
    assert not unused, f"the table has entries that nothing leads to: {unused}"


def test_everything_at_once_as_far_as_it_goes() -> None:
    states, transitions, complete = walk(start(Limits(3), ALL), most_states=8_000)
    explored("ledger: everything, 3 chunks", states, transitions, complete=complete)
    assert not complete


@pytest.mark.full
@pytest.mark.parametrize("rule", [ALL, PROMPT, CONSUMER], ids=["all", "prompt", "consumer"])
@pytest.mark.parametrize(("first", "second"), list(combinations_with_replacement(RARE, 2)))
def test_every_pair_of_rare_events(first: str, second: str, rule: StoreRule) -> None:
    limits = only(2, **{first: 1, second: 1 + (first == second)})
    states, transitions, complete = walk(start(limits, rule), most_states=100_000)
    explored(f"ledger: {first} and {second}", states, transitions, complete=complete)


@pytest.mark.full
@pytest.mark.parametrize("rare", RARE)
def test_three_chunks_with_one_rare_event(rare: str) -> None:
    states, transitions, complete = walk(start(only(3, **{rare: 1}), ALL), most_states=100_000)
    explored(f"ledger: {rare}, 3 chunks", states, transitions, complete=complete)


# ---------------------------------------------------------------- negative controls


class TakesAnyAnswer(Account):
    """Does not ask itself which question an answer belongs to."""

    def answer(self, chunks, question, present, grants):  # type: ignore[no-untyped-def]
        latest = {self._asked[c] for c in chunks if c in self._asked}
        return super().answer(chunks, min(latest, default=question), present, grants)


class KeepsOldBlocks(Account):
    """Reads blocks that belong to another request by now."""

    def forget_blocks(self) -> list[int]:
        blocks = dict(self._blocks)
        unused = super().forget_blocks()
        self._blocks = blocks
        return unused


class LeaksReservations(Account):
    """Says nothing of the slots that it does not need any more."""

    def forget_blocks(self) -> list[int]:
        super().forget_blocks()
        return []


class BelievesFailedLoads(Account):
    """Keeps what a failed load was to bring."""

    def end_load(self, *, arrived: bool) -> None:
        fates = list(self.fates)
        super().end_load(arrived=arrived)
        self.fates += [Fate.OWED] * (len(fates) - len(self.fates))


class StoresWhatIsForbidden(Account):
    """Owes again what a rule or a reset forbids to store."""

    def _owe(self, chunk: int, event: Event) -> None:
        self._apply(chunk, event)


class SettlesByChunk(Account):
    """Believes a settlement of an older reservation of the same chunk."""

    def settle(self, chunk: int, reservation: int, failure: Reason | None) -> None:
        grant = self.grants.get(chunk)
        super().settle(chunk, grant.reservation if grant else reservation, failure)


class HidesOpenChunks(Account):
    """Never looks again at what was settled once."""

    def _apply(self, chunk: int, event: Event, reason: Reason | None = None) -> None:
        settled = self._settled
        super()._apply(chunk, event, reason)
        self._settled = max(settled, self._settled)


class CountsPartialChunks(Account):
    """Takes a chunk for valid when its first token is."""

    def advance(self, valid_tokens: int) -> None:
        super().advance(-(-valid_tokens // self.chunk_tokens) * self.chunk_tokens)


MUTANTS: dict[type[Account], Limits] = {
    TakesAnyAnswer: only(1, truncates=1),
    KeepsOldBlocks: only(1, preempts=1),
    LeaksReservations: only(1),
    BelievesFailedLoads: only(1, loads=1),
    StoresWhatIsForbidden: only(1, losses=1, freezes=1),
    SettlesByChunk: only(1, truncates=1),
    HidesOpenChunks: only(2, loads=1),
    CountsPartialChunks: only(2),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_wrong_account_is_found(mutant: type[Account]) -> None:
    """In a universe in which the right one is not faulted."""
    states, _, complete = walk(start(MUTANTS[mutant], ALL), most_states=15_000)
    assert complete, states
    with pytest.raises(Violation) as found:
        walk(start(MUTANTS[mutant], ALL, mutant), most_states=15_000)
    print(mutant.__doc__, found.value)


# A pair that is taken away (None), or leads to another fate.
WRONG_TABLES: dict[tuple[Fate, Event], Fate | None] = {
    (Fate.ASKED, Event.LOAD): None,
    (Fate.IN_FLIGHT, Event.FORGET): None,
    (Fate.LOADING, Event.FORGET): None,
    (Fate.ASKED, Event.REFUSE): Fate.ASKED,
    (Fate.LOADING, Event.FAIL): Fate.PRESENT,
    (Fate.IN_FLIGHT, Event.GIVE_UP): Fate.SKIPPED,
    (Fate.GRANTED, Event.DISPATCH): Fate.STORED,
}


@pytest.mark.parametrize("pair", WRONG_TABLES, ids=lambda pair: "-".join(pair))
def test_a_wrong_table_is_found(pair: tuple[Fate, Event], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {key: fate for key, fate in TRANSITIONS.items() if key != pair}
    fate = WRONG_TABLES[pair]
    monkeypatch.setattr(ledger, "TRANSITIONS", wrong if fate is None else {**wrong, pair: fate})
    with pytest.raises(Violation) as found:
        walk(start(only(2, questions=1, loads=1, preempts=1, losses=1), ALL), most_states=15_000)
    print(found.value)
