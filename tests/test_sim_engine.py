"""The simulated engine with the reference connector: hits, phases, aborts, resets, drafts."""

from __future__ import annotations

import pytest

import sim_reference_connector
from kvledger.sim import EngineStuckError, Kind, OracleError, SimulatedEngine
from kvledger.sim.pattern import Prefix
from sim_reference_connector import NeverConnector, ReferenceConnector
from sim_support import TIGHT, maker

ROOMY = {"block_size": 16, "num_blocks": 100, "max_batched_tokens": 256}


@pytest.fixture(autouse=True)
def empty_stores():
    sim_reference_connector.STORES.clear()


def kinds(engine, request_id):
    return [event.kind for event in engine.events if event.request_id == request_id]


def test_full_hit_gives_the_same_answer():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        first = engine.add(range(1024), max_tokens=20)
        engine.run()
        assert engine.external_hit(first) == 0
        assert engine.reset_prefix_cache()
        second = engine.add(range(1024), max_tokens=20)
        engine.run()
        assert engine.external_hit(second) == 1024
        assert engine.outputs[first] == engine.outputs[second]
        assert len(engine.outputs[first]) == 20
        engine.check()
    with SimulatedEngine(**ROOMY) as cold:
        third = cold.add(range(1024), max_tokens=20)
        cold.run()
        assert cold.outputs[third] == engine.outputs[first]


def test_full_hit_computes_one_token():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        engine.add(range(512))
        engine.run()
        engine.reset_prefix_cache()
        again = engine.add(range(512))
        engine.run()
        steps = [step for step in engine.steps if again in step.scheduled]
        assert [(step.computed[again], step.scheduled[again]) for step in steps] == [(511, 1)]


def test_engines_share_a_store_and_different_weights_do_not_answer_alike():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as one:
        first = one.add(range(256), max_tokens=4)
        one.run()
        with SimulatedEngine(ReferenceConnector, **ROOMY) as two:
            second = two.add(range(256), max_tokens=4)
            two.run()
            assert two.external_hit(second) == 256
            assert two.outputs[second] == one.outputs[first]
    with SimulatedEngine(ReferenceConnector, weights="other", **ROOMY) as other:
        third = other.add(range(256), max_tokens=4)
        with pytest.raises(OracleError, match="brought wrong bytes") as caught:
            other.run()
        assert other.external_hit(third) == 256
        assert caught.value.mismatches[0].owner == third
        assert caught.value.mismatches[0].position == 0


def test_local_hit_shortens_the_load():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        engine.add(range(512))
        engine.run()
        engine.reset_prefix_cache()
        engine.add(range(288))
        engine.run()
        both = engine.add(range(513))
        engine.run()
        assert engine.local_hit(both) == 288
        assert engine.external_hit(both) == 224
        allocation = engine.allocations(both)[0]
        assert allocation.is_async
        assert len(allocation.block_ids[0]) == 32


def test_roles_are_handed_to_the_connector():
    with SimulatedEngine(ReferenceConnector, kv_role="kv_producer", **ROOMY) as producer:
        producer.add(range(256))
        producer.run()
    with SimulatedEngine(ReferenceConnector, kv_role="kv_consumer", **ROOMY) as consumer:
        hit = consumer.add(range(256))
        consumer.add(range(1000, 1256))
        consumer.run()
        assert consumer.external_hit(hit) == 256
    blocks = {key[2] for key in sim_reference_connector.STORES["default"]}
    assert len(blocks) == 256 // 16


def test_phases_can_be_taken_apart():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        request = engine.add(range(300), max_tokens=2)
        with pytest.raises(RuntimeError, match="begin_step"):
            engine.run_workers()
        record = engine.begin_step()
        assert record.scheduled == {request: 256}
        assert record.sampled == {}
        with pytest.raises(RuntimeError, match="finish_step"):
            engine.begin_step()
        with pytest.raises(RuntimeError, match="run_workers"):
            engine.finish_step()
        with pytest.raises(RuntimeError, match="run_workers"):
            engine.check()
        engine.run_workers()
        assert record.sampled == {request: []}
        engine.finish_step()
        engine.run()
        assert len(engine.outputs[request]) == 2


@pytest.mark.parametrize("phase", ["queued", "begun", "worked", "between"])
def test_abort_at_every_phase(phase):
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        request = engine.add(range(300), max_tokens=8)
        if phase != "queued":
            engine.begin_step()
        if phase in ("worked", "between"):
            engine.run_workers()
        if phase == "between":
            engine.finish_step()
        engine.abort(request)
        if engine.waits_for_workers:
            engine.run_workers()
        if engine.in_flight:
            engine.finish_step()
        engine.run()
        engine.check()
        assert engine.outputs[request] == []
        assert Kind.ABORTED in kinds(engine, request)
        again = engine.add(range(300), max_tokens=8)
        engine.run()
        engine.check()
        assert len(engine.outputs[again]) == 8


