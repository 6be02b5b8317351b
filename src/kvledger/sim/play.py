"""Plays schedules: on one engine, or on a stage of several with a server that is disturbed.

A *stage* is whatever actions are applied to. :class:`EngineStage` is a single engine; tests of our
own connector have one with a real server and its books.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from kvledger.sim.engine import SimulatedEngine
from kvledger.sim.model import VOCABULARY
from kvledger.sim.schedule import Action, Mix, to_text

LIVE_LIMIT = 32
"""Requests alive at a time; an arrival beyond it is passed over."""

EVENTS_SHOWN = 40
"""Events of the engine's log in the message of a failure."""


class Player:
    """Applies actions to one engine.

    Attributes:
        statistics: what was met, such as aborts of requests at each stage of their lives.
    """

    def __init__(self, engine: SimulatedEngine, seed: int, mix: Mix) -> None:
        rng = random.Random(f"texts {seed}")
        self.engine = engine
        self.statistics: Counter[str] = Counter()
        self._texts = [
            [rng.randrange(VOCABULARY) for _ in range(mix.shared)] for _ in range(mix.families)
        ]
        self._stops = [t for t in range(VOCABULARY) if rng.random() < mix.stop_tokens]

    def apply(self, action: Action) -> None:
        """Carry one action out, or pass it over where it cannot be."""
        getattr(self, f"_{action.do.value}")(*action.numbers)

    @property
    def capacity(self) -> int:
        """Longest sequence that fits into the engine's pool at all."""
        options = self.engine.options
        blocks = (options.num_blocks - 1) // len(options.windows) - 2 - options.drafts
        return min(options.max_model_len - 1, blocks * options.block_size)

    def end_sessions(self) -> None:
        """Send no more input to any session."""
        for request in self._sessions():
            self.engine.end_session(request.request_id)

    def _sessions(self) -> list[Request]:
        """Sessions to which the end was not sent."""
        return [
            request
            for request in self.engine.scheduler.requests.values()
            if request.resumable
            and not request.is_finished()
            and None not in (request.streaming_queue or ())
        ]

    def _fits(self, tokens: int, *, of_session: bool) -> bool:
        """Whether the pool holds all sessions and any single other request beside them.

        Sessions keep their blocks while they wait, and so do requests whose load has arrived;
        vLLM preempts neither, so if they do not fit together none goes on for ever.
        """
        clients = self.engine.clients
        sessions = others = 0
        for request in self.engine.scheduler.requests.values():
            longest = clients.longest(request.request_id)
            if request.resumable:
                sessions += longest
            else:
                others = max(others, longest)
        most = sessions + tokens + others if of_session else sessions + max(tokens, others)
        return most <= self.capacity

    def _add(
        self,
        family: int,
        shared: int,
        own: int,
        max_tokens: int,
        salt: int = 0,
        adapter: int = 0,
        is_session: int = 0,
    ) -> None:
        if len(self.engine.scheduler.requests) >= LIVE_LIMIT:
            return
        tokens = self._texts[family % len(self._texts)][:shared] + _text(shared, own)
        if not self._fits(len(tokens) + max_tokens, of_session=bool(is_session)):
            return
        self.engine.add(
            tokens,
            max_tokens=max_tokens,
            salt=f"salt {salt}" if salt else None,
            adapter=_adapter(adapter) if adapter else None,
            stop_token_ids=self._stops,
            is_session=bool(is_session),
        )

    def _more(self, which: int, count: int, max_tokens: int) -> None:
        sessions = self._sessions()
        if not sessions:
            return
        request_id = sessions[which % len(sessions)].request_id
        if count == 0:
            self.engine.end_session(request_id)
            return
        if self._fits(count + max_tokens, of_session=True):
            self.engine.add_more(request_id, _text(which, count), max_tokens=max_tokens)

    def _step(self) -> None:
        self.engine.step()

    def _begin(self) -> None:
        limit = 2 if self.engine.options.async_scheduling else 1
        if self.engine.in_flight < limit and self.engine.scheduler.has_requests():
            self.engine.begin_step()

    def _work(self) -> None:
        if self.engine.waits_for_workers:
            self.engine.run_workers()

    def _finish(self) -> None:
        if self.engine.in_flight and not self.engine.oldest_waits_for_workers:
            self.engine.finish_step()

    def _abort(self, which: int) -> None:
        live = [r for r in self.engine.scheduler.requests.values() if not r.is_finished()]
        if live:
            request = live[which % len(live)]
            self.statistics[f"aborted while {stage_of(request)}"] += 1
            self.statistics["aborted with a step in flight"] += bool(self.engine.in_flight)
            self.engine.abort(request.request_id)

    def _reset(self, flags: int) -> None:
        running = bool(flags & 2) and self.engine.can_preempt_all
        done = self.engine.reset_prefix_cache(connector=bool(flags & 1), running=running)
        self.statistics["resets of the connector"] += flags & 1
        self.statistics["resets of the prefix cache"] += done

    def _weights(self, number: int) -> None:
        if self.engine.can_preempt_all:
            self.statistics["changes of the weights"] += 1
            self.engine.update_weights(f"weights {number}")

    def _check(self) -> None:
        if not self.engine.waits_for_workers:
            self.engine.check()

    def _drain(self) -> None:
        self.end_sessions()
        self.engine.run()


