"""Our mistakes stay ours: logged, counted, answered safely."""

from __future__ import annotations

import logging

import pytest

from kvledger.vllm.guard import MAX_TRACEBACKS, Guard


def test_a_hook_that_works_is_not_touched(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    assert guard.run(lambda: 7, lambda: 0) == 7
    assert guard.failures == 0
    assert not caplog.records


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("kvledger"), "propagate", True)
    return caplog


@pytest.mark.parametrize("error", [ValueError("a cause"), AssertionError("a cause")])
def test_a_hook_that_raises_is_answered_and_shown(
    error: Exception, log: pytest.LogCaptureFixture
) -> None:
    def hook() -> int:
        raise error

    guard = Guard()
    assert guard.run(hook, lambda: 5) == 5
    assert guard.failures == 1
    (record,) = log.records
    assert record.levelno == logging.ERROR
    assert "a cause" in log.text
    assert "Traceback" in log.text


def test_a_hook_that_always_raises_does_not_fill_the_disk(log: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    for _ in range(MAX_TRACEBACKS + 30):
        guard.run(lambda: 1 // 0, lambda: 0)
    assert guard.failures == MAX_TRACEBACKS + 30
    assert len(log.records) == MAX_TRACEBACKS


def test_an_interrupt_is_not_kept_from_the_engine() -> None:
    def hook() -> None:
        raise KeyboardInterrupt

    guard = Guard()
    with pytest.raises(KeyboardInterrupt):
        guard.run(hook, lambda: None)
    assert guard.failures == 0
