"""The conversation of one audited engine with its connector, checked sentence by sentence.

Methods of both sides of the connector are shadowed on the instances, and pass everything through
unchanged. What vLLM waits for is kept as *tickets*: one for each asynchronous load and for each
ended request whose blocks the connector keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvledger.sim.audit.report import Heading, Notes
from kvledger.sim.engine import SimulatedEngine


@dataclass(slots=True)
class Ticket:
    """A transfer of one request that the engine waits for.

    Attributes:
        expected: answers that vLLM waits for before it believes it.
        ranks: ranks that have answered.
    """

    expected: int
    ranks: set[int] = field(default_factory=set)


def shadow(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Put a method on the instance that is called in place of the class's."""
    setattr(owner, name, wrap(getattr(owner, name)))


class Protocol:
    """See the module.

    Attributes:
        loading: request → the asynchronous load that is not answered.
        sending: request → the blocks that are kept until sent.
    """

    def __init__(self, engine: SimulatedEngine, notes: Notes) -> None:
        self.loading: dict[str, Ticket] = {}
        self.sending: dict[str, Ticket] = {}
        self._engine = engine
        self._notes = notes
        self._last_answer: dict[str, tuple[int | None, int]] = {}
        self._on_its_way: set[str] = set()
        connector = engine.connector
        for name in ("request_finished", "request_finished_all_groups"):
            if hasattr(connector, name):
                shadow(connector, name, self._hearing_of_ends)
        shadow(connector, "get_num_new_matched_tokens", self._hearing_of_hits)
        shadow(connector, "update_state_after_alloc", self._hearing_of_loads)
        shadow(connector, "update_connector_output", self._hearing_of_deliveries)
        for index, rank in enumerate(engine.workers.ranks):
            shadow(rank.connector, "get_transfer_results", self._hearing_of_answers(index))

    def _hearing_of_hits(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def look_up(request: Any, num_computed_tokens: int) -> Any:
            answer = call(request, num_computed_tokens)
            asked = self._last_answer.get(request.request_id, (None, 0))[1]
            self._last_answer[request.request_id] = (answer[0], asked + 1)
            self._check_hit(request, num_computed_tokens, *answer)
            return answer

        return look_up

    def _check_hit(self, request: Any, local: int, external: int | None, is_async: bool) -> None:
        if external is None:
            return
        where = f"{request.request_id}: {external} after {local} of {request.num_tokens} tokens"
        if external < 0:
            self._notes.add(Heading.OVER_REPORTED, "a look-up answered a negative number", where)
        elif local + external > request.num_tokens:
            self._notes.add(Heading.OVER_REPORTED, "a hit is longer than the request", where)
        elif external and not is_async and local + external == request.num_tokens:
            self._notes.add(
                Heading.OVER_REPORTED, "a synchronous hit leaves no token to compute", where
            )

    def _hearing_of_loads(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def update(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            # The engine's own observer is inside ``call`` and has noted the admission by then.
            result = call(request, blocks, num_external_tokens)
            admissions = self._engine.allocations(request.request_id)
            if num_external_tokens > 0 and admissions and admissions[-1].is_async:
                self.loading[request.request_id] = Ticket(self._expected())
            return result

        return update

    def _expected(self) -> int:
        count: int | None = self._engine.connector.get_finished_count()
        return count or self._engine.options.ranks

    def _hearing_of_ends(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def finished(request: Any, blocks: Any) -> Any:
            keeps, parameters = call(request, blocks)
            # An answer on its way to the scheduler frees the blocks, whatever is said here.
            if keeps and request.request_id not in self._on_its_way:
                self.sending[request.request_id] = Ticket(self._expected())
            return keeps, parameters

        return finished

    def _hearing_of_deliveries(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def update(output: Any) -> Any:
            self._on_its_way -= set(output.finished_recving or ())
            return call(output)

        return update

    def _hearing_of_answers(self, rank: int) -> Callable[..., Any]:
        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def results(finished: set[str]) -> Any:
                answer = call(finished)
                for request_id in answer.finished_recving or ():
                    self._answered(self.loading, rank, request_id, "a load")
                for request_id in answer.finished_sending or ():
                    self._answered(self.sending, rank, request_id, "a send")
                return answer

            return results

        return wrap

    def _answered(self, tickets: dict[str, Ticket], rank: int, request_id: str, what: str) -> None:
        ticket = tickets.get(request_id)
        where = f"of {request_id} by rank {rank} in step {self._engine.step_count}"
        if ticket is None:
            self._notes.add(Heading.UNASKED, f"{what} was reported that nobody waited for", where)
        elif rank in ticket.ranks:
            self._notes.add(Heading.UNASKED, f"{what} was reported twice by one rank", where)
        else:
            ticket.ranks.add(rank)
            if len(ticket.ranks) >= ticket.expected:
                del tickets[request_id]
                self._void_the_other(tickets, request_id, where)

    def _void_the_other(self, tickets: dict[str, Ticket], request_id: str, where: str) -> None:
        """An aborted request may owe both answers; vLLM frees its blocks at the first."""
        if tickets is self.loading:
            self._on_its_way.add(request_id)
            self.sending.pop(request_id, None)
        elif self.loading.pop(request_id, None) is not None:
            self._notes.add(
                Heading.UNASKED, "blocks were reported as sent while a load filled them", where
            )

    def note_missing(self) -> None:
        """Note every transfer that is not answered, and every request that waits for a look-up."""
        for request_id, ticket in self.loading.items():
            silent = sorted(set(range(self._engine.options.ranks)) - ticket.ranks)
            where = f"of {request_id}, ranks {silent}"
            self._notes.add(Heading.MISSING, "a load was never reported as ended", where)
        for request_id in self.sending:
            where = f"of {request_id}"
            self._notes.add(Heading.MISSING, "kept blocks were never reported as sent", where)
        for request_id in self._engine.scheduler.requests:
            answer, asked = self._last_answer.get(request_id, (0, 0))
            if answer is None:
                where = f"of {request_id} after {asked} look-ups"
                self._notes.add(Heading.MISSING, "a look-up was never decided", where)
