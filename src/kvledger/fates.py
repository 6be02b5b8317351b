"""What can become of a chunk, as one table: fate × event → fate.

::

    owed --ask--> asked --grant--> granted --dispatch--> in_flight --commit--> STORED
                    |  \\--found--> PRESENT                  \\--abandon--> SKIPPED(reason)
                    \\--refuse--> owed          loading --arrive--> LOADED, or --fail--> owed

Capitals are final. Fates speak of one run of the server: when it is lost, what it knew is owed
again (*forget*).
"""

from __future__ import annotations

from enum import StrEnum

from kvledger.errors import KVLedgerError


class Fate(StrEnum):
    """What has become of a chunk; the last four are final."""

    OWED = "owed"
    ASKED = "asked"
    GRANTED = "granted"
    IN_FLIGHT = "in_flight"
    LOADING = "loading"
    PRESENT = "present"
    STORED = "stored"
    LOADED = "loaded"
    SKIPPED = "skipped"


FINAL = frozenset({Fate.PRESENT, Fate.STORED, Fate.LOADED, Fate.SKIPPED})


class Event(StrEnum):
    """What can happen to a chunk."""

    ASK = "ask"
    """a slot was asked for"""
    FOUND = "found"
    """the server has it already"""
    GRANT = "grant"
    """the server gave a slot"""
    REFUSE = "refuse"
    """no slot this time; ask again later"""
    DISPATCH = "dispatch"
    """the workers were told to copy it"""
    COMMIT = "commit"
    """every rank has written it"""
    ABANDON = "abandon"
    """the server gave the slot up"""
    LOAD = "load"
    """it is being loaded"""
    ARRIVE = "arrive"
    """the load is complete"""
    FAIL = "fail"
    """the load failed: it is to be computed"""
    FORGET = "forget"
    """what the server knew of it is void"""
    GIVE_UP = "give_up"
    """its bytes can no longer be read, or must not be"""


def _table() -> dict[tuple[Fate, Event], Fate]:
    table = {
        (Fate.OWED, Event.ASK): Fate.ASKED,
        (Fate.ASKED, Event.FOUND): Fate.PRESENT,
        (Fate.ASKED, Event.GRANT): Fate.GRANTED,
        (Fate.ASKED, Event.REFUSE): Fate.OWED,
        (Fate.GRANTED, Event.DISPATCH): Fate.IN_FLIGHT,
        (Fate.IN_FLIGHT, Event.COMMIT): Fate.STORED,
        (Fate.IN_FLIGHT, Event.ABANDON): Fate.SKIPPED,
        (Fate.GRANTED, Event.ABANDON): Fate.SKIPPED,
        (Fate.LOADING, Event.ARRIVE): Fate.LOADED,
        (Fate.LOADING, Event.FAIL): Fate.OWED,
        (Fate.LOADING, Event.FORGET): Fate.LOADING,
        (Fate.OWED, Event.FORGET): Fate.OWED,
    }
    # A request that was preempted is looked up anew: what it had stored may come back by a load.
    for fate in (Fate.OWED, Fate.ASKED, Fate.PRESENT, Fate.STORED, Fate.LOADED, Fate.SKIPPED):
        table[fate, Event.LOAD] = Fate.LOADING
    for fate in (Fate.ASKED, Fate.GRANTED, Fate.IN_FLIGHT, *FINAL):
        table[fate, Event.FORGET] = Fate.OWED
    for fate in (Fate.OWED, Fate.ASKED, Fate.GRANTED):
        table[fate, Event.GIVE_UP] = Fate.SKIPPED
    return table


TRANSITIONS = _table()
"""Fate × event → fate. A pair that is not here cannot happen."""


class LedgerError(KVLedgerError):
    """An event that cannot happen to a chunk in its state; the books are wrong."""
