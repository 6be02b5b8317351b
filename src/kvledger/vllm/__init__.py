"""The connector for vLLM. Everything that depends on vLLM's version is in this package.

``kv_connector_module_path="kvledger.vllm"`` finds :class:`KVLedgerConnector` here; it is imported
on first access, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvledger.vllm.connector import KVLedgerConnector

__all__ = ["KVLedgerConnector"]


def __getattr__(name: str) -> object:
    if name == "KVLedgerConnector":
        from kvledger.vllm.connector import KVLedgerConnector

        return KVLedgerConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
