"""Negative controls: known bugs, put into our own code, are seen by the simulated engine.

Each mutant comes with a scenario that it spoils. The scenario passes with the code as it is, and
must fail with the mutant: by the byte oracle, by the books, or by the server's counters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import books
import pytest
from books import World, text
from mutant_scenarios import (
    aborted_in_the_queue,
    edges,
    evicted_while_loading,
    failing_load,
    late_ends,
    new_weights,
    preempted_while_owing,
    ranks_and_layout,
    replaced_server,
    slot_of_a_failed_rank,
    slow_rank,
    two_rounds,
)
from sim_server import Server

from kvledger.lab import server as lab_server
from kvledger.ledger import Account
from kvledger.sim import SimulatedEngine
from kvledger.vllm.loads import Loads
from kvledger.vllm.lookups import Lookups
from kvledger.vllm.policy import RequestPolicy
from kvledger.vllm.scheduler_side import SchedulerSide
from kvledger.vllm.stores import Stores
from kvledger.vllm.worker_side import Attachment, WorkerSide

Mutate = Callable[[pytest.MonkeyPatch], None]
Scenario = Callable[[World], None]

# ---------------------------------------------------------------- mutants of the engine's side


def stores_the_last_sampled_token(patch: pytest.MonkeyPatch) -> None:
    """The finished request's last token was never fed; its slot holds anything."""
    finished = SchedulerSide.finished

    def mutant(self: SchedulerSide, request: Any, table: Any, *, aborted: bool) -> None:
        tracked = self.live.get(request.request_id)
        if tracked is not None and tracked.load is None:
            self._advance(tracked, request.num_tokens, table)
        finished(self, request, table, aborted=aborted)

    patch.setattr(SchedulerSide, "finished", mutant)


def believes_a_failed_load(patch: pytest.MonkeyPatch) -> None:
    answer = WorkerSide._answer

    def mutant(self: WorkerSide, request_id: str, *, arrived: bool) -> None:
        answer(self, request_id, arrived=arrived or bool(request_id))

    patch.setattr(WorkerSide, "_answer", mutant)


def ignores_the_boot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attachment, "has_given", lambda _self, _given: True)


def releases_the_lease_at_once(patch: pytest.MonkeyPatch) -> None:
    begin = Loads.begin

    def mutant(self: Loads, tracked: Any, table: Any, external_tokens: int) -> None:
        begin(self, tracked, table, external_tokens)
        # The slots are known by then; the lease is not held until they have been read.
        load = tracked.load
        self._channel.wait_until(lambda: load.offsets is not None, 5.0, trip=False)
        mutant.lookups.release(tracked.lookup)

    allocated = SchedulerSide.allocated

    def remember(self: SchedulerSide, *arguments: Any) -> None:
        mutant.lookups = self.lookups
        allocated(self, *arguments)
        self.lookups.flush()

    patch.setattr(Loads, "begin", mutant)
    patch.setattr(SchedulerSide, "allocated", remember)


def keeps_the_old_block_table(patch: pytest.MonkeyPatch) -> None:
    """After a preemption the old blocks are still taken for the request's."""

    def mutant(self: Account) -> list[int]:
        kept = dict(self._blocks)
        unused = forget(self)
        self._blocks.update(kept)
        return unused

    forget = Account.forget_blocks
    patch.setattr(Account, "forget_blocks", mutant)


def rescues_too_late(patch: pytest.MonkeyPatch) -> None:
    """What finished and preempted requests owe is read after the step has written."""

    def before_step(self: WorkerSide, _plan: Any) -> None:
        self._poll()
        self.store_planned()

    begin_step = WorkerSide.begin_step
    store_planned = WorkerSide.store_planned

    def begin(self: WorkerSide, plan: Any) -> None:
        begin_step(self, plan)
        self.late_plan = plan

    def store(self: WorkerSide) -> None:
        store_planned(self)
        plan, self.late_plan = getattr(self, "late_plan", None), None
        if plan is not None:
            self._store(plan, plan.rescues)

    patch.setattr(WorkerSide, "before_step", before_step)
    patch.setattr(WorkerSide, "begin_step", begin)
    patch.setattr(WorkerSide, "store_planned", store)


def forgets_the_rescue_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvledger.vllm.accounts.Accounts.to_rescue", lambda _self: [])


def ignores_the_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerSide, "reset", lambda _self: None)


def never_releases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lookups, "flush", lambda _self: None)


def bound_without_the_hit(patch: pytest.MonkeyPatch) -> None:
    """The first founding bug: what was loaded is left out of the upper bound."""
    advance = SchedulerSide._advance

    def mutant(self: SchedulerSide, tracked: Any, valid: int, table: Any) -> None:
        advance(self, tracked, valid - tracked.external_tokens, table)

    patch.setattr(SchedulerSide, "_advance", mutant)


def counts_cumulative_as_incremental(patch: pytest.MonkeyPatch) -> None:
    """The second founding bug: a running sum of absolute numbers."""
    advance = Account.advance

    def mutant(self: Account, valid_tokens: int) -> None:
        self.running_sum = getattr(self, "running_sum", 0) + valid_tokens
        advance(self, self.running_sum)

    patch.setattr(Account, "advance", mutant)


