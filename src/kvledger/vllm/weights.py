"""Which weights these are, by content: the same bytes at two paths are the same weights.

Reading a checkpoint whole would take as long as loading it, and its configuration and index are
the same for every fine-tune. So each file contributes its size, its safetensors header and samples
of its content: at even distances over the file, and at the start, middle and end of every tensor,
so that a tensor trained anew shows wherever it lies. Small files are read whole. A file in the
Hugging Face cache adds the SHA-256 it is named by.

Reads files and nothing else; may take seconds on a cold disk, so it belongs on its own thread.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvledger.errors import KVLedgerError

SAMPLE_BYTES = 4096
EVEN_SAMPLES = 64
WHOLE_FILE_BYTES = 4 << 20
"""Files up to this size are read whole: more than all even samples of a larger one would give."""
MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself sets."""
MAX_FILES = 10_000
"""A directory with more weight files than this is taken for something else (a home, a root)."""

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SETTING_PATTERNS = (
    "*.index.json",  # which file holds which tensor, so which files are loaded
    "*quant*.json",
    "*scale*.json",
    "*processor_config.json",  # what an image looks like to the model
    "params.json",
)
_NOT_FOR_INFERENCE = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
"""Files that vLLM skips, too."""
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


class UnreadableWeightsError(KVLedgerError):
    """The weights cannot be identified by their content; says why."""


@dataclass(frozen=True, slots=True)
class WeightsDigest:
    """What a checkpoint's files add up to.

    Attributes:
        value: hex digest; independent of where the files are.
        files: number of files that hold weights.
        bytes: their total size.
    """

    value: str
    files: int
    bytes: int


class _Entry(msgspec.Struct):
    """A tensor, or the free-form metadata, which has no offsets."""

    data_offsets: tuple[int, int] | None = None


_header_decoder = msgspec.json.Decoder(dict[str, _Entry])


def digest_weights(
    path: Path,
    *,
    ignore_patterns: Sequence[str] = (),
    with_code: bool = False,
    unchanged_since: float | None = None,
) -> WeightsDigest:
    """Digest of a checkpoint: a directory, or one file.

    Args:
        path: the directory, or the file.
        ignore_patterns: as in vLLM's load configuration, matched against relative paths.
        with_code: include Python files, because the model runs them.
        unchanged_since: Unix seconds; a file that changed later may not be what the engine loaded.

    Raises:
        UnreadableWeightsError: there are no weights, they cannot be read, or they changed.
    """
    patterns = _WEIGHT_PATTERNS + _SETTING_PATTERNS + (("*.py",) if with_code else ())
    digest = hashlib.blake2b(digest_size=32)
    count = total = 0
    try:
        if path.is_file():
            files = [(path.name, path)]
        else:
            files = sorted(_matching_files(path, patterns, ignore_patterns))
        for name, file in files:
            size, content = _digest_file(file, unchanged_since)
            digest.update(f"{name}\0{size}\0{content}\0".encode())
            if path.is_file() or _matches(file.name, _WEIGHT_PATTERNS):
                count, total = count + 1, total + size
    except OSError as error:
        raise UnreadableWeightsError(f"cannot read the weights: {error}") from error
    if not count:
        raise UnreadableWeightsError(f"{path} holds no weight files")
    return WeightsDigest(digest.hexdigest(), count, total)


def process_started() -> float:
    """When this process started, in Unix seconds, to a hundredth of a second.

    An engine's scheduler process starts before any worker reads a weight.
    """
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_after_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_after_boot)


def sample_ranges(size: int, tensors: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Which bytes of a file are read: ranges ``(start, end)``, ascending, not overlapping.

    Args:
        size: of the file, in bytes.
        tensors: ranges that each get samples of their own.
    """
    if size <= WHOLE_FILE_BYTES:
        return [(0, size)] if size else []
    wanted: list[tuple[int, int]] = []
    for start, end, count in [(0, size, EVEN_SAMPLES), *((s, e, 3) for s, e in tensors)]:
        room = max(0, end - start - SAMPLE_BYTES)
        for i in range(count):
            first = start + room * i // (count - 1)
            wanted.append((first, min(first + SAMPLE_BYTES, end)))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(wanted):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return name not in _NOT_FOR_INFERENCE and any(fnmatch.fnmatch(name, p) for p in patterns)


def _matching_files(
    directory: Path, patterns: Sequence[str], ignore_patterns: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    """Relative names and paths, in no order. Links to directories are followed, once each."""
    seen: set[str] = set()
    found = 0
    for parent, children, names in os.walk(directory, followlinks=True):
        seen.add(os.path.realpath(parent))
        children[:] = [
            child
            for child in children
            if not child.startswith(".") and os.path.realpath(Path(parent, child)) not in seen
        ]
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(directory).as_posix()
            ignored = any(fnmatch.fnmatch(relative, pattern) for pattern in ignore_patterns)
            if ignored or not _matches(name, patterns):
                continue
            found += 1
            if found > MAX_FILES:
                raise UnreadableWeightsError(f"{directory} holds more than {MAX_FILES} files")
            yield relative, path


def _digest_file(path: Path, unchanged_since: float | None) -> tuple[int, str]:
    """Size and hex digest of one file."""
    named = _name_in_cache(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor)
        if unchanged_since is not None and not named and before.st_ctime > unchanged_since:
            raise UnreadableWeightsError(f"{path} changed after the engine had started")
        digest = hashlib.blake2b(named.encode(), digest_size=32)
        header_bytes, tensors = _safetensors_header(descriptor, path, before.st_size)
        digest.update(_read(descriptor, 0, header_bytes))
        for start, end in sample_ranges(before.st_size, tensors):
            digest.update(f"\0{start}\0{end}\0".encode())
            for first in range(start, end, WHOLE_FILE_BYTES):
                digest.update(_read(descriptor, first, min(end, first + WHOLE_FILE_BYTES)))
        after = os.fstat(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise UnreadableWeightsError(f"{path} changed while it was read")
    finally:
        os.close(descriptor)
    return before.st_size, digest.hexdigest()


def _name_in_cache(path: Path) -> str:
    """SHA-256 by which the Hugging Face cache names this file's content; empty elsewhere."""
    if not path.is_symlink():
        return ""
    target = path.resolve()
    if target.parent.name != "blobs" or not _SHA256_NAME.fullmatch(target.name):
        return ""
    return target.name


def _safetensors_header(
    descriptor: int, path: Path, size: int
) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the header with its length field, and where each tensor lies in the file.

    A file that is not in this format has a header of no bytes and no known tensors.
    """
    if path.suffix != ".safetensors" or size < 8:
        return 0, []
    length = int.from_bytes(_read(descriptor, 0, 8), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        return 0, []
    try:
        entries = _header_decoder.decode(_read(descriptor, 8, 8 + length))
    except msgspec.DecodeError:
        return 0, []
    base = 8 + length
    ranges = [e.data_offsets for e in entries.values() if e.data_offsets is not None]
    inside = all(0 <= start <= end <= size - base for start, end in ranges)
    return (base, [(base + s, base + e) for s, e in ranges]) if inside else (0, [])


def _read(descriptor: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end:
        piece = os.pread(descriptor, end - start, start)
        if not piece:
            raise UnreadableWeightsError("a weight file became shorter while it was read")
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
