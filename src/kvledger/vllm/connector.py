"""The class that vLLM loads: it checks the engine at start and then only delegates.

Every hook runs under a :class:`~kvledger.vllm.guard.Guard`. vLLM imports this module in several
processes and asks class methods of it in some, so importing it does no work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvledger.vllm.assembly import make_scheduler_side, make_worker_side, prepare
from kvledger.vllm.guard import Guard
from kvledger.vllm.metadata import KVLedgerMetadata, StepPlan
from kvledger.vllm.scheduler_side import SchedulerSide
from kvledger.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvledger")


class KVLedgerConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM v1 KV connector to a kvledger server on the same node.

    Raises:
        ConfigurationError: an option or an engine setting that cannot be right; at start only.
        UnsupportedLayoutError: KV tensors that this version cannot move; at start only.
    """

    _cache_hit_source = "host"

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.guard = Guard()
        self._setup = prepare(vllm_config, kv_cache_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = make_scheduler_side(self._setup)

    # ------------------------------------------------------------ what vLLM asks of the class

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody a delivery: preempted requests keep their in-flight output."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """No layer hook does any work here, so full CUDA graphs are fine."""
        return False

    # ------------------------------------------------------------ scheduler side

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None, "this is a worker's instance"
        return self.scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Lends us the block tables of live requests."""
        self._scheduler.block_table = kv_cache_manager.get_block_ids

    def on_new_request(self, request: Request) -> None:
        """See :meth:`SchedulerSide.on_new_request`."""
        self.guard.run(lambda: self._scheduler.on_new_request(request), lambda: None)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See :meth:`SchedulerSide.matched_tokens`."""
        return self.guard.run(
            lambda: self._scheduler.matched_tokens(request, num_computed_tokens),
            lambda: (0, False),
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See :meth:`SchedulerSide.allocated`."""
        self.guard.run(
            lambda: self._scheduler.allocated(
                request, blocks.get_block_ids()[0], num_external_tokens
            ),
            lambda: self._scheduler.allocation_failed(request.request_id, num_external_tokens),
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See :meth:`SchedulerSide.build_plan`."""
        plan = self.guard.run(
            lambda: self._scheduler.build_plan(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.preempted_req_ids or set(),
                others_load=scheduler_output.has_sync_kv_loads,  # ours never are synchronous
            ),
            self._scheduler.plan_after_failure,
        )
        return KVLedgerMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See :meth:`SchedulerSide.output_arrived`."""
        self.guard.run(
            lambda: self._scheduler.output_arrived(
                connector_output.finished_recving or set(), connector_output.failed_recving
            ),
            lambda: None,
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like :meth:`request_finished_all_groups`, for engines with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never asks vLLM to keep the blocks: what is owed is read before they are reused."""
        from vllm.v1.request import RequestStatus

        sampled_to_the_end = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        self.guard.run(
            lambda: self._scheduler.finished(
                request, block_ids[0] if block_ids else [], aborted=not sampled_to_the_end
            ),
            lambda: None,
        )
        return False, None

    def reset_cache(self) -> bool | None:
        """The weights may have changed: see :meth:`SchedulerSide.reset`. Always succeeds."""
        self.guard.run(self._reset, lambda: None)
        return True

    def _reset(self) -> None:
        self._setup.epochs.reset()
        self._scheduler.reset()

    # ------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Look at the KV tensors and attach to the server; refuses what cannot be moved."""
        if self.worker is not None:
            self.worker.shutdown()
        self.worker = make_worker_side(self._setup, kv_caches)

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVLedgerMetadata)
        return metadata.plan

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See :meth:`WorkerSide.before_step`."""
        assert isinstance(kv_connector_metadata, KVLedgerMetadata)
        plan, worker = kv_connector_metadata.plan, self.worker
        if worker is not None:
            self.guard.run(lambda: worker.before_step(plan), lambda: None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's plan becomes current."""
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None:
            self.worker.begin_step(self._plan())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        """See :meth:`WorkerSide.start_loads`."""
        worker = self.worker
        if worker is not None:
            plan = self._plan()
            self.guard.run(lambda: worker.start_loads(plan), worker.fail_loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no layer of a step waits for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        """See :meth:`WorkerSide.store_planned`."""
        worker = self.worker
        if worker is not None:
            self.guard.run(worker.store_planned, lambda: None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Loads answered since the last step; nothing is ever sent."""
        if self.worker is None:
            return KVConnectorTransferResults()
        finished, failed = self.worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    # ------------------------------------------------------------ ends

    def shutdown(self) -> None:
        """The engine ends in order. (When it does not, the operating system tells the server.)"""
        for side in (self.scheduler, self.worker):
            if side is not None:
                self.guard.run(side.shutdown, lambda: None)

    def take_events(self) -> Iterable[Any]:
        """KV events are not published yet."""
        return ()
