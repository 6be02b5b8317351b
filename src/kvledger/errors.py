"""The exceptions a caller of kvledger can meet.

Expected failures (a miss, a full arena) are values, not exceptions. What is raised here says what
was expected, what was found and what to do next, in one sentence.
"""

from __future__ import annotations


class KVLedgerError(Exception):
    """Base class of every error that kvledger raises on purpose."""


class ConfigurationError(KVLedgerError):
    """An option that cannot be right; the message names the option and the remedy."""


class ProtocolError(KVLedgerError):
    """Bytes on the socket that are not a message of this protocol version."""


class ServerUnavailableError(KVLedgerError):
    """No server answered on the socket within the deadline."""


class RefusedError(KVLedgerError):
    """The server understood the request and refused it.

    Attributes:
        code: stable word for the kind of refusal (see :class:`kvledger.protocol.ErrorCode`).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ArenaError(KVLedgerError):
    """Shared memory could not be created, sealed, grown or mapped."""
