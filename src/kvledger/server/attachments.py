"""How processes attach to the server, and what happens when they go.

An engine is attached as a whole. When one of its processes loses its connection or ends, all its
connections are closed, and its leases and reservations are dropped *after* that: a worker whose
connection still stands after a copy has copied valid bytes. The processes come back by themselves
under a new generation, which every plan carries, so that no plan of before is followed.

A closed connection frees no slot that the process may be writing. Only the process' end, which
its pidfd tells at once, or its own word does: a worker that describes itself says that it follows
no plan of before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterable

from kvledger.catalog import Catalog
from kvledger.entries import Settlement
from kvledger.errors import RefusedError
from kvledger.protocol import (
    PUSH_ID,
    Closed,
    Describe,
    Error,
    ErrorCode,
    Hello,
    Opened,
    Reply,
    Role,
    Settled,
    pack_u64,
)
from kvledger.server import peers
from kvledger.server.engines import (
    MAX_FIELDS,
    MAX_GROUPS,
    MAX_PART_BYTES,
    Engine,
    Joined,
    Process,
    disagreement,
    join_parts,
)
from kvledger.server.namespaces import NamespaceDirectory
from kvledger.server.session import Session
from kvledger.space import ObjectTooLargeError

logger = logging.getLogger(__name__)

MAX_PROCESSES = 4096
MAX_WORLD_SIZE = 4096
MAX_ID_LENGTH = 256
MAX_LABEL_LENGTH = 1024


class Attachments:
    """Owns the engines, their processes and pidfds; see the module."""

    def __init__(self, catalog: Catalog, loop: asyncio.AbstractEventLoop) -> None:
        self.engines: dict[str, Engine] = {}
        self.namespaces = NamespaceDirectory()
        self._catalog = catalog
        self._loop = loop
        self._generations = itertools.count(1)
        self._pushes: list[tuple[Session, Reply]] = []

    # ------------------------------------------------------------ requests

    def hello(self, session: Session, hello: Hello) -> int:
        """Attach a process; its engine's generation.

        Raises:
            RefusedError: it cannot be attached; nothing has changed.
        """
        _check_hello(hello)
        pidfd = session.take_descriptor()
        if pidfd is None:
            raise RefusedError(
                ErrorCode.NO_PIDFD, "a scheduler or worker sends its own pidfd with its Hello"
            )
        try:
            pid, identity = _examine_pidfd(pidfd, session)
            engine = self._engine_for(hello, identity)
        except BaseException:
            os.close(pidfd)
            raise
        process = engine.processes.get((hello.role, hello.rank))
        if process is None:
            process = Process(
                engine, hello.role, hello.rank, hello.label, pid, identity, pidfd, session
            )
            engine.processes[hello.role, hello.rank] = process
        else:
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd, process.label, process.session = pidfd, hello.label, session
        self._loop.add_reader(pidfd, self._on_ended, process)
        session.process = process
        logger.info("%s has attached", process)
        return engine.generation

    def describe(self, process: Process, request: Describe) -> None:
        """Take a process' part of the descriptor, and open the namespace if it is the last.

        Raises:
            RefusedError: the part is refused, and the namespace stays (or now is) closed.
        """
        part_bytes = tuple(request.part_bytes)
        _check_description(process, request)
        engine = process.engine
        unchanged = process.fields == request.fields and process.part_bytes == part_bytes
        if process.fields is not None and not unchanged:
            self._close_namespace(engine, f"{process} has described itself anew")
            if process.session is None:  # telling the others found that the engine is going
                return
        process.fields, process.part_bytes = request.fields, part_bytes
        if process.role is Role.WORKER:
            self._catalog.rank_acknowledged(engine.id, process.rank)
        if unchanged:
            return
        field = disagreement(process, list(engine.processes.values()))
        if field:
            process.fields = None
            engine.trouble = (
                f"{process} differs from the other processes of the engine in {field!r}; "
                "start all ranks with the same configuration"
            )
            logger.error("%s", engine.trouble)
            raise RefusedError(ErrorCode.RANKS_DISAGREE, engine.trouble)
        engine.trouble = ""
        if not engine.missing():
            self._open_namespace(engine, process)

    def connection_lost(self, process: Process) -> None:
        """A process' connection has closed; the process itself may live on."""
        if peers.has_ended(process.pidfd):
            self._ended(process)
            return
        process.session = process.fields = None
        engine = process.engine
        if engine.opened:
            self._detach_all(engine, f"{process} has lost its connection")
        elif engine.id not in self._catalog.engines:
            self._remove(process)
            return
        self._forget_if_gone(engine)

    def settle(self, settlements: Iterable[Settlement]) -> None:
        """Tell the schedulers concerned; sent by :meth:`send_pushes`."""
        for settlement in settlements:
            engine = self.engines.get(settlement.engine)
            scheduler = engine.scheduler if engine is not None else None
            if scheduler is None or scheduler.session is None:
                continue
            message = Settled(
                id=PUSH_ID,
                stored=pack_u64(settlement.stored),
                aborted=pack_u64(settlement.aborted),
                reason=settlement.reason or "",
            )
            self._pushes.append((scheduler.session, message))

    def send_pushes(self) -> None:
        """Send what handling a request or an event has left to be told, after its answer."""
        while self._pushes:
            pushes, self._pushes = self._pushes, []
            for session, message in pushes:
                session.send(message)

    # ------------------------------------------------------------ attaching

    def _engine_for(self, hello: Hello, identity: tuple[int, int] | None) -> Engine:
        """The engine this process may join, with nobody else in its place."""
        engine = self.engines.get(hello.engine)
        holder = engine.processes.get((hello.role, hello.rank)) if engine is not None else None
        if engine is not None and holder is not None:
            if peers.has_ended(holder.pidfd):
                self._ended(holder)
            elif identity is None or identity != holder.identity:
                raise RefusedError(
                    ErrorCode.ENGINE_ID_IN_USE,
                    f"{holder} is alive; give this engine an id of its own, "
                    "or wait until that process has ended",
                )
            elif engine.opened:
                self._detach_all(engine, f"{holder} has connected again")
            elif holder.session is not None:
                self._close_quietly(holder)
            engine = self.engines.get(hello.engine)
        if engine is not None and engine.processes and engine.world_size != hello.world_size:
            raise RefusedError(
                ErrorCode.RANKS_DISAGREE,
                f"the other processes of engine {engine.id} have world_size {engine.world_size}, "
                f"this one has {hello.world_size}",
            )
        if engine is None:
            if sum(len(e.processes) for e in self.engines.values()) >= MAX_PROCESSES:
                raise RefusedError(
                    ErrorCode.LIMIT_REACHED, f"the server knows {MAX_PROCESSES} processes already"
                )
            engine = Engine(hello.engine, hello.world_size, next(self._generations))
            self.engines[hello.engine] = engine
        elif not engine.attached():
            engine.generation = next(self._generations)
        return engine

    def _open_namespace(self, engine: Engine, last: Process) -> None:
        scheduler = engine.scheduler
        assert scheduler is not None
        assert scheduler.fields is not None
        workers = sorted(engine.workers(), key=lambda worker: worker.rank)
        joined = join_parts(scheduler.fields, workers)
        try:
            _check_layout(joined)
            self._catalog.open_namespace(joined.namespace, joined.object_bytes)
        except ObjectTooLargeError as error:
            engine.trouble = str(error)
            logger.error("engine %s cannot be served: %s", engine.id, error)
            if last is scheduler:
                raise RefusedError(ErrorCode.OBJECT_TOO_LARGE, str(error)) from error
            if scheduler.session is not None:
                message = Error(id=PUSH_ID, code=ErrorCode.OBJECT_TOO_LARGE, message=str(error))
                self._pushes.append((scheduler.session, message))
            return
        self._catalog.attach_engine(engine.id, joined.namespace, engine.world_size)
        known = self.namespaces.add(joined.namespace, joined.descriptor)
        engine.namespace, engine.opened = joined.namespace, True
        engine.object_bytes, engine.part_offsets = joined.object_bytes, joined.part_offsets
        logger.info("engine %s works in namespace %s", engine.id, joined.namespace)
        if known.nearest is not None:
            logger.info("nearest: %s, differs in %s", known.nearest, ", ".join(known.fields))
        for process in engine.attached():
            assert process.session is not None
            is_worker = process.role is Role.WORKER
            opened = Opened(
                id=PUSH_ID,
                namespace=joined.namespace,
                object_bytes=list(joined.object_bytes),
                part_offsets=list(joined.part_offsets[process.rank]) if is_worker else [],
            )
            self._pushes.append((process.session, opened))

    # ------------------------------------------------------------ going

    def _on_ended(self, process: Process) -> None:
        """The loop's callback for a pidfd."""
        try:
            self._ended(process)
            self.send_pushes()
        except Exception:
            logger.exception("internal error at the end of %s", process)

    def _ended(self, process: Process) -> None:
        engine = process.engine
        logger.info("%s has ended", process)
        self._remove(process)
        if engine.opened:
            self._detach_all(engine, f"{process} has ended")
        if process.role is Role.WORKER:
            self.settle(self._catalog.rank_gone(engine.id, process.rank))
        if not engine.processes:
            self._catalog.forget_engine(engine.id)

    def _forget_if_gone(self, engine: Engine) -> None:
        """Forget an engine that has left, though its processes live on (a notebook's, say).

        While a rank may still be writing, it is kept until that rank returns or ends.
        """
        books = self._catalog.engines.get(engine.id)
        if engine.attached() or (books is not None and books.quarantine):
            return
        for process in list(engine.processes.values()):
            self._remove(process)
        self._catalog.forget_engine(engine.id)

    def _remove(self, process: Process) -> None:
        """Forget one process, and its engine with the last one."""
        engine = process.engine
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        del engine.processes[process.role, process.rank]
        if not engine.processes:
            del self.engines[engine.id]
        self._close_quietly(process)

    def _close_namespace(self, engine: Engine, reason: str) -> None:
        """Drop what the engine holds; its connections stay. Workers are told first.

        A worker that cannot be told at once loses its connection, because nothing may be dropped
        before it can know: it relies on that after each copy.
        """
        if engine.namespace is None:
            return
        engine.namespace = None
        for worker in list(engine.workers()):  # telling one may find that it has ended
            session = worker.session
            if session is not None:
                session.send(Closed(id=PUSH_ID, reason=reason))
                if session.has_backlog:
                    session.close()
        self.settle(self._catalog.drop_engine(engine.id))

    def _detach_all(self, engine: Engine, reason: str) -> None:
        """End this generation: close all connections, then drop what the engine holds."""
        logger.info("engine %s is detached: %s", engine.id, reason)
        engine.namespace, engine.opened = None, False
        for process in engine.attached():
            self._close_quietly(process, Closed(id=PUSH_ID, reason=reason))
        self._catalog.drop_engine(engine.id)

    def _close_quietly(self, process: Process, last_word: Reply | None = None) -> None:
        """Take the connection from a process, which then counts as detached, and close it."""
        session, process.session, process.fields = process.session, None, None
        if session is None:
            return
        session.process = None
        if last_word is not None:
            session.send(last_word)
        session.close()


