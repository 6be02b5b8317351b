"""Who may share a block: the same tokens under many identities, each against each other.

Row 29 of the list; see test_scenarios.py for the conventions. Each identity stores in its turn,
and after each turn all of them look up: exactly those find something whose identity has stored,
and the byte oracle compares what they load with what is theirs. (A reader could also be answered
with another's bytes: then it is the oracle that complains.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from books import NO_STORE, World, cold_output, text
from test_scenarios import make
from test_scenarios_lives import engine_process
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvledger.sim import SimulatedEngine
from kvledger.sim import engine as sim_engine

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])

IMAGES = {"image 1": "5f1d7a840c3e9b62", "image 2": "90ab34cdef129b62"}
"""Hashes of two images that agree in their last four hex digits."""
EMBEDDINGS = {"embeddings 1": 1.0, "embeddings 2": 2.0}

IDENTITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt a": {"salt": "a"},
    "salt b": {"salt": "b"},
    **{name: {"variant": name} for name in (*IMAGES, *EMBEDDINGS)},
}


def multimodal_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with a variant of above get the names that vLLM gives to such input.

    Only the names: there is no encoder in a simulated engine. The variant is also what makes the
    pattern of their KV differ.
    """
    make_request = sim_engine.make_request

    def make_named(request_id: str, prompt: Any, hasher: Any, **keywords: Any) -> Request:
        def names(request: Request) -> list[bytes]:
            if prompt.variant in IMAGES:
                position = PlaceholderRange(offset=0, length=8)
                request.mm_features = [
                    MultiModalFeatureSpec(None, "image", IMAGES[prompt.variant], position)
                ]
            elif prompt.variant in EMBEDDINGS:
                value = EMBEDDINGS[prompt.variant]
                request.prompt_embeds = torch.full((len(prompt.tokens), 4), value)
            found: list[bytes] = hasher(request)
            request.mm_features, request.prompt_embeds = [], None
            return found

        request: Request = make_request(request_id, prompt, names, **keywords)
        return request

    monkeypatch.setattr(sim_engine, "make_request", make_named)


