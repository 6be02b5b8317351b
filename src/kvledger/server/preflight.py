"""What is checked and taken before the server starts: memory, lock, socket, HTTP port.

Each refusal is one sentence that names the option and what to do. The lock beside the socket
decides which of two servers that start at the same moment wins; the kernel drops it when its
holder dies, so a socket file whose lock is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
from dataclasses import dataclass

from kvledger.config import HttpAddress, ServerConfig, format_size
from kvledger.errors import ConfigurationError
from kvledger.server.machine import MemoryReading

LISTEN_BACKLOG = 1024
PRIVATE_MODE = 0o600
GROUP_MODE = 0o660


def check_memory(config: ServerConfig, reading: MemoryReading) -> None:
    """Refuse more memory than this machine, or this container, has.

    Raises:
        ConfigurationError: naming how much there is.
    """
    if config.memory_bytes > reading.limit_bytes:
        raise ConfigurationError(
            f"--memory is {format_size(config.memory_bytes)}, but this machine (or its container) "
            f"has {format_size(reading.limit_bytes)}; give less"
        )


def group_id(config: ServerConfig) -> int | None:
    """Numeric id of the configured group.

    Raises:
        ConfigurationError: there is no such group.
    """
    if config.group is None:
        return None
    try:
        return grp.getgrnam(config.group).gr_gid
    except (KeyError, ValueError) as error:  # ValueError: a zero byte
        raise ConfigurationError(
            f"--group {config.group!r} does not exist; create it, or name an existing group"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The listening Unix socket and the lock that goes with it."""

    listener: socket.socket
    lock_fd: int
    path: str
    inode: int

    def stop_listening(self) -> None:
        """Close the socket, and remove its file if it is still ours. Idempotent."""
        self.listener.close()
        with contextlib.suppress(OSError):  # gone, or its directory is: nothing to remove
            if os.stat(self.path, follow_symlinks=False).st_ino == self.inode:
                os.unlink(self.path)

    def close(self) -> None:
        """Stop listening and give the lock back."""
        self.stop_listening()
        os.close(self.lock_fd)


def open_endpoint(config: ServerConfig) -> Endpoint:
    """Take the lock and listen.

    Raises:
        ConfigurationError: the directory or the path cannot be used, or another server has it.
    """
    path = config.socket_path
    group = group_id(config)
    _make_directory(os.path.dirname(path), group)
    lock_fd = _take_lock(path)
    try:
        _remove_stale(path)
        listener = _bind(path, group)
    except BaseException:
        os.close(lock_fd)
        raise
    inode = os.stat(path, follow_symlinks=False).st_ino
    return Endpoint(listener=listener, lock_fd=lock_fd, path=path, inode=inode)


def open_http(address: HttpAddress) -> socket.socket:
    """A listening TCP socket.

    Raises:
        ConfigurationError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except (OSError, TypeError, ValueError) as error:  # no OSError: no host can have that name
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigurationError(
            f"--http {address} cannot be used ({why}); choose another address, or --http off"
        ) from error


def _make_directory(directory: str, group: int | None) -> None:
    try:
        if not os.path.isdir(directory):
            os.makedirs(directory, mode=0o700)
            if group is not None:
                os.chown(directory, -1, group)
                os.chmod(directory, 0o750)
    except OSError as error:
        raise ConfigurationError(
            f"--socket: cannot create the directory {directory} ({error.strerror}); "
            "create it, or choose another path"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--socket: the directory {directory} is not writable; give another path (without "
            "XDG_RUNTIME_DIR the default is root's), and the engines the same as kvledger.socket"
        )


def _take_lock(path: str) -> int:
    lock_path = f"{path}.lock"
    try:
        lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"--socket: cannot open {lock_path} ({error.strerror}); choose another path"
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock_fd)
        raise _in_use(path) from error
    return lock_fd


def _in_use(path: str) -> ConfigurationError:
    return ConfigurationError(
        f"--socket {path} is in use by a running server; stop that one, or choose another path"
    )


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(
            f"--socket {path} exists and is not a socket; remove it, or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise _in_use(path) from error
    raise _in_use(path)


def _bind(path: str, group: int | None) -> socket.socket:
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )
    previous_mask = os.umask(0o177)  # nobody else may connect before the mode is set
    try:
        listener.bind(path)
        if group is not None:
            os.chown(path, -1, group)
        os.chmod(path, PRIVATE_MODE if group is None else GROUP_MODE)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"--socket {path} cannot be used ({error.strerror}); choose another path"
        ) from error
    finally:
        os.umask(previous_mask)
    return listener
