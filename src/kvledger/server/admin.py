"""HTTP: health, metrics and status, on a thread and a loop of its own.

The server's loop only makes the snapshot; wording and sending it happens here. So a slow reader
of metrics delays no look-up, and ``/healthz`` can tell that the server's loop does not answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
from collections.abc import Callable

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvledger.server.growth import GrowthState
from kvledger.server.http_connection import BoundedConnection
from kvledger.server.metrics import CONTENT_TYPE, render_metrics
from kvledger.server.status import StatusDocument

SNAPSHOT_DEADLINE_SECONDS = 1.0
JSON = "application/json"


class SnapshotSource:
    """Asks the server's loop for its state, with a deadline, from another thread.

    Args:
        loop: the server's loop.
        snapshot: called on it.
        arena_is_intact: called on it as well.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        snapshot: Callable[[], StatusDocument],
        arena_is_intact: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._snapshot = snapshot
        self._arena_is_intact = arena_is_intact

    async def get(self) -> tuple[StatusDocument, bool]:
        """The document, and whether the arena is intact.

        Raises:
            TimeoutError: the server's loop did not answer in time.
        """
        answer: concurrent.futures.Future[tuple[StatusDocument, bool]] = concurrent.futures.Future()

        def take() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result((self._snapshot(), self._arena_is_intact()))
            except Exception as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(take)
        return await asyncio.wait_for(asyncio.wrap_future(answer), SNAPSHOT_DEADLINE_SECONDS)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``/healthz``; ``reason`` is empty while healthy."""

    healthy: bool
    reason: str
    growth: str = ""
    growth_limited_by: str = ""


def make_application(source: SnapshotSource) -> Starlette:
    """The routes."""

    async def healthz(_: Request) -> Response:
        try:
            document, arena_is_intact = await source.get()
        except TimeoutError:
            seconds = SNAPSHOT_DEADLINE_SECONDS
            return _json(Health(healthy=False, reason=f"no answer within {seconds} s"), 503)
        reason = ""
        if document.server.draining:
            reason = "the server is shutting down"
        elif not arena_is_intact:
            reason = "the arena has lost its size or its seals"
        elif document.memory.growth == GrowthState.FAILED:
            reason = document.memory.growth_limited_by
        health = Health(
            healthy=not reason,
            reason=reason,
            growth=document.memory.growth,
            growth_limited_by=document.memory.growth_limited_by,
        )
        return _json(health, 503 if reason else 200)

    async def status(_: Request) -> Response:
        try:
            document, _intact = await source.get()
        except TimeoutError:
            return Response("the server's loop does not answer", 503)
        return _json(document, 200)

    async def metrics(_: Request) -> Response:
        try:
            document, _intact = await source.get()
        except TimeoutError:
            return Response("the server's loop does not answer", 503)
        return Response(render_metrics(document), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/metrics", metrics),
            Route("/api/v1/status", status),
        ]
    )


def _json(body: msgspec.Struct, status_code: int) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type=JSON)


class _QuietServer(uvicorn.Server):
    """uvicorn without its ten ticks a second: it sleeps until ``stop_fd`` becomes readable."""

    def __init__(self, config: uvicorn.Config, stop_fd: int) -> None:
        super().__init__(config)
        self._stop_fd = stop_fd

    async def main_loop(self) -> None:
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._stop_fd, stopping.set)
        await stopping.wait()


def serve_http(listener: socket.socket, source: SnapshotSource, stop_fd: int) -> None:
    """Serve until ``stop_fd`` (an eventfd) becomes readable; blocks this thread.

    Args:
        listener: a listening socket, owned from now on.
    """
    config = uvicorn.Config(
        make_application(source),
        http=BoundedConnection,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        date_header=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_QuietServer(config, stop_fd).serve(sockets=[listener]))
