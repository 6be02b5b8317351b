"""The leaf queue against a plain minimum over the evictable objects."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvledger.eviction import LeafQueue


@dataclass(eq=False)
class Thing:
    """A candidate whose state the test sets."""

    last_used: float
    evictable: bool = True
    queued: bool = False


def test_the_oldest_first_and_a_use_counts() -> None:
    queue = LeafQueue()
    a, b, c = Thing(1.0), Thing(2.0), Thing(3.0)
    for thing in (c, a, b):
        queue.offer(thing)
    assert queue.peek() is a
    assert queue.peek() is a, "a look changes nothing"
    a.last_used = 2.5
    assert queue.peek() is b
    b.evictable = False
    assert queue.peek() is a
    assert not b.queued
    a.evictable = c.evictable = False
    assert queue.peek() is None
    assert len(queue) == 0


def test_offering_twice_is_offering_once() -> None:
    queue = LeafQueue()
    thing = Thing(1.0)
    queue.offer(thing)
    queue.offer(thing)
    assert len(queue) == 1
    thing.evictable = False
    assert queue.peek() is None
    queue.offer(thing)
    assert len(queue) == 0, "what is not evictable is not queued"
    thing.evictable = True
    queue.offer(thing)
    assert queue.peek() is thing


def test_equal_times_go_in_the_order_of_their_offer() -> None:
    queue = LeafQueue()
    things = [Thing(1.0) for _ in range(5)]
    for thing in things:
        queue.offer(thing)
    for thing in things:
        assert queue.peek() is thing
        thing.evictable = False


def test_compaction_keeps_exactly_what_is_evictable() -> None:
    queue = LeafQueue()
    things = [Thing(float(k)) for k in range(100)]
    for thing in things:
        queue.offer(thing)
    for thing in things[::2]:
        thing.evictable = False
    queue.compact()
    assert len(queue) == 50
    assert [thing.queued for thing in things] == [False, True] * 50
    things[0].evictable = True
    queue.offer(things[0])
    assert queue.peek() is things[0]


def test_random_histories_agree_with_a_plain_minimum() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        queue = LeafQueue()
        things = [Thing(0.0, evictable=False) for _ in range(12)]
        for now in range(1, 400):
            thing = chance.choice(things)
            event = chance.random()
            if event < 0.4:
                thing.last_used = float(now)
            elif event < 0.6:
                thing.evictable = False
            elif event < 0.62:
                queue.compact()
            else:
                thing.evictable = True
                queue.offer(thing)
            found = queue.peek()
            oldest = min((t.last_used for t in things if t.evictable), default=None)
            assert (found.last_used if found else None) == oldest, f"seed {seed}, event {now}"
            assert len(queue) <= len(things)
