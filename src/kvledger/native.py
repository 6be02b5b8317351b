"""Two system calls that Python offers only in a form too coarse for us.

``mmap.madvise`` holds the interpreter lock for as long as the kernel works (32 ms for 8 MiB of
fresh memory), and ``select.poll`` counts in whole milliseconds, where a look-up may wait for 300
microseconds. Both go through the C library here, which releases the lock and takes nanoseconds.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import select

MADV_POPULATE_WRITE = 23
"""Instantiate pages for writing, without touching their content (Linux 5.14)."""

_library = ctypes.CDLL(None, use_errno=True)


class _PollDescriptor(ctypes.Structure):
    _fields_ = (
        ("descriptor", ctypes.c_int),
        ("events", ctypes.c_short),
        ("returned_events", ctypes.c_short),
    )


class _TimeSpecification(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_library.madvise.restype = ctypes.c_int
_library.ppoll.argtypes = (
    ctypes.POINTER(_PollDescriptor),
    ctypes.c_ulong,
    ctypes.POINTER(_TimeSpecification),
    ctypes.c_void_p,
)
_library.ppoll.restype = ctypes.c_int


def populate_for_writing(mapping: mmap.mmap, start: int, length_bytes: int) -> None:
    """Instantiate ``length_bytes`` of a writable mapping; blocks, without the interpreter lock.

    Raises:
        OSError: the kernel could not (ENOMEM), or does not know how (EINVAL, before Linux 5.14).
    """
    anchor = ctypes.c_char.from_buffer(mapping, start)
    if _library.madvise(ctypes.addressof(anchor), length_bytes, MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def wait_for_socket(descriptor: int, timeout_seconds: float, *, also_writable: bool) -> bool:
    """Wait until a socket is readable (or writable, or broken); False if the time ran out.

    Blocks for at most ``timeout_seconds``, exact to a few tens of microseconds. A signal that
    arrives meanwhile ends the wait early, with False.
    """
    events = select.POLLIN | (select.POLLOUT if also_writable else 0)
    entry = _PollDescriptor(descriptor, events, 0)
    fraction, whole = math.modf(max(0.0, timeout_seconds))
    timeout = _TimeSpecification(int(whole), int(fraction * 1e9))
    ready: int = _library.ppoll(ctypes.byref(entry), 1, ctypes.byref(timeout), None)
    if ready < 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return ready > 0
