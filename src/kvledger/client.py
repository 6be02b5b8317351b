"""The public face of the socket.

:class:`Client` is for people and scripts, and waits for its answers. :class:`Connection` and
:class:`Link` are for engines, and never do.
"""

from __future__ import annotations

import json
import os
import time
from types import TracebackType
from typing import Any, Self, cast

from kvledger.config import default_socket_path
from kvledger.connection import Connection
from kvledger.errors import ProtocolError, RefusedError, ServerUnavailableError
from kvledger.link import Link
from kvledger.protocol import (
    PROTOCOL_VERSION,
    Clear,
    Cleared,
    Error,
    Explain,
    Hello,
    Reply,
    Request,
    Role,
    Status,
    StatusReply,
)

__all__ = ["Client", "Connection", "Link"]


class Client:
    """Asks a server, and waits for its answers. For people and scripts; not for engines.

    Args:
        socket_path: where the server listens; None: the default place.
        timeout_seconds: how long to wait for each answer.

    Raises:
        ServerUnavailableError: no server there.
        RefusedError: the server speaks another protocol version.
    """

    def __init__(self, socket_path: str | None = None, *, timeout_seconds: float = 5.0) -> None:
        self._socket_path = socket_path or default_socket_path()
        self._timeout_seconds = timeout_seconds
        hello = Hello(
            id=1,
            protocol=PROTOCOL_VERSION,
            engine="",
            role=Role.CLIENT,
            rank=0,
            world_size=1,
            label=f"client, pid {os.getpid()}",
        )
        self._connection = Connection.open(
            self._socket_path, hello, deadline_seconds=timeout_seconds
        )

    def status(self) -> dict[str, Any]:
        """The server's state, as its HTTP API shows it under ``/api/v1/status``."""
        return self._document(Status(id=self._connection.next_id()))

    def explain(self, request: str = "") -> list[dict[str, Any]]:
        """The latest accounts of requests whose id begins with ``request``, the newest first."""
        document = self._document(Explain(id=self._connection.next_id(), request=request))
        return cast("list[dict[str, Any]]", document["accounts"])

    def clear(self, namespace: str = "") -> int:
        """Drop the unleased objects of a namespace, or of all; how many were dropped."""
        reply = self._ask(Clear(id=self._connection.next_id(), namespace=namespace))
        if not isinstance(reply, Cleared):
            raise ProtocolError(f"expected Cleared, the server sent {type(reply).__name__}")
        return reply.objects

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _document(self, request: Request) -> dict[str, Any]:
        reply = self._ask(request)
        if not isinstance(reply, StatusReply):
            raise ProtocolError(f"expected StatusReply, the server sent {type(reply).__name__}")
        return cast("dict[str, Any]", json.loads(reply.document))

    def _ask(self, request: Request) -> Reply:
        """Send a request and wait for its answer."""
        end = time.monotonic() + self._timeout_seconds
        self._connection.send(request)
        while not self._connection.closed:
            left_seconds = end - time.monotonic()
            if left_seconds <= 0:
                break
            for reply in self._connection.receive(left_seconds):
                if reply.id != request.id:
                    continue
                if isinstance(reply, Error):
                    raise RefusedError(reply.code, reply.message)
                return reply
        raise ServerUnavailableError(
            f"the server on {self._socket_path} did not answer within "
            f"{self._timeout_seconds:g} s; is it stopped, or shutting down?"
        )
