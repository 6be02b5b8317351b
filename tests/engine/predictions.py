"""How many tokens a real engine must find in the cache, from lengths alone.

Written down here once more, independently of the package: a full block is stored when all its
tokens' KV exists, and found again by whoever asks for the same tokens from the start.
"""

from __future__ import annotations

BLOCK = 32
"""Tokens in a block of every engine of these tests."""

LENGTHS = (1, 31, 32, 33, 255, 256, 257, 511, 512, 513, 1_024, 3_840)
"""Prompt lengths around the edges of blocks, of chunks and of steps of 512 tokens."""


def hit_after_reset(prompt_tokens: int, *, unit: int = BLOCK) -> int:
    """Tokens of a repeated prompt that come from outside once the engine has forgotten it.

    ``unit`` is the unit of storage: a block, or ``chunk_tokens``. A whole prompt may hit; vLLM
    then computes its last token once more.
    """
    return prompt_tokens // unit * unit


def local_hit(prompt_tokens: int) -> int:
    """Tokens of a repeated prompt that the engine still holds: never the whole prompt."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


def hit_of_next_turn(prompt_tokens: int, generated_tokens: int, *, unit: int = BLOCK) -> int:
    """Tokens of the next turn that the turn before has left behind.

    The last generated token was never fed back, so it has no KV.
    """
    return (prompt_tokens + generated_tokens - 1) // unit * unit


def hit_of_common_prefix(common_tokens: int, *, unit: int = BLOCK) -> int:
    """Tokens of a prompt that only begins like one that was stored."""
    return common_tokens // unit * unit
