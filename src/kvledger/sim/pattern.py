"""The bytes a fake model writes: one value for each (prefix, position, layer, rank, lane).

A model's KV at position *p* depends on every token up to *p*. So the pattern is derived from a
running state, a seed plus the sum over the prefix of a hash of (token, position): two requests
have the same bytes at a position only if their whole prefixes, salts, adapters and weights agree.

A *lane* is eight bytes of one token's slot in one layer. The *checksum* of a prefix weighs every
lane of every position with its own odd number, so a swapped, shifted, stale or foreign block
changes it. It is what the fake model reads, and what its next token is computed from.

All arithmetic is modulo 2**64. Pure: numpy only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

MASK = (1 << 64) - 1
_TOKEN_FACTOR = 0x9E3779B97F4A7C15
_POSITION_FACTOR = 0xD1B54A32D192ED03
_ROUND_ONE = 0xBF58476D1CE4E5B9
_ROUND_TWO = 0x94D049BB133111EB
_SCALAR_LIMIT = 2
"""Up to this many tokens Python integers beat numpy's call overhead."""


def mix(values: U64) -> U64:
    """Splitmix64's finaliser, element by element; a bijection that maps 0 to 0."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(_ROUND_ONE)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_ROUND_TWO)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix_int(value: int) -> int:
    """:func:`mix` for one Python integer in [0, 2**64)."""
    value ^= value >> 30
    value = value * _ROUND_ONE & MASK
    value ^= value >> 27
    value = value * _ROUND_TWO & MASK
    return value ^ (value >> 31)


def seed_of(*parts: str) -> int:
    """64-bit digest of some texts (weights, salt, adapter); order and borders matter."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def _constants(label: str, *shape: int) -> U64:
    """An array of distinct pseudo-random numbers, the same in every process."""
    count = int(np.prod(shape))
    start = np.uint64(seed_of(label))
    return mix(start + np.arange(1, count + 1, dtype=np.uint64)).reshape(shape)


@dataclass(frozen=True, slots=True)
class PatternShape:
    """How many lanes the KV of one token has.

    Attributes:
        ranks: workers that hold a share of each token's KV.
        groups: KV-cache groups.
        layers: layers in each group.
        lanes: eight-byte units of one token in one layer of one rank.
        max_tokens: longest sequence that can be weighed.
    """

    ranks: int
    groups: int
    layers: int
    lanes: int
    max_tokens: int


class Pattern:
    """Constants of one shape; immutable.

    Attributes:
        keys: [ranks, groups, layers, lanes], what tells the lanes of one position apart.
        lane_weights: [layers, lanes], odd; the share of a lane in a slot's sum.
        position_weights: [max_tokens], odd; the share of a position in a checksum.
    """

    def __init__(self, shape: PatternShape) -> None:
        self.shape = shape
        self.keys = _constants("keys", shape.ranks, shape.groups, shape.layers, shape.lanes)
        one = np.uint64(1)
        self.lane_weights = _constants("lanes", shape.layers, shape.lanes) | one
        self.position_weights = _constants("positions", shape.max_tokens) | one
        self._scalar_weights: list[int] = self.position_weights.tolist()
        self._scalar_lanes = [
            [
                (int(self.keys[rank, group, layer, lane]), int(self.lane_weights[layer, lane]))
                for rank in range(shape.ranks)
                for layer in range(shape.layers)
                for lane in range(shape.lanes)
            ]
            for group in range(shape.groups)
        ]

    def values(self, states: U64, rank: int, group: int) -> U64:
        """Lanes of some positions: [len(states), layers, lanes]."""
        return mix(states[:, None, None] ^ self.keys[rank, group][None])

    def extend_states(self, before: int, tokens: Sequence[int], first_position: int) -> U64:
        """Running states of ``tokens``, which stand at ``first_position`` and after.

        Args:
            before: the state of the position before, or the request's seed at position 0.
        """
        positions = np.arange(first_position, first_position + len(tokens), dtype=np.uint64)
        steps = np.asarray(tokens, dtype=np.uint64) * np.uint64(_TOKEN_FACTOR)
        steps += positions * np.uint64(_POSITION_FACTOR) + np.uint64(1)
        return np.cumsum(mix(steps), dtype=np.uint64) + np.uint64(before)

    def weighed_sums(self, states: U64, group: int, first_position: int) -> U64:
        """Share of each position in the checksum, over ranks and layers: [len(states)]."""
        total = np.zeros(len(states), dtype=np.uint64)
        for rank in range(self.shape.ranks):
            weighed = self.values(states, rank, group) * self.lane_weights[None]
            total += weighed.sum(axis=(1, 2), dtype=np.uint64)
        total *= self.position_weights[first_position : first_position + len(states)]
        return total

    def extend_state(self, before: int, token: int, position: int) -> int:
        """:meth:`extend_states` for one token."""
        step = token * _TOKEN_FACTOR + position * _POSITION_FACTOR + 1
        return (before + mix_int(step & MASK)) & MASK

    def weighed_sum(self, state: int, group: int, position: int) -> int:
        """:meth:`weighed_sums` for one state."""
        lanes = self._scalar_lanes[group]
        total = sum([mix_int(state ^ key) * weight for key, weight in lanes])
        return total * self._scalar_weights[position] & MASK


