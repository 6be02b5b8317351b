"""What the tests with a simulated engine share: one server a module, one world a test."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("books", "standing", "life", "committed")

from books import World  # noqa: E402  (its assertions are rewritten now)
from bounds import PATIENT, bounded  # noqa: E402
from sim_server import Server  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests of a module; each has its own namespace."""
    running = Server(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.close()


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with as little memory as can be given."""
    running = Server(tmp_path_factory.mktemp("small"), "16MiB")
    running.start()
    yield running
    running.close()


def _world(server: Server, request: pytest.FixtureRequest) -> Iterator[World]:
    name = re.sub(r"\W+", "-", request.node.name)
    if not server.is_up:
        server.resume()
    if not server.is_up:
        server.start()
    world = World(server, name)
    failed_before = request.session.testsfailed
    passed = False
    try:
        yield world
        if request.session.testsfailed == failed_before:
            world.check()
            passed = True
    finally:
        server.resume()
        for engine in world.engines:
            engine.close()
        if not passed:
            server.kill()  # what a failed test has left behind is not the next one's trouble
        elif server.is_up:
            server.clear()


@pytest.fixture
def world(server: Server, request: pytest.FixtureRequest) -> Iterator[World]:
    """One test's engines on the module's server, with the standing checks at its end."""
    yield from _world(server, request)


@pytest.fixture
def small_world(small_server: Server, request: pytest.FixtureRequest) -> Iterator[World]:
    """Like ``world``, on a server whose memory is soon full."""
    yield from _world(small_server, request)


@pytest.fixture(autouse=True)
def quiet_vllm() -> None:
    """vLLM logs a line at every reset of its cache."""
    logging.getLogger("vllm").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets an engine wait for a live server as long as it takes.

    On a busy machine an answer can take longer than the milliseconds that an engine grants it, and
    counts of hits would then depend on the machine. Tests of those bounds are marked ``bounds``.
    """
    is_bound = request.node.get_closest_marker("bounds") is not None
    with bounded({} if is_bound else PATIENT):
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Marks of this folder."""
    config.addinivalue_line("markers", "bounds: the engine waits no longer than it does for users")