@CHUNKS
def test_scenario_29_requests(world: World, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Salts, images, embeddings: each finds its own chunks only, in the same engine and in a new
    one with the same everything."""
    multimodal_requests(monkeypatch)
    writer, reader = (make(world, chunk=chunk, prefix_caching=False) for _ in range(2))
    prompt = text("row 29", 2 * chunk)
    stored: set[str] = set()
    for storing, identity in IDENTITIES.items():
        writer.add(prompt, **identity)
        writer.run()
        world.settle(writer)
        stored.add(storing)
        for engine in (writer, reader):
            hits = {}
            for name, looking in IDENTITIES.items():
                request = engine.add(prompt, transfer_params=NO_STORE, **looking)
                engine.run()
                hits[name] = engine.external_hit(request)
            assert hits == {name: 2 * chunk * (name in stored) for name in IDENTITIES}


def test_scenario_29_names_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the above: without the variants' names the two images would meet."""
    hashes = {}
    for named in (False, True):
        if named:
            multimodal_requests(monkeypatch)
        with SimulatedEngine(None) as engine:
            for variant in IMAGES:
                request = engine.add(text("row 29", 32), variant=variant)
                hashes[named, variant] = tuple(engine.scheduler.requests[request].block_hashes)
                engine.abort(request)
    assert len({hashes[False, variant] for variant in IMAGES}) == 1
    assert len({hashes[True, variant] for variant in IMAGES}) == len(IMAGES)


@CHUNKS
def test_scenario_29_adapters(world: World, chunk: int) -> None:
    """Adapters of other names, and of one name and path with other contents: in this version none
    of them loads or stores anything, and the account says why."""
    engine = make(world, chunk=chunk, prefix_caching=False)
    prompt = text("row 29", 2 * chunk)
    adapters = [
        (None, ""),
        (LoRARequest("a", 1, "/adapters/a"), ""),
        (LoRARequest("b", 2, "/adapters/b"), ""),
        (LoRARequest("a", 1, "/adapters/a"), "trained on"),
    ]
    for turn in range(2):
        for adapter, variant in adapters:
            request = engine.add(prompt, adapter=adapter, variant=variant)
            engine.run()
            if adapter is None:
                assert engine.external_hit(request) == 2 * chunk * turn
                continue
            assert engine.external_hit(request) == 0
            assert world.fates(engine, request) == {"skipped:adapter_unknown": 2}
            assert world.accounts(engine)[request]["miss"] == "adapter_unknown"


Change = Callable[[Any], None]


def other_dtype(config: Any) -> None:
    config.model_config.dtype = torch.bfloat16


def other_cache_dtype(config: Any) -> None:
    config.cache_config.cache_dtype = "fp8"


def nothing(_: Any) -> None:
    """The configuration as it is."""


ENGINES: dict[str, tuple[Change, dict[str, Any], dict[str, Any]]] = {
    "plain": (nothing, {}, {}),
    "bf16": (other_dtype, {}, {}),
    "fp8": (other_cache_dtype, {}, {}),
    "tensor parallel 2": (nothing, {"ranks": 2}, {}),
    "tensor parallel 4": (nothing, {"ranks": 4}, {}),
    "other weights": (nothing, {"weights": "other"}, {}),
    "other revision": (nothing, {}, {"model_revision": "2"}),
    "other namespace": (nothing, {}, {"namespace": "row 29, another"}),
    "epoch": (nothing, {}, {}),
}


def engine_of(
    world: World, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> SimulatedEngine:
    change, fields, options = ENGINES[kind]
    build_config = sim_engine.build_config

    def build_changed(*arguments: Any) -> Any:
        config = build_config(*arguments)
        change(config)
        return config

    with monkeypatch.context() as patch:
        patch.setattr(sim_engine, "build_config", build_changed)
        engine = world.engine(
            options={"chunk_tokens": chunk, **options},
            num_blocks=64,
            prefix_caching=False,
            **fields,
        )
    if kind == "epoch":
        engine.reset_prefix_cache(connector=True)
        world.attach(engine)
    return engine


@CHUNKS
def test_scenario_29_engines(world: World, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Representation, ranks, weights, epoch, the operator's words: nothing is found across any of
    them. A second engine with the same everything finds what the first has stored; after a reset
    it does not, since nobody knows that it has the same weights again."""
    engines = {kind: engine_of(world, kind, chunk, monkeypatch) for kind in ENGINES}
    engines["plain again"] = engine_of(world, "plain", chunk, monkeypatch)
    engines["epoch again"] = engine_of(world, "epoch", chunk, monkeypatch)
    prompt = text("row 29", 2 * chunk)
    found_by: dict[str, set[str]] = {kind: {kind} for kind in engines}
    found_by["plain"] = {"plain", "plain again"}
    expected: set[str] = set()
    for storing in ENGINES:
        engines[storing].add(prompt)
        engines[storing].run()
        world.settle(engines[storing])
        expected |= found_by[storing]
        hits = {}
        for kind, engine in engines.items():
            request = engine.add(prompt, transfer_params=NO_STORE)
            engine.run()
            hits[kind] = engine.external_hit(request)
        assert hits == {kind: 2 * chunk * (kind in expected) for kind in engines}


IN_A_FRESH_PROCESS = """
engine = world.engine(num_blocks=160)
request = engine.add(text("row 29", 32), transfer_params=NO_STORE)
engine.run()
print("outcome", engine.external_hit(request), engine.outputs[request][0], flush=True)
"""


def test_scenario_29_fresh_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same everything in a fresh process, whose Python hashes are random: all is found. With
    a seed of its own vLLM names blocks from another root: nothing is."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, prompt = world.engine(num_blocks=160), text("row 29", 32)
    first.add(prompt)
    first.run()
    world.settle(first)
    with engine_process(world, IN_A_FRESH_PROCESS) as lines:
        outcome = next(line for line in lines if line.startswith("outcome"))
    assert outcome == f"outcome 32 {cold_output(prompt)[0]}"
    world.close(first)
    monkeypatch.setenv("PYTHONHASHSEED", "4711")
    other = world.engine(num_blocks=160)
    request = other.add(prompt)
    other.run()
    assert other.external_hit(request) == 0
    assert world.accounts(other)[request]["miss"] == "never_seen"
    world.close(other)
    monkeypatch.delenv("PYTHONHASHSEED")
    again = world.engine(num_blocks=160)
    request = again.add(prompt)
    again.run()
    assert again.external_hit(request) == 32
