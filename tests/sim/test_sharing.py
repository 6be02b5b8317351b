"""Who shares with whom (engines, namespaces, epochs of the weights), and who is evicted first."""

from __future__ import annotations

from typing import Any

import pytest
from books import World, cold_output, count_events, lookups, part_bytes, text

from kvledger.sim import Kind

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


# ---------------------------------------------------------------- two engines


@CHUNKS
@pytest.mark.pitfall(8)
def test_second_engine_hits_what_the_first_computed(world: World, chunk: int) -> None:
    """Pool size, budget, scheduler and path of the model differ; the bytes do not."""
    options = {"chunk_tokens": chunk}
    first = world.engine(options=options, num_blocks=64, max_batched_tokens=64)
    second = world.engine(
        options=options, num_blocks=200, max_batched_tokens=512, async_scheduling=True
    )
    prompt = text("shared", 330)
    one = first.add(prompt, max_tokens=30)
    first.run()
    world.settle(first)
    two = second.add(prompt, max_tokens=30)
    second.run()
    assert first.outputs[one] == second.outputs[two]
    assert second.external_hit(two) == 330 // chunk * chunk
    whole = prompt + first.outputs[one] + text("turn", 30)
    three = second.add(whole)
    second.run()
    assert second.external_hit(three) == 0  # it computed them itself
    assert world.runs(second, three)[0][0] == "present"


def test_two_engines_compute_the_same_prompt_at_once(world: World) -> None:
    """I3 across engines: each chunk is written once, whoever comes first."""
    engines = [world.engine(num_blocks=64, max_batched_tokens=32) for _ in range(2)]
    before = world.server.totals()["stored"]
    prompt = text("race", 320)
    requests = [engine.add(prompt, max_tokens=4) for engine in engines]
    while not all(engine.is_idle for engine in engines):
        for engine in engines:
            engine.step()
    for engine in engines:
        world.settle(engine)
    assert world.server.totals()["stored"] - before == 20
    for engine, request in zip(engines, requests, strict=True):
        fates = world.fates(engine, request)
        assert fates.total() == 20
        assert set(fates) <= {"stored", "present", "loaded"}
    assert world.stored_chunks(engines[0], prompt) == 20


@pytest.mark.pitfall(19)
def test_salts_do_not_share(world: World) -> None:
    engine = world.engine(num_blocks=256)
    prompt = text("salted", 160)
    hits = {}
    for turn in range(2):
        for salt in (None, "a", "b"):
            engine.reset_prefix_cache()
            request = engine.add(prompt, salt=salt)
            engine.run()
            hits[turn, salt] = engine.external_hit(request)
    assert hits == {(turn, salt): 160 * turn for turn in range(2) for salt in (None, "a", "b")}


# ---------------------------------------------------------------- namespaces


@pytest.mark.parametrize(
    ("fields", "options", "differing"),
    [
        ({}, {"namespace": "another"}, "operator.namespace"),
        ({}, {"model_revision": "2"}, "weights.content"),
        ({"weights": "other"}, {}, "weights.content"),
        ({"heads": 4}, {}, "worker."),
        ({"layers": 3}, {}, "worker."),
        ({"layout": "LBNHC"}, {}, "worker."),
        ({"block_size": 32}, {"chunk_tokens": 32}, ""),
        ({"ranks": 2}, {}, ""),
        ({}, {"chunk_tokens": 32}, "cache.chunk_tokens"),
    ],
    ids=[
        "namespace", "revision", "weights", "heads", "layers", "layout", "block", "ranks", "chunk"
    ],
)  # fmt: skip
@pytest.mark.pitfall(55)
def test_a_difference_never_shares(
    world: World, fields: dict[str, Any], options: dict[str, Any], differing: str
) -> None:
    """Nothing is found across a difference, and the status names a field that differs."""
    first = world.engine(num_blocks=64)
    prompt = text("apart", 160)
    first.add(prompt)
    first.run()
    second = world.engine(num_blocks=64, options=options, **fields)
    request = second.add(prompt)
    second.run()
    assert second.external_hit(request) == 0
    assert world.accounts(second)[request]["miss"] == "never_seen"
    ids = [world.status_of(engine)["namespace"] for engine in (first, second)]
    assert ids[0] != ids[1]
    spaces = {space["id"]: space for space in world.server.status()["namespaces"]}
    nearest = spaces[ids[1]]["nearest"]
    assert nearest is not None
    assert nearest["fields"]
    if nearest["id"] == ids[0]:
        assert any(differing in field for field in nearest["fields"]), nearest


