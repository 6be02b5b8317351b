"""``kvledger explain``: the closed accounts of requests, as engines have reported them."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.table import Table

from kvledger.cli.terminal import make_console, printable_document
from kvledger.client import Client
from kvledger.reasons import EXPLANATIONS, Reason

MAX_SHOWN = 20


def run_explain(socket: str | None, request: str, *, as_json: bool) -> None:
    """Ask the server and print, the newest account first.

    Raises:
        ServerUnavailableError: no server there.
    """
    with Client(socket) as client:
        accounts = client.explain(request)
    if as_json:
        print(json.dumps(accounts, indent=2))
        return
    console = make_console()
    if not accounts:
        wanted = f"beginning with {request!r}" if request else "at all"
        console.print(f"No engine has reported a request {wanted} lately.")
        return
    for account in accounts[:MAX_SHOWN]:
        console.print(_table(printable_document(account)))
    if len(accounts) > MAX_SHOWN:
        console.print(f"{len(accounts) - MAX_SHOWN} older ones are not shown; --json shows all.")


def _table(account: dict[str, Any]) -> Table:
    balance = account["imbalance"] or "balanced"
    table = Table(
        title=f"{account['request']} of engine {account['engine']}: {account['tokens']:,} tokens, "
        f"{account['local_tokens']:,} found locally, {account['external_tokens']:,} loaded; "
        f"{balance}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("chunks", "tokens", "fate", "why"):
        table.add_column(column)
    first = 0
    for fate, chunks in account["fates"]:
        begin = first * account["chunk_tokens"]
        end = (first + chunks) * account["chunk_tokens"]
        table.add_row(f"{chunks:,}", f"{begin:,} to {end:,}", *_fate(fate))
        first += chunks
    for fate, chunks in account["dropped"].items():
        table.add_row(f"{chunks:,}", "cut off again", *_fate(fate))
    if account["miss"]:
        table.add_row("", "", "look-up ended", explain_reason(account["miss"]))
    return table


def _fate(fate: str) -> tuple[str, str]:
    """A fate and, if it has a reason, its sentence."""
    word, _, reason = fate.partition(":")
    return word, explain_reason(reason) if reason else ""


def explain_reason(word: str) -> str:
    """The sentence for a reason, after its word."""
    try:
        return f"{word}: {EXPLANATIONS[Reason(word)]}"
    except ValueError:  # a newer server knows reasons that this command does not
        return word
