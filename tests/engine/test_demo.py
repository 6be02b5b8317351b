"""``kvledger demo`` from start to end: it checks itself, so its exit code is the verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO_SECONDS = 600.0


@pytest.mark.full
def test_the_demo_says_that_all_is_as_it_must_be(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "kvledger", "demo", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    # 4,011 tokens are 125 full blocks of 32; the other prompt shares 3,000 tokens, 93 blocks.
    for shown in ("4,011", "4,000", "2,976", "the books balance"):
        assert shown in demo.stdout
