"""The status document as Prometheus metrics. Built anew at each scrape; keeps no counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvledger.server.growth import GrowthState
from kvledger.server.status import AccountTotals, StatusDocument, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(document: StatusDocument) -> bytes:
    """The exposition text of one snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(document))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, document: StatusDocument) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        document = self._document
        yield from _gauges(document)
        yield from _namespaces(document)
        yield from _counters(document.totals)
        if document.accounts.reports:  # a zero that nobody has reported would be a false comfort
            yield from _accounts(document.accounts)


_GAUGES: tuple[tuple[str, str, Callable[[StatusDocument], float]], ...] = (
    ("memory_limit_bytes", "Memory the server may use.", lambda d: d.memory.limit_bytes),
    ("arena_bytes", "Size of the arena.", lambda d: d.memory.arena_bytes),
    (
        "arena_ready_bytes",
        "Part of the arena that has been instantiated.",
        lambda d: d.memory.pages_ready * d.memory.page_bytes,
    ),
    ("used_bytes", "Bytes of slots that hold objects.", lambda d: d.memory.used_bytes),
    ("objects", "Objects in the catalog.", lambda d: d.totals.objects),
    ("leases", "Leases held by engines.", lambda d: d.totals.leases),
    ("reservations", "Reservations not yet settled.", lambda d: d.totals.reservations),
    (
        "quarantined",
        "Aborted reservations whose slot a rank may still be writing.",
        lambda d: d.totals.quarantined,
    ),
    ("sessions", "Connections.", lambda d: d.server.sessions),
    ("engines", "Engines that are known.", lambda d: len(d.engines)),
    (
        "engines_open",
        "Engines whose namespace is open.",
        lambda d: sum(bool(engine.namespace) for engine in d.engines),
    ),
    ("draining", "1 while the server is shutting down.", lambda d: d.server.draining),
    ("uptime_seconds", "Time since the start.", lambda d: d.server.uptime_seconds),
)


def _gauges(document: StatusDocument) -> Iterator[Metric]:
    for name, help_text, value in _GAUGES:
        yield GaugeMetricFamily(f"kvledger_{name}", help_text, value=float(value(document)))
    growth = GaugeMetricFamily(
        "kvledger_growth_state", "1 for the state the arena's growth is in.", labels=["state"]
    )
    for state in GrowthState:
        growth.add_metric([state], float(document.memory.growth == state))
    yield growth


def _namespaces(document: StatusDocument) -> Iterator[Metric]:
    objects = GaugeMetricFamily(
        "kvledger_namespace_objects", "Objects of a namespace.", labels=["namespace"]
    )
    used = GaugeMetricFamily(
        "kvledger_namespace_used_bytes", "Bytes of a namespace.", labels=["namespace"]
    )
    for namespace in document.namespaces:
        objects.add_metric([namespace.id], namespace.objects)
        used.add_metric([namespace.id], namespace.used_bytes)
    yield objects
    yield used


def _counters(totals: Totals) -> Iterator[Metric]:
    for name, help_text, value in (
        ("lookups", "Look-ups answered.", totals.lookups),
        ("hit_chunks", "Chunks found by look-ups.", totals.hit_chunks),
        ("missed_chunks", "Chunks not found by look-ups.", totals.missed_chunks),
        ("stored", "Objects stored.", totals.stored),
        ("evicted", "Objects evicted to make room.", totals.evicted),
    ):
        yield CounterMetricFamily(f"kvledger_{name}", help_text, value=value)
    for name, help_text, by_reason in (
        ("aborted", "Reservations aborted, by reason.", totals.aborted),
        ("refused", "Chains stopped at a reserve, by reason.", totals.refused),
    ):
        family = CounterMetricFamily(f"kvledger_{name}", help_text, labels=["reason"])
        for reason, count in by_reason.items():
            family.add_metric([reason], count)
        yield family


def _accounts(accounts: AccountTotals) -> Iterator[Metric]:
    for name, help_text, value in (
        ("accounts", "Closed accounts that engines have reported.", accounts.reports),
        ("unbalanced_accounts", "Accounts whose books do not balance.", accounts.unbalanced),
        ("request_tokens", "Tokens of the reported requests.", accounts.tokens),
        ("local_tokens", "Tokens found in the engines' own caches.", accounts.local_tokens),
        ("external_tokens", "Tokens loaded from this server.", accounts.external_tokens),
    ):
        yield CounterMetricFamily(f"kvledger_{name}", help_text, value=value)
    fates = CounterMetricFamily(
        "kvledger_chunk_fates", "Chunks of reported requests, by final fate.", labels=["fate"]
    )
    for fate, chunks in accounts.fates.items():
        fates.add_metric([fate], chunks)
    yield fates
