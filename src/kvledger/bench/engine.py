"""Real engines side by side: with the connector, without it, and a second one with it.

All have the same settings but for the connector itself, and whatever is compared was measured in
turns. What would void the comparison is checked: both engines compute with the same threads, cold
requests hit nothing, and hits are the predicted ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvledger.bench.hook_times import DIRECTORY_KEY, HookTimes, read_hook_times
from kvledger.bench.lookup import wait_grown
from kvledger.bench.machine import BenchError, compute_threads
from kvledger.bench.results import Cold, EngineFigures, EngineSettings, Hits, Hooks, HookTime, Idle
from kvledger.bench.server import idle_use
from kvledger.bench.statistics import Median, median_of
from kvledger.lab.engine import PATIENT, EngineProcess, connector_config
from kvledger.lab.models import WIDEST, ModelSpec, cached_model, random_prompt
from kvledger.lab.processes import cpu_seconds
from kvledger.lab.requests import Result
from kvledger.lab.server import ServerProcess

STORING_HOOKS = ("wait_for_save", "handle_preemptions")
"""Where blocks are copied to the arena."""
SETTLED_SECONDS = 0.2
"""After its last token a request causes one more step; hooks are read when it is surely over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure.

    Attributes:
        spec: the model.
        prompt_tokens: of every request.
        pairs: cold pairs at least.
        most_pairs: cold pairs at most: more than ``pairs`` while there is time.
        pair_seconds: time for them.
        hit_rounds: external and local hits.
        idle_seconds: how long to watch idle processes.
        memory: of the server.
    """

    spec: ModelSpec = WIDEST
    prompt_tokens: int = 4_100
    block_tokens: int = 32
    pairs: int = 5
    most_pairs: int = 11
    pair_seconds: float = 120.0
    hit_rounds: int = 7
    idle_seconds: float = 10.0
    memory: str = "2GiB"

    @property
    def hit_tokens(self) -> int:
        """Tokens of whole blocks, which a repeated prompt finds in any cache."""
        return (self.prompt_tokens - 1) // self.block_tokens * self.block_tokens

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_tokens * self.spec.kv_bytes_per_token()


@dataclass(slots=True)
class Engines:
    """All that runs.

    Attributes:
        plain: without a connector.
        cached: with it, timed.
        second: with it, and without a request so far.
        times: directory of the times of ``cached``.
    """

    server: ServerProcess
    plain: EngineProcess
    cached: EngineProcess
    second: EngineProcess
    times: Path


@dataclass(slots=True)
class Samples:
    """What the cold pairs gave, one entry a pair."""

    with_seconds: list[float] = field(default_factory=list)
    without_seconds: list[float] = field(default_factory=list)
    with_cpu: list[float] = field(default_factory=list)
    without_cpu: list[float] = field(default_factory=list)
    hooks: list[HookTimes] = field(default_factory=list)
    identical: bool = True


def measure_engines(
    scratch: Path,
    cache: Path,
    plan: Plan,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> EngineFigures:
    """Measure everything that takes engines; they and their server are gone afterwards.

    Args:
        scratch: directory for sockets, logs and times.
        cache: where the model is kept.
        announce: told what is being measured.

    Raises:
        BenchError: the comparison would be void: other threads, or hits that must not be.
        EngineError, ServerError: a part did not start, or died.
    """
    announce("writing the model")
    model = cached_model(cache, plan.spec)
    with _running(scratch, model, plan, announce) as engines:
        threads = _same_threads(engines)
        announce("warming up")
        _warm_up(engines, plan)
        samples = _cold_pairs(engines, plan, announce)
        hits = _hits(engines, plan, samples, announce)
        announce("idle engines")
        idle = _idle(engines, plan.idle_seconds)
    return EngineFigures(
        settings=EngineSettings(
            model=f"random Llama, {plan.spec.layers} layers, {plan.spec.dtype}",
            kv_bytes_per_token=plan.spec.kv_bytes_per_token(),
            prompt_tokens=plan.prompt_tokens,
            block_tokens=plan.block_tokens,
            step_tokens=_step_tokens(plan),
            compute_threads=threads,
            server_memory=plan.memory,
        ),
        cold=_cold(samples),
        hooks=_hooks(samples),
        hits=hits,
        idle=idle,
    )


# ---------------------------------------------------------------- engines


def _step_tokens(plan: Plan) -> int:
    """A whole prompt fits in one step."""
    return 2 * plan.prompt_tokens


@contextmanager
def _running(
    scratch: Path, model: Path, plan: Plan, announce: Callable[[str], None]
) -> Iterator[Engines]:
    """Server and engines, ready. The engines start at once; nothing is measured before."""
    times = scratch / "times"
    times.mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(scratch / "engines.sock", memory=plan.memory))
        started: list[EngineProcess] = []
        for name, connector in {
            "plain": None,
            "cached": _timed(connector_config(server.socket_path, options=PATIENT), times),
            "second": connector_config(server.socket_path, options=PATIENT),
        }.items():
            started.append(_engine(scratch / f"{name}.log", model, plan, connector))
            stack.callback(started[-1].kill)
        announce("starting three vLLM engines")
        for engine in started:
            engine.wait_ready()
        wait_grown(server.socket_path)
        plain, cached, second = started
        yield Engines(server, plain, cached, second, times)
        announce("stopping the engines")
        with ThreadPoolExecutor(len(started)) as threads:
            list(threads.map(EngineProcess.close, started))


def _engine(
    log_path: Path, model: Path, plan: Plan, connector: dict[str, object] | None
) -> EngineProcess:
    return EngineProcess(
        model,
        connector=connector,
        dtype=plan.spec.dtype,
        block_size=plan.block_tokens,
        max_num_batched_tokens=_step_tokens(plan),
        max_model_len=2 * plan.prompt_tokens,
        # vLLM wants room for the longest sequence.
        kv_cache_bytes=2 * plan.prompt_bytes + (64 << 20),
        log_path=log_path,
    )


def _timed(config: dict[str, object], times: Path) -> dict[str, object]:
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    return {
        **config,
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "kvledger.bench.timed_connector",
        "kv_connector_extra_config": {**extra, DIRECTORY_KEY: str(times)},
    }


def _same_threads(engines: Engines) -> str:
    """The compute threads of both engines.

    Raises:
        BenchError: they differ.
    """
    found = [
        ", ".join(compute_threads(worker) for worker in engine.pids().workers)
        for engine in (engines.plain, engines.cached, engines.second)
    ]
    if len(set(found)) != 1:
        without, with_connector, second = found
        raise BenchError(
            f"the engine without a connector computes with the threads {without}, those with one "
            f"with {with_connector} and {second}: set VLLM_CPU_NUM_OF_RESERVED_CPU or "
            "VLLM_CPU_OMP_THREADS_BIND so that they are equal"
        )
    return found[0]


# ---------------------------------------------------------------- requests


def _ask(engine: EngineProcess, prompt: Sequence[int], *, local: int, external: int) -> Result:
    """One request for one token, whose hits must be the predicted ones."""
    result = engine.submit(prompt, max_tokens=1).result()
    hits = result.local_hit_tokens, result.external_hit_tokens
    if hits != (local, external):
        raise BenchError(
            f"a request must hit {local} tokens locally and {external} in the server, "
            f"and hit {hits[0]} and {hits[1]}"
        )
    return result


def _forget(engine: EngineProcess) -> None:
    if not engine.reset_prefix_cache():
        raise BenchError("the engine does not forget its prefix cache")


def _warm_up(engines: Engines, plan: Plan) -> None:
    """An engine's first requests are slower than all others: each gets one, and a local hit."""
    prompt = random_prompt(0, plan.prompt_tokens)
    for engine in (engines.plain, engines.cached):
        _ask(engine, prompt, local=0, external=0)
        _ask(engine, prompt, local=plan.hit_tokens, external=0)


