"""Random schedules without end, or until a number of steps: `make soak`.

Every plan in turn, each time with another seed, in several processes. A failure is shrunk and
printed with the command that plays it again.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated

import typer
from life import Life, Servers
from plans import PLANS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvledger.sim.play import ScheduleFailure, play, shrink
from kvledger.sim.schedule import Action, from_text, generate

ACTIONS = 3000
"""Of one schedule."""
SHRINK_SECONDS = 120.0
ENDING = threading.Event()
"""This process was told to end."""
LAST_ROUND_SECONDS = 120.0
"""A round takes seconds, and one that is stuck twice a liveness bound of the checks."""


@dataclass(frozen=True)
class Round:
    """One schedule that was played.

    Attributes:
        failure: what went wrong; empty if nothing did.
        actions: the schedule up to there, as text; empty if nothing did.
    """

    plan: str
    seed: int
    seconds: float
    statistics: Counter[str]
    failure: str = ""
    actions: str = ""

    @property
    def replay(self) -> str:
        """The command that plays a failure again."""
        arguments = f'--plan {self.plan} --seed {self.seed} --replay "{self.actions}"'
        return f"make soak SOAK_ARGS='{arguments}'"

    def __str__(self) -> str:
        return f"{self.plan} {self.failure}\nreplay:\n  {self.replay}"


def play_round(servers: Servers, plan: str, seed: int, count: int = ACTIONS) -> Round:
    """Play one random schedule of a plan."""
    mix, engines = PLANS[plan].mix, PLANS[plan].engines
    return play_actions(servers, plan, seed, list(generate(seed, count, mix, engines=engines)))


def play_actions(servers: Servers, plan: str, seed: int, actions: Sequence[Action]) -> Round:
    """Play a schedule."""
    started = time.monotonic()
    try:
        statistics = play(lambda: Life(servers, plan, seed), seed, _until_the_end(actions))
    except ScheduleFailure as error:
        seconds = time.monotonic() - started
        return Round(plan, seed, seconds, Counter(), str(error), error.text)
    return Round(plan, seed, time.monotonic() - started, statistics)


def _until_the_end(actions: Sequence[Action]) -> Iterator[Action]:
    """Between two actions there is no server that nobody knows yet: a good place to end."""
    for action in actions:
        if ENDING.is_set():
            sys.exit()
        yield action


def shortest(servers: Servers, failed: Round) -> Round:
    """The failure again with fewer actions; ``failed`` itself if it does not come again."""

    def stage() -> Life:
        return Life(servers, failed.plan, failed.seed)

    try:
        play(stage, failed.seed, from_text(failed.actions))
    except ScheduleFailure as error:
        found = shrink(stage, error, max_tries=100, max_seconds=SHRINK_SECONDS)
        return Round(failed.plan, failed.seed, 0.0, Counter(), str(found), found.text)
    return failed


def _work(
    results: Connection,
    plans: list[str],
    first_seed: int,
    stride: int,
    count: int,
) -> None:
    """A process: round after round until it is told to end, or nobody listens."""
    signal.signal(signal.SIGTERM, lambda *_: ENDING.set())
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("kvledger").setLevel(logging.CRITICAL)  # faults are what it is about
    with Servers() as servers, suppress(BrokenPipeError, KeyboardInterrupt):
        for seed, plan in zip(
            itertools.count(first_seed, stride), itertools.cycle(plans), strict=False
        ):
            results.send(play_round(servers, plan, seed, count))


class Soak:
    """Some processes that play, and the sum of what they met.

    Attributes:
        total: statistics over all rounds.
        by_plan: statistics of each plan.
        failures: rounds that failed.
        seconds: since the start.
    """

    def __init__(self, plans: list[str], seed: int, jobs: int, count: int = ACTIONS) -> None:
        self.plans = plans
        self.seed = seed
        self.total: Counter[str] = Counter()
        self.by_plan: dict[str, Counter[str]] = {plan: Counter() for plan in plans}
        self.failures: list[Round] = []
        self._started = time.monotonic()
        self._jobs = []
        # Not forked: torch's threads do not survive that, and a child would wait for them for ever.
        context = multiprocessing.get_context("spawn")
        for job in range(jobs):
            ours, theirs = context.Pipe(duplex=False)
            turned = plans[job * len(plans) // jobs :] + plans[: job * len(plans) // jobs]
            arguments = (theirs, turned, seed + job, jobs, count)
            process = context.Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            self._jobs.append((process, ours))

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def next_rounds(self, timeout: float = 1.0) -> None:
        """Add rounds that have ended meanwhile to the sums."""
        self._receive([pipe for _, pipe in self._jobs], timeout)

    def last_rounds(self) -> None:
        """Wait for the round that each process plays now: it may be stuck, which is a finding."""
        end = time.monotonic() + LAST_ROUND_SECONDS
        missing = [pipe for _, pipe in self._jobs]
        while missing and time.monotonic() < end and not self.failures:
            heard = self._receive(missing, 1.0)
            missing = [pipe for pipe in missing if pipe not in heard]

    def _receive(self, pipes: list[Connection], timeout: float) -> list[Connection]:
        """Add a round from each of these that has one; which they were."""
        ready = wait(pipes, timeout)
        heard = [pipe for pipe in pipes if pipe in ready]
        for pipe in heard:
            try:
                played: Round = pipe.recv()
            except EOFError:
                raise RuntimeError("a process of the soak has ended") from None
            for counts in (self.total, self.by_plan[played.plan]):
                counts.update(played.statistics)
                counts["rounds"] += 1
            if played.failure:
                self.failures.append(played)
        return heard

    def close(self) -> None:
        """End the processes; a round under way comes to nothing."""
        for process, _ in self._jobs:
            process.terminate()
        for process, pipe in self._jobs:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


# ---------------------------------------------------------------- the command

SHOWN = {
    "computing steps": "steps",
    "accounts": "requests",
    "preempted": "preempted",
    "load_finished": "loads",
    "load_failed": "failed",
    "rejected drafts": "rejected",
    "evicted": "evicted",
}
"""What is counted, and its heading while the soak runs."""


def counters(soak: Soak) -> Table:
    """The sums, plan by plan."""
    table = _table("plan", *SHOWN.values())
    table.title = f"{soak.seconds:.0f} s, seed {soak.seed}"
    for name, counts in [*soak.by_plan.items(), ("all", soak.total)]:
        table.add_row(name, *(f"{counts[word]:,}" for word in SHOWN))
    return table


def _table(first: str, *others: str) -> Table:
    """Eighty columns are enough for it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def met(total: Counter[str]) -> Table:
    """Everything that was counted, with the distribution of fates and reasons."""
    table = _table("what", "count", "share")
    table.title = "all that was met"
    chunks = sum(count for word, count in total.items() if word.startswith("fate "))
    for word, count in sorted(total.items()):
        share = f"{100 * count / chunks:.3f} %" if word.startswith("fate ") else ""
        table.add_row(word, f"{count:,}", share)
    table.add_row("fates in all = full blocks of all accounts", f"{chunks:,}", "")
    return table


