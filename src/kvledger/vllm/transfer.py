"""Copies between the engine's KV tensors and the arena.

Chunks are given as arrays: ``block_ids`` int32 ``(chunks, blocks_per_chunk)`` and ``offsets``
uint64 ``(chunks,)``, the start of each chunk's object in the arena. A rank's part begins
``part_offset`` bytes into the object; :mod:`kvledger.vllm.layouts` says how its bytes are ordered.

Every item is checked before any byte moves, so a refused call changes nothing. Neither class
orders anything against other streams or threads: the caller calls at a moment when the blocks are
complete (store) or nobody reads them (load), and nothing else writes to the same slots.

Layers that lie at equal distances in memory (all layers of an engine, usually) form a *stack*, a
view ``(layers, blocks, page_bytes)``, so that one block of all its layers is one strided copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvledger.errors import KVLedgerError
from kvledger.vllm.layouts import BlockRows, EngineMemory
from kvledger.vllm.metadata import SKIP_BLOCK

STAGING_BYTES = 64 << 20
"""Device memory and host memory that :class:`DeviceTransfer` stages copies in."""


class TransferError(KVLedgerError):
    """A block or a slot out of bounds; nothing was copied."""


class Transfer(Protocol):
    """Moves whole chunks of one rank. Calls block until the bytes may be relied upon."""

    def part_bytes(self, group: int, blocks_per_chunk: int) -> int:
        """Bytes of this rank's part of one chunk."""

    def store(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> int:
        """Copy engine blocks into the arena. When it returns, all bytes are in the arena.

        Returns:
            Bytes copied.

        Raises:
            TransferError: a block id, a slot or an array's shape is not valid; nothing was copied.
        """

    def load(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> int:
        """Copy from the arena into engine blocks, except where the id is SKIP_BLOCK.

        When it returns, the arena is not read any more, and work queued on the current stream
        afterwards sees the blocks. Returns and raises like :meth:`store`; skipped blocks count
        no bytes.
        """


class _Bounds:
    """The checks that every transfer makes first."""

    def __init__(self, memory: EngineMemory, arena: NDArray[np.uint8]) -> None:
        if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
            raise TransferError(
                f"the arena must be a flat array of bytes, found {arena.dtype} {arena.shape}"
            )
        if not arena.flags.writeable:
            raise TransferError("the arena is mapped read-only, and blocks are stored into it")
        self._memory = memory
        self._arena = arena

    def part_bytes(self, group: int, blocks_per_chunk: int) -> int:
        """Bytes of this rank's part of one chunk. Raises TransferError for an unknown group."""
        if not 0 <= group < len(self._memory.groups):
            raise TransferError(
                f"KV-cache groups are 0 to {len(self._memory.groups) - 1}, found {group}"
            )
        return self._memory.groups[group].part_bytes(blocks_per_chunk)

    def _checked_part_bytes(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
        *,
        may_skip: bool = False,
    ) -> int:
        if block_ids.ndim != 2 or offsets.shape != block_ids.shape[:1] or block_ids.shape[1] == 0:
            raise TransferError(
                "block ids come as (chunks, blocks_per_chunk) with one offset for each chunk, "
                f"found shapes {block_ids.shape} and {offsets.shape}"
            )
        if block_ids.dtype != np.int32 or offsets.dtype != np.uint64:
            raise TransferError(
                f"block ids are int32 and offsets uint64, found {block_ids.dtype} "
                f"and {offsets.dtype}"
            )
        part_bytes = self.part_bytes(group, block_ids.shape[1])
        if not len(offsets):
            return part_bytes
        wanted = block_ids[block_ids != SKIP_BLOCK] if may_skip else block_ids
        lowest = int(wanted.min(initial=1))
        highest = int(wanted.max(initial=1))
        if lowest < 1 or highest >= self._memory.num_blocks:
            raise TransferError(
                f"block ids are 1 to {self._memory.num_blocks - 1} (0 is vLLM's null block), "
                f"found {lowest} to {highest}"
            )
        end = int(offsets.max()) + part_offset + part_bytes
        if part_offset < 0 or end > self._arena.size:
            raise TransferError(
                f"a part of {part_bytes} bytes at {int(offsets.max())} + {part_offset} leaves the "
                f"arena of {self._arena.size} bytes"
            )
        return part_bytes


class HostTransfer(_Bounds):
    """For engines whose KV tensors are in host memory: one copy for each byte, without the GIL.

    Args:
        memory: this rank's KV tensors, on the CPU.
        arena: the mapping, a writable flat uint8 array.
    """

    def __init__(self, memory: EngineMemory, arena: NDArray[np.uint8]) -> None:
        super().__init__(memory, arena)
        if memory.device.type != "cpu":
            raise TransferError(f"expected KV tensors in host memory, found {memory.device}")
        self._stacks: list[list[NDArray[np.uint8]]] = [
            [stack.numpy() for stack in _stacks_of(group.layers)] for group in memory.groups
        ]

    def store(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> int:
        """See :meth:`Transfer.store`."""
        part_bytes = self._checked_part_bytes(group, block_ids, offsets, part_offset)
        for slot, blocks in self._pairs(group, block_ids, offsets, part_offset):
            np.copyto(slot, blocks)
        return part_bytes * len(offsets)

    def load(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> int:
        """See :meth:`Transfer.load`."""
        self._checked_part_bytes(group, block_ids, offsets, part_offset, may_skip=True)
        for slot, blocks in self._pairs(group, block_ids, offsets, part_offset):
            np.copyto(blocks, slot)
        return self.part_bytes(group, int(np.count_nonzero(block_ids != SKIP_BLOCK)))

    def _pairs(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Views of equal shape in the arena and in the engine that hold the same bytes."""
        for ids, offset in zip(block_ids.tolist(), offsets.tolist(), strict=True):
            first, count = ids[0], len(ids)
            in_a_row = first != SKIP_BLOCK and ids == list(range(first, first + count))
            start = offset + part_offset
            for stack in self._stacks[group]:
                layers, _, page_bytes = stack.shape
                end = start + layers * count * page_bytes
                slot = self._arena[start:end].reshape(layers, count, page_bytes)
                start = end
                if in_a_row:
                    yield slot, stack[:, first : first + count]
                    continue
                for position, block in enumerate(ids):
                    if block != SKIP_BLOCK:
                        yield slot[:, position], stack[:, block]


class DeviceTransfer(_Bounds):
    """For KV tensors on any torch device, on the current stream, through staging buffers.

    Store: gather the blocks into a buffer on the device, one blocking copy to the host, from there
    into the arena. Load: the reverse. Both buffers are allocated at the first use.

    Args:
        memory: this rank's KV tensors.
        arena: the mapping, a writable flat uint8 array.
        staging_bytes: size of each buffer; a single larger part makes them grow to its size.
    """

    def __init__(
        self,
        memory: EngineMemory,
        arena: NDArray[np.uint8],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__(memory, arena)
        self._stacks: list[list[torch.Tensor]] = [
            _stacks_of(group.layers) for group in memory.groups
        ]
        self._staging_bytes = staging_bytes
        self._device_staging = torch.empty(0, dtype=torch.uint8)
        self._host_staging = torch.empty(0, dtype=torch.uint8)

    def store(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> int:
        """See :meth:`Transfer.store`."""
        part_bytes = self._checked_part_bytes(group, block_ids, offsets, part_offset)
        for some_ids, some_offsets in self._slices(block_ids, offsets, part_bytes):
            on_device, on_host = self._buffers(len(some_offsets), part_bytes)
            ids = self._ids(some_ids)
            for stack, target in self._staged(group, on_device, block_ids.shape[1]):
                rows = stack.index_select(1, ids)
                target.copy_(rows.unflatten(1, some_ids.shape).transpose(0, 1))
            on_host.copy_(on_device)
            staged = on_host.numpy()
            for index, offset in enumerate(some_offsets.tolist()):
                start = offset + part_offset
                np.copyto(self._arena[start : start + part_bytes], staged[index])
        return part_bytes * len(offsets)

    def load(
        self,
        group: int,
        block_ids: NDArray[np.int32],
        offsets: NDArray[np.uint64],
        part_offset: int,
    ) -> int:
        """See :meth:`Transfer.load`."""
        part_bytes = self._checked_part_bytes(group, block_ids, offsets, part_offset, may_skip=True)
        for some_ids, some_offsets in self._slices(block_ids, offsets, part_bytes):
            on_device, on_host = self._buffers(len(some_offsets), part_bytes)
            staged = on_host.numpy()
            for index, offset in enumerate(some_offsets.tolist()):
                start = offset + part_offset
                np.copyto(staged[index], self._arena[start : start + part_bytes])
            on_device.copy_(on_host)
            ids = self._ids(some_ids)
            wanted = ids != SKIP_BLOCK
            for stack, source in self._staged(group, on_device, block_ids.shape[1]):
                rows = source.transpose(0, 1).flatten(1, 2)
                stack.index_copy_(1, ids[wanted], rows[:, wanted])
        return self.part_bytes(group, int(np.count_nonzero(block_ids != SKIP_BLOCK)))

    def _slices(
        self, block_ids: NDArray[np.int32], offsets: NDArray[np.uint64], part_bytes: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint64]]]:
        """Runs of chunks that fit the staging buffers."""
        step = max(1, self._staging_bytes // part_bytes)
        for first in range(0, len(offsets), step):
            yield block_ids[first : first + step], offsets[first : first + step]

    def _buffers(self, chunks: int, part_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both staging buffers as ``(chunks, part_bytes)``."""
        wanted = chunks * part_bytes
        if self._host_staging.numel() < wanted:
            size = max(self._staging_bytes, part_bytes)
            device = self._memory.device
            self._device_staging = torch.empty(size, dtype=torch.uint8, device=device)
            self._host_staging = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
            )
        return (
            self._device_staging[:wanted].view(chunks, part_bytes),
            self._host_staging[:wanted].view(chunks, part_bytes),
        )

    def _ids(self, block_ids: NDArray[np.int32]) -> torch.Tensor:
        flat = np.ascontiguousarray(block_ids, dtype=np.int64).reshape(-1)
        return torch.from_numpy(flat).to(self._memory.device)

    def _staged(
        self, group: int, staging: torch.Tensor, blocks_per_chunk: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each stack with its place in the staging buffer, ``(chunks, layers, blocks, bytes)``."""
        start = 0
        for stack in self._stacks[group]:
            layers, _, page_bytes = stack.shape
            end = start + layers * blocks_per_chunk * page_bytes
            shape = (layers, blocks_per_chunk, page_bytes)
            yield stack, staging[:, start:end].unflatten(1, shape)
            start = end


def _stacks_of(layers: Sequence[BlockRows]) -> list[torch.Tensor]:
    """Views ``(layers, blocks, page_bytes)`` of consecutive layers at equal distances."""
    stacks: list[list[BlockRows]] = []
    for layer in layers:
        if stacks and _continues(stacks[-1], layer):
            stacks[-1].append(layer)
        else:
            stacks.append([layer])
    views = []
    for stack in stacks:
        rows = stack[0].rows
        distance = _distance(stack[0], stack[1]) if len(stack) > 1 else 1
        shape = (len(stack), *rows.shape)
        views.append(rows.as_strided(shape, (distance, *rows.stride())))
    return views


def _continues(stack: Sequence[BlockRows], layer: BlockRows) -> bool:
    last = stack[-1]
    step = _distance(last, layer)
    return (
        last.rows.untyped_storage().data_ptr() == layer.rows.untyped_storage().data_ptr()
        and last.rows.shape == layer.rows.shape
        and last.rows.stride() == layer.rows.stride()
        and step > 0
        and (len(stack) == 1 or step == _distance(stack[-2], last))
    )


def _distance(one: BlockRows, other: BlockRows) -> int:
    return int(other.rows.storage_offset()) - int(one.rows.storage_offset())
