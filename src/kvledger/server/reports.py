"""The closed accounts that engines report: the latest ones, and totals over all. Pure, bounded."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from kvledger.errors import RefusedError
from kvledger.protocol import ErrorCode, Report

MAX_REPORTS = 1024
MAX_RUNS = 1 << 16
"""Run lengths kept over all reports: some megabytes."""
MAX_RUNS_OF_ONE = 1 << 13
MAX_WORDS = 256
"""Different fates counted: all there are, many times over."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """One report as people see it; ``age_seconds`` counts from when it came."""

    engine: str
    age_seconds: float
    request: str
    tokens: int
    chunk_tokens: int
    local_tokens: int
    external_tokens: int
    miss: str
    fates: list[tuple[str, int]]
    dropped: dict[str, int]
    imbalance: str


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to Explain: the newest account first."""

    accounts: list[Account]


class Reports:
    """See the module.

    Attributes:
        received: reports since the start.
        unbalanced: those whose books do not balance.
        fates: chunks by their final fate, as "stored" or "skipped:reason".
        external_tokens: tokens that engines have loaded.
        local_tokens: tokens found in the engines' own prefix caches.
        tokens: tokens of all reported requests.
    """

    def __init__(self) -> None:
        self.received = self.unbalanced = 0
        self.tokens = self.local_tokens = self.external_tokens = 0
        self.fates: Counter[str] = Counter()
        self._latest: deque[tuple[str, float, Report]] = deque()
        self._runs = 0

    def add(self, engine: str, report: Report, now: float) -> None:
        """Count a report and keep it among the latest.

        Raises:
            RefusedError: it is larger than any real one; nothing has changed.
        """
        if len(report.fates) + len(report.dropped) > MAX_RUNS_OF_ONE:
            raise RefusedError(
                ErrorCode.LIMIT_REACHED, f"a report has at most {MAX_RUNS_OF_ONE} run lengths"
            )
        self.received += 1
        self.unbalanced += bool(report.imbalance)
        self.tokens += report.tokens
        self.local_tokens += report.local_tokens
        self.external_tokens += report.external_tokens
        for fate, chunks in report.fates:
            if fate in self.fates or len(self.fates) < MAX_WORDS:
                self.fates[fate] += chunks
        self._latest.append((engine, now, report))
        self._runs += _runs_of(report)
        while len(self._latest) > MAX_REPORTS or self._runs > MAX_RUNS:
            self._runs -= _runs_of(self._latest.popleft()[2])

    def latest(self, request: str, now: float) -> Accounts:
        """Accounts of requests whose id begins with ``request``, the newest first."""
        return Accounts(
            accounts=[
                Account(
                    engine=engine,
                    age_seconds=round(now - came, 3),
                    request=report.request,
                    tokens=report.tokens,
                    chunk_tokens=report.chunk_tokens,
                    local_tokens=report.local_tokens,
                    external_tokens=report.external_tokens,
                    miss=report.miss,
                    fates=report.fates,
                    dropped=report.dropped,
                    imbalance=report.imbalance,
                )
                for engine, came, report in reversed(self._latest)
                if report.request.startswith(request)
            ]
        )


def _runs_of(report: Report) -> int:
    return 1 + len(report.fates) + len(report.dropped)
