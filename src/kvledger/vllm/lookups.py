"""Look-ups: asked when a request arrives, answered from memory ever after.

A look-up is read-only and idempotent: however often vLLM asks, the answer is the same until the
request is admitted. The hit stays leased from the server's answer until then, or until the request
ends. Nobody waits for a late answer, and its lease has been given back before it comes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvledger.naming import Name, pack_names
from kvledger.protocol import Error, ErrorCode, Match, Matched, Release, Reply
from kvledger.reasons import Reason
from kvledger.vllm.channel import Channel

FIRST_WAIT_SECONDS = 300e-6
"""On an idle engine the question follows 10 µs after the request's arrival, and an answer takes
some 50 µs: waiting so long once is cheaper than another scheduler pass."""

REASON_OF_ERROR = {
    ErrorCode.NAMESPACE_NOT_OPEN: Reason.NAMESPACE_OPENING,
    ErrorCode.OBJECT_TOO_LARGE: Reason.OBJECT_TOO_LARGE,
}


@dataclass(slots=True)
class Lookup:
    """One question about one request.

    Attributes:
        lease: lease id under which the hit is held.
        asked_at: when it was sent, in seconds of the monotonic clock.
        chunks: the hit; None until answered.
        reason: why there is no more.
        waited: the one short wait has been spent.
        released: the lease is not wanted any more.
    """

    lease: int
    asked_at: float
    chunks: int | None = None
    reason: Reason | None = None
    waited: bool = False
    released: bool = False

    @property
    def answered(self) -> bool:
        return self.chunks is not None


class Lookups:
    """Asks the server and keeps to the deadline."""

    def __init__(self, channel: Channel, deadline_seconds: float) -> None:
        self._channel = channel
        self._deadline_seconds = deadline_seconds
        self._next_lease = 1
        self._held: set[int] = set()
        self._asked: set[int] = set()
        self._to_release: list[int] = []

    @property
    def leases(self) -> int:
        """Leases held now, by answered look-ups that were not released."""
        return len(self._held)

    @property
    def expected_leases(self) -> int:
        """Leases held now, and those that questions under way may bring."""
        return len(self._held) + len(self._asked)

    def ask(self, names: list[Name], unavailable: Reason | None) -> Lookup:
        """Send the question, or answer it with a miss at once if there is nobody to ask."""
        lookup = Lookup(lease=self._next_lease, asked_at=time.monotonic())
        self._next_lease += 1
        if not names:
            return _missed(lookup, Reason.NO_FULL_CHUNK)
        if unavailable is not None:
            return _missed(lookup, unavailable)
        packed = pack_names(names)
        sent = self._channel.send(
            lambda number: Match(id=number, lease=lookup.lease, group=0, names=packed),
            lambda reply: self._answer(lookup, reply),
        )
        if not sent:
            return _missed(lookup, Reason.SERVER_ABSENT)
        self._asked.add(lookup.lease)
        return lookup

    def result(self, lookup: Lookup) -> int | None:
        """Chunks of the hit, or None while the server may still answer in time."""
        if lookup.answered:
            return lookup.chunks
        if not lookup.waited:
            lookup.waited = True
            self._channel.wait_until(lambda: lookup.answered, FIRST_WAIT_SECONDS, trip=False)
        else:
            self._channel.poll()
        if lookup.answered:
            return lookup.chunks
        if not self._channel.connected:
            _missed(lookup, Reason.SERVER_ABSENT)
        elif self._channel.silent or self._overdue(lookup):
            self._channel.trip()
            self.release(lookup)
            _missed(lookup, Reason.LOOKUP_DEADLINE)
        return lookup.chunks

    def release(self, lookup: Lookup) -> None:
        """Give the lease back, even before the answer: the server reads the question first, and
        an engine that goes idle now would never hear the answer. Idempotent."""
        if lookup.released:
            return
        lookup.released = True
        if lookup.chunks or not lookup.answered:
            self._held.discard(lookup.lease)
            self._asked.discard(lookup.lease)
            self._to_release.append(lookup.lease)

    def flush(self) -> None:
        """Send the releases that are due, in one message; kept while the server is silent."""
        if self._to_release and self._channel.usable:
            leases = self._to_release
            if self._channel.send(lambda number: Release(id=number, leases=leases)):
                self._to_release = []

    def lost(self) -> None:
        """The server is gone, and every lease with it; look-ups of before are to be dropped."""
        self._to_release = []
        self._held.clear()
        self._asked.clear()

    def _overdue(self, lookup: Lookup) -> bool:
        return time.monotonic() - lookup.asked_at > self._deadline_seconds

    def _answer(self, lookup: Lookup, reply: Reply) -> None:
        self._asked.discard(lookup.lease)
        if isinstance(reply, Matched):
            if reply.chunks and not lookup.released:
                self._held.add(lookup.lease)
            if not lookup.answered:
                lookup.chunks = reply.chunks
                lookup.reason = Reason(reply.reason) if reply.reason else None
        elif not lookup.answered:
            reason = REASON_OF_ERROR.get(reply.code) if isinstance(reply, Error) else None
            _missed(lookup, reason or Reason.SERVER_ABSENT)


def _missed(lookup: Lookup, reason: Reason) -> Lookup:
    lookup.chunks, lookup.reason = 0, reason
    return lookup
