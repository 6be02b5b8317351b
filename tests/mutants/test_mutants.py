"""``make mutants`` as a test: every mutant is caught, and no subset fails without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT_SECONDS = 3600
"""It takes some minutes; a busy machine gets ten times as long."""


@pytest.mark.full
def test_every_mutant_is_caught() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
