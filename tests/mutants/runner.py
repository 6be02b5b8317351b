"""Runs a subset of the suite in a forked child with a mutant in it, and says what became of it.

The parent imports what is expensive (vLLM) once and never kvledger; each child imports kvledger
with the change made, and so do the processes that its tests start.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import mutant_hook
import pytest
from mutant import SIMULATED

TESTS = Path(__file__).parents[1]
SITE = Path(__file__).parent / "site"


DEADLINE_SECONDS = 5.0
"""Liveness bound of the tests' own polls in a child: a leak is waited for in vain."""
LIMIT_SECONDS = 60.0
"""Of one child; one that takes longer has caught nothing."""
CONTROL_LIMIT_SECONDS = 600.0
GRACE_SECONDS = 15.0
"""A child that has been told to stop may take so long to end its servers."""
USUAL_SECONDS = "DEADLINE_SECONDS"
"""Name of the liveness bound in the modules of the tests."""
ENGINE_SECONDS = "deadline_seconds"
"""Name of the bound within which a simulated engine must become idle."""


@dataclass
class Failure:
    """A test that failed.

    Attributes:
        test: its node id.
        phase: setup, call or teardown.
        message: the first line of what it said.
    """

    test: str
    phase: str
    message: str


@dataclass
class Outcome:
    """What pytest has said in a child.

    Attributes:
        code: pytest's exit code; None if there is none.
        collected: number of tests.
        failures: of tests.
        trouble: why there is no outcome to speak of: not collected, crashed, took too long.
        seconds: how long it took.
    """

    code: int | None = None
    collected: int = 0
    failures: list[Failure] = field(default_factory=list)
    trouble: str = ""
    seconds: float = 0.0

    @property
    def caught_by(self) -> Failure | None:
        """The test that has failed; a fixture that could not even be made does not count."""
        if self.code != pytest.ExitCode.TESTS_FAILED or self.trouble:
            return None
        return next((f for f in self.failures if f.phase != "setup"), None)

    @property
    def passed(self) -> bool:
        """Whether there were tests and all of them passed."""
        return self.code == pytest.ExitCode.OK and self.collected > 0 and not self.trouble

    def verdict(self) -> str:
        """For people: why this catches nothing."""
        if self.trouble:
            return self.trouble
        if self.passed:
            return f"{self.collected} tests passed"
        if self.failures:
            return f"{self.failures[0].phase} of {self.failures[0].test} failed"
        return f"pytest ended with {self.code}"


class Recorder:
    """A pytest plugin: shortens the tests' liveness bounds, and notes failures."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._outcome.collected = len(session.items)
        plugins = session.config.pluginmanager.get_plugins()
        for module in {*sys.modules.values(), *plugins}:
            path = getattr(module, "__file__", None) or ""
            if path.startswith(str(TESTS)) and hasattr(module, USUAL_SECONDS):
                setattr(module, USUAL_SECONDS, DEADLINE_SECONDS)
        engine = sys.modules.get("kvledger.sim.engine")
        if engine is not None:
            engine.SimulatedEngine.run.__kwdefaults__[ENGINE_SECONDS] = 2 * DEADLINE_SECONDS

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcome.trouble = f"{report.nodeid} could not be collected"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr)
            first = next(iter(text.strip().splitlines()), "")
            self._outcome.failures.append(Failure(report.nodeid, str(report.when), first[:200]))


def preload(tests: Iterable[str]) -> None:
    """Import what the children need and what is not ours, as far as it is expensive."""
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import numpy  # noqa: F401

    if any(test.startswith((SIMULATED, "test_vllm", "test_sim")) for test in tests):
        import torch  # noqa: F401
        import vllm.config
        import vllm.v1.core.sched.async_scheduler
        import vllm.v1.core.sched.scheduler  # noqa: F401
    ours = [name for name in sys.modules if name.split(".")[0] == "kvledger"]
    assert not ours, f"too early to be changed: {ours}"
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------- one child


@dataclass
class Child:
    """A running child.

    Attributes:
        pid: its process.
        folder: everything that it writes.
        deadline: monotonic time at which it is killed.
        started: when it was forked.
    """

    pid: int
    folder: Path
    deadline: float
    started: float


def start(
    folder: Path, tests: Iterable[str], edits: mutant_hook.Edits, *, limit: float, exit_first: bool
) -> Child:
    """Fork a child that runs these tests with these edits; it writes only into ``folder``."""
    folder.mkdir()
    now = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        try:
            _run(folder, list(tests), edits, limit, exit_first)
        finally:
            os._exit(1)
    return Child(pid, folder, now + limit + GRACE_SECONDS, now)


def _run(
    folder: Path, tests: list[str], edits: mutant_hook.Edits, limit: float, exit_first: bool
) -> None:
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    path = [str(SITE), str(TESTS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ[mutant_hook.VARIABLE] = json.dumps(edits)
    sys.path.insert(0, str(TESTS))
    from hypothesis.configuration import set_hypothesis_home_dir

    set_hypothesis_home_dir(folder)
    mutant_hook.install(edits)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit)
    outcome = Outcome()
    arguments = [str(TESTS / test) for test in tests]
    arguments += ["-q", "-p", "no:cacheprovider", f"--basetemp={folder / 't'}"]
    arguments += [f"--rootdir={TESTS.parent}"] + ["-x"] * exit_first
    code = pytest.main(arguments, plugins=[Recorder(outcome)])
    signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.code = int(code)
    if code == pytest.ExitCode.INTERRUPTED and not outcome.trouble:
        outcome.trouble = f"took more than {limit:.0f} s"
    (folder / "outcome").write_text(json.dumps(asdict(outcome)))
    os._exit(0)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt("the time is over")  # pytest ends fixtures, and so servers, in order


def wait_for_any(children: Iterable[Child]) -> tuple[Child, Outcome]:
    """The next child to end, with its outcome; what it has left running is ended."""
    watched = list(children)
    while True:
        for child in watched:
            ended, status = os.waitpid(child.pid, os.WNOHANG)
            if ended or time.monotonic() > child.deadline:
                outcome = _outcome(child, status if ended else None)
                outcome.seconds = time.monotonic() - child.started
                return child, outcome
        time.sleep(0.02)


def _outcome(child: Child, status: int | None) -> Outcome:
    if status is None:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    _end_leftovers(child.folder)
    written = child.folder / "outcome"
    if status is None:
        return Outcome(trouble="did not stop when it was told to")
    if not written.exists():
        return Outcome(trouble=f"crashed (wait status {status}), see {child.folder / 'log'}")
    fields: dict[str, Any] = json.loads(written.read_text())
    failures = [Failure(**failure) for failure in fields.pop("failures")]
    return Outcome(**fields, failures=failures)


def _end_leftovers(folder: Path) -> None:
    """Kill processes that the child's tests have started and not ended: they have its TMPDIR."""
    mark = f"TMPDIR={folder}\0".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is somebody else's
