"""A small, correct, in-memory KV connector, and wrong ones made from it.

The correct one proves that the simulated engine lets a right connector pass; each wrong one has
one real bug, and proves that the oracle sees it. Stores are named, so that engines can share
them: ``{"store": "name"}`` in the connector's extra configuration.
"""

# ruff: noqa: ARG002
from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

STORES: dict[str, dict[tuple, dict[str, object]]] = defaultdict(dict)
"""Store name → (rank, group, block hash) → layer name → tensor of one block."""


@dataclass
class Copies:
    """Blocks of one request to move: (group, block id, block hash)."""

    request_id: str
    blocks: list[tuple[int, int, bytes]]
    is_async: bool = False


@dataclass
class ReferenceMetadata(KVConnectorMetadata):
    loads: list[Copies] = field(default_factory=list)
    stores: list[Copies] = field(default_factory=list)


class ReferenceConnector(KVConnectorBase_V1, SupportsHMA):
    """Options: store, load ("async" or "sync"), delay (steps a load takes), failures (share)."""

    requires_kv_delivery = False

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        options = config.kv_connector_extra_config
        self.store = STORES[options.get("store", "default")]
        self.is_async = options.get("load", "async") == "async"
        self.delay = options.get("delay", 0)
        self.failures = options.get("failures", 0.0)
        self.partial_failures = options.get("partial_failures", False)
        self.block_size = vllm_config.cache_config.block_size
        self.groups = kv_cache_config.kv_cache_groups
        self.may_load = config.is_kv_consumer
        self.may_store = config.is_kv_producer
        if role == KVConnectorRole.SCHEDULER:
            self.ranks = vllm_config.parallel_config.world_size
            self.requests = {}
            self.local = {}
            self.given_up = set()
            self.pending = []
            self.epoch = 0
        else:
            self.rank = vllm_config.parallel_config.rank
            self.rng = random.Random(self.rank)
            self.running = []
            self.finished = set()
            self.failed = set()
            self.invalid = set()
            self.spoiled = False

    # ---- scheduler side ---------------------------------------------------------------------

    def on_new_request(self, request):
        self.requests[request.request_id] = request

    def key(self, request, index):
        return self.epoch, request.block_hashes[index]

    def reset_cache(self):
        self.epoch += 1
        return True

    def present(self, block_hash):
        return all(
            (rank, group, block_hash) in self.store
            for rank in range(self.ranks)
            for group in range(len(self.groups))
        )

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.local[request.request_id] = num_computed_tokens
        if not self.may_load or request.request_id in self.given_up:
            return 0, False
        limit = len(request.block_hashes)
        if not self.is_async:
            limit = min(limit, (request.num_tokens - 1) // self.block_size)
        hit = 0
        while hit < limit and self.present(self.key(request, hit)):
            hit += 1
        external = hit * self.block_size - num_computed_tokens
        return (external, self.is_async) if external > 0 else (0, False)

    def targets(self, request, tables, external):
        """Blocks that a load of ``external`` tokens has to fill."""
        first = self.local[request.request_id] // self.block_size
        last = first + external // self.block_size
        return [
            (group, table[index], self.key(request, index))
            for group, table in enumerate(tables)
            for index in range(first, last)
            if table[index] != 0
        ]

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens > 0:
            targets = self.targets(request, blocks.get_block_ids(), num_external_tokens)
            self.pending.append(Copies(request.request_id, targets, self.is_async))

    def valid_tokens(self, request, computed, scheduled):
        return min(computed + scheduled, request.num_tokens)

    def build_connector_meta(self, scheduler_output):
        metadata = ReferenceMetadata(loads=self.pending)
        self.pending = []
        if not self.may_store:
            return metadata
        state = scheduler_output.kv_connector_block_state
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            valid = self.valid_tokens(request, request.num_computed_tokens, scheduled)
            tables = state.get_block_ids(request_id)
            blocks = [
                (group, table[index], self.key(request, index))
                for group, table in enumerate(tables)
                for index in range(valid // self.block_size)
                if table[index] != 0 and not self.present(self.key(request, index))
            ]
            if blocks:
                metadata.stores.append(Copies(request_id, blocks))
        return metadata

    def update_connector_output(self, connector_output):
        self.given_up |= connector_output.failed_recving
        if connector_output.invalid_block_ids:
            self.given_up |= set(self.requests)

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        self.requests.pop(request.request_id)
        self.local.pop(request.request_id, None)
        self.given_up.discard(request.request_id)
        return False, None

    # ---- worker side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches):
        self.layers = [
            {name: kv_caches[name] for name in group.layer_names} for group in self.groups
        ]

    def start_load_kv(self, forward_context, **kwargs):
        for load in self._connector_metadata.loads:
            self.running.append([self.delay, load])
        for entry in list(self.running):
            if entry[0] > 0:
                entry[0] -= 1
                continue
            self.running.remove(entry)
            self.finish_load(entry[1])

    def finish_load(self, load):
        cut = len(load.blocks)
        if self.rng.random() < self.failures:
            cut = self.rng.randrange(cut)
            self.spoiled |= not load.is_async
            if load.is_async and not self.partial_failures:
                self.failed.add(load.request_id)
            else:
                self.invalid |= {block_id for _, block_id, _ in load.blocks[cut:]}
        for group, block_id, block_hash in load.blocks[:cut]:
            for name, block in self.store[self.rank, group, block_hash].items():
                self.layers[group][name][block_id].copy_(block)
        if load.is_async:
            self.finished.add(load.request_id)

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self):
        if not self.spoiled:
            for copies in self._connector_metadata.stores:
                self.save(copies)
        self.spoiled = False

    def save(self, copies):
        for group, block_id, block_hash in copies.blocks:
            self.store.setdefault(
                (self.rank, group, block_hash),
                {name: tensor[block_id].clone() for name, tensor in self.layers[group].items()},
            )

    def get_finished(self, finished_req_ids):
        finished, self.finished = self.finished, set()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.failed
        self.failed = set()
        return results

    def get_block_ids_with_load_errors(self):
        invalid, self.invalid = self.invalid, set()
        return invalid


class UncappedConnector(ReferenceConnector):
    """Counts scheduled drafts as valid: copies slots that rejected drafts filled.

    A block whose hash is not known yet is kept under a provisional key and renamed later.
    """

    def valid_tokens(self, request, computed, scheduled):
        return computed + scheduled

    def key(self, request, index):
        if index < len(request.block_hashes):
            block_hash = super().key(request, index)
            for rank in range(self.ranks):
                for group in range(len(self.groups)):
                    early = self.store.pop((rank, group, (request.request_id, index)), None)
                    if early is not None:
                        self.store[rank, group, block_hash] = early
            return block_hash
        return (request.request_id, index)


class LateStoreConnector(ReferenceConnector):
    """Reads blocks one step after they were complete, through the ids they had then.

    If the request was preempted meanwhile, its blocks may be another's.
    """

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.late = []

    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        metadata.stores, self.late = self.late, metadata.stores
        return metadata


class WrongTargetConnector(ReferenceConnector):
    """Loads from block 0 of the table on, as if nothing were held locally."""

    def targets(self, request, tables, external):
        right = super().targets(request, tables, external)
        return [
            (group, tables[group][index % len(right)], block_hash)
            for index, (group, _, block_hash) in enumerate(right)
        ]


class TaintedConnector(ReferenceConnector):
    """Stores what was computed in a step whose synchronous load failed."""

    def wait_for_save(self):
        self.spoiled = False
        super().wait_for_save()


class EarlyReportConnector(ReferenceConnector):
    """Reports an asynchronous load as finished when it begins."""

    def start_load_kv(self, forward_context, **kwargs):
        for load in self._connector_metadata.loads:
            self.finished.add(load.request_id)
        super().start_load_kv(forward_context, **kwargs)

    def finish_load(self, load):
        super().finish_load(load)
        self.finished.discard(load.request_id)


class SaltBlindConnector(ReferenceConnector):
    """Names a block by its tokens alone, so salts meet."""

    def key(self, request, index):
        return tuple(request.all_token_ids[: (index + 1) * self.block_size])


class FirstRankConnector(ReferenceConnector):
    """Believes in a block as soon as rank 0 has it; the other ranks lose half of theirs."""

    def present(self, block_hash):
        return all((0, group, block_hash) in self.store for group in range(len(self.groups)))

    def save(self, copies):
        if self.rank == 0 or self.rng.random() < 0.5:
            super().save(copies)

    def finish_load(self, load):
        kept = [b for b in load.blocks if (self.rank, b[0], b[2]) in self.store]
        super().finish_load(Copies(load.request_id, kept, load.is_async))


class NullBlockConnector(ReferenceConnector):
    """Does not leave out the null block of a sliding window when it loads."""

    def targets(self, request, tables, external):
        first = self.local[request.request_id] // self.block_size
        last = first + external // self.block_size
        return [
            (group, table[index], self.key(request, index))
            for group, table in enumerate(tables)
            for index in range(first, last)
        ]


class StrayWriteConnector(ReferenceConnector):
    """Writes one byte past the last block of the last layer."""

    def finish_load(self, load):
        super().finish_load(load)
        tensor = list(self.layers[0].values())[-1]
        end = tensor.storage_offset() + tensor.shape[0] * tensor.stride(0)
        tensor.as_strided((1,), (1,), end).zero_()


class TwiceReportedConnector(ReferenceConnector):
    """Reports every load in two steps; vLLM dies of it."""

    def get_finished(self, finished_req_ids):
        sending, finished = super().get_finished(finished_req_ids)
        again, self.again = getattr(self, "again", None), finished
        return sending, (finished or set()) | (again or set()) or None


class NeverConnector(ReferenceConnector):
    """Always asks to be asked again."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return None, False
