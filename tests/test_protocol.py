"""Frames and messages: each type there and back, and nothing but ProtocolError on bad bytes."""

from __future__ import annotations

import contextlib
import random
import struct
import types
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import protocol
from kvledger.errors import ProtocolError
from kvledger.protocol import (
    MAX_FRAME_BYTES,
    FrameBuffer,
    Message,
    decode_reply,
    decode_request,
    encode,
    pack_u64,
    unpack_u64,
)

REQUESTS: tuple[type[Message], ...] = typing.get_args(protocol.Request)
REPLIES: tuple[type[Message], ...] = typing.get_args(protocol.Reply)
LARGEST_U64 = 2**64 - 1


def values(kind: object) -> st.SearchStrategy[object]:
    """Values of the annotated type of a field; unknown types fail the test."""
    simple: dict[object, st.SearchStrategy[object]] = {
        int: st.integers(-(2**63), LARGEST_U64),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=80),
    }
    if kind in simple:
        return simple[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is float:
        return st.floats(allow_nan=False)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(values(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if isinstance(kind, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if kind is type(None):
        return st.none()
    assert isinstance(kind, type), f"no strategy for {kind}"
    assert issubclass(kind, str), f"no strategy for {kind}"
    return st.sampled_from(list(kind))  # a StrEnum


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[object]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


def test_every_message_is_a_request_or_a_reply() -> None:
    messages = {
        kind
        for kind in vars(protocol).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert messages == {*REQUESTS, *REPLIES}
    assert not set(REQUESTS) & set(REPLIES)


@pytest.mark.parametrize("kind", [*REQUESTS, *REPLIES], ids=lambda kind: kind.__name__)
def test_every_message_there_and_back(kind: type[Message]) -> None:
    decode, other = decode_request, decode_reply
    if kind in REPLIES:
        decode, other = other, decode

    @given(structs(kind))
    def there_and_back(message: Message) -> None:
        (payload,) = FrameBuffer().feed(encode(message))  # type: ignore[arg-type]
        assert decode(payload) == message
        with pytest.raises(ProtocolError):
            other(payload)

    there_and_back()


def test_a_stream_may_be_cut_anywhere() -> None:
    payloads = [b"", b"a", b"bc" * 40, b"", b"d" * 300]
    stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
    for cut in range(len(stream) + 1):
        buffer = FrameBuffer()
        assert buffer.feed(stream[:cut]) + buffer.feed(stream[cut:]) == payloads, cut
    byte_by_byte = FrameBuffer()
    received = [p for i in range(len(stream)) for p in byte_by_byte.feed(stream[i : i + 1])]
    assert received == payloads
    for seed in range(50):
        chance = random.Random(seed)
        buffer, start, received = FrameBuffer(), 0, []
        while start < len(stream):
            end = start + chance.randint(0, 60)
            received += buffer.feed(stream[start:end])
            start = end
        assert received == payloads, f"seed {seed}"


def test_a_frame_that_is_too_long_is_refused_as_soon_as_it_is_announced() -> None:
    buffer = FrameBuffer()
    with pytest.raises(ProtocolError, match=f"announces {MAX_FRAME_BYTES + 1}"):
        buffer.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="announces"):
        buffer.feed(b"")  # it does not come back to life
    longest = bytes(MAX_FRAME_BYTES)
    assert FrameBuffer().feed(struct.pack("<I", len(longest)) + longest) == [longest]


def test_a_message_that_is_too_long_is_not_sent() -> None:
    overhead = len(encode(protocol.Commit(id=1, reservations=bytes(1 << 20)))) - (1 << 20) - 4
    fits = protocol.Commit(id=1, reservations=bytes(MAX_FRAME_BYTES - overhead))
    assert FrameBuffer().feed(encode(fits)) == [encode(fits)[4:]]
    with pytest.raises(ProtocolError, match=r"Commit has \d+; send fewer"):
        encode(protocol.Commit(id=1, reservations=bytes(MAX_FRAME_BYTES - overhead + 1)))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(ProtocolError):
            decode(data)
    with contextlib.suppress(ProtocolError):
        FrameBuffer().feed(data)


@given(st.data())
def test_damaged_messages_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*REQUESTS, *REPLIES]))
    payload = bytearray(encode(data.draw(structs(kind)))[4:])  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))]
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(ProtocolError):
            decode(bytes(payload))


@pytest.mark.parametrize(
    "inner",
    [
        b"\x91" * 100_000 + b"\xc0",  # arrays in arrays
        b"\x81\xa1k" * 100_000 + b"\xc0",  # maps in maps
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # a text
        b"\xc1",  # reserved
        b"\xa2\xff\xfe",  # not UTF-8
    ],
)
@pytest.mark.parametrize("kind", [*REQUESTS, *REPLIES], ids=lambda kind: kind.__name__)
def test_hostile_fields_are_refused(kind: type[Message], inner: bytes) -> None:
    """In the place of each field. Beyond the last one they are skipped, or refused as well."""
    decode = decode_request if kind in REQUESTS else decode_reply
    fields = len(kind.__struct_fields__)
    tag = msgspec.msgpack.encode(kind.__name__)
    for good in range(fields + 1):
        head = b"\xdc" + struct.pack(">H", fields + 2)  # one field more than the message has
        payload = head + tag + b"\x00" * good + inner
        if good < fields:
            with pytest.raises(ProtocolError):
                decode(payload)
        else:
            with contextlib.suppress(ProtocolError):
                decode(payload + b"\x00")


@given(st.lists(st.integers(0, LARGEST_U64), max_size=30))
def test_packed_numbers(numbers: list[int]) -> None:
    packed = pack_u64(numbers)
    assert packed == b"".join(number.to_bytes(8, "little") for number in numbers)
    assert unpack_u64(packed) == numbers


@pytest.mark.parametrize("length", [1, 7, 9, 15])
def test_broken_packs_of_numbers_are_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"found {length}"):
        unpack_u64(bytes(length))


@pytest.mark.parametrize("number", [-1, LARGEST_U64 + 1])
def test_numbers_that_do_not_fit_are_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        pack_u64([number])
