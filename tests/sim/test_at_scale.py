"""As much random life as a change must survive, with new seeds each time."""

from __future__ import annotations

import os

import pytest
from life import Servers
from plans import PLANS
from rich.console import Console
from soak import Soak, counters, met, owed, shortest
from test_random import SEED, assert_plausible

from kvledger.reasons import Reason
from kvledger.sim import Kind

STEPS = 300_000
"""Steps that schedule at least one token."""
DEADLINE_SECONDS = 1500.0
"""Ten times what they take on two cores."""

AT_LEAST = {
    Kind.PREEMPTED: 400,
    Kind.ABORTED: 1_500,
    "aborted while queued": 400,
    "aborted while loading": 50,
    "aborted while prefilling": 50,
    "aborted while decoding": 500,
    "aborted while preempted": 8,
    "aborted while waiting for input": 40,
    "aborted with a step in flight": 500,
    Kind.LOAD_FINISHED: 6_000,
    Kind.LOAD_FAILED: 100,
    "failed copies: load": 80,
    "failed copies: store": 300,
    Kind.FAILED: 30,
    Kind.ANSWERED: 400,
    "rejected drafts": 15_000,
    "evicted": 6_000,
    "outside: replace": 15,
    "outside: kill": 8,
    "outside: pause": 10,
    "outside: detach": 25,
    "outside: clear": 20,
    "outside: stall": 60,
    "outside: short": 60,
    "outside: shuffle": 60,
    "resets of the connector": 300,
    "resets of the prefix cache": 300,
    "changes of the weights": 40,
    "chunks compared at their store": 50_000,
    "fate stored": 50_000,
    "fate loaded": 30_000,
}
"""What the run must have met; below that it has proven too little."""


@pytest.mark.full
def test_at_scale() -> None:
    """Every plan in turn until the steps are done; then the books of the whole run."""
    soak = Soak(list(PLANS), SEED, jobs=min(2, os.cpu_count() or 1))
    try:
        while soak.total["computing steps"] < STEPS or not all(
            counts["rounds"] for counts in soak.by_plan.values()
        ):
            soak.next_rounds()
            if soak.failures:
                with Servers() as servers:
                    found = shortest(servers, soak.failures[0])
                pytest.fail(f"{soak.failures[0]}\nshrunk: {found}", pytrace=False)
            assert soak.seconds < DEADLINE_SECONDS, "it does not get on"
    finally:
        soak.close()
    console = Console(width=100)
    console.print(counters(soak), owed(soak), met(soak.total))
    short = {word: soak.total[word] for word, count in AT_LEAST.items() if soak.total[word] < count}
    assert not short, f"too little was met: {short}"
    for name, plan in PLANS.items():
        assert_plausible(name, plan, soak.by_plan[name])
    assert_balanced(soak)


def assert_balanced(soak: Soak) -> None:
    """Full blocks, by vLLM's numbers = present + loaded + stored + skipped for a known reason."""
    total = soak.total
    fates = {word: count for word, count in total.items() if word.startswith("fate ")}
    skipped = {f"fate skipped:{reason}" for reason in Reason}
    assert fates.keys() <= {"fate present", "fate loaded", "fate stored"} | skipped
    assert sum(fates.values()) == total["full blocks"]
