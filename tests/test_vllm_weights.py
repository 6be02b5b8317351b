"""Which weights these are: what the digest of a checkpoint notices, and what it leaves out."""

# ruff: noqa: E402 — torch and vLLM are optional, so they are asked for first

from __future__ import annotations

import json
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file

from kvledger.vllm.weights import (
    EVEN_SAMPLES,
    SAMPLE_BYTES,
    WHOLE_FILE_BYTES,
    UnreadableWeightsError,
    digest_weights,
    process_started,
    sample_ranges,
)

Weights = dict[str, "torch.Tensor"]


def small_weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(4)}


def save_model(directory: Path, weights: Weights | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(small_weights() if weights is None else weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "base")


def test_one_value_changed_in_a_small_file(model, tmp_path) -> None:
    assert digest_weights(save_model(tmp_path / "same")) == digest_weights(model)
    weights = small_weights()
    weights["layers.2.weight"][31, 31] += 1e-3
    assert digest_weights(save_model(tmp_path / "other", weights)) != digest_weights(model)


def large_weights(retrained: str = "") -> Weights:
    """Six large tensors and, between them, small ones: 12 times what is read of such a file."""
    weights = {}
    for index in range(6):
        for name, size in ((f"{index}.large", 1 << 19), (f"{index}.small", 300)):
            seed = 1000 if name == retrained else index
            weights[name] = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return weights


@pytest.mark.parametrize("retrained", ["0.large", "3.large", "5.large", "2.small", "5.small"])
def test_a_tensor_trained_anew_shows_in_a_large_file(tmp_path, retrained) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, weights in ((first, large_weights()), (second, large_weights(retrained))):
        directory.mkdir()
        save_file(weights, directory / "model.safetensors")
    size = (first / "model.safetensors").stat().st_size
    assert size == (second / "model.safetensors").stat().st_size > 10 * SAMPLE_BYTES * EVEN_SAMPLES
    assert digest_weights(first).value != digest_weights(second).value


def test_a_large_file_of_another_format_is_sampled_over_its_length(tmp_path) -> None:
    file = tmp_path / "pytorch_model.bin"
    content = bytearray(os.urandom(3 * WHOLE_FILE_BYTES))
    file.write_bytes(content)
    before = digest_weights(tmp_path)
    assert before.bytes == len(content)
    for start in (0, len(content) // 2, len(content) - WHOLE_FILE_BYTES // 8):
        end = start + WHOLE_FILE_BYTES // 8
        file.write_bytes(content[:start] + os.urandom(end - start) + content[end:])
        assert digest_weights(tmp_path) != before
    file.write_bytes(content)
    assert digest_weights(tmp_path) == before


def test_every_file_counts(tmp_path) -> None:
    path = save_model(tmp_path / "model")
    digests = {digest_weights(path).value}
    (path / "model-00002.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    digests.add(digest_weights(path).value)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    digests.add(digest_weights(path).value)
    (path / "hf_quant_config.json").write_text(json.dumps({"kv_cache_quant_algo": "FP8"}))
    digests.add(digest_weights(path).value)
    (path / "part").mkdir()
    save_file(small_weights(5), path / "part" / "model.safetensors")
    digests.add(digest_weights(path).value)
    assert len(digests) == 5
    assert digest_weights(path).files == 3


def test_files_that_vllm_does_not_load_do_not_count(model, tmp_path) -> None:
    path = Path(shutil.copytree(model, tmp_path / "model"))
    (path / "tokenizer.json").write_text("{}")
    (path / "training_args.bin").write_bytes(b"arguments")
    (path / "modeling_other.py").write_text("pass")
    (path / ".cache").mkdir()
    (path / ".cache" / "half.safetensors").write_bytes(b"half")
    (path / "original" / "shards").mkdir(parents=True)
    (path / "original" / "shards" / "consolidated.00.pth").write_bytes(b"again")
    ignored = ["original/**/*"]
    assert digest_weights(path, ignore_patterns=ignored) == digest_weights(model)
    assert digest_weights(path).value != digest_weights(model).value
    with_code = digest_weights(path, ignore_patterns=ignored, with_code=True)
    assert with_code.value != digest_weights(model).value


def test_a_file_in_the_hub_cache_counts_by_its_own_hash_too(tmp_path) -> None:
    def snapshot(name: str, content: bytes) -> Path:
        blob = tmp_path / name[:4] / "blobs" / name
        blob.parent.mkdir(parents=True)
        blob.write_bytes(content)
        directory = tmp_path / name[:4] / "snapshots" / "main"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").symlink_to(blob)
        return directory

    content = os.urandom(1000)
    one = digest_weights(snapshot("a" * 64, content), unchanged_since=0.0)
    other = digest_weights(snapshot("b" * 64, content), unchanged_since=0.0)
    assert one.value != other.value
    not_hashed = snapshot("cafe", content)  # git's name of a small file: 40 digits, not SHA-256
    with pytest.raises(UnreadableWeightsError, match="changed after the engine had started"):
        digest_weights(not_hashed, unchanged_since=0.0)


def test_a_file_that_changed_after_the_start_is_not_trusted(tmp_path) -> None:
    path = save_model(tmp_path / "model")
    changed = (path / "model.safetensors").stat().st_ctime
    digest_weights(path, unchanged_since=changed + 1)
    os.utime(path / "model.safetensors", (0, 0))  # an old date does not help
    with pytest.raises(UnreadableWeightsError, match="changed after the engine had started"):
        digest_weights(path, unchanged_since=changed - 1)


def test_when_this_process_started() -> None:
    assert 0 < time.time() - process_started() < 24 * 3600
    assert abs(process_started() - process_started()) < 0.1


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", os.urandom(5000)]
)
def test_a_broken_safetensors_file_is_just_bytes(tmp_path, content) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    before = digest_weights(tmp_path)
    assert before.bytes == len(content)
    (tmp_path / "model.safetensors").write_bytes(content + b"\1")
    assert digest_weights(tmp_path) != before


def test_nothing_to_read_is_said(tmp_path) -> None:
    with pytest.raises(UnreadableWeightsError, match="holds no weight files"):
        digest_weights(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(UnreadableWeightsError, match="cannot read the weights"):
        digest_weights(tmp_path)


def test_links_to_directories_are_followed_once(model, tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    save_file(small_weights(5), tmp_path / "elsewhere" / "model.safetensors")
    path = Path(shutil.copytree(model, tmp_path / "model"))
    (path / "again").symlink_to(path)
    assert digest_weights(path) == digest_weights(model)
    (path / "part").symlink_to(tmp_path / "elsewhere")
    assert digest_weights(path).files == 2


@pytest.mark.parametrize("size", [1, WHOLE_FILE_BYTES, WHOLE_FILE_BYTES + 1, 10**9, 10**12])
def test_samples_are_in_the_file_and_reach_its_ends(size) -> None:
    tensors = [(1000, 1001), (size // 2, size // 2 + 100_000)] if size > 10**6 else []
    ranges = sample_ranges(size, tensors)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(start < end for start, end in ranges)
    assert all(one[1] < other[0] for one, other in pairwise(ranges))
    if size <= WHOLE_FILE_BYTES:
        assert ranges == [(0, size)]
        return
    assert len(ranges) >= EVEN_SAMPLES
    gaps = [b[0] - a[1] for a, b in pairwise(ranges)]
    assert max(gaps) <= size / (EVEN_SAMPLES - 1)
    for start, end in tensors:
        assert any(a <= start < b for a, b in ranges)
        assert any(a < end <= b for a, b in ranges)


def test_no_bytes_no_samples() -> None:
    assert sample_ranges(0) == []