def stage_of(request: Request) -> str:
    """What a request is doing, in a word or two."""
    if request.status == RequestStatus.RUNNING:
        computed = request.num_computed_tokens
        return "decoding" if computed >= request.num_prompt_tokens else "prefilling"
    words = {
        RequestStatus.WAITING: "queued",
        RequestStatus.WAITING_FOR_REMOTE_KVS: "loading",
        RequestStatus.WAITING_FOR_STREAMING_REQ: "waiting for input",
        RequestStatus.PREEMPTED: "preempted",
    }
    return words.get(request.status, str(request.status.name))


def _text(seed: int, count: int) -> list[int]:
    rng = random.Random(count * 7919 + seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}")


class Stage(Protocol):
    """What a schedule is played on.

    Attributes:
        statistics: what was done and met.
    """

    statistics: Counter[str]

    def apply(self, action: Action) -> None:
        """Carry one action out, check what must hold after it, raise if it does not."""

    def finish(self) -> None:
        """After the last action: check what must hold at the end, complete the statistics."""

    def log(self) -> str:
        """The latest events, for the message of a failure."""

    def close(self) -> None:
        """End everything."""


class EngineStage:
    """One engine of any connector; what it finds is what the byte oracle finds."""

    def __init__(self, engine: SimulatedEngine, seed: int, mix: Mix) -> None:
        self.engine = engine
        self.player = Player(engine, seed, mix)
        self.statistics = self.player.statistics
        self._applied = 0

    def apply(self, action: Action) -> None:
        """See :class:`Stage`."""
        self.player.apply(action)
        self._applied += 1
        if self._applied % 1000 == 0:
            self.engine.forget_finished()

    def finish(self) -> None:
        """See :class:`Stage`."""
        self.statistics.update(self.engine.counts)

    def log(self) -> str:
        """See :class:`Stage`."""
        return "\n".join(map(str, list(self.engine.events)[-EVENTS_SHOWN:]))

    def close(self) -> None:
        """See :class:`Stage`."""
        self.engine.close()


class ScheduleFailure(AssertionError):
    """A schedule broke something; the cause is chained.

    Attributes:
        seed: what the stage and :func:`kvledger.sim.schedule.generate` were given.
        actions: the schedule up to and including the action that failed.
    """

    def __init__(self, seed: int, actions: Sequence[Action], log: str, cause: Exception) -> None:
        super().__init__(
            f"seed {seed}, action {len(actions)} ({actions[-1] if actions else 'none'}): "
            f"{type(cause).__name__}: {cause}\nlast events:\n{log}"
        )
        self.seed = seed
        self.actions = list(actions)

    @property
    def text(self) -> str:
        """The schedule in one line, for :func:`kvledger.sim.schedule.from_text`."""
        return to_text(self.actions)


def _place(failure: ScheduleFailure) -> tuple[str, int]:
    """File and line at which the cause was raised."""
    cause = failure.__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    return frames[-1].filename, frames[-1].lineno or 0


MakeStage = Callable[[], Stage]


def play(make_stage: MakeStage, seed: int, actions: Iterable[Action]) -> Counter[str]:
    """Play a schedule on a fresh stage; returns its statistics.

    Raises:
        ScheduleFailure: with the seed, the actions so far and the end of the log.
    """
    played: list[Action] = []
    stage = make_stage()
    try:
        for action in actions:
            played.append(action)
            stage.apply(action)
        stage.finish()
    except Exception as cause:
        raise ScheduleFailure(seed, played, stage.log(), cause) from cause
    finally:
        stage.close()
    return stage.statistics


def shrink(
    make_stage: MakeStage,
    failure: ScheduleFailure,
    *,
    max_tries: int = 200,
    max_seconds: float = 300.0,
) -> ScheduleFailure:
    """A failure with fewer actions that was raised at the same place, found by deleting runs of
    them. Returns ``failure`` itself if nothing shorter fails.
    """
    best = failure
    place = _place(failure)
    size = max(1, len(best.actions) // 2)
    tries = 0
    end = time.monotonic() + max_seconds
    while size:
        start = 0
        while start < len(best.actions):
            if tries >= max_tries or time.monotonic() > end:
                return best
            tries += 1
            kept = best.actions[:start] + best.actions[start + size :]
            try:
                play(make_stage, failure.seed, kept)
            except ScheduleFailure as shorter:
                if _place(shorter) == place and len(shorter.actions) < len(best.actions):
                    best = shorter
                    continue
            start += size
        size //= 2
    return best
