"""Pitfalls of the steps and of completion (docs/conformance.md), through vLLM's real scheduler."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from typing import Any

import pytest
from books import (
    DEADLINE_SECONDS,
    World,
    await_lookup,
    cold_output,
    count_events,
    part_bytes,
    text,
    warm,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvledger.sim import Kind, SimulatedEngine
from kvledger.vllm.transfer import TransferError

SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])

Kept = list[tuple[Any, bytes]]
"""Metadata of each step, and what it was when it was handed over."""


def keep_metadata(engine: SimulatedEngine) -> Kept:
    """Note what is handed to the workers in every step from now on."""
    build, kept = engine.connector.build_connector_meta, Kept()

    def keeping(output: Any) -> Any:
        metadata = build(output)
        kept.append((metadata, pickle.dumps(metadata)))
        return metadata

    engine.connector.build_connector_meta = keeping
    return kept


def fail_next_copy(engine: SimulatedEngine, rank: int = 0) -> None:
    """The next copy of a rank from the server into its blocks fails, after some bytes."""
    transfer = engine.workers.ranks[rank].connector.worker._attachment.transfer
    load = transfer.load

    def failing(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        transfer.load = load
        load(group, block_ids[:3], offsets[:3][::-1], part_offset)  # wrong bytes, too
        raise TransferError("a copy that a test lets fail")

    transfer.load = failing


# ---------------------------------------------------------------- metadata


@pytest.mark.pitfall(27)
@SCHEDULERS
def test_metadata_is_not_touched_after_it_was_handed_over(world: World, is_async: bool) -> None:
    """In one process the workers get the very object; with worker processes a copy of it. Loads,
    failures, preemptions and rejected drafts later, every step's is what it was."""
    outputs = []
    for pickled in (False, True):
        engine = world.engine(
            options={"namespace": f"metadata {pickled} {is_async}"},
            num_blocks=34,
            max_batched_tokens=64,
            async_scheduling=is_async,
            drafts=3,
            pickle_metadata=pickled,
        )
        kept = keep_metadata(engine)
        requests = [engine.add(text(f"kept {n}", 60 + n), max_tokens=60) for n in range(5)]
        engine.run()
        engine.reset_prefix_cache()
        fail_next_copy(engine)
        requests += [engine.add(text(f"kept {n}", 60 + n), max_tokens=60) for n in range(5)]
        engine.run()
        assert count_events(engine, Kind.PREEMPTED) > 0
        assert count_events(engine, Kind.LOAD_FAILED) > 0
        assert count_events(engine, Kind.LOAD_FINISHED) > 0
        assert all(pickle.dumps(metadata) == before for metadata, before in kept)
        outputs.append([engine.outputs[request] for request in requests])
    assert outputs[0] == outputs[1]


