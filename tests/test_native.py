"""The two system calls."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time

import pytest

from kvledger.native import populate_for_writing, wait_for_socket


def test_waiting_ends_when_there_is_something_to_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not wait_for_socket(one.fileno(), 0.0, also_writable=False)
        assert wait_for_socket(one.fileno(), 0.0, also_writable=True)
        other.send(b"x")
        assert wait_for_socket(one.fileno(), 5.0, also_writable=False)


def test_short_waits_are_short() -> None:
    """poll() would round 300 µs up to a millisecond, and must not be what is used."""
    one, other = socket.socketpair()
    with one, other:
        durations = []
        for _ in range(50):
            begin = time.perf_counter()
            assert not wait_for_socket(one.fileno(), 0.0003, also_writable=False)
            durations.append(time.perf_counter() - begin)
    assert 0.0003 <= min(durations) < 0.001


def test_waiting_notices_a_closed_peer() -> None:
    one, other = socket.socketpair()
    with one:
        threading.Timer(0.05, other.close).start()
        assert wait_for_socket(one.fileno(), 10.0, also_writable=False)


def test_a_bad_descriptor_is_ready_rather_than_waited_for() -> None:
    fd = os.dup(0)
    os.close(fd)
    assert wait_for_socket(fd, 10.0, also_writable=False)


def test_populating_what_cannot_be_written_fails() -> None:
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4096)
    mapping = mmap.mmap(fd, 4096)
    os.ftruncate(fd, 0)
    with pytest.raises(OSError, match=r"Bad address|Cannot allocate"):
        populate_for_writing(mapping, 0, 4096)
    os.close(fd)
