"""The bench's parts: what it makes of samples, what it refuses, and tiny runs of it."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvledger.bench import copies
from kvledger.bench.copies import Shape, copy_rates
from kvledger.bench.engine import Cost, Samples, add_pair, cold_figures, hook_figures
from kvledger.bench.engines import Plan, agreed_threads
from kvledger.bench.hook_times import SUFFIX, HookTimes, HookTimesWriter, read_hook_times
from kvledger.bench.lookup import measure_lookups
from kvledger.bench.machine import (
    BenchError,
    compute_threads,
    describe_machine,
    own_resident_bytes,
)
from kvledger.bench.server import idle_use, measure_server
from kvledger.bench.statistics import median_of, quantile
from kvledger.lab.models import SMALL
from kvledger.lab.requests import Result

# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        ([3.0], 0.5, 3.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 0.5, 2.5),
        (list(range(101)), 0.99, 99.0),
        ([5.0, 1.0], 0.0, 1.0),
        ([5.0, 1.0], 1.0, 5.0),
    ],
)
def test_quantiles(samples: list[float], share: float, expected: float) -> None:
    assert quantile(samples, share) == expected


def test_no_samples_have_no_median() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_of([])
    with pytest.raises(ValueError, match="share"):
        quantile([1.0], 1.5)


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    # From a table of binomial tails: 1 − 2 · P(fewer than `rank` of `count` coins show heads).
    [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609), (20, 6, 0.9586)],
)
def test_the_interval_of_a_median(count: int, rank: int, coverage: float) -> None:
    samples = [float(value) for value in range(count)]
    random.Random(count).shuffle(samples)
    median = median_of(samples)
    assert (median.low, median.high) == (rank - 1, count - rank)
    assert math.isclose(median.coverage, coverage, abs_tol=1e-4)
    assert median.value == (count - 1) / 2
    assert median.samples == count


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = random.Random(7)
    inside = 0
    for _ in range(2000):
        median = median_of([generator.expovariate(1.0) for _ in range(9)])
        inside += median.low <= math.log(2) <= median.high
    assert abs(inside / 2000 - 0.9609) < 0.02


# ---------------------------------------------------------------- hook times


def test_hook_times_are_added_up_over_files(tmp_path: Path) -> None:
    scheduler = HookTimesWriter(tmp_path / f"scheduler{SUFFIX}", ["plan", "finish"])
    worker = HookTimesWriter(tmp_path / f"worker{SUFFIX}", ["save", "finish"])
    scheduler.add(0, 2_000_000_000)
    worker.add(0, 500_000_000)
    before = read_hook_times(tmp_path)
    assert before.seconds == {"plan": 2.0, "finish": 0.0, "save": 0.5}
    scheduler.add(1, 1_000)
    worker.add(1, 3_000)
    worker.add(0, 250_000_000)
    worker.set_bytes(stored=70, loaded=9)
    since = read_hook_times(tmp_path).since(before)
    assert since.calls == {"plan": 0, "finish": 2, "save": 1}
    assert since.seconds == pytest.approx({"plan": 0.0, "finish": 4e-6, "save": 0.25})
    assert since.total_seconds == pytest.approx(0.250004)
    assert (since.stored_bytes, since.loaded_bytes) == (70, 9)


def test_too_many_hooks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes"):
        HookTimesWriter(tmp_path / f"x{SUFFIX}", [f"hook {index}" for index in range(1000)])


def test_the_timed_connector_times_every_hook_of_its_base(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from kvledger.bench.hook_times import DIRECTORY_KEY
    from kvledger.bench.timed_connector import HOOKS, TimedConnector
    from kvledger.sim import SimulatedEngine
    from kvledger.vllm.connector import KVLedgerConnector

    assert {"build_connector_meta", "wait_for_save", "start_load_kv"} < set(HOOKS)
    for hook in HOOKS:
        assert getattr(TimedConnector, hook) is not getattr(KVLedgerConnector, hook)
    extra = {"kvledger.socket": str(tmp_path / "nobody.sock"), DIRECTORY_KEY: str(tmp_path)}
    name = "kvledger.bench.timed_connector:TimedConnector"
    with SimulatedEngine(name, extra_config=extra) as engine:
        for _ in range(3):
            engine.add(range(100), max_tokens=2)
        engine.run()
        steps = engine.step_count
    times = read_hook_times(tmp_path)
    assert times.calls["on_new_request"] == 3
    assert times.calls["request_finished_all_groups"] == 3
    assert times.calls["build_connector_meta"] == steps
    assert times.calls["wait_for_save"] == steps
    assert min(times.seconds.values()) >= 0
    assert 0 < times.total_seconds < 60


# ---------------------------------------------------------------- the machine


def test_the_machine() -> None:
    machine = describe_machine(1.5)
    assert machine.load_before == 1.5
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.versions["numpy"] == np.__version__
    assert machine.versions["python"] == sys.version.split()[0]


def test_resident_memory_leaves_shared_memory_out() -> None:
    script = (
        "import mmap, sys\n"
        "shared = mmap.mmap(-1, 64 << 20)\n"
        "shared.write(bytes(64 << 20)) if sys.argv[1] == 'shared' else None\n"
        "own = bytes(range(256)) * (32 << 12) if sys.argv[1] == 'own' else None\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )

    def resident(kind: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", script, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            found = own_resident_bytes(process.pid)
            process.kill()
        return found

    neither, shared, own = (resident(kind) for kind in ("neither", "shared", "own"))
    assert abs(shared - neither) < 8 << 20
    assert own - neither > 24 << 20


def test_compute_threads_are_read_from_the_worker() -> None:
    def threads_of(environment: dict[str, str]) -> str:
        process = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                return compute_threads(process.pid)
            finally:
                process.kill()

    assert threads_of({"OMP_NUM_THREADS": "2", "OMP_PLACES": "{0,1}"}) == "2 on {0,1}"
    assert threads_of({"OMP_NUM_THREADS": "1"}) == "1"
    with pytest.raises(BenchError, match="no OMP_NUM_THREADS"):
        threads_of({"OTHER": "1"})


def test_idle_use_tells_the_busy_from_the_idle() -> None:
    commands = {"idle": "input()", "busy": "while True: pass"}
    processes = [
        subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
        for command in commands.values()
    ]
    try:
        idle_use([[p.pid] for p in processes], 1.0)  # both interpreters are up then
        idle, busy = idle_use([[p.pid] for p in processes], 1.0)
    finally:
        for process in processes:
            with process:
                process.kill()
    assert idle < 0.05
    assert busy > 2 * idle
    assert busy > 0.05


# ---------------------------------------------------------------- cold pairs


@pytest.mark.parametrize("other", ["2 on {0,1}", "1 on {0}"])
def test_engines_with_other_threads_are_not_compared(other: str) -> None:
    assert agreed_threads({"a": "1 on {1}", "b": "1 on {1}"}) == "1 on {1}"
    with pytest.raises(BenchError, match=r"a: 1 on \{1\}; b: .*VLLM_CPU_NUM_OF_RESERVED_CPU"):
        agreed_threads({"a": "1 on {1}", "b": other})


PLAN = Plan(prompt_tokens=100, block_tokens=32, spec=SMALL)


def cost(
    seconds: float, *, save: float = 0.0, stored: int = 0, before: int = 0, token: int = 5
) -> Cost:
    result = Result(
        request_id="r",
        prompt_tokens=100,
        token_ids=(token,),
        local_hit_tokens=0,
        external_hit_tokens=0,
        ttft_seconds=seconds,
        total_seconds=seconds,
        finish_reason="length",
        kv_transfer_params=None,
    )
    hooks = HookTimes(
        calls={"wait_for_save": 1, "handle_preemptions": 1, "plan": 2, "never": 0},
        seconds={"wait_for_save": save, "handle_preemptions": 0.0, "plan": 0.01, "never": 0.0},
        stored_bytes=stored,
        loaded_bytes=0,
    )
    return Cost(result, cpu_seconds=2 * seconds, hooks=hooks, stored_before=before)


def test_pairs_give_ratios_and_shares() -> None:
    whole = 96 * 4096  # three blocks of 32 tokens, 4 KiB each
    samples = Samples()
    for with_it, save, before in ((1.1, 0.1, 0), (1.2, 0.05, 999), (2.2, 0.01, 1000)):
        add_pair(
            samples, PLAN, 1000, cost(with_it, save=save, stored=whole, before=before), cost(1.0)
        )
    cold = cold_figures(samples.pairs)
    assert (cold.ratio.low, cold.ratio.value, cold.ratio.high) == (1.1, 1.2, 2.2)
    assert cold.cpu_ratio.value == 1.2
    assert [pair.first_pass for pair in cold.pairs] == [True, True, False]
    hooks = hook_figures(samples)
    assert hooks.first_pass_share is not None
    assert hooks.later_share is not None
    assert hooks.first_pass_share.low == pytest.approx(0.06 / 1.2)
    assert hooks.first_pass_share.high == pytest.approx(0.11 / 1.1)
    assert hooks.later_share.value == pytest.approx(0.02 / 2.2)
    assert hooks.share_without_stores.value == pytest.approx(0.01 / 1.2)
    assert [(hook.hook, hook.calls) for hook in hooks.hooks] == [
        ("wait_for_save", 3),
        ("plan", 6),
        ("handle_preemptions", 3),
    ]
    assert hooks.stored_bytes == 3 * whole


def test_a_request_that_stored_nothing_is_not_counted() -> None:
    with pytest.raises(BenchError, match="must store 393,216 bytes"):
        add_pair(Samples(), PLAN, 1000, cost(1.0), cost(1.0))


def test_another_output_is_not_counted() -> None:
    with pytest.raises(BenchError, match="outputs"):
        add_pair(Samples(), PLAN, 1000, cost(1.0, stored=96 * 4096), cost(1.0, token=6))


# ---------------------------------------------------------------- tiny runs


def test_a_tiny_run_of_the_server(tmp_path: Path) -> None:
    figures = measure_server(tmp_path, starts=2, idle_seconds=0.3)
    assert figures.start_seconds.samples == 2
    assert 0 < figures.start_seconds.low <= figures.start_seconds.high < 20
    assert 5 << 20 < figures.resident_bytes < 200 << 20
    assert figures.idle_cores < 0.5


def test_a_tiny_run_of_lookups(tmp_path: Path) -> None:
    said: list[str] = []
    times = measure_lookups(tmp_path, names=(1, 6), asks=5, announce=said.append)
    assert [(t.names, t.hit_names) for t in times] == [(1, 0), (1, 1), (6, 0), (6, 3), (6, 6)]
    assert all(0 < t.p50_seconds <= t.p99_seconds < 10 for t in times)
    assert said == ["look-ups of 1 names", "look-ups of 6 names"]


def test_a_tiny_run_of_copies() -> None:
    pytest.importorskip("vllm")
    rates = copy_rates(Shape(row_bytes=4096, layers=3, blocks=8), rounds=2)
    assert rates.copied_bytes == 4096 * 3 * 8
    assert (rates.row_bytes, rates.layers, rates.rounds) == (4096, 3, 2)
    measured = [rates.plain, rates.store, rates.load, rates.first_store, rates.first_load]
    assert all(1e5 < rate < 1e12 for rate in measured)


def test_copies_that_do_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from kvledger.vllm import transfer

    class Lazy(transfer.HostTransfer):
        def load(self, *_: object) -> int:  # type: ignore[override]
            return 0

    monkeypatch.setattr(transfer, "HostTransfer", Lazy)
    with pytest.raises(BenchError, match="not what was there"):
        copy_rates(Shape(row_bytes=4096, layers=2, blocks=4), rounds=1)


def test_shapes() -> None:
    shape = Shape(row_bytes=32 << 10, layers=copies.LAYERS, blocks=256)
    assert shape.object_bytes == 1 << 20
    assert shape.copied_bytes == copies.COPIED_BYTES == 256 << 20
