"""How long the connector waits for a server, in tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from books import DEADLINE_SECONDS

PATIENT = {
    "scheduler_side.ANSWER_WAIT_SECONDS": DEADLINE_SECONDS,
    "scheduler_side.LAST_WAIT_SECONDS": DEADLINE_SECONDS,
    "lookups.FIRST_WAIT_SECONDS": DEADLINE_SECONDS,
    "assembly.SILENCE_SECONDS": DEADLINE_SECONDS,
    # Not as long: workers that have not run cannot commit anything.
    "scheduler_side.IDLE_WAIT_SECONDS": 0.25,
}
"""An engine that waits for a live server as long as it takes: what it does then depends on the seed
alone, and not on how busy the machine is."""
IMPATIENT = {
    "scheduler_side.ANSWER_WAIT_SECONDS": 1e-3,
    "scheduler_side.LAST_WAIT_SECONDS": 10e-3,
    "lookups.FIRST_WAIT_SECONDS": 300e-6,
    "assembly.SILENCE_SECONDS": 0.1,
    "scheduler_side.IDLE_WAIT_SECONDS": 10e-3,
}
"""As users have it, where the server is disturbed (silence: ten times as soon, to save time)."""


@contextmanager
def bounded(bounds: Mapping[str, float]) -> Iterator[None]:
    """Have these bounds: "module.CONSTANT" of ``kvledger.vllm`` → seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in bounds.items():
            patch.setattr(f"kvledger.vllm.{name}", seconds)
        yield
