"""The engine's KV tensors as rows: one block of a run of layers is one row of bytes.

vLLM hands each layer over as a logical ``[blocks, heads, tokens, content]`` view with arbitrary
strides, usually all into one buffer. Copying needs less: for each block, where its bytes start and
how many lie in one piece. That is read from the real shapes and strides, never from the name of a
layout, and checked against the page size that vLLM's own specification announces.

The module refuses what it does not understand, with a sentence; a refused engine runs without
kvledger.

**Bytes of one part.** A chunk of ``n`` blocks is stored layer by layer, in the order of
:attr:`GroupLayout.layers`; each layer contributes the rows of the chunk's ``n`` blocks, in the
order of the blocks, without gaps. With pages of ``p0, p1, ...`` bytes, layer ``i`` starts at
``n * (p0 + ... + p(i-1))``. Padding between pages is not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvledger.errors import KVLedgerError

_DENSE_SPECS = (FullAttentionSpec, MLAAttentionSpec)
"""Exact types: a subclass may mean something else (hidden states, attention sinks)."""


class UnsupportedLayoutError(KVLedgerError):
    """KV tensors that cannot be moved safely; says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Layers whose bytes of one block lie in one piece.

    Attributes:
        names: the layers, in the order of their bytes; those that alias another are left out.
        rows: uint8 view ``(num_blocks, page_bytes)`` of the engine's memory; a row is contiguous.
    """

    names: tuple[str, ...]
    rows: torch.Tensor

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.rows.shape[1])

    @property
    def block_stride(self) -> int:
        """Bytes from one block's row to the next one's."""
        return int(self.rows.stride(0))


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV-cache group.

    Attributes:
        index: the group's index in the engine.
        layers: rows of its layers, in the order in which they are stored; layers that lie side by
            side within a block (block-outermost layouts) are one entry.
        block_tokens: tokens of one block, as the scheduler counts blocks.
        specification: canonical text of what vLLM says about each kind of layer.
        views: canonical text of how the bytes of a row are arranged, for each kind of layer.
        dtypes: element types of the views.
        digest: digest of the layers' names, bytes and kinds, in order.
    """

    index: int
    layers: tuple[BlockRows, ...]
    block_tokens: int
    specification: str
    views: str
    dtypes: str
    digest: str

    @property
    def block_bytes(self) -> int:
        """Bytes that are stored for one block, padding left out."""
        return sum(layer.page_bytes for layer in self.layers)

    def part_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes of one chunk of this group on this rank."""
        return blocks_per_chunk * self.block_bytes


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """All KV memory of one rank.

    Attributes:
        groups: one for each KV-cache group, in the engine's order.
        num_blocks: blocks of the engine; ids run from 0 (never moved) to ``num_blocks - 1``.
        device: where the tensors are.
    """

    groups: tuple[GroupLayout, ...]
    num_blocks: int
    device: torch.device

    def describe(self) -> dict[str, str]:
        """The worker's fields of the namespace descriptor, without the attention backend.

        Fields in which pipeline stages may differ begin with ``rank.``; the others are the same
        on all ranks. The number of blocks and where they lie do not enter: they decide no byte.
        """

        def of_groups(value: Callable[[GroupLayout], object]) -> str:
            return "; ".join(str(value(group)) for group in self.groups)

        return {
            "rank.worker.layout": of_groups(lambda group: group.views),
            "rank.worker.layers": of_groups(lambda group: group.digest),
            "rank.worker.pages": of_groups(
                lambda group: _runs([layer.page_bytes for layer in group.layers])
            ),
            "rank.worker.block_bytes": of_groups(lambda group: group.block_bytes),
            "rank.worker.specification": of_groups(lambda group: group.specification),
            "worker.block_tokens": of_groups(lambda group: group.block_tokens),
            "worker.dtype": of_groups(lambda group: group.dtypes),
            "worker.device": self.device.type,
        }


@dataclass(frozen=True, slots=True)
class _Page:
    """One layer's page: bytes from the start of its storage, and what a row holds."""

    name: str
    storage: torch.UntypedStorage
    offset: int
    stride: int
    size: int
    view: str
    dtype: str

    @property
    def address(self) -> tuple[int, int, int]:
        return (self.storage.data_ptr() + self.offset, self.stride, self.size)


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse engines whose blocks this version cannot name or move.

    Needs no tensors, so the scheduler's side can ask the same question.

    Raises:
        UnsupportedLayoutError: more or fewer than one group, a group that is not plain full
            attention, or one whose blocks depend on tokens behind them.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(g.kv_cache_spec).__name__ for g in groups) or "no attention"
        raise UnsupportedLayoutError(
            f"this model has {len(groups)} KV-cache groups ({kinds}), and kvledger moves exactly "
            "one group so far; run it without kvledger, or with --disable-hybrid-kv-cache-manager "
            "where the model allows that"
        )
    if groups[0].host_resident or not groups[0].enable_kv_transfer:
        raise UnsupportedLayoutError(
            "vLLM keeps this model's KV cache in host memory or excludes it from transfers; "
            "run it without kvledger"
        )
    for name, spec in _layer_specs(groups[0]).items():
        _check_spec(name, spec)


