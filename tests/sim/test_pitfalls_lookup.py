"""Pitfalls of look-ups and allocations (docs/conformance.md), through vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from books import (
    World,
    await_lookup,
    cold_output,
    count_events,
    loaded_bytes,
    lookups,
    part_bytes,
    text,
    wait_until,
    warm,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvledger.sim import Kind, SimulatedEngine

CHUNKS = pytest.mark.parametrize("chunk", [16, 64], ids=["chunk16", "chunk64"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


# ---------------------------------------------------------------- what is answered


@pytest.mark.pitfall(10, 11, 12)
@CHUNKS
@SCHEDULERS
def test_every_answer_is_one_that_vllm_takes(world: World, chunk: int, is_async: bool) -> None:
    """Either "ask again", or nothing, or whole blocks within the request's tokens, to be loaded
    asynchronously; also when the server knows more than the prompt, and after preemptions."""
    engine = world.engine(options={"chunk_tokens": chunk}, num_blocks=34, async_scheduling=is_async)
    ask = engine.connector.get_num_new_matched_tokens
    answers: list[int | None] = []

    def checked(request: Any, local: int) -> tuple[int | None, bool]:
        tokens, is_load_async = ask(request, local)
        answers.append(tokens)
        assert is_load_async == bool(tokens)
        if tokens:
            assert tokens > 0
            assert tokens % 16 == 0
            assert local + tokens <= request.num_tokens
        return tokens, is_load_async

    engine.connector.get_num_new_matched_tokens = checked
    long = text("long", 160)
    engine.add(long, max_tokens=40)
    engine.run()
    for length in (1, 15, 16, 17, 63, 64, 65, 159, 160):
        for _ in range(2):  # the second one finds a part in vLLM's own cache
            engine.add(long[:length])
            engine.run()
        engine.reset_prefix_cache()
        for _ in range(2):  # the second one waits for the first one's load
            engine.add(long[:length])
        engine.run()
        engine.reset_prefix_cache()
    for number in range(6):
        engine.add(text(f"grows {number}", 70), max_tokens=70)
    engine.run()
    assert count_events(engine, Kind.PREEMPTED) > 0
    assert None in answers
    assert 0 in answers
    assert max(tokens or 0 for tokens in answers) == 160 // chunk * chunk


@pytest.mark.pitfall(10, 11, 12)
@pytest.mark.parametrize(
    "answer",
    [(160, False), (176, True), (0, True)],
    ids=["synchronous full hit", "more than the prompt", "nothing, asynchronously"],
)
def test_vllm_would_die_of_other_answers(world: World, answer: tuple[int, bool]) -> None:
    """Negative control: the real scheduler refuses what the test above says we never answer."""
    engine = warm(world, text("fatal", 160))
    engine.connector.scheduler.matched_tokens = lambda *_: answer
    engine.add(text("fatal", 160))
    with pytest.raises(AssertionError):
        engine.run()
    world.engines.remove(engine)
    engine.close()


# ---------------------------------------------------------------- nobody waits for ever


@pytest.mark.pitfall(15)
@SCHEDULERS
def test_nobody_waits_for_ever_for_the_load_of_another(world: World, is_async: bool) -> None:
    """Equal prompts wait for the first one's load, which never ends: it is given up, and so on."""
    prompt = text("stuck", 160)
    options = {"load_deadline_ms": 60.0}
    engine = warm(world, prompt, options=options, async_scheduling=is_async)
    engine.workers.ranks[0].connector.worker._load_budget_bytes = 0
    requests = [engine.add(prompt) for _ in range(3)]
    engine.run()
    assert None in lookups(engine, requests[1])
    assert count_events(engine, Kind.LOAD_FAILED) > 0
    expected = cold_output(prompt)
    assert [engine.outputs[request] for request in requests] == [expected] * 3


