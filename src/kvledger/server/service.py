"""Answers requests: checks who may ask what, calls the catalog, and words the reply.

Every request is answered exactly once, with its reply or with a typed error. Whatever goes wrong
in here is logged with its traceback and answered as an internal error; the server goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import assert_never

import msgspec

from kvledger import __version__
from kvledger.arena import Arena
from kvledger.catalog import Catalog
from kvledger.errors import ProtocolError, RefusedError
from kvledger.naming import NAME_BYTES, NamespaceId, count_names
from kvledger.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Chain,
    ChainReserved,
    Clear,
    Cleared,
    Commit,
    Describe,
    Done,
    Error,
    ErrorCode,
    Explain,
    Hello,
    Locate,
    Located,
    Match,
    Matched,
    Release,
    Reply,
    Report,
    Request,
    Reserve,
    Reserved,
    Role,
    Status,
    StatusReply,
    Welcome,
    pack_u64,
    unpack_u64,
)
from kvledger.reasons import Reason
from kvledger.server.attachments import Attachments
from kvledger.server.engines import Engine, Process
from kvledger.server.reports import Reports
from kvledger.server.session import MAX_CLIENTS, Session

logger = logging.getLogger(__name__)

MAX_NAMES = MAX_FRAME_BYTES // (2 * NAME_BYTES)
"""Half a frame of names: two million tokens at block 16."""
MAX_ITEMS = 65_536
"""Chains, leases or reservations in one message: beyond any batch, and some 50 ms of the loop."""


class Service:
    """See the module.

    Attributes:
        draining: the server is about to end; nothing new is handed out.
        sessions: all connections.
        attachments: the engines.
        reports: the accounts they have closed.
    """

    def __init__(
        self,
        *,
        boot: str,
        arena: Arena,
        catalog: Catalog,
        loop: asyncio.AbstractEventLoop,
        status_document: Callable[[], bytes],
    ) -> None:
        self.draining = False
        self.sessions: set[Session] = set()
        self.catalog = catalog
        self.attachments = Attachments(catalog, loop)
        self.reports = Reports()
        self._boot = boot
        self._arena = arena
        self._status_document = status_document

    def handle(self, session: Session, request: Request) -> None:
        """Answer one request. Never raises."""
        try:
            if not session.introduced:
                self._introduce(session, request)
            else:
                session.send(self._answer(session, request))
        except (RefusedError, ProtocolError) as error:
            code = error.code if isinstance(error, RefusedError) else ErrorCode.BAD_MESSAGE
            session.send(Error(id=request.id, code=ErrorCode(code), message=str(error)))
        except Exception:
            logger.exception("internal error at a %s of %s", type(request).__name__, session)
            sentence = "internal error of the server; its log has the traceback"
            session.send(Error(id=request.id, code=ErrorCode.INTERNAL, message=sentence))
        self.attachments.send_pushes()

    def session_closed(self, session: Session) -> None:
        """A connection has closed, for whatever cause. Never raises."""
        self.sessions.discard(session)
        process, session.process = session.process, None
        if process is None:
            return
        try:
            self.attachments.connection_lost(process)
        except Exception:
            logger.exception("internal error when %s lost its connection", process)

    # ------------------------------------------------------------ hello

    def _introduce(self, session: Session, request: Request) -> None:
        """The first message of a session; anything but an acceptable Hello closes it."""
        if not isinstance(request, Hello):
            session.refuse(ErrorCode.HELLO_FIRST, "the first message is Hello", request.id)
            return
        try:
            _check_version(request)
            if request.role is Role.CLIENT:
                if sum(other.is_client for other in self.sessions) >= MAX_CLIENTS:
                    raise RefusedError(ErrorCode.LIMIT_REACHED, f"{MAX_CLIENTS} clients are here")
                session.is_client = True
                generation, descriptor = 0, None
            else:
                generation = self.attachments.hello(session, request)
                descriptor = self._arena.fd
        except RefusedError as error:
            session.refuse(ErrorCode(error.code), str(error), request.id)
            return
        session.introduce()
        welcome = Welcome(
            id=request.id,
            protocol=PROTOCOL_VERSION,
            version=__version__,
            boot=self._boot,
            arena_generation=generation,
            arena_bytes=self._arena.arena_bytes,
            max_names=MAX_NAMES,
            max_reservations=self.catalog.max_reservations,
        )
        session.send(welcome, descriptor)

    # ------------------------------------------------------------ requests

    def _answer(self, session: Session, request: Request) -> Reply:
        match request:
            case Match():
                return self._match(self._open_engine(session), request)
            case Reserve():
                return self._reserve(self._open_engine(session), request)
            case Commit():
                return self._commit(session, request)
            case Locate():
                return self._locate(self._open_engine(session), request)
            case Release():
                engine = _process(session, Role.SCHEDULER).engine
                if engine.id in self.catalog.engines:
                    _check_items(len(request.leases))
                    self.catalog.release(engine.id, request.leases)
                return Done(id=request.id)
            case Abort():
                return self._abort(session, request)
            case Describe():
                self.attachments.describe(_process(session), request)
                return Done(id=request.id)
            case Report():
                scheduler = _process(session, Role.SCHEDULER)
                self.reports.add(scheduler.engine.id, request, time.monotonic())
                return Done(id=request.id)
            case Explain():
                accounts = self.reports.latest(request.request, time.monotonic())
                return StatusReply(id=request.id, document=msgspec.json.encode(accounts))
            case Status():
                return StatusReply(id=request.id, document=self._status_document())
            case Clear():
                return self._clear(session, request)
            case Hello():
                raise RefusedError(ErrorCode.BAD_MESSAGE, "Hello is the first message only")
        assert_never(request)

    def _match(self, engine: Engine, request: Match) -> Reply:
        self._refuse_if_draining()
        _check_group(engine, request.group)
        _check_names(_count_names(request.names))
        result = self.catalog.match(
            engine.id, request.lease, request.group, request.names, time.monotonic()
        )
        return Matched(
            id=request.id,
            chunks=result.chunks,
            reason=result.reason or "",
            age_seconds=result.age_seconds,
        )

    def _locate(self, engine: Engine, request: Locate) -> Reply:
        offsets = self.catalog.locate(engine.id, request.lease, request.first, request.count)
        if offsets is not None:
            return Located(id=request.id, offsets=pack_u64(offsets))
        if request.lease not in self.catalog.engines[engine.id].leases:
            raise RefusedError(
                ErrorCode.UNKNOWN_LEASE, f"lease {request.lease} is not held by this engine"
            )
        raise RefusedError(
            ErrorCode.OUT_OF_RANGE,
            f"lease {request.lease} does not reach chunks {request.first} "
            f"to {request.first + request.count - 1}",
        )

    def _reserve(self, engine: Engine, request: Reserve) -> Reply:
        self._refuse_if_draining()
        _check_group(engine, request.group)
        _check_items(len(request.chains))
        _check_names(sum(_count_chain(chain) for chain in request.chains))
        results, expired = self.catalog.reserve(
            engine.id, request.group, request.step, request.chains, time.monotonic()
        )
        self.attachments.settle(expired)
        chains = [
            ChainReserved(
                present=result.present,
                reservations=pack_u64(result.reservations),
                offsets=pack_u64(result.offsets),
                reason=result.reason or "",
            )
            for result in results
        ]
        return Reserved(id=request.id, chains=chains)

    def _commit(self, session: Session, request: Commit) -> Reply:
        worker = _process(session, Role.WORKER)
        if worker.engine.id in self.catalog.engines:
            settlements = self.catalog.commit(
                worker.engine.id, worker.rank, _numbers(request.reservations), time.monotonic()
            )
            self.attachments.settle(settlements)
        return Done(id=request.id)

    def _abort(self, session: Session, request: Abort) -> Reply:
        process = _process(session)
        reason = _reason(request.reason)
        rank = process.rank if process.role is Role.WORKER else None
        if process.engine.id in self.catalog.engines:
            settlements = self.catalog.abort(
                process.engine.id, rank, _numbers(request.reservations), reason
            )
            self.attachments.settle(settlements)
        return Done(id=request.id)

    def _clear(self, session: Session, request: Clear) -> Reply:
        if not session.is_client:
            raise RefusedError(ErrorCode.WRONG_ROLE, "only a client clears a namespace")
        namespace = NamespaceId(request.namespace) if request.namespace else None
        return Cleared(id=request.id, objects=self.catalog.clear(namespace))

    # ------------------------------------------------------------ checks

    def _open_engine(self, session: Session) -> Engine:
        """The engine of a scheduler whose namespace is open."""
        engine = _process(session, Role.SCHEDULER).engine
        if engine.namespace is None:
            why = engine.trouble or f"waiting for {', '.join(engine.missing())}"
            raise RefusedError(ErrorCode.NAMESPACE_NOT_OPEN, f"the namespace is not open: {why}")
        return engine

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise RefusedError(ErrorCode.DRAINING, "the server is shutting down")


def _process(session: Session, role: Role | None = None) -> Process:
    """The engine process behind a session, which must have the role (or any, if None)."""
    process = session.process
    if process is None or (role is not None and process.role is not role):
        wanted = role or "scheduler or worker"
        raise RefusedError(ErrorCode.WRONG_ROLE, f"only a {wanted} sends this message")
    return process


def _reason(word: str) -> Reason:
    try:
        return Reason(word)
    except ValueError as error:
        raise ProtocolError(f"{word!r} is no reason") from error


def _check_group(engine: Engine, group: int) -> None:
    if not 0 <= group < len(engine.object_bytes):
        raise RefusedError(
            ErrorCode.OUT_OF_RANGE,
            f"the engine has KV-cache groups 0 to {len(engine.object_bytes) - 1}, not {group}",
        )


def _check_version(hello: Hello) -> None:
    if hello.protocol != PROTOCOL_VERSION:
        raise RefusedError(
            ErrorCode.WRONG_VERSION,
            f"this server speaks protocol {PROTOCOL_VERSION}, the {hello.role} {hello.protocol}; "
            "install the same kvledger on both sides",
        )


def _check_items(items: int) -> None:
    if items > MAX_ITEMS:
        raise RefusedError(
            ErrorCode.LIMIT_REACHED, f"one message has at most {MAX_ITEMS} items, not {items}"
        )


def _numbers(packed: bytes) -> list[int]:
    """Reservation ids of one message."""
    _check_items(len(packed) // 8)
    return unpack_u64(packed)


def _check_names(names: int) -> None:
    if names > MAX_NAMES:
        raise RefusedError(
            ErrorCode.LIMIT_REACHED, f"one message has at most {MAX_NAMES} names, not {names}"
        )


def _count_names(packed: bytes) -> int:
    """Number of names in a packed field. Raises ProtocolError if it is not made of names."""
    try:
        return count_names(packed)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _count_chain(chain: Chain) -> int:
    if len(chain.parent) not in (0, NAME_BYTES):
        raise ProtocolError(f"a parent is empty or a name of {NAME_BYTES} bytes")
    return _count_names(chain.names)
