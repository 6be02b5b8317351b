"""The fake model runner: keeps its own request states, writes KV, reads it back, samples.

It knows only what a real model runner is told through ``SchedulerOutput``, and what it sampled
itself. A forward pass writes the pattern of every scheduled token into the slots its block table
names, then reads the whole context of every request back from the KV tensors. Where the bytes
read are not the pattern's, everything computed from them is wrong too, as in a real model:
the layers above the first get other bytes, and the sampled token is another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvledger.sim.memory import RankMemory
from kvledger.sim.model import VOCABULARY, EngineOptions
from kvledger.sim.pattern import MASK, U64, Pattern, Prefix, mix, next_token

INVALID_TOKEN = 1 << 31
"""Stands for a draft position that has no draft (-1 in the scheduler's output)."""


@dataclass(slots=True)
class RunnerRequest:
    """What a worker remembers of one request.

    Attributes:
        prefix: prompt and every token sampled so far.
        num_prompt: prompt tokens.
        blocks: the block table, one list for each KV-cache group.
        valid: leading positions whose KV was computed from final tokens.
        drafts: tokens proposed for the next step.
    """

    request_id: str
    prefix: Prefix
    num_prompt: int
    blocks: list[list[int]]
    valid: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Share:
    """One request's part of one step.

    Attributes:
        start: first position that is computed.
        count: positions that are computed, drafts included.
        known: tokens that are final; the positions from here on hold drafts.
        samples: whether the known tokens are used up, so that a token is sampled.
        ends: where the reads end: the context before the step, then one read for each position
            that samples.
    """

    request: RunnerRequest
    start: int
    count: int
    known: int
    samples: bool
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What one forward pass gave.

    Attributes:
        sampled: request id → tokens, in scheduling order; empty for a partial prefill.
        misread: requests whose context held other bytes than their tokens stand for.
    """

    sampled: dict[str, list[int]]
    misread: tuple[str, ...]


class FakeModelRunner:
    """Executes scheduler outputs, in the order in which they were scheduled."""

    def __init__(
        self,
        options: EngineOptions,
        pattern: Pattern,
        memories: Sequence[RankMemory],
        prefix_of: Callable[[str], Prefix],
        rng: random.Random,
    ) -> None:
        self.requests: dict[str, RunnerRequest] = {}
        self._options = options
        self._pattern = pattern
        self._memories = memories
        self._prefix_of = prefix_of
        self._rng = rng
        weights = pattern.lane_weights.reshape(options.layers, 1, options.heads, 1)
        self._lane_weights = weights

    # ---- state ------------------------------------------------------------------------------

    def update_states(self, output: Any) -> None:
        """Follow one ``SchedulerOutput``: forget, zero, copy, learn. No KV is computed."""
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for memory in self._memories:
            if output.new_block_ids_to_zero:
                memory.zero(output.new_block_ids_to_zero)
            for source, target in output.kv_cache_block_copies or ():
                memory.copy(source, target)
        for new in output.scheduled_new_reqs:
            self._learn_new(new)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            tokens = cached.all_token_ids.get(request_id)
            if tokens is not None:
                _set_tokens(request.prefix, tokens)
            outputs = cached.num_output_tokens[index]
            if outputs < len(request.prefix) - request.num_prompt:
                request.prefix.truncate(request.num_prompt + outputs)
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.blocks = [list(ids) for ids in new_blocks]
                request.drafts = []
            elif new_blocks is not None:
                for ids, added in zip(request.blocks, new_blocks, strict=True):
                    ids.extend(added)

    def _learn_new(self, new: Any) -> None:
        blocks = [list(ids) for ids in new.block_ids]
        known = self.requests.get(new.req_id)
        prompt = len(new.prompt_token_ids)
        if known is not None:  # resumed (model runner 2), or a session with its next input
            tokens = (
                new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
            )
            _set_tokens(known.prefix, tokens)
            known.blocks, known.drafts, known.num_prompt = blocks, [], prompt
            return
        prefix = self._prefix_of(new.req_id)
        self.requests[new.req_id] = RunnerRequest(new.req_id, prefix, prompt, blocks)

    # ---- one step ---------------------------------------------------------------------------

    def forward(self, output: Any) -> ForwardResult:
        """Compute every scheduled token of one step and sample where a prefix is complete."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = output.scheduled_spec_decode_tokens
        shares = [
            self._share(self.requests[request_id], computed[request_id], count, drafts)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        self._write(shares)
        found = self._read(shares)
        expected = self._expected(shares)
        misread: tuple[str, ...] = ()
        if found != expected:
            misread = _differing(shares, found, expected)
            found = self._spread(shares, found, expected)
        sampled = {}
        position = 0
        for share in shares:
            reads = found[position : position + len(share.ends)]
            position += len(share.ends)
            sampled[share.request.request_id] = self._sample(share, reads)
        return ForwardResult(sampled, misread)

    def propose_drafts(self, result: ForwardResult) -> dict[str, list[int]]:
        """Draft tokens for every request that sampled; right with ``draft_acceptance``."""
        proposals = {}
        for request_id, tokens in result.sampled.items():
            request = self.requests[request_id]
            request.drafts = self._draft(request.prefix) if tokens else []
            proposals[request_id] = request.drafts
        return proposals

    def _share(
        self, request: RunnerRequest, computed: int, count: int, drafts: dict[str, list[int]]
    ) -> _Share:
        """Where a request starts in this step; appends its drafts to the prefix for now.

        ``computed`` runs ahead of the truth while rejections are unknown to the scheduler. The
        last token sampled is always the first one to be fed.
        """
        prefix = request.prefix
        known = len(prefix)
        start = min(computed, known - 1)
        share = _Share(request, start, count, known, False)
        placeholders = drafts.get(request.request_id)
        num_drafts = len(placeholders) if placeholders else 0
        share.samples = start + count - num_drafts >= known
        if placeholders:
            if -1 in placeholders:
                own = request.drafts[:num_drafts]
                placeholders = own + [INVALID_TOKEN] * (num_drafts - len(own))
            prefix.append(placeholders)
        share.ends.append(start)
        if share.samples:
            share.ends.extend(range(known, known + num_drafts + 1))
        return share

    def _write(self, shares: Sequence[_Share], taint: Sequence[int] | None = None) -> None:
        """Write the pattern of every share; ``taint`` alters the layers above the first."""
        size = self._options.block_size
        positions = [range(share.start, share.start + share.count) for share in shares]
        slots = [position % size for part in positions for position in part]
        states = np.concatenate(
            [share.request.prefix.states(part.start, part.stop)
             for share, part in zip(shares, positions, strict=True)]
        )  # fmt: skip
        for group in range(len(self._options.windows)):
            blocks = [
                share.request.blocks[group][position // size]
                for share, part in zip(shares, positions, strict=True)
                for position in part
            ]
            if 0 in blocks:
                raise AssertionError("a scheduled token has the null block in its table")
            for rank, memory in enumerate(self._memories):
                values = self._pattern.values(states, rank, group)
                if taint is not None:
                    counts = [share.count for share in shares]
                    marks = mix(np.repeat(np.array(taint, dtype=np.uint64), counts))
                    values[:, 1:] ^= marks[:, None, None]
                memory.lanes[:, blocks, :, slots] = values

    def _read(self, shares: Sequence[_Share]) -> list[int]:
        """Checksums of every range of every share, summed over groups and ranks."""
        size = self._options.block_size
        total: U64 | None = None
        for group, window in enumerate(self._options.windows):
            ids: list[int] = []
            begins: list[int] = []
            ends: list[int] = []
            weights = []
            for share in shares:
                base = len(ids) * size
                used = -(-(share.start + share.count) // size)
                ids += share.request.blocks[group][:used]
                weights.append(self._pattern.position_weights[: used * size])
                for index, end in enumerate(share.ends):
                    begins.append(base + _begin(window, end, index))
                    ends.append(base + end)
            sums = self._slot_sums(ids)
            sums *= np.concatenate(weights)
            running = np.zeros(len(sums) + 1, dtype=np.uint64)
            np.cumsum(sums, out=running[1:])
            part = running[ends] - running[begins]
            total = part if total is None else total + part
        assert total is not None
        found: list[int] = total.tolist()
        return found

    def _slot_sums(self, ids: list[int]) -> U64:
        """Lane-weighed sums of all slots of some blocks, over all ranks: [len(ids) * tokens]."""
        pool = len(ids) > self._options.num_blocks
        total: U64 | None = None
        for memory in self._memories:
            lanes = memory.lanes if pool else memory.lanes[:, ids]
            sums = (lanes * self._lane_weights).sum(axis=(0, 2), dtype=np.uint64)
            total = sums if total is None else total + sums
        assert total is not None
        return (total[ids] if pool else total).reshape(-1)

    def _expected(self, shares: Sequence[_Share]) -> list[int]:
        """What :meth:`_read` finds if every byte is right."""
        windows = list(enumerate(self._options.windows))
        return [
            sum(
                share.request.prefix.checksum(group, _begin(window, end, index), end)
                for group, window in windows
            )
            & MASK
            for share in shares
            for index, end in enumerate(share.ends)
        ]

    def _spread(self, shares: Sequence[_Share], found: list[int], expected: list[int]) -> list[int]:
        """Let wrong context spoil what is computed from it; return what is read afterwards.

        Requests that share a block in one step spoil each other, so this repeats until nothing
        changes (at most once for each request).
        """
        marks = [0] * len(shares)
        for _ in range(len(shares) + 1):
            deltas = []
            position = 0
            for share in shares:
                deltas.append((found[position] - expected[position]) & MASK)
                position += len(share.ends)
            if deltas == marks:
                break
            marks = deltas
            self._write(shares, marks)
            found = self._read(shares)
        return found

    def _sample(self, share: _Share, reads: list[int]) -> list[int]:
        """Accept drafts while they agree with what is sampled; fix the prefix accordingly."""
        prefix = share.request.prefix
        if not share.samples:
            prefix.truncate(share.known)
            share.request.valid = share.start + share.count
            return []
        drafts = prefix.tokens[share.known :]
        prefix.truncate(share.known)
        tokens = []
        for index, checksum in enumerate(reads[1:]):
            tokens.append(next_token(checksum, VOCABULARY))
            if index >= len(drafts) or drafts[index] != tokens[index]:
                break
        prefix.append(tokens)
        share.request.valid = len(prefix) - 1
        return tokens

    def _draft(self, prefix: Prefix) -> list[int]:
        length = len(prefix)
        for _ in range(self._options.drafts):
            token = expected_token(prefix, self._options.windows)
            if self._rng.random() >= self._options.draft_acceptance:
                token = (token + 1 + self._rng.randrange(VOCABULARY - 1)) % VOCABULARY
            prefix.append([token])
        drafts = prefix.tokens[length:]
        prefix.truncate(length)
        return drafts


def expected_token(prefix: Prefix, windows: Sequence[int | None], length: int | None = None) -> int:
    """The token that follows the first ``length`` tokens (all of them by default)."""
    end = len(prefix) if length is None else length
    total = sum(
        prefix.checksum(group, _begin(window, end, 1), end) for group, window in enumerate(windows)
    )
    return next_token(total & MASK, VOCABULARY)


def _differing(shares: Sequence[_Share], found: list[int], expected: list[int]) -> tuple[str, ...]:
    """Requests of which some read did not give what it should."""
    wrong = []
    position = 0
    for share in shares:
        end = position + len(share.ends)
        if found[position:end] != expected[position:end]:
            wrong.append(share.request.request_id)
        position = end
    return tuple(wrong)


def _begin(window: int | None, end: int, index: int) -> int:
    """First position of a read that ends before ``end``.

    The query at ``end - 1`` sees ``window`` tokens, itself included. Read 0 is the context of a
    query that stands at ``end`` itself, so one token less of it is seen.
    """
    if window is None:
        return 0
    return max(0, end - window + (index == 0))


def _set_tokens(prefix: Prefix, tokens: Sequence[int]) -> None:
    """Make the prefix hold exactly ``tokens``: what the scheduler says wins."""
    if prefix.tokens == tokens:
        return
    shared = 0
    for mine, theirs in zip(prefix.tokens, tokens, strict=False):
        if mine != theirs:
            break
        shared += 1
    prefix.truncate(shared)
    prefix.append(list(tokens[shared:]))
