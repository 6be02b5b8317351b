"""Random life: arrivals, aborts, resets, single phases, and a server that is disturbed.

Every schedule comes from a seed, which a failure prints with the command that replays it. While
it plays, the byte oracle looks at everything; at its end the standing checks are asked.

    KVLEDGER_SEED=17 pytest tests/sim/test_random.py -k drafts
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from books import World, count_events, wait_until
from sim_server import Server

from kvledger.sim import Kind, SimulatedEngine
from kvledger.sim.schedule import Do, Mix, Player, generate
from kvledger.vllm.transfer import TransferError

EVENTS_SHOWN = 40
ROUND = 300
"""Actions between two checks of the books: the server keeps the newest thousand accounts."""
FIRST_SEED = int(os.environ.get("KVLEDGER_SEED", "1"))


TINY = {"num_blocks": 30, "max_batched_tokens": 48}
BUSY = Mix(add=120, own=60, max_tokens=48)
RESETS = Mix(add=120, own=60, max_tokens=48, reset=8, weights=4)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One kind of life.

    Attributes:
        engine: fields of the simulated engine.
        options: options of the connector.
        mix: the actions.
        engines: engines that play side by side on one server.
        small: on a server that is soon full.
        failing: copies in a thousand that fail, loads and stores alike.
        disturbing: actions in a thousand at which the server is killed, replaced, stopped or
            continued.
        late: no step waits for its slots.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    mix: Mix = BUSY
    engines: int = 1
    small: bool = False
    failing: int = 0
    disturbing: int = 0
    late: bool = False


PLANS: dict[str, Plan] = {
    "sync": Plan(engine={"num_blocks": 64, "pickle_metadata": True}),
    "async": Plan(engine={"num_blocks": 64, "async_scheduling": True}),
    "tiny": Plan(engine=TINY, options={"chunk_tokens": 32}),
    "tiny-async": Plan(engine={**TINY, "async_scheduling": True, "model_runner": 2}),
    "drafts": Plan(engine={**TINY, "drafts": 3}, options={"chunk_tokens": 32}),
    "drafts-async": Plan(
        engine={"num_blocks": 48, "drafts": 4, "async_scheduling": True, "model_runner": 2}
    ),
    "ranks": Plan(engine={"num_blocks": 48, "ranks": 2}, options={"chunk_tokens": 64}),
    "late": Plan(engine={**TINY, "drafts": 2, "async_scheduling": True}, late=True),
    "resets": Plan(engine={"num_blocks": 48}, mix=RESETS),
    "resets-async": Plan(
        engine={"num_blocks": 48, "ranks": 2, "async_scheduling": True}, mix=RESETS
    ),
    "pair": Plan(engine={"num_blocks": 40}, engines=2, options={"chunk_tokens": 32}),
    "full": Plan(
        engine={"num_blocks": 64, "layers": 4, "heads": 16, "max_batched_tokens": 128},
        options={"chunk_tokens": 64},
        mix=Mix(add=120, families=24, salts=6, reset=20),
        small=True,
    ),
    "full-pair": Plan(
        engine={"num_blocks": 64, "layers": 4, "heads": 16, "async_scheduling": True},
        options={"chunk_tokens": 64},
        mix=Mix(add=120, families=24, salts=6, reset=20),
        engines=2,
        small=True,
    ),
    "failing": Plan(
        engine={**TINY, "ranks": 2}, failing=60, mix=Mix(add=120, own=60, max_tokens=48, reset=20)
    ),
    "faults": Plan(engine={"num_blocks": 40, "ranks": 2}, disturbing=6, failing=20),
    "faults-async": Plan(
        engine={**TINY, "async_scheduling": True, "drafts": 2}, disturbing=6, failing=20
    ),
}


class Life:
    """One schedule on its way."""

    def __init__(self, world: World, plan: Plan, seed: int) -> None:
        self.world = world
        self.plan = plan
        self.statistics: Counter[str] = Counter()
        self._rng = random.Random(f"faults {seed}")
        options = dict(plan.options)
        if plan.disturbing:
            options |= {"lookup_deadline_ms": 50.0, "load_deadline_ms": 500.0}
        self.engines = [
            world.engine(options=options, seed=seed + number, **plan.engine)
            for number in range(plan.engines)
        ]
        self.players = [Player(engine, seed, plan.mix) for engine in self.engines]
        if plan.failing:
            for engine in self.engines:
                self._let_copies_fail(engine)

    def play(self, seed: int, count: int) -> None:
        """Apply ``count`` actions to each engine, in turn."""
        schedules = [generate(seed + n, count, self.plan.mix) for n in range(len(self.players))]
        for index, actions in enumerate(itertools.zip_longest(*schedules)):
            if self._rng.randrange(1000) < self.plan.disturbing:
                self._disturb()
            for player, action in zip(self.players, actions, strict=True):
                player.apply(action)
                self.statistics[action.do] += 1
            if index % ROUND == ROUND - 1 or actions[0].do is Do.CHECK:
                self._check()
        self._calm()

    def _check(self) -> None:
        """The standing checks, if the server can be asked; then old requests are forgotten."""
        if self.world.server.is_up and not self.plan.disturbing:
            for engine in self.engines:
                if not engine.waits_for_workers:
                    self.world.check_engine(engine)
                    engine.forget_finished()

    def _calm(self) -> None:
        """Let everything come back and end the accounts."""
        server = self.world.server
        server.resume()
        if not server.is_up:
            server.start()
        for engine in self.engines:
            self.world.attach(engine)
            self.world.settle(engine)
            scheduler = engine.connector.scheduler
            self.statistics.update(scheduler.accounts.totals)
            self.statistics["steps"] += engine.step_count
            self.statistics["failed loads"] += scheduler.accounts.failed_loads
            for kind in (Kind.PREEMPTED, Kind.LOAD_FINISHED, Kind.ABORTED):
                self.statistics[kind] += count_events(engine, kind)
        self.statistics["evicted"] += server.totals()["evicted"]

    def _disturb(self) -> None:
        server = self.world.server
        what = self._rng.choice(
            ("pause", "resume", "resume", "replace", "replace", "kill", "start", "start")
        )
        self.statistics[f"server: {what}"] += 1
        if what == "pause":
            server.pause()
        elif what == "resume":
            server.resume()
        elif what == "kill":
            server.kill()
        elif what == "replace":
            server.replace()
        elif not server.is_running:
            server.start()

    def _let_copies_fail(self, engine: SimulatedEngine) -> None:
        for rank in engine.workers.ranks:
            worker = rank.connector.worker
            make_transfer = worker._make_transfer

            def make_failing(connection: Any, make: Any = make_transfer) -> Any:
                return self._failing(make(connection))

            worker._make_transfer = make_failing
            attachment = worker._attachment
            if attachment is not None:
                self._failing(attachment.transfer)

    def _failing(self, transfer: Any) -> Any:
        for name in ("load", "store"):
            copy = getattr(transfer, name)

            def fail_at_random(*arguments: Any, copy: Any = copy) -> int:
                if self._rng.randrange(1000) < self.plan.failing:
                    raise TransferError("a copy that the schedule lets fail")
                return int(copy(*arguments))

            setattr(transfer, name, fail_at_random)
        return transfer


def run_plan(world: World, name: str, seed: int, count: int) -> Counter[str]:
    """Play one schedule with the standing checks; a failure says how to play it again."""
    life = Life(world, PLANS[name], seed)
    try:
        life.play(seed, count)
        world.check()
    except Exception as error:
        log = "\n".join(str(e) for e in list(life.engines[0].events)[-EVENTS_SHOWN:])
        again = f"KVLEDGER_SEED={seed} pytest tests/sim/test_random.py -k {name}"
        raise AssertionError(f"{error}\nlast events:\n{log}\nreplay: {again}") from error
    for engine in list(world.engines):
        world.engines.remove(engine)
        engine.close()
    return life.statistics


@pytest.fixture
def make_world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes a world with a server of its own, which may be disturbed."""
    servers: list[Server] = []

    def make(plan: Plan, name: str) -> World:
        server = Server(tmp_path, "16MiB" if plan.small else "64MiB")
        servers.append(server)
        server.start()
        world = World(server, name)
        world.lossy = bool(plan.disturbing)
        return world

    del request
    yield make
    for server in servers:
        server.close()


