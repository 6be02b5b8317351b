"""The KV tensors of one simulated worker, and the canaries around them.

As in vLLM, all layers lie in one buffer of bytes, and each layer is handed to the connector as a
logical [block, head, token, content] view with the strides of the layout. KV-cache groups
overlay each other: a block id belongs to one group at a time.

Rows of guard bytes stand before the first layer, after the last, and between the layers where
the layout allows it. They, and the null block, must never change.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvledger.sim.model import EngineOptions
from kvledger.sim.pattern import U64

LANE_BYTES = 8
HEAD_SIZE = 1
"""With float32 keys and values of size 1, one head's content of a token is one lane."""

CANARY = 0xA5
"""Every byte starts as this; reading a slot that nothing wrote gives a wrong checksum."""


def layer_names(options: EngineOptions, group: int) -> list[str]:
    """Names of one group's layers; groups interleave as in a hybrid model."""
    groups = len(options.windows)
    return [
        f"model.layers.{layer * groups + group}.self_attn.attn" for layer in range(options.layers)
    ]


def _spec(options: EngineOptions, window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
    fields = {
        "block_size": options.block_size,
        "num_kv_heads": options.heads,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    if window is None:
        return FullAttentionSpec(**fields)
    return SlidingWindowSpec(**fields, sliding_window=window)


def build_cache_config(options: EngineOptions) -> KVCacheConfig:
    """vLLM's description of the KV cache, with a page of guard bytes where it can stand."""
    layout = KVCacheLayout[options.layout]
    groups = [
        KVCacheGroupSpec(layer_names(options, index), _spec(options, window))
        for index, window in enumerate(options.windows)
    ]
    spec = groups[0].kv_cache_spec
    page = spec.page_size_bytes
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec, options.num_blocks, options.layers, layout
    )
    span = page * options.num_blocks * options.layers
    if layout.is_layer_compact:
        layer_stride += page
        span += page * (options.layers - 1)
    tensors = [
        KVCacheTensor(
            size=span + 2 * page,
            layers=group.layer_names,
            layer_stride=layer_stride,
            block_stride=block_stride,
            offset=page,
        )
        for group in groups
    ]
    return KVCacheConfig(
        num_blocks=options.num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout=options.layout,
        hash_block_size=options.block_size,
        cache_hit_alignment_tokens=options.block_size,
    )


class RankMemory:
    """One worker's KV buffer.

    Attributes:
        tensors: layer name → logical [B, H, N, C] float32 view, what a connector registers.
        lanes: [layers, blocks, heads, tokens] view of the same bytes, eight at a time. Groups
            overlay each other, so it serves every group.
        buffer: all bytes, guards included.
    """

    def __init__(self, cache_config: KVCacheConfig, options: EngineOptions) -> None:
        layout = KVCacheLayout[options.layout]
        self.tensors: dict[str, torch.Tensor] = allocate_kv_cache(
            cache_config, torch.device("cpu"), layout
        )
        first, *others = (self.tensors[name] for name in layer_names(options, 0))
        storage = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        self.buffer: NDArray[np.uint8] = storage.numpy()
        self.buffer[:] = CANARY
        layer_stride = (others[0].data_ptr() - first.data_ptr()) if others else 0
        self.lanes: U64 = np.ndarray(
            (options.layers, *first.shape[:3]),
            dtype=np.uint64,
            buffer=self.buffer,
            offset=first.storage_offset() * first.itemsize,
            strides=(layer_stride, *(step * first.itemsize for step in first.stride()[:3])),
        )
        covered = np.zeros(len(self.buffer), dtype=bool)
        mask = np.ndarray(
            (*self.lanes.shape, LANE_BYTES),
            dtype=bool,
            buffer=covered,
            offset=first.storage_offset() * first.itemsize,
            strides=(*self.lanes.strides, 1),
        )
        mask[:, 1:] = True
        self._guards = np.flatnonzero(~covered)

    def broken_guards(self) -> list[int]:
        """Offsets (bytes) of guard and null-block bytes that were written."""
        changed = self.buffer[self._guards] != CANARY
        found: list[int] = self._guards[changed].tolist()
        return found

    def zero(self, block_ids: list[int]) -> None:
        """Clear whole blocks, as a worker does with ``new_block_ids_to_zero``."""
        self.lanes[:, block_ids] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy one block in every layer (copy-on-write)."""
        self.lanes[:, target] = self.lanes[:, source]
