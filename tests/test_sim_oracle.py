"""Negative controls: connectors with one real bug each, which the oracle or vLLM must notice.

Every wrong connector meets the same random schedules as the right one (test_sim_schedule.py).
"""

from __future__ import annotations

import pytest

import sim_reference_connector
from kvledger.sim import OracleError, SimulatedEngine
from kvledger.sim.play import ScheduleFailure
from sim_reference_connector import (
    EarlyReportConnector,
    FirstRankConnector,
    LateStoreConnector,
    NullBlockConnector,
    ReferenceConnector,
    SaltBlindConnector,
    StrayWriteConnector,
    TaintedConnector,
    TwiceReportedConnector,
    UncappedConnector,
    WrongTargetConnector,
)
from sim_support import CROWD, maker, play_random

WRONG = [
    (UncappedConnector, {}, {"drafts": 3}, OracleError, "brought wrong bytes"),
    (
        UncappedConnector,
        {"delay": 1},
        {"drafts": 3, "async_scheduling": True},
        OracleError,
        "brought wrong bytes",
    ),
    (LateStoreConnector, {}, {}, OracleError, "brought wrong bytes"),
    (WrongTargetConnector, {}, {}, OracleError, "brought wrong bytes"),
    (EarlyReportConnector, {"delay": 2}, {}, OracleError, "brought wrong bytes"),
    (SaltBlindConnector, {}, {}, OracleError, "brought wrong bytes"),
    (FirstRankConnector, {}, {"ranks": 2}, OracleError, "rank 1"),
    (
        NullBlockConnector,
        {},
        {"windows": (None, 12), "num_blocks": 48},
        OracleError,
        "null-block bytes of rank 0",
    ),
    (StrayWriteConnector, {}, {}, OracleError, "guard"),
    (TwiceReportedConnector, {}, {}, AssertionError, "AssertionError"),
]


@pytest.mark.parametrize(("connector", "extra", "fields", "error", "words"), WRONG)
@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_connector_is_caught(connector, extra, fields, error, words, seed):
    with pytest.raises(ScheduleFailure, match=words) as caught:
        play_random(maker(connector, extra, **fields), seed, 2500)
    assert isinstance(caught.value.__cause__, error)
    assert f"seed {seed}, action {len(caught.value.actions)}" in str(caught.value)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_right_connector_passes_where_the_wrong_one_failed(case, seed):
    _, extra, fields, _, _ = WRONG[case]
    assert play_random(maker(ReferenceConnector, extra, **fields), seed, 600) > 100


def failing(connector):
    """Synchronous loads that fail; without vLLM's prefix cache, which they would poison."""
    return maker(connector, {"load": "sync", "failures": 0.4}, prefix_caching=False)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_step_with_a_failed_synchronous_load_is_tainted(seed):
    assert play_random(failing(ReferenceConnector), seed, 1000) > 300
    with pytest.raises(ScheduleFailure, match="wrong bytes"):
        play_random(failing(TaintedConnector), seed, 4000)


def test_failed_synchronous_load_and_abort_leave_a_poisoned_prefix_cache_in_vllm():
    """Why loads have to be asynchronous: vLLM 0.32 hashes the targets of a synchronous load when
    it allocates them, and leaves them hashed if the request goes before it has recomputed them.
    """
    sim_reference_connector.STORES.clear()
    options = {"load": "sync", "failures": 0.0}
    with SimulatedEngine(ReferenceConnector, extra_config=options) as engine:
        engine.add(range(100))
        engine.run()
        engine.reset_prefix_cache()
        engine.workers.ranks[0].connector.failures = 1.0
        failed = engine.add(range(100), max_tokens=8)
        engine.step()
        assert engine.steps[-1].invalid_blocks
        engine.abort(failed)
        victim = engine.add(range(100))
        with pytest.raises(OracleError, match=f"{victim} read wrong bytes"):
            engine.run()
        assert engine.local_hit(victim) == 96


def test_crowded_schedule_reaches_what_it_should():
    """The random life has to contain the hard cases, or the controls above prove nothing."""
    kinds, preempted = set(), 0
    make = maker(ReferenceConnector, {"delay": 1, "failures": 0.2})
    engines = []

    def kept():
        engines.append(make())
        return engines[-1]

    play_random(kept, 3, 4000, CROWD)
    for event in engines[0].events:
        kinds.add(str(event.kind))
        preempted += event.kind == "preempted"
    assert kinds == {
        "added", "looked_up", "allocated", "promoted", "load_finished", "load_failed",
        "preempted", "aborted", "finished", "reset",
    }  # fmt: skip
    assert preempted > 20
