"""A vLLM engine without a model: the real scheduler, real connectors, small CPU tensors.

One process holds vLLM's ``Scheduler`` (or ``AsyncScheduler``), one scheduler-side connector, and
a worker-side connector for each rank. A step has three phases, as in vLLM's engine core, and a
test may act between any of them::

    begin_step()    schedule, build the connector's metadata
    run_workers()   preemptions, loads, forward pass, saves, reports
    finish_step()   the scheduler takes the output; requests stop

:meth:`SimulatedEngine.step` and :meth:`SimulatedEngine.run` put them together. The byte oracle
looks on at every phase and raises at the first wrong byte.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from kvledger.sim.assembly import assemble
from kvledger.sim.clients import Clients
from kvledger.sim.cycle import Cycle
from kvledger.sim.model import (
    ConnectorOptions,
    EngineFields,
    EngineOptions,
    build_config,
    write_model,
)
from kvledger.sim.observer import Observer
from kvledger.sim.pattern import Prefix
from kvledger.sim.records import Allocation, Event, Kind, StepRecord
from kvledger.sim.requests import Prompt, make_request
from kvledger.sim.watch import Watch

STEP_LIMIT = 4096
"""Step records kept; older ones are dropped."""

IDLE_SECONDS = 0.001
"""What vLLM's engine core sleeps when requests wait and no step computes anything."""


class EngineStuckError(AssertionError):
    """The engine did not become idle within its bounds; the message lists the live requests."""


