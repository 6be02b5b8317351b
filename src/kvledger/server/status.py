"""The server's state as one document: what `kvledger status`, the HTTP API and metrics show."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass

import msgspec

from kvledger import __version__
from kvledger.arena import MemoryPlan
from kvledger.audit import CatalogStatistics, catalog_statistics
from kvledger.catalog import Catalog
from kvledger.config import ServerConfig
from kvledger.protocol import Role
from kvledger.server.attachments import Attachments
from kvledger.server.engines import Engine
from kvledger.server.growth import Growth
from kvledger.server.reports import Reports

MAX_DOCUMENT_BYTES = 4 << 20
"""Half a frame."""
MAX_TEXT = 512
"""Characters shown of what an engine calls itself or its model."""
MAX_LISTED = 32
"""Entries shown of what can be a long list for one engine or namespace."""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The process."""

    version: str
    boot: str
    pid: int
    uptime_seconds: float
    socket: str
    http: str
    sessions: int
    draining: bool


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Memory, in bytes unless named otherwise; ``used_bytes`` is what objects' slots occupy."""

    limit_bytes: int
    arena_bytes: int
    metadata_bytes: int
    page_bytes: int
    pages: int
    pages_ready: int
    used_bytes: int
    growth: str
    growth_limited_by: str


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        waiting_for: the processes that have not described themselves; the first of them.
        trouble: why its namespace cannot open, as a sentence; empty if nothing is wrong.
    """

    engine: str
    label: str
    world_size: int
    scheduler_attached: bool
    ranks_attached: list[int]
    namespace: str
    waiting_for: list[str]
    trouble: str


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest other namespace, and the fields in which it differs."""

    id: str
    fields: list[str]


class NamespaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace."""

    id: str
    objects: int
    used_bytes: int
    object_bytes: list[int]
    display: dict[str, str]
    nearest: Nearest | None


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What is held now, and what was counted since the start."""

    objects: int
    leases: int
    reservations: int
    quarantined: int
    lookups: int
    hit_chunks: int
    missed_chunks: int
    stored: int
    evicted: int
    aborted: dict[str, int]
    refused: dict[str, int]


class AccountTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What engines have reported since the start; ``fates`` counts chunks."""

    reports: int
    unbalanced: int
    tokens: int
    local_tokens: int
    external_tokens: int
    fates: dict[str, int]


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    server: ServerStatus
    memory: MemoryStatus
    engines: list[EngineStatus]
    namespaces: list[NamespaceStatus]
    totals: Totals
    accounts: AccountTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSources:
    """Where the document is read from; reading changes nothing and must happen on the loop."""

    boot: str
    started: float
    config: ServerConfig
    http: str
    plan: MemoryPlan
    catalog: Catalog
    attachments: Attachments
    reports: Reports
    growth: Growth

    def document(self, *, sessions: int, draining: bool) -> StatusDocument:
        """A snapshot; costs time in the number of engines and namespaces, not of objects."""
        statistics = catalog_statistics(self.catalog)
        return StatusDocument(
            server=ServerStatus(
                version=__version__,
                boot=self.boot,
                pid=os.getpid(),
                uptime_seconds=round(time.monotonic() - self.started, 3),
                socket=self.config.socket_path,
                http=self.http,
                sessions=sessions,
                draining=draining,
            ),
            memory=self._memory(statistics),
            engines=[_engine_status(engine) for engine in self.attachments.engines.values()],
            namespaces=self._namespaces(statistics),
            totals=_totals(statistics),
            accounts=AccountTotals(
                reports=self.reports.received,
                unbalanced=self.reports.unbalanced,
                tokens=self.reports.tokens,
                local_tokens=self.reports.local_tokens,
                external_tokens=self.reports.external_tokens,
                fates=dict(self.reports.fates),
            ),
        )

    def _memory(self, statistics: CatalogStatistics) -> MemoryStatus:
        return MemoryStatus(
            limit_bytes=self.config.memory_bytes,
            arena_bytes=self.plan.arena_bytes,
            metadata_bytes=self.plan.metadata_bytes,
            page_bytes=self.plan.page_bytes,
            pages=self.plan.pages,
            pages_ready=statistics.pages_ready,
            used_bytes=statistics.bytes_used,
            growth=self.growth.state,
            growth_limited_by=self.growth.limited_by,
        )

    def _namespaces(self, statistics: CatalogStatistics) -> list[NamespaceStatus]:
        entries: list[NamespaceStatus] = []
        for namespace in statistics.namespaces:
            known = self.attachments.namespaces.get(namespace.namespace)
            nearest = None
            if known is not None and known.nearest is not None:
                fields = [name[:MAX_TEXT] for name in known.fields[:MAX_LISTED]]
                nearest = Nearest(id=known.nearest, fields=fields)
            entries.append(
                NamespaceStatus(
                    id=namespace.namespace,
                    objects=namespace.objects,
                    used_bytes=namespace.used_bytes,
                    object_bytes=namespace.object_bytes,
                    display=_shown(known.display) if known is not None else {},
                    nearest=nearest,
                )
            )
        return entries


def encode_document(document: StatusDocument) -> bytes:
    """JSON that fits into a frame: the longest lists are halved until it does."""
    encoded = msgspec.json.encode(document)
    while len(encoded) > MAX_DOCUMENT_BYTES:
        document = msgspec.structs.replace(
            document,
            engines=document.engines[: len(document.engines) // 2],
            namespaces=document.namespaces[: len(document.namespaces) // 2],
        )
        encoded = msgspec.json.encode(document)
    return encoded


def _shown(display: dict[str, str]) -> dict[str, str]:
    items = itertools.islice(display.items(), MAX_LISTED)
    return {name[:MAX_TEXT]: value[:MAX_TEXT] for name, value in items}


def _engine_status(engine: Engine) -> EngineStatus:
    scheduler = engine.scheduler
    labels = [process.label for process in engine.processes.values() if process.label]
    label = scheduler.label if scheduler is not None else next(iter(labels), "")
    return EngineStatus(
        engine=engine.id,
        label=label[:MAX_TEXT],
        world_size=engine.world_size,
        scheduler_attached=scheduler is not None and scheduler.session is not None,
        ranks_attached=sorted(
            process.rank for process in engine.attached() if process.role is Role.WORKER
        ),
        namespace=engine.namespace or "",
        waiting_for=engine.missing()[:MAX_LISTED],
        trouble=engine.trouble[:MAX_TEXT],
    )


def _totals(statistics: CatalogStatistics) -> Totals:
    return Totals(
        objects=statistics.objects,
        leases=statistics.leases,
        reservations=statistics.reservations,
        quarantined=statistics.quarantined,
        lookups=statistics.lookups,
        hit_chunks=statistics.hit_chunks,
        missed_chunks=statistics.missed_chunks,
        stored=statistics.stored,
        evicted=statistics.evicted,
        aborted={str(reason): count for reason, count in statistics.aborted.items()},
        refused={str(reason): count for reason, count in statistics.refused.items()},
    )