def _cold_pairs(engines: Engines, plan: Plan, announce: Callable[[str], None]) -> Samples:
    """Pairs of fresh prompts; who is first changes from pair to pair, so drift cancels out."""
    samples = Samples()
    end = time.monotonic() + plan.pair_seconds
    while True:
        done = len(samples.with_seconds)
        if done >= plan.most_pairs or (done >= plan.pairs and time.monotonic() > end):
            return samples
        announce(f"cold request {done + 1}, with the connector and without")
        prompt = _cold_prompt(plan, done)
        first_without = done % 2
        tokens: list[tuple[int, ...]] = []
        for without in (first_without, 1 - first_without):
            ask = _cold_without if without else _cold_with
            tokens.append(ask(engines, prompt, samples))
        samples.identical = samples.identical and tokens[0] == tokens[1]


def _cold_prompt(plan: Plan, pair: int) -> list[int]:
    return random_prompt(1 + pair, plan.prompt_tokens)


def _cold_without(engines: Engines, prompt: Sequence[int], samples: Samples) -> tuple[int, ...]:
    pids = engines.plain.pids().all()
    before = sum(map(cpu_seconds, pids))
    result = _ask(engines.plain, prompt, local=0, external=0)
    samples.without_seconds.append(result.ttft_seconds)
    samples.without_cpu.append(sum(map(cpu_seconds, pids)) - before)
    return result.token_ids


