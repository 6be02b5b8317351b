"""Copies between KV tensors and the arena: every byte against an independent model of both."""

# ruff: noqa: E402 — torch and vLLM are optional, so they are asked for first

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvledger.vllm.layouts import EngineMemory, inspect_engine_memory
from kvledger.vllm.metadata import SKIP_BLOCK
from kvledger.vllm.transfer import DeviceTransfer, HostTransfer, Transfer, TransferError

LAYERS, NUM_BLOCKS, ARENA_BYTES = 3, 24, 1 << 18
FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float16)
PAGE = 2 * 4 * 16 * 2
PADDED = replace(FULL, page_size_padded=PAGE + 64)
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]

Bytes = NDArray[np.uint8]
Maker = Callable[[EngineMemory, Bytes], Transfer]

# Two parts of 768 bytes fit the small buffer, so that staging in slices is exercised.
MAKERS: dict[str, Maker] = {
    "host": HostTransfer,
    "device": DeviceTransfer,
    "device in slices": lambda memory, arena: DeviceTransfer(memory, arena, staging_bytes=1600),
    "device, part by part": lambda memory, arena: DeviceTransfer(memory, arena, staging_bytes=1),
}


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig("cpu"), cache_config=CacheConfig(block_size=4))


ONE_ENGINE = pytest.mark.parametrize("memory", ["layers apart"], indirect=True)
"""For checks that do not depend on how the tensors lie."""


@pytest.fixture(params=["layers apart", "storages apart", "blocks outermost", "padded", "uneven"])
def memory(request, vllm_config) -> EngineMemory:
    layout = {"blocks outermost": "BLHNC", "padded": "BLHNC"}.get(request.param, "LBHNC")
    spec = PADDED if request.param == "padded" else FULL
    vllm_config.cache_config.kv_cache_layout = layout
    size = spec.page_size_bytes * LAYERS * NUM_BLOCKS
    groups = [KVCacheGroupSpec(NAMES, spec)]
    config = get_kv_cache_config_from_groups(vllm_config, groups, size)
    tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    if request.param == "storages apart":
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if request.param == "uneven":  # the distances between layers differ: no single stack
        shape, strides, count = tensors[NAMES[0]].shape, tensors[NAMES[0]].stride(), NUM_BLOCKS
        buffer = torch.zeros(5 * count * strides[0], dtype=torch.float16)
        starts = dict(zip(NAMES, (0, 2, 3), strict=True))
        tensors = {
            name: buffer.as_strided(shape, strides, start * count * strides[0])
            for name, start in starts.items()
        }
    return inspect_engine_memory(tensors, config)


@pytest.fixture(params=MAKERS)
def make(request) -> Maker:
    return MAKERS[request.param]


