"""The arena: its plan, its seals, and who may map it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.arena import Arena, arena_page_bytes, map_arena, plan_memory
from kvledger.errors import ArenaError

PAGE = 64 << 10
MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(pages=8, page_bytes=PAGE)
    yield arena
    arena.close()


@given(st.integers(16 * MIB, 1 << 44))
def test_plan_stays_within_the_memory(memory_bytes: int) -> None:
    plan = plan_memory(memory_bytes)
    assert plan.arena_bytes == plan.pages * plan.page_bytes
    assert plan.arena_bytes + plan.metadata_bytes <= memory_bytes
    assert plan.metadata_bytes >= max(MIB, memory_bytes // 64)
    assert plan.pages >= 64
    assert plan.page_bytes <= 128 * MIB
    assert plan.page_bytes % 4096 == 0
    unused = memory_bytes - plan.metadata_bytes - plan.arena_bytes
    assert 0 <= unused < plan.page_bytes


def test_page_bytes() -> None:
    assert arena_page_bytes(8064 * MIB) == 126 * MIB
    assert arena_page_bytes(1 << 40) == 128 * MIB
    assert arena_page_bytes(15 * MIB) == 15 * MIB // 64
    with pytest.raises(ArenaError, match="at least"):
        arena_page_bytes(64 * 4096 - 1)


def test_instantiating_a_page_gives_it_its_memory_and_no_other(arena: Arena) -> None:
    def allocated() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    probed = allocated()
    assert probed < PAGE
    arena.instantiate(1)
    assert allocated() == probed + PAGE
    arena.instantiate(1)
    assert allocated() == probed + PAGE
    with pytest.raises(ArenaError, match="pages 0 to 7"):
        arena.instantiate(8)


RESIZE = """
import os, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
for new_size in (0, size - 4096, size + 4096):
    try:
        os.ftruncate(fd, new_size)
    except PermissionError:
        continue
    sys.exit(f"resized to {new_size}")
"""


def resize_elsewhere(fd: int, size_bytes: int) -> int:
    command = [sys.executable, "-c", RESIZE, str(fd), str(size_bytes)]
    return subprocess.run(command, pass_fds=[fd], capture_output=True, check=False).returncode


def test_no_other_process_can_resize_it(arena: Arena) -> None:
    assert resize_elsewhere(arena.fd, arena.arena_bytes) == 0
    assert arena.is_intact()


def test_control_an_unsealed_memfd_can_be_resized_and_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with pytest.raises(ArenaError, match="not sealed"):
        map_arena(fd, PAGE)
    assert resize_elsewhere(fd, PAGE) != 0
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ArenaError, match="not sealed"):
        map_arena(fd, os.fstat(fd).st_size)
    os.close(fd)


def test_mappings_share_bytes(arena: Arena) -> None:
    writer = numpy.frombuffer(map_arena(arena.fd, arena.arena_bytes), dtype=numpy.uint8)
    reader = numpy.frombuffer(
        map_arena(arena.fd, arena.arena_bytes, writable=False), dtype=numpy.uint8
    )
    writer[3 * PAGE : 3 * PAGE + 5] = [1, 2, 3, 4, 5]
    assert reader[3 * PAGE : 3 * PAGE + 6].tolist() == [1, 2, 3, 4, 5, 0]
    assert not reader.flags.writeable


def test_mapping_outlives_the_arena() -> None:
    arena = Arena(pages=1, page_bytes=PAGE)
    mapping = map_arena(arena.fd, PAGE)
    arena.close()
    mapping[:5] = b"still"
    assert mapping[:5] == b"still"


def test_what_is_no_arena_is_refused(arena: Arena, tmp_path: object) -> None:
    with pytest.raises(ArenaError, match="should have"):
        map_arena(arena.fd, arena.arena_bytes + 4096)
    with open(f"{tmp_path}/file", "wb+") as file, pytest.raises(ArenaError, match="no arena"):
        map_arena(file.fileno(), PAGE)
    with pytest.raises(ArenaError, match="no arena"):
        map_arena(-1, PAGE)


def test_more_memory_than_addresses_is_an_error() -> None:
    with pytest.raises(ArenaError, match="cannot create"):
        Arena(pages=1 << 14, page_bytes=1 << 46)
