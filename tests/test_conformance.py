"""docs/conformance.md against the tests: the table and the ``pitfall`` marks say the same.

Sources are parsed, not imported, so this is fast and needs no vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "conformance.md"
NUMBERS = range(1, 66)

TEST_ID = re.compile(r"`([\w/]+\.py::\w+)`")
NO_TEST = "no test: "
"""So begins the last cell of a pitfall that no test can show, followed by the reason."""

Marks = dict[int, set[str]]
"""Pitfall → tests, as "folder/file.py::function" below ``tests/``."""


def marks_of(source: str, path: str) -> Iterator[tuple[int, str]]:
    """(pitfall, test) for each ``@pytest.mark.pitfall(numbers)`` of one file."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                continue
            if ast.unparse(decorator.func) == "pytest.mark.pitfall":
                for number in decorator.args:
                    yield ast.literal_eval(number), f"{path}::{node.name}"


def all_marks() -> Marks:
    marks: Marks = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        source = file.read_text()
        if "mark.pitfall" in source:
            for number, test in marks_of(source, str(file.relative_to(TESTS))):
                marks.setdefault(number, set()).add(test)
    return marks


def rows_of(document: str) -> dict[int, list[str]]:
    """Number → the other cells of its row; AssertionError for a number that is there twice."""
    rows: dict[int, list[str]] = {}
    for line in document.splitlines():
        found = re.match(r"\| (\d+) \| (.*) \|$", line)
        if found:
            assert int(found[1]) not in rows, f"pitfall {found[1]} has two rows"
            rows[int(found[1])] = found[2].split(" | ")
    return rows


def problems(document: str, marks: Marks) -> list[str]:
    """What the table and the marks disagree about."""
    rows = rows_of(document)
    found = [f"pitfall {number} has no row" for number in NUMBERS if number not in rows]
    found += [f"there is no pitfall {n}" for n in (rows.keys() | marks.keys()) - set(NUMBERS)]
    for number, cells in rows.items():
        if len(cells) != 3 or not all(cell.strip() for cell in cells):
            found.append(f"pitfall {number} wants three cells")
            continue
        named, marked = set(TEST_ID.findall(cells[2])), marks.get(number, set())
        found += [f"{test} is named at {number} and has no such mark" for test in named - marked]
        found += [f"{test} is marked {number} and not named there" for test in marked - named]
        if not named and len(cells[2].partition(NO_TEST)[2]) < 20:
            found.append(f"pitfall {number} has neither a test nor a reason why not")
    return found


def test_the_table_and_the_marks_agree() -> None:
    assert problems(TABLE.read_text(), all_marks()) == []


def test_each_pitfall_is_sorted_by_its_number() -> None:
    assert list(rows_of(TABLE.read_text())) == list(NUMBERS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace("| 20 |", "| 66 |"), "pitfall 20 has no row"),
        (lambda text: text.replace("| 20 |", "| 66 |"), "there is no pitfall 66"),
        (lambda text: re.sub(r"`sim/test_loads.py::\w+`", "", text), "not named there"),
        (lambda text: text.replace("::test_", "::test_of_yesterday_"), "has no such mark"),
        (lambda text: TEST_ID.sub("-", text), "neither a test nor a reason"),
    ],
)
def test_a_table_that_is_not_true_is_seen(change, expected) -> None:
    """Negative control."""
    assert any(expected in problem for problem in problems(change(TABLE.read_text()), all_marks()))


def test_marks_are_found_among_other_decorators() -> None:
    source = """
@pytest.mark.full
@pytest.mark.pitfall(3, 4)
@pytest.mark.parametrize("n", [1, 2])
def test_one(n): ...

def test_two(): ...
"""
    assert list(marks_of(source, "a.py")) == [(3, "a.py::test_one"), (4, "a.py::test_one")]
