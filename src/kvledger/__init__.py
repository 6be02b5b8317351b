"""kvledger: a KV-cache server for vLLM engines whose books always balance."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]

if TYPE_CHECKING:
    from kvledger.client import Client


def __getattr__(name: str) -> object:
    """Import the client only for those who ask for it: the pure core must stay importable alone."""
    if name == "Client":
        from kvledger.client import Client

        return Client
    raise AttributeError(f"module 'kvledger' has no attribute {name!r}")
