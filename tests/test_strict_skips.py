"""The rule that nothing is skipped under CI."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

SKIPS = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("no such package")

@pytest.mark.xfail
def test_fails_as_expected():
    assert False
"""

MODULE_SKIPS = """
import pytest
pytest.skip("no such module", allow_module_level=True)
"""


def test_a_skip_is_a_skip_at_home(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(SKIPS)
    result = pytester.runpytest_inprocess("-p", "strict_skips")
    result.assert_outcomes(passed=1, skipped=1, xfailed=1)


def test_a_skip_fails_under_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(SKIPS)
    result = pytester.runpytest_inprocess("-p", "strict_skips")
    result.assert_outcomes(passed=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*skipped where nothing may be skipped*no such package*"])


def test_a_skipped_module_fails_under_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(MODULE_SKIPS)
    result = pytester.runpytest_inprocess("-p", "strict_skips")
    result.assert_outcomes(errors=1)
