"""The messages between engines and the server, and their framing. Pure: bytes in, values out.

A frame is a 4-byte little-endian length and that many bytes of msgpack. Every request carries an
``id`` chosen by the sender and is answered exactly once, with the reply that belongs to it or with
an :class:`Error`. Messages that the server sends unasked carry ``id == PUSH_ID``.

Conversation of one engine (one scheduler process, ``world_size`` worker processes)::

    each process   Hello (+ its own pidfd)        -> Welcome (+ the arena's memfd)
    each process   Describe (its part)            -> Done
    the server     Opened, to all, once every part is there and all ranks agree
    scheduler      Match                          -> Matched      (leases the tail of the hit)
    scheduler      Locate                         -> Located      (slots of leased chunks)
    scheduler      Reserve                        -> Reserved     (slots to write)
    workers        Commit / Abort                 -> Done
    the server     Settled, to the scheduler, once every rank has committed, or none will
    scheduler      Release                        -> Done
    scheduler      Report (an account is closed)  -> Done

Names and numbers travel packed in one bytes field: names as :mod:`kvledger.naming` packs them,
offsets and reservation ids as little-endian unsigned 64-bit integers.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvledger.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 << 20
"""131,072 names of 32 bytes and room to spare: a prompt of two million tokens at block 16."""

MAX_REPORT_TEXT = 256
"""Characters of each text in a Report."""
MAX_REPORT_RUNS = 4096
"""Run lengths in a Report: fates and dropped together."""

PUSH_ID = 0
_LENGTH = struct.Struct("<I")


class ErrorCode(StrEnum):
    """Kinds of refusal; the word is stable, the sentence beside it is for people."""

    BAD_MESSAGE = "bad_message"
    WRONG_VERSION = "wrong_version"
    HELLO_FIRST = "hello_first"
    WRONG_ROLE = "wrong_role"
    ENGINE_ID_IN_USE = "engine_id_in_use"
    NO_PIDFD = "no_pidfd"
    NAMESPACE_NOT_OPEN = "namespace_not_open"
    RANKS_DISAGREE = "ranks_disagree"
    OBJECT_TOO_LARGE = "object_too_large"
    UNKNOWN_LEASE = "unknown_lease"
    OUT_OF_RANGE = "out_of_range"
    LIMIT_REACHED = "limit_reached"
    DRAINING = "draining"
    INTERNAL = "internal"


class Role(StrEnum):
    """What a connected process is."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    CLIENT = "client"


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """Base of all messages."""

    id: int


# ---------------------------------------------------------------- requests


class Hello(Message, frozen=True, kw_only=True):
    """First message of every process; its pidfd rides along as ancillary data.

    Attributes:
        protocol: :data:`PROTOCOL_VERSION` of the sender.
        engine: id that joins the processes of one engine (not a namespace).
        role: what the process does.
        rank: 0 for a scheduler; 0 ≤ rank < world_size for a worker.
        world_size: number of worker processes of the engine.
        label: for people: host, model path, pid.
    """

    protocol: int
    engine: str
    role: Role
    rank: int
    world_size: int
    label: str


class Describe(Message, frozen=True, kw_only=True):
    """One process' part of the namespace descriptor; sent again by a scheduler at a new epoch.

    Attributes:
        fields: flat descriptor fields this process knows.
        part_bytes: workers: bytes of this rank's part of one object, for each KV-cache group.
    """

    fields: dict[str, str]
    part_bytes: list[int] = []


class Match(Message, frozen=True, kw_only=True):
    """Longest visible prefix of ``names``; its tail is leased under ``lease`` (again: replaced)."""

    lease: int
    group: int
    names: bytes


class Locate(Message, frozen=True, kw_only=True):
    """Slots of the leased chunks ``first .. first + count - 1`` (counted from the chain's root)."""

    lease: int
    first: int
    count: int


class Release(Message, frozen=True, kw_only=True):
    """Give leases back. Unknown leases are ignored: releasing twice is harmless."""

    leases: list[int]


