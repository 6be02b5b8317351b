"""The table of docs/scenarios.md and the tests agree: every name in it exists, none is left out.

Read from the source alone, so that it costs nothing and imports no vLLM.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "scenarios.md"
IDENTIFIER = re.compile(r"`([\w/]+\.py)::(\w+)`")

ROWS = [1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 15, 17, 18, 19, 20, 23, 25, 26, 28, 29, 30]
"""The numbers of the list; what is missing is about features that this version does not have."""


def rows() -> dict[int, tuple[str, str, str, str]]:
    """Number → what goes wrong, where it was seen, the case, its kind."""
    found = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdigit():
            number, fault, source, case, kind = cells
            found[int(number)] = (fault, source, case, kind)
    return found


def functions(file: Path) -> set[str]:
    """Names of the test functions of a module."""
    nodes = ast.parse(file.read_text()).body
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def missing(named: list[tuple[str, str]]) -> list[str]:
    """Those of some tests that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).is_file() or name not in functions(TESTS / file)
    ]


def test_every_row_is_there() -> None:
    assert sorted(rows()) == ROWS


@pytest.mark.parametrize("number", ROWS)
def test_every_row_has_a_source_a_case_and_its_kind(number: int) -> None:
    """The case is a test of the row's number, but where two rows share one."""
    fault, source, case, kind = rows()[number]
    assert fault
    assert re.search(r"\d{4}", source)
    names = [name for _, name in IDENTIFIER.findall(case)]
    assert any(name.startswith(f"test_scenario_{number:02}_") for name in names)
    assert IDENTIFIER.findall(kind)


def test_every_test_in_the_table_exists() -> None:
    named = IDENTIFIER.findall(TABLE.read_text())
    assert len(named) > 2 * len(ROWS)
    assert missing(named) == []


def test_every_scenario_and_every_kind_is_in_the_table() -> None:
    named = set(IDENTIFIER.findall(TABLE.read_text()))
    files = [*TESTS.glob("sim/test_scenarios*.py"), *TESTS.glob("sim/test_kinds_*.py")]
    assert len(files) >= 5
    for file in files:
        path = str(file.relative_to(TESTS))
        assert {(path, name) for name in functions(file)} <= named


def test_a_wrong_name_is_found() -> None:
    """Negative control."""
    wrong = [("sim/test_scenarios.py", "test_scenario_01_wrong"), ("sim/none.py", "test_x")]
    right = ("sim/test_scenarios.py", "test_scenario_07_full_prompt_hit")
    assert len(missing([*wrong, right])) == 2