@pytest.mark.pitfall(15, 14)
@pytest.mark.bounds
def test_a_server_that_does_not_answer_is_not_waited_for(world: World) -> None:
    prompt = text("unanswered", 160)
    engine = warm(world, prompt, options={"lookup_deadline_ms": 60.0})
    world.server.pause()
    request = engine.add(prompt)
    engine.run()
    assert engine.outputs[request] == cold_output(prompt)
    answers = lookups(engine, request)
    assert answers[-1] == 0
    assert set(answers[:-1]) == {None}
    world.server.resume()
    channel = engine.connector.scheduler.channel

    def is_heard() -> bool:
        world.nudge(engine)
        return not channel.silent

    wait_until(is_heard, "the server is heard again")
    world.nudge(engine)  # a step more, to tell it what it has missed


# ---------------------------------------------------------------- names


def image(identifier: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=3, length=40),
    )


@pytest.mark.pitfall(19)
def test_equal_tokens_with_other_images_do_not_meet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All placeholders of images are the same token; vLLM's hash knows the picture."""
    from kvledger.sim import requests as sim_requests

    make_vllm_hasher = sim_requests.get_request_block_hasher

    def make_hasher(block_size: int, function: Any) -> Callable[[Any], list[bytes]]:
        hash_blocks = make_vllm_hasher(block_size, function)

        def with_image(request: Any) -> list[bytes]:
            # Only while it hashes: the scheduler would look for an encoder of images.
            request.mm_features = [image(request.request_id.split("-")[0])]
            hashes: list[bytes] = hash_blocks(request)
            request.mm_features = []
            return hashes

        return with_image

    monkeypatch.setattr(sim_requests, "get_request_block_hasher", make_hasher)
    engine = world.engine(num_blocks=64)
    prompt = [7] * 60 + text("caption", 100)
    hits = []
    for turn in range(2):
        for picture in ("cat", "dog"):
            engine.reset_prefix_cache()
            request = engine.add(prompt, request_id=f"{picture}-{turn}", variant=picture)
            engine.run()
            hits.append(engine.external_hit(request))
    assert hits == [0, 0, 160, 160]


@pytest.mark.pitfall(19, 55)
def test_adapters_bypass_the_cache(world: World) -> None:
    """vLLM's hash knows an adapter's name and path, and a file can change under both."""
    engine = world.engine(num_blocks=64)
    prompt = text("adapter", 160)
    outputs = []
    for content in ("of yesterday", "of today"):
        engine.reset_prefix_cache()
        adapter = LoRARequest("style", 1, "/adapters/style")
        request = engine.add(prompt, adapter=adapter, variant=content, max_tokens=4)
        engine.run()
        assert engine.external_hit(request) == 0
        assert world.runs(engine, request) == [("skipped:adapter_unknown", 10)]
        assert world.accounts(engine)[request]["miss"] == "adapter_unknown"
        outputs.append(engine.outputs[request])
    assert outputs[0] != outputs[1]


# ---------------------------------------------------------------- allocations


@pytest.mark.pitfall(20)
@CHUNKS
@pytest.mark.parametrize("left_out", [48, 160])
def test_what_vllm_takes_of_a_hit_is_loaded_and_no_more(
    world: World, chunk: int, left_out: int
) -> None:
    """vLLM allocates for fewer tokens than we have answered, or for none; what we load is the
    number that it names then."""
    prompt = text("less", 200)
    engine = warm(world, prompt, options={"chunk_tokens": chunk})
    found = 200 // chunk * chunk
    taken = max(0, found - left_out) if left_out < 160 else 0
    ask = engine.connector.get_num_new_matched_tokens

    def less(request: Any, local: int) -> tuple[int | None, bool]:
        tokens, _ = ask(request, local)
        assert tokens in (None, 0, found)
        return (taken, taken > 0) if tokens else (tokens, False)

    engine.connector.get_num_new_matched_tokens = less
    before = loaded_bytes(engine)
    request = engine.add(prompt, max_tokens=20)
    engine.run()
    engine.check()
    assert engine.external_hit(request) == taken
    assert loaded_bytes(engine) - before == part_bytes(engine) * taken // chunk
    assert engine.outputs[request] == cold_output(prompt, max_tokens=20)
    assert engine.connector.scheduler.lookups.leases == 0


