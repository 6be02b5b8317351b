"""``python -m kvledger.sim CONNECTOR``: audit a KV connector. See ``docs/audit.md``.

Exit codes: 0 clean; 1 something was wrong, broke the protocol, or leaked; 2 wrong usage.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvledger.errors import ConfigurationError
from kvledger.sim.audit import BLOCK_SIZE, audit
from kvledger.sim.audit.situations import SITUATIONS, Situation
from kvledger.sim.audit.subject import Patience
from kvledger.sim.audit.tables import print_report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    connector: Annotated[
        str, typer.Argument(help="A name that vLLM knows, or module:Class.", show_default=False)
    ],
    extra_config: Annotated[
        str, typer.Option(help="The connector's options (kv_connector_extra_config), as JSON.")
    ] = "{}",
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the texts and random schedules.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = BLOCK_SIZE,
    situation: Annotated[
        list[str] | None, typer.Option(help="Play this situation; may be given several times.")
    ] = None,
    warmup_seconds: Annotated[
        float, typer.Option(help="For the connector to find its server.")
    ] = Patience().warmup_seconds,
    settle_seconds: Annotated[
        float, typer.Option(help="For stores that end after their request.")
    ] = Patience().settle_seconds,
    log: Annotated[Path | None, typer.Option(help="File for what the engines print.")] = None,
) -> None:
    """Audit a KV connector in simulated engines over vLLM's real scheduler."""
    try:
        options = msgspec.json.decode(extra_config, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(
            f"not a JSON object: {error}", param_hint="--extra-config"
        ) from None
    _check_exists(connector)
    console = Console()
    patience = Patience(warmup_seconds=warmup_seconds, settle_seconds=settle_seconds)
    started = 0
    with console.status("starting") as status:

        def show(playing: Situation) -> None:
            nonlocal started
            started += 1
            count = len(situation or SITUATIONS)
            status.update(f"{started}/{count} {playing.name}: {playing.purpose}")

        try:
            report = audit(
                connector,
                extra_config=options,
                seed=seed,
                block_size=block_size,
                situations=situation,
                patience=patience,
                log_path=log,
                on_start=show,
            )
        except ConfigurationError as error:
            raise typer.BadParameter(str(error), param_hint="--situation") from None
    print_report(console, report)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if not report.is_clean:
        raise typer.Exit(1)


def _check_exists(connector: str) -> None:
    """A mistyped name is no fault of the connector."""
    module, _, name = connector.rpartition(":")
    if not module:
        if name not in KVConnectorFactory._registry:
            known = ", ".join(sorted(KVConnectorFactory._registry))
            raise typer.BadParameter(
                f"vLLM knows no {name!r}; write module:Class, or one of {known}"
            )
        return
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise typer.BadParameter(f"{module!r} cannot be imported: {error}") from None
    if found is None:
        raise typer.BadParameter(f"{module!r} has no {name!r}")


if __name__ == "__main__":
    app(prog_name="python -m kvledger.sim")
