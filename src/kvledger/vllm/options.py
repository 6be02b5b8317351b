"""The connector's options: ``kv_connector_extra_config`` keys that begin with ``kvledger.``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from kvledger.config import default_socket_path
from kvledger.errors import ConfigurationError

PREFIX = "kvledger."
StoreMode = Literal["all", "prompt", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an operator can set for one engine. Field names are the keys without the prefix.

    Attributes:
        socket: path of the server's socket.
        namespace: operator's own namespace; engines with different ones never share.
        model_revision: stands for the weights where they cannot be read.
        weights_version: engines that were updated to the same weights may share under it.
        chunk_tokens: unit of storage; None is the engine's block size.
        min_hit_tokens: shortest external hit that is loaded; None loads every chunk, except a
            single block behind a local hit (vLLM reports one block less than it holds).
        lookup_deadline_ms: after this a look-up is a miss.
        load_deadline_ms: after this a load has failed and the prompt is computed.
        store: what to store: all, only the prompt, or nothing.
        load: whether to load.
        keep_failure_policy: leave vLLM's ``kv_load_failure_policy`` as it is.
    """

    socket: str
    namespace: str = ""
    model_revision: str | None = None
    weights_version: str | None = None
    chunk_tokens: int | None = None
    min_hit_tokens: int | None = None
    lookup_deadline_ms: float = 50.0
    load_deadline_ms: float = 5000.0
    store: StoreMode = "all"
    load: bool = True
    keep_failure_policy: bool = False


_KINDS: dict[str, tuple[type, ...]] = {
    "socket": (str,),
    "namespace": (str,),
    "model_revision": (str,),
    "weights_version": (str,),
    "chunk_tokens": (int,),
    "min_hit_tokens": (int,),
    "lookup_deadline_ms": (int, float),
    "load_deadline_ms": (int, float),
    "store": (str,),
    "load": (bool,),
    "keep_failure_policy": (bool,),
}


def parse_options(extra_config: Mapping[str, object]) -> Options:
    """Options from vLLM's extra config. Keys of others (without the prefix) are left alone.

    Raises:
        ConfigurationError: an unknown key (the nearest right one is named) or a bad value.
    """
    known = [field.name for field in fields(Options)]
    values: dict[str, object] = {}
    for key, value in extra_config.items():
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX):
            if key.lower().replace("-", "_") in known or key.lower().startswith("kvledger"):
                raise _unknown(key, known)
            continue
        if name not in known:
            raise _unknown(key, known)
        values[name] = _checked(key, name, value)
    values.setdefault("socket", str(default_socket_path()))
    return Options(**values)  # type: ignore[arg-type]  # each value was checked against _KINDS


def _unknown(key: str, known: list[str]) -> ConfigurationError:
    nearest = difflib.get_close_matches(key.removeprefix(PREFIX).lower(), known, n=1, cutoff=0.0)
    return ConfigurationError(
        f"kv_connector_extra_config has the unknown key {key!r}; did you mean "
        f'"{PREFIX}{nearest[0]}"? Known keys: {", ".join(PREFIX + name for name in known)}'
    )


def _checked(key: str, name: str, value: object) -> object:
    kinds = _KINDS[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigurationError(f"{key} takes a value of type {wanted}, found {value!r}")
    if name == "store" and value not in ("all", "prompt", "none"):
        raise ConfigurationError(f'{key} is "all", "prompt" or "none", found {value!r}')
    if isinstance(value, int | float) and not isinstance(value, bool):
        minimum = 0 if name == "min_hit_tokens" else 1
        if not minimum <= value < float("inf"):
            raise ConfigurationError(f"{key} is at least {minimum}, found {value!r}")
    return value


def check_chunk_tokens(options: Options, block_tokens: int) -> int:
    """Tokens of one chunk, given the scheduler's block size.

    Raises:
        ConfigurationError: not a multiple of the block size.
    """
    chunk_tokens = options.chunk_tokens or block_tokens
    if chunk_tokens % block_tokens:
        below = max(block_tokens, chunk_tokens - chunk_tokens % block_tokens)
        raise ConfigurationError(
            f"kvledger.chunk_tokens must be a multiple of the engine's block size "
            f"{block_tokens}, found {chunk_tokens}; {below} would do"
        )
    return chunk_tokens
