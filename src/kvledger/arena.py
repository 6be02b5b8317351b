"""The arena: one sealed memfd that holds every KV byte of the memory tier.

Owns the descriptor (server side) and the checks before a mapping (engine side). The size is
sealed: an unsealed memfd could be truncated by any process that holds it, and every process that
then touches its mapping would die of SIGBUS. The *server* instantiates each page, so that first
touch costs no engine its time, and so that the memory is charged to the server's own limit.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass

from kvledger.errors import ArenaError
from kvledger.native import populate_for_writing

ALIGNMENT_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
MAX_PAGE_BYTES = 128 << 20
MIN_PAGES = 64
"""A page is the unit in which memory moves between object sizes: at most 1/64 of the arena."""

MIN_METADATA_BYTES = 1 << 20
METADATA_SHARE = 64
"""1/64 of the memory is kept for the catalog's own entries and the names it remembers."""

POPULATE_SLICE_BYTES = 4 << 20
"""One system call instantiates at most this much: 4 ms at first-touch speed."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How ``--memory`` is split.

    Attributes:
        arena_bytes: size of the memfd, a whole number of pages.
        page_bytes: size of one slab page.
        pages: number of pages.
        metadata_bytes: what the catalog may spend on entries.
    """

    arena_bytes: int
    page_bytes: int
    pages: int
    metadata_bytes: int


def arena_page_bytes(arena_bytes: int) -> int:
    """Size of a slab page: at most 1/64 of the arena and 128 MiB, and aligned.

    Pages of 2 MiB and more are multiples of 2 MiB, so that huge pages never straddle two.

    Raises:
        ArenaError: the arena is too small to be cut into 64 pages of 4 KiB.
    """
    share = min(arena_bytes // MIN_PAGES, MAX_PAGE_BYTES)
    unit = HUGE_PAGE_BYTES if share >= HUGE_PAGE_BYTES else ALIGNMENT_BYTES
    page_bytes = share // unit * unit
    if page_bytes == 0:
        smallest = MIN_PAGES * ALIGNMENT_BYTES
        raise ArenaError(f"an arena has at least {smallest} bytes, {arena_bytes} are too few")
    return page_bytes


def plan_memory(memory_bytes: int) -> MemoryPlan:
    """Split ``memory_bytes`` into the arena and the catalog's own memory; never exceeds it."""
    metadata_bytes = max(memory_bytes // METADATA_SHARE, MIN_METADATA_BYTES)
    room_bytes = memory_bytes - metadata_bytes
    page_bytes = arena_page_bytes(room_bytes)
    pages = room_bytes // page_bytes
    return MemoryPlan(
        arena_bytes=pages * page_bytes,
        page_bytes=page_bytes,
        pages=pages,
        metadata_bytes=metadata_bytes,
    )


class Arena:
    """The server's side: creates, seals, instantiates.

    Attributes:
        fd: the memfd, to be sent to engines; closed by :meth:`close`.
        arena_bytes: its sealed size.
        page_bytes: size of one page.
        pages: number of pages.
    """

    def __init__(self, *, pages: int, page_bytes: int) -> None:
        """Reserve the address space; no page is instantiated but the first 4 KiB (as a probe).

        Raises:
            ArenaError: the kernel lacks memfd sealing or MADV_POPULATE_WRITE, or has no memory.
        """
        self.pages = pages
        self.page_bytes = page_bytes
        self.arena_bytes = pages * page_bytes
        try:
            self.fd = os.memfd_create("kvledger-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.arena_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._mapping = mmap.mmap(self.fd, self.arena_bytes)
        except OSError as error:
            raise ArenaError(
                f"cannot create {self.arena_bytes} bytes of shared memory: {error.strerror}"
            ) from error
        self._advise_huge_pages()
        self._populate(0, ALIGNMENT_BYTES)

    def _advise_huge_pages(self) -> None:
        """Ask for huge pages; only an optimisation, so a kernel without them is fine."""
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise ArenaError(f"cannot advise on shared memory: {error.strerror}") from error

    def instantiate(self, page: int) -> None:
        """Give one page its memory. Blocks (0.6 s for 1 GiB) without the interpreter lock.

        Raises:
            ArenaError: there is no memory left for it; parts of the page may be instantiated, and
                calling again goes on.
        """
        if not 0 <= page < self.pages:
            raise ArenaError(f"the arena has pages 0 to {self.pages - 1}, not {page}")
        start = page * self.page_bytes
        for offset in range(start, start + self.page_bytes, POPULATE_SLICE_BYTES):
            self._populate(offset, min(POPULATE_SLICE_BYTES, start + self.page_bytes - offset))

    def _populate(self, start: int, length_bytes: int) -> None:
        try:
            populate_for_writing(self._mapping, start, length_bytes)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise ArenaError(
                    "this kernel cannot instantiate shared memory in advance; "
                    "kvledger needs Linux 5.14 or newer"
                ) from error
            raise ArenaError(
                f"cannot instantiate {length_bytes} bytes of shared memory: {error.strerror}"
            ) from error

    def is_intact(self) -> bool:
        """Whether the memfd still has the size and the seals it was made with."""
        seals = fcntl.fcntl(self.fd, fcntl.F_GET_SEALS)
        return os.fstat(self.fd).st_size == self.arena_bytes and seals & _SEALS == _SEALS

    def close(self) -> None:
        """Unmap and close; engines that have mapped the arena keep their mapping."""
        self._mapping.close()
        os.close(self.fd)


def map_arena(fd: int, arena_bytes: int, *, writable: bool = True) -> mmap.mmap:
    """The engine's side: map an arena received from a server, after checking that it is safe.

    The mapping outlives ``fd`` and the server; ``numpy.frombuffer`` accepts it. Does not block
    and touches no page.

    Raises:
        ArenaError: it can still be shrunk or grown, has another size, or cannot be mapped.
    """
    if fd < 0:
        raise ArenaError("descriptor -1 is no arena: the connection is closed, or a client's")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size_bytes = os.fstat(fd).st_size
    except OSError as error:
        raise ArenaError(f"descriptor {fd} is no arena: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise ArenaError("the arena is not sealed: whoever holds it could truncate it")
    if size_bytes != arena_bytes:
        raise ArenaError(f"the arena should have {arena_bytes} bytes, found {size_bytes}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(fd, arena_bytes, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as error:
        raise ArenaError(f"cannot map {arena_bytes} bytes: {error.strerror}") from error
