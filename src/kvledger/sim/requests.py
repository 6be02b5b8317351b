"""Requests as vLLM's engine core makes them: sampling parameters, block hashes, salts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvledger.sim.pattern import seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a client sends.

    Attributes:
        tokens: prompt token ids, each below the vocabulary.
        max_tokens: tokens to generate at most.
        stop_token_ids: generation ends after one of these.
        salt: vLLM's cache salt.
        adapter: LoRA adapter; vLLM hashes its name and path.
        variant: anything else that decides the KV bytes and that vLLM does not hash, such as
            the content of an adapter's file.
        transfer_params: ``kv_transfer_params`` for the connector.
        priority: lower is served first under the "priority" policy.
        skip_reading_prefix_cache: what vLLM sets for prompt log-probabilities.
    """

    tokens: Sequence[int]
    max_tokens: int = 1
    stop_token_ids: Sequence[int] = ()
    salt: str | None = None
    adapter: LoRARequest | None = None
    variant: str = ""
    transfer_params: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    skip_reading_prefix_cache: bool = False

    def seed(self, weights: str) -> int:
        """Where the pattern of this prompt's KV starts."""
        adapter = self.adapter.lora_name if self.adapter is not None else ""
        return seed_of(weights, self.salt or "", adapter, self.variant)


BlockHasher = Callable[[Request], list[bytes]]


def make_hasher(algorithm: str, block_size: int) -> BlockHasher:
    """vLLM's own block hasher; sets the process-wide root hash as the engine core does."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    hasher: BlockHasher = get_request_block_hasher(block_size, function)
    return hasher


def make_request(
    request_id: str, prompt: Prompt, hasher: BlockHasher, *, resumable: bool = False
) -> Request:
    """The request that vLLM's scheduler sees; a resumable one is a turn of a session."""
    params = SamplingParams(
        max_tokens=prompt.max_tokens,
        ignore_eos=True,
        temperature=0.0,
        stop_token_ids=list(prompt.stop_token_ids),
        skip_reading_prefix_cache=prompt.skip_reading_prefix_cache or None,
        extra_args=(
            {"kv_transfer_params": dict(prompt.transfer_params)} if prompt.transfer_params else None
        ),
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt.tokens),
        sampling_params=params,
        pooling_params=None,
        lora_request=prompt.adapter,
        cache_salt=prompt.salt,
        priority=prompt.priority,
        block_hasher=hasher,
        resumable=resumable,
    )
