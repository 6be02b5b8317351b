"""What tests with a real engine share: models, engines that start side by side, a server.

An engine takes half a minute to start, so one serves many tests: fixtures here live for the whole
session, those of a test module for that module. Tests must not depend on what others have put
into an engine's prefix cache; those that count hits use prompts of their own seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import SMALL, ModelSpec, cached_model
from kvledger.lab.server import ServerProcess

ModelMaker = Callable[[ModelSpec], Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs a real engine."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@contextmanager
def running(*engines: EngineProcess) -> Iterator[tuple[EngineProcess, ...]]:
    """Engines that were started side by side: ready inside, gone after."""
    with ThreadPoolExecutor(len(engines)) as threads:
        try:
            list(threads.map(EngineProcess.wait_ready, engines))
            yield engines
        finally:
            list(threads.map(EngineProcess.close, engines))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Writes the model of a spec, once."""
    cache = tmp_path_factory.mktemp("models")
    return lambda spec: cached_model(cache, spec)


@pytest.fixture(scope="session")
def small_model(model: ModelMaker) -> Path:
    """4 KiB of KV per token."""
    return model(SMALL)


@pytest.fixture(scope="session")
def engine_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server with plenty of memory, for engines that live as long."""
    directory = tmp_path_factory.mktemp("server")
    with ServerProcess(directory / "kvledger.sock", memory="1GiB") as server:
        yield server


@pytest.fixture(scope="session")
def plain_engine(small_model: Path) -> Iterator[EngineProcess]:
    """An engine without a connector: what an answer is without a cache.

    It computes in steps of 512 tokens and keeps no prefix cache, so that every run is a cold one.
    """
    with EngineProcess(
        small_model,
        max_num_batched_tokens=512,
        engine_args={"enable_prefix_caching": False},
    ) as engine:
        yield engine
