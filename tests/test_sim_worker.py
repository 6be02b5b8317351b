"""The order of calls that a worker-side connector sees, step by step."""

from __future__ import annotations

import pickle

import pytest
from vllm.forward_context import get_forward_context

import sim_reference_connector
from kvledger.sim import SimulatedEngine
from sim_reference_connector import ReferenceConnector
from sim_support import TIGHT  # noqa: F401  (quiet logs)

ROOMY = {"block_size": 16, "num_blocks": 100, "max_batched_tokens": 256, "layers": 2}
HOOKS = ["wait_for_layer_load"] * 2 + ["save_kv_layer"] * 2
REPORTS = [
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
]
BEFORE = ["handle_preemptions", "bind_connector_metadata"]
AFTER = ["wait_for_save", *REPORTS, "clear_connector_metadata"]
WATCHED = [*BEFORE, "start_load_kv", *set(HOOKS), *AFTER, "finish_forward"]


@pytest.fixture(autouse=True)
def empty_stores():
    sim_reference_connector.STORES.clear()


def watch(engine, rank=0):
    """Log the names of all worker-side calls of one rank."""
    calls = []
    connector = engine.workers.ranks[rank].connector

    def logged(name, method):
        def call(*args, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        return call

    for name in WATCHED:
        setattr(connector, name, logged(name, getattr(connector, name)))
    return calls


def calls_of_step(engine, calls):
    calls.clear()
    engine.step()
    return list(calls)


def test_step_with_tokens_starts_loads_after_the_forward_pass():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        calls = watch(engine)
        engine.add(range(50))
        assert calls_of_step(engine, calls) == [*BEFORE, *HOOKS, "start_load_kv", *AFTER]


def test_synchronous_loads_come_before_the_forward_pass():
    with SimulatedEngine(ReferenceConnector, extra_config={"load": "sync"}, **ROOMY) as engine:
        engine.add(range(50))
        engine.run()
        engine.reset_prefix_cache()
        calls = watch(engine)
        hit = engine.add(range(50))
        assert calls_of_step(engine, calls) == [*BEFORE, "start_load_kv", *HOOKS, *AFTER]
        assert engine.external_hit(hit) == 48
        engine.run()


def test_step_without_tokens_runs_no_layers():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        engine.add(range(50))
        engine.run()
        engine.reset_prefix_cache()
        calls = watch(engine)
        engine.add(range(48))
        assert calls_of_step(engine, calls) == [*BEFORE, "start_load_kv", *AFTER]
        assert engine.steps[-1].scheduled == {}
        engine.run()


@pytest.mark.parametrize(
    ("model_runner", "expected"),
    [
        (
            1,
            [*BEFORE, *HOOKS, "start_load_kv", *REPORTS, "wait_for_save",
             "clear_connector_metadata"],
        ),
        (2, [*BEFORE, *HOOKS, "start_load_kv", "finish_forward", *AFTER]),
    ],
)  # fmt: skip
def test_drafts_defer_the_saves_of_runner_one(model_runner, expected):
    with SimulatedEngine(
        ReferenceConnector, drafts=2, model_runner=model_runner, **ROOMY
    ) as engine:
        calls = watch(engine)
        engine.add(range(50), max_tokens=4)
        assert calls_of_step(engine, calls) == expected
        engine.run()
        assert calls[-1] == "clear_connector_metadata"


def test_preemptions_are_handled_before_any_state_changes():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        seen = []
        connector = engine.workers.ranks[0].connector

        def handle(metadata):
            seen.append((list(engine.workers.runner.requests), connector.has_connector_metadata()))
            assert metadata is not None

        connector.handle_preemptions = handle
        request = engine.add(range(50), max_tokens=2)
        engine.run()
        assert seen == [([], False), ([request], False), ([request], False)]


def test_forward_context_has_attention_metadata_only_when_tokens_run():
    with SimulatedEngine(ReferenceConnector, **ROOMY) as engine:
        connector = engine.workers.ranks[0].connector
        seen = []
        start = connector.start_load_kv

        def look(context, **kwargs):
            assert get_forward_context() is context
            metadata = context.attn_metadata
            seen.append(None if metadata is None else sorted(metadata))
            start(context, **kwargs)

        connector.start_load_kv = look
        engine.add(range(50))
        engine.run()
        names = sorted(engine.workers.ranks[0].memory.tensors)
        assert seen == [names, None]


def test_runner_two_hands_the_batch_to_start_load():
    with SimulatedEngine(ReferenceConnector, model_runner=2, **ROOMY) as engine:
        connector = engine.workers.ranks[0].connector
        seen = []
        start = connector.start_load_kv
        connector.start_load_kv = lambda context, **kwargs: (
            seen.append(kwargs),
            start(context, **kwargs),
        )
        request = engine.add(range(50))
        engine.run()
        assert seen[0]["request_ids"] == [request]
        assert seen[0]["num_tokens"] == 50
        assert seen[1] == {}


def test_pickled_metadata_is_a_copy_for_each_rank():
    with SimulatedEngine(ReferenceConnector, ranks=2, pickle_metadata=True, **ROOMY) as engine:
        bound = [watch_bound(rank.connector) for rank in engine.workers.ranks]
        engine.add(range(50))
        record = engine.begin_step()
        metadata = engine._cycle._flights[0].output.kv_connector_metadata
        engine.run_workers()
        engine.finish_step()
        assert record.scheduled
        assert bound[0][0] is not metadata
        assert bound[0][0] is not bound[1][0]
        assert pickle.dumps(bound[0][0]) == pickle.dumps(metadata)
        engine.run()


def test_metadata_is_the_same_object_in_process():
    with SimulatedEngine(ReferenceConnector, ranks=2, **ROOMY) as engine:
        bound = [watch_bound(rank.connector) for rank in engine.workers.ranks]
        engine.add(range(50))
        engine.run()
        assert bound[0][0] is bound[1][0]


def watch_bound(connector):
    bound = []
    bind = connector.bind_connector_metadata
    connector.bind_connector_metadata = lambda metadata: (bound.append(metadata), bind(metadata))
    return bound


@pytest.mark.parametrize(("pickled", "calls"), [(False, 1), (True, 2)])
def test_empty_report_of_an_empty_step_reaches_the_scheduler_only_through_the_aggregator(
    pickled, calls
):
    with SimulatedEngine(ReferenceConnector, pickle_metadata=pickled, **ROOMY) as engine:
        seen = []
        update = engine.connector.update_connector_output
        engine.connector.update_connector_output = lambda output: (
            seen.append(output),
            update(output),
        )
        engine.add(range(50))
        engine.run()
        assert [bool(step.scheduled) for step in engine.steps] == [True, False]
        assert len(seen) == calls


def test_each_rank_knows_its_place():
    with SimulatedEngine(ReferenceConnector, ranks=3, **ROOMY) as engine:
        assert [rank.connector.rank for rank in engine.workers.ranks] == [0, 1, 2]
        assert engine.connector.ranks == 3
        pointers = {rank.memory.lanes.ctypes.data for rank in engine.workers.ranks}
        assert len(pointers) == 3
