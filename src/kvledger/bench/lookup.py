"""Look-up latency: questions over a real socket to a real server, as an engine asks them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvledger.bench.machine import BenchError
from kvledger.bench.results import LookupTime
from kvledger.bench.statistics import quantile
from kvledger.client import Client, Connection
from kvledger.lab.server import ServerProcess
from kvledger.naming import Name, pack_names
from kvledger.protocol import (
    PROTOCOL_VERSION,
    Chain,
    Commit,
    Describe,
    Done,
    Error,
    Hello,
    Match,
    Matched,
    Reply,
    Request,
    Reserve,
    Reserved,
    Role,
)

MEMORY = "512MiB"
"""Enough for the catalog entries of the longest chain; the objects themselves are tiny."""
OBJECT_BYTES = 4096
NAMES = (1, 128, 256, 2048, 8192)
HIT_SHARES = (0.0, 0.5, 1.0)
NAMES_PER_RESERVE = 1024
LEASES = 8
"""Questions take turns with so many leases, as so many waiting requests would."""
ANSWER_SECONDS = 10.0
GROWN_SECONDS = 120.0
_POLL_SECONDS = 0.05


def measure_lookups(
    scratch: Path,
    *,
    names: Sequence[int] = NAMES,
    asks: int = 1000,
    announce: Callable[[str], None] = lambda _: None,
) -> list[LookupTime]:
    """Time look-ups of all lengths and hit shares against a server in a child process.

    Args:
        scratch: directory for the server's socket and log.
        names: lengths of the questions.
        asks: questions of each kind.
        announce: told what is being measured.

    Raises:
        BenchError: an answer was not the one that it must be.
        ServerError: the server does not start.
    """
    times: list[LookupTime] = []
    with _filled_server(scratch, max(names)) as scheduler:
        for count in names:
            announce(f"look-ups of {count:,} names")
            for hit_names in sorted({int(count * share) for share in HIT_SHARES}):
                times.append(_time_lookups(scheduler, count, hit_names, asks))
    return times


def wait_grown(socket_path: Path) -> int:
    """Block until the server has all its memory (growing it takes a core); size of its arena.

    Raises:
        BenchError: it does not get it.
    """
    end = time.monotonic() + GROWN_SECONDS
    with Client(str(socket_path)) as client:
        while (memory := client.status()["memory"])["growth"] != "complete":
            if time.monotonic() > end:
                why = memory["growth_limited_by"] or "it takes too long"
                raise BenchError(f"the server's memory does not become ready: {why}")
            time.sleep(_POLL_SECONDS)
    return int(memory["arena_bytes"])


@contextmanager
def _filled_server(scratch: Path, count: int) -> Iterator[Connection]:
    """The scheduler's connection to a server that holds one chain of ``count`` names."""
    with ServerProcess(scratch / "lookup.sock", memory=MEMORY) as server:
        wait_grown(server.socket_path)
        worker = _open(server.socket_path, Role.WORKER)
        scheduler = _open(server.socket_path, Role.SCHEDULER)
        try:
            fields = {"worker.layout": "bench"}
            ask(
                worker, lambda number: Describe(id=number, fields=fields, part_bytes=[OBJECT_BYTES])
            )
            ask(scheduler, lambda number: Describe(id=number, fields={"weights.digest": "bench"}))
            _fill(scheduler, worker, _names("there", count))
            yield scheduler
        finally:
            scheduler.close()
            worker.close()


def ask(connection: Connection, make: Callable[[int], Request]) -> Reply:
    """Send ``make(id)`` and wait for its answer; pushes that come before it are dropped.

    Raises:
        BenchError: it is refused, or not answered in time.
    """
    request = make(connection.next_id())
    connection.send(request)
    end = time.monotonic() + ANSWER_SECONDS
    while not connection.closed and time.monotonic() < end:
        for reply in connection.receive(ANSWER_SECONDS):
            if isinstance(reply, Error):
                raise BenchError(f"the server refuses a {type(request).__name__}: {reply.message}")
            if reply.id == request.id:
                return reply
    raise BenchError(f"no answer to a {type(request).__name__} in {ANSWER_SECONDS:.0f} s")


def _open(socket_path: Path, role: Role) -> Connection:
    hello = Hello(
        id=1,
        protocol=PROTOCOL_VERSION,
        engine="bench",
        role=role,
        rank=0,
        world_size=1,
        label="kvledger bench",
    )
    return Connection.open(str(socket_path), hello, deadline_seconds=ANSWER_SECONDS)


def _names(kind: str, count: int) -> list[Name]:
    return [Name(hashlib.sha256(f"{kind} {index}".encode()).digest()) for index in range(count)]


def _fill(scheduler: Connection, worker: Connection, names: Sequence[Name]) -> None:
    """Store one chain. No byte of it is written: look-ups do not look at any."""
    for first in range(0, len(names), NAMES_PER_RESERVE):
        chunks = names[first : first + NAMES_PER_RESERVE]
        chain = Chain(parent=names[first - 1] if first else b"", names=pack_names(chunks))
        step = first
        reserved = ask(
            scheduler,
            lambda n: Reserve(id=n, step=step, group=0, chains=[chain]),  # noqa: B023
        )
        assert isinstance(reserved, Reserved)
        (result,) = reserved.chains
        if result.reason:
            raise BenchError(f"the server gives no slot for a name: {result.reason}")
        numbers = result.reservations
        committed = ask(worker, lambda n: Commit(id=n, reservations=numbers))  # noqa: B023
        assert isinstance(committed, Done)


def _time_lookups(scheduler: Connection, count: int, hit_names: int, asks: int) -> LookupTime:
    names = _names("there", hit_names) + _names("absent", count - hit_names)
    packed = pack_names(names)
    seconds: list[float] = []
    for turn in range(asks):
        lease = 1 + turn % LEASES
        start = time.perf_counter()
        reply = ask(scheduler, lambda n: Match(id=n, lease=lease, group=0, names=packed))  # noqa: B023
        seconds.append(time.perf_counter() - start)
        if not isinstance(reply, Matched) or reply.chunks != hit_names:
            raise BenchError(f"{hit_names} of {count} names are there; the answer is {reply}")
    return LookupTime(
        names=count,
        hit_names=hit_names,
        asked=asks,
        p50_seconds=quantile(seconds, 0.5),
        p99_seconds=quantile(seconds, 0.99),
    )
