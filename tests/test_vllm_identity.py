"""What makes two engines share: weights by content, and every field of the configuration."""

# ruff: noqa: E402 — torch and vLLM are optional, so they are asked for first

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from safetensors.torch import save_file
from transformers import LlamaConfig
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core import kv_cache_utils

from kvledger.naming import Descriptor, differing_fields, namespace_id
from kvledger.vllm.identity import (
    AS_LOADED,
    IdentityError,
    WeightsEpochs,
    content_fields,
    hashing_fields,
    lora_refusal,
    refusals,
    scheduler_fields,
    weights_fields,
)

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "dtype": "float32",
    "architectures": ["LlamaForCausalLM"],
}
Weights = dict[str, "torch.Tensor"]


def small_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(4)}


def save_model(directory: Path, weights: Weights | None = None, **changes: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    LlamaConfig(**(CONFIG | changes)).save_pretrained(directory)
    save_file(small_weights() if weights is None else weights, directory / "model.safetensors")
    return directory


def vllm_config(directory: Path, **changes: object) -> VllmConfig:
    """A configuration as an engine holds it, without an engine."""
    model_options = {"dtype": "float32", "max_model_len": 2048} | changes.pop("model", {})
    return VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True, **model_options),
        cache_config=CacheConfig(block_size=16, **changes.pop("cache", {})),
        scheduler_config=SchedulerConfig(
            max_model_len=model_options["max_model_len"],
            is_encoder_decoder=False,
            max_num_batched_tokens=8192,
        ),
        device_config=DeviceConfig("cpu"),
        **changes,
    )


