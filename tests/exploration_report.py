"""Prints at the end of a run how far the exhaustive tests went: states, transitions, universes.

A pytest plugin; load it with ``-p exploration_report`` or from a conftest's ``pytest_plugins``.
Without it the tests run as well, and only print to their captured output.
"""

from __future__ import annotations

import pytest

_lines: list[str] = []


def explored(universe: str, states: int, transitions: int, *, complete: bool) -> None:
    """One universe was walked through: to its end, or up to a bound."""
    extent = "all" if complete else "up to the bound"
    line = f"{universe}: {states:,} states, {transitions:,} transitions ({extent})"
    print(line)
    _lines.append(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The lines of all universes, one below the other."""
    if _lines:
        terminalreporter.write_sep("=", "state spaces explored")
        for line in _lines:
            terminalreporter.write_line(line)


def describe(path: object, event: tuple[str, ...]) -> str:
    """A sequence of events, kept as nested pairs (those before, the last), and one more."""
    sequence = [event]
    while isinstance(path, tuple) and path:
        path, last = path
        sequence.append(last)
    return " → ".join(" ".join(e) for e in reversed(sequence))
