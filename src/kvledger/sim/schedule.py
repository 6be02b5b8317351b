"""Random life for a simulated engine: arrivals, aborts, resets, steps; all from one seed.

A schedule is a list of small values that do not look at the engine's state. What an action meets
is decided when it is applied ("the k-th live request"), so that any action can be deleted and
the rest still means something; that is how :func:`shrink` finds a short failing schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvledger.sim.engine import SimulatedEngine
from kvledger.sim.model import VOCABULARY

LIVE_LIMIT = 32
"""Requests alive at a time; an arrival beyond it is passed over."""

EVENTS_SHOWN = 40
"""Events of the engine's log in the message of a failure."""


class Do(StrEnum):
    """What an action does."""

    ADD = "add"
    STEP = "step"
    BEGIN = "begin"
    WORK = "work"
    FINISH = "finish"
    ABORT = "abort"
    RESET = "reset"
    WEIGHTS = "weights"
    CHECK = "check"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Action:
    """One action; ``a`` to ``e`` are numbers whose meaning depends on ``do``.

    ADD: family, shared tokens, own tokens, max_tokens, salt number (0: none).
    ABORT: which live request. RESET: bit 0 the connector's cache too, bit 1 running requests.
    WEIGHTS: number of the weights.
    """

    do: Do
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How often each action comes, and how large requests are.

    Attributes:
        add, abort, reset, weights, phases, check: actions in a thousand; the rest are steps.
            One in ``phases`` is a single phase instead of a whole step.
        families: number of long texts that prompts begin with.
        shared: most tokens taken from such a text.
        own: most tokens that follow it.
        max_tokens: most tokens generated.
        salts: number of cache salts in use.
        stop_tokens: share of the vocabulary that ends a generation.
    """

    add: int = 80
    abort: int = 12
    reset: int = 2
    weights: int = 0
    phases: int = 60
    check: int = 2
    families: int = 4
    shared: int = 300
    own: int = 40
    max_tokens: int = 24
    salts: int = 2
    stop_tokens: float = 0.02


def generate(seed: int, count: int, mix: Mix) -> Iterator[Action]:
    """``count`` actions and a final drain and check; the same for the same arguments."""
    rng = random.Random(seed)
    rest = 1000 - mix.add - mix.abort - mix.reset - mix.weights - mix.phases - mix.check
    kinds = [Do.ADD, Do.ABORT, Do.RESET, Do.WEIGHTS, Do.BEGIN, Do.CHECK, Do.STEP]
    weights = [mix.add, mix.abort, mix.reset, mix.weights, mix.phases, mix.check, rest]
    for do in rng.choices(kinds, weights, k=count):
        if do is Do.ADD:
            yield Action(
                do,
                rng.randrange(mix.families),
                rng.randint(0, mix.shared),
                rng.randint(1, mix.own),
                rng.choice((1, rng.randint(1, mix.max_tokens))),
                rng.choice((0, rng.randint(0, mix.salts))),
            )
        elif do is Do.BEGIN:
            yield Action(rng.choice((Do.BEGIN, Do.WORK, Do.FINISH)))
        elif do in (Do.ABORT, Do.RESET, Do.WEIGHTS):
            yield Action(do, rng.randrange(1 << 16))
        else:
            yield Action(do)
    yield Action(Do.DRAIN)
    yield Action(Do.CHECK)


class Player:
    """Applies actions to one engine."""

    def __init__(self, engine: SimulatedEngine, seed: int, mix: Mix) -> None:
        rng = random.Random(f"texts {seed}")
        self.engine = engine
        self._texts = [
            [rng.randrange(VOCABULARY) for _ in range(mix.shared)] for _ in range(mix.families)
        ]
        self._stops = [t for t in range(VOCABULARY) if rng.random() < mix.stop_tokens]
        self._applied = 0

    def apply(self, action: Action) -> None:
        """Carry one action out, or pass it over where it cannot be."""
        self._applied += 1
        if self._applied % 1000 == 0:
            self.engine.forget_finished()
        getattr(self, f"_{action.do.value}")(action)

    def _add(self, action: Action) -> None:
        if len(self.engine.scheduler.requests) >= LIVE_LIMIT:
            return
        own = random.Random(action.c * 7919 + action.b)
        tokens = self._texts[action.a % len(self._texts)][: action.b]
        tokens = tokens + [own.randrange(VOCABULARY) for _ in range(action.c)]
        if len(tokens) + action.d > self.capacity:
            return
        salt = f"salt {action.e}" if action.e else None
        self.engine.add(tokens, max_tokens=action.d, salt=salt, stop_token_ids=self._stops)

    @property
    def capacity(self) -> int:
        """Longest sequence that fits into the engine's pool at all."""
        options = self.engine.options
        blocks = (options.num_blocks - 1) // len(options.windows) - 2 - options.drafts
        return min(options.max_model_len - 1, blocks * options.block_size)

    def _step(self, _: Action) -> None:
        self.engine.step()

    def _begin(self, _: Action) -> None:
        limit = 2 if self.engine.options.async_scheduling else 1
        if self.engine.in_flight < limit and self.engine.scheduler.has_requests():
            self.engine.begin_step()

    def _work(self, _: Action) -> None:
        if self.engine.waits_for_workers:
            self.engine.run_workers()

    def _finish(self, _: Action) -> None:
        if self.engine.in_flight and not self.engine.oldest_waits_for_workers:
            self.engine.finish_step()

    def _abort(self, action: Action) -> None:
        live = [
            r.request_id for r in self.engine.scheduler.requests.values() if not r.is_finished()
        ]
        if live:
            self.engine.abort(live[action.a % len(live)])

    def _reset(self, action: Action) -> None:
        running = bool(action.a & 2) and self.engine.can_preempt_all
        self.engine.reset_prefix_cache(connector=bool(action.a & 1), running=running)

    def _weights(self, action: Action) -> None:
        if self.engine.can_preempt_all:
            self.engine.update_weights(f"weights {action.a}")

    def _check(self, _: Action) -> None:
        if not self.engine.waits_for_workers:
            self.engine.check()

    def _drain(self, _: Action) -> None:
        self.engine.run()