def describe(config: VllmConfig, **options: object) -> Descriptor:
    return content_fields(config) | scheduler_fields(config, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def base(model) -> Descriptor:
    return describe(vllm_config(model))


# ---------------------------------------------------------------- weights


def test_the_same_bytes_at_two_paths_are_the_same_weights(model, base, tmp_path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere" / "copy"))
    link = tmp_path / "link"
    link.symlink_to(copy)
    for path in (copy, link):
        other = describe(vllm_config(path))
        assert differing_fields(base, other) == []
        assert namespace_id(base) == namespace_id(other)
        assert other["display.model"] != base["display.model"]


@pytest.mark.pitfall(55)
def test_a_checkpoint_saved_over_another_is_another(base, tmp_path) -> None:
    path = save_model(tmp_path / "model")
    assert differing_fields(base, describe(vllm_config(path))) == []
    weights = small_weights()
    weights["layers.2.weight"][31, 31] += 1e-3
    save_model(path, weights)
    os.utime(path / "model.safetensors", (0, 0))
    assert differing_fields(base, describe(vllm_config(path))) == ["weights.content"]


@pytest.mark.parametrize("load_format", ["dummy", "runai_streamer", "tensorizer", "my_loader"])
def test_weights_that_cannot_be_read_are_private_with_one_warning(
    model, caplog, load_format
) -> None:
    model_config = vllm_config(model).model_config
    load_config = LoadConfig(load_format=load_format)
    with caplog.at_level(logging.WARNING, logger="kvledger"):
        starts = [weights_fields(model_config, load_config)["weights.content"] for _ in range(2)]
    assert starts[0] != starts[1]
    assert all(value.startswith("private:") and len(value) == 40 for value in starts)
    warnings = [r.getMessage() for r in caplog.records if r.name == "kvledger"]
    assert [load_format in message for message in warnings] == [True, True]
    caplog.clear()
    named = [
        weights_fields(model_config, load_config, model_revision=revision)["weights.content"]
        for revision in ("v1", "v1", "v2")
    ]
    assert named[0] == named[1] != named[2]
    assert not caplog.records


def test_a_revision_names_versions_of_one_model(model, tmp_path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    named = [
        weights_fields(
            vllm_config(path).model_config, LoadConfig(load_format="dummy"), model_revision="v1"
        )["weights.content"]
        for path in (model, other)
    ]
    assert named[0] != named[1]


def test_readable_weights_are_read_whatever_the_revision_says(model, tmp_path) -> None:
    other = save_model(tmp_path / "other", small_weights(9))
    one, two = (
        weights_fields(vllm_config(path).model_config, LoadConfig(), model_revision="v1")
        for path in (model, other)
    )
    assert differing_fields(one, two) == ["weights.content"]


def test_a_snapshot_in_the_hub_cache_is_found_offline(model, tmp_path) -> None:
    repository = tmp_path / "cache" / "models--someone--something"
    shutil.copytree(model, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model_config = vllm_config(model).model_config
    expected = weights_fields(model_config, LoadConfig())
    model_config.model = "someone/something"
    load_config = LoadConfig(download_dir=str(tmp_path / "cache"))
    assert weights_fields(model_config, load_config) == expected
    model_config.model = "someone/missing"
    assert weights_fields(model_config, load_config)["weights.content"].startswith("private:")


def test_the_digest_can_be_taken_on_another_thread(model, base) -> None:
    results: list[Descriptor] = []
    config = vllm_config(model)
    thread = threading.Thread(target=lambda: results.append(content_fields(config)))
    thread.start()
    thread.join(timeout=60)
    assert results
    assert results[0]["weights.content"] == base["weights.content"]


# ---------------------------------------------------------------- configuration

DIFFERENCES: dict[str, tuple[dict[str, object], list[str]]] = {
    "dtype": ({"model": {"dtype": "bfloat16"}}, ["model.dtype"]),
    "rope theta": (
        {
            "model": {
                "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
            }
        },
        ["model.config.rope_parameters.rope_theta"],
    ),
    "another override": (
        {"model": {"hf_overrides": {"rms_norm_eps": 1e-3}}},
        ["model.config.rms_norm_eps"],
    ),
    "implementation": ({"model": {"model_impl": "vllm"}}, ["model.implementation"]),
    "cache dtype": ({"cache": {"cache_dtype": "fp8"}}, ["cache.dtype"]),
    "hashing": ({"cache": {"prefix_caching_hash_algo": "sha256_cbor"}}, ["hash.algorithm"]),
    "load format": (
        {"load_config": LoadConfig(load_format="safetensors")},
        ["weights.load_format"],
    ),
    "tensor parallel": (
        {"parallel_config": ParallelConfig(tensor_parallel_size=2)},
        ["parallel.tensor"],
    ),
    "pipeline parallel": (
        {"parallel_config": ParallelConfig(pipeline_parallel_size=2)},
        ["parallel.pipeline"],
    ),
    "adapters": ({"lora_config": LoRAConfig(max_lora_rank=8)}, ["adapters"]),
    "additional": ({"additional_config": {"knob": 1}}, ["additional"]),
    # Nothing in these decides a byte.
    "length": ({"model": {"max_model_len": 4096}}, []),
    "name": ({"model": {"served_model_name": "x"}}, []),
    "seed": ({"model": {"seed": 3}}, []),
    "memory": ({"cache": {"gpu_memory_utilization": 0.5}}, []),
    "eager": ({"model": {"enforce_eager": True}}, []),
}


def changed(case: str) -> dict[str, object]:
    changes = DIFFERENCES[case][0]
    return {k: dict(v) if isinstance(v, dict) else v for k, v in changes.items()}


@pytest.mark.parametrize("case", DIFFERENCES)
@pytest.mark.pitfall(55)
def test_a_difference_is_named_where_it_is(model, base, case) -> None:
    other = describe(vllm_config(model, **changed(case)))
    assert differing_fields(base, other) == DIFFERENCES[case][1]


def test_a_difference_in_the_checkpoints_configuration(base, tmp_path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    other = save_model(tmp_path / "other", rope_parameters=rope)
    fields = differing_fields(base, describe(vllm_config(other)))
    assert fields == ["model.config.rope_parameters.rope_theta"]


def test_block_sizes(model, base) -> None:
    config = vllm_config(model)
    config.cache_config.block_size = 32
    assert differing_fields(base, describe(config)) == ["cache.block_tokens", "hash.block_tokens"]
    fields = scheduler_fields(vllm_config(model), hash_block_tokens=8)
    assert fields["hash.block_tokens"] == "8"


def test_the_length_matters_where_it_chooses_the_rope_factors(tmp_path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 1024,
        "factor": 4.0,
    }
    path = save_model(tmp_path / "model", rope_parameters=rope)
    lengths = {
        n: describe(vllm_config(path, model={"max_model_len": n})) for n in (512, 1024, 2048)
    }
    assert differing_fields(lengths[512], lengths[1024]) == []
    assert differing_fields(lengths[1024], lengths[2048]) == ["model.rope_factors"]


def test_the_operators_words(model, base) -> None:
    for option, field in (
        ("namespace", "namespace"),
        ("model_revision", "weights.operator_revision"),
        ("weights_version", "weights.operator_version"),
        ("epoch", "weights.epoch"),
    ):
        other = describe(vllm_config(model), **{option: "word"})
        assert differing_fields(base, other) == [field]


def test_the_vllm_version_is_minor_only(model, monkeypatch) -> None:
    import vllm

    def version(text: str) -> str:
        monkeypatch.setattr(vllm, "__version__", text)
        return scheduler_fields(vllm_config(model))["engine.vllm"]

    assert version("0.32.0") == version("0.32.7") == version("0.32.1+cpu") == "0.32"
    assert version("0.33.0") == "0.33"
    assert version("0.33.1.dev12+gabc") != version("0.33.1.dev13+gdef")


def test_a_draft_model_with_kv_cache_is_part_of_the_name(model, base, tmp_path) -> None:
    def with_draft(path: Path) -> Descriptor:
        config = vllm_config(model)
        speculative = SpeculativeConfig(
            model=str(path),
            method="draft_model",
            num_speculative_tokens=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        return describe(vllm_config(model, speculative_config=speculative))

    draft = save_model(tmp_path / "draft", small_weights(1))
    fields = with_draft(draft)
    assert all(field.startswith("draft.") for field in differing_fields(base, fields))
    assert {"draft.method", "draft.weights.content"} <= set(differing_fields(base, fields))
    retrained = save_model(tmp_path / "retrained", small_weights(2))
    assert differing_fields(fields, with_draft(retrained)) == ["draft.weights.content"]


def test_drafts_without_kv_cache_change_nothing(model, base) -> None:
    config = vllm_config(model)
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        prompt_lookup_max=3,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    other = describe(vllm_config(model, speculative_config=speculative))
    assert differing_fields(base, other) == []


# ---------------------------------------------------------------- epochs and hashing


def test_epochs() -> None:
    one, other = WeightsEpochs(), WeightsEpochs()
    assert one.current == other.current == AS_LOADED == "0"
    values = [one.reset(), one.reset(), other.reset()]
    assert len({*values, AS_LOADED}) == 4
    assert all(len(value) == 32 and int(value, 16) >= 0 for value in values)
    assert one.current == values[1]


def test_a_named_version_stands_for_one_update_only() -> None:
    one, other = WeightsEpochs("step-100"), WeightsEpochs("step-100")
    assert one.current == AS_LOADED
    assert one.reset() == other.reset()
    assert one.reset() != other.reset()


@pytest.fixture
def no_root(monkeypatch) -> Callable[[str | None], None]:
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)

    def set_seed(seed: str | None) -> None:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)

    set_seed(None)
    return set_seed


@pytest.mark.usefixtures("no_root")
def test_the_root_of_the_hash_chain_is_refused_before_vllm_has_set_it(model) -> None:
    config = vllm_config(model)
    with pytest.raises(IdentityError, match="not initialised"):
        hashing_fields(config)
    kv_cache_utils.init_none_hash(sha256)
    assert hashing_fields(config) == {"hash.root": bytes(kv_cache_utils.NONE_HASH).hex()}


@pytest.mark.pitfall(55)
def test_the_root_follows_the_seed_and_the_algorithm(model, no_root) -> None:
    config, roots = vllm_config(model), []
    for seed, function in ((None, sha256), (None, sha256), ("1", sha256), (None, sha256_cbor)):
        no_root(seed)
        kv_cache_utils.init_none_hash(function)
        roots.append(hashing_fields(config)["hash.root"])
    assert roots[0] == roots[1]
    assert len(set(roots)) == 3


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_random_root_is_refused(model, no_root, algorithm) -> None:
    config = vllm_config(model)
    config.cache_config.prefix_caching_hash_algo = algorithm
    kv_cache_utils.init_none_hash(sha256)
    with pytest.raises(IdentityError, match="PYTHONHASHSEED"):
        hashing_fields(config)
    assert ["PYTHONHASHSEED" in sentence for sentence in refusals(config)] == [True]
    no_root("7")
    assert hashing_fields(config)
    assert refusals(config) == []


# ---------------------------------------------------------------- refusals


def test_an_ordinary_engine_is_not_refused(model) -> None:
    for parallel in (ParallelConfig(), ParallelConfig(tensor_parallel_size=2)):
        config = vllm_config(model, parallel_config=parallel)
        assert refusals(config) == []
        assert lora_refusal(config) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nnodes": 2, "world_size": 2}, "spans 2 nodes"),
        ({"distributed_executor_backend": "ray", "world_size": 2}, "Ray may place"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism of 2"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism of 2"),
    ],
)
def test_engines_that_are_refused(model, changes, sentence) -> None:
    config = vllm_config(model)
    for name, value in changes.items():
        setattr(config.parallel_config, name, value)
    found = refusals(config)
    assert len(found) == 1
    assert sentence in found[0]


@pytest.mark.pitfall(55)
def test_measured_scales_are_refused(model, monkeypatch) -> None:
    config = vllm_config(model)
    monkeypatch.setattr(type(config.cache_config), "calculate_kv_scales", True, raising=False)
    assert ["scales" in sentence for sentence in refusals(config)] == [True]
    assert scheduler_fields(config)["cache.scales"] == "measured"


def test_requests_with_an_adapter_are_refused(model) -> None:
    config = vllm_config(model, lora_config=LoRAConfig(max_lora_rank=8))
    assert "adapter" in (lora_refusal(config) or "")
    assert refusals(config) == []
