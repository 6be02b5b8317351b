"""Memory readings, from a made-up /proc and control groups of both versions; and growth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvledger.arena import Arena
from kvledger.config import make_config
from kvledger.errors import ConfigurationError
from kvledger.server.growth import Growth, GrowthState
from kvledger.server.machine import MemoryReading, read_memory
from kvledger.server.preflight import check_memory
from servers import wait_until

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    write(proc / "self" / "cgroup", "0::/a/b\n")
    groups.mkdir()
    return proc, groups


def test_without_limits(machine: tuple[Path, Path]) -> None:
    reading = read_memory(*machine)
    assert reading == MemoryReading(
        limit_bytes=16 * GIB, available_bytes=8 * GIB, bound_by="machine"
    )


def test_version_2_limits_of_all_ancestors(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    write(groups / "a" / "b" / "memory.max", "max\n")
    write(groups / "a" / "memory.max", str(4 * GIB))
    write(groups / "a" / "memory.current", str(3 * GIB))
    write(groups / "a" / "memory.stat", f"anon 1\ninactive_file {GIB // 2}\n")
    reading = read_memory(proc, groups)
    assert reading.limit_bytes == 4 * GIB
    assert reading.available_bytes == GIB + GIB // 2
    assert reading.bound_by == "control group"


def test_version_1_limits(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    write(proc / "self" / "cgroup", "4:memory:/x\n0::/\n")
    directory = groups / "memory" / "x"
    write(directory / "memory.limit_in_bytes", str(2 * GIB))
    write(directory / "memory.usage_in_bytes", str(GIB))
    write(directory / "memory.stat", "total_inactive_file 0\n")
    assert read_memory(proc, groups).available_bytes == GIB


def test_a_container_finds_its_own_mount(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    write(groups / "memory.max", str(GIB))
    write(groups / "memory.current", "0")
    write(groups / "memory.stat", "")
    assert read_memory(proc, groups).limit_bytes == GIB


def test_this_machine() -> None:
    reading = read_memory()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < reading.available_bytes <= reading.limit_bytes <= pages


def test_more_memory_than_the_machine_has_is_refused() -> None:
    reading = MemoryReading(limit_bytes=GIB, available_bytes=GIB, bound_by="machine")
    check_memory(make_config(memory="1GiB"), reading)
    with pytest.raises(ConfigurationError, match="1 GiB; give less"):
        check_memory(make_config(memory="1025MiB"), reading)


def test_growth_waits_while_memory_is_short_and_says_so() -> None:
    arena = Arena(pages=4, page_bytes=1 << 16)
    available = [GIB]
    ready: list[int] = []

    def read() -> MemoryReading:
        if len(ready) == 2 and available[0] == GIB:
            available[0] = 0
        return MemoryReading(
            limit_bytes=GIB, available_bytes=available[0], bound_by="control group"
        )

    growth = Growth(arena, lambda: ready.append(1), read=read, retry_seconds=0.01)
    growth.start()
    wait_until(lambda: growth.state is GrowthState.LIMITED)
    assert len(ready) == 2
    assert "control group" in growth.limited_by
    available[0] = 2 * GIB
    wait_until(lambda: growth.state is GrowthState.COMPLETE)
    assert len(ready) == 4
    assert growth.limited_by == ""
    assert os.fstat(arena.fd).st_blocks * 512 == arena.arena_bytes
    growth.stop()
    arena.close()


def test_growth_stops_when_told() -> None:
    arena = Arena(pages=4, page_bytes=1 << 16)
    short = MemoryReading(limit_bytes=GIB, available_bytes=0, bound_by="machine")
    growth = Growth(arena, lambda: None, read=lambda: short, retry_seconds=60.0)
    growth.start()
    wait_until(lambda: growth.state is GrowthState.LIMITED)
    growth.stop()
    assert growth.state is GrowthState.LIMITED
    arena.close()
