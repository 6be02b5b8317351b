"""A server that is absent, killed, replaced or stopped costs hits and nothing else.

The engine's outputs stay those of a cold engine, its steps stay short, and the next server is used
without a restart.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from books import DEADLINE_SECONDS, World, cold_output, count_events, part_bytes, text, wait_until
from sim_server import Server

from kvledger.sim import Kind, SimulatedEngine

HOOK_BOUND_SECONDS = 0.05
"""What one hook may cost: the longest bound of the scheduler's side is 10 ms, look-ups are not
waited for, and a server that is silent is not asked. Tests allow ten times as much."""


@pytest.fixture
def own_world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose server is not started and may be killed."""
    server = Server(tmp_path)
    world = World(server, request.node.name.replace("[", "-").replace("]", ""))
    world.lossy = True
    failed_before = request.session.testsfailed
    try:
        yield world
        if request.session.testsfailed == failed_before:
            world.check()
    finally:
        for engine in world.engines:
            engine.close()
        server.close()


HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
)


class Stopwatch:
    """Time spent in each hook, measured from outside.

    Attributes:
        seconds: hook name → duration of each call.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.seconds: dict[str, list[float]] = {}
        for name in HOOKS:
            self._wrap(engine.connector, name)
        for rank in engine.workers.ranks:
            for name in WORKER_HOOKS:
                self._wrap(rank.connector, name)

    def _wrap(self, connector: Any, name: str) -> None:
        hook = getattr(connector, name)
        durations = self.seconds.setdefault(name, [])

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*arguments, **keywords)
            finally:
                durations.append(time.perf_counter() - started)

        setattr(connector, name, timed)

    def slowest(self) -> tuple[float, str]:
        """The longest call and its hook."""
        return max((max(times), name) for name, times in self.seconds.items() if times)


def hold_back(engine: SimulatedEngine, rank: int) -> threading.Event:
    """Let a rank's next connections be of use only once the event is set."""
    link = engine.workers.ranks[rank].connector.worker._channel._link
    attempt, gate = link._attempt, threading.Event()

    def attempt_and_dawdle() -> Any:
        made = attempt()
        if made is not None:
            gate.wait(DEADLINE_SECONDS)
        return made

    link._attempt = attempt_and_dawdle
    return gate


def default_deadlines() -> dict[str, float]:
    return {"lookup_deadline_ms": 50.0, "load_deadline_ms": 5000.0}


@pytest.mark.bounds
def test_absent_at_start_then_appears(own_world: World) -> None:
    """Without a server the engine runs; when one appears it is used, without a restart."""
    world = own_world
    engine = world.engine(attached=False, num_blocks=64)
    prompt = text("absent", 160)
    request = engine.add(prompt, max_tokens=5)
    engine.run()
    assert engine.outputs[request] == cold_output(prompt, max_tokens=5)
    totals = engine.connector.scheduler.accounts.totals
    assert dict(totals) == {"skipped:server_absent": 10}
    world.server.start()
    world.attach(engine)
    # What happened without a server can be asked of the first one there is.
    wait_until(lambda: bool(world.server.explain(request)), "the account of before is reported")
    (account,) = world.server.explain(request)
    assert account["fates"] == [["skipped:server_absent", 10]]
    assert account["miss"] == "server_absent"
    for external in (0, 160):
        engine.reset_prefix_cache()
        request = engine.add(prompt, max_tokens=5)
        engine.run()
        assert engine.external_hit(request) == external
        assert engine.outputs[request] == cold_output(prompt, max_tokens=5)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_replaced_in_the_middle(own_world: World, is_async: bool, ranks: int) -> None:
    """What the old server knew is owed again: the new one gets all that is still computable."""
    world = own_world
    world.server.start()
    engine = world.engine(
        num_blocks=256, max_batched_tokens=64, async_scheduling=is_async, ranks=ranks
    )
    prompts = {f"k{n}": text(f"kill {n}", 100 + n) for n in range(4)}
    for name, prompt in prompts.items():
        engine.add(prompt, max_tokens=60, request_id=name)
    for _ in range(12):
        engine.step()
    world.server.replace()
    # All processes come back by themselves, without any step.
    wait_until(lambda: bool(world.status_of(engine).get("namespace")), "the engine is back")
    assert len(engine.scheduler.requests) == 4
    engine.run()
    for name, prompt in prompts.items():
        assert engine.outputs[name] == cold_output(prompt, max_tokens=60, ranks=ranks)
        whole = prompt + engine.outputs[name]
        assert world.stored_chunks(engine, whole) == (len(whole) - 1) // 16


