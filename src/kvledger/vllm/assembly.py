"""Puts the two halves of the connector together from vLLM's configuration, and refuses at start
what this version cannot do right, each with a sentence."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvledger.client import Connection, Link
from kvledger.errors import ConfigurationError
from kvledger.naming import Descriptor
from kvledger.protocol import PROTOCOL_VERSION, Hello, Role
from kvledger.vllm.channel import SILENCE_SECONDS, Channel
from kvledger.vllm.identity import (
    WeightsEpochs,
    content_fields,
    hashing_fields,
    refusals,
    scheduler_fields,
)
from kvledger.vllm.identity_feed import IdentityFeed
from kvledger.vllm.layouts import check_groups, inspect_engine_memory
from kvledger.vllm.options import Options, check_chunk_tokens, parse_options
from kvledger.vllm.policy import RequestPolicy
from kvledger.vllm.scheduler_side import SchedulerSide
from kvledger.vllm.transfer import DeviceTransfer, HostTransfer, Transfer
from kvledger.vllm.weights import process_started
from kvledger.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kvledger")


@dataclass(frozen=True, slots=True)
class Setup:
    """What both halves need to know.

    Attributes:
        vllm_config: the engine's configuration.
        kv_cache_config: its KV-cache groups and blocks.
        options: the operator's options.
        block_tokens: the scheduler's block size.
        chunk_tokens: tokens of one chunk.
        epochs: the weights' epochs; a reset of the cache begins a new one.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    options: Options
    block_tokens: int
    chunk_tokens: int
    epochs: WeightsEpochs

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens


def prepare(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> Setup:
    """Read and check everything that can be known at construction.

    Raises:
        ConfigurationError: an option or an engine setting that cannot be right.
        UnsupportedLayoutError: KV-cache groups that this version cannot move.
    """
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None or kv_cache_config is None:
        raise ConfigurationError(
            "this vLLM gives the connector no kv_cache_config; kvledger needs vLLM 0.32"
        )
    _share_vllm_logging()
    options = parse_options(transfer_config.kv_connector_extra_config)
    problems = refusals(vllm_config)
    if problems:
        raise ConfigurationError("kvledger cannot run with this engine: " + "; ".join(problems))
    check_groups(kv_cache_config)
    block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    if transfer_config.kv_load_failure_policy != "recompute" and not options.keep_failure_policy:
        transfer_config.kv_load_failure_policy = "recompute"
        logger.info(
            'kvledger: kv_load_failure_policy is "recompute" for this engine: a failed load is '
            "computed, not an error (kvledger.keep_failure_policy leaves it alone)"
        )
    return Setup(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        options=options,
        block_tokens=block_tokens,
        chunk_tokens=check_chunk_tokens(options, block_tokens),
        epochs=WeightsEpochs(options.weights_version),
    )


def make_scheduler_side(setup: Setup) -> SchedulerSide:
    """The scheduler's half, connecting in the background."""
    options, config = setup.options, setup.vllm_config
    role = config.kv_transfer_config
    assert role is not None
    identity = IdentityFeed(
        slow_fields=lambda: _engine_fields(setup),
        hashing_fields=lambda: hashing_fields(config),
        epoch_fields=lambda: {"weights.epoch": setup.epochs.current},
    )
    link = Link(
        options.socket,
        lambda: _hello(config, Role.SCHEDULER, rank=0),
        on_connected=identity.on_link_connected,
    )
    return SchedulerSide(
        make_channel=lambda listener: Channel(
            link,
            listener,
            # Whoever is ready to wait longer for a look-up does not call the server silent before.
            silence_seconds=max(SILENCE_SECONDS, options.lookup_deadline_ms / 1e3),
        ),
        identity=identity,
        policy=RequestPolicy(
            options,
            may_store=role.is_kv_producer,
            may_load=role.is_kv_consumer,
            block_tokens=setup.block_tokens,
            chunk_tokens=setup.chunk_tokens,
            drafts=config.speculative_config is not None,
        ),
        chunk_tokens=setup.chunk_tokens,
        blocks_per_chunk=setup.blocks_per_chunk,
        lookup_deadline_seconds=options.lookup_deadline_ms / 1e3,
        load_deadline_seconds=options.load_deadline_ms / 1e3,
    )


def make_worker_side(setup: Setup, kv_caches: dict[str, torch.Tensor]) -> WorkerSide:
    """A rank's half, attaching in the background.

    Raises:
        UnsupportedLayoutError: KV tensors that this version cannot move.
    """
    config = setup.vllm_config
    memory = inspect_engine_memory(kv_caches, setup.kv_cache_config)
    fields = memory.describe()
    fields["worker.attention_backend"] = _attention_backends(config, kv_caches)

    def make_transfer(connection: Connection) -> Transfer:
        arena = np.frombuffer(connection.map_arena(), dtype=np.uint8)
        if memory.device.type == "cpu":
            return HostTransfer(memory, arena)
        return DeviceTransfer(memory, arena)

    worker = WorkerSide(
        make_transfer=make_transfer,
        fields=fields,
        part_bytes=[group.part_bytes(setup.blocks_per_chunk) for group in memory.groups],
        blocks_per_chunk=setup.blocks_per_chunk,
    )
    link = Link(
        setup.options.socket,
        lambda: _hello(config, Role.WORKER, rank=config.parallel_config.rank),
        on_connected=worker.on_link_connected,
        announce=False,  # the scheduler's side does, once for the engine
    )
    worker.attach(Channel(link, worker))
    return worker


def _share_vllm_logging() -> None:
    """Show our messages where and as vLLM shows its own, unless the application has decided."""
    ours, theirs = logging.getLogger("kvledger"), logging.getLogger("vllm")
    if not ours.hasHandlers() and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)


def _engine_fields(setup: Setup) -> Descriptor:
    """All that the scheduler's side knows, but the hashing root. Reads the weights."""
    options = setup.options
    return {
        **content_fields(
            setup.vllm_config,
            model_revision=options.model_revision,
            unchanged_since=process_started(),
        ),
        **scheduler_fields(
            setup.vllm_config,
            namespace=options.namespace,
            model_revision=options.model_revision,
            weights_version=options.weights_version,
        ),
        "cache.chunk_tokens": str(setup.chunk_tokens),
    }


def _attention_backends(config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> str:
    """Names of the backends that read and write these tensors: they order K and V."""
    layers = config.compilation_config.static_forward_context
    names = {
        layer.get_attn_backend().get_name()
        for name in kv_caches
        if (layer := layers.get(name)) is not None
    }
    return ", ".join(sorted(names)) or f"configured: {config.attention_config.backend}"


def _hello(config: VllmConfig, role: Role, rank: int) -> Hello:
    transfer_config = config.kv_transfer_config
    assert transfer_config is not None
    assert transfer_config.engine_id is not None
    return Hello(
        id=1,
        protocol=PROTOCOL_VERSION,
        engine=transfer_config.engine_id,
        role=role,
        rank=rank,
        world_size=config.parallel_config.world_size,
        label=f"{config.model_config.model} on {socket.gethostname()}, pid {os.getpid()}",
    )
