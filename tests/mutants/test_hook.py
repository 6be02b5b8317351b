"""The machinery of the mutants: what it changes, what it leaves alone, and what it counts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SITE = HERE / "site"
TESTS = HERE.parent
sys.path.append(str(SITE))  # behind all else: pytest's own process has no use for sitecustomize

import mutant_hook  # noqa: E402
import run  # noqa: E402
from all_mutants import MUTANTS  # noqa: E402
from mutant import Mutant, mutant  # noqa: E402
from runner import Failure, Outcome  # noqa: E402

ASK = "import kvledger.naming as n; print(n.NAME_BYTES, n.__cached__, n.namespace_id({}))"
WIDER = ("kvledger.naming", "NAME_BYTES = 32", "NAME_BYTES = 33")


def ask(edits: mutant_hook.Edits | None, code: str = ASK, path: str = "") -> list[str]:
    """What a fresh interpreter says, with these edits in its environment."""
    environment = dict(os.environ)
    environment.pop(mutant_hook.VARIABLE, None)
    if edits is not None:
        environment[mutant_hook.VARIABLE] = json.dumps(edits)
    parts = [str(SITE), path, str(TESTS.parent / "src")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    return (done.stdout if done.returncode == 0 else done.stderr).split()


def test_a_change_reaches_another_process_and_nothing_is_left_of_it() -> None:
    source = TESTS.parent / "src/kvledger/naming.py"
    before = source.read_bytes()
    width, cached, digest = ask(None)
    files = {path: path.stat().st_mtime_ns for path in source.parent.glob("__pycache__/naming*")}
    assert width == "32"
    changed_width, _, same_digest = ask([WIDER])
    assert (changed_width, same_digest) == ("33", digest)
    assert source.read_bytes() == before
    after = {path: path.stat().st_mtime_ns for path in source.parent.glob("__pycache__/naming*")}
    assert after == files
    assert ask(None) == [width, cached, digest]


@pytest.mark.parametrize("before", ["NAME_BYTES = 31", "NAME_BYTES"], ids=["none", "many"])
def test_a_stale_mutant_is_refused(before: str) -> None:
    said = " ".join(ask([("kvledger.naming", before, "")]))
    assert "StaleMutantError" in said
    assert "not one" in said


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'\n")
    code = "import os, kvledger.naming as n; print(os.environ['SEEN'], n.NAME_BYTES)"
    assert ask([WIDER], code, str(tmp_path)) == ["yes", "33"]


def test_what_is_imported_already_cannot_be_changed() -> None:
    with pytest.raises(AssertionError, match="imported before"):
        mutant_hook.install([("mutant_hook", "a", "b")])


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_every_mutant_is_fresh_and_changes_something(one: Mutant) -> None:
    run.check_fresh([one])
    assert all(before != after for _, before, after in one.edits)
    assert one.tests
    for test in one.tests:
        file, _, function = test.partition("::")
        text = (TESTS / file).read_text()
        name = function.partition("[")[0]
        assert re.search(rf"^def {name}\(", text, re.MULTILINE) or not name, f"no test {test}"


def test_names_are_unique() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) >= 35


@pytest.mark.parametrize(
    ("outcome", "is_caught"),
    [
        (Outcome(1, 1, [Failure("t", "call", "")]), True),
        (Outcome(1, 1, [Failure("t", "teardown", "")]), True),
        (Outcome(1, 1, [Failure("t", "setup", "")]), False),
        (Outcome(0, 1), False),
        (Outcome(5, 0), False),
        (Outcome(2, 0, trouble="could not be collected"), False),
        (Outcome(None, trouble="crashed"), False),
        (Outcome(2, 1, [Failure("t", "call", "")], "took too long"), False),
    ],
)
def test_only_a_failed_test_counts(outcome: Outcome, is_caught: bool) -> None:
    assert (outcome.caught_by is not None) == is_caught


IN_A_PROCESS = """
import io, sys
sys.path[:0] = [{here!r}, {site!r}]
import run
from rich.console import Console
from test_hook import LIVING, DEAD, BROKEN
out = io.StringIO()
console = Console(file=out, width=200)
codes = [run.run_all(ones, console) for ones in ([DEAD], [LIVING, BROKEN])]
print(codes, out.getvalue())
"""
NAMING_TEST = "test_naming.py::test_what_is_for_display_decides_nothing"
DEAD = mutant(
    "dead",
    "naming",
    'DISPLAY_PREFIX = "display."',
    'DISPLAY_PREFIX = "shown."',
    tests=NAMING_TEST,
    why="",
)
LIVING = mutant(
    "living",
    "naming",
    "    digest = hashlib.blake2b(digest_size=16)\n",
    "    digest = hashlib.blake2b(digest_size=16, person=b'')\n",
    tests=NAMING_TEST,
    why="",
)
BROKEN = mutant(
    "broken", "naming", "NAME_BYTES = 32\n", "NAME_BYTES = nothing\n", tests=NAMING_TEST, why=""
)


def test_the_runner_tells_the_dead_from_the_living() -> None:
    """A mutant that changes nothing lives, and so does one that cannot even be imported."""
    code = IN_A_PROCESS.format(here=str(HERE), site=str(SITE))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("[0, 1]"), done.stdout
    assert "1 of 1 mutants are caught" in done.stdout
    assert "0 of 2 mutants are caught" in done.stdout
    assert "living (1 tests passed)" in done.stdout
    assert "broken (test_naming.py could not be collected)" in done.stdout.replace("tests/", "")
