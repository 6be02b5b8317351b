"""vLLM's ``vllm.general_plugins`` entry point: makes the connector known by its name.

vLLM loads plugins in every process, some more than once, so registering twice is harmless, and
nothing heavy is imported here.
"""

from __future__ import annotations

CONNECTOR_NAME = "KVLedgerConnector"


def register() -> None:
    """Register the connector with vLLM's factory. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "kvledger.vllm.connector", CONNECTOR_NAME
        )
