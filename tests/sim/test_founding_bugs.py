"""The two bugs that started the project, and the overlap, with their exact numbers.

Block 64, chunk 256 (4 blocks), prompt 4096 (64 blocks, 16 chunks). What is right is derived here
from tokens alone: the server must hold every whole chunk of the prompt once, and each account must
say of every chunk where it came from.
"""

from __future__ import annotations

import pytest
from books import NO_LOAD, NO_STORE, World, text

BLOCK = 64
CHUNK = 256
PROMPT = 4096
POOL = 256


def make(world: World, *, chunk: int = CHUNK, budget: int = 8192, **fields):
    return world.engine(
        options={"chunk_tokens": chunk},
        block_size=BLOCK,
        num_blocks=POOL,
        max_batched_tokens=budget,
        max_model_len=8192,
        **fields,
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.pitfall(33)
def test_upper_bound_counts_the_external_hit(world: World, is_async: bool) -> None:
    """60 blocks of hit, 256 tokens scheduled: 64 − 60 = 4 blocks are stored, not 4 − 60 = none."""
    engine = make(world, async_scheduling=is_async)
    prompt = text("bound", PROMPT)
    head = engine.add(prompt[:3840])
    engine.run()
    assert world.runs(engine, head) == [("stored", 15)]
    before = world.server.totals()["stored"]

    engine.reset_prefix_cache()
    request = engine.add(prompt)
    engine.run()

    assert engine.local_hit(request) == 0
    assert engine.external_hit(request) == 60 * BLOCK
    computed = [step.scheduled[request] for step in engine.steps if request in step.scheduled]
    assert computed == [256]
    assert world.runs(engine, request) == [("loaded", 15), ("stored", 1)]
    assert world.server.totals()["stored"] - before == 1
    assert world.stored_chunks(engine, prompt) == 16


@pytest.mark.parametrize("chunk", [BLOCK, CHUNK], ids=["chunk64", "chunk256"])
@pytest.mark.pitfall(33)
def test_overlapping_hits_count_the_longer_one(world: World, chunk: int) -> None:
    """Local 44 blocks, external 32: the request begins at 44, and 32..43 are stored as well."""
    engine = make(world, chunk=chunk)
    prompt = text("overlap", PROMPT)
    in_server = engine.add(prompt[: 32 * BLOCK])
    engine.run()
    assert world.runs(engine, in_server) == [("stored", 32 * BLOCK // chunk)]
    local_only = engine.add(prompt[: 44 * BLOCK], transfer_params=NO_STORE | NO_LOAD)
    engine.run()
    assert world.runs(engine, local_only) == [("skipped:store_disabled", 44 * BLOCK // chunk)]

    request = engine.add(prompt)
    engine.run()

    assert engine.local_hit(request) == 44 * BLOCK
    assert engine.external_hit(request) == 0
    computed = [step.scheduled[request] for step in engine.steps if request in step.scheduled]
    assert computed == [20 * BLOCK]
    present = 32 * BLOCK // chunk
    assert world.runs(engine, request) == [
        ("present", present),
        ("stored", PROMPT // chunk - present),
    ]
    assert world.stored_chunks(engine, prompt) == PROMPT // chunk


def test_overlap_that_ends_inside_a_chunk(world: World) -> None:
    """Local 45 blocks: the chunk that spans the end of the local hit is stored whole."""
    engine = make(world)
    prompt = text("inside", PROMPT)
    engine.add(prompt[: 32 * BLOCK])
    engine.run()
    engine.add(prompt[: 45 * BLOCK], transfer_params=NO_STORE | NO_LOAD)
    engine.run()
    request = engine.add(prompt)
    engine.run()
    assert engine.local_hit(request) == 45 * BLOCK
    assert world.runs(engine, request) == [("present", 8), ("stored", 8)]
    assert world.stored_chunks(engine, prompt) == 16


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model_runner", [1, 2])
@pytest.mark.pitfall(33)
def test_cumulative_is_not_incremental(world: World, is_async: bool, model_runner: int) -> None:
    """Two rounds of 2048: after the second, 4096 tokens are valid, not 6144."""
    engine = make(world, budget=2048, async_scheduling=is_async, model_runner=model_runner)
    prompt = text("rounds", PROMPT + CHUNK)[:PROMPT]
    before = world.server.totals()["stored"]
    request = engine.add(prompt)
    engine.run()
    computed = [step.scheduled[request] for step in engine.steps if request in step.scheduled]
    assert computed == [2048, 2048]
    assert world.runs(engine, request) == [("stored", 16)]
    assert world.server.totals()["stored"] - before == 16
    assert world.stored_chunks(engine, [*prompt, *text("more", 2048)]) == 16


def test_each_round_stores_what_it_has_made_valid(world: World) -> None:
    """Round by round the server holds 8 and then 16 chunks: no block waits for the end."""
    engine = make(world, budget=2048)
    before = world.server.totals()["stored"]
    engine.add(text("each", PROMPT), max_tokens=2)
    counts = []
    for _ in range(2):
        engine.step()
        counts.append(world.server.totals()["stored"] - before)
    engine.run()
    assert counts == [8, 16]
