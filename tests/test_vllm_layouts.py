"""KV tensors as rows of bytes: against vLLM's own allocator, in every layout it has."""

# ruff: noqa: E402 — torch and vLLM are optional, so they are asked for first

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvledger.naming import differing_fields
from kvledger.vllm.layouts import (
    BlockRows,
    EngineMemory,
    UnsupportedLayoutError,
    check_groups,
    inspect_engine_memory,
)

HEADS, TOKENS, HEAD_SIZE, LAYERS = 4, 16, 8, 3
CONTENT = 2 * HEAD_SIZE
PAGE_BYTES = HEADS * TOKENS * CONTENT * 4
FULL = FullAttentionSpec(
    block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
)
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    return VllmConfig(
        device_config=DeviceConfig("cpu"), cache_config=CacheConfig(block_size=TOKENS)
    )


@dataclass
class Engine:
    """What a worker hands to its connector, filled with bytes that differ everywhere."""

    tensors: dict[str, torch.Tensor]
    config: KVCacheConfig

    def inspect(self) -> EngineMemory:
        return inspect_engine_memory(self.tensors, self.config)


def build(
    vllm_config: VllmConfig,
    layout: str = "LBHNC",
    spec: KVCacheSpec = FULL,
    kernel_tokens: int | None = None,
    num_blocks: int = 7,
) -> Engine:
    vllm_config.cache_config.kv_cache_layout = layout
    groups = [KVCacheGroupSpec(NAMES, spec)]
    page = spec.page_size_bytes
    memory = page * num_blocks * (1 if isinstance(spec, UniformTypeKVCacheSpecs) else LAYERS)
    config = get_kv_cache_config_from_groups(vllm_config, groups, memory)
    assert config.num_blocks == num_blocks
    sizes = None if kernel_tokens is None else [kernel_tokens]
    tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout], sizes)
    storage = next(iter(tensors.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(1)))
    return Engine(tensors, config)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def rows(memory: EngineMemory) -> list[tuple[tuple[str, ...], int, int]]:
    return [(r.names, r.page_bytes, r.block_stride) for r in memory.groups[0].layers]


def row(memory: EngineMemory, index: int, block: int) -> bytes:
    return memory.groups[0].layers[index].rows[block].numpy().tobytes()


@pytest.mark.parametrize(("layout", "order"), [("LBHNC", (0, 1, 2)), ("LBNHC", (1, 0, 2))])
@pytest.mark.pitfall(4, 49)
def test_block_contiguous_layouts_give_one_row_for_each_layer(vllm_config, layout, order) -> None:
    engine = build(vllm_config, layout)
    memory = engine.inspect()
    assert rows(memory) == [((name,), PAGE_BYTES, PAGE_BYTES) for name in NAMES]
    assert memory.num_blocks == 7
    assert memory.groups[0].block_bytes == LAYERS * PAGE_BYTES
    assert memory.groups[0].part_bytes(5) == 5 * LAYERS * PAGE_BYTES
    for index, name in enumerate(NAMES):
        for block in range(7):
            expected = bytes_of(engine.tensors[name][block].permute(order))
            assert row(memory, index, block) == expected


@pytest.mark.parametrize(("layout", "order"), [("BLHNC", (0, 1, 2)), ("BLNHC", (1, 0, 2))])
@pytest.mark.pitfall(49)
def test_block_outermost_layouts_give_one_row_for_all_layers(vllm_config, layout, order) -> None:
    engine = build(vllm_config, layout)
    memory = engine.inspect()
    assert rows(memory) == [(tuple(NAMES), LAYERS * PAGE_BYTES, LAYERS * PAGE_BYTES)]
    for block in range(7):
        layers = [bytes_of(engine.tensors[name][block].permute(order)) for name in NAMES]
        assert row(memory, 0, block) == b"".join(layers)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