def _check_hello(hello: Hello) -> None:
    ranks = hello.world_size if hello.role is Role.WORKER else 1
    if not (1 <= hello.world_size <= MAX_WORLD_SIZE and 0 <= hello.rank < ranks):
        raise RefusedError(
            ErrorCode.BAD_MESSAGE,
            f"{hello.role} rank {hello.rank} of world_size {hello.world_size} cannot be",
        )
    if not 0 < len(hello.engine) <= MAX_ID_LENGTH or len(hello.label) > MAX_LABEL_LENGTH:
        raise RefusedError(
            ErrorCode.BAD_MESSAGE,
            f"an engine id has 1 to {MAX_ID_LENGTH} characters, a label at most {MAX_LABEL_LENGTH}",
        )


def _examine_pidfd(pidfd: int, session: Session) -> tuple[int, tuple[int, int] | None]:
    """Process id and identity behind a pidfd, which must be that of the peer."""
    pid = peers.pid_of_pidfd(pidfd)
    if pid is None:
        raise RefusedError(ErrorCode.NO_PIDFD, "the descriptor sent with Hello is not a pidfd")
    if pid > 0 and session.peer.pid > 0 and pid != session.peer.pid:
        raise RefusedError(
            ErrorCode.NO_PIDFD,
            f"the pidfd belongs to pid {pid}, but pid {session.peer.pid} has connected; "
            "each process sends its own",
        )
    return pid, peers.identity_of_pidfd(pidfd, pid)


def _check_description(process: Process, request: Describe) -> None:
    groups = len(request.part_bytes)
    right_groups = 1 <= groups <= MAX_GROUPS if process.role is Role.WORKER else groups == 0
    if not right_groups or len(request.fields) > MAX_FIELDS:
        raise RefusedError(
            ErrorCode.BAD_MESSAGE,
            f"a worker describes 1 to {MAX_GROUPS} KV-cache groups and a scheduler none, "
            f"in at most {MAX_FIELDS} fields",
        )
    if any(not 0 <= size <= MAX_PART_BYTES for size in request.part_bytes):
        raise RefusedError(ErrorCode.BAD_MESSAGE, f"part_bytes lie between 0 and {MAX_PART_BYTES}")


def _check_layout(joined: Joined) -> None:
    if 0 in joined.object_bytes:
        raise RefusedError(
            ErrorCode.BAD_MESSAGE,
            f"KV-cache group {joined.object_bytes.index(0)} has no bytes on any rank",
        )