def swaps_the_parts_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """Loads read the first rank's part, whoever asks."""
    copy = WorkerSide._copy_some

    def mutant(self: WorkerSide, load: Any, budget: int) -> int | None:
        right, self._part_offsets = self._part_offsets, [0] * len(self._part_offsets)
        try:
            return copy(self, load, budget)
        finally:
            self._part_offsets = right

    patch.setattr(WorkerSide, "_copy_some", mutant)


def never_loads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestPolicy, "minimum_hit", lambda _self, _local: 1 << 30)


def loses_a_settlement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stores, "settle", lambda _self, _push: None)


ENGINE_MUTANTS: list[tuple[Mutate, Scenario]] = [
    (stores_the_last_sampled_token, edges),
    (believes_a_failed_load, failing_load),
    (ignores_the_boot, replaced_server),
    (releases_the_lease_at_once, evicted_while_loading),
    (keeps_the_old_block_table, preempted_while_owing),
    (rescues_too_late, late_ends),
    (forgets_the_rescue_list, late_ends),
    (ignores_the_reset, new_weights),
    (never_releases, aborted_in_the_queue),
    (bound_without_the_hit, two_rounds),
    (counts_cumulative_as_incremental, two_rounds),
    (swaps_the_parts_of_ranks, ranks_and_layout),
    (never_loads, two_rounds),
    (loses_a_settlement, two_rounds),
]


# ---------------------------------------------------------------- mutants of the server


NO_QUARANTINE = """
from kvledger.catalog import Catalog
def mutant(self, books, reservation):
    self.space.slots.free(reservation.offset)
Catalog._quarantine = mutant
"""

FIRST_COMMIT_COUNTS = """
from kvledger.catalog import Catalog
commit = Catalog.commit
def mutant(self, engine, rank, reservations, now):
    reservations = list(reservations)
    for number in reservations:
        reservation = self.engines[engine].open.get(number)
        if reservation is not None:
            reservation.waiting_ranks &= 1 << rank
    return commit(self, engine, rank, reservations, now)
Catalog.commit = mutant
"""

SERVER_MUTANTS: list[tuple[str, Scenario]] = [
    (NO_QUARANTINE, slot_of_a_failed_rank),
    (FIRST_COMMIT_COUNTS, slow_rank),
]


# ---------------------------------------------------------------- the tests


@pytest.fixture
def make_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Scenario], World]]:
    """Makes a world of its own; a mutant may leave anything behind in it."""
    worlds: list[World] = []

    def make(scenario: Scenario) -> World:
        side = "kvledger.vllm.scheduler_side"
        if scenario in (late_ends, preempted_while_owing):
            monkeypatch.setattr(f"{side}.ANSWER_WAIT_SECONDS", 0.0)
        if scenario is preempted_while_owing:
            monkeypatch.setattr(f"{side}.LAST_WAIT_SECONDS", 0.0)
            monkeypatch.setattr("kvledger.vllm.lookups.FIRST_WAIT_SECONDS", 0.0)
        small = scenario is evicted_while_loading
        server = Server(tmp_path, "16MiB" if small else "64MiB")
        server.start()
        world = World(server, scenario.__name__)
        world.lossy = scenario is replaced_server
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        for engine in world.engines:
            engine.close()
        world.server.close()


def is_caught(world: World, scenario: Scenario) -> str:
    """What the scenario and the standing checks say; empty if they see nothing."""
    try:
        scenario(world)
        world.check()
    except (AssertionError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


SCENARIOS = {scenario for _, scenario in (*ENGINE_MUTANTS, *SERVER_MUTANTS)}


@pytest.mark.parametrize(
    "scenario", sorted(SCENARIOS, key=lambda s: s.__name__), ids=lambda s: s.__name__
)
def test_scenario_passes_without_a_mutant(
    make_world: Callable[[Scenario], World], scenario: Scenario
) -> None:
    assert is_caught(make_world(scenario), scenario) == ""


@pytest.mark.parametrize(
    ("mutate", "scenario"), ENGINE_MUTANTS, ids=[mutate.__name__ for mutate, _ in ENGINE_MUTANTS]
)
def test_mutant_of_the_connector_is_caught(
    make_world: Callable[[Scenario], World],
    monkeypatch: pytest.MonkeyPatch,
    mutate: Mutate,
    scenario: Scenario,
) -> None:
    world = make_world(scenario)
    mutate(monkeypatch)
    monkeypatch.setattr(books, "DEADLINE_SECONDS", 5.0)  # a leak is waited for in vain
    assert is_caught(world, scenario)


@pytest.mark.parametrize(
    ("prologue", "scenario"), SERVER_MUTANTS, ids=["no_quarantine", "first_commit_counts"]
)
def test_mutant_of_the_server_is_caught(
    make_world: Callable[[Scenario], World],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prologue: str,
    scenario: Scenario,
) -> None:
    """The server is a process: the mutant is put into it before it starts to serve."""
    launcher = tmp_path / "launch.sh"
    code = f"{prologue}\nfrom kvledger.cli import main\nmain()"
    (tmp_path / "mutant.py").write_text(code)
    launcher.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path}/mutant.py "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(lab_server.sys, "executable", str(launcher))
    world = make_world(scenario)
    monkeypatch.undo()
    monkeypatch.setattr(books, "DEADLINE_SECONDS", 5.0)
    assert is_caught(world, scenario)


def test_the_oracle_is_not_easily_content() -> None:
    """The scenario of the mutants above does store: an engine without a server stores nothing."""
    with SimulatedEngine(None, num_blocks=64) as engine:
        engine.add(text("control", 160))
        engine.run()
        assert engine.connector is None
