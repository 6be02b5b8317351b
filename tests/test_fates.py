"""The table of fates, against its own picture and against what each fate means."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvledger.fates import FINAL, TRANSITIONS, Event, Fate

# The store and load paths as the module's picture shows them, written down by hand.
PICTURE = {
    (Fate.OWED, Event.ASK): Fate.ASKED,
    (Fate.ASKED, Event.GRANT): Fate.GRANTED,
    (Fate.ASKED, Event.FOUND): Fate.PRESENT,
    (Fate.ASKED, Event.REFUSE): Fate.OWED,
    (Fate.GRANTED, Event.DISPATCH): Fate.IN_FLIGHT,
    (Fate.IN_FLIGHT, Event.COMMIT): Fate.STORED,
    (Fate.IN_FLIGHT, Event.ABANDON): Fate.SKIPPED,
    (Fate.LOADING, Event.ARRIVE): Fate.LOADED,
    (Fate.LOADING, Event.FAIL): Fate.OWED,
}


def reachable(start: Fate, events: Iterable[Event]) -> set[Fate]:
    """Fates that can follow when only these events happen."""
    allowed = set(events)
    found = {start}
    grown = True
    while grown:
        more = {
            after
            for (fate, event), after in TRANSITIONS.items()
            if fate in found and event in allowed
        }
        grown = not more <= found
        found |= more
    return found


def test_the_picture_is_the_table() -> None:
    for pair, after in PICTURE.items():
        assert TRANSITIONS[pair] is after
    extra = {event for fate, event in TRANSITIONS.keys() - PICTURE.keys()}
    assert extra == {Event.LOAD, Event.FORGET, Event.GIVE_UP, Event.ABANDON}


def test_every_fate_is_reached_and_every_event_is_used() -> None:
    assert reachable(Fate.OWED, Event) == set(Fate)
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_final_fates_change_only_by_a_new_load_or_a_lost_server() -> None:
    assert {Fate.PRESENT, Fate.STORED, Fate.LOADED, Fate.SKIPPED} == FINAL
    for (fate, event), after in TRANSITIONS.items():
        if fate in FINAL:
            expected = {Event.LOAD: Fate.LOADING, Event.FORGET: Fate.OWED}
            assert after is expected[event]


@pytest.mark.parametrize("fate", set(Fate) - FINAL)
def test_every_open_fate_can_end(fate: Fate) -> None:
    assert reachable(fate, Event) & FINAL


def test_what_workers_copy_is_not_given_up() -> None:
    """Bytes that workers have been told of are written, whatever the request does meanwhile."""
    for fate in (Fate.IN_FLIGHT, Fate.LOADING):
        assert (fate, Event.GIVE_UP) not in TRANSITIONS


def test_a_lost_server_is_no_end() -> None:
    """After it every chunk is owed again, or a load whose answer is still to come."""
    for fate in Fate:
        expected = Fate.LOADING if fate is Fate.LOADING else Fate.OWED
        assert TRANSITIONS[fate, Event.FORGET] is expected


def test_without_the_server_nothing_is_ever_stored_or_found() -> None:
    engine = {Event.ASK, Event.DISPATCH, Event.GIVE_UP, Event.FORGET, Event.LOAD, Event.FAIL}
    assert not reachable(Fate.OWED, engine) & {Fate.STORED, Fate.PRESENT, Fate.LOADED}