# ---------------------------------------------------------------- I8: epochs


@CHUNKS
@SCHEDULERS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.pitfall(56)
def test_new_weights(world: World, chunk: int, is_async: bool, ranks: int) -> None:
    """Requests are alive when the weights change: old KV is never stored under the new epoch nor
    loaded by anybody, and later outputs are those of an engine with the new weights."""
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=256,
        max_batched_tokens=64,
        async_scheduling=is_async,
        ranks=ranks,
    )
    prompt = text("weights", 330)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    alive = [engine.add(prompt, max_tokens=100), engine.add(text("more", 200), max_tokens=100)]
    for _ in range(6):
        engine.step()
    while engine.in_flight:
        engine.finish_step()
    assert engine.can_preempt_all
    engine.update_weights("new")
    engine.run()
    for request in alive:
        fates = world.fates(engine, request)
        assert fates["skipped:epoch_changed"] > 0
    for turn in range(2):
        request = engine.add(prompt, max_tokens=20)
        engine.run()
        assert engine.external_hit(request) == (0 if turn == 0 else 330 // chunk * chunk)
        assert engine.outputs[request] == cold_output(
            prompt, max_tokens=20, weights="new", ranks=ranks
        )
        engine.reset_prefix_cache()
    assert world.status_of(engine)["namespace"]


@SCHEDULERS
@pytest.mark.parametrize("phase", ["scheduled", "executed", "partly loaded"])
@pytest.mark.pitfall(56)
def test_reset_with_a_load_under_way(world: World, is_async: bool, phase: str) -> None:
    """The load may not complete: it is answered as failed, and the prompt is computed."""
    engine = world.engine(num_blocks=64, async_scheduling=is_async)
    prompt = text("pending", 320)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    if phase == "partly loaded":
        engine.workers.ranks[0].connector.worker._load_budget_bytes = part_bytes(engine)
    request = engine.add(prompt, max_tokens=4)
    engine.begin_step()
    if phase != "scheduled":
        engine.run_workers()
    if phase == "partly loaded":
        engine.finish_step()
        engine.step()
    engine.reset_prefix_cache(connector=True)
    engine.run()
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4)
    if phase == "partly loaded":
        assert count_events(engine, Kind.LOAD_FAILED, request) == 1
    fates = world.fates(engine, request)
    assert set(fates) <= {"skipped:epoch_changed", "loaded"}
    assert not fates["stored"]
    engine.reset_prefix_cache()
    again = engine.add(prompt)
    engine.run()
    assert engine.external_hit(again) == 0


@SCHEDULERS
@pytest.mark.pitfall(56)
def test_reset_with_requests_alive(world: World, is_async: bool) -> None:
    """Requests of before store and load nothing more, even when they are preempted afterwards."""
    engine = world.engine(num_blocks=64, max_batched_tokens=64, async_scheduling=is_async)
    request = engine.add(text("alive", 100), max_tokens=100)
    queued = engine.add(text("queued", 64), max_tokens=2)
    for _ in range(20):
        engine.step()
    while engine.in_flight:
        engine.finish_step()
    engine.reset_prefix_cache(connector=True, running=True)
    before = world.server.totals()["stored"]
    engine.run()
    assert len(engine.outputs[request]) == 100
    assert engine.outputs[queued]
    assert world.server.totals()["stored"] == before
    fates = world.fates(engine, request)
    assert fates.total() == (100 + 100 - 1) // 16
    assert fates["skipped:epoch_changed"] > 0
    later = [tokens for tokens in lookups(engine, request)[1:] if tokens is not None]
    assert set(later) <= {0}


