"""What tests with a real engine share: models, a server, one pair of engines.

An engine takes half a minute to start, so fixtures here live for the whole session. Tests must not
depend on what others have put into an engine or the server: those that count hits use prompts of
their own seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import CACHED_ID, ModelMaker, cached, plain, running

from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import SMALL, cached_model
from kvledger.lab.server import ServerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs a real engine."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


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
    with ServerProcess(directory / "kvledger.sock", memory="512MiB") as server:
        yield server


@pytest.fixture(scope="session")
def engine_pair(
    small_model: Path, engine_server: ServerProcess
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """An engine without a connector and one with it, equal in all else; steps of 512 tokens."""
    with running(
        plain(small_model),
        cached(small_model, engine_server, engine_id=CACHED_ID),
    ) as (without, with_connector):
        yield without, with_connector


@pytest.fixture
def plain_engine(engine_pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    """What an answer is without a cache."""
    return engine_pair[0]


@pytest.fixture
def cached_engine(engine_pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    """The engine with the connector; its own prefix cache is empty at the start of the test."""
    assert engine_pair[1].reset_prefix_cache()
    return engine_pair[1]
