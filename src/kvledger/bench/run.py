"""``kvledger bench``: all sections in order, then the tables."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from kvledger.bench.copies import copies_can_be_measured, measure_copies
from kvledger.bench.engine import measure_engines
from kvledger.bench.engines import Plan
from kvledger.bench.lookup import measure_lookups
from kvledger.bench.machine import describe_machine, load_average
from kvledger.bench.report import report_tables
from kvledger.bench.results import SCHEMA, Report, to_json
from kvledger.bench.server import measure_server
from kvledger.errors import ConfigurationError

Announce = Callable[[str], None]


def run_bench(json_path: Path | None = None, *, quick: bool = False) -> None:
    """Measure, show the tables, and write the JSON document if a path is given.

    Args:
        quick: no engines and fewer rounds: for a look at the server and the copies.

    Raises:
        ConfigurationError: vLLM is missing, or the JSON file cannot be written.
        BenchError: what was measured is not what was to be measured.
        EngineError, ServerError: a part did not start, or died.
    """
    if not quick and not copies_can_be_measured():
        raise ConfigurationError(
            "the bench runs real engines and needs vLLM in this environment: run `make bench`, "
            "or try --quick"
        )
    if json_path is not None:
        _check_writable(json_path)
    # vLLM's warnings, here and in the engines, would be all that one sees.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    console = Console()
    with _progress(console) as announce:
        report = measure(announce, quick=quick)
    console.print(report_tables(report))
    if json_path is not None:
        json_path.write_bytes(to_json(report) + b"\n")
        console.print(f"\nwritten to {json_path}", style="dim")


def measure(announce: Announce, *, quick: bool) -> Report:
    """All sections, one after the other: none disturbs another.

    Raises:
        BenchError, EngineError, ServerError: see :func:`run_bench`.
    """
    started, start = datetime.now(UTC), time.monotonic()
    load_before = load_average()
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as directory:
        scratch = Path(directory)
        server = measure_server(
            scratch, starts=5 if quick else 9, idle_seconds=5 if quick else 10, announce=announce
        )
        lookups = measure_lookups(scratch, asks=200 if quick else 1000, announce=announce)
        copies = None
        if copies_can_be_measured():
            copies = measure_copies(rounds=3 if quick else 9, announce=announce)
        engines = None
        if not quick:
            engines = measure_engines(scratch, _cache_directory(), Plan(), announce=announce)
    return Report(
        schema=SCHEMA,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - start,
        quick=quick,
        machine=describe_machine(load_before),
        server=server,
        lookups=lookups,
        copies=copies,
        engines=engines,
    )


@contextmanager
def _progress(console: Console) -> Iterator[Announce]:
    """Says what is being measured: in one moving line on a terminal, as lines elsewhere."""
    start = time.monotonic()
    with console.status("starting") as status:

        def announce(what: str) -> None:
            seconds = time.monotonic() - start
            if console.is_terminal:
                status.update(f"{what} ({seconds:.0f} s so far)")
            else:
                console.print(f"{seconds:4.0f} s  {what}", style="dim")

        yield announce


def _check_writable(path: Path) -> None:
    """Complain now rather than after minutes."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigurationError(
            f"--json {path} cannot be written ({error.strerror}); give another path"
        ) from error


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvledger"