def _cold_with(engines: Engines, prompt: Sequence[int], samples: Samples) -> tuple[int, ...]:
    pids = [*engines.cached.pids().all(), engines.server.pid]
    before = sum(map(cpu_seconds, pids))
    hooks = read_hook_times(engines.times)
    result = _ask(engines.cached, prompt, local=0, external=0)
    time.sleep(SETTLED_SECONDS)
    samples.with_seconds.append(result.ttft_seconds)
    samples.with_cpu.append(sum(map(cpu_seconds, pids)) - before)
    samples.hooks.append(read_hook_times(engines.times).since(hooks))
    return result.token_ids


def _hits(engines: Engines, plan: Plan, samples: Samples, announce: Callable[[str], None]) -> Hits:
    """The last cold prompt again and again, from the server and from the engine's own cache."""
    announce("hits, in the server and in the engine")
    prompt = _cold_prompt(plan, len(samples.with_seconds) - 1)
    hit = plan.hit_tokens
    external: list[float] = []
    local: list[float] = []
    before = read_hook_times(engines.times)
    for _ in range(plan.hit_rounds):
        _forget(engines.cached)
        external.append(_ask(engines.cached, prompt, local=0, external=hit).ttft_seconds)
        local.append(_ask(engines.cached, prompt, local=hit, external=0).ttft_seconds)
    loaded = read_hook_times(engines.times).since(before).loaded_bytes // plan.hit_rounds
    second = _ask(engines.second, prompt, local=0, external=hit)
    beyond = median_of(external).value - median_of(local).value
    return Hits(
        hit_tokens=hit,
        recompute_seconds=median_of(samples.without_seconds),
        external_seconds=median_of(external),
        local_seconds=median_of(local),
        second_engine_seconds=second.ttft_seconds,
        loaded_bytes=loaded,
        realised=loaded / beyond if beyond > 0 else None,
    )


def _idle(engines: Engines, seconds: float) -> Idle:
    groups = [
        list(engines.cached.pids().all()),
        list(engines.plain.pids().all()),
        [engines.server.pid],
    ]
    with_cores, without_cores, server_cores = idle_use(groups, seconds)
    return Idle(
        seconds=seconds,
        engine_with_cores=with_cores,
        engine_without_cores=without_cores,
        server_cores=server_cores,
    )


# ---------------------------------------------------------------- figures


def _cold(samples: Samples) -> Cold:
    pairs = zip(samples.with_seconds, samples.without_seconds, strict=True)
    return Cold(
        ratio=median_of([with_it / without for with_it, without in pairs]),
        with_seconds=median_of(samples.with_seconds),
        without_seconds=median_of(samples.without_seconds),
        with_cpu_seconds=median_of(samples.with_cpu),
        without_cpu_seconds=median_of(samples.without_cpu),
        identical=samples.identical,
    )


def _hooks(samples: Samples) -> Hooks:
    def share(left_out: Sequence[str]) -> Median:
        pairs = zip(samples.hooks, samples.with_seconds, strict=True)
        return median_of(
            [
                sum(time for hook, time in hooks.seconds.items() if hook not in left_out) / ttft
                for hooks, ttft in pairs
            ]
        )

    totals = [
        HookTime(
            hook=hook,
            calls=sum(hooks.calls[hook] for hooks in samples.hooks),
            seconds=sum(hooks.seconds[hook] for hooks in samples.hooks),
        )
        for hook in samples.hooks[0].seconds
    ]
    return Hooks(
        share=share(()),
        share_without_stores=share(STORING_HOOKS),
        stored_bytes=sum(hooks.stored_bytes for hooks in samples.hooks),
        requests=len(samples.hooks),
        hooks=sorted((t for t in totals if t.calls), key=lambda t: t.seconds, reverse=True),
    )
