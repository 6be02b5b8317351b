"""Which object goes next: the least recently used one that nothing hangs on.

Only *leaves* are candidates: visible, unleased, without children. A chain is therefore eaten from
its tail, a head is never lost before what follows it, and presence along a chain is monotone —
which is what lets a look-up use binary search, and a lease protect a whole chain by its tail.

The order is a heap keyed by the time of last use *when the candidate was queued*. A later use does
not touch the heap: the stale key is noticed when it reaches the top, and the candidate is queued
anew. So a use costs nothing and an eviction amortised O(log n).
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Protocol


class Candidate(Protocol):
    """What the queue needs to know of an object.

    Attributes:
        last_used: time of last use.
        queued: owned by the queue: whether the object is in the heap.
    """

    last_used: float
    queued: bool

    @property
    def evictable(self) -> bool:
        """Whether nothing hangs on it now."""


class LeafQueue:
    """Candidates of one group in order of last use; exact, by lazy correction."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Candidate]] = []
        self._order = count()

    def __len__(self) -> int:
        """Heap entries, stale ones included."""
        return len(self._heap)

    def offer(self, candidate: Candidate) -> None:
        """Queue an object that may just have become evictable. Idempotent."""
        if candidate.evictable and not candidate.queued:
            candidate.queued = True
            heapq.heappush(self._heap, (candidate.last_used, next(self._order), candidate))

    def compact(self) -> None:
        """Let go of objects that are not evictable any more; O(n)."""
        kept: list[tuple[float, int, Candidate]] = []
        for item in self._heap:
            candidate = item[2]
            if candidate.evictable:
                kept.append(item)
            else:
                candidate.queued = False
        heapq.heapify(kept)
        self._heap = kept

    def peek(self) -> Candidate | None:
        """The least recently used candidate, which stays queued; None if there is none."""
        heap = self._heap
        while heap:
            key, _, candidate = heap[0]
            if not candidate.evictable:
                heapq.heappop(heap)
                candidate.queued = False
            elif candidate.last_used > key:
                item = (candidate.last_used, next(self._order), candidate)
                heapq.heapreplace(heap, item)
            else:
                return candidate
        return None
