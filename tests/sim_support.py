"""Shared by the tests of the simulated engine itself: small set-ups, quiet logs, random runs."""

from __future__ import annotations

import logging

import sim_reference_connector
from kvledger.sim import SimulatedEngine
from kvledger.sim.play import EngineStage, play
from kvledger.sim.schedule import Mix, generate
from sim_reference_connector import ReferenceConnector

logging.getLogger("vllm").setLevel(logging.ERROR)

TIGHT = {"block_size": 4, "num_blocks": 32, "max_batched_tokens": 40}
"""So little room that requests are preempted and allocations fail all the time."""

CROWD = Mix(shared=40, own=12, max_tokens=60, add=120, abort=10, weights=1)
"""Arrivals that keep such an engine full."""


def maker(connector=ReferenceConnector, extra_config=None, **fields):
    """A function that makes a fresh engine on an empty store, as :func:`play` wants it."""

    def make():
        sim_reference_connector.STORES.clear()
        return SimulatedEngine(
            connector,
            extra_config=extra_config,
            engine_id="reference",
            **{**TIGHT, **fields},
        )

    return make


def play_random(make, seed, count, mix=CROWD):
    """Play one random schedule; returns the number of steps."""
    return play(stage(make, seed, mix), seed, generate(seed, count, mix))["steps"]


def stage(make, seed, mix=CROWD):
    """What :func:`play` wants: a function that makes a fresh stage."""
    return lambda: EngineStage(make(), seed, mix)
