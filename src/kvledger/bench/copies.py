"""Copy rates: the transfer that CPU engines use, a real arena, and a plain copy beside them.

Needs torch and vLLM for the transfer. All is done by one thread, as in an engine.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvledger.arena import Arena, map_arena
from kvledger.bench.machine import BenchError
from kvledger.bench.results import CopyRates

if TYPE_CHECKING:
    from kvledger.vllm.layouts import EngineMemory

Bytes = NDArray[np.uint8]

LAYERS = 32
ROWS_BYTES = (32 << 10, 256 << 10)
"""Blocks of 16 tokens of a small model's layer, and of 64 tokens of a large one's."""
COPIED_BYTES = 256 << 20
"""More than any cache of a processor holds, so that memory is what is measured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """KV tensors of an engine: ``layers`` rows of ``row_bytes`` are one block.

    Attributes:
        blocks: blocks to copy; a block is a chunk.
    """

    row_bytes: int
    layers: int
    blocks: int

    @property
    def object_bytes(self) -> int:
        return self.row_bytes * self.layers

    @property
    def copied_bytes(self) -> int:
        return self.object_bytes * self.blocks


def copies_can_be_measured() -> bool:
    """Whether the packages that the transfer needs are there."""
    return importlib.util.find_spec("torch") is not None and (
        importlib.util.find_spec("vllm") is not None
    )


def measure_copies(
    *,
    copied_bytes: int = COPIED_BYTES,
    rounds: int = 9,
    announce: Callable[[str], None] = lambda _: None,
) -> list[CopyRates]:
    """Rates for small and large rows; all buffers are pre-faulted, but for the first pass.

    Raises:
        BenchError: a copy did not arrive as it was sent.
        ArenaError: there is no memory for an arena.
    """
    rates: list[CopyRates] = []
    for row_bytes in ROWS_BYTES:
        announce(f"copies of rows of {row_bytes >> 10} KiB")
        blocks = max(1, copied_bytes // (row_bytes * LAYERS))
        rates.append(copy_rates(Shape(row_bytes, LAYERS, blocks), rounds))
    return rates


def copy_rates(shape: Shape, rounds: int) -> CopyRates:
    """Best rates of ``rounds`` rounds, in each a plain copy, a store and a load in turn.

    Raises:
        BenchError, ArenaError: see :func:`measure_copies`.
    """
    from kvledger.vllm.transfer import HostTransfer

    memory, engine_bytes = _engine_memory(shape)
    generator = np.random.default_rng(0)
    pattern = generator.integers(0, 256, size=shape.copied_bytes, dtype=np.uint8)
    # Blocks and slots in no order: an engine's free list is shuffled after a while.
    block_ids = generator.permutation(np.arange(1, shape.blocks + 1, dtype=np.int32))[:, None]
    slots = generator.permutation(np.arange(shape.blocks, dtype=np.uint64))
    offsets = slots * np.uint64(shape.object_bytes)
    target = np.zeros_like(pattern)
    target.fill(1)
    arena = Arena(pages=1, page_bytes=shape.copied_bytes)
    try:
        arena.instantiate(0)
        first_plain = _rate(shape, lambda: np.copyto(_mapped(arena), pattern))
        mapping = _mapped(arena)
        transfer = HostTransfer(memory, mapping)

        def store() -> None:
            transfer.store(0, block_ids, offsets, 0)

        def load() -> None:
            transfer.load(0, block_ids, offsets, 0)

        first_store = _rate(shape, store)
        other = HostTransfer(memory, _mapped(arena))
        first_load = _rate(shape, lambda: other.load(0, block_ids, offsets, 0))
        _check_round_trip(engine_bytes, mapping, pattern, store, load)
        plain: list[float] = []
        stores: list[float] = []
        loads: list[float] = []
        for _ in range(rounds):
            plain.append(_rate(shape, lambda: np.copyto(target, pattern)))
            stores.append(_rate(shape, store))
            loads.append(_rate(shape, load))
    finally:
        arena.close()
    return CopyRates(
        row_bytes=shape.row_bytes,
        layers=shape.layers,
        copied_bytes=shape.copied_bytes,
        rounds=rounds,
        plain=max(plain),
        store=max(stores),
        load=max(loads),
        first_plain=first_plain,
        first_store=first_store,
        first_load=first_load,
    )


def _mapped(arena: Arena) -> Bytes:
    """A new mapping, of which this process has touched no page."""
    return np.frombuffer(map_arena(arena.fd, arena.arena_bytes), dtype=np.uint8)


def _rate(shape: Shape, copy: Callable[[], object]) -> float:
    start = time.perf_counter()
    copy()
    return shape.copied_bytes / (time.perf_counter() - start)


def _engine_memory(shape: Shape) -> tuple[EngineMemory, Bytes]:
    """KV tensors of one rank, layer after layer, all pages touched; and all their bytes but those
    of block 0, as ``(layers, blocks, row_bytes)``."""
    import torch

    from kvledger.vllm.layouts import BlockRows, EngineMemory, GroupLayout

    buffer = torch.ones((shape.layers, shape.blocks + 1, shape.row_bytes), dtype=torch.uint8)
    group = GroupLayout(
        index=0,
        layers=tuple(BlockRows((f"layer {n}",), buffer[n]) for n in range(shape.layers)),
        block_tokens=16,
        specification="",
        views="",
        dtypes="uint8",
        digest="",
    )
    memory = EngineMemory((group,), num_blocks=shape.blocks + 1, device=buffer.device)
    return memory, buffer.numpy()[:, 1:]


def _check_round_trip(
    engine_bytes: Bytes,
    mapping: Bytes,
    pattern: Bytes,
    store: Callable[[], None],
    load: Callable[[], None],
) -> None:
    """Store a pattern, wipe it from the engine, load it: rates of copies that copy nothing would
    be excellent."""
    expected = pattern.reshape(engine_bytes.shape)
    np.copyto(engine_bytes, expected)
    mapping.fill(0)
    store()
    engine_bytes.fill(0)
    load()
    if not np.array_equal(engine_bytes, expected):
        raise BenchError("what was stored and loaded is not what was there before")
