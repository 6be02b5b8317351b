"""A process of a real engine is killed while it copies: its holdings go, and nobody gets a torn
block."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engines import STEP_TOKENS, WITHOUT_CACHE, ModelMaker, ask, cached, forget, hits, running
from observing import holds_nothing, status, totals, wait_until
from predictions import BLOCK, hit_after_reset, hit_of_next_turn
from records import Records

from kvledger.client import Client
from kvledger.lab.engine import PATIENT, EngineError, EngineProcess, connector_config
from kvledger.lab.models import WIDE, random_prompt
from kvledger.lab.processes import is_running, is_stopped
from kvledger.lab.requests import Request
from kvledger.lab.server import ServerProcess

pytestmark = pytest.mark.full

PROMPTS = 4
PROMPT_TOKENS = 1_500
MODEL_TOKENS = 2_048
GENERATED = 16
GONE_SECONDS = 10.0
"""What a dead process held is free within 1 s; ten times that on a busy machine."""
MOMENT_SECONDS = 120.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Site:
    """A server, an engine that lives, and others that are going to be killed.

    Attributes:
        server: with room for everything.
        survivor: it says what is right, and whether it finds anything else.
        records: of the engines that are killed.
        model: 64 KiB of KV per token, so that copies take time.
        spare: engines to be killed, started and perhaps not ready yet.
    """

    server: ServerProcess
    survivor: EngineProcess
    records: Records
    model: Path
    spare: list[EngineProcess] = field(default_factory=list)

    def start_two(self) -> None:
        """Start two engines whose hooks can be seen from outside; together they take little
        longer than one."""
        connector = connector_config(self.server.socket_path, options=PATIENT)
        self.spare.extend(
            EngineProcess(
                self.model,
                block_size=BLOCK,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=MODEL_TOKENS,
                connector=self.records.connector(connector),
                env=self.records.environment(),
            )
            for _ in range(2)
        )


@pytest.fixture(scope="module")
def site(model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    wide = model(WIDE)
    with ServerProcess(directory / "kvledger.sock", memory="2GiB") as server:
        survivor = cached(wide, server, engine_id="survivor", max_model_len=MODEL_TOKENS)
        site = Site(server, survivor, Records(directory / "records"), wide)
        site.start_two()
        with running(survivor):
            yield site
        for engine in site.spare:
            engine.kill()


@pytest.fixture
def victim(site: Site) -> Iterator[EngineProcess]:
    """An engine of its own for each test."""
    if not site.spare:
        site.start_two()
    for engine in site.spare:
        engine.wait_ready()
    with site.spare.pop() as engine:
        yield engine


def answers(
    engine: EngineProcess, prompts: list[list[int]], *, cache: bool
) -> list[tuple[int, ...]]:
    """What the engine answers to each, one after the other."""
    switches = None if cache else WITHOUT_CACHE
    found: list[tuple[int, ...]] = []
    for prompt in prompts:
        forget(engine)
        result = ask(engine, prompt, max_tokens=GENERATED, switches=switches)
        assert cache or hits(result) == (0, 0)
        found.append(result.token_ids)
    return found


def stop_inside(victim: EngineProcess, site: Site, hook: str, held: str) -> None:
    """Stop the engine while its worker is inside the hook and the server counts something held."""
    pids = victim.pids()
    (worker,) = pids.workers
    end = time.monotonic() + MOMENT_SECONDS
    with Client(str(site.server.socket_path), timeout_seconds=MOMENT_SECONDS) as client:
        while time.monotonic() < end:
            if site.records.hook_now("worker", worker) != hook:
                time.sleep(1e-4)
                continue
            for pid in (worker, pids.core):
                os.kill(pid, signal.SIGSTOP)
            wait_until(
                lambda: is_stopped(worker) and is_stopped(pids.core),
                "the engine is stopped",
                seconds=STOP_SECONDS,
            )
            now = client.status()["totals"]
            if site.records.hook_now("worker", worker) == hook and now[held]:
                print(f"\nstopped in {hook} with {now[held]} {held}")
                return
            for pid in (worker, pids.core):
                os.kill(pid, signal.SIGCONT)
    pytest.fail(f"the worker was never met inside {hook} with any {held}")


def kill_stopped(victim: EngineProcess, part: str) -> None:
    """Kill one stopped process of the engine, and let the other go on."""
    pids = victim.pids()
    (worker,) = pids.workers
    killed, other = (pids.core, worker) if part == "core" else (worker, pids.core)
    os.kill(killed, signal.SIGKILL)
    os.kill(other, signal.SIGCONT)


def assert_dies(victim: EngineProcess, requests: list[Request], pids: tuple[int, ...]) -> None:
    """The engine of a killed process ends, and says so to those who wait."""
    with pytest.raises(EngineError, match=r"EngineDead|has ended"):
        requests[-1].result()
    victim.close()
    assert not any(is_running(pid) for pid in pids)


@pytest.fixture(params=["core", "worker"])
def part(request: pytest.FixtureRequest) -> str:
    """Which process of the engine is killed."""
    return request.param


def assert_holdings_go(site: Site, part: str) -> None:
    seconds = wait_until(
        lambda: holds_nothing(site.server), "nothing is held", seconds=GONE_SECONDS
    )
    print(f"nothing was held {seconds:.2f} s after the {part} process had been killed")


@pytest.mark.pitfall(57)
def test_killed_while_storing(site: Site, victim: EngineProcess, part: str) -> None:
    seed = 70_000 if part == "core" else 71_000
    prompts = [random_prompt(seed + number, PROMPT_TOKENS) for number in range(PROMPTS)]
    references = answers(site.survivor, prompts, cache=False)
    stored_before = totals(site.server)["stored"]

    pids = victim.pids().all()
    requests = [victim.submit(prompt, max_tokens=GENERATED) for prompt in prompts]
    stop_inside(victim, site, "wait_for_save", "reservations")
    kill_stopped(victim, part)
    assert_holdings_go(site, part)
    assert_dies(victim, requests, pids)
    engines = {engine["engine"]: engine for engine in status(site.server)["engines"]}
    assert engines["survivor"]["namespace"], "others are untouched"

    stored = totals(site.server)["stored"] - stored_before
    found = 0
    for prompt, reference in zip(prompts, references, strict=True):
        forget(site.survivor)
        result = ask(site.survivor, prompt, max_tokens=GENERATED)
        assert result.token_ids == reference
        found += result.external_hit_tokens // BLOCK
    print(f"{stored} chunks were stored, {found} of the prompts' were found")
    assert found <= stored
    whole = PROMPTS * hit_of_next_turn(PROMPT_TOKENS, GENERATED) // BLOCK
    assert stored < whole, "it was killed too late"
    assert totals(site.server)["stored"] - stored_before == whole, "each chunk once, no more"


def test_killed_while_loading(site: Site, victim: EngineProcess, part: str) -> None:
    seed = 72_000 if part == "core" else 73_000
    prompts = [random_prompt(seed + number, PROMPT_TOKENS) for number in range(PROMPTS)]
    references = answers(site.survivor, prompts, cache=False)
    assert answers(site.survivor, prompts, cache=True) == references

    pids = victim.pids().all()
    requests = [victim.submit(prompt, max_tokens=GENERATED) for prompt in prompts]
    stop_inside(victim, site, "start_load_kv", "leases")
    kill_stopped(victim, part)
    assert_holdings_go(site, part)
    assert_dies(victim, requests, pids)

    for prompt, reference in zip(prompts, references, strict=True):
        forget(site.survivor)
        result = ask(site.survivor, prompt, max_tokens=GENERATED)
        assert hits(result) == (0, hit_after_reset(PROMPT_TOKENS)), "what was read is still there"
        assert result.token_ids == reference
