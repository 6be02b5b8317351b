"""What is audited, and with how much patience."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvledger.sim.engine import SimulatedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an audit waits. Engines are nudged meanwhile: they run requests of two tokens.

    Attributes:
        warmup_seconds: after an engine is built, for a connector that finds its server meanwhile.
        settle_seconds: before a text is asked for again, for stores that end after their request.
        stuck_seconds: until an engine that computes nothing counts as stuck, and until a transfer
            counts as never reported.
        situation_seconds: until a situation is ended from outside, by its process's death.
        is_ready: ends the warm-up early; what is not ready by ``stuck_seconds`` is played anyway.
        is_settled: prolongs the settling up to ``stuck_seconds``.
    """

    warmup_seconds: float = 0.3
    settle_seconds: float = 0.2
    stuck_seconds: float = 20.0
    situation_seconds: float = 180.0
    is_ready: Callable[[SimulatedEngine], bool] | None = None
    is_settled: Callable[[SimulatedEngine], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is audited, and how.

    Attributes:
        connector: class, "module:Class", or a name that vLLM knows.
        extra_config: the connector's own options.
        block_size: tokens in a block.
        seed: of all texts and schedules.
        scratch: directory for the model and the adapters; all engines use the same model.
    """

    connector: type | str
    extra_config: Mapping[str, object]
    block_size: int
    seed: int
    scratch: Path
    patience: Patience
