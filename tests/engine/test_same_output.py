"""With the connector: the same output, token by token, and exactly the predicted hits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import UNLIMITED, ask, cached, forget, hits, latest_accounts, plain, running
from predictions import (
    BLOCK,
    LENGTHS,
    hit_after_reset,
    hit_of_common_prefix,
    hit_of_next_turn,
    local_hit,
)

from kvledger.client import Client
from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import random_prompt
from kvledger.lab.server import ServerProcess

CHUNK_TOKENS = 256
SETTLE_SECONDS = 60.0


def assert_same_output_and_hits(
    without: EngineProcess,
    engine: EngineProcess,
    server: ServerProcess,
    *,
    seed: int,
    unit: int = BLOCK,
) -> None:
    """Each length twice, forgetting in between; a prompt of its own for each length."""
    for tokens in LENGTHS:
        prompt = random_prompt(seed + tokens, tokens)
        reference = ask(without, prompt)
        assert hits(reference) == (0, 0)
        forget(engine)
        cold = ask(engine, prompt)
        assert (hits(cold), cold.token_ids) == ((0, 0), reference.token_ids), tokens
        forget(engine)
        again = ask(engine, prompt)
        expected = (0, hit_after_reset(tokens, unit=unit))
        assert hits(again) == expected, (tokens, latest_accounts(server))
        assert again.token_ids == reference.token_ids, tokens


def test_lengths_in_steps_of_512(
    plain_engine: EngineProcess, cached_engine: EngineProcess, engine_server: ServerProcess
) -> None:
    assert_same_output_and_hits(plain_engine, cached_engine, engine_server, seed=10_000)


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
    plain_engine: EngineProcess, cached_engine: EngineProcess
) -> None:
    prompt = random_prompt(20_300, 4_000)
    reference = ask(plain_engine, prompt)
    assert ask(cached_engine, prompt).token_ids == reference.token_ids
    forget(cached_engine)
    results = cached_engine.generate([prompt] * 16)
    assert {result.token_ids for result in results} == {reference.token_ids}
    # 4,000 tokens are 125 full blocks; one request loads them, the others share the engine's.
    assert min(result.num_cached_tokens for result in results) >= local_hit(4_000)
    assert sum(result.external_hit_tokens for result in results) < 2 * hit_after_reset(4_000)


@pytest.fixture(scope="module")
def unlimited_pair(
    small_model: Path, engine_server: ServerProcess
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    with running(
        plain(small_model, step_tokens=UNLIMITED),
        cached(small_model, engine_server, step_tokens=UNLIMITED),
    ) as (without, with_connector):
        yield without, with_connector


@pytest.mark.full
def test_lengths_in_one_step(
    unlimited_pair: tuple[EngineProcess, EngineProcess], engine_server: ServerProcess
) -> None:
    assert_same_output_and_hits(*unlimited_pair, engine_server, seed=30_000)


@pytest.mark.full
def test_chunks_of_256_tokens_and_a_small_server(
    plain_engine: EngineProcess, small_model: Path, engine_server: ServerProcess, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "small.sock", memory="20MB") as small_server:
        chunked = cached(
            small_model, engine_server, step_tokens=512, options={"chunk_tokens": CHUNK_TOKENS}
        )
        crowded = cached(small_model, small_server, step_tokens=512)
        with running(chunked, crowded):
            assert_same_output_and_hits(
                plain_engine, chunked, engine_server, seed=40_000, unit=CHUNK_TOKENS
            )
            assert_newest_is_always_there(plain_engine, crowded, small_server)
            assert_books_balance(small_server, requests=72)


def assert_newest_is_always_there(
    without: EngineProcess, engine: EngineProcess, server: ServerProcess
) -> None:
    """12 prompts of 6 MB through 20 MB, three rounds: the latest prompt is always found."""
    prompts = [random_prompt(50_000 + number, 1_500) for number in range(12)]
    references = [ask(without, prompt).token_ids for prompt in prompts]
    for _ in range(3):
        for prompt, reference in zip(prompts, references, strict=True):
            forget(engine)
            assert ask(engine, prompt).token_ids == reference
            forget(engine)
            again = ask(engine, prompt)
            assert hits(again) == (0, hit_after_reset(1_500)), latest_accounts(server)
            assert again.token_ids == reference


def assert_books_balance(server: ServerProcess, *, requests: int) -> None:
    """Every request has a closed account, and none of them has a full block without a fate."""
    end = time.monotonic() + SETTLE_SECONDS
    with Client(str(server.socket_path)) as client:
        while (accounts := client.status()["accounts"])["reports"] < requests:
            assert time.monotonic() < end, accounts
            time.sleep(0.05)
    assert accounts["reports"] == requests
    assert accounts["unbalanced"] == 0
