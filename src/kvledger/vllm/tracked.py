"""What the scheduler side keeps for one live request; the numbers stay vLLM's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvledger.ledger import Account
from kvledger.naming import Name, name_of
from kvledger.reasons import Reason
from kvledger.vllm.lookups import Lookup


class EngineRequest(Protocol):
    """The narrow part of ``vllm.v1.request.Request`` that is read (never written)."""

    request_id: str
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    num_prompt_tokens: int
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int: ...


def waits_for_load(request: EngineRequest) -> bool:
    """Whether vLLM holds the request back until a connector has loaded its blocks: then
    ``num_computed_tokens`` counts tokens that have no KV yet."""
    status = getattr(request, "status", None)
    return getattr(status, "name", "") == "WAITING_FOR_REMOTE_KVS"


@dataclass(slots=True)
class Load:
    """An asynchronous load that vLLM waits for.

    Attributes:
        first: first chunk to load.
        stop: one past the last.
        local_tokens: valid before the load, in the request's own blocks.
        block_ids: ``blocks_per_chunk`` ids for each chunk; SKIP_BLOCK where nothing is written.
        deadline: monotonic time after which it has failed.
        offsets: slots, once the server has told.
        dispatched: the workers have been told.
        failed: it cannot be made.
    """

    first: int
    stop: int
    local_tokens: int
    block_ids: list[int]
    deadline: float
    offsets: list[int] | None = None
    dispatched: bool = False
    failed: bool = False


@dataclass(slots=True)
class Tracked:
    """One request, from its arrival until its account is closed.

    Attributes:
        request: vLLM's request.
        account: the fates of its chunks.
        no_load: why it does not load; None if it may.
        lookup: the current question; None before it is asked and after admission.
        load: the load under way.
        miss: why the last look-up found no more.
        local_tokens: local hit when it was last asked about.
        first_local_tokens: local hit at its first admission; None before.
        external_tokens: tokens loaded over its life.
        refusal: why its last chunks got no slot.
        retry_step: it asks for slots again at this step of the engine.
        refusals: refusals in a row.
        loads_elsewhere: another connector of the engine was loading for it at the last step.
    """

    request: EngineRequest
    account: Account
    no_load: Reason | None = None
    lookup: Lookup | None = None
    load: Load | None = None
    miss: Reason | None = None
    local_tokens: int = 0
    first_local_tokens: int | None = None
    external_tokens: int = 0
    refusal: Reason | None = None
    retry_step: int = 0
    refusals: int = 0
    loads_elsewhere: bool = False
    loading_names: list[Name] = field(default_factory=list)

    def names(self, first: int, stop: int) -> list[Name]:
        """Names of its chunks ``first .. stop - 1``."""
        width = self.account.blocks_per_chunk
        hashes = self.request.block_hashes
        return [name_of(hashes[(chunk + 1) * width - 1]) for chunk in range(first, stop)]

    @property
    def named_chunks(self) -> int:
        """Chunks that have a name now."""
        return len(self.request.block_hashes) // self.account.blocks_per_chunk
