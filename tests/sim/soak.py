"""Random schedules without end, or until a number of steps: `make soak`.

Every plan in turn, each time with another seed, in several processes. A failure is shrunk and
printed with the command that plays it again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
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

from kvledger.sim.play import MakeStage, ScheduleFailure, play, shrink
from kvledger.sim.schedule import Action, from_text, generate

ACTIONS = 3000
"""Of one schedule."""
SHRINK_SECONDS = 120.0


@dataclass(frozen=True)
class Round:
    """One schedule that was played.

    Attributes:
        failure: what went wrong, with the command that plays it again; empty if nothing did.
    """

    plan: str
    seed: int
    seconds: float
    statistics: Counter[str]
    failure: str = ""


def play_round(servers: Servers, plan: str, seed: int, count: int = ACTIONS) -> Round:
    """Play one random schedule of a plan."""
    mix, engines = PLANS[plan].mix, PLANS[plan].engines
    return play_actions(servers, plan, seed, list(generate(seed, count, mix, engines=engines)))


def play_actions(servers: Servers, plan: str, seed: int, actions: list[Action]) -> Round:
    """Play a schedule; a failure is shrunk."""
    started = time.monotonic()

    def stage() -> Life:
        return Life(servers, plan, seed)

    try:
        statistics = play(stage, seed, actions)
    except ScheduleFailure as failure:
        return Round(
            plan, seed, time.monotonic() - started, Counter(), _explain(stage, failure, plan)
        )
    return Round(plan, seed, time.monotonic() - started, statistics)


def _explain(stage: MakeStage, failure: ScheduleFailure, plan: str) -> str:
    shortest = shrink(stage, failure, max_tries=100, max_seconds=SHRINK_SECONDS)
    return (
        f"{shortest}\n"
        f"of {len(failure.actions)} actions these {len(shortest.actions)} are enough; replay:\n"
        f"  make soak SOAK_ARGS='--plan {plan} --seed {failure.seed} --replay \"{shortest.text}\"'"
    )


def _work(
    results: Connection,
    parents: list[Connection],
    plans: list[str],
    first_seed: int,
    stride: int,
    count: int,
) -> None:
    """A process: round after round until nobody listens."""
    for pipe in parents:  # else we would hold the ends at which the others are listened to
        pipe.close()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("kvledger").setLevel(logging.CRITICAL)  # faults are what it is about
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        servers = Servers(Path(directory))
        try:
            seed = first_seed
            while True:
                for plan in plans:
                    results.send(play_round(servers, plan, seed, count))
                    seed += stride
        except (BrokenPipeError, KeyboardInterrupt):
            pass
        finally:
            servers.close()


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
        context = multiprocessing.get_context("fork")
        for job in range(jobs):
            ours, theirs = context.Pipe(duplex=False)
            turned = plans[job * len(plans) // jobs :] + plans[: job * len(plans) // jobs]
            parents = [ours, *(pipe for _, pipe in self._jobs)]
            arguments = (theirs, parents, turned, seed + job, jobs, count)
            process = context.Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            self._jobs.append((process, ours))

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def next_rounds(self, timeout: float = 1.0) -> list[Round]:
        """Rounds that have ended meanwhile, added to the sums."""
        rounds = []
        for pipe in wait([pipe for _, pipe in self._jobs], timeout):
            assert isinstance(pipe, Connection)
            try:
                rounds.append(pipe.recv())
            except EOFError:
                raise RuntimeError("a process of the soak has ended") from None
        for played in rounds:
            self.total += played.statistics
            self.total["rounds"] += 1
            self.by_plan[played.plan] += played.statistics
            self.by_plan[played.plan]["rounds"] += 1
            if played.failure:
                self.failures.append(played)
        return rounds

    def close(self) -> None:
        """End the processes; a round under way comes to nothing."""
        for _, pipe in self._jobs:
            pipe.close()
        for process, _ in self._jobs:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()


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
    minutes: Annotated[float, typer.Option(help="how long; 0: no end")] = 0.0,
    jobs: Annotated[int, typer.Option(help="processes")] = os.cpu_count() or 1,
    replay: Annotated[str, typer.Option(help="a schedule to play, instead of random ones")] = "",
) -> None:
    """Play random schedules on the simulated engine until something breaks."""
    console = Console()
    seed = seed or random.SystemRandom().randrange(1, 1 << 30)
    if replay:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory(prefix="soak-") as directory:
            servers = Servers(Path(directory))
            played = play_actions(servers, plan[0], seed, from_text(replay))
            servers.close()
        console.print(met(played.statistics) if not played.failure else played.failure)
        raise typer.Exit(bool(played.failure))
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
    except KeyboardInterrupt:
        pass
    finally:
        soak.close()
    console.print(owed(soak), met(soak.total))
    for played in soak.failures:
        console.print(f"[red]{played.plan} seed {played.seed}[/red]")
        console.print(played.failure, markup=False, soft_wrap=True)
    raise typer.Exit(bool(soak.failures))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    typer.run(main)
