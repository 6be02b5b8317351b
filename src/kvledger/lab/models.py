"""Small random Llama models, written to disk in the form in which vLLM loads any other.

A model made here has no meaning, but its greedy output depends on every token of its prompt:
weights are scaled up so that answers vary instead of settling on one constant token. That is what
makes "the same output with and without a cache" a test and not a tautology.

Written without transformers: two JSON files, a byte-level tokenizer and one safetensors file.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 320
"""256 byte tokens, the special tokens, and a rest that no text maps to."""

_SPECIAL_TOKENS = ("<eos>", "<bos>", "<pad>")
_EMBEDDING_SCALE = 8.0
_WEIGHT_SCALE = 2.0
_FORMAT = 1
"""Part of a cached model's key; raised when the same spec comes to mean other files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that decides the bytes of a model.

    Attributes:
        layers, heads, kv_heads, head_dim, hidden, intermediate: the Llama shape.
        dtype: of the weights on disk and of the engine: "float32", "bfloat16" or "float16".
        seed: of the random weights.
        rope_theta: base of the rotary embedding; another value changes the KV, not the weights.
        max_positions: longest sequence, in tokens.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    dtype: str = "float32"
    seed: int = 0
    rope_theta: float = 10_000.0
    max_positions: int = 8_192

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token leaves behind, keys and values of all layers."""
        item_bytes = 4 if self.dtype == "float32" else 2
        return self.layers * 2 * self.kv_heads * self.head_dim * item_bytes


SMALL = ModelSpec(layers=4, heads=8, kv_heads=4, head_dim=32, hidden=256, intermediate=512)
"""4 KiB of KV per token: quick, for tests of correctness."""

WIDE = ModelSpec(layers=16, heads=8, kv_heads=8, head_dim=64, hidden=256, intermediate=256)
"""64 KiB of KV per token from a 40 MB model, for the demo."""

WIDEST = replace(WIDE, layers=32)
"""128 KiB of KV per token, as much as Llama-3.1-8B in bfloat16, for the bench."""


def write_model(directory: Path, spec: ModelSpec) -> Path:
    """Write the model into ``directory``, over whatever model was there, and return it.

    Takes a second or so. A reader may meet a mixture of the old and the new while it is written.
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(spec), indent=2))
    _write_tokenizer(directory)
    save_file(dict(_weights(spec)), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def cached_model(cache: Path, spec: ModelSpec) -> Path:
    """Directory of this model below ``cache``; written at the first call, complete or not there."""
    key = json.dumps([_FORMAT, asdict(spec)], sort_keys=True)
    directory = cache / f"model-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="model-", suffix=".part", dir=cache))
    try:
        write_model(scratch, spec)
        try:
            os.rename(scratch, directory)
        except OSError:
            # Another process was quicker; the same spec gives the same bytes.
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def random_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of ``tokens`` byte tokens; equal seeds give prompts that share their beginning."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(tokens)]


def _config(spec: ModelSpec) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 256,
        "bos_token_id": 257,
        "pad_token_id": 258,
        "torch_dtype": spec.dtype,
    }


def _write_tokenizer(directory: Path) -> None:
    """A tokenizer whose tokens are bytes: any text maps to one token for each of its bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("eos_token", "bos_token", "pad_token"), _SPECIAL_TOKENS, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _weights(spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Named weights, drawn in a fixed order from one generator."""
    import torch

    generator = torch.Generator().manual_seed(spec.seed)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        spec.dtype
    ]

    def matrix(rows: int, columns: int, scale: float = _WEIGHT_SCALE) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * (scale / columns**0.5)).to(dtype)

    ones = torch.ones(spec.hidden, dtype=dtype)
    yield "model.embed_tokens.weight", matrix(VOCABULARY, spec.hidden, _EMBEDDING_SCALE)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        yield f"{prefix}.self_attn.q_proj.weight", matrix(query, spec.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(kv, spec.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(kv, spec.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(spec.hidden, query)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(spec.intermediate, spec.hidden)
        yield f"{prefix}.mlp.up_proj.weight", matrix(spec.intermediate, spec.hidden)
        yield f"{prefix}.mlp.down_proj.weight", matrix(spec.hidden, spec.intermediate)
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
    yield "model.norm.weight", ones.clone()
    yield "lm_head.weight", matrix(VOCABULARY, spec.hidden)