def test_weights_version_shares_an_updated_epoch(world: World) -> None:
    """Engines that the operator says were updated alike share; without that word they do not."""
    prompt = text("version", 160)
    for version, external in ((None, 0), ("7", 160)):
        options = {"namespace": f"version {version}"}
        if version is not None:
            options["weights_version"] = version
        hits = []
        for _ in range(2):
            engine = world.engine(num_blocks=64, options=options)
            engine.reset_prefix_cache(connector=True)
            world.attach(engine)
            request = engine.add(prompt)
            engine.run()
            world.settle(engine)
            hits.append(engine.external_hit(request))
        assert hits == [0, external]


# ---------------------------------------------------------------- eviction


def test_eviction_leaves_whole_prefixes(small_world: World) -> None:
    """A server that is too small: what is found is a prefix, and it comes back byte for byte."""
    world = small_world
    # Two chunks of 256 tokens to a page of the smallest arena: some 120 objects in all.
    shape = {"layers": 4, "heads": 12, "num_blocks": 256, "max_batched_tokens": 1024}
    engine = world.engine(options={"chunk_tokens": 256}, **shape)
    prompts = [text(f"big {n}", 2560) for n in range(20)]
    for prompt in prompts:
        engine.add(prompt)
        engine.run()
        engine.reset_prefix_cache()
    totals = world.server.totals()
    assert totals["evicted"] > 0
    assert totals["stored"] == 200
    assert totals["objects"] == 200 - totals["evicted"]
    hits = []
    for prompt in reversed(prompts):
        request = engine.add(prompt, transfer_params={"kvledger.store": False})
        engine.run()
        engine.reset_prefix_cache()
        hits.append(engine.external_hit(request) // 256)
        account = world.accounts(engine)[request]
        assert account["miss"] == ("" if hits[-1] == 10 else "evicted")
    assert sum(hits) == totals["objects"]
    assert hits[0] == 10
    assert sum(0 < hit < 10 for hit in hits) <= 1, "leaves go first, one chain after the other"
    assert hits == sorted(hits, reverse=True), "the oldest chains go first"


@pytest.mark.pitfall(58)
def test_leased_chunks_are_not_evicted(small_world: World) -> None:
    """While a hit is leased, an engine that fills the server cannot push it out."""
    world = small_world
    shape = {"layers": 4, "heads": 12, "num_blocks": 256, "max_batched_tokens": 1024}
    engine = world.engine(options={"chunk_tokens": 256}, **shape)
    filler = world.engine(options={"chunk_tokens": 256}, **shape)
    prompt = text("leased", 2560)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    leased = engine.add(prompt)  # looked up at its arrival, admitted much later
    for n in range(30):
        filler.add(text(f"fill {n}", 2560))
        filler.run()
        filler.reset_prefix_cache()
    assert world.server.totals()["evicted"] > 100
    engine.run()
    assert engine.external_hit(leased) == 2560
    assert engine.outputs[leased] == cold_output(prompt, layers=4, heads=12)


def test_twelve_conversations_in_too_little_memory(small_world: World) -> None:
    """Twelve growing conversations in turn, in memory for half of them: whole prefixes only, right
    outputs, and what is evicted in the middle of a life is stored again."""
    world = small_world
    shape = {"layers": 4, "heads": 12, "num_blocks": 300, "max_batched_tokens": 512}
    engine = world.engine(options={"chunk_tokens": 128}, **shape)
    histories = [text(f"talk {n}", 700) for n in range(12)]
    for turn in range(4):
        for number, history in enumerate(histories):
            engine.reset_prefix_cache()
            request = engine.add(history, max_tokens=20)
            engine.run()
            fates = world.fates(engine, request)
            assert fates.total() == (len(history) + 19) // 128
            assert not fates["skipped:parent_missing"]
            runs = world.runs(engine, request)
            assert [fate for fate, _ in runs] in (["loaded", "stored"], ["stored"], ["loaded"])
            history += engine.outputs[request] + text(f"say {turn} {number}", 180)
    totals = world.server.totals()
    assert totals["evicted"] > 0
    assert totals["hit_chunks"] > 0
