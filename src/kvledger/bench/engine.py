"""Real engines side by side: with the connector, without it, and a second one with it.

All have the same settings but for the connector itself, and whatever is compared was measured in
turns. What would void the comparison is checked: both engines compute with the same threads, cold
requests hit nothing, and hits are the predicted ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvledger.bench.engines import Engines, Plan, ask, forget, running_engines
from kvledger.bench.hook_times import HookTimes, read_hook_times
from kvledger.bench.machine import BenchError
from kvledger.bench.results import (
    Cold,
    ColdPair,
    EngineFigures,
    EngineSettings,
    Hits,
    Hooks,
    HookTime,
    Idle,
)
from kvledger.bench.server import idle_use
from kvledger.bench.statistics import median_of
from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import cached_model, random_prompt
from kvledger.lab.processes import cpu_seconds
from kvledger.lab.requests import Result

STORING_HOOKS = ("wait_for_save", "handle_preemptions")
"""Where blocks are copied to the arena."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one cold request took.

    Attributes:
        result: the engine's answer.
        cpu_seconds: of all processes of its engine and of the server, until the answer.
        hooks: of the timed engine, until it had come to rest.
        stored_before: bytes that the timed engine had stored in its life before.
    """

    result: Result
    cpu_seconds: float
    hooks: HookTimes
    stored_before: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What the cold pairs gave, one entry of each list a pair."""

    pairs: list[ColdPair] = field(default_factory=list)
    hooks: list[HookTimes] = field(default_factory=list)


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
    with running_engines(scratch, model, plan, announce) as engines:
        threads = engines.threads()
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
            step_tokens=plan.step_tokens,
            compute_threads=threads,
            server_memory=plan.memory,
        ),
        cold=cold_figures(samples.pairs),
        hooks=hook_figures(samples),
        hits=hits,
        idle=idle,
    )


# ---------------------------------------------------------------- requests


def _warm_up(engines: Engines, plan: Plan) -> None:
    """An engine's first requests are slower than all others: each gets one."""
    prompt = random_prompt(0, plan.prompt_tokens)
    for engine in (engines.plain, engines.cached):
        ask(engine, prompt, local=0, external=0)
        engines.wait_quiet()


def _cold_pairs(engines: Engines, plan: Plan, announce: Callable[[str], None]) -> Samples:
    """Pairs of fresh prompts; who is first changes from pair to pair, so drift cancels out."""
    samples = Samples()
    end = time.monotonic() + plan.pair_seconds
    while True:
        done = len(samples.pairs)
        if done >= plan.most_pairs or (done >= plan.pairs and time.monotonic() > end):
            return samples
        announce(f"cold request {done + 1}, with the connector and without")
        prompt = _cold_prompt(plan, done)
        turns = [engines.cached, engines.plain]
        costs = [_cold_request(engines, e, prompt) for e in (turns[::-1] if done % 2 else turns)]
        with_it, without = costs[::-1] if done % 2 else costs
        add_pair(samples, plan, engines.arena_bytes, with_it, without)


def _cold_prompt(plan: Plan, pair: int) -> list[int]:
    return random_prompt(1 + pair, plan.prompt_tokens)


def _cold_request(engines: Engines, engine: EngineProcess, prompt: Sequence[int]) -> Cost:
    engines.wait_quiet()
    pids = [*engine.pids().all(), engines.server.pid]
    hooks = read_hook_times(engines.times)
    before = sum(map(cpu_seconds, pids))
    result = ask(engine, prompt, local=0, external=0)
    used = sum(map(cpu_seconds, pids)) - before
    engines.wait_quiet()  # a request causes one more step after its last token
    since = read_hook_times(engines.times).since(hooks)
    return Cost(result, used, since, hooks.stored_bytes)


