"""Every copy into the store is looked at: the blocks hold what the chunk's name stands for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvledger.fates import Fate
from kvledger.protocol import unpack_u64
from kvledger.sim import OracleError, SimulatedEngine


@dataclass(frozen=True)
class _Expected:
    """What one chunk has to hold: whose it is, where it begins, and the states of its tokens."""

    request_id: str
    first: int
    states: NDArray[np.uint64]


class Committed:
    """Compares the source of each copy of one engine with the pattern, on every rank.

    The expectation comes from the tokens of the request that the slot was asked for, at the
    position of the chunk; the blocks are those of the plan that the workers were given.

    Attributes:
        statistics: chunks that were compared.
        violations: what was wrong; hooks of the connector must not raise.
    """

    def __init__(self, engine: SimulatedEngine, chunk_tokens: int) -> None:
        self.statistics: Counter[str] = Counter()
        self.violations: list[str] = []
        self._engine = engine
        self._chunk = chunk_tokens
        self._expected: dict[int, _Expected] = {}
        self._follow_plans()
        self._follow_copies()

    def _follow_plans(self) -> None:
        stores = self._engine.connector.scheduler.stores
        take = stores.take

        def taken(tracked: Any, *arguments: Any) -> Any:
            items = list(tracked)
            grants = {
                (item.request.request_id, chunk): grant.reservation
                for item in items
                for chunk, grant in item.account.grants.items()
                if item.account.fates[chunk] is Fate.GRANTED
            }
            plans = take(items, *arguments)
            for (request_id, chunk), reservation in grants.items():
                first = chunk * self._chunk
                prefix = self._engine.prefix(request_id)
                states = prefix.states(first, first + self._chunk).copy()
                self._expected[reservation] = _Expected(request_id, first, states)
            return plans

        stores.take = taken

    def _follow_copies(self) -> None:
        worker = self._engine.workers.ranks[0].connector.worker
        store = worker._store_one

        def stored(attachment: Any, copy: Any) -> bool:
            size = self._engine.options.block_size
            blocks = np.frombuffer(copy.block_ids, dtype=np.int32).reshape(-1, self._chunk // size)
            numbers = unpack_u64(copy.reservations)
            for number, own in zip(numbers, blocks, strict=True):
                self._compare(self._expected.pop(number), own.tolist())
            self.statistics["chunks compared at their store"] += len(blocks)
            done: bool = store(attachment, copy)
            return done

        worker._store_one = stored

    def _compare(self, expected: _Expected, blocks: list[int]) -> None:
        owner = f"a store of {expected.request_id}"
        oracle = self._engine.oracle
        found = oracle.compare_blocks(owner, expected.states, expected.first, blocks)
        if found:
            self.violations.append(str(OracleError("I1: foreign bytes were stored", found)))
