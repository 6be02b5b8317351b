"""Our connector beside another one in vLLM's MultiConnector: what the other brings is not ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from books import World, count_events, text, wait_until
from test_scenarios import SCHEDULERS

from kvledger.sim import Kind, SimulatedEngine
from sim_reference_connector import ReferenceConnector

OURS_FIRST = pytest.mark.parametrize("ours_first", [True, False], ids=["ours-first", "ours-second"])


def two_connectors(like: SimulatedEngine, store: dict[str, Any]) -> list[dict[str, Any]]:
    """Ours with the options of an engine, and another one, as vLLM's MultiConnector wants them."""
    ours = like.connector._vllm_config.kv_transfer_config.kv_connector_extra_config
    return [
        {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        for name, module, options in (
            ("KVLedgerConnector", "kvledger.vllm", dict(ours)),
            ("ReferenceConnector", "sim_reference_connector", store),
        )
    ]


@contextmanager
def beside_another(
    world: World,
    reader: SimulatedEngine,
    options: dict[str, Any],
    *,
    ours_first: bool,
    **fields: Any,
) -> Iterator[tuple[SimulatedEngine, list[Any]]]:
    """An engine with both, attached to the server, and both sides of ours."""
    children = two_connectors(reader, options)
    if not ours_first:
        children.reverse()
    with SimulatedEngine(
        "MultiConnector",
        extra_config={"connectors": children},
        engine_id=f"{world.namespace}/two",
        model_directory=world.server.socket.parent / "model-base",
        **fields,
    ) as engine:
        position = 0 if ours_first else 1
        worker = engine.workers.ranks[0].connector
        mine = [c.sub_connectors[position] for c in (engine.connector, worker)]

        def is_attached() -> bool:
            engine.add([0])
            engine.run()
            return bool(mine[0].scheduler.namespace and mine[1].worker._namespace)

        wait_until(is_attached, "the engine attaches to the server")
        yield engine, mine
        engine.check()
        assert not any(connector.guard.failures for connector in mine)


def fill_another(prompt: list[int], store: dict[str, Any]) -> None:
    """The other connector's store holds a prompt; our server has never seen it."""
    with SimulatedEngine(ReferenceConnector, extra_config=store) as other:
        other.add(prompt)
        other.run()


@SCHEDULERS
@OURS_FIRST
@pytest.mark.parametrize("aborts", [True, False], ids=["aborted", "lives"])
def test_scenario_19_two_connectors(
    world: World, ours_first: bool, aborts: bool, is_async: bool
) -> None:
    """Another connector loads for some steps; meanwhile the request is aborted, or not. Blocks
    that the other has not filled yet are never stored by us, and the engine survives."""
    prompt = text("row 19, two", 160)
    store = {"store": world.namespace}
    fill_another(prompt, store)
    reader = world.engine()
    with beside_another(
        world, reader, {**store, "delay": 4}, ours_first=ours_first, async_scheduling=is_async
    ) as (engine, _):
        request = engine.add(prompt)
        for _ in range(3):
            engine.step()
        assert engine.external_hit(request) == 160
        if aborts:
            engine.abort(request)
        engine.run()
        assert count_events(engine, Kind.SEND_FINISHED) == 0
    again = reader.add(prompt)
    reader.run()  # the oracle compares what was stored
    assert reader.external_hit(again) == (0 if aborts else 160)


@OURS_FIRST
@pytest.mark.parametrize("generated", [1, 20])
def test_scenario_19_another_one_fails(world: World, ours_first: bool, generated: int) -> None:
    """The other loads within the step, and fails: what vLLM has counted is not there, and only the
    step's output says so. We store nothing of it; what is computed afterwards is stored."""
    prompt = text("row 19, fails", 170)
    store = {"store": world.namespace}
    fill_another(prompt, store)
    reader = world.engine()
    options = {**store, "load": "sync", "failures": 1.0}
    # Without vLLM's own prefix cache, which such a failure poisons.
    with beside_another(world, reader, options, ours_first=ours_first, prefix_caching=False) as (
        engine,
        _,
    ):
        request = engine.add(prompt, max_tokens=generated)
        engine.step()
        assert engine.external_hit(request) == 160
        engine.run()
    again = reader.add(prompt)
    reader.run()
    assert reader.external_hit(again) == 160
