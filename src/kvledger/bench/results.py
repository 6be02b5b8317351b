"""What the bench finds, as values: the same for the tables on the screen and for JSON.

Times are in seconds, sizes in bytes, rates in bytes per second, processor use in cores.
"""

from __future__ import annotations

import msgspec

from kvledger.bench.statistics import Median

SCHEMA = 1
"""Of the JSON document; raised when a field changes its meaning or goes."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all of them."""


class Machine(Result, frozen=True, kw_only=True):
    """Where the run took place.

    Attributes:
        load_before, load_after: load averages of one minute; above the number of cores, times
            are those of the other programs rather than ours.
        versions: of kvledger, Python and the packages that matter; absent where not installed.
    """

    processor: str
    cores: int
    memory_bytes: int
    kernel: str
    load_before: float
    load_after: float
    versions: dict[str, str]


class LookupTime(Result, frozen=True, kw_only=True):
    """Round trips of look-ups of one kind to a real server.

    Attributes:
        names: in one question.
        hit_names: leading ones that the server has.
    """

    names: int
    hit_names: int
    asked: int
    p50_seconds: float
    p99_seconds: float


class CopyRates(Result, frozen=True, kw_only=True):
    """Copies between KV tensors and the arena, beside a plain copy of as many bytes.

    Attributes:
        row_bytes: one block of one layer: what lies in one piece.
        copied_bytes: in one go.
        plain, store, load: best rate of all rounds.
        first_store, first_load: through a mapping of which this process has touched no page yet.
        first_plain: a plain copy into a mapping like that.
    """

    row_bytes: int
    layers: int
    copied_bytes: int
    rounds: int
    plain: float
    store: float
    load: float
    first_plain: float
    first_store: float
    first_load: float


class ServerFigures(Result, frozen=True, kw_only=True):
    """A server without engines.

    Attributes:
        start_seconds: from its creation as a process to its line that it is ready.
        resident_bytes: of its own memory (anonymous and of files); the cache is shared memory and
            is not in it.
        idle_cores: processor use with nothing to do.
    """

    start_seconds: Median
    resident_bytes: int
    idle_cores: float
    idle_seconds: float


class HookTime(Result, frozen=True, kw_only=True):
    """One hook of the connector, over all cold requests."""

    hook: str
    calls: int
    seconds: float


class ColdPair(Result, frozen=True, kw_only=True):
    """The same fresh prompt in an engine with the connector and in one without.

    Attributes:
        with_seconds, without_seconds: TTFT.
        with_cpu_seconds, without_cpu_seconds: processor time until the answer, of all processes
            of the engine and of the server.
        hook_seconds: in all hooks of the connector, also after the first token.
        storing_seconds: in those of them in which blocks are copied to the arena.
        first_pass: the engine wrote to memory of the arena that it had never touched before.
    """

    with_seconds: float
    without_seconds: float
    with_cpu_seconds: float
    without_cpu_seconds: float
    hook_seconds: float
    storing_seconds: float
    first_pass: bool


class Cold(Result, frozen=True, kw_only=True):
    """First requests for a prompt. Both engines gave the same tokens every time.

    Attributes:
        ratio: of the TTFT with the connector to the TTFT without, pair by pair.
        cpu_ratio: of the processor time, pair by pair: says something on a busy machine too.
        pairs: in the order in which they were run; who was first alternates.
    """

    ratio: Median
    cpu_ratio: Median
    with_seconds: Median
    without_seconds: Median
    with_cpu_seconds: Median
    without_cpu_seconds: Median
    pairs: list[ColdPair]


class Hooks(Result, frozen=True, kw_only=True):
    """Time inside the connector's hooks, scheduler's and workers' side together.

    Attributes:
        first_pass_share: of the TTFT of cold requests that wrote to the arena's memory for the
            first time in the engine's life; None if there were none.
        later_share: of those that did not; None if there were none.
        share_without_stores: of all, without the hooks in which blocks are copied to the arena.
        stored_bytes: copied to the arena by these requests.
        requests: cold requests that were timed.
        hooks: in order of their time, the longest first.
    """

    first_pass_share: Median | None
    later_share: Median | None
    share_without_stores: Median
    stored_bytes: int
    requests: int
    hooks: list[HookTime]


class Hits(Result, frozen=True, kw_only=True):
    """What a repeated prompt costs, by where its KV is found.

    Attributes:
        hit_tokens: tokens of the prompt that were not computed, in both kinds of hit.
        recompute_seconds: nowhere: an engine without the connector.
        external_seconds: in the server.
        local_seconds: in the engine's own prefix cache.
        second_engine_seconds: in the server, as the first request of an engine's life.
        loaded_bytes: by one external hit.
        realised: bytes per second: loaded bytes by the time that an external hit takes beyond a
            local one; None if it takes no longer.
    """

    hit_tokens: int
    recompute_seconds: Median
    external_seconds: Median
    local_seconds: Median
    second_engine_seconds: float
    loaded_bytes: int
    realised: float | None


class Idle(Result, frozen=True, kw_only=True):
    """Processor use, in cores, of engines and server with nothing to do, all at the same time."""

    seconds: float
    engine_with_cores: float
    engine_without_cores: float
    server_cores: float


class EngineSettings(Result, frozen=True, kw_only=True):
    """How the engines were set up, the same for all but the connector itself.

    Attributes:
        kv_bytes_per_token: of the model.
        compute_threads: OpenMP threads of each engine's worker, and where they are bound.
        server_memory: of the server; older prompts are evicted when it is full.
    """

    model: str
    kv_bytes_per_token: int
    prompt_tokens: int
    block_tokens: int
    step_tokens: int
    compute_threads: str
    server_memory: str


class EngineFigures(Result, frozen=True, kw_only=True):
    """All that takes real engines."""

    settings: EngineSettings
    cold: Cold
    hooks: Hooks
    hits: Hits
    idle: Idle


class Report(Result, frozen=True, kw_only=True):
    """One run of the bench; a section that was not run is None."""

    schema: int
    started: str
    seconds: float
    quick: bool
    machine: Machine
    server: ServerFigures
    lookups: list[LookupTime]
    copies: list[CopyRates] | None
    engines: EngineFigures | None


def to_json(report: Report) -> bytes:
    """The report as a JSON document, for people too."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2)
