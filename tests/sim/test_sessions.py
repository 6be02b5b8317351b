"""Streaming input: a request that goes on with more input, and whose tokens are cut in between."""

from __future__ import annotations

import pytest
from books import World, full_chunks, text

BLOCK = 16
TURNS = (40, 37, 50)
ANSWERS = (9, 20, 3)


def whole_session(engine: object, *, early: bool) -> tuple[str, list[int]]:
    """Play a session; its id and the tokens that stand at its end, the last sampled one too."""
    inputs = [text(f"turn {number}", count) for number, count in enumerate(TURNS)]
    session = engine.add(inputs[0], max_tokens=ANSWERS[0], is_session=True)
    for tokens, answer in zip(inputs[1:], ANSWERS[1:], strict=True):
        if not early:
            engine.run()
        engine.add_more(session, tokens, max_tokens=answer)
    if not early:
        engine.run()
    engine.end_session(session)
    engine.run()
    outputs = engine.outputs[session]
    standing: list[int] = []
    for tokens, answer in zip(inputs, ANSWERS, strict=True):
        standing = [*standing[: len(standing) - bool(standing)], *tokens, *outputs[:answer]]
        outputs = outputs[answer:]
    return session, standing


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("early", [False, True], ids=["paused", "queued"])
@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True}, {"model_runner": 2}])
def test_every_turn_is_stored(
    world: World, chunk: int, early: bool, fields: dict[str, object]
) -> None:
    """All chunks of what stands at the end, and nothing of the tokens that were dropped."""
    engine = world.engine(options={"chunk_tokens": chunk}, num_blocks=128, **fields)
    session, standing = whole_session(engine, early=early)
    expected = full_chunks(engine, len(standing) - 1)
    assert world.fates(engine, session)["stored"] == expected
    assert world.stored_chunks(engine, standing) == expected


def test_the_next_engine_loads_a_session(world: World) -> None:
    first = world.engine(num_blocks=128)
    _, standing = whole_session(first, early=False)
    second = world.engine(num_blocks=128)
    session = second.add(standing, max_tokens=2, is_session=True)
    second.run()
    assert second.external_hit(session) == (len(standing) - 1) // BLOCK * BLOCK
    second.add_more(session, text("more", 40), max_tokens=2)
    second.end_session(session)
    second.run()
    assert world.fates(second, session)["loaded"] == (len(standing) - 1) // BLOCK


def test_with_drafts_a_session_is_left_alone(world: World) -> None:
    """vLLM 0.32 may then count dropped tokens as computed: see RequestPolicy.decide."""
    engine = world.engine(num_blocks=128, drafts=3, draft_acceptance=0.0)
    session, standing = whole_session(engine, early=False)
    chunks = full_chunks(engine, len(standing) - 1)
    assert world.runs(engine, session) == [("skipped:drafts_in_session", chunks)]
    assert world.stored_chunks(engine, standing) == 0
