"""With CI=true, a skipped test is a failed test: nothing is left untested there without notice.

On a developer's machine a test may skip itself with a sentence that names what is missing. Loaded
with ``-p strict_skips``, as the Makefile does.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def _is_strict() -> bool:
    return os.environ.get("CI") == "true"


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not _is_strict() or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped where nothing may be skipped (CI=true): {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip of a test into a failure."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a skip of a whole module into an error."""
    report = yield
    _refuse(report)
    return report