@pytest.mark.pitfall(4)
def test_blocks_in_several_pieces_are_refused_with_the_remedy(vllm_config, layout) -> None:
    with pytest.raises(UnsupportedLayoutError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        build(vllm_config, layout).inspect()


def test_one_head_makes_every_layer_outermost_layout_the_same(vllm_config) -> None:
    spec = replace(FULL, num_kv_heads=1)
    described = [
        build(vllm_config, layout, spec).inspect().describe()
        for layout in ("LBHNC", "LBNHC", "LHBNC")
    ]
    assert described[0] == described[1] == described[2]


@pytest.mark.parametrize(("layout", "order"), [("LBHNC", (0, 1, 2)), ("LBNHC", (1, 0, 2))])
@pytest.mark.pitfall(51)
def test_kernel_blocks_are_presented_as_manager_blocks(vllm_config, layout, order) -> None:
    engine = build(vllm_config, layout, kernel_tokens=4)
    memory = engine.inspect()
    assert engine.tensors[NAMES[0]].shape[0] == 7 * 4
    assert rows(memory) == [((name,), PAGE_BYTES, PAGE_BYTES) for name in NAMES]
    for block in range(7):
        parts = engine.tensors[NAMES[1]][4 * block : 4 * block + 4]
        assert row(memory, 1, block) == b"".join(bytes_of(p.permute(order)) for p in parts)
    whole = build(vllm_config, layout).inspect().describe()
    assert "rank.worker.layout" in differing_fields(memory.describe(), whole)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_padding_is_left_out(vllm_config, layout) -> None:
    spec = replace(FULL, page_size_padded=PAGE_BYTES + 512)
    engine = build(vllm_config, layout, spec)
    memory = engine.inspect()
    stride = (PAGE_BYTES + 512) * (1 if layout == "LBHNC" else LAYERS)
    assert rows(memory) == [((name,), PAGE_BYTES, stride) for name in NAMES]
    for index, name in enumerate(NAMES):
        for block in range(7):
            assert row(memory, index, block) == bytes_of(engine.tensors[name][block])


def test_mla_has_one_head_and_no_values(vllm_config) -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    memory = build(vllm_config, "LBHNC", spec).inspect()
    assert memory.groups[0].block_bytes == LAYERS * 16 * 576 * 2
    assert memory.describe()["rank.worker.layout"] == "bfloat16 N16·C576"


def test_one_group_may_hold_pages_of_several_sizes(vllm_config) -> None:
    small = replace(FULL, head_size=4, head_size_v=4)
    specs = {NAMES[0]: FULL, NAMES[1]: small, NAMES[2]: FULL}
    engine = build(vllm_config, "LBHNC", UniformTypeKVCacheSpecs(16, specs))
    memory = engine.inspect()
    sizes = {names[0]: page_bytes for names, page_bytes, _ in rows(memory)}
    assert sizes == {NAMES[0]: PAGE_BYTES, NAMES[1]: PAGE_BYTES // 2, NAMES[2]: PAGE_BYTES}
    for index, layer in enumerate(memory.groups[0].layers):
        assert row(memory, index, 3) == bytes_of(engine.tensors[layer.names[0]][3])


@pytest.mark.pitfall(50)
def test_layers_that_share_memory_are_moved_once(vllm_config) -> None:
    engine = build(vllm_config)
    plain = engine.inspect()
    engine.tensors["model.layers.9.attn"] = engine.tensors[NAMES[0]]
    assert rows(engine.inspect()) == rows(plain)
    assert engine.inspect().describe() == plain.describe()


def test_a_layer_outside_all_groups_with_its_own_memory_is_refused(vllm_config) -> None:
    engine = build(vllm_config)
    engine.tensors["model.layers.9.attn"] = torch.zeros_like(engine.tensors[NAMES[0]])
    with pytest.raises(UnsupportedLayoutError, match="belongs to no KV-cache group"):
        engine.inspect()


@pytest.mark.pitfall(49)
def test_layers_in_separate_storages(vllm_config) -> None:
    engine = build(vllm_config)
    plain = engine.inspect()
    engine.tensors = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    memory = engine.inspect()
    assert memory.describe() == plain.describe()
    assert [row(memory, i, 2) for i in range(LAYERS)] == [row(plain, i, 2) for i in range(LAYERS)]


def test_rows_are_views_of_the_engine(vllm_config) -> None:
    engine = build(vllm_config)
    memory = engine.inspect()
    memory.groups[0].layers[1].rows[4] = 0
    assert not engine.tensors[NAMES[1]][4].view(torch.uint8).any()
    assert engine.tensors[NAMES[1]][3].view(torch.uint8).any()
    assert isinstance(memory.groups[0].layers[1], BlockRows)


def test_the_description_leaves_the_number_of_blocks_out(vllm_config) -> None:
    few, many = (build(vllm_config, num_blocks=n).inspect().describe() for n in (3, 30))
    assert few == many


@pytest.mark.parametrize(
    ("layout", "spec", "field"),
    [
        ("LBNHC", FULL, "rank.worker.layout"),
        ("LBHNC", replace(FULL, dtype=torch.bfloat16), "worker.dtype"),
        ("LBHNC", replace(FULL, num_kv_heads=2), "rank.worker.block_bytes"),
        ("LBHNC", replace(FULL, block_size=32), "worker.block_tokens"),
        ("LBHNC", replace(FULL, head_size=10, head_size_v=6), "rank.worker.specification"),
        ("BLHNC", FULL, "rank.worker.pages"),
    ],
)
@pytest.mark.pitfall(55)
def test_what_decides_bytes_shows_in_the_description(vllm_config, layout, spec, field) -> None:
    reference = build(vllm_config).inspect().describe()
    other = build(vllm_config, layout, spec).inspect().describe()
    assert field in differing_fields(reference, other)


def test_layer_names_and_their_order_show_in_the_description(vllm_config) -> None:
    engine = build(vllm_config)
    swapped = build(vllm_config)
    swapped.config.kv_cache_groups[0].layer_names = NAMES[::-1]
    swapped.config.kv_cache_tensors[0].layers = NAMES[::-1]
    fields = differing_fields(engine.inspect().describe(), swapped.inspect().describe())
    assert fields == ["rank.worker.layers"]


WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32, sliding_window=64
)
HIDDEN = HiddenStateCacheSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("specs", "sentence"),
    [
        ([FULL, WINDOW], "2 KV-cache groups"),
        ([], "0 KV-cache groups"),
        ([WINDOW], "SlidingWindowSpec"),
        ([HIDDEN], "HiddenStateCacheSpec"),
        ([UniformTypeKVCacheSpecs(16, {NAMES[0]: FULL, NAMES[1]: WINDOW})], "SlidingWindowSpec"),
        ([replace(FULL, non_causal=True)], "both directions"),
    ],
)
@pytest.mark.pitfall(2, 25, 38, 48)
def test_kinds_of_models_that_are_refused(specs, sentence) -> None:
    def names(spec: KVCacheSpec) -> list[str]:
        return list(getattr(spec, "kv_cache_specs", NAMES))

    groups = [KVCacheGroupSpec(names(spec), spec) for spec in specs]
    with pytest.raises(UnsupportedLayoutError, match=sentence):
        check_groups(KVCacheConfig(num_blocks=3, kv_cache_tensors=[], kv_cache_groups=groups))


