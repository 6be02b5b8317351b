"""The audit of connectors that people use: our own is clean, vLLM's example has known limits."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from kvledger.sim.__main__ import app
from kvledger.sim.audit import audit
from kvledger.sim.audit.report import AuditReport, Heading
from kvledger.sim.audit.subject import Patience
from servers import kvledger_environment

OWN = "kvledger.vllm:KVLedgerConnector"
BUSY_SECONDS = 30.0
AT_ONCE = Patience(warmup_seconds=0.0, settle_seconds=0.0)


# ---- our own -----------------------------------------------------------------------------------


@pytest.fixture
def own_config(server, monkeypatch):
    """Options of our connector on a fresh server, which it waits for as long as it takes."""
    for module, name in (
        ("scheduler_side", "ANSWER_WAIT_SECONDS"),
        ("scheduler_side", "LAST_WAIT_SECONDS"),
        ("lookups", "FIRST_WAIT_SECONDS"),
        ("assembly", "SILENCE_SECONDS"),
    ):
        monkeypatch.setattr(f"kvledger.vllm.{module}.{name}", BUSY_SECONDS)
    return {
        "kvledger.socket": server().socket_path,
        "kvledger.lookup_deadline_ms": 20_000.0,
        "kvledger.load_deadline_ms": 60_000.0,
    }


def assert_everything_comes_back(report, most_lost=0):
    assert report.is_clean, [str(f) for s in report.situations for f in s.faults]
    for situation in report.situations:
        books = situation.books
        assert books.loaded == books.promised > 0
        if situation.name == "adapters":
            # An adapter's file can change under its name, so our connector leaves adapters alone:
            # of three times 37 blocks those of the bare model come back.
            assert (books.computed, books.stored) == (3 * 37, 37)
        else:
            assert books.computed - books.stored <= most_lost, situation


def test_own_connector_is_clean_and_gives_everything_back(own_config):
    names = ("single prompt", "short prompts", "decode growth", "abort in load", "two ranks")
    report = audit(OWN, extra_config=own_config, situations=[*names, "adapters"])
    assert_everything_comes_back(report)


@pytest.mark.full
def test_own_connector_is_clean_in_all_situations(own_config):
    report = audit(OWN, extra_config=own_config)
    # An abort can catch a block between its last token and the step after, which would store it.
    assert_everything_comes_back(report, most_lost=10)


# ---- vLLM's example ----------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path):
    def play(*situations):
        return audit(
            "ExampleConnector",
            extra_config={"shared_storage_path": str(tmp_path)},
            situations=situations,
            patience=AT_ONCE,
        )

    return play


def test_example_connector_stores_prompts_that_are_computed_at_once(example):
    """1003 tokens are 62 full blocks; the 63rd is filled by the answer, which it does not store."""
    books = example("single prompt").situation("single prompt").books
    assert (books.computed, books.stored, books.wrong) == (63, 62, 0)
    assert books.promised == books.loaded == 62 + 62


@pytest.mark.parametrize(
    ("situation", "error"),
    [
        ("prefill in steps", "shape mismatch"),
        ("asked again", "shape mismatch"),
        ("short prompts", "shape mismatch"),
        ("preempt and resume", "No such file"),
    ],
)
def test_example_connector_crashes(example, situation, error):
    """It takes the tokens of a request's first step for all of it, and has no idea of others."""
    report = example(situation)
    assert Heading.CRASHED in report.headings()
    assert any(error in finding.text for finding in report.situations[0].faults)


@pytest.mark.parametrize("situation", ["two ranks", "salts", "adapters"])
def test_example_connector_gives_bytes_of_another(example, situation):
    """Its file names know neither rank, nor salt, nor adapter."""
    report = example(situation)
    assert report.headings() == {Heading.WRONG_BYTES, Heading.WRONG_OUTPUT}
    assert report.situations[0].books.wrong > 100


def test_example_connector_answers_negative_hits(example):
    """For a prompt of one token, when it is asked again."""
    (finding,) = [
        finding
        for finding in example("short prompts").situations[0].faults
        if finding.heading is Heading.OVER_REPORTED
    ]
    assert "-16 after 0 of 1 tokens" in finding.text


# ---- the command -------------------------------------------------------------------------------


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvledger.sim", *arguments],
        env=kvledger_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_command_prints_books_and_exits_by_what_it_found(tmp_path):
    options = msgspec.json.encode({"shared_storage_path": str(tmp_path / "store")}).decode()
    path = tmp_path / "report.json"
    arguments = ["ExampleConnector", "--extra-config", options, "--json", str(path)]
    done = command(*arguments, "--situation", "single prompt", "--situation", "salts")
    assert done.returncode == 1, done.stderr
    report = msgspec.json.decode(path.read_bytes(), type=AuditReport)
    assert [s.name for s in report.situations] == ["single prompt", "salts"]
    for situation in report.situations:
        lines = [line.strip() for line in done.stdout.splitlines()]
        row = next(line for line in lines if line.startswith(f"{situation.name}  "))
        books = situation.books
        expected = [books.computed, books.stored, books.promised, books.loaded, books.wrong]
        expected += [books.wrong_outputs, situation.violations, situation.leaks]
        assert row.removeprefix(situation.name).split() == [str(number) for number in expected]
    assert "wrong bytes: a block that was reported as loaded holds other bytes" in done.stdout
    assert "not clean: faults in 1 of 2 situations" in done.stdout


def test_command_exits_with_0_if_there_is_no_fault(tmp_path):
    options = msgspec.json.encode({"shared_storage_path": str(tmp_path)}).decode()
    arguments = ["ExampleConnector", "--extra-config", options, "--situation", "single prompt"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "clean: faults in 0 of 1 situations" in done.output


@pytest.mark.parametrize(
    "arguments",
    [["--extra-config", "[1]"], ["--extra-config", "{"], ["--situation", "dance"]],
)
def test_command_refuses_wrong_usage(arguments):
    done = CliRunner().invoke(app, ["ExampleConnector", *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.output
