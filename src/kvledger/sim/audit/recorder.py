"""Writes down what one audited engine and its connector do, without stopping at the first fault.

A simulated engine raises at the first wrong byte. An audit wants all of them, so the recorder
stands between: it shadows methods of the oracle, of vLLM's scheduler and of both sides of the
connector *on the instances*, passes arguments and results through unchanged, and keeps the books.
Only the oracle's verdicts are kept back; they are counted here instead of raised.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvledger.sim.audit.protocol import Protocol, shadow
from kvledger.sim.audit.report import Heading, Notes
from kvledger.sim.engine import SimulatedEngine
from kvledger.sim.oracle import Mismatch, OracleError
from kvledger.sim.records import Allocation, Kind

NUDGE = "nudge-"
"""How the ids of requests begin that only give an engine something to do."""

KEPT_REQUESTS = 2
"""vLLM's objects of ended requests that may live on: a connector may remember the last one."""


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of one request whose KV stood in the engine.

    Attributes:
        tokens: prompt and answer, as far as there was KV.
        prompt: the prompt as it was sent.
    """

    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    salt: str | None
    adapter: Any


@dataclass(slots=True)
class _Life:
    """A request: vLLM's object (weakly), and what must outlive it."""

    reference: weakref.ref[Any]
    prompt: tuple[int, ...]
    salt: str | None
    adapter: Any
    cut: tuple[int, ...] | None = None


