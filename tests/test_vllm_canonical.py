"""Configuration values as canonical text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest

from kvledger.vllm.canonical import MAX_DICT_FIELDS, MAX_VALUE_CHARACTERS, flat, text, values_of


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: int
    name_or_path: str = "/somewhere"


class Config:
    def to_dict(self) -> dict[str, object]:
        return {"b": 2, "a": {1, 2}, "transformers_version": "5.0", "inner": Point(1)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (1e-5, "1e-05"),
        ("as it is", "as it is"),
        (Colour.RED, "RED"),
        ((1, "a"), '[1, "a"]'),
        (Point(3), '{"x": 3}'),
        (Config(), '{"a": ["1", "2"], "b": 2, "inner": {"x": 1}}'),
        (complex(1, 2), "(1+2j)"),
    ],
)
def test_values(value, expected) -> None:
    assert text(value) == expected


def test_the_order_of_keys_does_not_matter() -> None:
    assert text({"a": 1, "b": 2}) == text({"b": 2, "a": 1})


def test_long_values_are_shown_by_their_digest() -> None:
    whole, one_more, other = ("x" * MAX_VALUE_CHARACTERS + end for end in ("", "y", "z"))
    assert text(whole) == whole
    assert text(one_more).startswith("digest:")
    assert text(one_more) != text(other)


def test_objects_without_structure_never_meet() -> None:
    assert text(object()) != text(object())


def test_nested_dictionaries_become_dotted_fields() -> None:
    value = {"rope": {"theta": 1e4, "kinds": [1, 2]}, "empty": {}, "none": None}
    assert dict(flat("config", value)) == {
        "config.rope.theta": "10000.0",
        "config.rope.kinds": "[1, 2]",
        "config.empty": "{}",
        "config.none": "null",
    }
    large = {str(i): i for i in range(MAX_DICT_FIELDS + 1)}
    assert [name for name, _ in flat("labels", large)] == ["labels"]


def test_values_at_any_depth() -> None:
    value = {"type": "a", "list": [{"type": "b"}], "inner": {"type": {"type": "c"}}}
    assert list(values_of("type", value)) == ["a", "b", {"type": "c"}, "c"]
