"""What the demo makes of results; the demo itself runs in tests/engine/test_demo.py."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from kvledger.cli.demo import Run, account_table, full_blocks, run_table
from kvledger.lab.requests import Result


def result(tokens: tuple[int, ...] = (1, 2), *, external: int = 0, seconds: float = 10.0) -> Result:
    return Result(
        request_id="lab-1-",
        prompt_tokens=4_011,
        token_ids=tokens,
        local_hit_tokens=0,
        external_hit_tokens=external,
        ttft_seconds=seconds,
        total_seconds=seconds,
        finish_reason="length",
        kv_transfer_params=None,
    )


def run(outcome: Result, *, external: int = 0, reference: Result | None = None) -> Run:
    return Run(
        title="same prompt",
        engine="B",
        local=0,
        external=external,
        result=outcome,
        reference=reference,
    )


def text(table: Table) -> str:
    screen = io.StringIO()
    Console(width=80, file=screen).print(table)
    return screen.getvalue()


@pytest.mark.parametrize(("tokens", "full"), [(0, 0), (31, 0), (32, 32), (4_011, 4_000)])
def test_full_blocks(tokens: int, full: int) -> None:
    assert full_blocks(tokens) == full


def test_a_run_as_it_must_be() -> None:
    good = run(result(external=4_000, seconds=0.1), external=4_000, reference=result())
    assert good.identical
    assert good.predicted
    shown = text(run_table([run(result()), good]))
    assert "4,000" in shown
    assert "0.100 s" in shown
    assert "100.0×" in shown
    assert "yes" in shown
    assert "not" not in shown


def test_another_output_is_seen() -> None:
    bad = run(result((1, 3)), reference=result((1, 2)))
    assert not bad.identical
    assert "NO" in text(run_table([bad]))


def test_another_hit_is_seen() -> None:
    bad = run(result(external=2_976), external=4_000, reference=result())
    assert not bad.predicted
    assert "2,976, not 4,000" in text(run_table([bad]))


def test_an_account_shows_every_chunk() -> None:
    shown = text(
        account_table(
            {
                "chunk_tokens": 32,
                "fates": [["loaded", 93], ["skipped:store_disabled", 33]],
                "imbalance": "",
            }
        )
    )
    assert "0 to 2,975" in shown
    assert "2,976 to 4,031" in shown
    assert "skipped: store_disabled" in shown
    assert "the books balance" in shown


def test_an_account_that_does_not_balance_says_so() -> None:
    shown = text(
        account_table({"chunk_tokens": 32, "fates": [["owed", 1]], "imbalance": "one is owed"})
    )
    assert "one is owed" in shown
    assert "balance" not in shown