def test_abort_during_an_asynchronous_load():
    with SimulatedEngine(ReferenceConnector, extra_config={"delay": 4}, **ROOMY) as engine:
        engine.add(range(256))
        engine.run()
        engine.reset_prefix_cache()
        loading = engine.add(range(256))
        engine.step()
        assert engine.allocations(loading)[0].external == 256
        engine.abort(loading)
        engine.run()
        assert Kind.LOAD_FINISHED in kinds(engine, loading)
        engine.check()


def test_preempted_requests_come_back_with_the_same_answer():
    with SimulatedEngine(ReferenceConnector, **TIGHT) as engine:
        requests = [engine.add(range(9 * i, 9 * i + 20), max_tokens=40) for i in range(3)]
        engine.run()
        engine.check()
        assert any(step.preempted for step in engine.steps)
    with SimulatedEngine(block_size=4, num_blocks=200) as roomy:
        again = [roomy.add(range(9 * i, 9 * i + 20), max_tokens=40) for i in range(3)]
        roomy.run()
        assert not any(step.preempted for step in roomy.steps)
        assert [roomy.outputs[r] for r in again] == [engine.outputs[r] for r in requests]


def test_failed_allocation_asks_again():
    with SimulatedEngine(ReferenceConnector, **TIGHT) as engine:
        engine.add(range(100))
        waiting = engine.add(range(200, 300))
        engine.run()
        assert kinds(engine, waiting).count(Kind.LOOKED_UP) > 1
        assert kinds(engine, waiting).count(Kind.ALLOCATED) == 1


@pytest.mark.parametrize("failure", [{}, {"partial_failures": True}])
def test_failed_loads_are_recomputed(failure):
    options = {"failures": 1.0, **failure}
    with SimulatedEngine(ReferenceConnector, extra_config=options, **ROOMY) as engine:
        first = engine.add(range(512), max_tokens=4)
        engine.run()
        engine.reset_prefix_cache()
        second = engine.add(range(512), max_tokens=4)
        engine.run()
        engine.check()
        assert engine.outputs[second] == engine.outputs[first]
        failed = [step for step in engine.steps if step.loads_failed or step.invalid_blocks]
        assert len(failed) == 1


def test_updated_weights_change_bytes_and_answers():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        before = engine.add(range(256), max_tokens=8)
        engine.run()
        running = engine.add(range(256), max_tokens=30)
        for _ in range(6):
            engine.step()
        assert 0 < len(engine.outputs[running]) < 30
        assert engine.can_preempt_all
        engine.update_weights("new")
        after = engine.add(range(256), max_tokens=8)
        engine.run()
        engine.check()
        assert engine.outputs[after] != engine.outputs[before]
        assert len(engine.outputs[running]) == 30


@pytest.mark.parametrize("model_runner", [1, 2])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_drafts_do_not_change_the_answer(model_runner, async_scheduling, acceptance):
    with SimulatedEngine(**ROOMY) as plain:
        expected = plain.outputs[plain.add(range(100), max_tokens=50)]
        plain.run()
        steps = plain.step_count
    with SimulatedEngine(
        ReferenceConnector,
        drafts=3,
        draft_acceptance=acceptance,
        async_scheduling=async_scheduling,
        model_runner=model_runner,
        **ROOMY,
    ) as engine:
        drafted = engine.add(range(100), max_tokens=50)
        engine.run()
        engine.check()
        assert engine.outputs[drafted] == expected
        assert any(count == 4 for step in engine.steps for count in step.scheduled.values())
        if acceptance == 1.0:
            assert engine.step_count < steps / 2


def test_asynchronous_scheduling_runs_a_step_ahead():
    with SimulatedEngine(ReferenceConnector, async_scheduling=True, **ROOMY) as engine:
        request = engine.add(range(100), max_tokens=10)
        assert engine.step() is None
        assert engine.in_flight == 1
        record = engine.step()
        assert record is not None
        assert record.index == 1
        assert engine.step_count == 2
        engine.run()
        engine.check()
        assert len(engine.outputs[request]) == 10


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "LHBNC"])
def test_ranks_and_layouts(layout):
    with SimulatedEngine(
        ReferenceConnector, ranks=2, pickle_metadata=True, layout=layout, **ROOMY
    ) as engine:
        first = engine.add(range(300), max_tokens=6)
        engine.run()
        engine.reset_prefix_cache()
        second = engine.add(range(300), max_tokens=6)
        engine.run()
        engine.check()
        assert engine.external_hit(second) == 288
        assert engine.outputs[first] == engine.outputs[second]
    ranks = {key[0] for key in sim_reference_connector.STORES["default"]}
    assert ranks == {0, 1}


