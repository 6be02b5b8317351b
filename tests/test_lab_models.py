"""Models on disk: their size, that they are what the spec says, and the cache of them.

That vLLM loads them and that their output varies is tested in tests/engine/test_lab.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvledger.lab.models import (
    SMALL,
    WIDE,
    WIDEST,
    ModelSpec,
    cached_model,
    random_prompt,
    write_model,
)

TINY = ModelSpec(layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, intermediate=16)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("spec", "kib"),
    [(SMALL, 4), (replace(SMALL, dtype="bfloat16"), 2), (WIDE, 64), (WIDEST, 128)],
)
def test_kv_bytes_per_token(spec: ModelSpec, kib: int) -> None:
    assert spec.kv_bytes_per_token() == kib * 1024


def test_the_same_spec_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", TINY)
    other = write_model(tmp_path / "other", TINY)
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def test_another_seed_changes_only_the_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path, TINY)
    before, config = weights(directory), (directory / "config.json").read_bytes()
    write_model(directory, replace(TINY, seed=1))
    assert weights(directory) != before
    assert len(weights(directory)) == len(before)
    assert (directory / "config.json").read_bytes() == config


def test_another_rope_theta_changes_only_the_config(tmp_path: Path) -> None:
    directory = write_model(tmp_path, TINY)
    before = weights(directory)
    write_model(directory, replace(TINY, rope_theta=500_000.0))
    assert weights(directory) == before
    assert json.loads((directory / "config.json").read_text())["rope_theta"] == 500_000.0


def test_the_cache_writes_each_spec_once(tmp_path: Path) -> None:
    first = cached_model(tmp_path, TINY)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert cached_model(tmp_path, TINY) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert cached_model(tmp_path, replace(TINY, seed=1)) != first
    assert len(list(tmp_path.iterdir())) == 2, "nothing half-written is left"


def test_prompts_of_one_seed_share_their_beginning() -> None:
    assert random_prompt(1, 100)[:40] == random_prompt(1, 40)
    assert random_prompt(1, 40) != random_prompt(2, 40)
