"""What is checked, and written down, at each phase of a simulated step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvledger.sim.observer import Observer
from kvledger.sim.oracle import Mismatch, Oracle, OracleError
from kvledger.sim.pattern import Prefix
from kvledger.sim.records import Allocation, Kind, StepRecord
from kvledger.sim.worker import WorkerGroup

_NOTHING = KVConnectorOutput()


class Watch:
    """Looks on while one engine steps; raises :class:`OracleError`, changes nothing."""

    def __init__(
        self, scheduler: Any, workers: WorkerGroup, oracle: Oracle, observer: Observer
    ) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._oracle = oracle
        self._observer = observer
        self._bad_blocks: set[int] = set()

    def scheduled(self, output: Any) -> StepRecord:
        """The record of a step that was just scheduled."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        record = StepRecord(
            index=self._observer.step,
            scheduled=dict(output.num_scheduled_tokens),
            computed=computed,
            resumed=frozenset(cached.resumed_req_ids),
            preempted=frozenset(output.preempted_req_ids or ()),
            finished=frozenset(output.finished_req_ids),
            drafted={
                name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()
            },
        )
        for request_id in record.preempted:
            self._observer.note(Kind.PREEMPTED, request_id)
        self._count("steps")
        self._count("computing steps", bool(record.scheduled))
        self._count("scheduled tokens", sum(record.scheduled.values()))
        return record

    def _count(self, what: str, number: int = 1) -> None:
        self._observer.counts[what] += number

    def executed(
        self, record: StepRecord, result: ModelRunnerOutput, prefix_of: Callable[[str], Prefix]
    ) -> None:
        """Complete the record of a step whose workers ran, and check what they left behind."""
        report = result.kv_connector_output or _NOTHING
        sampled = result.sampled_token_ids
        record.sampled = {
            request_id: sampled[index] for request_id, index in result.req_id_to_index.items()
        }
        for request_id, drafted in record.drafted.items():
            accepted = max(0, len(record.sampled.get(request_id, ())) - 1)
            self._count("rejected drafts", drafted - accepted)
        record.loads_finished = frozenset(report.finished_recving or ())
        record.loads_failed = frozenset(report.failed_recving)
        record.invalid_blocks = frozenset(report.invalid_block_ids)
        record.misread = frozenset(self._workers.misread)
        for request_id in report.finished_sending or ():
            self._observer.note(Kind.SEND_FINISHED, request_id)
        self._oracle.check_canaries()
        self._bad_blocks |= record.invalid_blocks
        for request_id in record.loads_finished:
            self._check_load(request_id, record, prefix_of(request_id))
        for request_id in record.misread:
            self._check_misread(request_id, record)

    def check_everything(self, prefix_of: Callable[[str], Prefix], *, settled: bool) -> None:
        """Check all running requests and, with no step in flight, the free cached blocks."""
        self._oracle.check_canaries()
        found: list[Mismatch] = []
        scheduler = self._scheduler
        runner = self._workers.runner
        for request in scheduler.running:
            known = runner.requests.get(request.request_id)
            if known is None:
                continue
            end = min(known.valid, request.num_computed_tokens)
            found += self._oracle.compare(request.request_id, known.prefix, known.blocks, 0, end)
        if settled:
            for request_id, request in scheduler.requests.items():
                self._oracle.remember(request.block_hashes, prefix_of(request_id))
            found += self._oracle.sweep(self._free_hashed_blocks())
        if found:
            raise OracleError("blocks do not hold what their tokens stand for", found)
        if settled and not scheduler.requests:
            pool = scheduler.kv_cache_manager.block_pool
            held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            if held:
                raise OracleError(f"{held} blocks are held though no request is alive")

    def _free_hashed_blocks(self) -> Iterator[tuple[int, int, bytes]]:
        for block in self._scheduler.kv_cache_manager.block_pool.blocks:
            if block.ref_cnt == 0 and block.block_hash is not None:
                key = block.block_hash
                yield block.block_id, get_group_id(key), get_block_hash(key)

    def _check_load(self, request_id: str, record: StepRecord, prefix: Prefix) -> None:
        """Compare the targets of an asynchronous load that was reported as ended."""
        failed = request_id in record.loads_failed
        self._observer.note(Kind.LOAD_FAILED if failed else Kind.LOAD_FINISHED, request_id)
        request = self._scheduler.requests.get(request_id)
        if request is None or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS or failed:
            return
        load = self._observer.allocations[request_id][-1]
        end = min([load.local + load.external, *self._bad_positions(load)])
        found = self._oracle.compare(request_id, prefix, load.block_ids, load.local, end)
        if found:
            raise OracleError(f"the load of {request_id} brought wrong bytes", found)

    def _bad_positions(self, load: Allocation) -> list[int]:
        """Where the blocks of a load begin that some rank reported as not loaded."""
        size = self._scheduler.block_size
        bad = [
            index * size
            for table in load.block_ids
            for index, block in enumerate(table)
            if block in self._bad_blocks
        ]
        self._bad_blocks.difference_update(*load.block_ids)
        return bad

    def _check_misread(self, request_id: str, record: StepRecord) -> None:
        """Wrong context is allowed only where a failed synchronous load was reported."""
        known = self._workers.runner.requests[request_id]
        if any(block in record.invalid_blocks for table in known.blocks for block in table):
            return
        end = min(known.valid, len(known.prefix))
        found = self._oracle.compare(request_id, known.prefix, known.blocks, 0, end)
        raise OracleError(
            f"{request_id} read wrong bytes in step {record.index} "
            f"(computed {record.computed[request_id]}, scheduled {record.scheduled[request_id]})",
            found,
        )
