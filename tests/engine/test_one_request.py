"""What single requests may ask for, and what they leave behind, on engines that run already."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engines import CACHED_ID, ask, forget, hits
from observing import account_of, chunks, holds_nothing, status, totals, wait_until
from predictions import BLOCK, hit_after_reset, hit_of_next_turn

from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import random_prompt
from kvledger.lab.processes import cpu_seconds
from kvledger.lab.server import ServerProcess

IDLE_SECONDS = 5.0
SETTLE_SECONDS = 1.0
IDLE_CORES = 0.2
"""An idle engine with the connector uses 0.02 cores more at most; ten times that here."""
SIGN_BITS = 0x80


@pytest.mark.full  # vLLM compiles something for it, which takes a quarter of a minute
def test_a_request_that_wants_logprobs_of_its_prompt_loads_nothing(
    cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    prompt = random_prompt(21_000, 300)
    first = cached_engine.submit(prompt, sampling={"prompt_logprobs": 1}).result()
    forget(cached_engine)
    again = cached_engine.submit(prompt, sampling={"prompt_logprobs": 1}).result()
    assert hits(first) == hits(again) == (0, 0)
    assert again.token_ids == first.token_ids
    account = account_of(cached_engine, engine_server, CACHED_ID, again)
    assert account["miss"] == "reading_skipped"
    forget(cached_engine)
    assert hits(ask(cached_engine, prompt)) == (0, hit_after_reset(300)), "it stores nevertheless"


def test_a_request_may_refuse_to_load(
    cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    prompt = random_prompt(21_001, 300)
    first = ask(cached_engine, prompt)
    forget(cached_engine)
    refused = ask(cached_engine, prompt, switches={"kvledger.load": False})
    assert hits(refused) == (0, 0)
    assert refused.token_ids == first.token_ids
    account = account_of(cached_engine, engine_server, CACHED_ID, refused)
    assert account["miss"] == "load_disabled"
    assert chunks(account, "present") == hit_of_next_turn(300, 32) // BLOCK


def test_a_request_may_refuse_to_store(
    cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    prompt = random_prompt(21_002, 300)
    refused = ask(cached_engine, prompt, switches={"kvledger.store": False})
    account = account_of(cached_engine, engine_server, CACHED_ID, refused)
    assert chunks(account, "skipped:store_disabled") == hit_of_next_turn(300, 32) // BLOCK
    forget(cached_engine)
    assert hits(ask(cached_engine, prompt)) == (0, 0)


def test_aborted_requests_hold_nothing(
    plain_engine: EngineProcess, cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    """Aborted while it generates, and at once: while it is looked up, loaded or computed."""
    prompt = random_prompt(21_003, 2_000)
    reference = ask(plain_engine, prompt)
    assert ask(cached_engine, prompt).token_ids == reference.token_ids
    forget(cached_engine)
    long = cached_engine.submit(prompt, max_tokens=4_000)
    long.wait_first_token()
    long.abort()
    assert long.result().finish_reason == "abort"
    for number in range(8):
        forget(cached_engine)
        requests = [
            cached_engine.submit(prompt, max_tokens=4_000),
            cached_engine.submit(random_prompt(21_100 + number, 2_000), max_tokens=4_000),
        ]
        for request in requests:
            request.abort()
        for request in requests:
            assert request.result().finish_reason == "abort"
    forget(cached_engine)
    last = ask(cached_engine, prompt)
    assert hits(last) == (0, hit_after_reset(2_000))
    assert last.token_ids == reference.token_ids
    wait_until(lambda: holds_nothing(engine_server), "nothing is held")
    assert status(engine_server)["accounts"]["unbalanced"] == 0


# ---------------------------------------------------------------- the control


@contextmanager
def arena_of(server: ServerProcess) -> Iterator[np.ndarray]:
    """The server's arena, writable from here."""
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        if os.readlink(descriptor).startswith("/memfd:"):
            with open(descriptor, "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
                view = np.frombuffer(arena, dtype=np.uint8)
                yield view
                del view
            return
    pytest.fail("the server has no memfd")


def test_the_bytes_in_the_arena_are_what_the_engine_computes_with(
    plain_engine: EngineProcess, cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    """The negative control of every other test: other bytes, another answer."""
    prompt = random_prompt(21_200, 1_000)
    reference = ask(plain_engine, prompt)
    memory = status(engine_server)["memory"]
    assert memory["growth"] != "growing"
    object_bytes = BLOCK * 4_096
    with arena_of(engine_server) as arena:
        before = arena.copy()
        ask(cached_engine, prompt, max_tokens=1)
        wait_until(lambda: holds_nothing(engine_server), "all is stored")
        first = int(np.flatnonzero(arena != before)[0])
        del before
        page = first - first % memory["page_bytes"]
        slot = first - (first - page) % object_bytes
        damaged = arena[slot : slot + object_bytes]

        damaged ^= SIGN_BITS
        forget(cached_engine)
        wrong = ask(cached_engine, prompt, switches={"kvledger.store": False})
        assert hits(wrong) == (0, hit_after_reset(1_000))
        assert wrong.token_ids != reference.token_ids

        damaged ^= SIGN_BITS
        forget(cached_engine)
        again = ask(cached_engine, prompt)
        assert hits(again) == (0, hit_after_reset(1_000))
        assert again.token_ids == reference.token_ids
        del damaged, arena


# ---------------------------------------------------------------- idleness


@pytest.mark.full
def test_idleness_costs_nothing(
    plain_engine: EngineProcess, cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    engines = (plain_engine.pids().all(), cached_engine.pids().all(), (engine_server.pid,))

    def cores(seconds: float) -> list[float]:
        """Used by each, on average; what is measured is this time."""
        before = [sum(map(cpu_seconds, pids)) for pids in engines]
        begin = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - begin
        after = [sum(map(cpu_seconds, pids)) for pids in engines]
        return [(late - early) / elapsed for early, late in zip(before, after, strict=True)]

    # vLLM's worker spins for a second after each step.
    wait_until(lambda: max(cores(SETTLE_SECONDS)) < IDLE_CORES, "the engines are idle")
    without, with_connector, server = cores(IDLE_SECONDS)
    print(f"\nidle cores: {without:.3f} without, {with_connector:.3f} with, server {server:.3f}")
    assert with_connector - without < IDLE_CORES
    assert server < IDLE_CORES
    assert totals(engine_server)["reservations"] == 0
