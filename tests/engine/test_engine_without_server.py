"""A server that is missing, killed or stopped while a real engine runs: it only means no cache."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import STEP_TOKENS, ask, forget, hits
from observing import holds_nothing, status, totals, troubles, wait_until
from predictions import BLOCK, hit_after_reset
from records import Records, copy_rate, table

from kvledger.client import Client
from kvledger.lab.engine import EngineProcess, connector_config
from kvledger.lab.models import random_prompt
from kvledger.lab.requests import Request, Result
from kvledger.lab.server import ServerProcess

pytestmark = pytest.mark.full

REQUESTS = 16
PROMPT_TOKENS = 1_500
GENERATED = 32
AGAIN_SECONDS = 20.0
"""An engine uses a server again within 2 s; ten times that on a busy machine."""
HOOK_SECONDS = 0.5
"""A hook takes 50 ms at most, less what copying takes; ten times that on a busy machine."""
STOPPED_SECONDS = 10.0
MOMENT_SECONDS = 60.0


@dataclass(frozen=True)
class Site:
    """An engine that was started without a server, and where it looks for one.

    Attributes:
        engine: it, with a stop-watch on its hooks.
        socket_path: nobody listens there unless a test starts a server.
        records: of its hooks.
        first_log: what it had printed after its first request, which met no server.
    """

    engine: EngineProcess
    socket_path: Path
    records: Records
    first_log: str


@pytest.fixture(scope="module")
def site(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    socket_path, log_path = directory / "kvledger.sock", directory / "engine.log"
    records = Records(directory / "records")
    engine = EngineProcess(
        small_model,
        block_size=BLOCK,
        max_num_batched_tokens=STEP_TOKENS,
        connector=records.connector(connector_config(socket_path)),
        env={**records.environment(), "VLLM_LOGGING_LEVEL": "WARNING"},
        log_path=log_path,
    )
    with engine:
        ask(engine, random_prompt(60_000, 300))
        yield Site(engine, socket_path, records, log_path.read_text())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(61_000 + number, PROMPT_TOKENS) for number in range(REQUESTS)]


@pytest.fixture(scope="module")
def references(
    engine_pair: tuple[EngineProcess, EngineProcess], prompts: list[list[int]]
) -> list[tuple[int, ...]]:
    results = engine_pair[0].generate(prompts, max_tokens=GENERATED)
    return [result.token_ids for result in results]


@contextmanager
def serving(site: Site) -> Iterator[ServerProcess]:
    """A server where the engine looks for one, with the engine attached to it."""
    with ServerProcess(site.socket_path, memory="512MiB") as server:
        seconds = wait_until(
            lambda: any(engine["namespace"] for engine in status(server)["engines"]),
            "the engine is attached",
            seconds=AGAIN_SECONDS,
        )
        print(f"\nattached {seconds:.2f} s after the server was there")
        yield server


def assert_used(site: Site, server: ServerProcess, seed: int) -> None:
    """What the idle engine computes is stored, at once, and found again."""
    prompt = random_prompt(seed, 10 * BLOCK)
    before = totals(server)["stored"]

    def stores() -> bool:
        forget(site.engine)
        ask(site.engine, prompt, max_tokens=1)
        return totals(server)["stored"] - before == 10

    seconds = wait_until(stores, "the engine stores", seconds=AGAIN_SECONDS)
    print(f"\na prompt was stored after {seconds:.2f} s")

    def finds() -> bool:
        forget(site.engine)
        return hits(ask(site.engine, prompt, max_tokens=1)) == (0, hit_after_reset(10 * BLOCK))

    wait_until(finds, "a stored prompt is found")


def submit(site: Site, prompts: list[list[int]]) -> list[Request]:
    forget(site.engine)
    return [site.engine.submit(prompt, max_tokens=GENERATED) for prompt in prompts]


def watch(server: ServerProcess, held: str, requests: list[Request], *, stored: int = 0) -> None:
    """Return as soon as the server counts something held and enough stored, while requests run."""
    end = time.monotonic() + MOMENT_SECONDS
    with Client(str(server.socket_path), timeout_seconds=MOMENT_SECONDS) as client:
        while not (now := client.status()["totals"])[held] or now["stored"] < stored:
            assert time.monotonic() < end, f"never any {held}: {now}"
            assert not all(request.done() for request in requests), f"no {held} while they ran"
    print(f"\nhit with {now[held]} {held}, {now['stored']} chunks stored")


def right(results: list[Result], references: list[tuple[int, ...]]) -> bool:
    """Whether no request has failed and none has another answer than without a cache."""
    return [result.token_ids for result in results] == references


def test_an_engine_that_starts_alone_says_so_once(site: Site) -> None:
    said = troubles(site.first_log)
    assert len(said) == 1, said
    assert "no kvledger server listens" in said[0]
    assert "kvledger serve" in said[0]
    starting = [hook for hook in site.records.hooks() if hook.name == "__init__"]
    assert len(starting) == 2, "a scheduler and a worker"
    assert all(hook.seconds < HOOK_SECONDS for hook in starting), starting


def test_a_server_that_appears_is_used(site: Site) -> None:
    pids = site.engine.pids()
    with serving(site) as server:
        prompt = random_prompt(60_001, 1_000)
        first = ask(site.engine, prompt)
        forget(site.engine)
        again = ask(site.engine, prompt)
        assert hits(again) == (0, hit_after_reset(1_000))
        assert again.token_ids == first.token_ids
        assert [engine["ranks_attached"] for engine in status(server)["engines"]] == [[0]]
    assert site.engine.pids() == pids


def test_of_a_prompt_that_is_found_whole_one_token_is_computed(site: Site) -> None:
    prompt = random_prompt(60_004, STEP_TOKENS)
    with serving(site):
        ask(site.engine, prompt, max_tokens=1)
        scheduled = 0

        def found() -> bool:
            nonlocal scheduled
            forget(site.engine)
            before = site.records.scheduled_tokens()
            result = ask(site.engine, prompt, max_tokens=1)
            scheduled = site.records.scheduled_tokens() - before
            assert scheduled == 1 or not result.num_cached_tokens
            return hits(result) == (0, STEP_TOKENS)

        wait_until(found, "it is found whole")
        assert scheduled == 1


@pytest.mark.parametrize("held", ["reservations", "leases"], ids=["storing", "loading"])
def test_a_killed_server_harms_no_request(
    site: Site, prompts: list[list[int]], references: list[tuple[int, ...]], held: str
) -> None:
    pids = site.engine.pids()
    half_of_all = REQUESTS * (PROMPT_TOKENS // BLOCK) // 2
    with serving(site) as server:
        if held == "leases":
            assert right([r.result() for r in submit(site, prompts)], references)
        requests = submit(site, prompts)
        watch(server, held, requests, stored=half_of_all)
        server.kill()
        running = sum(not request.done() for request in requests)
    assert running > 0, "it was killed too late"
    print(f"{running} of {REQUESTS} requests were running")
    with serving(site) as server:
        assert right([request.result() for request in requests], references)
        assert_used(site, server, seed=60_002)
        assert right([request.result() for request in submit(site, prompts)], references)
        wait_until(lambda: holds_nothing(server), "nothing is held")
        assert status(server)["accounts"]["unbalanced"] == 0
    assert site.engine.pids() == pids, "the engine was not restarted"


def test_a_stopped_server_harms_no_request(
    site: Site, prompts: list[list[int]], references: list[tuple[int, ...]]
) -> None:
    with serving(site) as server:
        half = prompts[: REQUESTS // 2]
        assert right([r.result() for r in submit(site, half)], references[: len(half)])
        requests = submit(site, prompts)
        watch(server, "leases", requests)
        server.send_signal(signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            assert not all(request.done() for request in requests), "it was stopped too late"
            while (
                not all(r.done() for r in requests) or time.monotonic() < stopped + STOPPED_SECONDS
            ):
                # More requests meet a server that is known to be silent.
                assert right([r.result() for r in submit_one(site, prompts)], references[:1])
                assert time.monotonic() < stopped + MOMENT_SECONDS, "requests wait for the server"
        finally:
            server.send_signal(signal.SIGCONT)
        assert right([request.result() for request in requests], references)
        assert_used(site, server, seed=60_003)
        assert right([request.result() for request in submit(site, prompts)], references)
        wait_until(lambda: holds_nothing(server), "nothing is held")
        assert status(server)["accounts"]["unbalanced"] == 0


def submit_one(site: Site, prompts: list[list[int]]) -> list[Request]:
    return [site.engine.submit(prompts[0], max_tokens=GENERATED)]


def test_no_hook_keeps_the_engine_waiting(site: Site) -> None:
    """Of all that the tests above have done to the server."""
    rate = copy_rate()
    hooks = site.records.hooks()
    print("\n" + table(hooks, rate))
    for process in ("scheduler", "worker"):
        assert any(hook.process.startswith(process) for hook in hooks)
    late = [hook for hook in hooks if hook.longest_seconds(rate) > HOOK_SECONDS]
    assert not late, table(late, rate)
    assert site.records.failures() == 0