class SimulatedEngine:
    """One engine; a context manager.

    Attributes:
        options: the set-up.
        scheduler: vLLM's scheduler; read it, or drive it past this class at your own risk.
        connector: the scheduler-side connector, or None.
        workers: the ranks with their connectors and memories.
        clients: what was sent and received.
        steps: records of finished steps, newest last, at most :data:`STEP_LIMIT`.
        oracle: the byte oracle.
    """

    def __init__(
        self,
        connector: type | str | None = None,
        *,
        extra_config: dict[str, Any] | None = None,
        kv_role: str = "kv_both",
        engine_id: str | None = None,
        load_failure_policy: str = "recompute",
        model_directory: Path | None = None,
        seed: int = 0,
        **fields: Unpack[EngineFields],
    ) -> None:
        self.options = EngineOptions(**fields)
        self.steps: deque[StepRecord] = deque(maxlen=STEP_LIMIT)
        self.weights = self.options.weights
        self._requests: dict[str, Request] = {}
        self._observer = Observer()
        self._next_id = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if model_directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="simulated-model-")
            model_directory = Path(self._directory.name)
            write_model(model_directory, self.options.weights)
        chosen = None
        if connector is not None:
            chosen = ConnectorOptions(
                connector=connector,
                extra_config=extra_config or {},
                role=kv_role,
                engine_id=engine_id,
                load_failure_policy=load_failure_policy,
            )
        config = build_config(model_directory, self.options, chosen)
        self._parts = assemble(
            config, self.options, lambda name: self.clients.prefix(name), random.Random(seed)
        )
        self.scheduler = self._parts.scheduler
        self.connector = self.scheduler.connector
        self.workers = self._parts.workers
        self.oracle = self._parts.oracle
        self.clients = Clients(self._parts.pattern, self.oracle)
        if self.connector is not None:
            self._observer.attach(self.connector)
        self._watch = Watch(self.scheduler, self.workers, self.oracle, self._observer)
        is_async = self.options.async_scheduling
        self._cycle = Cycle(
            self.scheduler,
            self.workers,
            self._watch,
            self._observer,
            limit=2 if is_async else 1,
            returns_drafts=bool(self.options.drafts) and not is_async,
            prefix_of=self.prefix,
        )

    # ---- requests ---------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        request_id: str | None = None,
        stop_token_ids: Sequence[int] = (),
        salt: str | None = None,
        adapter: LoRARequest | None = None,
        variant: str = "",
        transfer_params: dict[str, Any] | None = None,
        priority: int = 0,
        skip_reading_prefix_cache: bool = False,
        is_session: bool = False,
    ) -> str:
        """Queue a request; returns its id. See :class:`Prompt` for the arguments.

        A session takes more input (:meth:`add_more`) until :meth:`end_session`.
        """
        if request_id is None:
            request_id = f"r{self._next_id}"
            self._next_id += 1
        prompt = Prompt(
            tokens=list(tokens),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            salt=salt,
            adapter=adapter,
            variant=variant,
            transfer_params=transfer_params or {},
            priority=priority,
            skip_reading_prefix_cache=skip_reading_prefix_cache,
        )
        self.clients.send(request_id, prompt, self.weights, is_session=is_session)
        self._observer.note(Kind.ADDED, request_id, len(prompt.tokens))
        request = make_request(request_id, prompt, self._parts.hasher, resumable=is_session)
        self._requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def add_more(self, request_id: str, tokens: Sequence[int], *, max_tokens: int = 1) -> None:
        """Send the next input of a session; it begins when the answer before is complete."""
        first = self.clients.prompt(request_id)
        self.clients.send_more(request_id, list(tokens), max_tokens)
        self._observer.note(Kind.MORE_INPUT, request_id, len(tokens))
        turn = replace(first, tokens=list(tokens), max_tokens=max_tokens)
        update = make_request(request_id, turn, self._parts.hasher, resumable=True)
        self.scheduler.add_request(update)

    def end_session(self, request_id: str) -> None:
        """No more input follows: the session ends once all that was sent is answered."""
        end = make_request(request_id, self.clients.prompt(request_id), self._parts.hasher)
        waits = self._requests[request_id].status == RequestStatus.WAITING_FOR_STREAMING_REQ
        if waits:  # vLLM ends it at once, as if it were aborted
            self._observer.note(Kind.SESSION_ENDED, request_id)
            self._remember(request_id)
        self.scheduler.add_request(end)

    def abort(self, request_id: str) -> None:
        """End a request as a disconnecting client does; allowed between any two phases."""
        self._observer.note(Kind.ABORTED, request_id)
        self._remember(request_id)
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def external_hit(self, request_id: str) -> int:
        """Tokens that the connector was told to load at the request's last admission."""
        admissions = self.allocations(request_id)
        return admissions[-1].external if admissions else 0

    def local_hit(self, request_id: str) -> int:
        """Tokens found in vLLM's own prefix cache at the request's last admission."""
        admissions = self.allocations(request_id)
        return admissions[-1].local if admissions else 0

    def allocations(self, request_id: str) -> list[Allocation]:
        """All admissions of a request, oldest first; empty without a connector."""
        return self._observer.allocations.get(request_id, [])

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Request id → tokens generated so far, as a client received them."""
        return self.clients.outputs

    @property
    def events(self) -> Sequence[Event]:
        """The log, oldest first."""
        return self._observer.events

    def forget_finished(self) -> None:
        """Drop outputs, prompts and admissions of requests that are gone (long runs)."""
        kept = self.scheduler.requests.keys() | self.workers.runner.requests.keys()
        gone = self.clients.request_ids - kept
        self.clients.forget(gone)
        for request_id in gone:
            self._observer.forget(request_id)

    # ---- stepping ---------------------------------------------------------------------------

    @property
    def total_events(self) -> int:
        """Events so far, those that the log has dropped included."""
        return self._observer.total

    @property
    def counts(self) -> Counter[str]:
        """Events of each kind over the engine's life, steps, and what they computed."""
        return self._observer.counts

    @property
    def is_idle(self) -> bool:
        """Whether vLLM's engine core would sleep: nothing to schedule, nothing in flight."""
        return not self.in_flight and not self.scheduler.has_requests()

    @property
    def in_flight(self) -> int:
        """Steps that are scheduled and not yet finished."""
        return self._cycle.in_flight

    @property
    def step_count(self) -> int:
        """Steps begun since the engine was built."""
        return self._observer.step

    @property
    def waits_for_workers(self) -> bool:
        """Whether a step is scheduled whose workers did not run."""
        return self._cycle.waits_for_workers

    @property
    def oldest_waits_for_workers(self) -> bool:
        """Whether :meth:`finish_step` has to wait for :meth:`run_workers`."""
        return self._cycle.oldest_waits_for_workers

    @property
    def can_preempt_all(self) -> bool:
        """Whether running requests can be reset; vLLM refuses while others hold blocks."""
        get_blocks = self.scheduler.kv_cache_manager.get_block_ids
        return not self.in_flight and not any(
            any(get_blocks(request_id))
            for request_id, request in self.scheduler.requests.items()
            if request.status != RequestStatus.RUNNING
        )

    def begin_step(self) -> StepRecord:
        """Schedule one step. Raises RuntimeError when the engine may not run further ahead."""
        return self._cycle.begin()

    def run_workers(self) -> StepRecord:
        """Execute the oldest step that was not; the oracle checks reads, loads and canaries."""
        return self._cycle.work()

    def finish_step(self) -> StepRecord:
        """Hand the oldest executed step's output to the scheduler."""
        record, outputs = self._cycle.finish()
        for output in outputs:
            self._give_out(output)
        self._cycle.return_drafts(record)
        self.steps.append(record)
        return record

    def _give_out(self, output: Any) -> None:
        """A client receives tokens."""
        request_id = output.request_id
        is_complete = output.finish_reason is not None
        request = self.scheduler.requests.get(request_id)  # a connector may keep its blocks
        if is_complete and request is not None and not request.is_finished():
            self._observer.note(Kind.ANSWERED, request_id)
        elif is_complete:
            failed = output.finish_reason == FinishReason.ERROR
            self._observer.note(Kind.FAILED if failed else Kind.FINISHED, request_id)
            self._remember(request_id)
        self.clients.receive(
            request_id, output.new_token_ids, self.weights, is_complete=is_complete
        )

    def step(self) -> StepRecord | None:
        """One turn of the engine core's loop; returns the step it finished, if any.

        With asynchronous scheduling a turn fills the queue of two before it takes an output.
        """
        limit = self._cycle.limit
        if self.in_flight < limit and self.scheduler.has_requests():
            record = self.begin_step()
            self._run_pending()
            if self.in_flight < limit and (record.scheduled or self.scheduler.has_requests()):
                return None
        self._run_pending()
        return self.finish_step() if self.in_flight else None

    def run(self, *, max_steps: int = 100_000, deadline_seconds: float = 60.0) -> None:
        """Step until idle.

        Raises:
            EngineStuckError: not idle within ``max_steps`` turns or ``deadline_seconds``.
        """
        deadline = time.monotonic() + deadline_seconds
        for _ in range(max_steps):
            if self.is_idle:
                return
            record = self.step()
            if record is not None and not record.scheduled and not record.loads_finished:
                self._rest()
                if time.monotonic() > deadline:
                    break
        if not self.is_idle:
            raise EngineStuckError(f"not idle after {max_steps} steps or {deadline_seconds} s: "
                                   f"{self._describe_requests()}")  # fmt: skip

    def reset_prefix_cache(self, *, connector: bool = False, running: bool = False) -> bool:
        """vLLM's ``reset_prefix_cache``; the flags are reset_connector, reset_running_requests."""
        self._observer.note(Kind.RESET)
        done: bool = self.scheduler.reset_prefix_cache(
            reset_running_requests=running, reset_connector=connector
        )
        if done:
            self.oracle.forget_contents()
        return done

    def update_weights(self, weights: str) -> None:
        """Change the model's weights in place, as vLLM's weight-update path does.

        Everything running is preempted and both caches are reset before. From here on every
        token has other KV bytes. Raises RuntimeError with steps in flight or loads under way.
        """
        if self.in_flight:
            raise RuntimeError("finish the steps in flight before the weights change")
        self.reset_prefix_cache(connector=True, running=True)
        self.weights = weights
        self.oracle.forget_contents()
        for request_id in self.scheduler.requests:
            self.clients.change_weights(request_id, weights)

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Compare everything that has to hold KV with the pattern; look for leaked blocks.

        Raises:
            OracleError: with the places that differ.
            RuntimeError: a step is scheduled whose workers did not run.
        """
        if self.waits_for_workers:
            raise RuntimeError("a step waits for its workers; call run_workers() first")
        self._watch.check_everything(self.prefix, settled=not self.in_flight)

    def close(self) -> None:
        """Shut both sides of the connector down and remove the model directory."""
        self.scheduler.shutdown()
        self.workers.shutdown()
        if self._directory is not None:
            self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run_pending(self) -> None:
        while self.waits_for_workers:
            self.run_workers()

    def _rest(self) -> None:
        if self.scheduler.has_requests():
            time.sleep(IDLE_SECONDS)

    def _remember(self, request_id: str) -> None:
        """Keep what the blocks of a request hold before the request goes."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            prefix = self._prefix_of(request)
            self.oracle.remember(request.block_hashes, prefix)

    def prefix(self, request_id: str) -> Prefix:
        """The pattern of what a request stands for now."""
        request = self._requests.get(request_id)
        return self.clients.prefix(request_id) if request is None else self._prefix_of(request)

    def _prefix_of(self, request: Request) -> Prefix:
        """Of a session it is what the scheduler says: its workers learn of an input later."""
        request_id = request.request_id
        if not self.clients.is_session(request_id):
            return self.clients.prefix(request_id)
        seed = self.clients.prompt(request_id).seed(self.weights)
        return Prefix(self._parts.pattern, seed, list(request.all_token_ids))

    def _describe_requests(self) -> str:
        return ", ".join(
            f"{request.request_id} {request.status.name} "
            f"{request.num_computed_tokens}/{request.num_tokens}"
            for request in self.scheduler.requests.values()
        )
