"""The three phases of a step, and the steps in flight between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from kvledger.sim.observer import Observer
from kvledger.sim.pattern import Prefix
from kvledger.sim.records import StepRecord
from kvledger.sim.watch import Watch
from kvledger.sim.worker import WorkerGroup


@dataclass(slots=True)
class _Flight:
    """A step between its schedule and its update."""

    output: Any
    record: StepRecord
    result: ModelRunnerOutput | None = None


class Cycle:
    """Schedule, execute, update: at most ``limit`` steps are between the first and the last.

    Args:
        limit: 2 with asynchronous scheduling, else 1.
        returns_drafts: the scheduler is told the drafts after each step.
        prefix_of: what a request stands for now.
    """

    def __init__(
        self,
        scheduler: Any,
        workers: WorkerGroup,
        watch: Watch,
        observer: Observer,
        *,
        limit: int,
        returns_drafts: bool,
        prefix_of: Callable[[str], Prefix],
    ) -> None:
        self.limit = limit
        self._scheduler = scheduler
        self._workers = workers
        self._watch = watch
        self._observer = observer
        self._returns_drafts = returns_drafts
        self._prefix_of = prefix_of
        self._flights: deque[_Flight] = deque()

    @property
    def in_flight(self) -> int:
        """Steps that are scheduled and not yet finished."""
        return len(self._flights)

    @property
    def waits_for_workers(self) -> bool:
        """Whether a step is scheduled whose workers did not run."""
        return any(flight.result is None for flight in self._flights)

    @property
    def oldest_waits_for_workers(self) -> bool:
        """Whether the step that is to be finished next was not executed."""
        return bool(self._flights) and self._flights[0].result is None

    def begin(self) -> StepRecord:
        """Schedule one step. Raises RuntimeError when the engine may not run further ahead."""
        if len(self._flights) >= self.limit:
            raise RuntimeError(f"{self.limit} steps are in flight; call finish_step() first")
        self._observer.step += 1
        output = self._scheduler.schedule()
        record = self._watch.scheduled(output)
        self._flights.append(_Flight(output, record))
        return record

    def work(self) -> StepRecord:
        """Execute the oldest step that was not; the oracle checks reads, loads and canaries."""
        flight = next((flight for flight in self._flights if flight.result is None), None)
        if flight is None:
            raise RuntimeError("no step waits for its workers; call begin_step() first")
        flight.result = self._workers.execute(flight.output)
        self._watch.executed(flight.record, flight.result, self._prefix_of)
        return flight.record

    def finish(self) -> tuple[StepRecord, Iterator[Any]]:
        """Hand the oldest executed step's output to the scheduler; what it gives to clients."""
        if not self._flights or self._flights[0].result is None:
            raise RuntimeError("no step was executed; call run_workers() first")
        flight = self._flights.popleft()
        given = self._scheduler.update_from_output(flight.output, flight.result)
        return flight.record, (output for some in given.values() for output in some.outputs)

    def return_drafts(self, record: StepRecord) -> None:
        """Tell the scheduler what was drafted, where it does not take that from the workers."""
        if self._returns_drafts and record.scheduled:
            drafts = self._workers.drafts
            self._scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
            )