def impatient(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own bounds where the server is disturbed."""
    if plan.disturbing:
        monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 1e-3)
        monkeypatch.setattr("kvledger.vllm.scheduler_side.LAST_WAIT_SECONDS", 10e-3)
        monkeypatch.setattr("kvledger.vllm.lookups.FIRST_WAIT_SECONDS", 300e-6)
        monkeypatch.setattr("kvledger.vllm.assembly.SILENCE_SECONDS", 0.1)
        monkeypatch.setattr("kvledger.vllm.scheduler_side.IDLE_WAIT_SECONDS", 10e-3)
    if plan.late:
        monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 0.0)


def assert_plausible(plan: Plan, statistics: Counter[str]) -> None:
    """The schedule has done what it is for."""
    assert statistics["stored"] > 0
    assert statistics["loaded"] > 0
    if plan.engine.get("num_blocks", 64) <= 30:
        assert statistics[Kind.PREEMPTED] > 0
    if plan.failing and not plan.disturbing:
        assert statistics["failed loads"] > 0
    if plan.small:
        assert statistics["evicted"] > 0
    calm = not (plan.failing or plan.disturbing or plan.small or plan.mix.weights)
    if calm:
        skipped = {fate for fate in statistics if fate.startswith("skipped")}
        expected = {"skipped:epoch_changed"}
        if plan.late or plan.engines > 1:
            # The last chance of a request can fall into another one's write of the same chunk;
            # what hangs on that chunk is then refused too.
            expected |= {"skipped:being_written", "skipped:parent_missing"}
        assert skipped <= expected, statistics


def show(name: str, seed: int, seconds: float, statistics: Counter[str]) -> None:
    words = ", ".join(f"{key}: {count}" for key, count in sorted(statistics.items()))
    print(f"{name} seed {seed}: {seconds:.1f} s; {words}")


@pytest.mark.parametrize("name", PLANS)
def test_random(name: str, make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand actions of every kind of life."""
    plan = PLANS[name]
    impatient(plan, monkeypatch)
    started = time.perf_counter()
    count = 4000 // plan.engines
    statistics = run_plan(make_world(plan, f"{name} {FIRST_SEED}"), name, FIRST_SEED, count)
    show(name, FIRST_SEED, time.perf_counter() - started, statistics)
    assert_plausible(plan, statistics)


@pytest.mark.full
@pytest.mark.parametrize("name", PLANS)
def test_random_for_long(name: str, make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a cup of coffee: new seeds until the time of each kind is used up."""
    plan = PLANS[name]
    impatient(plan, monkeypatch)
    world = make_world(plan, name)
    end = time.monotonic() + 360 / len(PLANS)
    total: Counter[str] = Counter()
    for seed in itertools.count(FIRST_SEED + 1000):
        started = time.perf_counter()
        world.namespace = f"{name} {seed}"
        statistics = run_plan(world, name, seed, 3000 // plan.engines)
        show(name, seed, time.perf_counter() - started, statistics)
        total += statistics
        if time.monotonic() > end:
            break
    assert_plausible(plan, total)
    wait_until(lambda: world.server.totals()["leases"] == 0, "nothing is leased")
