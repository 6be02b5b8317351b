"""A report as tables on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvledger.bench.results import (
    CopyRates,
    EngineFigures,
    Hits,
    Hooks,
    LookupTime,
    Machine,
    Report,
    ServerFigures,
)
from kvledger.bench.statistics import Median
from kvledger.config import format_size

BUSY = 0.5
"""Load average per core, before the run, above which the times are not ours alone."""
SHOWN_HOOKS = 6


def report_tables(report: Report) -> RenderableType:
    """Everything in the report, for a screen of 80 columns or more."""
    parts: list[RenderableType] = []
    if report.engines is not None:
        parts += [
            _engine_table(report.engines),
            _hook_table(report.engines.hooks),
            _hit_table(report.engines.hits),
        ]
    if report.copies is not None:
        parts.append(_copy_table(report.copies))
    parts += [_lookup_table(report.lookups), _process_table(report), Text(_footer(report))]
    if is_busy(report.machine):
        load = report.machine.load_before
        sentence = f"The machine was busy (load {load:.1f}): take no conclusions from these times."
        parts.append(Text(sentence, style="bold yellow"))
    return Group(*_apart(parts))


def is_busy(machine: Machine) -> bool:
    """Whether other programs were running when the run began."""
    return machine.load_before > BUSY * machine.cores


def _apart(parts: Sequence[RenderableType]) -> Iterator[RenderableType]:
    for part in parts:
        yield ""
        yield part


# ---------------------------------------------------------------- tables


def _table(title: str, *headings: str) -> Table:
    """The first column is text, all others are numbers."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        min_width=len(title),
        title_justify="left",
        caption_justify="left",
    )
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _engine_table(figures: EngineFigures) -> Table:
    settings, cold = figures.settings, figures.cold
    size = format_size(settings.prompt_tokens * settings.kv_bytes_per_token)
    title = f"Cold requests of {settings.prompt_tokens:,} tokens, {size} of KV"
    table = _table(title, "", "TTFT", "CPU time")
    table.add_row(
        "without connector", _seconds(cold.without_seconds), _seconds(cold.without_cpu_seconds)
    )
    table.add_row("with connector", _seconds(cold.with_seconds), _seconds(cold.with_cpu_seconds))
    table.caption = (
        f"With ÷ without, {cold.ratio.samples} pairs. TTFT: {_ratio(cold.ratio)}. "
        f"CPU time: {_ratio(cold.cpu_ratio)}. "
        f"Compute threads of each: {settings.compute_threads}. The same tokens in every pair."
    )
    return table


def _hook_table(hooks: Hooks) -> Table:
    table = _table("Time inside the connector's hooks", "hook", "calls", "total", "per request")
    for hook in hooks.hooks[:SHOWN_HOOKS]:
        table.add_row(
            hook.hook,
            f"{hook.calls:,}",
            _time(hook.seconds),
            _time(hook.seconds / hooks.requests),
        )
    rest = sum(hook.seconds for hook in hooks.hooks[SHOWN_HOOKS:])
    table.add_row(
        "the others",
        f"{sum(hook.calls for hook in hooks.hooks[SHOWN_HOOKS:]):,}",
        _time(rest),
        _time(rest / hooks.requests),
    )
    shares = {
        "writing to the arena's memory for the first time": hooks.first_pass_share,
        "writing to it again": hooks.later_share,
        "without the hooks that copy": hooks.share_without_stores,
    }
    shown = "; ".join(f"{_percent(share)} {when}" for when, share in shares.items() if share)
    stored = format_size(hooks.stored_bytes)
    table.caption = f"Of the cold TTFT: {shown}. {stored} stored in {hooks.requests} requests."
    return table


