"""Why a block was not stored, and why a prompt was not found.

Every block that kvledger does not store and every chunk it does not find carries exactly one
:class:`Reason`. There is no "other": a new cause gets a new member, with a sentence that a user
can act on.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One cause; the value is the stable word used in metrics, logs and the API."""

    # The cache cannot be reached, or not yet.
    SERVER_ABSENT = "server_absent"
    SERVER_SILENT = "server_silent"
    NAMESPACE_OPENING = "namespace_opening"
    IDENTITY_PENDING = "identity_pending"
    LOOKUP_DEADLINE = "lookup_deadline"
    RESERVE_DEADLINE = "reserve_deadline"

    # The operator or the caller asked for it.
    STORE_DISABLED = "store_disabled"
    LOAD_DISABLED = "load_disabled"
    GENERATED_NOT_STORED = "generated_not_stored"
    READING_SKIPPED = "reading_skipped"
    ADAPTER_UNKNOWN = "adapter_unknown"
    DRAFTS_IN_SESSION = "drafts_in_session"
    BELOW_MIN_HIT = "below_min_hit"

    # A look-up that found nothing (more).
    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    HELD_LOCALLY = "held_locally"
    NO_FULL_CHUNK = "no_full_chunk"
    LOAD_FAILED = "load_failed"

    # The server could not take the block.
    NO_ROOM = "no_room"
    ARENA_GROWING = "arena_growing"
    OBJECT_TOO_LARGE = "object_too_large"
    TOO_MANY_RESERVATIONS = "too_many_reservations"
    BEING_WRITTEN = "being_written"
    PARENT_MISSING = "parent_missing"
    WRITER_GONE = "writer_gone"
    WRITER_FAILED = "writer_failed"
    RESERVATION_EXPIRED = "reservation_expired"
    CLEARED = "cleared"

    # The engine moved on before the bytes could be read.
    ENGINE_IDLE = "engine_idle"
    BLOCK_REUSED = "block_reused"
    EPOCH_CHANGED = "epoch_changed"
    TOKENS_TRUNCATED = "tokens_truncated"


EXPLANATIONS: dict[Reason, str] = {
    Reason.SERVER_ABSENT: "no kvledger server answered on the socket",
    Reason.SERVER_SILENT: "the server is there, but owes an answer for more than a moment",
    Reason.NAMESPACE_OPENING: "not every rank of the engine has attached to this server yet",
    Reason.IDENTITY_PENDING: "the digest of the model's weights is still being computed",
    Reason.LOOKUP_DEADLINE: "the server's answer came after kvledger.lookup_deadline_ms",
    Reason.RESERVE_DEADLINE: "the server had not answered when the request's last block was due",
    Reason.STORE_DISABLED: "storing is off: kvledger.store, kv_role or the request says so",
    Reason.LOAD_DISABLED: "loading is off: kvledger.load, kv_role or the request says so",
    Reason.GENERATED_NOT_STORED: 'the block holds generated tokens and kvledger.store is "prompt"',
    Reason.READING_SKIPPED: "the request asked vLLM not to read any prefix cache",
    Reason.ADAPTER_UNKNOWN: "the content of the request's adapter is not known to be the same",
    Reason.DRAFTS_IN_SESSION: "with speculative drafts vLLM takes dropped tokens for computed ones "
    "when a streaming-input session goes on",
    Reason.BELOW_MIN_HIT: "the hit beyond the local one is shorter than kvledger.min_hit_tokens",
    Reason.NEVER_SEEN: "no engine has stored this chunk since the server started",
    Reason.EVICTED: "the chunk was stored, and evicted to make room",
    Reason.HELD_LOCALLY: "vLLM's own prefix cache covers all that the server has",
    Reason.NO_FULL_CHUNK: "the prompt is shorter than one chunk",
    Reason.LOAD_FAILED: "an earlier load for this request failed; it is recomputed",
    Reason.NO_ROOM: "every candidate for eviction is leased, being written or below a floor",
    Reason.ARENA_GROWING: "the server is still instantiating the memory it was given",
    Reason.OBJECT_TOO_LARGE: "one chunk of this model is larger than a page of the arena",
    Reason.TOO_MANY_RESERVATIONS: "the engine holds as many open reservations as it may",
    Reason.BEING_WRITTEN: "another engine was still writing this chunk",
    Reason.PARENT_MISSING: "the chunk before it is not in the cache",
    Reason.WRITER_GONE: "the engine or one of its ranks ended before it had committed",
    Reason.WRITER_FAILED: "a rank could not copy the block (it maps another server's arena)",
    Reason.RESERVATION_EXPIRED: "the engine went many steps on without committing",
    Reason.CLEARED: "the namespace was cleared while the block was being written",
    Reason.ENGINE_IDLE: "the engine ran no further step in which the block could be read",
    Reason.BLOCK_REUSED: "vLLM gave the block to another request before it could be read",
    Reason.EPOCH_CHANGED: "the cache was reset (new weights) while the request was alive",
    Reason.TOKENS_TRUNCATED: "the request's tokens were cut back before the block was stored",
}
"""One sentence for each reason, as `kvledger status` and the docs print it."""
