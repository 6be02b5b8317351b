"""The byte oracle: what lies in the KV tensors, compared with what has to lie there.

The expectation comes from tokens alone (:mod:`kvledger.sim.pattern`), never from what was
written or stored. Every difference is reported with request, position, block, layer and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvledger.sim.forward import expected_token
from kvledger.sim.memory import LANE_BYTES, RankMemory, layer_names
from kvledger.sim.model import EngineOptions
from kvledger.sim.pattern import U64, Pattern, Prefix


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One slot with wrong bytes; of each block, layer and rank the first is reported.

    Attributes:
        owner: request id, or "cached block" for one that only the prefix cache holds.
        position: token position in the request.
        expected: the first wrong lane, in hex.
    """

    owner: str
    rank: int
    layer: str
    position: int
    block_id: int
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"{self.owner}: position {self.position} (block {self.block_id}), {self.layer}, "
            f"rank {self.rank}: expected {self.expected}, found {self.found}"
        )


class OracleError(AssertionError):
    """Bytes that are not what their tokens stand for, or a broken canary.

    Attributes:
        mismatches: the places, as far as they are known; at most a few.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch] = ()) -> None:
        super().__init__("\n  ".join([message, *map(str, mismatches[:8])]))
        self.mismatches = tuple(mismatches)


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What one hashed block has to hold: the states of its positions."""

    states: U64
    first_position: int


class Oracle:
    """Compares the tensors of all ranks of one engine with the pattern. Modifies nothing."""

    def __init__(
        self, options: EngineOptions, pattern: Pattern, memories: Sequence[RankMemory]
    ) -> None:
        self._options = options
        self._pattern = pattern
        self._memories = memories
        self._contents: dict[bytes, BlockContent] = {}

    def compare(
        self, owner: str, prefix: Prefix, tables: Sequence[Sequence[int]], start: int, end: int
    ) -> list[Mismatch]:
        """Check positions [start, end) of a request through its block tables.

        Positions that a sliding window has left behind, and null blocks, are passed over.
        """
        found: list[Mismatch] = []
        size = self._options.block_size
        for group, (window, table) in enumerate(zip(self._options.windows, tables, strict=True)):
            seen = start if window is None else max(start, end - window + 1)
            positions = np.arange(seen, end)
            blocks = np.array(table[: -(-end // size)], dtype=np.int64)[positions // size]
            kept = blocks != 0
            found += self._compare_slots(
                owner, group, prefix.states(seen, end)[kept], positions[kept], blocks[kept]
            )
        return found

    def compare_blocks(
        self, owner: str, states: U64, first_position: int, blocks: Sequence[int], group: int = 0
    ) -> list[Mismatch]:
        """Check whole blocks: states of their tokens, which begin at ``first_position``."""
        size = self._options.block_size
        positions = np.arange(first_position, first_position + len(states))
        ids = np.repeat(np.array(blocks, dtype=np.int64), size)
        return self._compare_slots(owner, group, states, positions, ids)

    def remember(self, block_hashes: Sequence[bytes], prefix: Prefix) -> None:
        """Note what the blocks of a request's hashes hold, for :meth:`sweep`."""
        size = self._options.block_size
        for index, block_hash in enumerate(block_hashes[: len(prefix) // size]):
            if block_hash not in self._contents:
                start = index * size
                states = prefix.states(start, start + size).copy()
                self._contents[block_hash] = BlockContent(states, start)

    def sweep(self, hashed: Iterable[tuple[int, int, bytes]]) -> list[Mismatch]:
        """Check blocks that only the prefix cache holds: (block id, group, hash).

        Contents of hashes that are not among them are forgotten.
        """
        found: list[Mismatch] = []
        kept: dict[bytes, BlockContent] = {}
        for block_id, group, block_hash in hashed:
            content = self._contents.get(block_hash)
            if content is None:
                continue
            kept[block_hash] = content
            size = len(content.states)
            positions = np.arange(content.first_position, content.first_position + size)
            blocks = np.full(size, block_id)
            found += self._compare_slots("cached block", group, content.states, positions, blocks)
        self._contents = kept
        return found

    def forget_contents(self) -> None:
        """After a reset of the prefix cache no block holds what was remembered."""
        self._contents.clear()

    def check_canaries(self) -> None:
        """Raise :class:`OracleError` if a guard byte or the null block was written."""
        for rank, memory in enumerate(self._memories):
            broken = memory.broken_guards()
            if broken:
                raise OracleError(
                    f"{len(broken)} guard or null-block bytes of rank {rank} were written, "
                    f"the first at offset {broken[0]} of {len(memory.buffer)}"
                )

    def check_output(self, request_id: str, prefix: Prefix, num_prompt: int) -> None:
        """Raise unless every generated token is the one that its prefix gives."""
        for length in range(num_prompt, len(prefix)):
            expected = expected_token(prefix, self._options.windows, length)
            if prefix.tokens[length] != expected:
                raise OracleError(
                    f"{request_id}: output token {length - num_prompt} is "
                    f"{prefix.tokens[length]}, a cold run gives {expected}"
                )

    def _compare_slots(
        self, owner: str, group: int, states: U64, positions: Any, blocks: Any
    ) -> list[Mismatch]:
        if not len(states):
            return []
        slots = positions % self._options.block_size
        found = []
        for rank, memory in enumerate(self._memories):
            expected = self._pattern.values(states, rank, group)
            actual = memory.lanes[:, blocks, :, slots]
            if np.array_equal(actual, expected):
                continue
            seen = set()
            for row, layer, lane in np.argwhere(actual != expected).tolist():
                if (int(blocks[row]), layer) in seen:
                    continue
                seen.add((int(blocks[row]), layer))
                found.append(
                    Mismatch(
                        owner,
                        rank,
                        layer_names(self._options, group)[layer],
                        int(positions[row]),
                        int(blocks[row]),
                        f"{int(expected[row, layer, lane]):0{2 * LANE_BYTES}x}",
                        f"{int(actual[row, layer, lane]):0{2 * LANE_BYTES}x}",
                    )
                )
        return found
