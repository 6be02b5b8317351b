"""What must hold after every single event of an engine's life, asked from outside.

The expectations come from vLLM's own numbers and from the log of what was said, never from the
connector's idea of itself; of the connector, only the books are read.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from books import LoadAnswers

from kvledger.fates import Fate
from kvledger.reasons import Reason
from kvledger.sim import Event, Kind, SimulatedEngine, StepRecord

TAKEN = (Fate.STORED, Fate.LOADED, Fate.IN_FLIGHT, Fate.LOADING)
"""Fates that a request of before a reset must not gain any more. A copy that the workers were told
of before the reset still ends, under the name of before; vLLM says of a reset that comes while
requests hold blocks that it has failed."""


class Standing:
    """Looks at one engine after each event; raises AssertionError with the invariant's number.

    Attributes:
        full_chunks: chunks that were full and valid at some time, over all requests that are over.
    """

    def __init__(self, engine: SimulatedEngine, chunk_tokens: int) -> None:
        self._engine = engine
        self._chunk = chunk_tokens
        self._seen = engine.total_events
        self._answers = LoadAnswers()
        self._failures: Counter[str] = Counter()
        self._frozen: dict[str, int] = {}
        self._most: Counter[str] = Counter()
        self._targets: dict[str, int] = {}
        self._violations: list[str] = []
        self.full_chunks = 0
        self._bound_promises()
        self._follow_schedule()

    def look(self) -> None:
        """All of it."""
        scheduler = self._engine.connector.scheduler
        self._catch_up()
        assert not self._violations, self._violations
        self._accounts(scheduler)
        self._nothing_left(scheduler)

    def after_connector_reset(self) -> None:
        """I8: what lives now takes no part any more; remember what it had taken."""
        for name, tracked in self._engine.connector.scheduler.live.items():
            self._frozen[name] = self._taken(tracked.account)

    # ---- the log ------------------------------------------------------------------------------

    def _news(self) -> list[Event]:
        events = self._engine.events
        total = self._engine.total_events
        new = total - self._seen
        self._seen = total
        return list(islice(reversed(events), new))[::-1]

    def _catch_up(self) -> None:
        """Follow the log; what is wrong is raised later: this may be called from within a hook."""
        for event in self._news():
            try:
                self._protocol(event)
            except AssertionError as error:
                self._violations.append(str(error))

    def _protocol(self, event: Event) -> None:
        """I5, I7, I8: each load is answered once, fails once at most, and none begins after a
        reset."""
        self._answers.follow(event)
        name = event.request_id
        if event.kind is Kind.ALLOCATED:
            assert not (event.tokens and name in self._frozen), f"I8: a load after a reset: {event}"
            self._was_valid(name, event.local)
            self._targets[name] = event.local + (event.tokens or 0)
        elif event.kind is Kind.LOAD_FINISHED:
            self._was_valid(name, self._targets[name])
        elif event.kind is Kind.LOAD_FAILED:
            self._failures[name] += 1
            assert self._failures[name] == 1, f"I7: the same load fails again: {event}"

    def _bound_promises(self) -> None:
        """I5: no look-up promises more than the request has, or a part of a block."""
        connector = self._engine.connector
        lookup = connector.get_num_new_matched_tokens

        def checked(request: Any, local: int) -> tuple[int | None, bool]:
            tokens, is_async = lookup(request, local)
            if tokens:
                assert local + tokens <= request.num_tokens, f"I5: {request.request_id}: {tokens}"
                assert is_async, "I5: a hit that is not loaded asynchronously"
            else:
                assert not is_async, "I5: an asynchronous load of nothing"
            answer: tuple[int | None, bool] = (tokens, is_async)
            return answer

        connector.get_num_new_matched_tokens = checked

    # ---- the books ------------------------------------------------------------------------------

    def _accounts(self, scheduler: Any) -> None:
        assert scheduler.accounts.unbalanced == 0, "I2: an account did not balance"
        for name, tracked in scheduler.live.items():
            account, request = tracked.account, tracked.request
            most = request.num_tokens // self._chunk
            at_all = len(account.fates) <= most or account.ever_valid <= most
            assert at_all, f"I1: {name} has fates for {len(account.fates)} of {most} chunks"
            for chunk, reason in account.reasons.items():
                assert account.fates[chunk] is Fate.SKIPPED, f"I2: {name} chunk {chunk}: {reason}"
                assert reason in Reason, f"I2: {reason} is no reason"
            if name in self._frozen:
                taken = self._taken(account)
                assert taken <= self._frozen[name], f"I8: {name} took {taken} after the reset"

    def ended(self, request: Any, *, is_aborted: bool, is_loading: bool) -> None:
        """A request is over; vLLM still has its numbers. Its last sampled token was never fed."""
        if not is_loading:
            known = request.num_tokens
            if not is_aborted and known > request.num_prompt_tokens:
                known -= 1
            self._was_valid(request.request_id, min(request.num_computed_tokens, known))

    def closed(self, account: Any) -> None:
        """I2: exactly as many chunks have a final fate as were ever full and valid."""
        self._catch_up()
        most = self._most.pop(account.request_id, 0)
        found = sum(account.balance().values())
        if found != most:
            self._violations.append(f"I2: {account.request_id}: {found} fates of {most} chunks")
        self.full_chunks += most

    def _follow_schedule(self) -> None:
        """I2: whatever vLLM says is computed at the end of a step is in the books by then."""
        begin_step = self._engine.begin_step

        def begin() -> StepRecord:
            record = begin_step()
            live = self._engine.connector.scheduler.live
            for request in self._engine.scheduler.running:
                valid = min(request.num_computed_tokens, request.num_tokens)
                self._was_valid(request.request_id, valid)
                tracked = live.get(request.request_id)
                if tracked is not None and tracked.load is None:
                    due, found = valid // self._chunk, len(tracked.account.fates)
                    assert found >= due, f"I2: {request.request_id}: {found} fates of {due}"
            return record

        self._engine.begin_step = begin  # type: ignore[method-assign]

    def _was_valid(self, request_id: str, tokens: int) -> None:
        self._most[request_id] = max(self._most[request_id], tokens // self._chunk)

    def _nothing_left(self, scheduler: Any) -> None:
        """I4: with no request alive there is no tracker, no load, no lease."""
        if self._engine.scheduler.requests or self._engine.in_flight:
            return
        assert not scheduler.live, f"I4: still tracked: {list(scheduler.live)}"
        assert not scheduler.loads.active, "I4: a load is under way for nobody"
        assert scheduler.lookups.leases == 0, "I4: leases are held for nobody"
        self._frozen.clear()
        self._failures.clear()
        self._targets.clear()

    @staticmethod
    def _taken(account: Any) -> int:
        return sum(fate in TAKEN for fate in account.fates)
