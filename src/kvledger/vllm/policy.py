"""What a request may store and load: role, options, and the request's own switches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kvledger.ledger import StoreRule
from kvledger.reasons import Reason
from kvledger.vllm.options import Options
from kvledger.vllm.tracked import EngineRequest

logger = logging.getLogger("kvledger")

STORE_SWITCH = "kvledger.store"
LOAD_SWITCH = "kvledger.load"


@dataclass(frozen=True, slots=True)
class Decision:
    """What one request may do.

    Attributes:
        store: which of its chunks may be stored.
        no_load: why it loads nothing; None if it may.
    """

    store: StoreRule
    no_load: Reason | None


class RequestPolicy:
    """Decides once for each request, at its arrival.

    Args:
        options: the engine's options.
        may_store: the engine's ``kv_role`` lets it store.
        may_load: the engine's ``kv_role`` lets it load.
        block_tokens: the scheduler's block size.
        chunk_tokens: tokens of one chunk.
        drafts: the engine decodes speculatively.
    """

    def __init__(
        self,
        options: Options,
        *,
        may_store: bool,
        may_load: bool,
        block_tokens: int,
        chunk_tokens: int,
        drafts: bool = False,
    ) -> None:
        self._options = options
        self._stores = may_store and options.store != "none"
        self._loads = may_load and options.load
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._drafts = drafts

    def minimum_hit(self, local_tokens: int) -> int:
        """Shortest external hit that is worth a load, given the local one.

        vLLM reports one block less than it holds of a repeated prompt; loading that block alone
        would cost more than computing the last token does.
        """
        if self._options.min_hit_tokens is not None:
            return max(1, self._options.min_hit_tokens)
        return self._block_tokens + 1 if local_tokens else 1

    def decide(self, request: EngineRequest) -> Decision:
        """The rules for one request."""
        if getattr(request, "lora_request", None) is not None:
            # vLLM's hash covers an adapter's name and path, not its content.
            return Decision(StoreRule(0, Reason.ADAPTER_UNKNOWN), Reason.ADAPTER_UNKNOWN)
        if self._drafts and getattr(request, "resumable", False):
            # An answer that stops within accepted drafts leaves num_computed_tokens beyond the
            # tokens that vLLM keeps (_update_request_as_session); the next input's first tokens
            # then count as computed, and their KV is that of the dropped ones.
            reason = Reason.DRAFTS_IN_SESSION
            return Decision(StoreRule(0, reason), reason)
        switches = getattr(request, "kv_transfer_params", None)
        _tell_unknown_switches(switches)
        store = self._stores and _switch(switches, STORE_SWITCH)
        load = self._loads and _switch(switches, LOAD_SWITCH)
        rule = StoreRule()
        if not store:
            rule = StoreRule(0, Reason.STORE_DISABLED)
        elif self._options.store == "prompt":
            prompt_chunks = request.num_prompt_tokens // self._chunk_tokens
            rule = StoreRule(prompt_chunks, Reason.GENERATED_NOT_STORED)
        if request.skip_reading_prefix_cache:
            return Decision(rule, Reason.READING_SKIPPED)
        return Decision(rule, None if load else Reason.LOAD_DISABLED)


def _tell_unknown_switches(params: object) -> None:
    """A mistyped switch would have no effect, without a word."""
    if isinstance(params, Mapping):
        for name in params:
            known = (STORE_SWITCH, LOAD_SWITCH)
            if isinstance(name, str) and name.startswith("kvledger.") and name not in known:
                logger.warning(
                    "kv_transfer_params has the unknown key %.80r; known are %s and %s",
                    name,
                    *known,
                )


def _switch(params: object, name: str) -> bool:
    """A request's own switch; on unless it is exactly false. Anything else is a user's mistake,
    which is logged and costs nobody the engine."""
    if not isinstance(params, Mapping) or name not in params:
        return True
    value = params[name]
    if isinstance(value, bool):
        return value
    logger.warning("kv_transfer_params[%r] is true or false, found %r; taken as true", name, value)
    return True
