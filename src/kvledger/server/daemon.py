"""The server process: puts the parts together, runs the loop, and ends in good order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import secrets
import signal
import socket
import time
from collections.abc import Callable

import uvloop

from kvledger import __version__
from kvledger.arena import Arena, plan_memory
from kvledger.audit import catalog_statistics
from kvledger.catalog import ENTRY_COST_BYTES, Catalog
from kvledger.config import ServerConfig, format_size
from kvledger.errors import ConfigurationError
from kvledger.server import peers, preflight
from kvledger.server.growth import Growth
from kvledger.server.http_thread import HttpThread
from kvledger.server.machine import read_memory
from kvledger.server.service import Service
from kvledger.server.session import MAX_SESSIONS, Session
from kvledger.server.status import StatusDocument, StatusSources, encode_document

logger = logging.getLogger(__name__)

HELLO_DEADLINE_SECONDS = 10.0
DRAIN_SECONDS = 5.0
DRAIN_POLL_SECONDS = 0.02
ACCEPT_RETRY_SECONDS = 1.0
FILES_PER_SESSION = 2
SPARE_FILES = 256
"""128 for HTTP, the rest for ourselves."""
YOUNG_OBJECTS = 2000
"""A young collection looks at this many objects: a tenth of a millisecond."""


def run_server(config: ServerConfig, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        announce: told one line when the server is ready.

    Raises:
        ConfigurationError: the options cannot be satisfied on this machine.
        ArenaError: the arena cannot be made.
    """
    preflight.check_memory(config, read_memory())
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        endpoint = preflight.open_endpoint(config)
        stack.callback(endpoint.close)
        http_listener = None
        if config.http is not None:
            http_listener = stack.enter_context(preflight.open_http(config.http))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        daemon = Daemon(config, endpoint, http_listener, runner.get_loop())
        stack.callback(daemon.close)
        runner.run(daemon.run(announce))


class Daemon:
    """One run of the server: one boot id, one arena, one catalog."""

    def __init__(
        self,
        config: ServerConfig,
        endpoint: preflight.Endpoint,
        http_listener: socket.socket | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._listener = endpoint.listener
        self._http_listener = http_listener
        self._loop = loop
        self._group = preflight.group_id(config)
        self._plan = plan_memory(config.memory_bytes)
        self._arena = Arena(pages=self._plan.pages, page_bytes=self._plan.page_bytes)
        boot = secrets.token_hex(8)
        catalog = Catalog(
            pages=self._plan.pages,
            page_bytes=self._plan.page_bytes,
            max_entries=self._plan.metadata_bytes // ENTRY_COST_BYTES,
            namespace_floor=config.namespace_floor,
        )
        self._service = Service(
            boot=boot,
            arena=self._arena,
            catalog=catalog,
            loop=loop,
            status_document=lambda: encode_document(self._document()),
        )
        self._growth = Growth(self._arena, lambda: _post(loop, catalog.add_page), read=read_memory)
        self._status = StatusSources(
            boot=boot,
            started=time.monotonic(),
            config=config,
            http=self._http_address(),
            plan=self._plan,
            catalog=catalog,
            attachments=self._service.attachments,
            reports=self._service.reports,
            growth=self._growth,
        )
        self._stop = asyncio.Event()

    async def run(self, announce: Callable[[str], None]) -> None:
        """Serve until told to stop, then drain."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        with contextlib.ExitStack() as stack:
            self._loop.add_reader(self._listener.fileno(), self._on_connection)
            announce(self._ready_line())
            self._growth.start()
            stack.callback(self._growth.stop)
            self._start_http(stack)
            _keep_collector_off_the_hot_path()
            await self._stop.wait()
            await self._drain()

    def close(self) -> None:
        """Close what is left open, and give the memory back."""
        for session in list(self._service.sessions):
            session.close()
        self._arena.close()

    # ------------------------------------------------------------ starting

    def _start_http(self, stack: contextlib.ExitStack) -> None:
        if self._http_listener is None:
            return
        http = HttpThread(self._http_listener, self._loop, self._document, self._arena.is_intact)
        http.start()
        stack.callback(http.stop)

    def _http_address(self) -> str:
        if self._http_listener is None:
            return ""
        host, port = self._http_listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _ready_line(self) -> str:
        parts = [
            f"kvledger {__version__} listening on {self._config.socket_path}",
            f"memory {format_size(self._config.memory_bytes)}",
            self._status.http or "no HTTP",
        ]
        return ", ".join(parts)

    # ------------------------------------------------------------ serving

    def _document(self) -> StatusDocument:
        return self._status.document(
            sessions=len(self._service.sessions), draining=self._service.draining
        )

    def _on_connection(self) -> None:
        """Accept what is waiting; trouble with one connection is no trouble for the others."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.error("cannot accept connections for now: %s", error.strerror)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_RETRY_SECONDS, self._accept_again)
            return
        try:
            self._admit(connection)
        except OSError as error:
            logger.warning("a connection failed at once: %s", error)
            connection.close()

    def _accept_again(self) -> None:
        if not self._service.draining:
            self._loop.add_reader(self._listener.fileno(), self._on_connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        peer = peers.peer_of(connection)
        if not peers.may_connect(connection, peer, self._group):
            logger.warning("refused pid %d of uid %d: not our user", peer.pid, peer.uid)
            connection.close()
            return
        if len(self._service.sessions) >= MAX_SESSIONS:
            logger.warning("refused pid %d: %d sessions are open", peer.pid, MAX_SESSIONS)
            connection.close()
            return
        session = Session(
            connection,
            peer,
            self._loop,
            self._service,
            hello_deadline_seconds=HELLO_DEADLINE_SECONDS,
        )
        self._service.sessions.add(session)

    # ------------------------------------------------------------ ending

    async def _drain(self) -> None:
        """Hand nothing new out, and wait until what is being written has been settled."""
        logger.info("shutting down")
        self._service.draining = True
        self._loop.remove_reader(self._listener.fileno())
        self._endpoint.stop_listening()
        end = time.monotonic() + DRAIN_SECONDS
        while catalog_statistics(self._service.catalog).reservations and time.monotonic() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run a callback on the loop; a loop that has ended needs it no more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _raise_file_limit() -> None:
    """Allow for a socket and a pidfd for each session.

    Raises:
        ConfigurationError: the hard limit is too low.
    """
    needed = MAX_SESSIONS * FILES_PER_SESSION + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"the limit of open files is {hard}, and the server needs {needed}; "
            f"raise it (ulimit -Hn {needed}, or LimitNOFILE= of the service)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _keep_collector_off_the_hot_path() -> None:
    """No full collections: with a million entries one stops the loop for 120 ms.

    What is alive now stays out of all collections. Young objects are still looked at; what
    outlives them is either a catalog entry, freed by its reference count, or a session, which
    unlinks itself when it closes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 1 << 30)