def add_pair(samples: Samples, plan: Plan, arena_bytes: int, with_it: Cost, without: Cost) -> None:
    """Take a pair in, if it did what it should.

    Raises:
        BenchError: the engine with the connector has not stored its prompt, or its output differs.
    """
    stored = with_it.hooks.stored_bytes
    if stored != plan.stored_bytes:
        raise BenchError(
            f"a cold request must store {plan.stored_bytes:,} bytes and has stored {stored:,}"
        )
    if with_it.result.token_ids != without.result.token_ids:
        raise BenchError("the outputs with and without the connector differ")
    samples.hooks.append(with_it.hooks)
    samples.pairs.append(
        ColdPair(
            with_seconds=with_it.result.ttft_seconds,
            without_seconds=without.result.ttft_seconds,
            with_cpu_seconds=with_it.cpu_seconds,
            without_cpu_seconds=without.cpu_seconds,
            hook_seconds=with_it.hooks.total_seconds,
            storing_seconds=sum(with_it.hooks.seconds[hook] for hook in STORING_HOOKS),
            first_pass=with_it.stored_before < arena_bytes,
        )
    )


def _hits(engines: Engines, plan: Plan, samples: Samples, announce: Callable[[str], None]) -> Hits:
    """The last cold prompt again and again, from the server and from the engine's own cache."""
    announce("hits, in the server and in the engine")
    prompt = _cold_prompt(plan, len(samples.pairs) - 1)
    hit = plan.hit_tokens
    external: list[float] = []
    local: list[float] = []
    engines.wait_quiet()
    before = read_hook_times(engines.times)
    for _ in range(plan.hit_rounds):
        forget(engines.cached)
        external.append(ask(engines.cached, prompt, local=0, external=hit).ttft_seconds)
        local.append(ask(engines.cached, prompt, local=hit, external=0).ttft_seconds)
    loaded = read_hook_times(engines.times).since(before).loaded_bytes // plan.hit_rounds
    engines.wait_quiet()
    second = ask(engines.second, prompt, local=0, external=hit)
    beyond = median_of(external).value - median_of(local).value
    return Hits(
        hit_tokens=hit,
        recompute_seconds=median_of([pair.without_seconds for pair in samples.pairs]),
        external_seconds=median_of(external),
        local_seconds=median_of(local),
        second_engine_seconds=second.ttft_seconds,
        loaded_bytes=loaded,
        realised=loaded / beyond if beyond > 0 else None,
    )


def _idle(engines: Engines, seconds: float) -> Idle:
    engines.wait_quiet()
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


def cold_figures(pairs: list[ColdPair]) -> Cold:
    """Medians of the pairs and of their ratios."""
    return Cold(
        ratio=median_of([pair.with_seconds / pair.without_seconds for pair in pairs]),
        cpu_ratio=median_of([pair.with_cpu_seconds / pair.without_cpu_seconds for pair in pairs]),
        with_seconds=median_of([pair.with_seconds for pair in pairs]),
        without_seconds=median_of([pair.without_seconds for pair in pairs]),
        with_cpu_seconds=median_of([pair.with_cpu_seconds for pair in pairs]),
        without_cpu_seconds=median_of([pair.without_cpu_seconds for pair in pairs]),
        pairs=pairs,
    )


def hook_figures(samples: Samples) -> Hooks:
    """Shares of each pair, and the hooks' times added up."""
    pairs = samples.pairs
    first = [pair.hook_seconds / pair.with_seconds for pair in pairs if pair.first_pass]
    later = [pair.hook_seconds / pair.with_seconds for pair in pairs if not pair.first_pass]
    totals = [
        HookTime(
            hook=hook,
            calls=sum(hooks.calls[hook] for hooks in samples.hooks),
            seconds=sum(hooks.seconds[hook] for hooks in samples.hooks),
        )
        for hook in samples.hooks[0].seconds
    ]
    return Hooks(
        first_pass_share=median_of(first) if first else None,
        later_share=median_of(later) if later else None,
        share_without_stores=median_of(
            [(pair.hook_seconds - pair.storing_seconds) / pair.with_seconds for pair in pairs]
        ),
        stored_bytes=sum(hooks.stored_bytes for hooks in samples.hooks),
        requests=len(pairs),
        hooks=sorted((t for t in totals if t.calls), key=lambda t: t.seconds, reverse=True),
    )
