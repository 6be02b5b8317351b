"""Accounts of requests that are over: closed once every chunk has its final fate, then reported."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from itertools import groupby

import msgspec

from kvledger.fates import Fate
from kvledger.ledger import Account
from kvledger.protocol import MAX_REPORT_RUNS, MAX_REPORT_TEXT, Report
from kvledger.reasons import Reason
from kvledger.vllm.channel import Channel
from kvledger.vllm.tracked import Tracked

logger = logging.getLogger("kvledger")

MAX_WORDS = len(Fate) + len(Reason)
"""Different fates there can be, with their reasons."""
MAX_ORDERED_RUNS = MAX_REPORT_RUNS - 2 * MAX_WORDS
"""Run lengths reported as they lie along the chain: the rest, merged, and the dropped ones fit."""
MAX_UNSENT = 256
"""Reports kept for a server that is absent or silent; the oldest are dropped."""


class Accounts:
    """See the module.

    Attributes:
        closing: requests that are over and whose account is open.
        totals: final fates of all chunks of all closed accounts.
        closed: number of closed accounts.
        unbalanced: closed accounts whose books do not balance; must stay 0.
        failed_loads: loads that failed and were recomputed.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.closing: list[Tracked] = []
        self.totals: Counter[str] = Counter()
        self.closed = 0
        self.unbalanced = 0
        self.failed_loads = 0
        self._refusals: set[str] = set()
        self._unsent: deque[Report] = deque(maxlen=MAX_UNSENT)

    def begin_closing(self, tracked: Tracked) -> None:
        """The request is over; a load under way may still answer."""
        if tracked.load is None:
            tracked.account.end()
        self.closing.append(tracked)
        self.close_settled()

    def to_rescue(self) -> list[Tracked]:
        """Ended requests that still owe chunks whose bytes can be read in the next step only."""
        return [t for t in self.closing if t.account.ended and t.account.open_chunks]

    def close_settled(self) -> None:
        """Close every account that has nothing under way any more."""
        settled: list[Tracked] = []
        still: list[Tracked] = []
        for tracked in self.closing:
            if tracked.load is None and not tracked.account.ended:
                tracked.account.end()
            is_settled = tracked.load is None and not tracked.account.open_chunks
            (settled if is_settled else still).append(tracked)
        self.closing = still  # first: a report that finds the server gone comes back here
        for tracked in settled:
            self._close(tracked)
        self._report()

    def lose_server(self) -> None:
        """What was being written when the server went is not stored anywhere."""
        for tracked in self.closing:
            tracked.account.lose_server()
            if tracked.account.ended:
                tracked.account.give_up(Reason.SERVER_ABSENT)
        self.close_settled()

    def tell_refusal(self, code: str, message: str) -> None:
        """Log once why the server refuses this engine; it runs on without the cache."""
        if code not in self._refusals:
            self._refusals.add(code)
            logger.warning("kvledger: the server refuses this engine: %s", message)

    def _close(self, tracked: Tracked) -> None:
        account = tracked.account
        balance = account.balance()
        self.totals.update(balance)
        self.closed += 1
        imbalance = account.imbalance()
        if imbalance is not None:
            self.unbalanced += 1
            logger.error(
                "kvledger: the account of request %s does not balance: %s",
                reportable(account.request_id),
                imbalance,
            )
        self._unsent.append(
            Report(
                id=0,  # given when it is sent
                request=reportable(account.request_id),
                tokens=tracked.request.num_tokens,
                chunk_tokens=account.chunk_tokens,
                local_tokens=tracked.first_local_tokens or 0,
                external_tokens=tracked.external_tokens,
                miss=reportable(tracked.miss or ""),
                fates=run_lengths(account),
                dropped=dict(account.dropped),
                imbalance=reportable(imbalance or ""),
            )
        )

    def _report(self) -> None:
        """Send what is to be reported; kept while nobody hears it."""
        while self._unsent and self._channel.usable:
            if not self._channel.send(_numbered(self._unsent[0])):
                break
            self._unsent.popleft()


def _numbered(report: Report) -> Callable[[int], Report]:
    return lambda number: msgspec.structs.replace(report, id=number)


def run_lengths(account: Account) -> list[tuple[str, int]]:
    """Fates along the chain as (fate or "skipped:reason", number of chunks).

    Behind :data:`MAX_ORDERED_RUNS` the order is given up: one entry for each fate.
    """
    words = [
        f"{fate}:{account.reasons[chunk]}" if chunk in account.reasons else str(fate)
        for chunk, fate in enumerate(account.fates)
    ]
    runs = [(word, sum(1 for _ in run)) for word, run in groupby(words)]
    rest: Counter[str] = Counter()
    for word, chunks in runs[MAX_ORDERED_RUNS:]:
        rest[word] += chunks
    return runs[:MAX_ORDERED_RUNS] + list(rest.items())


def reportable(text: str) -> str:
    """What of a text fits into a report: its beginning, as UTF-8 can hold it.

    A request's id comes from a client of vLLM and can be anything.
    """
    return text[:MAX_REPORT_TEXT].encode("utf-8", "replace").decode("utf-8")
