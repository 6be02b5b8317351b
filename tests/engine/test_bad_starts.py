"""Settings that cannot be right: the engine does not start, and says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from predictions import BLOCK

from kvledger.lab.engine import EngineError, EngineProcess, connector_config

pytestmark = pytest.mark.full

SENTENCES = {
    "a chunk that is no multiple of the block": (
        {"kvledger.chunk_tokens": 100},
        {},
        "kvledger.chunk_tokens must be a multiple of the engine's block size 32, found 100; "
        "96 would do",
    ),
    "an unknown key": (
        {"kvledger.soket": "/nowhere"},
        {},
        "unknown key 'kvledger.soket'; did you mean \"kvledger.socket\"?",
    ),
    "a random hash root": (
        {},
        {"prefix_caching_hash_algo": "xxhash"},
        "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED",
    ),
    "nothing wrong": ({}, {}, ""),
}
"""The connector's options, the engine's arguments, and what is said; vLLM's own configuration is
made from them, and the connector's check of it is called as at the engine's start."""

CHECK = """
import json, sys
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvledger.errors import ConfigurationError
from kvledger.vllm.assembly import prepare

model, block, cases = json.loads(sys.argv[1])
said = {}
for name, (options, arguments) in cases.items():
    connector = {
        "kv_connector": "KVLedgerConnector",
        "kv_connector_module_path": "kvledger.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    config = EngineArgs(
        model=model, block_size=block, enforce_eager=True, kv_transfer_config=connector, **arguments
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=block, num_kv_heads=4, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    try:
        prepare(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))
        said[name] = ""
    except ConfigurationError as error:
        said[name] = str(error)
print("\\n" + json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(small_model: Path) -> Mapping[str, str]:
    """What the connector says to each of the settings."""
    cases = {name: (options, arguments) for name, (options, arguments, _) in SENTENCES.items()}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONHASHSEED", None)
    check = subprocess.run(
        [sys.executable, "-c", CHECK, json.dumps([str(small_model), BLOCK, cases])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stderr
    return json.loads(check.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", SENTENCES)
def test_a_setting_that_cannot_be_right_is_refused(said: Mapping[str, str], case: str) -> None:
    sentence = SENTENCES[case][2]
    assert sentence in said[case]
    assert bool(sentence) == bool(said[case])


def test_an_engine_that_is_refused_does_not_start(small_model: Path, tmp_path: Path) -> None:
    connector = connector_config(tmp_path / "none.sock", options={"chunk_tokens": 100})
    log_path = tmp_path / "engine.log"
    engine = EngineProcess(small_model, block_size=BLOCK, connector=connector, log_path=log_path)
    with pytest.raises(EngineError, match="the engine has ended"):
        engine.wait_ready()
    assert SENTENCES["a chunk that is no multiple of the block"][2] in log_path.read_text()
