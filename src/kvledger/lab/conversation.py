"""The driving end of the socket to an engine's child process: commands out, reports in."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from concurrent.futures import Future

from kvledger.lab import messages


class Answer:
    """What is to come back for one command.

    Attributes:
        first_token: set once a Generate has produced something, and when nothing will come.
        report: the final report, or EOFError if the child ended before it.
    """

    def __init__(self) -> None:
        self.first_token = threading.Event()
        self.report: Future[messages.Report] = Future()


class Conversation:
    """Numbers commands and hands each report to the one who waits for it. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Answer] = {}
        self._ended = False
        self.ready = Answer()
        self._reader = threading.Thread(target=self._read, name="engine-reports", daemon=True)
        self._reader.start()

    def next_id(self) -> int:
        """A number no other command of this conversation has."""
        return next(self._ids)

    def start(self, command: messages.Start) -> None:
        """Send the first command; :attr:`ready` is its answer."""
        self._send(command)

    def send(self, command: messages.Numbered) -> Answer:
        """Send one command; does not wait for its answer."""
        answer = Answer()
        with self._lock:
            if self._ended:
                _fail(answer)
                return answer
            self._pending[command.id] = answer
        self._send(command)
        return answer

    def end(self) -> None:
        """Say that no command will follow; the child shuts its engine down and goes."""
        with contextlib.suppress(OSError):  # The child is gone already.
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Free what this end holds. The child must be gone: waits for the end of its reports."""
        self._reader.join()
        self._socket.close()

    def _send(self, command: messages.Command) -> None:
        # If the child is gone, the reader fails everything that waits.
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendall(messages.encode([command]))

    def _read(self) -> None:
        """Deliver reports until the child closes its end; then fail what still waits."""
        with contextlib.suppress(ConnectionResetError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._deliver(messages.reports.decode(line))
        with self._lock:
            self._ended = True
            waiting = [self.ready, *self._pending.values()]
            self._pending.clear()
        for answer in waiting:
            _fail(answer)

    def _deliver(self, report: messages.Report) -> None:
        if isinstance(report, messages.Ready):
            self.ready.report.set_result(report)
        elif isinstance(report, messages.FirstToken):
            with self._lock:
                answer = self._pending[report.id]
            answer.first_token.set()
        else:
            with self._lock:
                answer = self._pending.pop(report.id)
            answer.report.set_result(report)
            answer.first_token.set()


def _fail(answer: Answer) -> None:
    """Nothing will come any more; an answer that has come stays."""
    if not answer.report.done():
        answer.report.set_exception(EOFError("the child process has ended"))
    answer.first_token.set()
