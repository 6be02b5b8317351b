"""Keeps our mistakes out of the engine: a hook that raises is logged, counted, and answered safely.

An engine must never be taken down by its cache. So an unexpected exception in a hook ends in that
hook's fallback, which means "no cache" and never a wrong byte. It is not hidden: the traceback is
logged, and :attr:`Guard.failures` is exported and must stay 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("kvledger")
Result = TypeVar("Result")

MAX_TRACEBACKS = 20
"""A hook that fails at every step must not fill the disk."""


class Guard:
    """Runs hooks; see the module."""

    def __init__(self) -> None:
        self.failures = 0

    def run(self, hook: Callable[[], Result], fallback: Callable[[], Result]) -> Result:
        """The hook's result, or the fallback's if it raises."""
        try:
            return hook()
        except Exception:
            self.failures += 1
            if self.failures <= MAX_TRACEBACKS:
                logger.exception(
                    "kvledger: a hook failed; the engine goes on without the cache for what it "
                    "was doing. Please report this."
                )
            return fallback()