class Recorder:
    """The books of one engine; see the module.

    Attributes:
        notes: where findings go; shared by the engines of a situation.
        wrong: (request, step of the admission, block index) of loaded blocks with other bytes.
        wrong_outputs: requests with other tokens than a cold engine's.
        protocol: what engine and connector say to each other, checked.
    """

    def __init__(self, engine: SimulatedEngine, notes: Notes) -> None:
        self.engine = engine
        self.notes = notes
        self.wrong: set[tuple[str, int, int]] = set()
        self.wrong_outputs: set[str] = set()
        self._lives: dict[str, _Life] = {}
        self._attach_oracle()
        self._attach_scheduler()
        self.protocol = Protocol(engine, notes)

    # ---- what it listens to -----------------------------------------------------------------

    def _attach_oracle(self) -> None:
        oracle = self.engine.oracle
        shadow(oracle, "compare", self._keeping_back)
        shadow(oracle, "sweep", self._keeping_back)
        shadow(oracle, "check_canaries", lambda call: self._noting(call, Heading.FOREIGN_WRITE))
        shadow(oracle, "check_output", lambda call: self._noting(call, Heading.WRONG_OUTPUT))

    def _keeping_back(self, call: Callable[..., list[Mismatch]]) -> Callable[..., list[Mismatch]]:
        def compare(*arguments: Any) -> list[Mismatch]:
            self._note_mismatches(call(*arguments))
            return []

        return compare

    def _noting(self, call: Callable[..., None], heading: Heading) -> Callable[..., None]:
        def check(*arguments: Any) -> None:
            try:
                call(*arguments)
            except OracleError as error:
                if heading is Heading.WRONG_OUTPUT:
                    self.wrong_outputs.add(arguments[0])
                    self.notes.add(heading, "an answer is not a cold engine's", str(error))
                else:
                    self.notes.add(heading, "guard bytes or the null block were written")

        return check

    def _attach_scheduler(self) -> None:
        scheduler = self.engine.scheduler

        def adding(call: Callable[..., Any]) -> Callable[..., Any]:
            def add_request(request: Any) -> Any:
                self._lives.setdefault(
                    request.request_id,
                    _Life(
                        weakref.ref(request),
                        tuple(request.prompt_token_ids),
                        request.cache_salt,
                        request.lora_request,
                    ),
                )
                return call(request)

            return add_request

        def finishing(call: Callable[..., Any]) -> Callable[..., Any]:
            def finish_requests(request_ids: Any, status: Any) -> Any:
                names = [request_ids] if isinstance(request_ids, str) else request_ids
                for request_id in names or ():
                    self._cut(request_id)
                return call(request_ids, status)

            return finish_requests

        shadow(scheduler, "add_request", adding)
        shadow(scheduler, "finish_requests", finishing)

    # ---- bytes ------------------------------------------------------------------------------

    def _note_mismatches(self, found: Iterable[Mismatch]) -> None:
        size = self.engine.options.block_size
        foreign: dict[tuple[str, int], Mismatch] = {}
        for mismatch in found:
            index = mismatch.position // size
            load = self._load_over(mismatch.owner, index)
            if load is None:
                foreign.setdefault((mismatch.owner, index), mismatch)
                continue
            key = (mismatch.owner, load.step, index)
            if key not in self.wrong:
                self.wrong.add(key)
                self.notes.add(
                    Heading.WRONG_BYTES, "a loaded block holds other bytes", str(mismatch)
                )
        if foreign and not self.wrong:
            first = next(iter(foreign.values()))
            self.notes.add(
                Heading.FOREIGN_WRITE,
                "a block that no load was to fill holds other bytes",
                str(first),
                len(foreign),
            )

    def _load_over(self, request_id: str, index: int) -> Allocation | None:
        """The newest admission of a request, if its load covers a block of it."""
        admissions = self.engine.allocations(request_id)
        if admissions and index in self._targets(admissions[-1]):
            return admissions[-1]
        return None

    def _targets(self, load: Allocation) -> range:
        size = self.engine.options.block_size
        return range(load.local // size, -(-(load.local + load.external) // size))

    # ---- sums -------------------------------------------------------------------------------

    def promised(self) -> int:
        """Blocks of all loads that vLLM admitted."""
        return sum(len(self._targets(load)) for loads in self._loads().values() for load in loads)

    def loaded(self) -> int:
        """Blocks of loads that ended, without those that were reported as failed."""
        ends = {request_id: self._answers(request_id) for request_id in self._loads()}
        total = 0
        for request_id, loads in self._loads().items():
            for load in loads:
                ended = ends[request_id].pop(0) if load.is_async and ends[request_id] else None
                if (load.is_async and ended is Kind.LOAD_FINISHED) or self._was_read(load):
                    total += len(self._targets(load)) - self._invalid(load)
        return total

    def _loads(self) -> dict[str, Sequence[Allocation]]:
        return {
            request_id: [load for load in self.engine.allocations(request_id) if load.external]
            for request_id in self._lives
        }

    def _answers(self, request_id: str) -> list[Kind]:
        kinds = (Kind.LOAD_FINISHED, Kind.LOAD_FAILED)
        return [
            event.kind
            for event in self.engine.events
            if event.request_id == request_id and event.kind in kinds
        ]

    def _was_read(self, load: Allocation) -> bool:
        """Whether the step of a synchronous load has ended."""
        return not load.is_async and any(step.index == load.step for step in self.engine.steps)

    def _invalid(self, load: Allocation) -> int:
        """Blocks of a load that some rank reported as not loaded, from its step on."""
        reported: set[int] = set()
        for step in self.engine.steps:
            if step.index >= load.step:
                reported |= step.invalid_blocks
        return sum(
            any(index < len(table) and table[index] in reported for table in load.block_ids)
            for index in self._targets(load)
        )

    # ---- texts and ends ---------------------------------------------------------------------

    def _cut(self, request_id: str) -> None:
        """Keep what a request has come to before it is ended from outside."""
        life = self._lives.get(request_id)
        known = self.engine.workers.runner.requests.get(request_id)
        request = self.engine.scheduler.requests.get(request_id)
        if life is None or life.cut is not None:
            return
        if known is None or request is None:
            life.cut = ()
        else:
            life.cut = tuple(known.prefix.tokens[: min(known.valid, request.num_tokens)])

    def texts(self) -> list[Text]:
        """What every request has come to, nudges left out."""
        complete = (Kind.FINISHED, Kind.ANSWERED)
        ended = {e.request_id for e in self.engine.events if e.kind in complete}
        found = []
        for request_id, life in self._lives.items():
            if request_id.startswith(NUDGE):
                continue
            if request_id not in ended:
                self._cut(request_id)
                tokens = life.cut or ()
            else:
                tokens = (*life.prompt, *self.engine.outputs[request_id])[:-1]
            found.append(Text(tokens, life.prompt, life.salt, life.adapter))
        return found

    @property
    def requests(self) -> int:
        """Requests so far, nudges left out."""
        return sum(not request_id.startswith(NUDGE) for request_id in self._lives)

    @property
    def owes_nothing(self) -> bool:
        """Whether every transfer was answered and no block is held."""
        return not (self.protocol.loading or self.protocol.sending or self.held_blocks)

    @property
    def held_blocks(self) -> int:
        """Blocks of the pool that are not free."""
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        held: int = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return held

    def note_leaks(self) -> None:
        """Note what is held though every request has ended."""
        if self.held_blocks:
            count = self.held_blocks
            self.notes.add(Heading.LEAKED, f"{count} blocks are never freed")
        left = list(self.engine.scheduler.requests)
        if left:
            self.notes.add(Heading.LEAKED, f"{len(left)} requests never end", f"{left[0]}")
        gc.collect()
        alive = [
            request_id
            for request_id, life in self._lives.items()
            if life.reference() is not None and request_id not in left
        ]
        if len(alive) > KEPT_REQUESTS:
            self.notes.add(
                Heading.LEAKED,
                f"{len(alive)} of {len(self._lives)} requests' objects are kept after their end",
            )
