"""With the connector: the same output, token by token, and exactly the predicted hits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import (
    CACHED_ID,
    UNLIMITED,
    ask,
    cached,
    forget,
    hits,
    latest_accounts,
    plain,
    running,
)
from observing import account_of, chunks, holds_nothing, totals, troubles, wait_until
from predictions import (
    BLOCK,
    LENGTHS,
    hit_after_reset,
    hit_of_common_prefix,
    hit_of_next_turn,
    local_hit,
)

from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import random_prompt
from kvledger.lab.server import ServerProcess

CHUNK_TOKENS = 256
CHUNKED_ID = "chunked"
UNLIMITED_ID = "unlimited"
CLOSE_SLACK_SECONDS = 5.0
"""vLLM's own end takes as long; on a busy machine it varies by some of it."""


def assert_same_output_and_hits(
    without: EngineProcess,
    engine: EngineProcess,
    server: ServerProcess,
    *,
    engine_id: str,
    seed: int,
    unit: int = BLOCK,
) -> None:
    """Each length twice, forgetting in between; a prompt of its own for each length.

    What was loaded is counted three times: by vLLM, by the server and by the request's account.
    """
    before = totals(server)
    distinct = 0
    for tokens in LENGTHS:
        prompt = random_prompt(seed + tokens, tokens)
        reference = ask(without, prompt)
        assert hits(reference) == (0, 0)
        forget(engine)
        cold = ask(engine, prompt)
        assert (hits(cold), cold.token_ids) == ((0, 0), reference.token_ids), tokens
        distinct += hit_of_next_turn(tokens, len(cold.token_ids), unit=unit) // unit
        forget(engine)
        found_before = totals(server)["hit_chunks"]
        again = ask(engine, prompt)
        expected = hit_after_reset(tokens, unit=unit)
        assert hits(again) == (0, expected), (tokens, latest_accounts(server))
        assert again.token_ids == reference.token_ids, tokens
        assert totals(server)["hit_chunks"] - found_before == expected // unit
        account = account_of(engine, server, engine_id, again)
        assert account["external_tokens"] == expected, account
        assert chunks(account, "loaded") == expected // unit, account
    wait_until(lambda: holds_nothing(server), "nothing is held")
    assert totals(server)["stored"] - before["stored"] == distinct, "no chunk is stored twice"


def test_lengths_in_steps_of_512(
    plain_engine: EngineProcess, cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    assert_same_output_and_hits(
        plain_engine, cached_engine, engine_server, engine_id=CACHED_ID, seed=10_000
    )


def test_what_the_engine_still_holds_is_not_loaded(cached_engine: EngineProcess) -> None:
    prompt = random_prompt(20_000, 500)
    first = ask(cached_engine, prompt)
    again = ask(cached_engine, prompt)
    assert hits(again) == (local_hit(500), 0)
    assert again.token_ids == first.token_ids


def test_a_common_beginning_hits_up_to_its_last_full_block(
    plain_engine: EngineProcess, cached_engine: EngineProcess
) -> None:
    prompt = random_prompt(20_001, 700)
    ask(cached_engine, prompt)
    other = prompt[:333] + random_prompt(20_002, 367)
    forget(cached_engine)
    result = ask(cached_engine, other)
    assert hits(result) == (0, hit_of_common_prefix(333))
    assert result.token_ids == ask(plain_engine, other).token_ids


def test_another_salt_shares_nothing(cached_engine: EngineProcess) -> None:
    """The negative control: the same tokens under another name are not found."""
    prompt = random_prompt(20_003, 300)
    for salt, expected in [("one", 0), ("one", hit_after_reset(300)), ("other", 0)]:
        forget(cached_engine)
        result = cached_engine.submit(prompt, cache_salt=salt).result()
        assert hits(result) == (0, expected), salt


@pytest.mark.parametrize("generated", [1, 100])
def test_each_turn_finds_the_turn_before(
    plain_engine: EngineProcess, cached_engine: EngineProcess, generated: int
) -> None:
    prompt = random_prompt(20_004 + generated, 700)
    expected = 0
    for turn in range(4):
        forget(cached_engine)
        result = ask(cached_engine, prompt, max_tokens=generated)
        assert hits(result) == (0, expected), turn
        assert result.token_ids == ask(plain_engine, prompt, max_tokens=generated).token_ids
        expected = hit_of_next_turn(len(prompt), generated)
        prompt = [*prompt, *result.token_ids, *random_prompt(turn, 60)]


@pytest.mark.full
def test_sixteen_equal_prompts_at_once(
    plain_engine: EngineProcess, cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    prompt = random_prompt(20_300, 4_000)
    reference = ask(plain_engine, prompt)
    assert ask(cached_engine, prompt).token_ids == reference.token_ids
    forget(cached_engine)
    results = cached_engine.generate([prompt] * 16)
    assert {result.token_ids for result in results} == {reference.token_ids}
    # 4,000 tokens are 125 full blocks; one request loads them, the others share the engine's.
    assert min(result.num_cached_tokens for result in results) >= local_hit(4_000)
    loaded = sum(
        chunks(account_of(cached_engine, engine_server, CACHED_ID, result), "loaded")
        for result in results
    )
    print(f"\n{loaded} chunks were loaded for 16 requests of {hit_after_reset(4_000) // BLOCK}")
    assert 1 <= loaded * BLOCK / hit_after_reset(4_000) <= 2, "each byte once, or twice"


@pytest.fixture(scope="module")
def unlimited_pair(
    small_model: Path, engine_server: ServerProcess
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    with running(
        plain(small_model, step_tokens=UNLIMITED),
        cached(small_model, engine_server, step_tokens=UNLIMITED, engine_id=UNLIMITED_ID),
    ) as (without, with_connector):
        yield without, with_connector


@pytest.mark.full
def test_lengths_in_one_step(
    unlimited_pair: tuple[EngineProcess, EngineProcess], engine_server: ServerProcess
) -> None:
    assert_same_output_and_hits(*unlimited_pair, engine_server, engine_id=UNLIMITED_ID, seed=30_000)


@pytest.mark.full
def test_a_connector_does_not_keep_an_engine_from_ending(
    unlimited_pair: tuple[EngineProcess, EngineProcess],
) -> None:
    """The last test of these two engines: ends them, one after the other."""
    seconds = []
    for engine in unlimited_pair:
        begin = time.monotonic()
        engine.close()
        seconds.append(time.monotonic() - begin)
    without, with_connector = seconds
    print(f"\nended in {without:.1f} s, with the connector in {with_connector / without:.2f} of it")
    assert with_connector < without + CLOSE_SLACK_SECONDS
    assert not troubles(unlimited_pair[1].log_path.read_text())


@pytest.mark.full
def test_lengths_in_chunks_of_256_tokens(
    plain_engine: EngineProcess, small_model: Path, engine_server: ServerProcess
) -> None:
    chunked = cached(
        small_model,
        engine_server,
        options={"chunk_tokens": CHUNK_TOKENS},
        engine_id=CHUNKED_ID,
    )
    with running(chunked):
        assert_same_output_and_hits(
            plain_engine,
            chunked,
            engine_server,
            engine_id=CHUNKED_ID,
            seed=40_000,
            unit=CHUNK_TOKENS,
        )
