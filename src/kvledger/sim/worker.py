"""The worker side of one step: N ranks, each with its connector, in vLLM's call order.

The order is that of vLLM's model runners (``kv_connector_model_runner_mixin.py`` for runner 1,
``worker/gpu/kv_connector.py`` for runner 2). All ranks finish one phase before any begins the
next; the forward pass is a collective operation in a real engine too.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvledger.sim.forward import FakeModelRunner, ForwardResult
from kvledger.sim.memory import RankMemory
from kvledger.sim.model import EngineOptions


class SimulatedBackend:
    """Stands where a layer keeps its attention backend; connectors ask it for its name."""

    @staticmethod
    def get_name() -> str:
        """Name of the backend whose tensors the simulated engine imitates."""
        return "CPU_ATTN"


class SimulatedLayer:
    """What a connector can find of an attention layer in the static forward context.

    Attributes:
        kv_cache: the layer's KV tensor.
    """

    def __init__(self, kv_cache: Any) -> None:
        self.kv_cache = kv_cache

    def get_attn_backend(self) -> type[SimulatedBackend]:
        """The backend class, as vLLM's attention layers answer it."""
        return SimulatedBackend


class SimulatedAttentionMetadata:
    """Stands for the attention metadata of a forward pass; only its presence says something."""


def rank_config(config: VllmConfig, rank: int, memory: RankMemory) -> VllmConfig:
    """One worker's copy of the configuration: its rank, and its own layers."""
    own: VllmConfig = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.rank = rank
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {
        name: SimulatedLayer(tensor) for name, tensor in memory.tensors.items()
    }
    return own


class Rank:
    """One worker: its memory and its connector.

    Attributes:
        connector: the worker-side connector; None in an engine without one.
    """

    def __init__(
        self, config: VllmConfig, cache_config: KVCacheConfig, rank: int, memory: RankMemory
    ) -> None:
        self.memory = memory
        self.connector: Any = None
        own = rank_config(config, rank, memory)
        if config.kv_transfer_config is not None:
            self.connector = KVConnectorFactory.create_connector(
                own, KVConnectorRole.WORKER, cache_config
            )
            self.connector.register_kv_caches(dict(memory.tensors))
        self.attention = dict.fromkeys(memory.tensors, SimulatedAttentionMetadata())
        self.forward_context = create_forward_context(self.attention, own)
        self.idle_context = create_forward_context(None, own)

    def start_load(self, runs: bool, arguments: dict[str, Any]) -> None:
        """Begin this step's loads inside the forward context of the step."""
        context = self.forward_context if runs else self.idle_context
        with override_forward_context(context):
            self.connector.start_load_kv(context, **arguments)

    def collect(self, finished: set[str]) -> KVConnectorOutput:
        """Everything the connector reports at the end of a step."""
        connector = self.connector
        results = connector.get_transfer_results(finished)
        output = KVConnectorOutput()
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return output


