"""Listens to what vLLM's scheduler and the scheduler-side connector say to each other.

The connector's methods are shadowed on the instance by ones that pass every argument and result
through unchanged. Nothing is added to the conversation: a look-up is asked as often as vLLM asks.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from kvledger.sim.records import Allocation, Event, Kind

EVENT_LIMIT = 200_000
"""Events kept; older ones are dropped. Some hundred bytes each."""


class Observer:
    """The log of one engine.

    Attributes:
        events: newest last, at most :data:`EVENT_LIMIT`.
        allocations: request id → its admissions, oldest first, while the engine remembers it.
        step: number of the step begun last.
        total: events so far.
        counts: how often each kind of event has happened, and other numbers over the engine's life.
    """

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=EVENT_LIMIT)
        self.allocations: dict[str, list[Allocation]] = {}
        self.step = 0
        self.total = 0
        self.counts: Counter[str] = Counter()
        self._lookups: dict[str, tuple[int, bool]] = {}

    def note(self, kind: Kind, request_id: str = "", tokens: int | None = None) -> None:
        """Append one event."""
        self._append(Event(self.step, kind, request_id, tokens))

    def _append(self, event: Event) -> None:
        self.events.append(event)
        self.total += 1
        self.counts[event.kind] += 1

    def attach(self, connector: Any) -> None:
        """Shadow the methods of a scheduler-side connector."""
        lookup = connector.get_num_new_matched_tokens
        allocate = connector.update_state_after_alloc

        def observed_lookup(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            answer: tuple[int | None, bool] = lookup(request, num_computed_tokens)
            self._looked_up(request.request_id, num_computed_tokens, answer)
            return answer

        def observed_allocate(request: Any, blocks: Any, num_external_tokens: int) -> None:
            self._allocated(request, blocks, num_external_tokens)
            allocate(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = observed_lookup
        connector.update_state_after_alloc = observed_allocate

    def forget(self, request_id: str) -> None:
        """Drop the admissions of a request."""
        self.allocations.pop(request_id, None)
        self._lookups.pop(request_id, None)

    def _looked_up(self, request_id: str, local: int, answer: tuple[int | None, bool]) -> None:
        tokens, is_async = answer
        self._lookups[request_id] = (local, is_async)
        self._append(Event(self.step, Kind.LOOKED_UP, request_id, tokens, local))

    def _allocated(self, request: Any, blocks: Any, external: int) -> None:
        request_id = request.request_id
        if request.num_computed_tokens > 0:
            self.note(Kind.PROMOTED, request_id, external)
            return
        local, is_async = self._lookups[request_id]
        ids = tuple(tuple(group) for group in blocks.get_block_ids())
        allocation = Allocation(self.step, local, external, is_async and external > 0, ids)
        self.allocations.setdefault(request_id, []).append(allocation)
        self._append(Event(self.step, Kind.ALLOCATED, request_id, external, local))