@pytest.mark.bounds
@pytest.mark.pitfall(58)
def test_killed_with_everything_under_way(own_world: World) -> None:
    """Loads, stores and look-ups are under way when the server dies, at each of many moments."""
    world = own_world
    world.server.start()
    for moment in range(8):
        engine = world.engine(
            options=default_deadlines(), num_blocks=64, max_batched_tokens=64, ranks=2
        )
        prompt = text(f"way {moment}", 160)
        engine.add(prompt)
        engine.run()
        engine.reset_prefix_cache()
        for rank in engine.workers.ranks:
            rank.connector.worker._load_budget_bytes = part_bytes(engine)
        loading = engine.add(prompt)
        storing = engine.add(text(f"other {moment}", 200), max_tokens=20)
        for _ in range(moment // 2):
            engine.step()
        if moment % 2:
            engine.begin_step()
        world.server.kill()
        engine.run()
        assert engine.outputs[loading] == cold_output(prompt, ranks=2)
        assert len(engine.outputs[storing]) == 20
        world.server.start()
        world.attach(engine)
        world.close(engine)


@pytest.mark.bounds
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_attach_again_at_different_moments(own_world: World, late: int) -> None:
    """A plan of the old boot is never followed in the new arena, whoever is late to know.

    The late rank comes to the new server only when the others have been there for long, and when
    somebody else's KV lies where the load of before was reading.
    """
    world = own_world
    world.server.start()
    patient = {**default_deadlines(), "lookup_deadline_ms": 10_000.0}  # the load must begin
    engine = world.engine(options=patient, num_blocks=256, ranks=2)
    prompt = text("moments", 320)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    for rank in engine.workers.ranks:
        rank.connector.worker._load_budget_bytes = part_bytes(engine)
    loading = engine.add(prompt)
    engine.step()
    engine.step()
    gate = hold_back(engine, late)
    world.server.replace()
    other = world.engine(num_blocks=64, ranks=2)
    foreign = text("foreign", 320)
    other.add(foreign)
    other.run()
    engine.run()
    gate.set()
    assert engine.outputs[loading] == cold_output(prompt, ranks=2)
    assert count_events(engine, Kind.LOAD_FAILED, loading) == 1
    world.attach(engine)
    engine.reset_prefix_cache()
    again = engine.add(prompt)
    engine.run()
    assert engine.outputs[again] == cold_output(prompt, ranks=2)
    assert world.stored_chunks(other, foreign) == 20
    assert world.stored_chunks(engine, prompt) == 20


def test_rank_that_has_not_heard_of_its_own_attachment(own_world: World) -> None:
    """The link's thread is held up between the handshake and the moment from which the rank can
    use the connection: until then the engine may not be given slots, since this rank would not
    know their plan for its own, and would never let go of them."""
    world = own_world
    world.server.start()
    engine = world.engine(options=default_deadlines(), num_blocks=64)
    gate = hold_back(engine, 0)
    world.server.replace()

    def has_shaken_hands() -> bool:
        world.nudge(engine)
        status = world.status_of(engine)
        return bool(status.get("scheduler_attached")) and status["ranks_attached"] == [0]

    wait_until(has_shaken_hands, "both processes are known")
    for _ in range(20):
        world.nudge(engine)
    prompt = text("held back", 160)
    first = engine.add(prompt)
    engine.run()
    gate.set()
    world.attach(engine)
    world.settle(engine)
    world.check_nothing_held()
    engine.reset_prefix_cache()
    second = engine.add(prompt)
    engine.run()
    assert engine.outputs[first] == engine.outputs[second]


def test_a_rank_that_stays_away_costs_hits_only(own_world: World) -> None:
    """Slots are handed out only when every rank has attached to this boot."""
    world = own_world
    world.server.start()
    engine = world.engine(num_blocks=128, ranks=2, attached=False)
    engine.workers.ranks[1].connector.worker._channel._link.close()
    prompt = text("away", 160)
    request = engine.add(prompt, max_tokens=5)
    engine.run()
    assert engine.outputs[request] == cold_output(prompt, max_tokens=5, ranks=2)
    assert world.server.totals()["stored"] == 0
    wait_until(
        lambda: world.status_of(engine).get("waiting_for") == ["rank 1"],
        "the server waits for the second rank only",
    )
    totals = engine.connector.scheduler.accounts.totals
    assert totals.total() == 10
    waiting = {"server_absent", "namespace_opening", "identity_pending"}
    assert {fate.removeprefix("skipped:") for fate in totals} <= waiting


@pytest.mark.bounds
@pytest.mark.pitfall(14)
def test_stopped_server_costs_no_hook_its_bound(own_world: World) -> None:
    """SIGSTOP during traffic: hooks stay short, outputs right; after SIGCONT it is used again."""
    world = own_world
    world.server.start()
    engine = world.engine(options=default_deadlines(), num_blocks=256, max_batched_tokens=128)
    watch = Stopwatch(engine)
    prompts = {f"s{n}": text(f"stop {n}", 80 + n) for n in range(24)}
    for index, (name, prompt) in enumerate(prompts.items()):
        if index == 8:
            world.server.pause()
        if index == 16:
            world.server.resume()
        engine.add(prompt, max_tokens=8, request_id=name)
        for _ in range(4):
            engine.step()
    engine.run()
    for name, prompt in prompts.items():
        assert engine.outputs[name] == cold_output(prompt, max_tokens=8)
    slowest, hook = watch.slowest()
    assert slowest < 10 * HOOK_BOUND_SECONDS, f"{hook} took {slowest:.3f} s"
    waits = [sum(times) for times in watch.seconds.values()]
    steps = engine.step_count
    assert sum(waits) / steps < HOOK_BOUND_SECONDS, f"{sum(waits):.3f} s in {steps} steps"
    assert statistics.median(watch.seconds["build_connector_meta"]) < HOOK_BOUND_SECONDS
    world.attach(engine)
    engine.reset_prefix_cache()
    request = engine.add(text("after", 160))
    engine.run()
    engine.reset_prefix_cache()
    again = engine.add(text("after", 160))
    engine.run()
    assert engine.outputs[request] == engine.outputs[again]


@pytest.mark.bounds
@pytest.mark.pitfall(14)
def test_absent_server_costs_nothing(own_world: World) -> None:
    """Not even a wait: without a connection no hook waits at all."""
    engine = own_world.engine(attached=False, options=default_deadlines(), num_blocks=256)
    watch = Stopwatch(engine)
    for n in range(8):
        engine.add(text(f"none {n}", 100), max_tokens=10)
    engine.run()
    slowest, hook = watch.slowest()
    assert slowest < 10 * HOOK_BOUND_SECONDS, f"{hook} took {slowest:.3f} s"
    assert statistics.median(watch.seconds["build_connector_meta"]) < 1e-3


@pytest.mark.bounds
def test_stopped_for_long_then_killed(own_world: World) -> None:
    """Silent, then gone, then another one: nothing is lost but hits."""
    world = own_world
    world.server.start()
    engine = world.engine(options=default_deadlines(), num_blocks=128)
    world.server.pause()
    prompt = text("long", 160)
    requests = [engine.add(prompt, max_tokens=30) for _ in range(3)]
    for _ in range(10):
        engine.step()
    world.server.kill()
    engine.run()
    for request in requests:
        assert engine.outputs[request] == cold_output(prompt, max_tokens=30)
    world.server.start()
    world.attach(engine)
    engine.reset_prefix_cache()
    engine.add(prompt, max_tokens=30)
    engine.run()
    assert world.stored_chunks(engine, prompt) == 10