def _hit_table(hits: Hits) -> Table:
    table = _table(f"Hits of {hits.hit_tokens:,} tokens", "", "TTFT", "recompute ÷ this")
    recompute = hits.recompute_seconds.value
    for name, median in (
        ("recompute", hits.recompute_seconds),
        ("in the server", hits.external_seconds),
        ("own prefix cache", hits.local_seconds),
    ):
        table.add_row(name, _seconds(median), f"{recompute / median.value:.1f}×")
    second = hits.second_engine_seconds
    table.add_row("second engine's first request", _time(second), f"{recompute / second:.1f}×")
    realised = "" if hits.realised is None else f", that is {_rate(hits.realised)}"
    beyond = hits.external_seconds.value - hits.local_seconds.value
    table.caption = f"Server − own: {_time(beyond)} for {format_size(hits.loaded_bytes)}{realised}."
    return table


def _copy_table(copies: Sequence[CopyRates]) -> Table:
    table = _table(
        "Copies between KV tensors and the arena, one thread",
        "rows",
        "plain copy\nGB/s",
        "store\nGB/s",
        "load\nGB/s",
        "store, new\nmapping",
        "load, new\nmapping",
    )
    for rates in copies:

        def share(rate: float, plain: float = rates.plain) -> str:
            return f"{rate / 1e9:.1f} ({rate / plain:.2f})"

        table.add_row(
            f"{rates.row_bytes >> 10} KiB × {rates.layers}",
            f"{rates.plain / 1e9:.1f}",
            share(rates.store),
            share(rates.load),
            share(rates.first_store),
            share(rates.first_load),
        )
    table.caption = "In brackets: the share of a plain copy's rate."
    return table


def _lookup_table(lookups: Sequence[LookupTime]) -> Table:
    table = _table("Look-ups, round trip", "names", "hit", "p50", "p99")
    for lookup in lookups:
        table.add_row(
            f"{lookup.names:,}",
            f"{lookup.hit_names:,}",
            _time(lookup.p50_seconds),
            _time(lookup.p99_seconds),
        )
    return table


def _process_table(report: Report) -> Table:
    table = _table("Processes", "", "")
    table.show_header = False
    server: ServerFigures = report.server
    start = server.start_seconds
    table.add_row("server: from its creation to ready", _seconds(start))
    table.add_row("server: memory beside the cache", format_size(server.resident_bytes))
    table.add_row("server: idle", _cores(server.idle_cores))
    if report.engines is not None:
        idle = report.engines.idle
        table.add_row("server: idle, two engines attached", _cores(idle.server_cores))
        table.add_row("engine: idle, with connector", _cores(idle.engine_with_cores))
        table.add_row("engine: idle, without", _cores(idle.engine_without_cores))
    return table


def _footer(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{machine.processor}, {machine.cores} cores, {format_size(machine.memory_bytes)}, "
        f"Linux {machine.kernel}; {versions}; load {machine.load_before:.1f} before and "
        f"{machine.load_after:.1f} after {report.seconds:.0f} s."
    )


# ---------------------------------------------------------------- numbers


def _unit(seconds: float) -> tuple[float, int, str]:
    """Seconds of the unit that suits a time, decimal places in it, and its name."""
    if abs(seconds) < 1e-3:
        return 1e-6, 0, "µs"
    return (1e-3, 1, "ms") if abs(seconds) < 1 else (1.0, 2, "s")


def _time(seconds: float) -> str:
    unit, places, name = _unit(seconds)
    return f"{seconds / unit:.{places}f} {name}"


def _seconds(median: Median) -> str:
    unit, places, name = _unit(median.value)
    value, low, high = (
        f"{time / unit:.{places}f}" for time in (median.value, median.low, median.high)
    )
    return f"{value} {name} ({low} … {high})"


def _ratio(median: Median) -> str:
    return (
        f"{median.value:.4f}, {median.low:.4f} … {median.high:.4f} ({median.coverage:.0%} interval)"
    )


def _percent(median: Median) -> str:
    return f"{median.value:.2%} ({median.low:.2%} … {median.high:.2%})"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def _cores(cores: float) -> str:
    return f"{cores:.3f} cores"
