"""The command line. Commands import what they need when they run, so that each starts fast.

Exit codes: 0 done; 1 no server, or it refused; 2 wrong usage or an option that cannot be right.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvledger import __version__
from kvledger.errors import ConfigurationError, KVLedgerError

app = typer.Typer(
    help="A KV-cache server for vLLM engines whose books always balance.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SocketOption = Annotated[
    str | None,
    typer.Option("--socket", help="The server's Unix socket.", show_default="the default place"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the document as JSON.")]


def main() -> None:
    """Entry point of the ``kvledger`` command."""
    try:
        app(prog_name="kvledger")
    except ConfigurationError as error:
        _fail(error, 2)
    except KVLedgerError as error:
        _fail(error, 1)


def _fail(error: KVLedgerError, code: int) -> NoReturn:
    from kvledger.cli.terminal import printable

    print(f"kvledger: {printable(str(error))}", file=sys.stderr)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvledger {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """A KV-cache server for vLLM engines whose books always balance."""


@app.command()
def serve(
    memory: Annotated[
        str | None,
        typer.Option(help="Memory to use in all, such as 8GiB. Required.", show_default=False),
    ] = None,
    socket: SocketOption = None,
    http: Annotated[
        str | None,
        typer.Option(help="host:port for HTTP, or off.", show_default="127.0.0.1:9470"),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="Unix group whose members may connect too.", show_default=False),
    ] = None,
    namespace_floor: Annotated[
        float | None,
        typer.Option(
            help="Share of the memory that no other model may push a model below.",
            show_default="1/16",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="TOML file with these options; flags win.", show_default=False),
    ] = None,
) -> None:
    """Run the server until it gets SIGTERM or SIGINT."""
    from kvledger.cli.serve import run_serve

    run_serve(
        memory=memory,
        socket=socket,
        http=http,
        group=group,
        namespace_floor=namespace_floor,
        config_path=config,
    )


@app.command()
def status(socket: SocketOption = None, json: JsonOption = False) -> None:
    """Show what the server holds, for whom, and why not more."""
    from kvledger.cli.status import run_status

    run_status(socket, as_json=json)


@app.command()
def clear(
    namespace: Annotated[
        str, typer.Option(help="Id of one namespace.", show_default="all namespaces")
    ] = "",
    socket: SocketOption = None,
) -> None:
    """Drop the objects that no engine is using."""
    from kvledger.client import Client

    with Client(socket) as client:
        known = [entry["id"] for entry in client.status()["namespaces"]]
        if namespace and namespace not in known:
            raise ConfigurationError(
                f"--namespace: the server has no namespace {namespace!r}; "
                "`kvledger status --json` lists them"
            )
        typer.echo(f"{client.clear(namespace)} objects dropped")


@app.command()
def explain(
    request: Annotated[
        str, typer.Argument(help="How the request's id begins.", show_default="all that are kept")
    ] = "",
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the closed accounts of requests: what became of each chunk, and why."""
    from kvledger.cli.explain import run_explain

    run_explain(socket, request, as_json=json)


@app.command()
def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the model is kept.", show_default="~/.cache/kvledger"),
    ] = None,
) -> None:
    """Start a server and two real vLLM engines on the CPU, and show what the cache gives."""
    from kvledger.cli.demo import run_demo

    run_demo(directory)


@app.command()
def bench(
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results to this file too.", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="No engines: server, look-ups and copies only.")
    ] = False,
) -> None:
    """Measure what kvledger costs and what it gives, side by side on this machine."""
    from kvledger.bench.run import run_bench

    run_bench(json, quick=quick)
