"""Random schedules: the right connector survives them all; replay and shrinking work."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvledger.sim.play import ScheduleFailure, play, shrink
from kvledger.sim.schedule import Action, Do, Mix, from_text, generate, to_text
from sim_reference_connector import EarlyReportConnector, ReferenceConnector
from sim_support import CROWD, maker, play_random, stage

MODES = {
    "plain": ({}, {}),
    "slow loads": ({"delay": 3}, {}),
    "synchronous loads": ({"load": "sync"}, {}),
    "failed loads": ({"delay": 1, "failures": 0.3}, {}),
    "partly failed loads": ({"delay": 1, "failures": 0.3, "partial_failures": True}, {}),
    "drafts": ({}, {"drafts": 3}),
    "drafts, runner 2": ({"delay": 1}, {"drafts": 3, "model_runner": 2}),
    "asynchronous scheduling": ({"delay": 1}, {"async_scheduling": True}),
    "asynchronous scheduling, drafts": ({}, {"async_scheduling": True, "drafts": 3}),
    "asynchronous scheduling, runner 2": (
        {"delay": 2, "failures": 0.2},
        {"async_scheduling": True, "drafts": 2, "model_runner": 2},
    ),
    "ranks": ({"delay": 1, "failures": 0.2}, {"ranks": 2, "pickle_metadata": True}),
    "windows": ({"delay": 1}, {"windows": (None, 12, 20), "num_blocks": 64}),
    "no prefix cache": ({"delay": 1}, {"prefix_caching": False}),
    "sessions": ({"delay": 1}, {}),
    "sessions, asynchronous scheduling": ({"delay": 1}, {"async_scheduling": True}),
    "priority": ({"delay": 1}, {"policy": "priority"}),
    "block-outermost layout": ({}, {"layout": "BLNHC"}),
}
SESSIONS = replace(CROWD, more=100, sessions=400)


@pytest.mark.parametrize("mode", MODES)
def test_right_connector_survives(mode):
    extra, fields = MODES[mode]
    mix = SESSIONS if "sessions" in mode else CROWD
    assert play_random(maker(ReferenceConnector, extra, **fields), 11, 1500, mix) > 300


def test_engine_without_a_connector_survives():
    assert play_random(maker(None), 12, 1500) > 300


def test_schedule_replays_exactly():
    logs = []
    for _ in range(2):
        engines = []
        make = maker(ReferenceConnector, {"delay": 1}, drafts=2, async_scheduling=True)

        def kept(make=make, engines=engines):
            engines.append(make())
            return engines[-1]

        play_random(kept, 5, 800)
        logs.append([str(event) for event in engines[0].events])
    assert logs[0] == logs[1]
    assert len(logs[0]) > 500


def test_generated_actions_depend_on_the_seed_alone():
    first = list(generate(1, 300, CROWD))
    assert first == list(generate(1, 300, CROWD))
    assert first != list(generate(2, 300, CROWD))
    assert len(first) == 302
    assert [action.do for action in first[-2:]] == [Do.DRAIN, Do.CHECK]


def test_a_schedule_as_text_means_the_same():
    mix = Mix(more=50, weights=20, outside=20, sessions=300, adapters=2)
    actions = list(generate(7, 500, mix, engines=2))
    assert from_text(to_text(actions)) == actions
    assert to_text([Action(Do.STEP)] * 3) == "step*3"
    assert to_text([Action(Do.ABORT, (4,), 1)]) == "1/abort:4"
    with pytest.raises(ValueError, match="'jump' is no action"):
        from_text("step jump")


def test_mix_decides_what_comes():
    mix = Mix(add=500, abort=0, reset=0, phases=0, check=0)
    counts = dict.fromkeys(Do, 0)
    for action in itertools.islice(generate(1, 2000, mix), 2000):
        counts[action.do] += 1
    assert counts[Do.ADD] + counts[Do.STEP] == 2000
    assert 900 < counts[Do.ADD] < 1100


def test_failure_replays_from_its_actions_and_shrinks():
    make = maker(EarlyReportConnector, {"delay": 2})
    with pytest.raises(ScheduleFailure) as caught:
        play_random(make, 1, 2500)
    failure = caught.value
    with pytest.raises(ScheduleFailure) as again:
        play(stage(make, failure.seed), failure.seed, from_text(failure.text))
    assert str(again.value) == str(failure)
    shorter = shrink(stage(make, failure.seed), failure, max_tries=80)
    assert len(shorter.actions) <= len(failure.actions) / 2
    assert type(shorter.__cause__) is type(failure.__cause__)
