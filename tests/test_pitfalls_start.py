"""Pitfalls of docs/conformance.md that show when an engine starts, through vLLM's own factory."""

# ruff: noqa: E402 — torch and vLLM are optional, so they are asked for first

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.forward_context import ForwardContext
from vllm.plugins import load_plugins_by_group

import kvledger
from kvledger.errors import ConfigurationError
from kvledger.sim.memory import RankMemory, build_cache_config
from kvledger.sim.model import ConnectorOptions, EngineOptions, build_config, write_model
from kvledger.vllm import KVLedgerConnector
from kvledger.vllm.layouts import UnsupportedLayoutError
from kvledger.vllm.metadata import KVLedgerMetadata
from kvledger.vllm.plugin import CONNECTOR_NAME, register

SOURCE = Path(kvledger.__file__).parents[1]
OURS = "kvledger.vllm:KVLedgerConnector"
EXAMPLE = "ExampleConnector"
MADE: list[Any] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, "base")
    return directory


@pytest.fixture
def config(model: Path, tmp_path: Path) -> VllmConfig:
    """An engine with our connector, whose server is not there."""
    extra = {"kvledger.socket": str(tmp_path / "none.sock"), "kvledger.model_revision": "1"}
    options = ConnectorOptions(connector=OURS, extra_config=extra)
    return build_config(model, EngineOptions(), options)


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().shutdown()


def create(config: VllmConfig, role: KVConnectorRole, **options: Any) -> Any:
    """A connector as vLLM makes it."""
    cache_config = build_cache_config(EngineOptions(**options))
    MADE.append(KVConnectorFactory.create_connector(config, role, cache_config))
    return MADE[-1]


class TwoArguments(KVConnectorBase_V1):
    """A connector of older days; the negative control."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole) -> None:  # noqa: ARG002
        raise AssertionError("vLLM refuses this before it calls")


@pytest.mark.pitfall(1)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_vllm_constructs_the_connector(config: VllmConfig, role: KVConnectorRole) -> None:
    connector = create(config, role)
    assert isinstance(connector, KVLedgerConnector)
    assert connector._kv_cache_config.num_blocks == EngineOptions().num_blocks
    transfer = ConnectorOptions(connector=TwoArguments).transfer_config()
    with pytest.raises(ValueError, match="kv_cache_config"):
        KVConnectorFactory.get_connector_class(transfer)


@pytest.mark.pitfall(2)
def test_vllm_keeps_its_hybrid_manager_on(config: VllmConfig, model: Path) -> None:
    """What this version cannot move is refused by us, not stored in another shape by vLLM."""
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
    without = build_config(model, EngineOptions(), ConnectorOptions(connector=EXAMPLE))
    assert without.scheduler_config.disable_hybrid_kv_cache_manager is True


@pytest.mark.pitfall(2, 25, 38, 48)
@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    ("windows", "sentence"), [((None, 32), "2 KV-cache groups"), ((32,), "SlidingWindowSpec")]
)
def test_hybrid_models_are_refused_at_start(
    config: VllmConfig, role: KVConnectorRole, windows: tuple[int | None, ...], sentence: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=sentence):
        create(config, role, windows=windows)


QUIET_IMPORT = """
    import socket, sys, threading

    import kvledger.vllm
    import kvledger.vllm.plugin
    assert not {"torch", "vllm"} & sys.modules.keys(), "heavy"

    import torch
    import vllm.distributed.kv_transfer.kv_connector.v1.base

    def refuse(*arguments, **keywords):
        raise SystemExit("importing the connector, or asking its class, has done some work")

    threading.Thread.start = refuse
    socket.socket.connect = socket.socket.bind = refuse
    torch.cuda._lazy_init = torch.zeros = torch.empty = refuse

    connector = kvledger.vllm.KVLedgerConnector
    assert connector.requires_piecewise_for_cudagraph({}) is False
    assert connector.get_required_kvcache_layout(None) is None
    assert connector.build_kv_connector_stats({}) is None
    assert connector.build_prom_metrics(None, {}, [], {}) is None
    print("quiet")
"""


@pytest.mark.pitfall(3, 62)
def test_importing_and_asking_the_class_does_no_work() -> None:
    """As in vLLM's front end, which has no engine, no GPU and forks."""
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(QUIET_IMPORT)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("quiet")


@pytest.mark.pitfall(7)
def test_constructors_touch_neither_tensors_nor_workers(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes the worker's instance before there is a KV tensor, and the scheduler's before
    workers can be asked. Until the tensors are registered, every hook is harmless."""
    config.compilation_config.static_forward_context = {}
    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "as_strided"):
            patch.setattr(torch, name, None)
        worker = create(config, KVConnectorRole.WORKER)
        scheduler = create(config, KVConnectorRole.SCHEDULER)
    metadata = KVLedgerMetadata()
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(ForwardContext({}, None, {}))
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    assert not results.finished_recving
    worker.clear_connector_metadata()
    assert worker.guard.failures == scheduler.guard.failures == 0
    options = EngineOptions()
    worker.register_kv_caches(dict(RankMemory(build_cache_config(options), options).tensors))
    assert worker.worker is not None


@pytest.mark.pitfall(9)
def test_the_plugin_may_be_loaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop(CONNECTOR_NAME, None)
    (entry,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "kvledger")
    monkeypatch.setenv("VLLM_PLUGINS", entry.name)
    for _ in range(2):
        plugins = load_plugins_by_group("vllm.general_plugins")
        assert plugins == {entry.name: register}
        plugins[entry.name]()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is KVLedgerConnector
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvledger.vllm", CONNECTOR_NAME)


@pytest.mark.pitfall(32)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model"])
def test_drafters_that_look_a_token_ahead_are_refused(
    config: VllmConfig, model: Path, method: str
) -> None:
    """Such a drafter writes its KV of a token from the token after it, into the same block: the
    bytes of a block's end depend on what follows it. A draft model of its own does not."""
    speculative = SpeculativeConfig(
        model=str(model),
        method="draft_model",
        num_speculative_tokens=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    speculative.method = method
    config.speculative_config = speculative
    if method == "draft_model":
        assert create(config, KVConnectorRole.WORKER)
        return
    with pytest.raises(ConfigurationError, match=f"by {method} .* the token after it"):
        create(config, KVConnectorRole.WORKER)
