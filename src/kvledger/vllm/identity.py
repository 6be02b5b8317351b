"""The scheduler's part of the namespace: everything but the tensors that decides a block's bytes.

Whatever is not listed here or in the worker's part must not change the bytes; whatever is doubtful
is listed, at the price of a cache that is not shared. Fields come one by one, not as one digest,
so that the server can say in which of them two engines differ.

The functions read vLLM's configuration and modify nothing. :func:`content_fields` also reads the
weights and may take seconds: call it once for each start of an engine, on a thread of its own.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path
from typing import NewType

from vllm.config import LoadConfig, ModelConfig, VllmConfig

from kvledger.errors import KVLedgerError
from kvledger.naming import DISPLAY_PREFIX, Descriptor
from kvledger.vllm.canonical import flat, plain, text, values_of
from kvledger.vllm.weights import UnreadableWeightsError, digest_weights

logger = logging.getLogger("kvledger")

WeightsEpoch = NewType("WeightsEpoch", str)
"""Which weights of one engine's life: "0" as loaded."""
AS_LOADED = WeightsEpoch("0")

_READ_FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor"),
        *("mistral", "pt", "npcache", "sharded_state"),
    }
)
"""Load formats whose weights are exactly the files of the model's directory."""
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
_MULTIMODAL_FIELDS = (
    *("language_model_only", "mm_processor_kwargs", "mm_device_do_normalize"),
    *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
    *("video_pruning_rate", "video_pruning_method", "media_io_kwargs"),
)
_ROPES_BY_CONTEXT = ("longrope", "su")
"""RoPE types for which vLLM chooses the factors by ``max_model_len``."""
_MAX_CONFIG_FIELDS = 512
"""A configuration with more fields than this is described by its outermost keys."""


class IdentityError(KVLedgerError):
    """The engine's blocks cannot be named so that other engines may rely on it."""


class WeightsEpochs:
    """The epochs of one engine: its weights may be replaced while it lives.

    Args:
        weights_version: operator's name for the weights that the first update brings; engines that
            were updated under the same name share. It is used for one update only, because the
            next one brings other weights.
    """

    def __init__(self, weights_version: str | None = None) -> None:
        self._next_version = weights_version
        self.current = AS_LOADED

    def reset(self) -> WeightsEpoch:
        """Begin a new epoch; a counter would meet the same number in another engine."""
        version, self._next_version = self._next_version, None
        self.current = WeightsEpoch(f"version:{version}" if version else secrets.token_hex(16))
        return self.current


# ---------------------------------------------------------------- weights


def content_fields(
    vllm_config: VllmConfig,
    *,
    model_revision: str | None = None,
    unchanged_since: float | None = None,
) -> Descriptor:
    """Weights of the model, and of a draft model whose KV cache lies in the same blocks.

    Blocks on the disk. Logs one warning for each model whose weights cannot be read.

    Args:
        vllm_config: the engine's configuration.
        model_revision: operator's name for weights that cannot be read.
        unchanged_since: see :func:`kvledger.vllm.weights.digest_weights`.
    """
    fields = weights_fields(
        vllm_config.model_config,
        vllm_config.load_config,
        model_revision=model_revision,
        unchanged_since=unchanged_since,
    )
    draft = _draft_model(vllm_config)
    if draft is not None:
        load_config = vllm_config.speculative_config.draft_load_config or vllm_config.load_config
        fields |= weights_fields(
            draft,
            load_config,
            model_revision=model_revision,
            unchanged_since=unchanged_since,
            prefix="draft.weights",
        )
    return fields


def weights_fields(
    model_config: ModelConfig,
    load_config: LoadConfig,
    *,
    model_revision: str | None = None,
    unchanged_since: float | None = None,
    prefix: str = "weights",
) -> Descriptor:
    """One model's weights: by content, else by the operator's word, else private to this start.

    Blocks on the disk; logs a warning if the value is private. Call once and keep the result.
    """
    fields = {
        f"{prefix}.load_format": str(load_config.load_format),
        f"{prefix}.quantisation": text(model_config.quantization),
        f"{prefix}.quantisation_settings": text(model_config.quantization_config),
    }
    patterns = load_config.ignore_patterns
    try:
        digest = digest_weights(
            _local_weights(model_config, load_config),
            ignore_patterns=[patterns] if isinstance(patterns, str) else list(patterns),
            with_code=bool(model_config.trust_remote_code),
            unchanged_since=unchanged_since,
        )
        fields[f"{prefix}.content"] = digest.value
    except UnreadableWeightsError as error:
        if model_revision:
            # The operator's word tells versions of one model apart, not models.
            name = model_config.model_weights or model_config.model
            fields[f"{prefix}.content"] = f"named:{name}@{model_revision}"
        else:
            fields[f"{prefix}.content"] = f"private:{secrets.token_hex(16)}"
            logger.warning(
                "kvledger: %s; this engine's cache is its own until it ends. "
                "Set kvledger.model_revision to share it.",
                error,
            )
    return fields


