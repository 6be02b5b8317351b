"""What a simulated engine tells about itself: events, steps, allocations.

All values; the engine appends, tests read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What happened."""

    ADDED = "added"
    LOOKED_UP = "looked_up"
    ALLOCATED = "allocated"
    PROMOTED = "promoted"
    LOAD_FINISHED = "load_finished"
    LOAD_FAILED = "load_failed"
    SEND_FINISHED = "send_finished"
    PREEMPTED = "preempted"
    ABORTED = "aborted"
    FINISHED = "finished"
    FAILED = "failed"
    MORE_INPUT = "more_input"
    ANSWERED = "answered"
    SESSION_ENDED = "session_ended"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the engine's log.

    Attributes:
        step: number of the step that was begun last; 0 before the first.
        kind: what happened.
        request_id: whom it concerns; empty for the engine as a whole.
        tokens: the number that goes with it: a look-up's answer (None: ask again), the external
            tokens of an allocation.
        local: tokens found in vLLM's own prefix cache, for look-ups and allocations.
    """

    step: int
    kind: Kind
    request_id: str = ""
    tokens: int | None = None
    local: int = 0

    def __str__(self) -> str:
        return f"{self.step} {self.kind} {self.request_id} tokens={self.tokens} local={self.local}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One admission of a request.

    Attributes:
        local: tokens of the local hit, a block multiple.
        external: tokens the connector is to load after it.
        is_async: whether the request waits for the load.
        block_ids: the whole block table at that moment, one tuple for each KV-cache group.
    """

    step: int
    local: int
    external: int
    is_async: bool
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class StepRecord:
    """What one step did; filled in as its three phases pass.

    Attributes:
        index: 1 for the first step.
        scheduled: request id → tokens computed in this step, drafts included.
        computed: request id → ``num_computed_tokens`` before the step.
        resumed: requests that came back after a preemption.
        preempted: requests preempted while this step was scheduled, or since the last one.
        finished: requests the workers were told to forget.
        drafted: request id → draft tokens among the scheduled ones.
        sampled: request id → tokens as the workers sampled them.
        loads_finished: asynchronous loads reported as ended, failed ones included.
        loads_failed: asynchronous loads reported as failed as a whole.
        invalid_blocks: ids of blocks reported as not loaded.
        misread: requests whose context held wrong bytes (only a failed synchronous load may).
    """

    index: int
    scheduled: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    resumed: frozenset[str] = frozenset()
    preempted: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()
    drafted: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    loads_finished: frozenset[str] = frozenset()
    loads_failed: frozenset[str] = frozenset()
    invalid_blocks: frozenset[int] = frozenset()
    misread: frozenset[str] = frozenset()
