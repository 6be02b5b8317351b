"""What came over the wire, on a terminal: as it is written, and never as instructions to it."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def make_console() -> Console:
    """A console that takes brackets and colons in texts for just that."""
    return Console(markup=False, emoji=False)


def printable(text: str) -> str:
    """The text with a replacement character for what would steer the terminal."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def printable_document(document: dict[str, Any]) -> dict[str, Any]:
    """A JSON document whose texts, keys included, are printable."""
    return {printable(key): _printable_value(value) for key, value in document.items()}


def _printable_value(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable_value(entry) for entry in value]
    return printable_document(value) if isinstance(value, dict) else value
