"""Names and namespaces: what may meet and what must not."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.naming import (
    DISPLAY_PREFIX,
    NAME_BYTES,
    Name,
    chunk_names,
    count_names,
    differing_fields,
    name_of,
    namespace_id,
    pack_names,
    unpack_names,
)

descriptors = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=5)


@pytest.mark.parametrize("length", [1, 8, 16, 31, 32])
def test_a_short_hash_is_padded(length: int) -> None:
    block_hash = bytes(range(1, length + 1))
    name = name_of(block_hash)
    assert len(name) == NAME_BYTES
    assert name.startswith(block_hash)
    assert set(name[length:]) <= {0}


@pytest.mark.parametrize("length", [0, 33, 64])
def test_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"found {length}"):
        name_of(bytes(length))


@given(st.lists(st.binary(min_size=NAME_BYTES, max_size=NAME_BYTES).map(Name), max_size=20))
def test_packing_and_unpacking(names: list[Name]) -> None:
    packed = pack_names(names)
    assert len(packed) == NAME_BYTES * len(names)
    assert count_names(packed) == len(names)
    assert unpack_names(packed) == names


@pytest.mark.parametrize("length", [1, 31, 33, 65])
def test_broken_packs_are_refused(length: int) -> None:
    for function in (count_names, unpack_names):
        with pytest.raises(ValueError, match=f"found {length}"):
            function(bytes(length))


@given(
    blocks=st.integers(0, 40), blocks_per_chunk=st.integers(1, 9), first_chunk=st.integers(0, 12)
)
def test_a_chunk_is_named_by_its_last_block(
    blocks: int, blocks_per_chunk: int, first_chunk: int
) -> None:
    hashes = [hashlib.sha256(str(i).encode()).digest() for i in range(blocks)]
    expected = [
        hashes[chunk * blocks_per_chunk + blocks_per_chunk - 1]
        for chunk in range(first_chunk, blocks // blocks_per_chunk)
    ]
    assert chunk_names(hashes, blocks_per_chunk, first_chunk) == expected


@given(descriptors, st.randoms())
def test_the_order_of_fields_does_not_matter(descriptor: dict[str, str], chance: object) -> None:
    items = list(descriptor.items())
    chance.shuffle(items)  # type: ignore[attr-defined]
    assert namespace_id(dict(items)) == namespace_id(descriptor)


@given(descriptors, descriptors)
def test_two_namespaces_meet_exactly_if_no_field_differs(
    one: dict[str, str], other: dict[str, str]
) -> None:
    differing = differing_fields(one, other)
    assert (namespace_id(one) == namespace_id(other)) == (not differing)
    assert differing == sorted(differing) == differing_fields(other, one)
    deciding = {f for f in one.keys() | other.keys() if not f.startswith(DISPLAY_PREFIX)}
    assert set(differing) == {f for f in deciding if one.get(f) != other.get(f)}


def test_a_value_cannot_pass_for_a_field() -> None:
    """Without lengths, the concatenations would be equal."""
    ids = {
        namespace_id(descriptor)
        for descriptor in ({"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {})
    }
    assert len(ids) == 5


def test_what_is_for_display_decides_nothing() -> None:
    one = {"weights.digest": "1", "display.path": "/models/a"}
    other = {"weights.digest": "1", "display.path": "/models/b", "display.host": "x"}
    assert namespace_id(one) == namespace_id(other)
    assert differing_fields(one, other) == []
    assert differing_fields(one, {**other, "weights.digest": "2"}) == ["weights.digest"]


def test_the_digest_is_the_one_that_is_documented() -> None:
    """Pinned: a change of the digest would silently empty every store that outlives a server."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (b"a", b"1", b"b", "é".encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    assert namespace_id({"b": "é", "a": "1", "display.x": "y"}) == digest.hexdigest()
