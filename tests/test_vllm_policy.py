"""What a request may store and load: the whole table of roles, options and switches."""

from __future__ import annotations

import logging
from itertools import product

import pytest

from kvledger.ledger import StoreRule
from kvledger.reasons import Reason
from kvledger.vllm.options import Options, StoreMode
from kvledger.vllm.policy import RequestPolicy
from vllm_desk import FakeRequest

BLOCK, CHUNK = 16, 64
ROLES = {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}


def policy(role: str = "kv_both", **options: object) -> RequestPolicy:
    may_store, may_load = ROLES[role]
    return RequestPolicy(
        Options(socket="s", **options),  # type: ignore[arg-type]
        may_store=may_store,
        may_load=may_load,
        block_tokens=BLOCK,
        chunk_tokens=CHUNK,
    )


def request(prompt_tokens: int = 200, **changes: object) -> FakeRequest:
    made = FakeRequest("r", chunks=4, num_prompt_tokens=prompt_tokens)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("store", ["all", "prompt", "none"])
@pytest.mark.parametrize("load", [True, False])
def test_the_whole_table(role: str, store: StoreMode, load: bool) -> None:
    """Role × option × the request's own switches × adapter × reading skipped."""
    decider = policy(role, store=store, load=load)
    tristate = (None, True, False)
    for own_store, own_load, adapter, skipped in product(tristate, tristate, *[(False, True)] * 2):
        switches = {"kvledger.store": own_store, "kvledger.load": own_load}
        params = {name: value for name, value in switches.items() if value is not None}
        decision = decider.decide(
            request(
                kv_transfer_params=params or None,
                lora_request=object() if adapter else None,
                skip_reading_prefix_cache=skipped,
            )
        )
        stores = role != "kv_consumer" and store != "none" and own_store is not False
        loads = role != "kv_producer" and load and own_load is not False
        if adapter:
            assert decision.store == StoreRule(0, Reason.ADAPTER_UNKNOWN)
            assert decision.no_load is Reason.ADAPTER_UNKNOWN
            continue
        if not stores:
            assert decision.store == StoreRule(0, Reason.STORE_DISABLED)
        elif store == "prompt":
            assert decision.store == StoreRule(200 // CHUNK, Reason.GENERATED_NOT_STORED)
        else:
            assert decision.store.chunks is None
        expected = None if loads else Reason.LOAD_DISABLED
        assert decision.no_load is (Reason.READING_SKIPPED if skipped else expected)


@pytest.mark.parametrize(("prompt_tokens", "chunks"), [(63, 0), (64, 1), (127, 1), (128, 2)])
def test_prompt_only_counts_whole_chunks_of_the_prompt(prompt_tokens: int, chunks: int) -> None:
    decision = policy(store="prompt").decide(request(prompt_tokens))
    assert decision.store.chunks == chunks


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, "text", 7, ["kvledger.store"]])
def test_foreign_params_change_nothing(params: object) -> None:
    decision = policy().decide(request(kv_transfer_params=params))
    assert decision.store == StoreRule()
    assert decision.no_load is None


@pytest.mark.parametrize("value", [0, 1, "false", None, []])
@pytest.mark.parametrize("switch", ["kvledger.store", "kvledger.load"])
def test_a_switch_that_is_no_truth_value_is_named(
    switch: str, value: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvledger"), "propagate", True)
    decision = policy().decide(request(kv_transfer_params={switch: value}))
    assert decision.store == StoreRule()
    assert decision.no_load is None
    assert switch in caplog.text
    assert repr(value) in caplog.text


def test_the_shortest_hit() -> None:
    assert policy().minimum_hit(0) == 1
    assert policy().minimum_hit(48) == BLOCK + 1, "a single block behind a local hit is no load"
    for local in (0, 48):
        assert policy(min_hit_tokens=100).minimum_hit(local) == 100
        assert policy(min_hit_tokens=0).minimum_hit(local) == 1