def test_groups_in_host_memory_are_refused() -> None:
    group = KVCacheGroupSpec(NAMES, FULL, host_resident=True)
    with pytest.raises(UnsupportedLayoutError, match="host memory"):
        check_groups(KVCacheConfig(num_blocks=3, kv_cache_tensors=[], kv_cache_groups=[group]))


def test_tensors_that_contradict_the_configuration_are_refused(vllm_config) -> None:
    engine = build(vllm_config)
    missing = {name: engine.tensors[name] for name in NAMES[1:]}
    with pytest.raises(UnsupportedLayoutError, match="registered no KV tensor"):
        inspect_engine_memory(missing, engine.config)
    fewer = {name: tensor[:5] for name, tensor in engine.tensors.items()}
    with pytest.raises(UnsupportedLayoutError, match="no multiple"):
        inspect_engine_memory(fewer, engine.config)
    halves = {name: tensor[..., : CONTENT // 2].clone() for name, tensor in engine.tensors.items()}
    with pytest.raises(UnsupportedLayoutError, match="vLLM announces"):
        inspect_engine_memory(halves, engine.config)
    overlapping = {
        name: tensor.as_strided(tensor.shape, (8, *tensor.stride()[1:]))
        for name, tensor in engine.tensors.items()
    }
    with pytest.raises(UnsupportedLayoutError, match="overlap"):
        inspect_engine_memory(overlapping, engine.config)
    meta = engine.tensors | {NAMES[2]: torch.empty_like(engine.tensors[NAMES[2]], device="meta")}
    with pytest.raises(UnsupportedLayoutError, match="2 devices"):
        inspect_engine_memory(meta, engine.config)
