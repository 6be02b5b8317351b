"""Put small wrong changes into kvledger, one at a time, and see which test notices each.

    python tests/mutants/run.py             all of them
    python tests/mutants/run.py --list      names, and what each would do to a user
    python tests/mutants/run.py --only NAME some of them (any part of a name)

Ends with 1 if a mutant is not caught, or if a test of a subset fails without any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "site")]

import mutant_hook  # noqa: E402
from all_mutants import MUTANTS  # noqa: E402
from mutant import SIMULATED, Mutant  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402
from runner import (  # noqa: E402
    CONTROL_LIMIT_SECONDS,
    LIMIT_SECONDS,
    TESTS,
    Child,
    Outcome,
    preload,
    start,
    wait_for_any,
)

CHILDREN = 2
CONTROL = "without a mutant"
LEAST_SIMULATED = 15
"""So many of the whole list are caught by the simulated engine."""


@dataclass(frozen=True)
class Job:
    """One child to run: a mutant with its subset, or, without one, tests that must pass."""

    name: str
    tests: tuple[str, ...]
    mutant: Mutant | None


def controls(mutants: Sequence[Mutant]) -> list[Job]:
    """The tests of all subsets, each once, in as many jobs as may run at a time."""
    by_file: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            by_file.setdefault(test.partition("::")[0], {})[test] = None
    shares: list[list[str]] = [[] for _ in range(CHILDREN)]
    for tests in sorted(by_file.values(), key=len, reverse=True):
        min(shares, key=len).extend(tests)
    return [Job(CONTROL, tuple(share), None) for share in shares if share]


def check_fresh(mutants: Sequence[Mutant]) -> None:
    """Refuse a mutant whose text is not there exactly once, before anything runs.

    Raises:
        mutant_hook.StaleMutantError: see there.
    """
    source = TESTS.parent / "src"
    for mutant in mutants:
        for module in {module for module, _, _ in mutant.edits}:
            path = source / module.replace(".", "/")
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            changed = mutant_hook.substitute(path.read_text(), module, list(mutant.edits))
            compile(changed, str(path), "exec")


def run_all(mutants: Sequence[Mutant], console: Console) -> int:
    """Run them, with progress, and print the table; the exit code."""
    check_fresh(mutants)
    began = time.monotonic()
    console.print(f"{len(mutants)} mutants; importing what they need")
    preload([test for mutant in mutants for test in mutant.tests])
    jobs = [*controls(mutants), *(Job(mutant.name, mutant.tests, mutant) for mutant in mutants)]
    root = Path(tempfile.mkdtemp(prefix="kvm"))
    outcomes: list[tuple[Job, Outcome]] = []
    running: dict[int, tuple[Job, Child]] = {}
    waiting = list(enumerate(jobs))
    while waiting or running:
        while waiting and len(running) < CHILDREN:
            number, job = waiting.pop(0)
            child = _start(root / str(number), job)
            running[child.pid] = (job, child)
        ended, outcome = wait_for_any(child for _, child in running.values())
        job, _ = running.pop(ended.pid)
        outcomes.append((job, outcome))
        console.print(f"[{len(outcomes)}/{len(jobs)}]", _line(job, outcome), markup=False)
        if _is_as_it_should_be(job, outcome):
            shutil.rmtree(ended.folder, ignore_errors=True)
        else:
            console.print(f"    see {ended.folder / 'log'}", markup=False)
    code = report(outcomes, time.monotonic() - began, console)
    if not code:
        shutil.rmtree(root, ignore_errors=True)
    return code


def _start(folder: Path, job: Job) -> Child:
    if job.mutant is None:
        return start(folder, job.tests, [], limit=CONTROL_LIMIT_SECONDS, exit_first=False)
    edits = list(job.mutant.edits)
    return start(folder, job.tests, edits, limit=LIMIT_SECONDS, exit_first=True)


def _is_as_it_should_be(job: Job, outcome: Outcome) -> bool:
    return outcome.passed if job.mutant is None else outcome.caught_by is not None


def _line(job: Job, outcome: Outcome) -> str:
    seconds = f"{outcome.seconds:.1f} s"
    if job.mutant is None:
        failed = ", ".join(failure.test for failure in outcome.failures)
        return f"{job.name}: {outcome.verdict()}, {seconds} {failed}"
    caught = outcome.caught_by
    if caught is None:
        return f"{job.name}: NOT CAUGHT ({outcome.verdict()}), {seconds}"
    return f"{job.name}: {_short(caught.test)} ({caught.phase}), {seconds}: {caught.message[:90]}"


def _short(test: str) -> str:
    return test.removeprefix("tests/")


def report(outcomes: Sequence[tuple[Job, Outcome]], seconds: float, console: Console) -> int:
    """The table and the counts; 1 if anything is not as it should be."""
    table = Table(title="mutants")
    for column in ("mutant", "layer", "caught by", "simulated", "seconds"):
        table.add_column(column, overflow="fold")
    simulated = caught_mutants = 0
    bad: list[str] = []
    for job, outcome in outcomes:
        if not _is_as_it_should_be(job, outcome):
            bad.append(f"{job.name} ({outcome.verdict()})")
        if job.mutant is None:
            continue
        caught = outcome.caught_by
        in_engine = caught is not None and _short(caught.test).startswith(SIMULATED)
        simulated += in_engine
        caught_mutants += caught is not None
        by = _short(caught.test) if caught is not None else f"NOT CAUGHT: {outcome.verdict()}"
        took = f"{outcome.seconds:.1f}"
        table.add_row(job.name, job.mutant.layer, escape(by), "yes" if in_engine else "", took)
    console.print(table)
    total = sum(job.mutant is not None for job, _ in outcomes)
    console.print(
        f"{caught_mutants} of {total} mutants are caught, {simulated} of them by the simulated "
        f"engine; {seconds:.0f} s",
        markup=False,
    )
    if total == len(MUTANTS) and simulated < LEAST_SIMULATED:
        bad.append(f"the simulated engine catches {simulated}, fewer than {LEAST_SIMULATED}")
    for sentence in bad:
        console.print(f"NOT AS IT SHOULD BE: {sentence}", markup=False)
    return 1 if bad else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.only or any(part in mutant.name for part in arguments.only)
    ]
    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.list:
        for mutant in chosen:
            console.print(f"{mutant.name} ({mutant.layer}): {mutant.why}", markup=False)
        return 0
    if not chosen:
        console.print(f"no mutant is called like {arguments.only}", markup=False)
        return 1
    return run_all(chosen, console)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's libraries complain at an orderly end, because they were never used
