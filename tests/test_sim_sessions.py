"""Streaming input: one request, several turns, and tokens that are cut off between them."""

from __future__ import annotations

import random

import pytest

import sim_support  # noqa: F401  (quiet logs)
from kvledger.sim import Kind, OracleError, SimulatedEngine
from kvledger.sim.model import VOCABULARY


def tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True}, {"model_runner": 2}])
@pytest.mark.parametrize("prompt", [30, 31, 32, 33])
def test_turns_are_answered_as_a_cold_engine_answers_them(fields, prompt):
    with SimulatedEngine(None, num_blocks=64, **fields) as engine:
        session = engine.add(tokens("a", prompt), max_tokens=5, is_session=True)
        engine.run()
        first = list(engine.outputs[session])
        engine.add_more(session, tokens("b", 20), max_tokens=7)
        engine.run()
        second = engine.outputs[session][5:]
        cold = engine.add([*tokens("a", prompt), *first[:-1], *tokens("b", 20)], max_tokens=7)
        engine.run()
        assert engine.outputs[cold] == second
        assert engine.clients.length(session) == prompt + 4 + 20 + 7
        engine.end_session(session)
        engine.run()
        assert engine.is_idle
        assert not engine.scheduler.requests
        engine.check()


def test_input_that_is_sent_early_waits_for_its_turn():
    with SimulatedEngine(None, num_blocks=64, async_scheduling=True) as engine:
        session = engine.add(tokens("a", 40), max_tokens=6, is_session=True)
        engine.add_more(session, tokens("b", 10), max_tokens=3)
        engine.add_more(session, tokens("c", 10), max_tokens=1)
        engine.end_session(session)
        engine.run()
        assert len(engine.outputs[session]) == 6 + 3 + 1
        kinds = [event.kind for event in engine.events if event.request_id == session]
        assert kinds.count(Kind.ANSWERED) == 2
        assert kinds.count(Kind.FINISHED) == 1
        engine.check()


def test_a_wrong_answer_of_a_later_turn_is_seen():
    with SimulatedEngine(None, num_blocks=64) as engine:
        session = engine.add(tokens("a", 40), max_tokens=2, is_session=True)
        engine.run()
        engine.add_more(session, tokens("b", 10), max_tokens=2)
        block = engine.workers.runner.requests[session].blocks[0][0]
        engine.workers.ranks[0].memory.lanes[:, block] ^= 1
        with pytest.raises(OracleError):
            engine.run()


def test_a_session_can_be_aborted_while_it_waits_for_input():
    with SimulatedEngine(None, num_blocks=64) as engine:
        session = engine.add(tokens("a", 40), max_tokens=2, is_session=True)
        engine.run()
        engine.abort(session)
        engine.run()
        assert not engine.scheduler.requests
        engine.check()