class Prefix:
    """The tokens of one request and what the KV of each of them has to be.

    Tokens are appended as the model samples them (or drafts them) and cut back when they are
    rejected. States and checksums follow; both are kept for every position, since a request can
    fall back to any of them.
    """

    def __init__(self, pattern: Pattern, seed: int, tokens: Sequence[int]) -> None:
        self._pattern = pattern
        self.seed = seed
        self.tokens: list[int] = []
        self._states = np.zeros(max(64, len(tokens) + 16), dtype=np.uint64)
        self._checksums = np.zeros((pattern.shape.groups, len(self._states)), dtype=np.uint64)
        self.append(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end. Modifies the prefix."""
        start = len(self.tokens)
        if start + len(tokens) > len(self._states):
            self._grow(start + len(tokens))
        if len(tokens) <= _SCALAR_LIMIT:
            for token in tokens:
                self._append_one(token)
            return
        before = int(self._states[start - 1]) if start else self.seed
        states = self._pattern.extend_states(before, tokens, start)
        end = start + len(tokens)
        self._states[start:end] = states
        for group, checksums in enumerate(self._checksums):
            np.cumsum(self._pattern.weighed_sums(states, group, start), out=checksums[start:end])
            if start:
                checksums[start:end] += checksums[start - 1]
        self.tokens.extend(tokens)

    def _append_one(self, token: int) -> None:
        position = len(self.tokens)
        before = int(self._states[position - 1]) if position else self.seed
        state = self._pattern.extend_state(before, token, position)
        self._states[position] = state
        for group, checksums in enumerate(self._checksums):
            total = int(checksums[position - 1]) if position else 0
            total += self._pattern.weighed_sum(state, group, position)
            checksums[position] = total & MASK
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget all tokens from position ``length`` on."""
        del self.tokens[length:]

    def reseed(self, seed: int) -> None:
        """The same tokens under other weights: every state and checksum changes."""
        tokens, self.tokens, self.seed = self.tokens, [], seed
        self.append(tokens)

    def states(self, start: int, end: int) -> U64:
        """States of positions [start, end); a view that later appends leave valid."""
        return self._states[start:end]

    def checksum(self, group: int, start: int, end: int) -> int:
        """Checksum over positions [start, end) of one group; 0 when empty."""
        if end <= start:
            return 0
        total = int(self._checksums[group, end - 1])
        return (total - int(self._checksums[group, start - 1])) & MASK if start else total

    def _grow(self, needed: int) -> None:
        size = max(needed, 2 * len(self._states))
        states = np.zeros(size, dtype=np.uint64)
        states[: len(self._states)] = self._states
        checksums = np.zeros((len(self._checksums), size), dtype=np.uint64)
        checksums[:, : len(self._states)] = self._checksums
        self._states, self._checksums = states, checksums


def next_token(checksum: int, vocabulary: int) -> int:
    """The token a model that read this checksum samples; greedy, so always the same."""
    return mix_int((checksum + _TOKEN_FACTOR) & MASK) % vocabulary
