"""A vLLM engine without a model, for testing KV connectors: any v1 connector, byte by byte.

>>> with SimulatedEngine("kvledger.vllm:KVLedgerConnector", num_blocks=64) as engine:
...     first = engine.add(range(1024))
...     engine.run()
...     engine.reset_prefix_cache()
...     second = engine.add(range(1024))
...     engine.run()
...     assert engine.external_hit(second) == 1024
...     assert engine.outputs[first] == engine.outputs[second]
...     engine.check()

:mod:`kvledger.sim.audit` plays a set of situations with any connector and prints its books.

Importing this package imports vLLM and torch; nothing of the server does.
"""

from __future__ import annotations

from kvledger.sim.engine import EngineStuckError, SimulatedEngine
from kvledger.sim.model import ConnectorOptions, EngineOptions
from kvledger.sim.oracle import Mismatch, OracleError
from kvledger.sim.records import Allocation, Event, Kind, StepRecord

__all__ = [
    "Allocation",
    "ConnectorOptions",
    "EngineOptions",
    "EngineStuckError",
    "Event",
    "Kind",
    "Mismatch",
    "OracleError",
    "SimulatedEngine",
    "StepRecord",
]
