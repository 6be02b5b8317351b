"""More than fits: into the engine, so that it preempts, and into the server, so that it evicts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import ask, cached, forget, hits, latest_accounts, running
from observing import account_of, holds_nothing, status, totals, wait_until
from predictions import BLOCK, hit_after_reset

from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import random_prompt
from kvledger.lab.server import ServerProcess

pytestmark = pytest.mark.full

TIGHT_BLOCKS = 100
TIGHT_ID = "tight"
TIGHT_PROMPTS, TIGHT_TOKENS, TIGHT_GENERATED = 6, 600, 200
"""6 × 800 tokens where 3,200 fit."""
SMALL_BYTES = 20_000_000
PROMPTS, PROMPT_TOKENS, GENERATED = 12, 1_500, 32
"""12 × 6 MB through 20 MB."""
IN_FLIGHT = 4
ROUNDS = 3
SAMPLE_SECONDS = 0.02


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("small")
    memory = str(SMALL_BYTES)
    with ServerProcess(directory / "kvledger.sock", memory=memory) as server:
        yield server


@pytest.fixture(scope="module")
def engines(
    small_model: Path, engine_server: ServerProcess, small_server: ServerProcess
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """One that has few blocks, and one whose server has little memory."""
    with running(
        cached(
            small_model,
            engine_server,
            engine_id=TIGHT_ID,
            num_blocks=TIGHT_BLOCKS,
            max_model_len=2_048,
        ),
        cached(small_model, small_server),
    ) as (tight, crowded):
        yield tight, crowded


@pytest.fixture
def tight(engines: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    forget(engines[0])
    return engines[0]


@pytest.fixture
def crowded(engines: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    forget(engines[1])
    return engines[1]


# ---------------------------------------------------------------- few blocks in the engine


def test_preempted_requests_are_loaded_again(
    plain_engine: EngineProcess, tight: EngineProcess, engine_server: ServerProcess
) -> None:
    prompts = [random_prompt(90_000 + number, TIGHT_TOKENS) for number in range(TIGHT_PROMPTS)]
    references = [ask(plain_engine, prompt, max_tokens=TIGHT_GENERATED) for prompt in prompts]
    results = tight.generate(prompts, max_tokens=TIGHT_GENERATED)
    for result, reference in zip(results, references, strict=True):
        assert result.token_ids == reference.token_ids
    preemptions = tight.metrics()["vllm:num_preemptions_total"]
    accounts = [account_of(tight, engine_server, TIGHT_ID, result) for result in results]
    loaded = [account["external_tokens"] for account in accounts]
    print(f"\n{preemptions:.0f} preemptions, tokens loaded: {loaded}")
    assert preemptions > 0
    assert sum(loaded) > 0, "nobody else has ever computed these prompts"
    assert not any(account["imbalance"] for account in accounts)
    wait_until(lambda: holds_nothing(engine_server), "nothing is held")


def test_a_reset_of_the_connector_forgets_for_this_engine_only(
    cached_engine: EngineProcess, tight: EngineProcess, engine_server: ServerProcess
) -> None:
    prompt = random_prompt(90_100, 1_000)
    all_of_it = hit_after_reset(1_000)
    right = ask(cached_engine, prompt).token_ids

    def found(engine: EngineProcess) -> tuple[int, int]:
        forget(engine)
        result = ask(engine, prompt)
        assert result.token_ids == right
        return hits(result)

    assert found(tight) == (0, all_of_it), "two engines of different size share"
    long_prompt = random_prompt(90_101, 500)
    long = tight.submit(long_prompt, max_tokens=400)
    long.wait_first_token()
    assert tight.reset_prefix_cache(reset_running=True, reset_connector=True)
    assert not long.done()
    answer = long.result()
    assert answer.token_ids == ask(cached_engine, long_prompt, max_tokens=400).token_ids

    assert found(tight) == (0, 0), "the weights might have changed"
    forget(tight)
    assert hits(ask(tight, long_prompt)) == (0, 0), "it was alive when the cache was reset"
    assert found(tight) == (0, all_of_it), "what it computes from now on is found"
    assert found(cached_engine) == (0, all_of_it), "another engine keeps its own"
    wait_until(lambda: holds_nothing(engine_server), "nothing is held")
    assert status(engine_server)["accounts"]["unbalanced"] == 0


# ---------------------------------------------------------------- little memory in the server


def resident(pid: int) -> dict[str, int]:
    """Resident bytes of a process by kind: "RssAnon", "RssShmem"."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1_024 for name in ("RssAnon", "RssShmem")}