class Chain(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Consecutive chunks of one request that want slots.

    Attributes:
        parent: name of the chunk before the first one; empty at the root.
        names: packed names, in order.
    """

    parent: bytes
    names: bytes


class Reserve(Message, frozen=True, kw_only=True):
    """Slots for new chunks, one pipelined request a step.

    Attributes:
        step: the engine's step counter; an engine's reservations expire by its own steps.
        group: KV-cache group.
    """

    step: int
    group: int
    chains: list[Chain]


class Commit(Message, frozen=True, kw_only=True):
    """A worker has written its part of these reservations, and touches them no more."""

    reservations: bytes


class Abort(Message, frozen=True, kw_only=True):
    """These reservations will not be committed by the sender, and it touches them no more.

    From a scheduler it means that no worker was ever told of them.
    """

    reservations: bytes
    reason: str


class Report(Message, frozen=True, kw_only=True):
    """The closed account of one request, from the engine's scheduler.

    Texts have at most :data:`MAX_REPORT_TEXT` characters; longer ones are cut. There are at most
    :data:`MAX_REPORT_RUNS` run lengths: in a longer account those at its end are merged by fate.

    Attributes:
        request: the engine's id of the request.
        tokens: prompt and generated tokens when it ended.
        chunk_tokens: tokens of one chunk.
        local_tokens: found in the engine's own prefix cache at first admission.
        external_tokens: loaded from the server, over the request's life.
        miss: why the look-up found no more; empty if it found all.
        fates: run lengths along the chain: (fate, or "skipped:reason"; number of chunks).
        dropped: counts of fates of chunks whose tokens were cut off again.
        imbalance: empty, or why the books do not balance.
    """

    request: str
    tokens: int
    chunk_tokens: int
    local_tokens: int
    external_tokens: int
    miss: str
    fates: list[tuple[str, int]]
    dropped: dict[str, int]
    imbalance: str


class Explain(Message, frozen=True, kw_only=True):
    """Ask for the latest reports, as JSON; ``request`` empty: all that are kept."""

    request: str


class Status(Message, frozen=True, kw_only=True):
    """Ask for the server's state, as JSON."""


class Clear(Message, frozen=True, kw_only=True):
    """Drop the unleased objects of one namespace, or of all (empty)."""

    namespace: str


# ---------------------------------------------------------------- replies


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello; the arena's memfd rides along.

    Attributes:
        boot: id of this run of the server; every slot number belongs to one boot.
        arena_generation: which arena of this boot; a slot number belongs to one generation.
        arena_bytes: size of the mapping.
        max_names: largest number of names in one message.
        max_reservations: open reservations an engine may hold.
    """

    protocol: int
    version: str
    boot: str
    arena_generation: int
    arena_bytes: int
    max_names: int
    max_reservations: int


class Done(Message, frozen=True, kw_only=True):
    """Accepted; nothing to say."""


class Matched(Message, frozen=True, kw_only=True):
    """Answer to Match.

    Attributes:
        chunks: length of the hit; 0 leases nothing.
        reason: why the chunk after the hit is missing; empty if all were found.
        age_seconds: how long ago it was evicted, if that is the reason.
    """

    chunks: int
    reason: str
    age_seconds: float


class Located(Message, frozen=True, kw_only=True):
    """Answer to Locate: byte offsets in the arena, one for each chunk."""

    offsets: bytes


class ChainReserved(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What became of one chain: ``present`` chunks are there already, the next
    ``len(offsets) / 8`` got a slot, and all behind them were stopped by ``reason``."""

    present: int
    reservations: bytes
    offsets: bytes
    reason: str


class Reserved(Message, frozen=True, kw_only=True):
    """Answer to Reserve, one entry for each chain."""

    chains: list[ChainReserved]


class StatusReply(Message, frozen=True, kw_only=True):
    """Answer to Status and Explain: a JSON document."""

    document: bytes


class Cleared(Message, frozen=True, kw_only=True):
    """Answer to Clear: number of objects dropped."""

    objects: int


class Error(Message, frozen=True, kw_only=True):
    """The typed refusal that answers any request."""

    code: ErrorCode
    message: str


# ---------------------------------------------------------------- pushes


class Opened(Message, frozen=True, kw_only=True):
    """The engine's namespace is open: from now on the scheduler may match and reserve.

    Attributes:
        namespace: its id.
        object_bytes: slot size for each group.
        part_offsets: where this rank's part begins within an object, for each group.
    """

    namespace: str
    object_bytes: list[int]
    part_offsets: list[int]


class Closed(Message, frozen=True, kw_only=True):
    """The engine's namespace is closed (a rank went away); nothing is handed out until Opened."""

    reason: str


class Settled(Message, frozen=True, kw_only=True):
    """Reservations of this engine that have ended.

    Attributes:
        stored: packed reservation ids that are committed by every rank.
        aborted: packed ids that never will be.
        reason: why, for the aborted ones.
    """

    stored: bytes
    aborted: bytes
    reason: str


Request = (
    Hello
    | Describe
    | Match
    | Locate
    | Release
    | Reserve
    | Commit
    | Abort
    | Report
    | Explain
    | Status
    | Clear
)
Reply = (
    Welcome | Done | Matched | Located | Reserved | StatusReply | Cleared | Error
    | Opened | Closed | Settled
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_UNDECODABLE = (msgspec.DecodeError, RecursionError)
"""What a decoder raises on bytes that are no message; RecursionError on deeply nested ones."""


def encode(message: Request | Reply) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the message is larger than :data:`MAX_FRAME_BYTES`.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message has at most {MAX_FRAME_BYTES} bytes, this {type(message).__name__} "
            f"has {len(payload)}; send fewer names at once"
        )
    return _LENGTH.pack(len(payload)) + payload


def decode_request(payload: bytes) -> Request:
    """One request from a frame's payload. Raises ProtocolError on anything else."""
    try:
        return _requests.decode(payload)
    except _UNDECODABLE as error:
        raise ProtocolError(f"not a kvledger request: {error}") from error


def decode_reply(payload: bytes) -> Reply:
    """One reply or push from a frame's payload. Raises ProtocolError on anything else."""
    try:
        return _replies.decode(payload)
    except _UNDECODABLE as error:
        raise ProtocolError(f"not a kvledger reply: {error}") from error


class FrameBuffer:
    """Cuts a byte stream into payloads; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by ``data``, in order.

        Raises:
            ProtocolError: a frame announces more than :data:`MAX_FRAME_BYTES`; the stream cannot
                be resynchronised and must be closed.
        """
        self._buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(
                    f"a frame has at most {MAX_FRAME_BYTES} bytes, this one announces {length}"
                )
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return payloads


def pack_u64(numbers: Iterable[int]) -> bytes:
    """Little-endian unsigned 64-bit integers, concatenated (hosts are little-endian)."""
    return array("Q", numbers).tobytes()


def unpack_u64(packed: bytes) -> list[int]:
    """Inverse of :func:`pack_u64`.

    Raises:
        ProtocolError: the length is not a multiple of 8.
    """
    if len(packed) % 8:
        raise ProtocolError(f"packed integers come in 8s of bytes, found {len(packed)}")
    numbers = array("Q")
    numbers.frombytes(packed)
    return numbers.tolist()