def _local_weights(model_config: ModelConfig, load_config: LoadConfig) -> Path:
    """The directory or file that vLLM loads from. Does not use the network."""
    if load_config.load_format not in _READ_FROM_FILES:
        raise UnreadableWeightsError(
            f"weights loaded as {load_config.load_format!r} cannot be read by kvledger"
        )
    if model_config.model_weights and model_config.model_weights != model_config.model:
        raise UnreadableWeightsError(f"the weights are remote, at {model_config.model_weights}")
    path = Path(model_config.model)
    if path.exists():
        return path
    return _hub_snapshot(model_config, load_config)


def _hub_snapshot(model_config: ModelConfig, load_config: LoadConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        raise UnreadableWeightsError(f"{model_config.model} comes from ModelScope")
    try:
        snapshot = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise UnreadableWeightsError(
            f"{model_config.model} is neither a directory nor in the Hugging Face cache"
        ) from error
    return Path(snapshot)


# ---------------------------------------------------------------- configuration


def scheduler_fields(
    vllm_config: VllmConfig,
    *,
    namespace: str = "",
    model_revision: str | None = None,
    weights_version: str | None = None,
    epoch: WeightsEpoch = AS_LOADED,
    hash_block_tokens: int | None = None,
) -> Descriptor:
    """What the configuration says, except for the weights' content and the hashing root. Fast.

    Args:
        vllm_config: the engine's configuration, after vLLM has resolved it.
        namespace: operator's own namespace.
        model_revision: operator's name of the weights.
        weights_version: operator's name of updated weights.
        epoch: current epoch of the weights.
        hash_block_tokens: tokens of one hash, if not the block size (several KV-cache groups).
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    block_tokens, additional = cache.block_size, vllm_config.additional_config
    fields = {
        "namespace": namespace,
        "engine.vllm": _vllm_format(),
        "weights.operator_revision": model_revision or "",
        "weights.operator_version": weights_version or "",
        "weights.epoch": epoch,
        "cache.dtype": str(cache.cache_dtype),
        "cache.unquantised_layers": text(sorted(cache.kv_cache_dtype_skip_layers)),
        "cache.scales": "measured" if _measures_scales(vllm_config) else "checkpoint",
        "cache.fast_prefill": text(cache.kv_sharing_fast_prefill),
        "cache.block_tokens": str(block_tokens),
        "parallel.tensor": str(parallel.tensor_parallel_size),
        "parallel.pipeline": str(parallel.pipeline_parallel_size),
        "parallel.decode_context": str(parallel.decode_context_parallel_size),
        "parallel.prefill_context": str(parallel.prefill_context_parallel_size),
        "hash.algorithm": str(cache.prefix_caching_hash_algo),
        "hash.block_tokens": str(hash_block_tokens or cache.hash_block_size or block_tokens),
        "adapters": "none" if vllm_config.lora_config is None else "base model only",
        "additional": text(
            additional.compute_hash() if hasattr(additional, "compute_hash") else additional
        ),
        f"{DISPLAY_PREFIX}model": str(vllm_config.model_config.model),
    }
    return fields | model_fields(vllm_config.model_config) | _draft_fields(vllm_config)


def model_fields(model_config: ModelConfig, prefix: str = "model") -> Descriptor:
    """The resolved configuration of one model, overrides included, field by field."""
    fields = {
        f"{prefix}.dtype": text(model_config.dtype),
        f"{prefix}.implementation": text(model_config.model_impl),
        f"{prefix}.class_overrides": text(model_config.model_class_overrides),
        f"{prefix}.runner": text([model_config.runner_type, model_config.convert_type]),
        f"{prefix}.sliding_window": "off" if model_config.disable_sliding_window else "on",
    }
    if model_config.trust_remote_code:
        fields[f"{prefix}.code_revision"] = text(model_config.code_revision)
    if model_config.multimodal_config is not None:
        for name in _MULTIMODAL_FIELDS:
            value = getattr(model_config.multimodal_config, name, None)
            fields[f"{prefix}.multimodal.{name}"] = text(value)
    config = plain(model_config.hf_config)
    assert isinstance(config, dict)
    kinds = [*values_of("rope_type", config), *values_of("type", config)]
    if any(kind in _ROPES_BY_CONTEXT for kind in kinds):
        originals = [
            value
            for value in values_of("original_max_position_embeddings", config)
            if isinstance(value, int)
        ]
        longer = not originals or model_config.max_model_len > min(originals)
        fields[f"{prefix}.rope_factors"] = "long" if longer else "short"
    return fields | _config_fields(f"{prefix}.config", config)


def _config_fields(prefix: str, config: dict[str, object]) -> Descriptor:
    fields: Descriptor = {}
    for key, value in config.items():
        fields |= flat(f"{prefix}.{key}", value)
    if len(fields) > _MAX_CONFIG_FIELDS:
        fields = {f"{prefix}.{key}": text(value) for key, value in config.items()}
    return fields


def hashing_fields(vllm_config: VllmConfig) -> Descriptor:
    """The root of vLLM's hash chain. Ask at the first request, not earlier: vLLM sets it late.

    Raises:
        IdentityError: it is not set yet, or it is random, so that no other engine (and not even
            this one after a restart) would find the same names.
    """
    unstable = _unstable_hashing(vllm_config)
    if unstable:
        raise IdentityError(unstable)
    from vllm.v1.core import kv_cache_utils

    root = getattr(kv_cache_utils, "NONE_HASH", None)
    if root is None:
        raise IdentityError(
            "vLLM has not initialised the root of its block hashes yet; ask at the first request"
        )
    return {"hash.root": bytes(root).hex()}


# ---------------------------------------------------------------- what is refused


def refusals(vllm_config: VllmConfig) -> list[str]:
    """Sentences that say why this engine must not use kvledger; empty if it may."""
    parallel = vllm_config.parallel_config
    sentences = []
    if parallel.nnodes_within_dp > 1:
        sentences.append(
            f"the engine spans {parallel.nnodes_within_dp} nodes, and kvledger serves the "
            "processes of one node; use one engine per node"
        )
    if parallel.distributed_executor_backend == "ray" and parallel.world_size > 1:
        sentences.append(
            "Ray may place the engine's ranks on several nodes, and kvledger serves the processes "
            "of one node; use --distributed-executor-backend mp"
        )
    for name, size in (
        ("decode", parallel.decode_context_parallel_size),
        ("prefill", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            sentences.append(
                f"{name} context parallelism of {size} splits a block's tokens over ranks, which "
                "kvledger does not support yet; set it to 1"
            )
    if _measures_scales(vllm_config):
        sentences.append(
            "the engine measures its KV-cache scales on its first batch, so its blocks mean "
            "nothing to another engine; use scales from the checkpoint"
        )
    if getattr(vllm_config.model_config, "is_diffusion", False):
        sentences.append("a diffusion model's blocks depend on later tokens; none can be shared")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        # Its drafter writes the KV of a position from the token behind it, into the same block.
        sentences.append(
            f"drafts by {speculative.method} leave KV in a block that depends on the token after "
            "it, so no name fits the block; use another speculative method, or none"
        )
    unstable = _unstable_hashing(vllm_config)
    return sentences + ([unstable] if unstable else [])


def lora_refusal(vllm_config: VllmConfig) -> str | None:
    """Why requests with an adapter must neither load nor store; None if the engine takes none.

    vLLM's names cover an adapter's name and path, not its content, so a changed file would be
    taken for the old one. Requests for the base model are not affected.
    """
    if vllm_config.lora_config is None:
        return None
    return (
        "requests with a LoRA adapter bypass the cache: kvledger does not yet tell the contents "
        "of two adapters of one name apart"
    )


def _unstable_hashing(vllm_config: VllmConfig) -> str:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("xxhash") or os.environ.get("PYTHONHASHSEED") is not None:
        return ""
    return (
        f"vLLM starts {algorithm} from a random root in every process, so no block would ever be "
        "found again; use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED"
    )


def _measures_scales(vllm_config: VllmConfig) -> bool:
    return bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))


# ---------------------------------------------------------------- drafts


def _draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    """A draft model that keeps KV cache, else None."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return None
    return speculative.draft_model_config


def _draft_fields(vllm_config: VllmConfig) -> Descriptor:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return {}
    fields = {
        "draft.method": text(speculative.method),
        "draft.tokens": text(speculative.num_speculative_tokens),
        "draft.cache_dtype": text(getattr(speculative, "kv_cache_dtype", None)),
        "draft.attention_backend": text(getattr(speculative, "attention_backend", None)),
    }
    draft = _draft_model(vllm_config)
    return fields if draft is None else fields | model_fields(draft, "draft.model")


def _vllm_format() -> str:
    """ "0.32" for 0.32.1; a development build is only equal to itself."""
    from vllm import __version__

    release = re.match(r"(\d+\.\d+)\.\d+(\+cpu)?$", __version__)
    return release[1] if release else str(__version__)
