"""Audits a KV connector: plays named situations with it and keeps the books.

>>> report = audit("ExampleConnector", extra_config={"shared_storage_path": directory})
>>> report.situation("single prompt").books.stored
62
>>> report.is_clean
False

Any v1 connector will do. Each situation is played by simulated engines in a process of its own, so
an exception, a hang or a dead process is a finding and not the end. What the connector has stored
is seen through a second engine, so no knowledge of the store is needed. See ``docs/audit.md``.
"""

from __future__ import annotations

from kvledger.sim.audit.auditor import BLOCK_SIZE, audit

__all__ = ["BLOCK_SIZE", "audit"]
