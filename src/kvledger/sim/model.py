"""What vLLM wants to know before it builds a Scheduler: a model directory and its configuration.

The model never runs. Its directory holds a small Llama configuration and one real safetensors
file, since a connector may derive the identity of the weights from the file's content: two
directories made for the same weights are byte for byte alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import save_file
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

from kvledger.sim.pattern import seed_of

VOCABULARY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a simulated engine is set up; the vLLM option of the same meaning is in brackets.

    Attributes:
        block_size: tokens in one block [block_size].
        num_blocks: blocks in the pool, the null block included [num_gpu_blocks_override].
        max_batched_tokens: token budget of one step [max_num_batched_tokens].
        max_requests: running requests at a time [max_num_seqs].
        max_model_len: longest sequence [max_model_len].
        layers: attention layers in each KV-cache group.
        heads: KV heads of one rank.
        ranks: tensor-parallel workers [tensor_parallel_size].
        layout: physical order of the KV tensors [VLLM_KV_CACHE_LAYOUT].
        windows: one entry for each KV-cache group: None for full attention, else the sliding
            window in tokens.
        drafts: draft tokens proposed for each decode step [num_speculative_tokens].
        draft_acceptance: probability that a proposed draft token is the right one.
        async_scheduling: schedule a step before the output of the last one is known.
        prefix_caching: whether vLLM keeps its own prefix cache [enable_prefix_caching].
        weights: name of the weights; other weights give other KV bytes and other tokens.
        pickle_metadata: send the connector's metadata through pickle and merge the workers'
            outputs with vLLM's aggregator, as an executor with worker processes does.
        policy: order of the waiting queue, "fcfs" or "priority" [scheduling_policy].
        model_runner: 1 or 2, the vLLM model runner whose call order is followed.
        hash_algorithm: of the block hashes [prefix_caching_hash_algo]. Its root is a global of
            vLLM: engines that live at the same time in one process have to agree on it.
    """

    block_size: int = 16
    num_blocks: int = 64
    max_batched_tokens: int = 256
    max_requests: int = 8
    max_model_len: int = 4096
    layers: int = 2
    heads: int = 2
    ranks: int = 1
    layout: str = "LBHNC"
    windows: tuple[int | None, ...] = (None,)
    drafts: int = 0
    draft_acceptance: float = 0.5
    async_scheduling: bool = False
    prefix_caching: bool = True
    weights: str = "base"
    pickle_metadata: bool = False
    policy: str = "fcfs"
    model_runner: int = 1
    hash_algorithm: str = "sha256"


class EngineFields(TypedDict, total=False):
    """The fields of :class:`EngineOptions` as keyword arguments; see there."""

    block_size: int
    num_blocks: int
    max_batched_tokens: int
    max_requests: int
    max_model_len: int
    layers: int
    heads: int
    ranks: int
    layout: str
    windows: tuple[int | None, ...]
    drafts: int
    draft_acceptance: float
    async_scheduling: bool
    prefix_caching: bool
    weights: str
    pickle_metadata: bool
    policy: str
    model_runner: int
    hash_algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """What a user writes into ``--kv-transfer-config``.

    Attributes:
        connector: the connector's class, "package.module:Class", or a name vLLM knows.
        extra_config: the connector's own options.
        role: "kv_both", "kv_producer" or "kv_consumer".
        engine_id: None lets vLLM draw one.
        load_failure_policy: "recompute" or "fail".
    """

    connector: type | str
    extra_config: dict[str, Any] = field(default_factory=dict)
    role: str = "kv_both"
    engine_id: str | None = None
    load_failure_policy: str = "recompute"

    def transfer_config(self) -> KVTransferConfig:
        """The vLLM object, built from the same fields as a user's JSON."""
        if isinstance(self.connector, type):
            name, module = self.connector.__name__, self.connector.__module__
        else:
            module, _, name = self.connector.rpartition(":")
        fields: dict[str, Any] = {
            "kv_connector": name,
            "kv_role": self.role,
            "kv_connector_extra_config": dict(self.extra_config),
            "kv_load_failure_policy": self.load_failure_policy,
        }
        if module:
            fields["kv_connector_module_path"] = module
        if self.engine_id is not None:
            fields["engine_id"] = self.engine_id
        return KVTransferConfig(**fields)


def write_model(directory: Path, weights: str) -> None:
    """Write ``config.json`` and ``model.safetensors``; the same bytes for the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    generator = torch.Generator().manual_seed(seed_of("weights", weights) >> 1)
    tensor = torch.rand((64, 64), generator=generator)
    save_file({"model.embed_tokens.weight": tensor}, directory / "model.safetensors")


def build_config(
    directory: Path, options: EngineOptions, connector: ConnectorOptions | None
) -> VllmConfig:
    """A VllmConfig as vLLM's own argument parser would build it, for the model in ``directory``.

    Asynchronous scheduling and several ranks are set after construction: the CPU platform would
    refuse the first, and would look for devices for the second. The layout is set where the
    engine core sets it, so that a connector finds it resolved.
    """
    model = ModelConfig(
        model=str(directory),
        dtype="float32",
        max_model_len=options.max_model_len,
        seed=0,
        skip_tokenizer_init=True,
    )
    cache = CacheConfig(
        block_size=options.block_size,
        enable_prefix_caching=options.prefix_caching,
        prefix_caching_hash_algo=options.hash_algorithm,
    )
    cache.num_gpu_blocks = options.num_blocks
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_requests,
        max_num_batched_tokens=options.max_batched_tokens,
        max_model_len=options.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        policy=options.policy,
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        kv_transfer_config=None if connector is None else connector.transfer_config(),
        device_config=DeviceConfig("cpu"),
    )
    if options.drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=options.drafts,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    config.cache_config.kv_cache_layout = options.layout
    config.scheduler_config.async_scheduling = options.async_scheduling
    config.parallel_config.tensor_parallel_size = options.ranks
    config.parallel_config.world_size = options.ranks
    return config
