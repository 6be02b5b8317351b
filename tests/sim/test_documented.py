"""The scenario that docs/testing.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from books import World

DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_documented_scenario(world: World) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(source.strip().splitlines()) <= 15
    names: dict[str, object] = {}
    exec(compile(source, str(DOCUMENT), "exec"), names)
    scenario = names["test_a_common_beginning"]
    assert callable(scenario)
    scenario(world)
