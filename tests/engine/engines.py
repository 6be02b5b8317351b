"""Engines that start side by side, and what tests say about their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from predictions import BLOCK

from kvledger.client import Client
from kvledger.lab.engine import PATIENT, EngineProcess, connector_config
from kvledger.lab.models import ModelSpec
from kvledger.lab.requests import Result
from kvledger.lab.server import ServerProcess

ModelMaker = Callable[[ModelSpec], Path]
UNLIMITED = 8_192
"""Tokens in a step: more than any prompt here, so that a prompt is computed in one."""
STEP_TOKENS = 512
CACHED_ID = "cached"
"""Under which the session's engine with the connector reports its accounts."""
WITHOUT_CACHE: Mapping[str, object] = {"kvledger.load": False, "kvledger.store": False}
"""A request's own switches: what the answer is without a cache, from the same engine."""


def plain(model: Path, *, step_tokens: int = STEP_TOKENS) -> EngineProcess:
    """An engine without a connector and without a prefix cache: every run is a cold one."""
    return EngineProcess(
        model,
        block_size=BLOCK,
        max_num_batched_tokens=step_tokens,
        engine_args={"enable_prefix_caching": False},
    )


def cached(
    model: Path,
    server: ServerProcess,
    *,
    step_tokens: int = STEP_TOKENS,
    options: Mapping[str, object] | None = None,
    engine_id: str | None = None,
    **more: object,
) -> EngineProcess:
    """An engine with the connector; a busy machine turns no hit into a miss.

    Args:
        engine_id: the name under which its accounts are found.
        more: of EngineProcess.
    """
    connector = connector_config(
        server.socket_path, engine_id=engine_id, options={**PATIENT, **(options or {})}
    )
    return EngineProcess(
        model,
        block_size=BLOCK,
        max_num_batched_tokens=step_tokens,
        connector=connector,
        **more,
    )


@contextmanager
def running(*engines: EngineProcess) -> Iterator[tuple[EngineProcess, ...]]:
    """Engines that were started side by side: ready inside, gone after."""
    with ThreadPoolExecutor(len(engines)) as threads:
        try:
            list(threads.map(EngineProcess.wait_ready, engines))
            yield engines
        finally:
            list(threads.map(EngineProcess.close, engines))


def forget(engine: EngineProcess) -> None:
    """Drop the engine's own prefix cache, not what the server holds."""
    assert engine.reset_prefix_cache()


def ask(
    engine: EngineProcess,
    prompt: Sequence[int],
    *,
    max_tokens: int = 32,
    switches: Mapping[str, object] | None = None,
) -> Result:
    """One request, alone."""
    return engine.submit(prompt, max_tokens=max_tokens, kv_transfer_params=switches).result()


def hits(result: Result) -> tuple[int, int]:
    """Tokens from the engine's own prefix cache, and from the server."""
    return result.local_hit_tokens, result.external_hit_tokens


def latest_accounts(server: ServerProcess) -> str:
    """For the message of a failed assertion: what the last requests found, and why no more."""
    with Client(str(server.socket_path)) as client:
        accounts = client.explain()[:4]
    fields = ("tokens", "local_tokens", "external_tokens", "miss", "fates")
    return "latest accounts:\n" + "\n".join(str([a[f] for f in fields]) for a in accounts)
