"""The lab itself, with a real engine: models that answer, an engine that can be driven."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ModelMaker
from predictions import local_hit

from kvledger.lab.engine import EngineError, EngineProcess
from kvledger.lab.models import WIDE, WIDEST, ModelSpec, random_prompt
from kvledger.lab.processes import is_running

GENERATED = 32
LEAST_DISTINCT = 8
"""Distinct tokens in an answer of 32; a model that is stuck shows one or two."""


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(small_model) as engine:
        yield engine


def assert_answers_vary(engine: EngineProcess) -> None:
    prompts = [random_prompt(seed, tokens) for seed, tokens in [(1, 40), (2, 300), (3, 1_000)]]
    # The same text but for its first token, and but for its last.
    prompts.append([prompts[2][0] ^ 1, *prompts[2][1:]])
    prompts.append([*prompts[2][:-1], prompts[2][-1] ^ 1])
    answers = [result.token_ids for result in engine.generate(prompts, max_tokens=GENERATED)]
    assert all(len(answer) == GENERATED for answer in answers)
    assert min(len(set(answer)) for answer in answers) >= LEAST_DISTINCT
    assert len(set(answers)) == len(prompts), "every prompt has an answer of its own"


def test_answers_vary(engine: EngineProcess) -> None:
    assert_answers_vary(engine)


@pytest.mark.full
@pytest.mark.parametrize("spec", [WIDE, WIDEST], ids=["64KiB", "128KiB"])
def test_answers_of_wide_models_vary(model: ModelMaker, spec: ModelSpec) -> None:
    with EngineProcess(model(spec), max_model_len=2_048) as engine:
        assert_answers_vary(engine)


def test_answers_repeat_and_local_hits_are_counted(engine: EngineProcess) -> None:
    prompt = random_prompt(10, 511)
    first, again = (engine.generate([prompt])[0] for _ in range(2))
    assert again.token_ids == first.token_ids
    assert (first.local_hit_tokens, first.external_hit_tokens) == (0, 0)
    assert (again.local_hit_tokens, again.external_hit_tokens) == (local_hit(511), 0)
    assert 0 < again.ttft_seconds <= again.total_seconds


def test_a_reset_forgets(engine: EngineProcess) -> None:
    prompt = random_prompt(11, 256)
    engine.generate([prompt])
    assert engine.reset_prefix_cache()
    (result,) = engine.generate([prompt])
    assert result.num_cached_tokens == 0


def test_hits_of_requests_add_up_to_the_metrics(engine: EngineProcess) -> None:
    def by_source() -> dict[str, float]:
        name = "vllm:prompt_tokens_by_source_total"
        metrics = engine.metrics()
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return {source: metrics[f'{name}{{source="{source}"}}'] for source in sources}

    before = by_source()
    prompts = [random_prompt(12, 300), random_prompt(13, 100), random_prompt(12, 200)]
    results = engine.generate(prompts, max_tokens=1) + engine.generate(prompts, max_tokens=1)
    after = by_source()
    local = sum(result.local_hit_tokens for result in results)
    assert after["local_cache_hit"] - before["local_cache_hit"] == local > 0
    assert after["external_kv_transfer"] == before["external_kv_transfer"]
    assert after["local_compute"] - before["local_compute"] == 2 * 600 - local


def test_requests_overlap_and_can_be_aborted(engine: EngineProcess) -> None:
    long = engine.submit(random_prompt(14, 100), max_tokens=4_000)
    long.wait_first_token()
    (short,) = engine.generate([random_prompt(15, 100)], max_tokens=2)
    assert len(short.token_ids) == 2
    assert not long.done()
    long.abort()
    aborted = long.result()
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < 4_000
    long.abort()


def test_a_refused_request_says_why(engine: EngineProcess) -> None:
    request = engine.submit(random_prompt(16, 9_000), max_tokens=1)
    with pytest.raises(EngineError, match="8192"):
        request.result()


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the engine has ended") as caught:
        EngineProcess(tmp_path / "nothing").wait_ready()
    assert "Traceback" in str(caught.value)
    assert str(tmp_path / "nothing") in str(caught.value)


def test_the_processes_of_an_engine_are_known(engine: EngineProcess) -> None:
    """What happens when they are killed: see ``test_engine_killed``."""
    pids = engine.pids()
    assert len({*pids.all()}) == 3
    assert all(is_running(pid) for pid in pids.all())
