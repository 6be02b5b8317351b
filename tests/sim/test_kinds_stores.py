"""Kinds of faults in what is stored: other sizes, other steps, other orders than in the list.

Each test draws its numbers from a seed, and derives what is right from tokens alone. A test that
fails names its seed; ``KVLEDGER_SEED=n`` plays other ones.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
from books import NO_LOAD, NO_STORE, World, cold_output, count_events, lookups, text, wait_until
from test_scenarios import HeldCommits, fill_local, fill_server, scheduled

from kvledger.sim import Kind, SimulatedEngine

FIRST_SEED = int(os.environ.get("KVLEDGER_SEED", "1"))


def seeds(count: int) -> Any:
    """A test is played with so many seeds."""
    return pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + count))


@dataclass(frozen=True)
class Sizes:
    """Block, chunk and step sizes of one engine, drawn at random."""

    block: int
    chunk: int
    budget: int
    is_async: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Sizes:
        block = rng.choice([8, 16, 32])
        chunk = block * rng.choice([1, 2, 3, 4, 8])
        return cls(block, chunk, rng.choice([64, 100, 256, 1024]), rng.random() < 0.5)

    def engine(self, world: World, **fields: Any) -> SimulatedEngine:
        """An engine of these sizes with blocks for some 3000 tokens."""
        options = {"chunk_tokens": self.chunk, **fields.pop("options", {})}
        given = {
            "block_size": self.block,
            "num_blocks": 3000 // self.block,
            "max_batched_tokens": self.budget,
            "async_scheduling": self.is_async,
            **fields,
        }
        return world.engine(options=options, **given)

    def check_readable(
        self, world: World, engine: SimulatedEngine, tokens: list[int], chunks: int
    ) -> None:
        """So many leading chunks of a text come back, byte for byte."""
        if len(tokens) >= self.chunk:  # of less nobody can ask
            assert world.stored_chunks(engine, tokens) == chunks

    def cold(self, tokens: list[int], max_tokens: int, ranks: int = 1) -> list[int]:
        """What an engine without a connector says."""
        return cold_output(tokens, max_tokens=max_tokens, block_size=self.block, ranks=ranks)


@seeds(8)
def test_kind_01_any_steps(world: World, seed: int) -> None:
    """However prefill is cut into steps, and whatever shares them: every whole chunk is stored
    once, no later than at the step's end (if nothing runs ahead)."""
    rng = random.Random(f"any steps {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world)
    before = world.server.totals()["stored"]
    lengths = {}
    for n in range(rng.randint(1, 4)):
        tokens = text(f"steps {seed} {n}", rng.randint(1, 700))
        lengths[engine.add(tokens, max_tokens=rng.randint(1, 40))] = tokens
    valid = dict.fromkeys(lengths, 0)
    while not engine.is_idle:
        record = engine.step()
        if record is not None and not sizes.is_async:
            for request, count in record.scheduled.items():
                valid[request] += count
            due = sum(tokens // sizes.chunk for tokens in valid.values())
            assert world.server.totals()["stored"] - before == due
    for request, tokens in lengths.items():
        whole = tokens + engine.outputs[request]
        chunks = (len(whole) - 1) // sizes.chunk
        assert world.runs(engine, request) == [("stored", chunks)] * bool(chunks)
        sizes.check_readable(world, engine, whole, chunks)


@seeds(8)
def test_kind_02_hit_and_steps(world: World, seed: int) -> None:
    """An external hit of any length, and any number of steps after it: what follows the hit is
    stored, and what was loaded is not stored again."""
    rng = random.Random(f"hit and steps {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world)
    for turn in range(4):
        prompt = text(f"hit {seed} {turn}", rng.randint(sizes.chunk, 900))
        hit = rng.randint(0, len(prompt)) // sizes.chunk
        if hit:
            fill_server(engine, prompt[: hit * sizes.chunk])
        before = world.server.totals()["stored"]
        request = engine.add(prompt, max_tokens=rng.randint(1, 60))
        engine.run()
        whole = prompt + engine.outputs[request]
        due = (len(whole) - 1) // sizes.chunk
        assert engine.external_hit(request) == hit * sizes.chunk
        expected = [("loaded", hit), ("stored", due - hit)]
        assert world.runs(engine, request) == [run for run in expected if run[1]]
        assert world.server.totals()["stored"] - before == due - hit
        assert world.stored_chunks(engine, whole) == due
        engine.reset_prefix_cache()


@seeds(8)
def test_kind_03_overlapping_hits(world: World, seed: int) -> None:
    """A local and an external hit of any lengths: the longer one counts, never their sum, and
    what neither the server nor a load gives is stored, up to the end."""
    rng = random.Random(f"overlap {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world, options={"min_hit_tokens": 1})
    for turn in range(4):
        prompt = text(f"overlap {seed} {turn}", rng.randint(sizes.chunk + 1, 900))
        kept = rng.randint(1, len(prompt) - 1)
        known = rng.randint(0, len(prompt)) // sizes.chunk
        if known:
            fill_server(engine, prompt[: known * sizes.chunk])
        fill_local(engine, prompt[:kept])
        request = engine.add(prompt, max_tokens=rng.randint(1, 40))
        engine.run()
        local = kept // sizes.block * sizes.block
        external = max(0, known * sizes.chunk - local)
        assert (engine.local_hit(request), engine.external_hit(request)) == (local, external)
        whole = prompt + engine.outputs[request]
        due = (len(whole) - 1) // sizes.chunk
        present = local // sizes.chunk if external else known
        expected = [("present", present), ("loaded", known - present), ("stored", due - known)]
        assert world.runs(engine, request) == [run for run in expected if run[1]]
        assert world.stored_chunks(engine, whole) == due
        engine.reset_prefix_cache()


@seeds(6)
def test_kind_04_allocation_fails(world: World, seed: int) -> None:
    """Allocations fail at random, for each of some requests: all answers to one request are the
    same, the server is asked once for each, and what is stored and loaded is as if nothing had
    failed."""
    rng = random.Random(f"allocation {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world)
    prompts, hits = [], []
    for n in range(4):
        prompts.append(text(f"refused {seed} {n}", rng.randint(sizes.chunk, 500)))
        hits.append(rng.randint(0, len(prompts[-1]) // sizes.chunk))
        if hits[-1]:
            fill_server(engine, prompts[-1][: hits[-1] * sizes.chunk])
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    new, refusals = [], 0

    def refuse(request: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal refusals
        if request.request_id in new and refusals < 20 and rng.random() < 0.7:
            refusals += 1
            return None
        new[:] = [name for name in new if name != request.request_id]
        return allocate(request, *arguments, **keywords)

    manager.allocate_slots = refuse
    before = world.server.totals()["lookups"]
    new += [engine.add(prompt) for prompt in prompts]
    requests = list(new)
    engine.run()
    assert refusals
    assert world.server.totals()["lookups"] == before + 4
    for prompt, hit, request in zip(prompts, hits, requests, strict=True):
        assert set(lookups(engine, request)) - {None} == {hit * sizes.chunk}
        expected = [("loaded", hit), ("stored", len(prompt) // sizes.chunk - hit)]
        assert world.runs(engine, request) == [run for run in expected if run[1]]
        assert world.stored_chunks(engine, prompt) == len(prompt) // sizes.chunk


@seeds(6)
def test_kind_06_any_order_of_commits(world: World, seed: int) -> None:
    """The stores of a request are committed by each rank in an order of its own: after every
    message exactly the prefix can be read that all ranks have written, byte for byte, though the
    blocks belong to others by then."""
    rng = random.Random(f"commits {seed}")
    ranks, steps, chunk = rng.choice([1, 2, 3]), rng.randint(3, 6), rng.choice([16, 32])
    engine = world.engine(
        options={"chunk_tokens": chunk},
        num_blocks=steps * 8 + 2,
        max_batched_tokens=128,
        prefix_caching=False,
        ranks=ranks,
    )
    held = [HeldCommits(engine, rank, steps) for rank in range(ranks)]
    prompt = text(f"commits {seed}", steps * 128)
    request = engine.add(prompt)
    for _ in range(steps):
        engine.step()
    engine.add(text("the next owner", steps * 128), transfer_params=NO_STORE | NO_LOAD)
    for _ in range(steps):
        engine.step()
    left = [list(range(steps)) for _ in range(ranks)]
    per_step = 128 // chunk
    while any(left):
        rank = rng.choice([rank for rank in range(ranks) if left[rank]])
        position = rng.randrange(len(left[rank]))
        left[rank].pop(position)
        held[rank].release(position)
        missing = [step for steps_left in left for step in steps_left]
        readable = min(missing, default=steps)
        wait_until(
            lambda n=(steps - readable) * per_step: world.server.totals()["reservations"] == n,
            "the commit is noted",
        )
        assert world.stored_chunks(engine, prompt, settled=False) == readable * per_step
    assert world.runs(engine, request) == [("stored", steps * per_step)]
    assert count_events(engine, Kind.SEND_FINISHED) == 0


@seeds(6)
def test_kind_14_preempted_at_any_moment(world: World, seed: int) -> None:
    """Preempted at random moments, by a small pool or by a reset, again and again: outputs are
    those of a cold engine, every chunk has one fate, can be read back, and is stored once."""
    rng = random.Random(f"preempted {seed}")
    sizes = Sizes.draw(rng)
    pool = max(1200, 4 * sizes.chunk)
    engine = sizes.engine(world, num_blocks=pool // sizes.block + 1, max_requests=4)
    before = world.server.totals()["stored"]
    prompts = [text(f"victim {seed} {n}", rng.randint(200, 500)) for n in range(4)]
    counts = [rng.randint(20, 80) for _ in prompts]
    requests = [
        engine.add(prompt, max_tokens=count) for prompt, count in zip(prompts, counts, strict=True)
    ]
    while not engine.is_idle:
        engine.step()
        if rng.random() < 0.05:
            while engine.in_flight:
                engine.finish_step()
            if engine.can_preempt_all:
                engine.reset_prefix_cache(running=True)
    assert count_events(engine, Kind.PREEMPTED) > 0
    due = 0
    for prompt, count, request in zip(prompts, counts, requests, strict=True):
        assert engine.outputs[request] == sizes.cold(prompt, count)
        chunks = (len(prompt) + count - 1) // sizes.chunk
        fates = world.fates(engine, request)
        assert fates.total() == chunks
        assert set(fates) <= {"stored", "loaded", "present"}
        sizes.check_readable(world, engine, prompt + engine.outputs[request], chunks)
        due += chunks
    assert world.server.totals()["stored"] - before == due


@seeds(6)
def test_kind_30_edges(world: World, seed: int) -> None:
    """Prompts and answers of any length around multiples of the chunk; all, only prompts, or
    nothing may be stored: the last full chunk is stored, and repeats add nothing."""
    rng = random.Random(f"edges {seed}")
    sizes = Sizes.draw(rng)
    for mode, fields in (
        ("all", {}),
        ("prompt", {"options": {"store": "prompt"}}),
        ("consumer", {"kv_role": "kv_consumer"}),
    ):
        namespace = {"namespace": f"{world.namespace} {mode}"}
        given = {**fields, "options": {**fields.get("options", {}), **namespace}}
        engine = sizes.engine(world, **given)
        for _ in range(4):
            length = max(1, rng.randint(0, 3) * sizes.chunk + rng.randint(-2, 2))
            count = max(1, rng.randint(0, 2) * sizes.chunk + rng.randint(-2, 2))
            prompt, before = text(f"edge {rng.random()}", length), world.server.totals()["stored"]
            for _ in range(2):
                request = engine.add(prompt, max_tokens=count)
                engine.run()
                assert world.fates(engine, request).total() == (length + count - 1) // sizes.chunk
                engine.reset_prefix_cache()
            due = {"all": (length + count - 1), "prompt": length, "consumer": 0}[mode]
            assert world.server.totals()["stored"] - before == due // sizes.chunk
        world.close(engine)


@seeds(2)
def test_kind_30_too_short_to_store(world: World, seed: int) -> None:
    """Whatever is shorter than a chunk is not stored, and the account says why it is no hit."""
    rng = random.Random(f"short {seed}")
    engine = world.engine(options={"chunk_tokens": 544}, num_blocks=256)
    for _ in range(4):
        request = engine.add(text(f"short {rng.random()}", rng.randint(1, 543)))
        engine.run()
        assert scheduled(engine, request)
        account = world.accounts(engine)[request]
        assert (account["fates"], account["miss"]) == ([], "no_full_chunk")
