"""What the bench shows of its results: tables of 80 columns, and one JSON document."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from kvledger.bench.report import report_tables
from kvledger.bench.results import (
    SCHEMA,
    Cold,
    ColdPair,
    CopyRates,
    EngineFigures,
    EngineSettings,
    Hits,
    Hooks,
    HookTime,
    Idle,
    LookupTime,
    Machine,
    Report,
    ServerFigures,
    to_json,
)
from kvledger.bench.statistics import Median


def exactly(value: float) -> Median:
    return Median(value=value, low=value * 0.9, high=value * 1.1, coverage=0.97, samples=6)


def server_figures() -> ServerFigures:
    return ServerFigures(
        start_seconds=exactly(0.3), resident_bytes=40 << 20, idle_cores=0.001, idle_seconds=10.0
    )


def engine_figures() -> EngineFigures:
    return EngineFigures(
        settings=EngineSettings(
            model="random",
            kv_bytes_per_token=128 << 10,
            prompt_tokens=4_100,
            block_tokens=32,
            step_tokens=8_200,
            compute_threads="1 on {1}",
            server_memory="2GiB",
        ),
        cold=Cold(
            ratio=exactly(1.0123),
            cpu_ratio=exactly(1.0456),
            with_seconds=exactly(10.123),
            without_seconds=exactly(10.0),
            with_cpu_seconds=exactly(11.0),
            without_cpu_seconds=exactly(10.5),
            pairs=[
                ColdPair(
                    with_seconds=10.123,
                    without_seconds=10.0,
                    with_cpu_seconds=11.0,
                    without_cpu_seconds=10.5,
                    hook_seconds=0.1,
                    storing_seconds=0.09,
                    first_pass=True,
                )
            ],
        ),
        hooks=Hooks(
            first_pass_share=exactly(0.0321),
            later_share=exactly(0.0087),
            share_without_stores=exactly(0.0002),
            stored_bytes=6 << 29,
            requests=6,
            hooks=[
                HookTime(hook="wait_for_save", calls=12, seconds=0.6),
                HookTime(hook="build_connector_meta", calls=12, seconds=0.012),
            ],
        ),
        hits=Hits(
            hit_tokens=4_096,
            recompute_seconds=exactly(10.0),
            external_seconds=exactly(0.2),
            local_seconds=exactly(0.1),
            second_engine_seconds=0.25,
            loaded_bytes=1 << 29,
            realised=5.4e9,
        ),
        idle=Idle(
            seconds=10.0, engine_with_cores=0.02, engine_without_cores=0.01, server_cores=0.0
        ),
    )


def a_report(*, load: float = 0.1, engines: EngineFigures | None = None) -> Report:
    return Report(
        schema=SCHEMA,
        started="2026-01-01T00:00:00+00:00",
        seconds=200.0,
        quick=engines is None,
        machine=Machine(
            processor="a processor",
            cores=2,
            memory_bytes=24 << 30,
            kernel="6.1",
            load_before=load,
            load_after=load + 1,
            versions={"python": "3.11.7"},
        ),
        server=server_figures(),
        lookups=[
            LookupTime(
                names=2048, hit_names=1024, asked=1000, p50_seconds=83e-6, p99_seconds=1.7e-3
            )
        ],
        copies=[
            CopyRates(
                row_bytes=32 << 10,
                layers=32,
                copied_bytes=256 << 20,
                rounds=9,
                plain=10e9,
                store=9.5e9,
                load=8e9,
                first_plain=2e9,
                first_store=1.5e9,
                first_load=3.4e9,
            )
        ],
        engines=engines,
    )


def screen(report: Report, width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(report_tables(report))
    return out.getvalue()


def words(report: Report) -> str:
    """What the screen shows, wherever its lines end."""
    return " ".join(screen(report).split())


def test_the_tables_show_the_ratios() -> None:
    shown = words(a_report(engines=engine_figures()))
    for expected in (
        "6 pairs. TTFT: 1.0123, 0.9111 … 1.1135 (97% interval)",
        "CPU time: 1.0456",
        "3.21% (2.89% … 3.53%) writing to the arena's memory for the first time",
        "0.87% (0.78% … 0.96%) writing to it again",
        "50.0×",  # an external hit beside recompute
        "100.0×",  # a local one
        "40.0×",  # the second engine's first request
        "100.0 ms for 512 MiB, that is 5.4 GB/s",
        "9.5 (0.95)",
        "83 µs",
        "1.7 ms",
        "1,024",
        "40 MiB",
    ):
        assert expected in shown, shown


def test_the_tables_fit_into_80_columns() -> None:
    narrow, wide = (screen(a_report(engines=engine_figures()), width) for width in (80, 200))
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted(narrow.split()) == sorted(wide.split()), "something was cut off"


@pytest.mark.parametrize(("load", "busy"), [(0.9, False), (1.1, True)])
def test_a_busy_machine_is_told(load: float, busy: bool) -> None:
    assert ("take no conclusions" in words(a_report(load=load))) is busy


def test_a_quick_report_has_no_engines() -> None:
    shown = screen(a_report())
    assert "Look-ups" in shown
    assert "hooks" not in shown


@pytest.mark.parametrize("make", [a_report, lambda: a_report(engines=engine_figures())])
def test_the_document_is_the_report(make: Callable[[], Report]) -> None:
    report = make()
    document = to_json(report)
    assert msgspec.json.decode(document, type=Report) == report
    fields = json.loads(document)
    assert list(fields) == [
        "schema",
        "started",
        "seconds",
        "quick",
        "machine",
        "server",
        "lookups",
        "copies",
        "engines",
    ]
    assert fields["schema"] == 1
    assert fields["lookups"][0]["p50_seconds"] == 83e-6
    assert fields["machine"]["load_before"] == 0.1
    if fields["engines"] is not None:
        assert fields["engines"]["cold"]["ratio"]["value"] == 1.0123
        assert fields["engines"]["cold"]["pairs"][0]["first_pass"] is True
        assert fields["engines"]["hits"]["realised"] == 5.4e9


def test_a_document_without_a_field_is_refused() -> None:
    fields = json.loads(to_json(a_report()))
    del fields["server"]["idle_cores"]
    with pytest.raises(msgspec.ValidationError, match="idle_cores"):
        msgspec.convert(fields, type=Report)
