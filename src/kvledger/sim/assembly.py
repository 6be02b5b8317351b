"""Puts the parts of a simulated engine together, in the order of vLLM's start."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from kvledger.sim.forward import FakeModelRunner
from kvledger.sim.memory import RankMemory, build_cache_config
from kvledger.sim.model import EngineOptions
from kvledger.sim.oracle import Oracle
from kvledger.sim.pattern import Pattern, PatternShape, Prefix
from kvledger.sim.requests import BlockHasher, make_hasher
from kvledger.sim.worker import Rank, WorkerGroup


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine consists of.

    Attributes:
        scheduler: vLLM's, with the scheduler-side connector inside.
        workers: all ranks, their connectors and memories.
        pattern: the bytes their KV has to hold.
        oracle: compares the two.
        hasher: vLLM's block hasher, for new requests.
    """

    scheduler: Any
    workers: WorkerGroup
    pattern: Pattern
    oracle: Oracle
    hasher: BlockHasher


def assemble(
    config: VllmConfig,
    options: EngineOptions,
    prefix_of: Callable[[str], Prefix],
    rng: random.Random,
) -> Parts:
    """Workers and their KV tensors first, then the scheduler, the handshake, the root hash.

    Args:
        prefix_of: where the model runner finds the prefix of a request it hears of.
        rng: decides which drafts are right.
    """
    cache_config = build_cache_config(options)
    memories = [RankMemory(cache_config, options) for _ in range(options.ranks)]
    shape = PatternShape(
        ranks=options.ranks,
        groups=len(options.windows),
        layers=options.layers,
        lanes=options.heads,
        max_tokens=options.max_model_len + 2 * (options.drafts + 1) + options.block_size,
    )
    pattern = Pattern(shape)
    runner = FakeModelRunner(options, pattern, memories, prefix_of, rng)
    ranks = [Rank(config, cache_config, index, memory) for index, memory in enumerate(memories)]
    workers = WorkerGroup(ranks, runner, options)
    scheduler_class = AsyncScheduler if options.async_scheduling else Scheduler
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=options.block_size,
        hash_block_size=options.block_size,
    )
    scheduler.use_v2_model_runner = options.model_runner == 2
    if scheduler.connector is not None:
        workers.connect(scheduler.connector)
    hasher = make_hasher(config.cache_config.prefix_caching_hash_algo, options.block_size)
    return Parts(scheduler, workers, pattern, Oracle(options, pattern, memories), hasher)
