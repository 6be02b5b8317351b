"""vLLM's own ExampleConnector in the simulated engine: it takes connectors it has never seen.

It stores whole prompts in files, layer by layer, through the attention hooks.
"""

from __future__ import annotations

import pytest

import sim_support  # noqa: F401  (quiet logs)
from kvledger.sim import SimulatedEngine


def test_example_connector_gives_the_same_answer(tmp_path):
    options = {"shared_storage_path": str(tmp_path)}
    with SimulatedEngine(
        "ExampleConnector", extra_config=options, num_blocks=100, max_batched_tokens=1024
    ) as engine:
        first = engine.add(range(600), max_tokens=8)
        engine.run()
        assert engine.reset_prefix_cache()
        second = engine.add(range(600), max_tokens=8)
        engine.run()
        engine.check()
        assert engine.external_hit(second) == 592
        assert engine.outputs[first] == engine.outputs[second]


def test_example_connector_does_not_understand_chunked_prefill(tmp_path):
    """It takes the first chunk for the whole prompt, and fails when it loads."""
    options = {"shared_storage_path": str(tmp_path)}
    with SimulatedEngine(
        "ExampleConnector", extra_config=options, num_blocks=100, max_batched_tokens=256
    ) as engine:
        engine.add(range(600))
        engine.run()
        engine.reset_prefix_cache()
        engine.add(range(600))
        with pytest.raises(RuntimeError, match="shape mismatch"):
            engine.run()