class ScheduleFailure(AssertionError):
    """A schedule broke something; the cause is chained.

    Attributes:
        seed: what :func:`generate` was called with.
        actions: the schedule up to and including the action that failed.
    """

    def __init__(self, seed: int, actions: Sequence[Action], log: str, cause: Exception) -> None:
        super().__init__(
            f"seed {seed}, action {len(actions)} ({actions[-1].do}): "
            f"{type(cause).__name__}: {cause}\nlast events:\n{log}"
        )
        self.seed = seed
        self.actions = list(actions)


MakeEngine = Callable[[], SimulatedEngine]


def play(make_engine: MakeEngine, seed: int, actions: Iterator[Action], mix: Mix) -> int:
    """Play a schedule on a fresh engine; returns the number of steps the engine did.

    Raises:
        ScheduleFailure: with the seed, the actions so far and the end of the engine's log.
    """
    played: list[Action] = []
    with make_engine() as engine:
        player = Player(engine, seed, mix)
        for action in actions:
            played.append(action)
            try:
                player.apply(action)
            except Exception as cause:
                log = "\n".join(map(str, list(engine.events)[-EVENTS_SHOWN:]))
                raise ScheduleFailure(seed, played, log, cause) from cause
        return engine.step_count


def shrink(
    make_engine: MakeEngine, failure: ScheduleFailure, mix: Mix, *, max_tries: int = 200
) -> ScheduleFailure:
    """A failure of the same type of cause with fewer actions, found by deleting runs of them.

    Plays up to ``max_tries`` schedules. Returns ``failure`` itself if nothing shorter fails.
    """
    best = failure
    kind = type(failure.__cause__)
    size = max(1, len(best.actions) // 2)
    tries = 0
    while size and tries < max_tries:
        start = 0
        while start < len(best.actions) and tries < max_tries:
            tries += 1
            kept = best.actions[:start] + best.actions[start + size :]
            try:
                play(make_engine, failure.seed, iter(kept), mix)
            except ScheduleFailure as shorter:
                if type(shorter.__cause__) is kind and len(shorter.actions) < len(best.actions):
                    best = shorter
                    continue
            start += size
        size //= 2
    return best
