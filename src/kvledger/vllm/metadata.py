"""What the scheduler side hands to the workers at each step: small, flat and picklable.

Slot offsets, block ids and reservation ids travel packed as bytes, so that pickling a step with
thousands of blocks costs microseconds. Every plan of one step belongs to one boot of the server
and one arena of it; a worker that maps another arena must not follow any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

SKIP_BLOCK = -1
"""In a load: this block of the chunk is not wanted (it is local, or beyond the hit)."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Chunks of one KV-cache group and where they lie on both sides.

    Attributes:
        group: KV-cache group index.
        offsets: packed u64, one arena offset (bytes) for each chunk.
        block_ids: packed i32, ``blocks_per_chunk`` engine block ids for each chunk, in order; in
            a load, :data:`SKIP_BLOCK` stands for a block that must not be written.
        reservations: packed u64, one for each chunk of a store; empty for a load.
    """

    group: int
    offsets: bytes
    block_ids: bytes
    reservations: bytes = b""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One asynchronous load; answered with exactly one ``finished_recving``."""

    request_id: str
    copies: tuple[CopyPlan, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All copies of one step.

    Attributes:
        boot: the server's boot id that every offset below belongs to; empty without a server.
        arena_generation: the arena of that boot.
        namespace: the namespace in which the leases and reservations below were given.
        stores: blocks complete at the end of this step; read in ``wait_for_save``.
        rescues: blocks of requests that finished or were preempted; read in
            ``handle_preemptions``, before anything of this step writes.
        loads: loads to start in this step.
        failed_loads: requests whose load no worker was told of and that cannot be made; reported
            as failed in this step.
        cancelled_loads: loads begun in an earlier step that must not complete; reported as failed
            unless they have been reported already.
    """

    boot: str = ""
    arena_generation: int = 0
    namespace: str = ""
    stores: tuple[CopyPlan, ...] = ()
    rescues: tuple[CopyPlan, ...] = ()
    loads: tuple[LoadPlan, ...] = ()
    failed_loads: tuple[str, ...] = ()
    cancelled_loads: tuple[str, ...] = ()


@dataclass
class KVLedgerMetadata(KVConnectorMetadata):
    """vLLM's envelope around one :class:`StepPlan`."""

    plan: StepPlan = field(default_factory=StepPlan)
