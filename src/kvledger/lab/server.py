"""A kvledger server in a child process, as ``kvledger serve`` starts it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvledger.errors import KVLedgerError

START_SECONDS = 30.0
"""A server is up in half a second; sixty times that is a hang."""

CLOSE_SECONDS = 30.0
_POLL_SECONDS = 0.005
_LOG_TAIL_BYTES = 4_000


class ServerError(KVLedgerError):
    """The server ended or did not come up in time; shows the end of its log."""


class ServerProcess:
    """One server; returns at once, see :meth:`wait_ready`.

    Args:
        socket_path: where it listens.
        memory: size of the arena, as on the command line ("20MB", "1GiB").
        http: "host:port" or "off".
        arguments: more of ``kvledger serve``'s options.
        env: environment variables over the inherited ones.
        log_path: file that takes what it prints; beside the socket if None.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        memory: str,
        http: str = "off",
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.socket_path = socket_path
        self.log_path = log_path or socket_path.with_suffix(".log")
        command = [sys.executable, "-m", "kvledger", "serve"]
        command += ["--memory", memory, "--socket", str(socket_path)]
        command += ["--http", http, *arguments]
        self.started = time.perf_counter()
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> Self:
        """Block until it accepts connections.

        Raises:
            ServerError: it ended instead, or is not up in time (it is killed then).
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._accepts():
            ended, _, _ = select.select([self._pidfd], [], [], _POLL_SECONDS)
            if ended or time.monotonic() > deadline:
                what = "the server has ended" if ended else "the server does not listen"
                tail = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
                self.kill()
                raise ServerError(f"{what}; the end of {self.log_path}:\n{tail}")
        return self

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def send_signal(self, number: signal.Signals) -> None:
        """Stop, continue or otherwise disturb it."""
        self._process.send_signal(number)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """End it in order; kill it after ``timeout_seconds``. Twice is harmless."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        select.select([self._pidfd], [], [], timeout_seconds)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is not None:
            return
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_path))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True
