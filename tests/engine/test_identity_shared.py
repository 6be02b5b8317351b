"""Which real engines share blocks: those that would compute the same bytes, and no others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import WITHOUT_CACHE, ask, cached, forget, hits, running
from predictions import hit_after_reset

from kvledger.lab.engine import EngineProcess
from kvledger.lab.models import SMALL, random_prompt, write_model
from kvledger.lab.requests import Result
from kvledger.lab.server import ServerProcess

pytestmark = pytest.mark.full

PROMPT_TOKENS = 1_000
OTHER_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("identity")
    with ServerProcess(directory / "kvledger.sock", memory="256MiB") as server:
        yield server


def namespaces(server: ServerProcess) -> dict[str, list[str]]:
    """Each namespace of `kvledger status --json`, with the fields in which its nearest differs."""
    command = [sys.executable, "-m", "kvledger", "status", "--json"]
    command += ["--socket", str(server.socket_path)]
    document: dict[str, Any] = json.loads(subprocess.check_output(command))
    return {
        namespace["id"]: namespace["nearest"]["fields"] if namespace["nearest"] else []
        for namespace in document["namespaces"]
        if namespace["objects"]
    }


def reference(engine: EngineProcess, prompt: list[int]) -> Result:
    """What the engine answers without a cache."""
    result = ask(engine, prompt, switches=WITHOUT_CACHE)
    assert hits(result) == (0, 0)
    return result


def assert_finds(engine: EngineProcess, prompt: list[int], right: Result, expected: int) -> None:
    """The engine finds so much of what others have stored, and all that it has stored itself."""
    for found in (expected, hit_after_reset(PROMPT_TOKENS)):
        forget(engine)
        result = ask(engine, prompt)
        assert hits(result) == (0, found)
        assert result.token_ids == right.token_ids


def test_engines_share_what_is_the_same_and_nothing_else(
    server: ServerProcess, tmp_path: Path
) -> None:
    path, copy = tmp_path / "model", tmp_path / "copy"
    write_model(path, SMALL)
    shutil.copytree(path, copy)
    prompt = random_prompt(80_000, PROMPT_TOKENS)
    all_of_it = hit_after_reset(PROMPT_TOKENS)

    with running(
        cached(path, server),
        cached(path, server, dtype="bfloat16"),
        cached(path, server, hf_overrides={"rope_parameters": OTHER_ROPE}),
    ) as (first, other_dtype, other_rope):
        right = reference(first, prompt)
        assert_finds(first, prompt, right, 0)
        (original,) = namespaces(server)
        for engine, field in [(other_dtype, "dtype"), (other_rope, "rope")]:
            before = namespaces(server)
            own = reference(engine, prompt)
            if engine is other_rope:
                assert own.token_ids != right.token_ids, "the override counts"
            assert_finds(engine, prompt, own, 0)
            (new,) = namespaces(server).keys() - before.keys()
            differing = namespaces(server)[new]
            print(f"\n{field}: differs in {differing}")
            assert any(field in name for name in differing)

    write_model(path, replace(SMALL, seed=SMALL.seed + 1))
    with running(cached(path, server), cached(copy, server)) as (other_weights, same_weights):
        before = namespaces(server)
        own = reference(other_weights, prompt)
        assert own.token_ids != right.token_ids, "they count"
        assert_finds(other_weights, prompt, own, 0)
        (new,) = namespaces(server).keys() - before.keys()
        differing = namespaces(server)[new]
        print(f"\nweights: differ in {differing}")
        assert any("weight" in name or "content" in name for name in differing)

        assert_finds(same_weights, prompt, right, all_of_it)
        assert len(namespaces(server)) == 4
        assert original in namespaces(server)
