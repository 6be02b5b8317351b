"""Kinds of life that random schedules play: what the engines are like, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvledger.sim.schedule import Mix

TINY = {"num_blocks": 30, "max_batched_tokens": 48}
"""So little room that requests are preempted and allocations fail all the time."""
LARGE_OBJECTS = {"num_blocks": 64, "layers": 4, "heads": 16, "max_batched_tokens": 128}
"""Chunks of which few fit into a small server."""

BUSY = Mix(add=120, own=60, max_tokens=48, adapters=2)
CROWD = Mix(add=150, abort=40, own=60, max_tokens=48, adapters=2)
"""Queues, and clients that hang up in every state."""
PLAIN = Mix(add=120, own=60, max_tokens=48, reset=0, phases=0)
"""Nothing but whole turns of vLLM's loop, arrivals and aborts."""
RESETS = Mix(add=120, own=60, max_tokens=48, reset=8, weights=4)
SESSIONS = Mix(add=80, more=80, own=60, max_tokens=40, sessions=600)
MANY_TEXTS = Mix(add=120, families=24, salts=6, reset=20)

SERVER_FAULTS = ("pause", "resume", "resume", "replace", "replace", "kill", "start", "start")
LOAD_FAULTS = ("slow", "uneven", "shuffle", "stall", "short", "calm", "calm")
ATTACHMENT_FAULTS = ("detach",)
EVICTION = ("clear",)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One kind of life.

    Attributes:
        engine: fields of the simulated engine.
        options: options of the connector.
        mix: the actions.
        engines: engines that play side by side on one server.
        small: on a server that is soon full.
        failing: copies in a thousand that fail, loads and stores alike.
        outside: what an action on the surroundings may be: see :mod:`weather`.
        late: no step waits for its slots.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    mix: Mix = BUSY
    engines: int = 1
    small: bool = False
    failing: int = 0
    outside: tuple[str, ...] = ()
    late: bool = False

    @property
    def is_disturbed(self) -> bool:
        """Whether the server goes, or connections do: accounts of a boot may go with it."""
        return bool({"kill", "replace", "pause", "detach"} & set(self.outside))

    @property
    def is_calm(self) -> bool:
        """Whether everything that is due must be stored: no faults, and room enough."""
        return not (self.outside or self.failing or self.small or self.mix.weights)


def outside(mix: Mix, per_thousand: int) -> Mix:
    """The mix with so many actions on the surroundings."""
    fields = {name: getattr(mix, name) for name in mix.__dataclass_fields__}
    return Mix(**{**fields, "outside": per_thousand})


def _async(**fields: Any) -> dict[str, Any]:
    return {"async_scheduling": True, **fields}


PLANS: dict[str, Plan] = {
    "plain": Plan(engine={"num_blocks": 64}, mix=PLAIN),
    "plain-async": Plan(engine=_async(num_blocks=40, ranks=2), mix=PLAIN),
    "plain-tiny-async": Plan(engine=_async(**TINY), mix=PLAIN, options={"chunk_tokens": 32}),
    "plain-drafts": Plan(engine={"num_blocks": 64, "drafts": 3}, mix=PLAIN),
    "sync": Plan(engine={"num_blocks": 64, "pickle_metadata": True}),
    "async": Plan(engine=_async(num_blocks=64)),
    "tiny": Plan(engine=TINY, options={"chunk_tokens": 32}, mix=CROWD),
    "tiny-async": Plan(engine=_async(**TINY, model_runner=2), mix=CROWD),
    "drafts": Plan(engine={**TINY, "drafts": 3}, options={"chunk_tokens": 32}),
    "drafts-async": Plan(engine=_async(num_blocks=48, drafts=4, model_runner=2)),
    "ranks": Plan(engine={"num_blocks": 48, "ranks": 2}, options={"chunk_tokens": 64}),
    "late": Plan(engine=_async(**TINY, drafts=2), late=True),
    "priority": Plan(engine={**TINY, "policy": "priority"}, mix=CROWD),
    "sessions": Plan(engine={"num_blocks": 64}, mix=SESSIONS, options={"chunk_tokens": 32}),
    "sessions-async": Plan(engine=_async(num_blocks=64, ranks=2), mix=SESSIONS),
    "resets": Plan(engine={"num_blocks": 48}, mix=RESETS),
    "resets-async": Plan(engine=_async(num_blocks=48, ranks=2), mix=RESETS),
    "pair": Plan(engine={"num_blocks": 40}, engines=2, options={"chunk_tokens": 32}),
    "full": Plan(engine=LARGE_OBJECTS, options={"chunk_tokens": 64}, mix=MANY_TEXTS, small=True),
    "full-pair": Plan(
        engine=_async(**LARGE_OBJECTS),
        options={"chunk_tokens": 64},
        mix=outside(MANY_TEXTS, 4),
        engines=2,
        small=True,
        outside=EVICTION,
    ),
    "loads": Plan(
        engine={**TINY, "ranks": 2},
        options={"chunk_tokens": 32},
        mix=outside(BUSY, 40),
        outside=LOAD_FAULTS,
    ),
    "loads-async": Plan(
        engine=_async(num_blocks=64, ranks=2), mix=outside(SESSIONS, 40), outside=LOAD_FAULTS
    ),
    "failing": Plan(engine={**TINY, "ranks": 2}, failing=60, mix=MANY_TEXTS),
    "failing-as-error": Plan(
        engine={**TINY, "ranks": 2, "load_failure_policy": "fail"},
        options={"keep_failure_policy": True},
        failing=120,
        mix=outside(MANY_TEXTS, 20),
        outside=LOAD_FAULTS,
    ),
    "attachments": Plan(
        engine=_async(num_blocks=40, ranks=3),
        mix=outside(BUSY, 6),
        outside=ATTACHMENT_FAULTS,
    ),
    "faults": Plan(
        engine={"num_blocks": 40, "ranks": 2},
        mix=outside(BUSY, 14),
        failing=20,
        outside=SERVER_FAULTS + ATTACHMENT_FAULTS,
    ),
    "faults-async": Plan(
        engine=_async(**TINY, drafts=2),
        mix=outside(BUSY, 14),
        failing=20,
        outside=SERVER_FAULTS + LOAD_FAULTS + EVICTION,
    ),
}
