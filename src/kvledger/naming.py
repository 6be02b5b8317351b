"""What makes two blocks the same bytes: names, namespaces, and the field that differs.

A *name* is vLLM's own block hash at the end of a chunk. It covers the tokens and whatever vLLM
mixes into its hash chain (adapter, media, salt, embeddings). Everything else that decides the
bytes — weights, representation, hashing, epoch — is in the *namespace*, the digest of a flat
descriptor. A difference in any field never shares, and :func:`differing_fields` names it.

Pure: no I/O, no torch, no vLLM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

NAME_BYTES = 32
"""Width of a packed name. Shorter hashes (xxh3: 16 bytes) are padded with zeros; the hash
algorithm is a field of the namespace, so padding cannot make two names meet."""

Name = NewType("Name", bytes)
"""A chunk's name: exactly :data:`NAME_BYTES` bytes."""

NamespaceId = NewType("NamespaceId", str)
"""Hex digest of a descriptor."""

Descriptor = dict[str, str]
"""Flat map from a dotted field ("weights.digest", "worker.attention_backend") to its value."""

DISPLAY_PREFIX = "display."
"""Fields under this prefix are shown to people and do not enter the digest (the model's path)."""


def name_of(block_hash: bytes) -> Name:
    """Pad or refuse one vLLM block hash.

    Raises:
        ValueError: the hash is empty or longer than a name.
    """
    if not 0 < len(block_hash) <= NAME_BYTES:
        raise ValueError(f"a block hash has 1 to {NAME_BYTES} bytes, found {len(block_hash)}")
    return Name(block_hash.ljust(NAME_BYTES, b"\0"))


def chunk_names(
    block_hashes: Sequence[bytes], blocks_per_chunk: int, first_chunk: int = 0
) -> list[Name]:
    """Names of the whole chunks of a request, from ``first_chunk`` on.

    Hashes are chained, so the hash of a chunk's last block stands for the whole chunk and for all
    that precedes it. A tail of fewer than ``blocks_per_chunk`` blocks has no name. All hashes come
    from one algorithm, so they have one width.
    """
    first_end = (first_chunk + 1) * blocks_per_chunk - 1
    hashes = block_hashes[first_end::blocks_per_chunk]
    if hashes and len(hashes[0]) == NAME_BYTES:
        return [Name(block_hash) for block_hash in hashes]
    return [name_of(block_hash) for block_hash in hashes]


def pack_names(names: Iterable[Name]) -> bytes:
    """Concatenate names; the wire form (one bytes field, not a list: 80 times faster)."""
    return b"".join(names)


def count_names(packed: bytes) -> int:
    """Number of names in a packed field.

    Raises:
        ValueError: the length is not a multiple of :data:`NAME_BYTES`.
    """
    count, rest = divmod(len(packed), NAME_BYTES)
    if rest:
        raise ValueError(f"packed names come in {NAME_BYTES}s of bytes, found {len(packed)}")
    return count


def unpack_names(packed: bytes) -> list[Name]:
    """Inverse of :func:`pack_names`. Raises ValueError like :func:`count_names`."""
    count_names(packed)
    return [Name(packed[i : i + NAME_BYTES]) for i in range(0, len(packed), NAME_BYTES)]


def namespace_id(descriptor: Mapping[str, str]) -> NamespaceId:
    """Digest of every field that decides bytes; independent of the fields' order."""
    digest = hashlib.blake2b(digest_size=16)
    for field in sorted(descriptor):
        if field.startswith(DISPLAY_PREFIX):
            continue
        for part in (field, descriptor[field]):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "little"))
            digest.update(encoded)
    return NamespaceId(digest.hexdigest())


def differing_fields(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the byte-deciding fields in which two descriptors differ, sorted."""
    fields = {f for f in one.keys() | other.keys() if not f.startswith(DISPLAY_PREFIX)}
    return sorted(f for f in fields if one.get(f) != other.get(f))
