"""When and how the scheduler side tells the server who the engine is.

The digest of the weights is computed on a thread of its own, so that the engine's start does not
wait for it. The root of vLLM's hash chain exists only once the first request has been hashed. Until
both are known nothing is described, and every look-up is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvledger.client import Connection
from kvledger.protocol import Describe
from kvledger.vllm.channel import Channel

logger = logging.getLogger("kvledger")

Fields = dict[str, str]


class IdentityFeed:
    """Describes the engine to each new server, from whichever thread meets it first.

    Args:
        slow_fields: reads the weights; run once, on a thread.
        hashing_fields: asks vLLM for the root of its hash chain; run once, at the first request.
        epoch_fields: the current weights epoch; asked at every description.
    """

    def __init__(
        self,
        *,
        slow_fields: Callable[[], Fields],
        hashing_fields: Callable[[], Fields],
        epoch_fields: Callable[[], Fields],
    ) -> None:
        self._hashing_fields = hashing_fields
        self._epoch_fields = epoch_fields
        self._slow: Fields | None = None
        self._hashing: Fields | None = None
        self._described: Connection | None = None
        self._changed = False
        self._thread = threading.Thread(
            target=self._read_weights, args=(slow_fields,), name="kvledger-identity", daemon=True
        )
        self._thread.start()

    def on_link_connected(self, connection: Connection) -> Describe | None:
        """On the link's thread: an idle engine is back in its namespace before its next request."""
        fields = self._fields()
        if fields is None:
            return None
        self._described = connection
        return Describe(id=connection.next_id(), fields=fields)

    def describe(self, channel: Channel) -> bool:
        """Send the description if it can be and has not been. True if this server knows it."""
        connection = channel.connection
        if connection is None:
            return False
        if self._described is connection and not self._changed:
            return True
        fields = self._fields()
        if fields is None or not channel.send(lambda number: Describe(id=number, fields=fields)):
            return False
        self._described, self._changed = connection, False
        return True

    def first_request(self) -> None:
        """A request has been hashed: the root of the hash chain exists from now on."""
        if self._hashing is None:
            self._hashing = self._hashing_fields()

    def epoch_changed(self) -> None:
        """The weights may have changed: the engine moves to another namespace."""
        self._changed = True

    def _fields(self) -> Fields | None:
        slow, hashing = self._slow, self._hashing
        if slow is None or hashing is None:
            return None
        return {**slow, **hashing, **self._epoch_fields()}

    def _read_weights(self, slow_fields: Callable[[], Fields]) -> None:
        try:
            self._slow = slow_fields()
        except Exception:
            logger.exception(
                "kvledger: the engine's identity could not be read; it runs without the cache"
            )
