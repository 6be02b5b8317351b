"""The engines that the bench compares: alike in everything but the connector itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvledger.bench.hook_times import DIRECTORY_KEY
from kvledger.bench.lookup import wait_grown
from kvledger.bench.machine import BenchError, compute_threads
from kvledger.bench.server import idle_use
from kvledger.lab.engine import PATIENT, EngineProcess, connector_config
from kvledger.lab.models import WIDEST, ModelSpec
from kvledger.lab.requests import Result
from kvledger.lab.server import ServerProcess

SPARE_BLOCKS = 8
"""An engine holds one prompt and so much more: a cold prompt pushes the last one out."""
QUIET_CORES = 0.06
QUIET_SAMPLE_SECONDS = 0.25
QUIET_WITHIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure.

    Attributes:
        spec: the model.
        prompt_tokens: of every request.
        pairs: cold pairs at least.
        most_pairs: cold pairs at most: more than ``pairs`` while there is time.
        pair_seconds: time for them.
        hit_rounds: external and local hits.
        idle_seconds: how long to watch idle processes.
        memory: of the server.
    """

    spec: ModelSpec = WIDEST
    prompt_tokens: int = 4_100
    block_tokens: int = 32
    pairs: int = 5
    most_pairs: int = 11
    pair_seconds: float = 120.0
    hit_rounds: int = 7
    idle_seconds: float = 10.0
    memory: str = "2GiB"

    @property
    def hit_tokens(self) -> int:
        """Tokens of whole blocks, which a repeated prompt finds in any cache."""
        return (self.prompt_tokens - 1) // self.block_tokens * self.block_tokens

    @property
    def step_tokens(self) -> int:
        """A whole prompt fits in one step."""
        return 2 * self.prompt_tokens

    @property
    def stored_bytes(self) -> int:
        """KV of a prompt's whole blocks."""
        full_tokens = self.prompt_tokens // self.block_tokens * self.block_tokens
        return full_tokens * self.spec.kv_bytes_per_token()


@dataclass(slots=True)
class Engines:
    """All that runs.

    Attributes:
        plain: without a connector.
        cached: with it, timed.
        second: with it, and without a request so far.
        times: directory of the times of ``cached``.
        arena_bytes: of the server.
    """

    server: ServerProcess
    plain: EngineProcess
    cached: EngineProcess
    second: EngineProcess
    times: Path
    arena_bytes: int

    def threads(self) -> str:
        """The compute threads of each engine.

        Raises:
            BenchError: they differ.
        """
        return agreed_threads(
            {
                "without connector": threads_of(self.plain),
                "with connector": threads_of(self.cached),
                "second with connector": threads_of(self.second),
            }
        )

    def wait_quiet(self) -> None:
        """Block until nothing runs in any engine.

        After its last step an engine's worker looks out for the next one for a second, on the
        very core that another engine computes on.

        Raises:
            BenchError: they do not come to rest.
        """
        groups = [list(e.pids().all()) for e in (self.plain, self.cached, self.second)]
        end = time.monotonic() + QUIET_WITHIN_SECONDS
        while max(idle_use(groups, QUIET_SAMPLE_SECONDS)) > QUIET_CORES:
            if time.monotonic() > end:
                raise BenchError(
                    f"an engine still uses a processor {QUIET_WITHIN_SECONDS:.0f} s after its "
                    "last request; nothing can be measured beside it"
                )


@contextmanager
def running_engines(
    scratch: Path, model: Path, plan: Plan, announce: Callable[[str], None]
) -> Iterator[Engines]:
    """Server and engines, ready. The engines start at once; nothing is measured before."""
    times = scratch / "times"
    times.mkdir()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(scratch / "engines.sock", memory=plan.memory))
        started: list[EngineProcess] = []
        for name, connector in {
            "plain": None,
            "cached": _timed(connector_config(server.socket_path, options=PATIENT), times),
            "second": connector_config(server.socket_path, options=PATIENT),
        }.items():
            started.append(_engine(scratch / f"{name}.log", model, plan, connector))
            stack.callback(started[-1].kill)
        announce("starting three vLLM engines")
        for engine in started:
            engine.wait_ready()
        arena_bytes = wait_grown(server.socket_path)
        plain, cached, second = started
        yield Engines(server, plain, cached, second, times, arena_bytes)
        announce("stopping the engines")
        with ThreadPoolExecutor(len(started)) as threads:
            list(threads.map(EngineProcess.close, started))


def _engine(
    log_path: Path, model: Path, plan: Plan, connector: dict[str, object] | None
) -> EngineProcess:
    return EngineProcess(
        model,
        connector=connector,
        dtype=plan.spec.dtype,
        block_size=plan.block_tokens,
        max_num_batched_tokens=plan.step_tokens,
        max_model_len=plan.prompt_tokens + SPARE_BLOCKS * plan.block_tokens,
        num_blocks=plan.prompt_tokens // plan.block_tokens + 2 * SPARE_BLOCKS,
        log_path=log_path,
    )


def _timed(config: dict[str, object], times: Path) -> dict[str, object]:
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    return {
        **config,
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "kvledger.bench.timed_connector",
        "kv_connector_extra_config": {**extra, DIRECTORY_KEY: str(times)},
    }


def threads_of(engine: EngineProcess) -> str:
    """Compute threads of all its workers."""
    return ", ".join(compute_threads(worker) for worker in engine.pids().workers)


def agreed_threads(threads: Mapping[str, str]) -> str:
    """The compute threads that all engines have, given those of each by its name.

    Raises:
        BenchError: they differ, and so would any times.
    """
    if len(set(threads.values())) != 1:
        found = "; ".join(f"{name}: {value}" for name, value in threads.items())
        raise BenchError(
            f"the engines compute with different threads ({found}): set "
            "VLLM_CPU_NUM_OF_RESERVED_CPU or VLLM_CPU_OMP_THREADS_BIND so that they are equal"
        )
    return next(iter(threads.values()))


def ask(engine: EngineProcess, prompt: Sequence[int], *, local: int, external: int) -> Result:
    """One request for one token, whose hits must be the predicted ones."""
    result = engine.submit(prompt, max_tokens=1).result()
    hits = result.local_hit_tokens, result.external_hit_tokens
    if hits != (local, external):
        raise BenchError(
            f"a request must hit {local} tokens locally and {external} in the server, "
            f"and hit {hits[0]} and {hits[1]}"
        )
    return result


def forget(engine: EngineProcess) -> None:
    if not engine.reset_prefix_cache():
        raise BenchError("the engine does not forget its prefix cache")
