"""Configuration values as text that is the same for equal values in every process. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum

MAX_VALUE_CHARACTERS = 200
"""Longer values are shown by their digest."""
MAX_DICT_FIELDS = 64
"""Larger dictionaries (a setting for each layer, say) are one value."""

NOT_IN_BYTES = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model's configuration that say where it is, not what it computes."""


def plain(value: object) -> object:
    """JSON values only. An object that has no structure to look at becomes its ``repr``: two of
    them differ rather than meet by mistake."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if k not in NOT_IN_BYTES}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


def text(value: object) -> str:
    """Canonical JSON; strings as they are; long values by their digest."""
    simple = plain(value)
    written = simple if isinstance(simple, str) else json.dumps(simple, sort_keys=True)
    if len(written) <= MAX_VALUE_CHARACTERS:
        return written
    return f"digest:{hashlib.blake2b(written.encode(), digest_size=16).hexdigest()}"


def flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Nested dictionaries as dotted fields, so that a difference is named where it is."""
    simple = plain(value)
    if not isinstance(simple, dict) or not 0 < len(simple) <= MAX_DICT_FIELDS:
        yield prefix, text(simple)
        return
    for key, inner in simple.items():
        yield from flat(f"{prefix}.{key}", inner)


def values_of(key: str, value: object) -> Iterator[object]:
    """All values under one key at any depth of a plain value."""
    if isinstance(value, list):
        for inner in value:
            yield from values_of(key, inner)
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from values_of(key, inner)
