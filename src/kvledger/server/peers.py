"""Who is at the other end of a socket, and whether a process still lives. Asks the kernel only."""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("iii")
_SO_PEERGROUPS = 59
_MAX_GROUPS = 256
"""What one getsockopt of Python can return; a peer in more groups is refused with an OSError."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Credentials the peer had when it connected, as the kernel tells."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Credentials of a connected Unix socket; pid 0 if it lives in a PID namespace not ours."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(packed))


def may_connect(connection: socket.socket, peer: Peer, group: int | None) -> bool:
    """The server's own user, root, and members of the configured group may."""
    if peer.uid in (0, os.geteuid()):
        return True
    if group is None:
        return False
    if peer.gid == group:
        return True
    packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    return group in struct.unpack(f"{len(packed) // 4}I", packed)


def pid_of_pidfd(descriptor: int) -> int | None:
    """Process id behind a pidfd: 0 if not visible from here, -1 if ended; None: not a pidfd."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("Pid:"):
                return int(line.removeprefix("Pid:"))
    return None


def identity_of_pidfd(descriptor: int, pid: int) -> tuple[int, int] | None:
    """Equal for two pidfds of one process, and never for two processes that live at one time.

    Newer kernels (6.9) give each process its own inode; older ones keep all pidfds on the one
    anonymous inode, where the process id decides, if it is visible. None: cannot be told.
    """
    status = os.fstat(descriptor)
    probe = os.eventfd(0)
    anonymous = os.fstat(probe)
    os.close(probe)
    if (status.st_dev, status.st_ino) != (anonymous.st_dev, anonymous.st_ino):
        return (status.st_dev, status.st_ino)
    return (-1, pid) if pid > 0 else None


def has_ended(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended. Does not block."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
