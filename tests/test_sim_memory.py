"""The KV tensors of a simulated worker: every layout, and the canaries."""

from __future__ import annotations

import pytest

import sim_support  # noqa: F401  (quiet logs)
from kvledger.sim.memory import RankMemory, build_cache_config, layer_names
from kvledger.sim.model import EngineOptions

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def make(layout: str = "LBHNC", windows: tuple[int | None, ...] = (None,)) -> RankMemory:
    options = EngineOptions(
        layout=layout, num_blocks=5, layers=3, heads=2, block_size=4, windows=windows
    )
    return RankMemory(build_cache_config(options), options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lanes_and_tensors_are_the_same_bytes(layout: str) -> None:
    memory = make(layout)
    names = layer_names(EngineOptions(layers=3), 0)
    assert list(memory.tensors) == names
    memory.lanes[:] = 0
    memory.lanes[1, 3, 1, 2] = 0x3F8000003F800000  # two float32 ones
    for index, name in enumerate(names):
        tensor = memory.tensors[name]
        assert tuple(tensor.shape) == (5, 2, 4, 2)
        assert tensor.sum().item() == (2.0 if index == 1 else 0.0)
    assert memory.tensors[names[1]][3, 1, 2].tolist() == [1.0, 1.0]
    storages = {tensor.untyped_storage().data_ptr() for tensor in memory.tensors.values()}
    assert len(storages) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_canaries_surround_the_blocks(layout: str) -> None:
    memory = make(layout)
    assert memory.broken_guards() == []
    memory.lanes[:, 1:] = 7
    assert memory.broken_guards() == []
    memory.lanes[2, 0, 1, 3] = 7
    assert len(memory.broken_guards()) == 8
    memory = make(layout)
    memory.buffer[0] = 0
    memory.buffer[-1] = 0
    assert memory.broken_guards() == [0, len(memory.buffer) - 1]


def test_groups_overlay_each_other() -> None:
    memory = make(windows=(None, 8))
    options = EngineOptions(layers=3, windows=(None, 8))
    first, second = (memory.tensors[layer_names(options, group)[0]] for group in (0, 1))
    assert first.data_ptr() == second.data_ptr()
    assert len(memory.tensors) == 6


def test_zero_and_copy_move_whole_blocks() -> None:
    memory = make()
    memory.lanes[:, 1] = 11
    memory.copy(1, 3)
    memory.zero([1])
    assert (memory.lanes[:, 3] == 11).all()
    assert (memory.lanes[:, 1] == 0).all()
    assert memory.broken_guards() == []
