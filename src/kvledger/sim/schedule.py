"""Random schedules: arrivals, more input, aborts, resets, steps, faults; all from one seed.

A schedule is a list of small values that do not look at the engine's state. What an action meets
is decided when it is applied ("the k-th live request"), so that any action can be deleted and
the rest still means something; that is how :func:`kvledger.sim.play.shrink` finds a short failing
schedule. As text (:func:`to_text`) a schedule fits into a bug report, and can be played again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Do(StrEnum):
    """What an action does."""

    ADD = "add"
    MORE = "more"
    STEP = "step"
    BEGIN = "begin"
    WORK = "work"
    FINISH = "finish"
    ABORT = "abort"
    RESET = "reset"
    WEIGHTS = "weights"
    OUTSIDE = "outside"
    CHECK = "check"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Action:
    """One action; the meaning of its numbers depends on ``do``.

    ADD: family, shared tokens, own tokens, max_tokens, salt number (0: none), adapter number (0:
    none), 1 for a session.
    MORE: which session, tokens (0: it ends), max_tokens.
    ABORT: which live request. RESET: bit 0 the connector's cache too, bit 1 running requests.
    WEIGHTS: number of the weights.
    OUTSIDE: something that is done to the engine's surroundings (a server, a worker's copies): any
    number; whoever plays knows what.

    Attributes:
        engine: which engine, where several play.
    """

    do: Do
    numbers: tuple[int, ...] = ()
    engine: int = 0

    def __str__(self) -> str:
        engine = f"{self.engine}/" if self.engine else ""
        numbers = ":" + ",".join(map(str, self.numbers)) if self.numbers else ""
        return f"{engine}{self.do}{numbers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How often each action comes, and how large requests are.

    Attributes:
        add, more, abort, reset, weights, outside, phases, check: actions in a thousand; the rest
            are steps. One in ``phases`` is a single phase instead of a whole step.
        families: number of long texts that prompts begin with.
        shared: most tokens taken from such a text.
        own: most tokens that follow it.
        max_tokens: most tokens generated.
        salts: number of cache salts in use.
        adapters: number of adapters in use; every eighth request has one.
        sessions: requests in a thousand that are sessions.
        stop_tokens: share of the vocabulary that ends a generation.
    """

    add: int = 80
    more: int = 0
    abort: int = 12
    reset: int = 2
    weights: int = 0
    outside: int = 0
    phases: int = 60
    check: int = 2
    families: int = 4
    shared: int = 300
    own: int = 40
    max_tokens: int = 24
    salts: int = 2
    adapters: int = 0
    sessions: int = 0
    stop_tokens: float = 0.02

    def weighed(self) -> dict[Do, int]:
        """Actions in a thousand."""
        given = {
            Do.ADD: self.add,
            Do.MORE: self.more,
            Do.ABORT: self.abort,
            Do.RESET: self.reset,
            Do.WEIGHTS: self.weights,
            Do.OUTSIDE: self.outside,
            Do.BEGIN: self.phases,
            Do.CHECK: self.check,
        }
        return {**given, Do.STEP: 1000 - sum(given.values())}


def generate(seed: int, count: int, mix: Mix, *, engines: int = 1) -> Iterator[Action]:
    """``count`` actions, and a final drain and check of each engine; the same for the same
    arguments."""
    rng = random.Random(seed)
    weighed = mix.weighed()
    for do in rng.choices(list(weighed), list(weighed.values()), k=count):
        engine = rng.randrange(engines) if engines > 1 else 0
        if do is Do.BEGIN:
            yield Action(rng.choice((Do.BEGIN, Do.WORK, Do.FINISH)), (), engine)
        else:
            yield Action(do, _numbers(rng, do, mix), engine)
    for do, engine in itertools.product((Do.DRAIN, Do.CHECK), range(engines)):
        yield Action(do, (), engine)


def _numbers(rng: random.Random, do: Do, mix: Mix) -> tuple[int, ...]:
    if do is Do.ADD:
        has_adapter = mix.adapters > 0 and rng.randrange(8) == 0
        return (
            rng.randrange(mix.families),
            rng.randint(0, mix.shared),
            rng.randint(1, mix.own),
            rng.choice((1, rng.randint(1, mix.max_tokens))),
            rng.choice((0, rng.randint(0, mix.salts))),
            rng.randint(1, mix.adapters) if has_adapter else 0,
            int(mix.sessions > 0 and rng.randrange(1000) < mix.sessions),
        )
    if do is Do.MORE:
        tokens = rng.choice((0, rng.randint(1, mix.own)))
        return (rng.randrange(1 << 16), tokens, rng.randint(1, mix.max_tokens))
    if do in (Do.ABORT, Do.RESET, Do.WEIGHTS, Do.OUTSIDE):
        return (rng.randrange(1 << 16),)
    return ()


def to_text(actions: Iterable[Action]) -> str:
    """A schedule in one line; equal actions in a row are counted."""
    words = []
    for word, run in itertools.groupby(map(str, actions)):
        length = sum(1 for _ in run)
        words.append(word if length == 1 else f"{word}*{length}")
    return " ".join(words)


def from_text(text: str) -> list[Action]:
    """The inverse of :func:`to_text`.

    Raises:
        ValueError: with the word that is none.
    """
    actions: list[Action] = []
    for word in text.split():
        one, _, times = word.partition("*")
        engine, _, rest = one.rpartition("/")
        do, _, numbers = rest.partition(":")
        try:
            action = Action(
                Do(do), tuple(int(n) for n in numbers.split(",") if n), int(engine or 0)
            )
            actions += [action] * int(times or 1)
        except ValueError as error:
            raise ValueError(f"{word!r} is no action: {error}") from None
    return actions