@pytest.mark.pitfall(28)
def test_metadata_is_small(world: World) -> None:
    """256 blocks are stored in one step and loaded in another: some twenty bytes for each."""
    engine = world.engine(
        num_blocks=300, max_batched_tokens=4096, max_model_len=8192, ranks=2, pickle_metadata=True
    )
    kept = keep_metadata(engine)
    prompt = text("small", 4096)
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    request = engine.add(prompt)
    engine.run()
    assert engine.external_hit(request) == 4096
    sizes = [len(before) for _, before in kept]
    plans = [metadata.plan for metadata, _ in kept]
    stored = max(sum(len(copy.offsets) // 8 for copy in plan.stores) for plan in plans)
    loaded = max(len(plan.loads[0].copies[0].offsets) // 8 for plan in plans if plan.loads)
    assert stored == loaded == 256
    assert max(sizes) < 1500 + 24 * 256
    assert sorted(sizes)[len(sizes) // 2] < 1500


# ---------------------------------------------------------------- completion


@pytest.mark.pitfall(37)
@SCHEDULERS
def test_a_load_is_over_when_its_slowest_rank_says_so(world: World, is_async: bool) -> None:
    """The second rank copies a chunk a step. Each rank reports once; vLLM counts both."""
    prompt = text("slow", 160)
    engine = warm(world, prompt, ranks=2, async_scheduling=is_async)
    told: list[Counter[str]] = []
    for rank in engine.workers.ranks:
        report, counts = rank.connector.get_transfer_results, Counter[str]()

        def counted(finished: set[str], report: Any = report, counts: Any = counts) -> Any:
            results = report(finished)
            counts.update(results.finished_recving or ())
            return results

        rank.connector.get_transfer_results = counted
        told.append(counts)
    engine.workers.ranks[1].connector.worker._load_budget_bytes = part_bytes(engine)
    begun = engine.step_count + 1
    request = engine.add(prompt, max_tokens=4)
    engine.run()
    ends = [
        e.step for e in engine.events if (e.kind, e.request_id) == (Kind.LOAD_FINISHED, request)
    ]
    assert len(ends) == 1
    assert ends[0] >= begun + 9
    assert told == [Counter({request: 1})] * 2
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4, ranks=2)
    assert engine.connector.get_finished_count() is None, "every rank counts"


@pytest.mark.pitfall(34, 35, 37, 38, 39)
@SCHEDULERS
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failure_is_told_with_the_end_of_the_load(
    world: World, is_async: bool, ranks: int
) -> None:
    """Of the whole request, never of single blocks; in the step in which the load ends, so that no
    block of it is hashed; and by each rank once."""
    prompt = text("told", 160)
    engine = warm(world, prompt, ranks=ranks, async_scheduling=is_async)
    fail_next_copy(engine, rank=ranks - 1)
    request = engine.add(prompt, max_tokens=4)
    told: Counter[str] = Counter()
    while not engine.is_idle:
        engine.step()
        if not engine.waits_for_workers:
            engine.check()  # no block of vLLM's own cache holds what the failed copy has left
    for record in engine.steps:
        assert not record.invalid_blocks
        assert record.loads_failed <= record.loads_finished
        told.update(record.loads_failed)
    assert told == Counter({request: 1})
    assert engine.outputs[request] == cold_output(prompt, max_tokens=4, ranks=ranks)


@pytest.mark.pitfall(40)
def test_deadlines_do_not_wait_for_reports(world: World) -> None:
    """While nothing is computed and nothing is reported, vLLM does not call back: a load that hangs
    is given up all the same."""
    prompt = text("clock", 160)
    engine = warm(world, prompt, options={"load_deadline_ms": 60.0})
    engine.workers.ranks[0].connector.worker._load_budget_bytes = 0
    update, calls = engine.connector.update_connector_output, []

    def counted(output: Any) -> None:
        calls.append(engine.step_count)
        update(output)

    engine.connector.update_connector_output = counted
    request = engine.add(prompt)
    begun = engine.step_count + 1
    end = time.monotonic() + DEADLINE_SECONDS
    while not count_events(engine, Kind.LOAD_FAILED, request):
        engine.step()
        assert time.monotonic() < end, "the load is never given up"
    failed = engine.step_count
    assert failed - begun > 3, "there were steps without a report"
    assert [step for step in calls if step < failed] == []
    engine.run()
    assert engine.outputs[request] == cold_output(prompt)


# ---------------------------------------------------------------- data hazards


@pytest.fixture
def zeroing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new block is cleared by the workers, as in models that need it."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda _: True))


def count_zeroed(engine: SimulatedEngine) -> list[int]:
    """Blocks that the first rank clears from now on."""
    memory, zeroed = engine.workers.ranks[0].memory, list[int]()
    zero = memory.zero

    def counted(block_ids: list[int]) -> None:
        zeroed.extend(block_ids)
        zero(block_ids)

    memory.zero = counted  # type: ignore[method-assign]
    return zeroed


@pytest.mark.pitfall(44)
@pytest.mark.usefixtures("zeroing")
@SCHEDULERS
@pytest.mark.parametrize("fails", [False, True], ids=["loads", "fails"])
def test_what_is_loaded_is_not_wiped(world: World, is_async: bool, fails: bool) -> None:
    """Blocks are cleared, given to loads and lost to others all the time; every byte is right."""
    engine = world.engine(num_blocks=34, max_batched_tokens=64, async_scheduling=is_async)
    zeroed = count_zeroed(engine)
    prompts = [text(f"wiped {n}", 100 + 9 * n) for n in range(5)]
    for turn in range(2):
        if turn and fails:
            fail_next_copy(engine)
        requests = [engine.add(prompt, max_tokens=60) for prompt in prompts]
        while not engine.is_idle:
            engine.step()
            if not engine.waits_for_workers:
                engine.check()
        engine.reset_prefix_cache()
        for request, prompt in zip(requests, prompts, strict=True):
            assert engine.outputs[request] == cold_output(prompt, max_tokens=60)
    assert zeroed
    assert count_events(engine, Kind.PREEMPTED) > 0
    assert count_events(engine, Kind.LOAD_FINISHED) > 0
    assert bool(count_events(engine, Kind.LOAD_FAILED)) == fails
    for request, prompt in zip(requests, prompts, strict=True):
        whole = prompt + engine.outputs[request]
        assert world.stored_chunks(engine, whole) == (len(whole) - 1) // 16


@pytest.mark.pitfall(42, 44)
@pytest.mark.usefixtures("zeroing")
def test_what_is_read_at_its_last_moment_is_not_wiped_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots come after the request's last step, and in the step that reads its blocks they are
    cleared for their new owner."""
    monkeypatch.setattr("kvledger.vllm.scheduler_side.ANSWER_WAIT_SECONDS", 1e-3)
    engine = world.engine(num_blocks=14, prefix_caching=False)
    zeroed = count_zeroed(engine)
    prompt = text("moment", 200)
    request = engine.add(prompt)
    await_lookup(engine, request)
    world.server.pause()
    engine.step()
    assert engine.outputs[request]
    world.server.resume()
    zeroed.clear()
    engine.add(text("owner", 200))
    engine.run()
    assert len(set(engine.allocations(request)[0].block_ids[0]) & set(zeroed)) >= 12
    assert world.runs(engine, request) == [("stored", 12)]
    assert world.stored_chunks(engine, prompt) == 12


@pytest.mark.pitfall(52)
@SCHEDULERS
def test_nothing_depends_on_the_hooks_of_layers(world: World, is_async: bool) -> None:
    """When a full CUDA graph is replayed, no Python of a layer runs. Here none ever does."""
    engine = world.engine(num_blocks=64, ranks=2, async_scheduling=is_async)
    for rank in engine.workers.ranks:
        rank.connector.wait_for_layer_load = lambda *_, **__: None
        rank.connector.save_kv_layer = lambda *_, **__: None
    prompt = text("graph", 160)
    runs = []
    for _ in range(2):
        engine.reset_prefix_cache()
        request = engine.add(prompt, max_tokens=4)
        engine.run()
        engine.check()
        runs.append(world.runs(engine, request))
    assert runs == [[("stored", 10)], [("loaded", 10)]]
    assert engine.connector.requires_piecewise_for_cudagraph({}) is False


@pytest.mark.pitfall(29, 30)
@SCHEDULERS
@pytest.mark.parametrize("model_runner", [1, 2])
def test_rejected_drafts_are_never_stored(world: World, is_async: bool, model_runner: int) -> None:
    """Every draft is wrong: after each step the slot behind the last token holds foreign bytes, at
    the end too; and vLLM's count of computed tokens goes up and down again."""
    engine = world.engine(
        num_blocks=128,
        drafts=7,
        draft_acceptance=0.0,
        async_scheduling=is_async,
        model_runner=model_runner,
    )
    prompt = text("rejected", 40)
    request = engine.add(prompt, max_tokens=56)
    engine.run()
    whole = prompt + engine.outputs[request]
    assert world.runs(engine, request) == [("stored", 95 // 16)]
    assert world.stored_chunks(engine, whole) == 95 // 16
    steps = [step for step in engine.steps if request in step.scheduled]
    ends = [step.computed[request] + step.scheduled[request] for step in steps]
    begins = [step.computed[request] for step in steps]
    assert any(later < end for end, later in zip(ends, begins[1:], strict=False)), "no roll-back"