def test_sliding_window_groups_load_only_what_the_window_sees():
    with SimulatedEngine(ReferenceConnector, windows=(None, 32), **ROOMY) as engine:
        first = engine.add(range(320), max_tokens=6)
        engine.run()
        engine.reset_prefix_cache()
        second = engine.add(range(320), max_tokens=6)
        engine.run()
        engine.check()
        full, window = engine.allocations(second)[0].block_ids
        assert 0 not in full
        assert window[:18] == (0,) * 18
        assert 0 not in window[18:]
        assert engine.outputs[first] == engine.outputs[second]


def test_salt_and_variant_decide_the_answer():
    with SimulatedEngine(**ROOMY) as engine:
        plain = engine.add(range(100), max_tokens=6)
        salted = engine.add(range(100), max_tokens=6, salt="s")
        engine.run()
        engine.reset_prefix_cache()
        variant = engine.add(range(100), max_tokens=6, variant="v")
        engine.run()
        engine.check()
        assert len({tuple(engine.outputs[r]) for r in (plain, salted, variant)}) == 3


def test_prefix_cache_that_ignores_a_variant_is_seen():
    with SimulatedEngine(**ROOMY) as engine:
        engine.add(range(100))
        engine.run()
        engine.add(range(100), variant="v")  # vLLM's own hash does not cover it
        with pytest.raises(OracleError, match="read wrong bytes"):
            engine.run()


def test_hash_algorithm_is_the_one_asked_for():
    hashes = {}
    for algorithm in ("sha256_cbor", "sha256"):
        with SimulatedEngine(ReferenceConnector, hash_algorithm=algorithm, **ROOMY) as engine:
            request = engine.add(range(64))
            hashes[algorithm] = engine.scheduler.requests[request].block_hashes[0]
            engine.run()
            engine.check()
    assert hashes["sha256"] != hashes["sha256_cbor"]


def test_stuck_engine_says_which_request_waits():
    with SimulatedEngine(NeverConnector, **ROOMY) as engine:
        request = engine.add(range(50))
        with pytest.raises(EngineStuckError, match=f"{request} WAITING 0/50"):
            engine.run(max_steps=50)
        engine.abort(request)
        engine.run()
        engine.check()


def test_wrong_byte_in_a_running_request_is_seen_at_the_next_step():
    with SimulatedEngine(**ROOMY) as engine:
        request = engine.add(range(100), max_tokens=20)
        engine.step()
        block = engine.workers.runner.requests[request].blocks[0][2]
        engine.workers.ranks[0].memory.lanes[1, block, 0, 5] ^= 1
        with pytest.raises(OracleError) as caught:
            engine.step()
        first = caught.value.mismatches[0]
        assert (first.owner, first.position, first.block_id) == (request, 2 * 16 + 5, block)
        assert first.layer == "model.layers.1.self_attn.attn"


def test_wrong_byte_in_a_free_cached_block_is_seen_by_check():
    with SimulatedEngine(**ROOMY) as engine:
        request = engine.add(range(100))
        engine.step()
        engine.run()
        engine.check()
        pool = engine.scheduler.kv_cache_manager.block_pool
        block = next(b.block_id for b in pool.blocks if b.block_hash is not None)
        engine.workers.ranks[0].memory.lanes[0, block, 0, 0] ^= 1
        with pytest.raises(OracleError, match="cached block"):
            engine.check()
        assert engine.outputs[request]


def test_leaked_block_is_seen_by_check():
    with SimulatedEngine(**ROOMY) as engine:
        engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
        with pytest.raises(OracleError, match="1 blocks are held"):
            engine.check()


def test_answer_that_is_not_the_cold_one_is_seen():
    with SimulatedEngine(**ROOMY) as engine:
        request = engine.add(range(40), max_tokens=5)
        engine.run()
        tokens = [*range(40), *engine.outputs[request]]
        pattern = engine.workers.runner._pattern
        seed = engine.clients.prompt(request).seed(engine.weights)
        engine.oracle.check_output(request, Prefix(pattern, seed, tokens), 40)
        tokens[43] = (tokens[43] + 1) % 512
        with pytest.raises(OracleError, match="output token 3"):
            engine.oracle.check_output(request, Prefix(pattern, seed, tokens), 40)


def test_finished_requests_can_be_forgotten():
    with maker()() as engine:
        for start in range(20):
            engine.add(range(start, start + 10))
            engine.run()
        live = engine.add(range(12))
        engine.forget_finished()
        assert list(engine.outputs) == [live]
        engine.run()
        engine.check()