@pytest.mark.pitfall(21, 22, 53)
@SCHEDULERS
@pytest.mark.parametrize("model_runner", [1, 2])
def test_a_load_begins_with_its_allocation_alone_and_is_made_once(
    world: World, is_async: bool, model_runner: int
) -> None:
    """The step that has to begin the load schedules no token: the request is not in its output and
    there is no attention metadata. vLLM tells of the request's admission a second time, later."""
    prompt = text("begins", 160)
    engine = warm(world, prompt, async_scheduling=is_async, model_runner=model_runner)
    connector = engine.workers.ranks[0].connector
    start, metadata = connector.start_load_kv, []

    def watched(context: Any, **arguments: Any) -> None:
        metadata.append(context.attn_metadata)
        start(context, **arguments)

    connector.start_load_kv = watched
    before = loaded_bytes(engine)
    request = engine.add(prompt)
    record = engine.begin_step()
    assert record.scheduled == {}
    engine.run_workers()
    assert record.loads_finished == {request}
    assert metadata == [None]
    engine.run()
    told = [
        (event.kind, event.tokens)
        for event in engine.events
        if event.request_id == request and event.kind in (Kind.ALLOCATED, Kind.PROMOTED)
    ]
    assert told == [(Kind.ALLOCATED, 160), (Kind.PROMOTED, 0)]
    assert loaded_bytes(engine) - before == 10 * part_bytes(engine)
    assert engine.outputs[request] == cold_output(prompt)


@pytest.mark.pitfall(26)
@CHUNKS
def test_targets_are_found_without_vllms_hashes(world: World, chunk: int) -> None:
    """Without a prefix cache of its own vLLM hashes no block, before or after an allocation."""
    engine = world.engine(options={"chunk_tokens": chunk}, num_blocks=64, prefix_caching=False)
    prompt = text("unhashed", 200)
    engine.add(prompt)
    engine.run()
    before = loaded_bytes(engine)
    request = engine.add(prompt, max_tokens=4)
    engine.run()
    hit = 200 // chunk
    assert engine.external_hit(request) == hit * chunk
    assert loaded_bytes(engine) - before == hit * part_bytes(engine)
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4)


# ---------------------------------------------------------------- pins


def waiting_hits(engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Twelve prompts of four blocks that the server holds; four look-ups may be sent at arrival."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.MAX_PREFETCHED", 4)
    prompts = [text(f"queue {number}", 64) for number in range(12)]
    for prompt in prompts:
        engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    return prompts


def await_those_asked(engine: SimulatedEngine, requests: list[str]) -> None:
    """Wait for the answers of the look-ups that were sent at arrival."""
    for request in requests:
        if engine.connector.scheduler.live[request].lookup is not None:
            await_lookup(engine, request)


@pytest.mark.pitfall(13, 60)
def test_a_long_queue_leases_no_more_than_its_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups are sent at arrival for some requests only; the others ask when it is their turn."""
    engine = world.engine(num_blocks=128)
    requests = []
    for prompt in waiting_hits(engine, monkeypatch):
        requests.append(engine.add(prompt))
        await_those_asked(engine, requests[-1:])
    assert world.server.totals()["leases"] == 4
    engine.run()
    assert [engine.external_hit(request) for request in requests] == [64] * 12


@pytest.mark.pitfall(13, 60)
def test_a_burst_leases_no_more_than_its_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster than the server answers: what was asked counts as well as what was answered."""
    engine = world.engine(num_blocks=128)
    prompts = waiting_hits(engine, monkeypatch)
    world.server.pause()
    requests = [engine.add(prompt) for prompt in prompts]
    world.server.resume()
    await_those_asked(engine, requests)
    assert world.server.totals()["leases"] == 4
    engine.run()
    assert [engine.external_hit(request) for request in requests] == [64] * 12
