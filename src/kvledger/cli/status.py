"""``kvledger status``: the status document as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table

from kvledger.cli.terminal import make_console, printable_document
from kvledger.client import Client
from kvledger.config import format_size
from kvledger.reasons import EXPLANATIONS, Reason

SHORT_ID = 12

MOST_FATES = 8
"""Fates shown of all closed accounts; `--json` has them all."""


def run_status(socket: str | None, *, as_json: bool) -> None:
    """Ask the server and print.

    Raises:
        ServerUnavailableError: no server there.
    """
    with Client(socket) as client:
        document = client.status()
    if as_json:
        print(json.dumps(document, indent=2))
        return
    console = make_console()
    for table in _tables(printable_document(document)):
        console.print(table)


def _tables(document: dict[str, Any]) -> Iterable[Table]:
    yield _server(document)
    if document["engines"]:
        yield _engines(document["engines"])
    if document["namespaces"]:
        yield _namespaces(document["namespaces"])
    yield _books(document["totals"], document["accounts"])
    reasons = {"aborted": document["totals"]["aborted"], "refused": document["totals"]["refused"]}
    if any(reasons.values()):
        yield _reasons(reasons)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _facts(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _server(document: dict[str, Any]) -> Table:
    server, memory = document["server"], document["memory"]
    table = _facts("Server")
    draining = ", shutting down" if server["draining"] else ""
    table.add_row("version", f"{server['version']}, pid {server['pid']}{draining}")
    table.add_row("boot", f"{server['boot']}, up {_duration(server['uptime_seconds'])}")
    table.add_row("socket", f"{server['socket']}, {server['sessions']} sessions")
    table.add_row("HTTP", server["http"] or "off")
    table.add_row(
        "memory",
        f"{format_size(memory['used_bytes'])} used of {format_size(memory['arena_bytes'])}, "
        f"limit {format_size(memory['limit_bytes'])}",
    )
    limited_by = memory["growth_limited_by"]
    table.add_row(
        "growth",
        f"{memory['growth']}, {memory['pages_ready']} of {memory['pages']} pages"
        + (f": {limited_by}" if limited_by else ""),
    )
    return table


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = _table("Engines", "engine", "label", "ranks", "namespace")
    for engine in engines:
        attached = f"{len(engine['ranks_attached'])} of {engine['world_size']}"
        scheduler = "" if engine["scheduler_attached"] else ", no scheduler"
        waiting = engine["trouble"] or f"waiting for {', '.join(engine['waiting_for'])}"
        table.add_row(
            engine["engine"],
            engine["label"],
            attached + scheduler,
            engine["namespace"][:SHORT_ID] or waiting,
        )
    return table


def _namespaces(namespaces: list[dict[str, Any]]) -> Table:
    table = _table("Namespaces", "id", "model", "objects", "size", "nearest other")
    for namespace in namespaces:
        nearest = namespace["nearest"]
        differs = (
            f"{nearest['id'][:SHORT_ID]}, differs in {', '.join(nearest['fields'])}"
            if nearest
            else ""
        )
        display = namespace["display"]
        table.add_row(
            namespace["id"][:SHORT_ID],
            display.get("model") or ", ".join(f"{k} {v}" for k, v in sorted(display.items())),
            f"{namespace['objects']:,}",
            format_size(namespace["used_bytes"]),
            differs,
        )
    return table


def _books(totals: dict[str, Any], accounts: dict[str, Any]) -> Table:
    table = _facts("Books")
    table.add_row("objects", f"{totals['objects']:,}")
    table.add_row("leases", f"{totals['leases']:,}")
    table.add_row(
        "reservations", f"{totals['reservations']:,} open, {totals['quarantined']:,} quarantined"
    )
    asked = totals["hit_chunks"] + totals["missed_chunks"]
    share = f" ({totals['hit_chunks'] / asked:.1%})" if asked else ""
    table.add_row(
        "look-ups",
        f"{totals['lookups']:,}, {totals['hit_chunks']:,} of {asked:,} chunks found{share}",
    )
    table.add_row("stored", f"{totals['stored']:,}, {totals['evicted']:,} evicted")
    if accounts["reports"]:
        table.add_row(
            "accounts", f"{accounts['reports']:,} closed, {accounts['unbalanced']:,} unbalanced"
        )
        table.add_row(
            "tokens",
            f"{accounts['tokens']:,} in them, {accounts['local_tokens']:,} found by vLLM itself, "
            f"{accounts['external_tokens']:,} loaded",
        )
        fates = sorted(accounts["fates"].items(), key=lambda item: -item[1])
        words = [f"{count:,} {word.replace(':', ': ')}" for word, count in fates[:MOST_FATES]]
        table.add_row("chunks", ", ".join(words))
    return table


def _reasons(reasons: dict[str, dict[str, int]]) -> Table:
    table = _table("Not stored", "what", "count", "reason", "meaning")
    for what, by_reason in reasons.items():
        for word, count in sorted(by_reason.items(), key=lambda item: -item[1]):
            table.add_row(what, f"{count:,}", word, _explanation(word))
    return table


def _explanation(word: str) -> str:
    try:
        return EXPLANATIONS[Reason(word)]
    except ValueError:  # a newer server knows reasons that this command does not
        return ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
