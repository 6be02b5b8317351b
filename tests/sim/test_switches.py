"""What may be stored and loaded at all: the role, the options, and a request's own switches."""

from __future__ import annotations

from typing import Any

import pytest
from books import NO_LOAD, NO_STORE, World, lookups, text

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])


@pytest.mark.parametrize(
    ("switches", "first", "second"),
    [
        ({}, "stored", "loaded"),
        (NO_STORE, "skipped:store_disabled", "skipped:store_disabled"),
        (NO_LOAD, "stored", "present"),
        (NO_STORE | NO_LOAD, "skipped:store_disabled", "skipped:store_disabled"),
        ({"kvledger.store": "no"}, "stored", "loaded"),
    ],
    ids=["none", "no-store", "no-load", "neither", "nonsense"],
)
def test_switches_of_a_request(
    world: World, switches: dict[str, Any], first: str, second: str
) -> None:
    """A request's own switches; what is not true or false is a mistake, and taken as true."""
    engine = world.engine(num_blocks=64)
    prompt = text("switches", 160)
    fates = []
    for _ in range(2):
        engine.reset_prefix_cache()
        request = engine.add(prompt, transfer_params=switches)
        engine.run()
        fates.append(world.runs(engine, request))
    assert fates == [[(first, 10)], [(second, 10)]]


@pytest.mark.parametrize(
    ("role", "stores", "loads"),
    [("kv_both", True, True), ("kv_producer", True, False), ("kv_consumer", False, True)],
)
def test_roles(world: World, role: str, stores: bool, loads: bool) -> None:
    """A consumer never stores, a producer never loads."""
    prompt = text("roles", 160)
    writer = world.engine(num_blocks=64)
    writer.add(prompt[:80])
    writer.run()
    engine = world.engine(num_blocks=64, kv_role=role)
    request = engine.add(prompt)
    engine.run()
    assert engine.external_hit(request) == (80 if loads else 0)
    head = "loaded" if loads else "present"
    if not stores:
        assert world.runs(engine, request) == [("loaded", 5), ("skipped:store_disabled", 5)]
    else:
        assert world.runs(engine, request) == [(head, 5), ("stored", 5)]
    assert world.stored_chunks(engine, prompt) == (10 if stores else 5)
    assert (lookups(engine, request) == [0]) == (not loads)


@CHUNKS
def test_store_only_the_prompt(world: World, chunk: int) -> None:
    """``kvledger.store`` "prompt": generated chunks are skipped, and the account says why."""
    engine = world.engine(options={"chunk_tokens": chunk, "store": "prompt"}, num_blocks=64)
    request = engine.add(text("prompt", 100), max_tokens=101)
    engine.run()
    assert world.runs(engine, request) == [
        ("stored", 100 // chunk),
        ("skipped:generated_not_stored", 200 // chunk - 100 // chunk),
    ]
    whole = text("prompt", 100) + engine.outputs[request]
    assert world.stored_chunks(engine, whole) == 100 // chunk


@pytest.mark.parametrize(
    ("options", "fate"),
    [({"store": "none"}, "skipped:store_disabled"), ({"load": False}, "present")],
    ids=["store-none", "load-false"],
)
def test_engine_wide_switches(world: World, options: dict[str, Any], fate: str) -> None:
    """``kvledger.store`` "none" and ``kvledger.load`` false hold for every request."""
    prompt = text("wide", 160)
    if "load" in options:
        writer = world.engine(num_blocks=64)
        writer.add(prompt)
        writer.run()
    engine = world.engine(options=options, num_blocks=64)
    request = engine.add(prompt)
    engine.run()
    assert engine.external_hit(request) == 0
    assert world.runs(engine, request) == [(fate, 10)]
    assert world.stored_chunks(engine, prompt) == (10 if "load" in options else 0)


@pytest.mark.pitfall(18)
def test_reading_skipped_still_stores(world: World) -> None:
    """Prompt log-probabilities: nothing is loaded; what is new is stored, the rest is known."""
    engine = world.engine(num_blocks=64)
    prompt = text("logprobs", 160)
    engine.add(prompt[:80])
    engine.run()
    request = engine.add(prompt, skip_reading_prefix_cache=True)
    engine.run()
    assert engine.external_hit(request) == 0
    assert engine.local_hit(request) == 0
    assert world.runs(engine, request) == [("present", 5), ("stored", 5)]
    assert world.stored_chunks(engine, prompt) == 10
