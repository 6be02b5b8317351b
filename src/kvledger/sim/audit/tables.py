"""An audit on a terminal: one table, then what was found, in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvledger.sim.audit.report import MEANINGS, AuditReport, Books, Heading, SituationReport

COLUMNS = {
    "computed": "full",
    "stored": "stored",
    "promised": "hits",
    "loaded": "loaded",
    "wrong": "wrong",
    "wrong_outputs": "wrong\noutputs",
}
"""Field of the books → title; what each says is in ``docs/audit.md``."""


def audit_table(report: AuditReport) -> Table:
    """One row for each situation and one for their sum; fits into 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("situation", no_wrap=True)
    for title in (*COLUMNS.values(), "viola-\ntions", "leaks"):
        table.add_column(title, justify="right", no_wrap=True)
    for situation in report.situations:
        table.add_row(*_row(situation.name, situation.books, [situation]))
    table.add_section()
    table.add_row(*_row("all", report.total, report.situations), style="bold")
    return table


def print_report(console: Console, report: AuditReport) -> None:
    """Table, findings, verdict."""
    seconds = sum(situation.seconds for situation in report.situations)
    console.print(
        f"{escape(report.connector)}: blocks of {report.block_size} tokens, seed {report.seed}, "
        f"{seconds:.0f} s",
        highlight=False,
    )
    console.print(audit_table(report))
    for heading in Heading:
        _print_findings(console, report, heading)
    faulty = sum(bool(situation.faults) for situation in report.situations)
    verdict = "clean" if report.is_clean else "[bold red]not clean[/bold red]"
    count = len(report.situations)
    console.print(f"{verdict}: faults in {faulty} of {count} situations", highlight=False)


def _print_findings(console: Console, report: AuditReport, heading: Heading) -> None:
    """All findings of one kind; what is not stored is in the table already."""
    lines = [
        f"  {situation.name}: {finding.text}"
        + (f" ({finding.count} times)" if finding.count > 1 else "")
        for situation in report.situations
        for finding in situation.faults
        if finding.heading is heading
    ]
    if lines:
        console.print(f"[bold]{heading}[/bold]: {MEANINGS[heading]}", highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _row(name: str, books: Books, situations: Iterable[SituationReport]) -> list[str]:
    reports = list(situations)
    numbers = [getattr(books, column) for column in COLUMNS]
    numbers += [sum(s.violations for s in reports), sum(s.leaks for s in reports)]
    return [name, *(str(number) for number in numbers)]
