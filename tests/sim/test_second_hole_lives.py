"""Lives that found mistakes of the second list; see tests/mutants/second_mutants.py."""

from __future__ import annotations

import pytest
from books import NO_STORE, World, cold_output, count_events, text

from kvledger.ledger import Account
from kvledger.sim import Kind


def test_what_a_request_did_not_store_comes_back_by_a_load(world: World) -> None:
    """It may not store, so its chunks are skipped; it is preempted, and another engine has stored
    the same prompt meanwhile."""
    first, second = world.engine(num_blocks=64), world.engine(num_blocks=64)
    prompt = text("skipped", 160)
    request = first.add(prompt, max_tokens=8, transfer_params=NO_STORE)
    for _ in range(3):
        first.step()
    second.add(prompt)
    world.settle(second)
    assert first.external_hit(request) == 0
    assert first.reset_prefix_cache(running=True)
    first.run()
    assert count_events(first, Kind.PREEMPTED, request) == 1
    assert [admission.external for admission in first.allocations(request)] == [0, 160]
    assert first.outputs[request] == cold_output(prompt, max_tokens=8)
    assert world.runs(first, request) == [("loaded", 10)]


@pytest.mark.parametrize("where", ["account", "names"])
def test_a_load_that_was_half_noted_is_answered(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A hook raises in the middle of taking note of a load: vLLM gets its answer all the same."""
    engine = world.engine(num_blocks=64)
    prompt = text("half noted", 160)
    engine.add(prompt)
    world.settle(engine)
    engine.reset_prefix_cache()

    def raising(*_: object) -> None:
        raise RuntimeError("a mistake that a test makes")

    with monkeypatch.context() as patch:
        if where == "account":
            patch.setattr(Account, "begin_load", raising)
        else:
            patch.setattr(engine.connector.scheduler.loads, "_names", None)
        request = engine.add(prompt, max_tokens=3)
        engine.begin_step()
    engine.run_workers()
    engine.finish_step()
    engine.run(max_steps=500)
    engine.connector.guard.failures = 0  # counted as it should be; the standing checks want none
    assert engine.outputs[request] == cold_output(prompt, max_tokens=3)
