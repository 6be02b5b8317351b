"""The closed accounts that engines report: the latest ones, and totals over all. Pure, bounded."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from kvledger.errors import RefusedError
from kvledger.fates import Fate
from kvledger.protocol import MAX_REPORT_RUNS, MAX_REPORT_TEXT, ErrorCode, Report
from kvledger.reasons import Reason

MAX_REPORTS = 1024
MAX_RUNS = 1 << 16
"""Run lengths kept over all reports: some megabytes."""
MAX_COUNT = 1 << 32
"""Tokens of a request. Sums of as many as this stay within the 64 bits of a document."""
MAX_DOCUMENT_BYTES = 4 << 20
"""Accounts in one answer: half a frame."""
WORDS = frozenset(map(str, Fate)) | {f"{Fate.SKIPPED}:{reason}" for reason in Reason}
"""All fates there are."""


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
    """Answer to Explain: each an :class:`Account` in JSON, the newest first."""

    accounts: list[msgspec.Raw]


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
            RefusedError: it cannot be a real one; nothing has changed.
        """
        _check(report)
        report = msgspec.structs.replace(
            report,
            request=report.request[:MAX_REPORT_TEXT],
            miss=report.miss[:MAX_REPORT_TEXT],
            imbalance=report.imbalance[:MAX_REPORT_TEXT],
        )
        self.received += 1
        self.unbalanced += bool(report.imbalance)
        self.tokens += report.tokens
        self.local_tokens += report.local_tokens
        self.external_tokens += report.external_tokens
        for fate, chunks in report.fates:
            self.fates[fate] += chunks
        self._latest.append((engine, now, report))
        self._runs += _runs_of(report)
        while len(self._latest) > MAX_REPORTS or self._runs > MAX_RUNS:
            self._runs -= _runs_of(self._latest.popleft()[2])

    def latest(self, request: str, now: float) -> Accounts:
        """Accounts of requests whose id begins with ``request``: the newest that fit."""
        wanted = request[:MAX_REPORT_TEXT]
        accounts: list[msgspec.Raw] = []
        left_bytes = MAX_DOCUMENT_BYTES
        for engine, came, report in reversed(self._latest):
            if not report.request.startswith(wanted):
                continue
            account = msgspec.json.encode(_account(engine, now - came, report))
            left_bytes -= len(account)
            if left_bytes < 0:
                break
            accounts.append(msgspec.Raw(account))
        return Accounts(accounts=accounts)


def _account(engine: str, age_seconds: float, report: Report) -> Account:
    return Account(
        engine=engine,
        age_seconds=round(age_seconds, 3),
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


def _check(report: Report) -> None:
    """Raises RefusedError for a report that no engine of this version makes."""
    if len(report.fates) + len(report.dropped) > MAX_REPORT_RUNS:
        raise RefusedError(
            ErrorCode.LIMIT_REACHED, f"a report has at most {MAX_REPORT_RUNS} run lengths"
        )
    runs = [*report.fates, *report.dropped.items()]
    for word, _ in runs:
        if word not in WORDS:
            raise RefusedError(ErrorCode.BAD_MESSAGE, f"{word[:MAX_REPORT_TEXT]!r} is no fate")
    chunks = [count for _, count in runs]
    tokens = [report.tokens, report.chunk_tokens, report.local_tokens, report.external_tokens]
    if min(chunks + tokens) < 0 or max([sum(chunks), *tokens]) > MAX_COUNT:
        raise RefusedError(
            ErrorCode.OUT_OF_RANGE, f"numbers in a report lie between 0 and {MAX_COUNT}"
        )


def _runs_of(report: Report) -> int:
    return 1 + len(report.fates) + len(report.dropped)
