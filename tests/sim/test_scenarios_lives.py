"""Faults that users have really met, of the lifetimes of engines and servers.

See test_scenarios.py for the conventions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from books import (
    World,
    cold_output,
    part_bytes,
    text,
    wait_until,
)
from sim_server import SOURCE, Server
from test_scenarios import SCHEDULERS, fill_server, make


@contextmanager
def own_world(directory: Path) -> Iterator[World]:
    """A world whose server may be killed and replaced."""
    server = Server(directory)
    server.start()
    world = World(server, directory.name)
    world.lossy = True
    try:
        yield world
        world.check()
    finally:
        server.resume()
        for engine in world.engines:
            engine.close()
        server.close()


PROLOGUE = """
import os, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from books import NO_STORE, World, text
from sim_server import Server
for file in Path({directory!r}).glob("model-*/*"):
    os.utime(file)  # younger than the process, as for the test's own engines
world = World(Server(Path({directory!r})), {namespace!r})
world._made = 1000  # engines of the test have the first ids
"""

ENGINE_AT_WORK = """
engine = world.engine(num_blocks=160, max_batched_tokens=64)
engine.add(text("row 28", 512))
engine.run()
world.settle(engine)
engine.reset_prefix_cache()
engine.add(text("row 28", 512))
engine.add(text("row 28 more", 1024))
engine.begin_step()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def engine_process(world: World, code: str) -> Iterator[Iterator[str]]:
    """A process that runs the code beside the world's server, as its lines; killed at the end.

    Python's own hashes are random in it, and its module search path is the one of the tests.
    """
    prologue = PROLOGUE.format(
        path=[str(SOURCE), str(Path(__file__).parent)],
        directory=str(world.server.socket.parent),
        namespace=world.namespace,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", prologue + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"},
        text=True,
    )
    assert process.stdout is not None
    try:
        yield (line.strip() for line in process.stdout)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_scenario_28_engine_is_killed(world: World) -> None:
    """(ii) All that it held is free at once; what it had stored is there for others."""
    with engine_process(world, ENGINE_AT_WORK) as lines:
        assert "ready" in lines
        totals = world.server.totals()
        assert totals["leases"] or totals["reservations"]
        assert len(world.server.status()["engines"]) == 1
    world.check_nothing_held()
    wait_until(lambda: not world.server.status()["engines"], "the engine is forgotten")
    engine = world.engine(num_blocks=160, max_batched_tokens=64)
    request = engine.add(text("row 28", 512))
    engine.run()
    assert engine.external_hit(request) == 512


def test_scenario_28_server_is_restarted_at_once(tmp_path: Path) -> None:
    """(i) The next boot is recognised, however short the gap, and all is stored anew."""
    with own_world(tmp_path) as world:
        engine, server = make(world, chunk=16), world.server
        prompt = text("row 28", 512)
        for _ in range(3):
            fill_server(engine, prompt)
            server.replace()
            wait_until(lambda: bool(world.status_of(engine).get("namespace")), "it is back")
            request = engine.add(prompt)
            engine.run()
            assert engine.external_hit(request) == 0
            world.settle(engine)
            engine.reset_prefix_cache()
            again = engine.add(prompt)
            engine.run()
            assert engine.external_hit(again) == 512
            engine.reset_prefix_cache()


CLOCK = """
import time
def shift(real):
    def shifted():
        with open({path!r}) as file:
            return real() + float(file.read())
    return shifted
time.monotonic, time.time = shift(time.monotonic), shift(time.time)
"""


def test_scenario_28_engine_idles_for_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(iii) Idle for two hours, by the clocks of the engine and the server: it is registered as
    before, its leases and objects are there, and nothing is asked or attached anew."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(path=str(offset)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with own_world(tmp_path) as world:
        engine, prompt = make(world, chunk=16), text("row 28, idle", 512)
        fill_server(engine, prompt)
        queued = engine.add(prompt)  # its hit is leased while it waits
        wait_until(lambda: world.server.totals()["leases"] == 1, "the hit is leased")
        before = world.server.status()
        offset.write_text("7200")
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 7200)
        after = world.server.status()
        assert after["server"]["uptime_seconds"] - before["server"]["uptime_seconds"] >= 7200
        assert after["engines"] == before["engines"]
        assert after["totals"] == before["totals"]
        engine.run()
        assert engine.external_hit(queued) == 512
        assert world.server.status()["server"]["boot"] == before["server"]["boot"]
        assert world.server.status()["engines"] == before["engines"]
        monkeypatch.setattr(time, "monotonic", real)


@SCHEDULERS
@pytest.mark.parametrize("moment", range(4))
def test_scenario_28_server_is_down(tmp_path: Path, moment: int, is_async: bool) -> None:
    """(iv) The server dies under a load and under stores: the one is computed, the others are
    dropped with a reason, outputs are those of a cold engine, and no hook fails."""
    with own_world(tmp_path) as world:
        engine = make(world, max_batched_tokens=256, async_scheduling=is_async)
        prompts = [text("row 28, loads", 1024), text("row 28, stores", 900)]
        fill_server(engine, prompts[0])
        first_rank = engine.workers.ranks[0].connector.worker
        first_rank._load_budget_bytes = part_bytes(engine)
        requests = [engine.add(prompt, max_tokens=20) for prompt in prompts]
        engine.begin_step()
        if moment > 0:
            engine.run_workers()
        if moment > 1:
            engine.finish_step()
        if moment > 2:
            engine.step()
        assert engine.external_hit(requests[0]) == 1024
        world.server.kill()
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            assert engine.outputs[request] == cold_output(prompt, max_tokens=20)
        world.nudge(engine)
        totals = engine.connector.scheduler.accounts.totals
        assert totals["skipped:server_absent"] > 0
        assert {fate for fate in totals if fate.startswith("skipped")} <= {
            "skipped:server_absent",
            "skipped:engine_idle",
        }
        world.server.start()
        world.attach(engine)
        assert world.stored_chunks(engine, prompts[1]) == 0
