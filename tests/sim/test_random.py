"""Random life: arrivals, sessions, aborts, resets, faults; checked after every single event.

A few thousand actions of every kind of life (``plans``). A failure is shrunk and printed with the
command that plays it again. `make soak` goes on until it is stopped; `test_at_scale.py` plays as
much as a change must pass.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from life import Life, Servers
from plans import PLANS, Plan
from soak import play_round, shortest

from kvledger.ledger import Account
from kvledger.reasons import Reason
from kvledger.sim import Kind, OracleError
from kvledger.sim.play import ScheduleFailure, play, shrink
from kvledger.sim.schedule import from_text, generate
from kvledger.vllm.worker_side import WorkerSide

SEED = int(os.environ.get("KVLEDGER_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
ACTIONS = 2500

EXPECTED = {f"fate skipped:{Reason.EPOCH_CHANGED}", f"fate skipped:{Reason.ADAPTER_UNKNOWN}"}
"""What may be skipped although nothing goes wrong and there is room: the user asked for it."""
BEHIND_ANOTHER = {f"fate skipped:{Reason.BEING_WRITTEN}", f"fate skipped:{Reason.PARENT_MISSING}"}
"""The last chance of a request can fall into another one's write of the same chunk; what hangs on
that chunk is then refused too."""
OWES_NOTHING = ("plain-async", "plain-tiny-async")
"""Without drafts an asynchronous scheduler has planned every full block before a request ends: it
builds the step after the last one before it takes that one's output."""


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Servers of this test's own, which may be disturbed."""
    with Servers() as made:
        yield made


def assert_plausible(name: str, plan: Plan, statistics: Counter[str]) -> None:
    """The schedule has done what it is for, and no block was given up without need."""
    assert statistics["fate stored"] > 0
    assert statistics["fate loaded"] > 0
    skipped = {word for word in statistics if word.startswith("fate skipped") and statistics[word]}
    known = {f"fate skipped:{reason}" for reason in Reason}
    assert skipped <= known
    if name.startswith("plain"):
        assert not skipped
    elif plan.is_calm:
        behind = plan.late or plan.engines > 1
        assert skipped <= (EXPECTED | BEHIND_ANOTHER if behind else EXPECTED), statistics
    if name in OWES_NOTHING:
        assert statistics["ends that owe, by themselves"] == 0
    if plan.engine.get("num_blocks", 64) <= 30:
        assert statistics[Kind.PREEMPTED] > 0
    if plan.engine.get("drafts"):
        assert statistics["rejected drafts"] > 0


@pytest.mark.parametrize("name", PLANS)
def test_random(name: str, servers: Servers) -> None:
    """Whatever the seed."""
    played = play_round(servers, name, SEED, ACTIONS)
    print(f"{name} seed {SEED}: {played.seconds:.1f} s; {dict(sorted(played.statistics.items()))}")
    if played.failure:
        pytest.fail(f"{played}\nshrunk: {shortest(servers, played)}", pytrace=False)
    assert_plausible(name, PLANS[name], played.statistics)


def test_a_failure_is_found_shrunk_and_played_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a rank that reports failed loads as done is caught by the bytes."""
    answer = WorkerSide._answer

    def believe(self: WorkerSide, request_id: str, *, arrived: bool) -> None:
        del arrived
        answer(self, request_id, arrived=True)

    monkeypatch.setattr(WorkerSide, "_answer", believe)
    name = "failing"

    def stage() -> Life:
        return Life(servers, name, 3)

    with pytest.raises(ScheduleFailure) as caught:
        play(stage, 3, generate(3, 10 * ACTIONS, PLANS[name].mix))
    assert isinstance(caught.value.__cause__, OracleError)
    shorter = shrink(stage, caught.value, max_tries=40, max_seconds=60)
    assert len(shorter.actions) < len(caught.value.actions)
    with pytest.raises(ScheduleFailure) as again:
        play(stage, shorter.seed, from_text(shorter.text))
    assert isinstance(again.value.__cause__, OracleError)


def test_a_foreign_block_in_the_store_is_found_at_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the account takes a chunk's blocks from one place further on."""
    capture = Account.capture

    def shifted(self: Account, table: Sequence[int]) -> None:
        capture(self, [*table[1:], *table[:1]])

    monkeypatch.setattr(Account, "capture", shifted)
    with pytest.raises(ScheduleFailure, match="I1: foreign bytes were stored"):
        play(lambda: Life(servers, "plain", 3), 3, generate(3, ACTIONS, PLANS["plain"].mix))