@dataclass
class World:
    """The engine's whole memory, canaries and padding included, and the arena, as flat bytes."""

    memory: EngineMemory
    arena: Bytes

    @classmethod
    def of(cls, memory: EngineMemory, seed: int = 7) -> World:
        world = cls(memory, np.zeros(ARENA_BYTES, np.uint8))
        generator = np.random.default_rng(seed)
        for view in [world.arena, *world.storages().values()]:
            view[:] = generator.integers(0, 256, view.size, dtype=np.uint8)
        return world

    def storages(self) -> dict[int, Bytes]:
        """Every distinct storage of the engine as one flat view, keyed by its address."""
        views = {}
        for layer in self.memory.groups[0].layers:
            storage = layer.rows.untyped_storage()
            views[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        return views

    def snapshot(self) -> tuple[Bytes, dict[int, Bytes]]:
        return self.arena.copy(), {key: view.copy() for key, view in self.storages().items()}

    def places(
        self, block_ids: Sequence[Sequence[int]], offsets: Sequence[int], part_offset: int
    ) -> list[tuple[int, int, int, int]]:
        """Byte by byte where things belong: (arena start, storage, engine start, length).

        Written down from the documented order (layer by layer, then block by block), with plain
        sums and no view of the code under test.
        """
        places = []
        for ids, offset in zip(block_ids, offsets, strict=True):
            position = offset + part_offset
            for layer in self.memory.groups[0].layers:
                base, length = layer.rows.storage_offset(), layer.page_bytes
                for block in ids:
                    start = base + block * layer.block_stride
                    storage = layer.rows.untyped_storage().data_ptr()
                    if block != SKIP_BLOCK:
                        places.append((position, storage, start, length))
                    position += length
        return places

    def assert_equals(self, arena: Bytes, storages: dict[int, Bytes]) -> None:
        np.testing.assert_array_equal(self.arena, arena)
        for key, view in self.storages().items():
            np.testing.assert_array_equal(view, storages[key])


def arrays(
    block_ids: Sequence[Sequence[int]], offsets: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    return np.array(block_ids, np.int32), np.array(offsets, np.uint64)


CASES = {
    "one block": ([[1]], [0], 0),
    "last block, end of the arena": ([[NUM_BLOCKS - 1]], [ARENA_BYTES - LAYERS * PAGE], 0),
    "blocks in a row": ([[3], [4], [5], [6], [7]], [4096 * i for i in range(5)], 256),
    "blocks and slots shuffled": ([[9], [2], [23], [1]], [40960, 8192, 0, 122880], 64),
    "chunks of four in a row": ([[4, 5, 6, 7], [8, 9, 10, 11]], [65536, 16384], 0),
    "chunks of three shuffled": ([[4, 9, 5], [1, 2, 3], [8, 7, 6]], [50000, 20001, 90003], 11),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.pitfall(49)
def test_store_moves_exactly_these_bytes(memory, make, case) -> None:
    block_ids, offsets, part_offset = CASES[case]
    world = World.of(memory)
    arena, storages = world.snapshot()
    for position, storage, start, length in world.places(block_ids, offsets, part_offset):
        arena[position : position + length] = storages[storage][start : start + length]
    copied = make(memory, world.arena).store(0, *arrays(block_ids, offsets), part_offset)
    assert copied == len(block_ids) * len(block_ids[0]) * LAYERS * PAGE
    world.assert_equals(arena, storages)


SKIPPING = {
    "skip the only block": ([[-1]], [0], 0),
    "skip some chunks": ([[3], [-1], [4], [-1]], [0, 8192, 4096, 16384], 64),
    "skip the first blocks": ([[-1, -1, 7, 8], [9, 10, 11, 12]], [65536, 16384], 0),
    "skip within and at the end": ([[5, -1, 7], [8, 9, -1]], [50001, 7], 3),
}


@pytest.mark.parametrize("case", CASES | SKIPPING)
@pytest.mark.pitfall(49)
def test_load_moves_exactly_these_bytes(memory, make, case) -> None:
    block_ids, offsets, part_offset = (CASES | SKIPPING)[case]
    world = World.of(memory)
    arena, storages = world.snapshot()
    for position, storage, start, length in world.places(block_ids, offsets, part_offset):
        storages[storage][start : start + length] = arena[position : position + length]
    copied = make(memory, world.arena).load(0, *arrays(block_ids, offsets), part_offset)
    blocks = [block for ids in block_ids for block in ids if block != SKIP_BLOCK]
    assert copied == len(blocks) * LAYERS * PAGE
    world.assert_equals(arena, storages)


def test_what_one_transfer_stores_the_other_loads(memory) -> None:
    world = World.of(memory)
    ids, offsets = arrays([[3, 5], [8, 2]], [1024, 131072])
    HostTransfer(memory, world.arena).store(0, ids, offsets, 128)
    expected = [layer.rows[[3, 5, 8, 2]].clone() for layer in memory.groups[0].layers]
    targets, _ = arrays([[11, 12], [20, 19]], [0, 0])
    DeviceTransfer(memory, world.arena).load(0, targets, offsets, 128)
    for layer, before in zip(memory.groups[0].layers, expected, strict=True):
        assert torch.equal(layer.rows[[11, 12, 20, 19]], before)


@ONE_ENGINE
def test_no_chunks_move_nothing(memory, make) -> None:
    world = World.of(memory)
    before = world.snapshot()
    transfer = make(memory, world.arena)
    ids, offsets = np.empty((0, 2), np.int32), np.empty(0, np.uint64)
    assert transfer.store(0, ids, offsets, 0) == transfer.load(0, ids, offsets, 0) == 0
    world.assert_equals(*before)


@ONE_ENGINE
def test_part_bytes(memory, make) -> None:
    transfer = make(memory, World.of(memory).arena)
    assert transfer.part_bytes(0, 1) == LAYERS * PAGE
    assert transfer.part_bytes(0, 16) == 16 * LAYERS * PAGE
    with pytest.raises(TransferError, match="groups are 0 to 0"):
        transfer.part_bytes(1, 1)


PART = 2 * LAYERS * PAGE
REFUSED = {
    "null block": ([[1, 2], [0, 3]], [0, 4096], 0, "null block"),
    "negative block": ([[1, 2], [-2, 3]], [0, 4096], 0, "found -2"),
    "block beyond the engine": ([[1, 2], [3, NUM_BLOCKS]], [0, 4096], 0, f"to {NUM_BLOCKS}"),
    "slot beyond the arena": ([[1, 2], [3, 4]], [0, ARENA_BYTES - PART + 1], 0, "leaves the arena"),
    "part beyond the arena": ([[1, 2], [3, 4]], [0, ARENA_BYTES - PART], 1, "leaves the arena"),
    "offset that would wrap": ([[1, 2], [3, 4]], [0, 2**64 - 1], 2, "leaves the arena"),
    "negative part offset": ([[1, 2], [3, 4]], [0, 4096], -1, "leaves the arena"),
    "fewer offsets": ([[1, 2], [3, 4]], [0], 0, "one offset for each chunk"),
    "empty chunks": ([[], []], [0, 4096], 0, "one offset for each chunk"),
}


@ONE_ENGINE
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.pitfall(47)
def test_what_is_out_of_bounds_is_refused_before_any_byte_moves(
    memory, make, case, direction
) -> None:
    block_ids, offsets, part_offset, sentence = REFUSED[case]
    world = World.of(memory)
    before = world.snapshot()
    transfer = make(memory, world.arena)
    with pytest.raises(TransferError, match=sentence):
        getattr(transfer, direction)(0, *arrays(block_ids, offsets), part_offset)
    world.assert_equals(*before)


@ONE_ENGINE
def test_a_store_cannot_skip_blocks(memory, make) -> None:
    world = World.of(memory)
    before = world.snapshot()
    with pytest.raises(TransferError, match="found -1"):
        make(memory, world.arena).store(0, *arrays([[1, SKIP_BLOCK]], [0]), 0)
    world.assert_equals(*before)


@ONE_ENGINE
def test_wrong_types_of_arrays_are_refused(memory, make) -> None:
    transfer = make(memory, World.of(memory).arena)
    ids, offsets = arrays([[1]], [0])
    with pytest.raises(TransferError, match="int32"):
        transfer.store(0, ids.astype(np.int64), offsets, 0)
    with pytest.raises(TransferError, match="uint64"):
        transfer.load(0, ids, offsets.astype(np.int64), 0)
    with pytest.raises(TransferError, match="groups are"):
        transfer.store(2, ids, offsets, 0)


@ONE_ENGINE
def test_an_arena_that_cannot_be_written_is_refused(memory, make) -> None:
    with pytest.raises(TransferError, match="read-only"):
        make(memory, np.frombuffer(bytes(4096), np.uint8))
    with pytest.raises(TransferError, match="flat array of bytes"):
        make(memory, np.zeros((64, 64), np.uint8))


@ONE_ENGINE
def test_host_transfer_wants_tensors_in_host_memory(memory) -> None:
    elsewhere = replace(memory, device=torch.device("meta"))
    with pytest.raises(TransferError, match="host memory"):
        HostTransfer(elsewhere, np.zeros(4096, np.uint8))
