"""What a mutant is: a small wrong change to our own source, and who must notice it."""

from __future__ import annotations

from dataclasses import dataclass

SIMULATED = "sim/"
"""Tests under this folder drive the simulated engine."""


@dataclass(frozen=True)
class Mutant:
    """One wrong change.

    Attributes:
        name: unique, and says what the changed code does.
        layer: part of the package, for the table.
        edits: (module, text, what stands there instead); the text occurs exactly once.
        tests: the quick subset of the suite that must fail, as pytest's arguments relative to
            ``tests/``. Run in this order until one fails.
        why: what a user would see.
    """

    name: str
    layer: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]
    why: str


def mutant(
    name: str, module: str, before: str, after: str, *, tests: str | tuple[str, ...], why: str
) -> Mutant:
    """A mutant with one edit; ``module`` without the leading ``kvledger.``."""
    return mutant_of(name, (module, before, after), tests=tests, why=why)


def mutant_of(
    name: str, *edits: tuple[str, str, str], tests: str | tuple[str, ...], why: str
) -> Mutant:
    """A mutant with several edits: one net alone would not be missed, because another catches."""
    return Mutant(
        name=name,
        layer=edits[0][0],
        edits=tuple((f"kvledger.{module}", before, after) for module, before, after in edits),
        tests=(tests,) if isinstance(tests, str) else tests,
        why=why,
    )
