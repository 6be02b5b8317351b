"""What is loaded, how often it is asked for, and what a load that fails leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from books import (
    NO_LOAD,
    NO_STORE,
    World,
    loaded_bytes,
    lookups,
    part_bytes,
    text,
)

from kvledger.sim import Kind, SimulatedEngine

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def computed(engine: SimulatedEngine, request_id: str) -> list[int]:
    """Tokens scheduled for a request, step by step."""
    return [step.scheduled[request_id] for step in engine.steps if request_id in step.scheduled]


# ---------------------------------------------------------------- hits


@CHUNKS
@SCHEDULERS
@pytest.mark.pitfall(11)
def test_partial_hits(world: World, chunk: int, is_async: bool) -> None:
    """A prompt that shares ``n`` tokens loads the whole chunks among them, and no more."""
    engine = world.engine(
        options={"chunk_tokens": chunk}, num_blocks=128, async_scheduling=is_async
    )
    base = text("partial", 320)
    engine.add(base)
    engine.run()
    for shared in (0, 15, 16, 17, 63, 64, 65, 200, 319):
        engine.reset_prefix_cache()
        prompt = [*base[:shared], (base[shared] + 1) % 512, *text(f"other {shared}", 60)]
        request = engine.add(prompt)
        engine.run()
        hit = shared // chunk
        assert engine.external_hit(request) == hit * chunk
        assert sum(computed(engine, request)) == len(prompt) - hit * chunk
        due = len(prompt) // chunk
        expected = [("loaded", hit), ("stored", due - hit)]
        assert world.runs(engine, request) == [run for run in expected if run[1]]


@CHUNKS
@SCHEDULERS
@pytest.mark.pitfall(10, 21)
def test_full_prompt_hit(world: World, chunk: int, is_async: bool) -> None:
    """512 tokens: all 512 are loaded and one is computed; 513: 512 are loaded."""
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=128,
        max_batched_tokens=1024,
        async_scheduling=is_async,
    )
    prompt = text("full", 513)
    outputs = {}
    for length in (513, 512):
        request = engine.add(prompt[:length])
        engine.run()
        outputs[length] = engine.outputs[request]
        engine.reset_prefix_cache()
    stored = world.server.totals()["stored"]
    for length in (512, 513):
        request = engine.add(prompt[:length])
        engine.run()
        assert engine.external_hit(request) == 512
        assert engine.allocations(request)[0].is_async
        assert computed(engine, request) == [1]
        assert engine.outputs[request] == outputs[length]
        assert world.runs(engine, request) == [("loaded", 512 // chunk)]
        engine.reset_prefix_cache()
    assert world.server.totals()["stored"] == stored


@pytest.mark.pitfall(20)
def test_hit_behind_a_local_one(world: World) -> None:
    """Local 288, server 512, chunk 256: 224 tokens are loaded, into blocks 18 to 31 only."""
    engine = world.engine(options={"chunk_tokens": 256}, num_blocks=128)
    prompt = text("behind", 600)
    engine.add(prompt[:512])
    engine.run()
    engine.reset_prefix_cache()
    engine.add(prompt[:289], transfer_params=NO_LOAD | NO_STORE)
    engine.run()
    before = loaded_bytes(engine)
    request = engine.add(prompt)
    engine.run()
    assert (engine.local_hit(request), engine.external_hit(request)) == (288, 224)
    assert loaded_bytes(engine) - before == part_bytes(engine) * 224 // 256
    assert world.runs(engine, request) == [("present", 1), ("loaded", 1)]


@pytest.mark.parametrize(("minimum", "external"), [(None, 0), (1, 16), (64, 0)])
def test_one_block_behind_a_local_hit_is_not_worth_a_load(
    world: World, minimum: int | None, external: int
) -> None:
    """A repeated prompt of 64 tokens: vLLM reports 48 of them, and the last block is computed."""
    options = {} if minimum is None else {"min_hit_tokens": minimum}
    engine = world.engine(options=options, num_blocks=32)
    prompt = text("repeat", 64)
    engine.add(prompt)
    engine.run()
    again = engine.add(prompt)
    engine.run()
    assert (engine.local_hit(again), engine.external_hit(again)) == (48, external)
    last = ("present", 4) if not external else ("loaded", 1)
    assert world.runs(engine, again)[-1] == last


@pytest.mark.pitfall(13)
def test_look_up_is_repeated_while_memory_is_short(world: World) -> None:
    """I6: asked at every step for as long as nothing can be allocated; the answer is the same,
    and the server has been asked once."""
    engine = world.engine(num_blocks=32, max_batched_tokens=512)
    prompt = text("short", 256)
    engine.add(prompt[:192])
    engine.run()
    engine.reset_prefix_cache()
    big = engine.add(text("big", 280), max_tokens=80)
    engine.step()
    before = world.server.totals()["lookups"]
    request = engine.add(prompt)
    engine.run()
    assert engine.outputs[big]
    answers = lookups(engine, request)
    assert len(answers) >= 10
    assert set(answers) == {192}
    assert world.server.totals()["lookups"] == before + 1
    assert engine.external_hit(request) == 192
    assert world.runs(engine, request) == [("loaded", 12), ("stored", 4)]


@CHUNKS
@SCHEDULERS
def test_equal_prompts_at_once_are_loaded_once(world: World, chunk: int, is_async: bool) -> None:
    """Four equal prompts after a reset: each chunk crosses once, the rest are local hits."""
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=128,
        max_batched_tokens=1024,
        async_scheduling=is_async,
    )
    prompt = text("equal", 330)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    before = loaded_bytes(engine)
    requests = [engine.add(prompt) for _ in range(4)]
    engine.run()
    hit = 330 // chunk * chunk
    assert loaded_bytes(engine) - before == part_bytes(engine) * (hit // chunk)
    assert [engine.external_hit(request) for request in requests] == [hit, 0, 0, 0]
    assert all(engine.local_hit(request) >= hit for request in requests[1:])
    first = {tuple(engine.outputs[request]) for request in requests}
    assert len(first) == 1


def test_shared_prefix_at_once_is_loaded_once(world: World) -> None:
    """Prompts with different ends: the shared chunks are loaded by one, the own ones by each."""
    engine = world.engine(num_blocks=256, max_batched_tokens=2048)
    head = text("head", 320)
    prompts = [head + text(f"tail {n}", 160) for n in range(4)]
    for prompt in prompts:
        engine.add(prompt)
        engine.run()
    engine.reset_prefix_cache()
    before = loaded_bytes(engine)
    requests = [engine.add(prompt) for prompt in prompts]
    engine.run()
    assert [engine.external_hit(request) for request in requests] == [480, 160, 160, 160]
    assert loaded_bytes(engine) - before == part_bytes(engine) * (30 + 3 * 10)


@pytest.mark.pitfall(18)
def test_reading_skipped_loads_nothing(world: World) -> None:
    engine = world.engine(num_blocks=64)
    prompt = text("skip", 160)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    before = loaded_bytes(engine)
    request = engine.add(prompt, skip_reading_prefix_cache=True)
    engine.run()
    assert loaded_bytes(engine) == before
    assert engine.external_hit(request) == 0
    assert world.runs(engine, request) == [("present", 10)]
    assert world.accounts(engine)[request]["miss"] == "reading_skipped"


@pytest.mark.parametrize(
    ("length", "options", "miss"),
    [
        (8, {}, "no_full_chunk"),
        (100, {}, "never_seen"),
        (100, {"load": False}, "load_disabled"),
        (34, {"chunk_tokens": 544}, "no_full_chunk"),
    ],
)
def test_every_miss_has_a_reason(
    world: World, length: int, options: dict[str, Any], miss: str
) -> None:
    engine = world.engine(options=options, num_blocks=64)
    request = engine.add(text("reason", length))
    engine.run()
    assert world.accounts(engine)[request]["miss"] == miss


def test_load_budget_spreads_a_load_over_steps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long load takes several steps, in which others go on; it is answered once, when whole."""
    engine = world.engine(num_blocks=256)
    prompt = text("budget", 1600)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    worker = engine.workers.ranks[0].connector.worker
    monkeypatch.setattr(worker, "_load_budget_bytes", 7 * part_bytes(engine))
    other = engine.add(text("other", 40), max_tokens=40)
    engine.step()
    begun = engine.step_count
    request = engine.add(prompt)
    engine.run()
    finished = next(
        event.step
        for event in engine.events
        if event.kind is Kind.LOAD_FINISHED and event.request_id == request
    )
    assert finished - begun >= 100 // 7
    assert len(engine.outputs[other]) == 40
    assert world.runs(engine, request) == [("loaded", 100)]
