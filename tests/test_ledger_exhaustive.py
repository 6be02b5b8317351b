"""Every sequence of events that a scheduler and a server can bring upon one account."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from ledger_world import Limits, World, start

from kvledger import ledger
from kvledger.fates import FINAL, TRANSITIONS, Event, Fate, LedgerError
from kvledger.ledger import Account, StoreRule
from kvledger.reasons import Reason

Path = tuple[str, ...]


class Violation(AssertionError):
    """An invariant does not hold; names the events that lead there."""


def walk(world: World, *, most_states: int) -> tuple[int, int, bool]:
    """Breadth first through all states; (states, transitions, whether these were all)."""
    seen = {world.key()}
    queue: deque[tuple[World, Path]] = deque([(world, ())])
    transitions = 0
    while queue:
        state, path = queue.popleft()
        for label, event in state.events():
            following = state.clone()
            transitions += 1
            trace = (*path, label)
            with _explaining(trace):
                event(following)
                following.check()
            key = following.key()
            if key in seen:
                continue
            if len(seen) >= most_states:
                return len(seen), transitions, False
            seen.add(key)
            queue.append((following, trace))
            with _explaining((*trace, "the end")):
                for arrived in (True, False) if following.load is not None else (True,):
                    following.clone().drain(arrived)
    return len(seen), transitions, True


@contextmanager
def _explaining(trace: Path) -> Iterator[None]:
    try:
        yield
    except (AssertionError, LedgerError, KeyError, IndexError) as error:
        raise Violation(f"{' > '.join(trace)}: {error!r}") from error


if __name__ == "__main__":
    import time,sys
    for limits in (Limits(2), Limits(3)):
        for rule in (StoreRule(), StoreRule(1, Reason.GENERATED_NOT_STORED), StoreRule(0)):
            t=time.process_time()
            print(limits, rule, walk(start(limits, rule), most_states=int(sys.argv[1])), time.process_time()-t)