@contextmanager
def memory_stays_below(server: ServerProcess, limit_bytes: int) -> Iterator[None]:
    """Sample the server's memory all the while; the arena and what is private to it count."""
    before = resident(server.pid)
    samples = [before]
    end = threading.Event()

    def sample() -> None:
        while not end.wait(SAMPLE_SECONDS):
            samples.append(resident(server.pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    shared = max(sample["RssShmem"] for sample in samples)
    private = max(sample["RssAnon"] for sample in samples)
    grown = private - before["RssAnon"]
    print(f"\n{len(samples)} samples: {shared:,} B shared, private grew by {grown:,} B")
    assert len(samples) > ROUNDS * PROMPTS
    assert shared <= limit_bytes
    memory = status(server)["memory"]
    assert memory["used_bytes"] <= memory["arena_bytes"] <= memory["limit_bytes"] == limit_bytes
    assert memory["arena_bytes"] + memory["metadata_bytes"] <= limit_bytes


def prompts_of(seed: int) -> list[list[int]]:
    return [random_prompt(seed + number, PROMPT_TOKENS) for number in range(PROMPTS)]


def assert_whole_prefixes(
    engine: EngineProcess, server: ServerProcess, conversations: list[list[int]]
) -> None:
    """What the server holds are beginnings of these, each without a hole: nothing else is there.

    Asking stores nothing, so it evicts nothing.
    """
    found = 0
    for conversation in conversations:
        forget(engine)
        result = ask(engine, conversation, max_tokens=1, switches={"kvledger.store": False})
        assert result.external_hit_tokens % BLOCK == 0
        found += result.external_hit_tokens // BLOCK
    wait_until(lambda: holds_nothing(server), "nothing is held")
    objects = totals(server)["objects"]
    print(f"{objects} chunks are held, {found} of them are in prefixes")
    assert found == objects > 0, "a tail without its head"


def test_what_does_not_fit_is_evicted_from_its_end(
    plain_engine: EngineProcess, crowded: EngineProcess, small_server: ServerProcess
) -> None:
    prompts = prompts_of(50_000)
    references = [ask(plain_engine, prompt, max_tokens=GENERATED).token_ids for prompt in prompts]
    with memory_stays_below(small_server, SMALL_BYTES):
        for _ in range(ROUNDS):
            for prompt, reference in zip(prompts, references, strict=True):
                forget(crowded)
                first = ask(crowded, prompt, max_tokens=GENERATED)
                assert first.external_hit_tokens % BLOCK == 0
                assert first.token_ids == reference
                forget(crowded)
                again = ask(crowded, prompt, max_tokens=GENERATED)
                assert hits(again) == (0, hit_after_reset(PROMPT_TOKENS)), latest_accounts(
                    small_server
                )
                assert again.token_ids == reference
    assert totals(small_server)["evicted"] > 0
    conversations = [[*p, *r] for p, r in zip(prompts, references, strict=True)]
    assert_whole_prefixes(crowded, small_server, conversations)


def test_four_prompts_at_once_where_three_fit(
    plain_engine: EngineProcess, crowded: EngineProcess, small_server: ServerProcess
) -> None:
    prompts = prompts_of(51_000)
    references = [ask(plain_engine, prompt, max_tokens=GENERATED).token_ids for prompt in prompts]
    evicted = totals(small_server)["evicted"]
    with memory_stays_below(small_server, SMALL_BYTES):
        for _ in range(ROUNDS):
            for first in range(0, PROMPTS, IN_FLIGHT):
                some = slice(first, first + IN_FLIGHT)
                forget(crowded)
                results = crowded.generate(prompts[some], max_tokens=GENERATED)
                assert [result.token_ids for result in results] == references[some]
                assert all(result.external_hit_tokens % BLOCK == 0 for result in results)
    assert totals(small_server)["evicted"] > evicted
    conversations = [[*p, *r] for p, r in zip(prompts, references, strict=True)]
    before = prompts_of(50_000)
    assert_whole_prefixes(crowded, small_server, [*conversations, *before])
    assert status(small_server)["accounts"]["unbalanced"] == 0
