"""What an engine's child process and the process that drives it say to each other.

One JSON document a line, over a socket pair of their own: vLLM writes what it likes to stdout.
"""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message to the child: keyword arguments of vLLM's AsyncEngineArgs."""

    engine_args: dict[str, object]


class Generate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One prompt; answered by FirstToken and then by Finished, or by Failed."""

    id: int
    prompt: list[int]
    sampling: dict[str, object]
    cache_salt: str | None = None
    lora: tuple[str, int, str] | None = None
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Abort the request of the Generate with id ``target``; answered by Done."""

    id: int
    target: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Forget the engine's own prefix cache; answered by Done."""

    id: int
    reset_running: bool = False
    reset_connector: bool = False


class ReadMetrics(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answered by Metrics."""

    id: int


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message of the child: the engine is up."""

    vllm_version: str


class FirstToken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request has its first token."""

    id: int


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request has ended; see :class:`kvledger.lab.engine.Result` for the fields."""

    id: int
    token_ids: list[int]
    local_hit_tokens: int
    external_hit_tokens: int
    ttft_seconds: float
    total_seconds: float
    finish_reason: str
    kv_transfer_params: dict[str, object] | None


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Carried out; ``value`` is the engine's own answer."""

    id: int
    value: bool


class Metrics(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Samples of the engine's metrics: ``name{label="value"}`` to value."""

    id: int
    samples: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The message could not be carried out; ``error`` is the exception with its type."""

    id: int
    error: str


Numbered = Generate | Abort | ResetPrefixCache | ReadMetrics
Command = Start | Numbered
Report = Ready | FirstToken | Finished | Done | Metrics | Failed


def request_id(command_id: int) -> str:
    """The id under which vLLM knows a request; it appends a dash and eight random digits."""
    return f"lab-{command_id}"


encode = msgspec.json.Encoder().encode_lines
commands = msgspec.json.Decoder(Command)
reports = msgspec.json.Decoder(Report)