class WorkerGroup:
    """All ranks of one engine.

    Attributes:
        ranks: the workers, by rank.
        runner: the model runner whose forward pass they share.
        drafts: what the last forward pass proposed; empty without speculation.
        misread: requests whose context held wrong bytes in the last forward pass.
    """

    def __init__(
        self, ranks: Sequence[Rank], runner: FakeModelRunner, options: EngineOptions
    ) -> None:
        self.ranks = list(ranks)
        self.runner = runner
        self.drafts: dict[str, list[int]] = {}
        self.misread: tuple[str, ...] = ()
        self._options = options
        self._aggregator: KVOutputAggregator | None = None

    def connect(self, scheduler_connector: Any) -> None:
        """What the engine does once both sides exist: aggregator and handshake."""
        if self._options.ranks > 1 or self._options.pickle_metadata:
            self._aggregator = KVOutputAggregator.from_connector(
                scheduler_connector, len(self.ranks)
            )
        handshakes = {
            (0, index): metadata
            for index, rank in enumerate(self.ranks)
            if (metadata := rank.connector.get_handshake_metadata()) is not None
        }
        if handshakes:
            scheduler_connector.set_xfer_handshake_metadata_pp_aware(handshakes)

    def execute(self, output: Any) -> ModelRunnerOutput:
        """Run one scheduler output on all ranks. Writes KV; may block as the connector does."""
        runs = output.total_num_scheduled_tokens > 0
        self.misread = ()
        if self.ranks[0].connector is None:
            self.runner.update_states(output)
            result = self._forward(output) if runs else ForwardResult({}, ())
            return _runner_output(result, None)
        self._begin(output)
        arguments = self._load_arguments(output) if runs else {}
        if output.has_sync_kv_loads:
            self._start_loads(runs, arguments)
        result = self._forward(output) if runs else ForwardResult({}, ())
        if not output.has_sync_kv_loads:
            self._start_loads(runs, arguments)
        reports = self._finish(output, runs)
        return self._merge(result, reports, runs)

    def shutdown(self) -> None:
        """Shut the worker-side connectors down."""
        for rank in self.ranks:
            if rank.connector is not None:
                rank.connector.shutdown()

    def _begin(self, output: Any) -> None:
        """Preemptions before any state changes; then states; then the metadata is bound."""
        metadata = output.kv_connector_metadata
        copies = [metadata] * len(self.ranks)
        if self._options.pickle_metadata:
            pickled = pickle.dumps(metadata)
            copies = [pickle.loads(pickled) for _ in self.ranks]
        for rank, own in zip(self.ranks, copies, strict=True):
            rank.connector.handle_preemptions(own)
        self.runner.update_states(output)
        for rank, own in zip(self.ranks, copies, strict=True):
            rank.connector.bind_connector_metadata(own)

    def _load_arguments(self, output: Any) -> dict[str, Any]:
        if self._options.model_runner == 1:
            return {}
        return {
            "scheduler_output": output,
            "request_state_indices": list(range(len(output.num_scheduled_tokens))),
            "request_ids": list(output.num_scheduled_tokens),
            "num_tokens": output.total_num_scheduled_tokens,
        }

    def _start_loads(self, runs: bool, arguments: dict[str, Any]) -> None:
        for rank in self.ranks:
            rank.start_load(runs, arguments)

    def _forward(self, output: Any) -> ForwardResult:
        hooked = [rank for rank in self.ranks if rank.connector is not None]
        for rank in hooked:
            for name in rank.memory.tensors:
                rank.connector.wait_for_layer_load(name)
        result = self.runner.forward(output)
        for rank in hooked:
            with override_forward_context(rank.forward_context):
                for name, tensor in rank.memory.tensors.items():
                    rank.connector.save_kv_layer(name, tensor, rank.attention[name])
        self.misread = result.misread
        if self._options.drafts:
            self.drafts = self.runner.propose_drafts(result)
        return result

    def _finish(self, output: Any, runs: bool) -> list[KVConnectorOutput]:
        """Saves and reports; runner 1 with drafts reports before it saves."""
        deferred = runs and self._options.drafts > 0 and self._options.model_runner == 1
        reports = []
        for rank in self.ranks:
            if self._options.model_runner == 2:
                rank.connector.finish_forward()
            if not deferred:
                rank.connector.wait_for_save()
            reports.append(rank.collect(output.finished_req_ids))
            if deferred:
                rank.connector.wait_for_save()
            rank.connector.clear_connector_metadata()
        return reports

    def _merge(
        self, result: ForwardResult, reports: list[KVConnectorOutput], runs: bool
    ) -> ModelRunnerOutput:
        """One output for the scheduler, as the executor would hand it over."""
        if runs:
            outputs = [_runner_output(result, report) for report in reports]
        else:
            outputs = [
                copy.copy(ModelRunnerOutput.with_kv_conn_output_only(report)) for report in reports
            ]
        if self._aggregator is None:
            return outputs[0]
        return self._aggregator.aggregate(outputs)


def _runner_output(result: ForwardResult, report: KVConnectorOutput | None) -> ModelRunnerOutput:
    ids = list(result.sampled)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[list(tokens) for tokens in result.sampled.values()],
        kv_connector_output=report,
    )
