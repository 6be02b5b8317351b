"""What an audit finds: values only, and the sentences and sums that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Heading(StrEnum):
    """What kind of thing a finding is."""

    CRASHED = "crashed"
    HUNG = "hung"
    WRONG_BYTES = "wrong bytes"
    WRONG_OUTPUT = "wrong output"
    FOREIGN_WRITE = "foreign write"
    OVER_REPORTED = "over-reported hit"
    UNASKED = "unasked answer"
    MISSING = "missing answer"
    LEAKED = "leak"
    NOT_STORED = "not stored"


_HARMLESS = frozenset({Heading.NOT_STORED})
_BYTES = frozenset({Heading.WRONG_BYTES, Heading.WRONG_OUTPUT})
MEANINGS: dict[Heading, str] = {
    Heading.CRASHED: "an exception ended the engine, or the process died",
    Heading.HUNG: "a hook did not return, or requests waited for ever",
    Heading.WRONG_BYTES: "a block that was reported as loaded holds other bytes",
    Heading.WRONG_OUTPUT: "a request got other tokens than a cold engine generates",
    Heading.FOREIGN_WRITE: "bytes changed that were nobody's to write",
    Heading.OVER_REPORTED: "a look-up promised more than the request has",
    Heading.UNASKED: "a transfer was reported that nobody waited for",
    Heading.MISSING: "a transfer that somebody waits for was never reported",
    Heading.LEAKED: "something is held though no request is alive",
    Heading.NOT_STORED: "full blocks that a second engine does not find (no fault in itself)",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was noticed, once for each situation and text.

    Attributes:
        heading: its kind.
        text: one sentence, with the request it was first seen at.
        count: how often.
    """

    heading: Heading
    text: str
    count: int = 1

    @property
    def is_fault(self) -> bool:
        """Whether the connector has done something that it must not do."""
        return self.heading not in _HARMLESS

    @property
    def is_violation(self) -> bool:
        """Whether it breaks the protocol between vLLM and a connector."""
        return self.is_fault and self.heading not in _BYTES | {Heading.LEAKED}

    def __str__(self) -> str:
        return f"{self.heading}: {self.text}" + (f" ({self.count} times)" if self.count > 1 else "")


class Notes:
    """Findings of one situation, equal ones counted."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Heading, str]] = Counter()
        self._texts: dict[tuple[Heading, str], str] = {}

    def add(self, heading: Heading, what: str, where: str = "", count: int = 1) -> None:
        """Note one; ``where`` is shown for the first of its kind only."""
        key = (heading, what)
        self._texts.setdefault(key, f"{what}, first {where}" if where else what)
        self._counts[key] += count

    def findings(self) -> tuple[Finding, ...]:
        """All so far, in the order in which they were first seen."""
        return tuple(
            Finding(key[0], self._texts[key], count) for key, count in self._counts.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Numbers of one situation, or sums over several. Blocks are vLLM's, of all engines together.

    Attributes:
        requests: requests of the situation itself.
        steps: engine steps in which tokens were computed.
        computed: distinct full blocks (same tokens before, same salt, same adapter) whose KV stood
            in an engine at some time: what could have been stored.
        stored: those of them that a fresh engine with another id is promised afterwards.
        promised: blocks of all loads that vLLM admitted, those of the second engine included.
        loaded: those of them that the connector has reported as loaded, or not as failed.
        wrong: those of them that hold other bytes than their tokens stand for.
        wrong_outputs: requests whose tokens are not those of a cold engine.
    """

    requests: int = 0
    steps: int = 0
    computed: int = 0
    stored: int = 0
    promised: int = 0
    loaded: int = 0
    wrong: int = 0
    wrong_outputs: int = 0

    def __add__(self, other: Books) -> Books:
        return Books(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SituationReport:
    """One situation: what it was, its books, what was noticed.

    Attributes:
        purpose: what the situation asks of a connector, in half a sentence.
        seconds: wall-clock time.
    """

    name: str
    purpose: str
    books: Books = field(default_factory=Books)
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def violations(self) -> int:
        """Breaches of the protocol, each as often as it was seen."""
        return sum(finding.count for finding in self.findings if finding.is_violation)

    @property
    def leaks(self) -> int:
        """Kinds of things held though no request is alive."""
        return sum(finding.heading is Heading.LEAKED for finding in self.findings)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """Findings that a connector without mistakes does not have."""
        return tuple(finding for finding in self.findings if finding.is_fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of an audit.

    Attributes:
        connector: as it was named.
        seed: of the texts and the random schedule.
        block_size: tokens in a block.
    """

    connector: str
    seed: int
    block_size: int
    situations: tuple[SituationReport, ...]

    @property
    def total(self) -> Books:
        """The books of all situations together."""
        return sum((report.books for report in self.situations), Books())

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong, violating or leaking."""
        return not any(report.faults for report in self.situations)

    def situation(self, name: str) -> SituationReport:
        """The report of one situation; KeyError if it was not played."""
        for report in self.situations:
            if report.name == name:
                return report
        raise KeyError(name)

    def headings(self, name: str | None = None) -> set[Heading]:
        """Kinds of faults, of one situation or of all."""
        return {
            finding.heading
            for report in self.situations
            if name in (None, report.name)
            for finding in report.faults
        }