def owed(soak: Soak) -> Table:
    """What requests owed when they ended, and what became of it."""
    columns = ("ends", "ends that owe, by themselves", "ends that owe, behind another")
    fates = ("stored", "present", "skipped")
    headings = ("ends", "that owe", "behind another", *(f"then {fate}" for fate in fates))
    table = _table("plan", *headings)
    table.title = "full blocks owed at the end of a request"
    for name, counts in soak.by_plan.items():
        became = dict.fromkeys(fates, 0)
        for word, count in counts.items():
            if word.startswith("owed at the end: "):
                became[word.removeprefix("owed at the end: ").partition(":")[0]] += count
        numbers = [*(counts[word] for word in columns), *became.values()]
        table.add_row(name, *(f"{number:,}" for number in numbers))
    return table


def main(
    plan: Annotated[list[str], typer.Option(help="only these kinds of life")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="first seed; 0 draws one")] = 0,
    steps: Annotated[int, typer.Option(help="computing steps to do; 0: no end")] = 0,
    minutes: Annotated[float, typer.Option(help="how long, but a round at least; 0: no end")] = 0.0,
    jobs: Annotated[int, typer.Option(help="processes")] = os.cpu_count() or 1,
    replay: Annotated[str, typer.Option(help="a schedule to play, instead of random ones")] = "",
) -> None:
    """Play random schedules on the simulated engine until something breaks."""
    console = Console()
    seed = seed or random.SystemRandom().randrange(1, 1 << 30)
    unknown = [name for name in plan if name not in PLANS]
    if unknown:
        raise typer.BadParameter(
            f"no {unknown[0]!r}; there are {', '.join(PLANS)}", param_hint="--plan"
        )
    if replay:
        _replay(console, plan, seed, replay)
    soak = Soak(plan or list(PLANS), seed, jobs)
    try:
        with Live(counters(soak), console=console, refresh_per_second=1) as live:
            while not soak.failures:
                soak.next_rounds()
                live.update(counters(soak))
                if steps and soak.total["computing steps"] >= steps:
                    break
                if minutes and soak.seconds >= 60 * minutes:
                    break
            soak.last_rounds()
            live.update(counters(soak))
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        soak.close()
    console.print("\n", owed(soak), met(soak.total))
    for played in soak.failures:
        _print(console, played)
    for played in soak.failures[:1]:
        console.print(f"shrinking it, for {SHRINK_SECONDS:.0f} s at most")
        with Servers() as servers:
            _print(console, shortest(servers, played))
    raise typer.Exit(bool(soak.failures))


def _replay(console: Console, plan: list[str], seed: int, schedule: str) -> None:
    if len(plan) != 1:
        raise typer.BadParameter("--replay wants exactly one --plan, and the --seed it came with")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    with Servers() as servers:
        played = play_actions(servers, plan[0], seed, from_text(schedule))
    if played.failure:
        _print(console, played)
    else:
        console.print(met(played.statistics))
    raise typer.Exit(bool(played.failure))


def _print(console: Console, played: Round) -> None:
    console.print(str(played), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    typer.run(main)