def inspect_engine_memory(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig
) -> EngineMemory:
    """Describe the tensors that vLLM registered. Modifies nothing; the result holds views of them.

    Args:
        kv_caches: layer name → view, as given to ``register_kv_caches``.
        kv_cache_config: this worker's configuration.

    Raises:
        UnsupportedLayoutError: see :func:`check_groups`; or the tensors are not what the
            configuration says, or a layer's block is not one piece.
    """
    check_groups(kv_cache_config)
    num_blocks = kv_cache_config.num_blocks
    groups = []
    covered: set[tuple[int, int, int]] = set()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = _layer_specs(group)
        pages = []
        for name in _storage_order(group, kv_cache_config):
            if name not in kv_caches:
                raise UnsupportedLayoutError(
                    f"vLLM registered no KV tensor for the layer {name!r}; run without kvledger"
                )
            pages.append(_page_of(name, kv_caches[name], specs[name], num_blocks))
        covered.update(page.address for page in pages)
        groups.append(_group_layout(index, specs, pages, num_blocks))
    _check_extra_layers(kv_caches, kv_cache_config, covered)
    devices = {tensor.device for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise UnsupportedLayoutError(
            f"the KV tensors of one rank lie on {len(devices)} devices, expected one; "
            "run without kvledger"
        )
    return EngineMemory(groups=tuple(groups), num_blocks=num_blocks, device=devices.pop())


def _layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _check_spec(name: str, spec: KVCacheSpec) -> None:
    if type(spec) not in _DENSE_SPECS:
        raise UnsupportedLayoutError(
            f"the layer {name!r} keeps its KV cache as {type(spec).__name__}, and kvledger moves "
            "full attention and MLA so far; run this model without kvledger"
        )
    if spec.non_causal:
        raise UnsupportedLayoutError(
            f"the layer {name!r} attends in both directions, so a block depends on the tokens "
            "after it and no prefix can be shared; run this model without kvledger"
        )


def _storage_order(group: KVCacheGroupSpec, kv_cache_config: KVCacheConfig) -> list[str]:
    """The group's layers in the order in which vLLM lays them out: adjacent pages fall together.

    The order comes from the configuration, not from addresses, so it is the same in every engine.
    """
    names = set(group.layer_names)
    placed = [n for tensor in kv_cache_config.kv_cache_tensors for n in tensor.layers if n in names]
    return placed if sorted(placed) == sorted(names) else list(group.layer_names)


def _page_of(name: str, tensor: torch.Tensor, spec: AttentionSpec, num_blocks: int) -> _Page:
    kernel_blocks, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not kernel_blocks:
        raise UnsupportedLayoutError(
            f"the KV tensor of {name!r} has {tensor.shape[0]} blocks, which is no multiple of the "
            f"engine's {num_blocks}; run without kvledger"
        )
    view = tensor if kernel_blocks == 1 else tensor.unflatten(0, (num_blocks, kernel_blocks))
    arrangement = _dense_order(view, kernel_blocks)
    if arrangement is None:
        raise UnsupportedLayoutError(
            f"one block of {name!r} is not one piece of memory (shape {tuple(tensor.shape)}, "
            f"strides {tuple(tensor.stride())}); set VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC"
        )
    item = view.element_size()
    size = prod(view.shape[1:]) * item
    if size != spec.unpadded_page_size_bytes:
        raise UnsupportedLayoutError(
            f"a block of {name!r} has {size} bytes in memory, and vLLM announces "
            f"{spec.unpadded_page_size_bytes}; run without kvledger"
        )
    stride = view.stride(0) * item
    offset = view.storage_offset() * item
    storage = view.untyped_storage()
    if stride < size or offset + (num_blocks - 1) * stride + size > storage.nbytes():
        raise UnsupportedLayoutError(
            f"the blocks of {name!r} overlap or leave their buffer ({num_blocks} blocks of {size} "
            f"bytes, {stride} bytes apart, in {storage.nbytes()}); run without kvledger"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Page(name, storage, offset, stride, size, f"{dtype} {arrangement}", dtype)


def _dense_order(view: torch.Tensor, kernel_blocks: int) -> str | None:
    """Axes behind the block from the outermost in memory to the innermost, with their lengths:
    kernel block (K), head (H), token (N), content (C); letters from "b" on for other shapes.

    None if the block has gaps. Axes of length one decide nothing and are left out, so that layouts
    which differ by name only come out equal.
    """
    names = "BHNC" if kernel_blocks == 1 else "BKHNC"
    if view.dim() != len(names):
        names = "".join(chr(ord("a") + i) for i in range(view.dim()))
    inner = [
        (view.stride(i), view.shape[i], names[i]) for i in range(1, view.dim()) if view.shape[i] > 1
    ]
    inner.sort(reverse=True)
    expected = 1
    for stride, length, _ in reversed(inner):
        if stride != expected:
            return None
        expected *= length
    return "·".join(f"{letter}{length}" for _, length, letter in inner)


def _group_layout(
    index: int, specs: Mapping[str, KVCacheSpec], pages: Sequence[_Page], num_blocks: int
) -> GroupLayout:
    seen: dict[tuple[int, int, int], _Page] = {}
    for page in pages:
        seen.setdefault(page.address, page)
    distinct = list(seen.values())
    tokens = {spec.block_size for spec in specs.values()}
    if len(tokens) != 1:
        raise UnsupportedLayoutError(
            f"the layers of one KV-cache group have blocks of {sorted(tokens)} tokens; "
            "run without kvledger"
        )
    digest = hashlib.blake2b(digest_size=16)
    for page in distinct:
        digest.update(f"{page.name}\0{page.size}\0{page.view}\0".encode())
    return GroupLayout(
        index=index,
        layers=tuple(_rows_of(run, num_blocks) for run in _adjacent(distinct)),
        block_tokens=tokens.pop(),
        specification=", ".join(sorted({_spec_text(spec) for spec in specs.values()})),
        views=", ".join(sorted({page.view for page in distinct})),
        dtypes=", ".join(sorted({page.dtype for page in distinct})),
        digest=f"{len(distinct)}:{digest.hexdigest()}",
    )


def _adjacent(pages: Sequence[_Page]) -> list[list[_Page]]:
    """Join pages that lie side by side within one block (block-outermost layouts)."""
    runs: list[list[_Page]] = []
    for page in pages:
        run = runs[-1] if runs else [page]
        together = page.offset + page.size - run[0].offset
        if (
            runs
            and page.storage.data_ptr() == run[0].storage.data_ptr()
            and page.stride == run[0].stride
            and page.offset == run[-1].offset + run[-1].size
            and together <= page.stride
        ):
            run.append(page)
        else:
            runs.append([page])
    return runs


def _rows_of(run: Sequence[_Page], num_blocks: int) -> BlockRows:
    first = run[0]
    rows = torch.empty(0, dtype=torch.uint8, device=first.storage.device)
    size = sum(page.size for page in run)
    rows.set_(first.storage, first.offset, (num_blocks, size), (first.stride, 1))
    return BlockRows(names=tuple(page.name for page in run), rows=rows)


def _check_extra_layers(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    covered: set[tuple[int, int, int]],
) -> None:
    """Names outside the groups may only be layers that share another layer's KV cache."""
    known = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    starts = {address for address, _, _ in covered}
    for name, tensor in kv_caches.items():
        if name not in known and tensor.data_ptr() not in starts:
            raise UnsupportedLayoutError(
                f"vLLM registered a KV tensor for {name!r}, which belongs to no KV-cache group "
                "and shares no other layer's memory; run this model without kvledger"
            )


def _spec_text(spec: AttentionSpec) -> str:
    fields = {
        "heads": spec.num_kv_heads,
        "head_slots": spec.num_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "quantisation": spec.kv_quant_mode.name,
        "tokens_per_state": spec.tokens_per_state,
        "format": getattr(spec, "cache_dtype_str", None),
        "version": getattr(spec, "model_version", None),
    }
    named = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    return f"{type(spec).__name__} {named}"


def _runs(sizes: Sequence[int]) -> str:
    """ "4096x32, 512" for 32 rows of 4096 bytes and one of 512."""
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return ", ".join(f"{size}x{count}" if count > 1 else str(size) for size, count in runs)
