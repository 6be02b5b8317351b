"""Kinds of faults in what is loaded: other lengths, other overlaps, other failures than listed.

See test_kinds_stores.py for how its tests draw their numbers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from books import (
    NO_LOAD,
    NO_STORE,
    World,
    count_events,
    loaded_bytes,
    lookups,
    part_bytes,
    text,
    wait_until,
)
from test_kinds_stores import Sizes, seeds
from test_scenarios import fill_local, fill_server, scheduled

from kvledger.sim import Kind, SimulatedEngine
from kvledger.vllm.transfer import TransferError


@seeds(8)
def test_kind_07_full_hits(world: World, seed: int) -> None:
    """Prompts of whole chunks and a little less or more: all whole chunks are loaded,
    asynchronously; at least one token is computed, never more than what is left; nothing is
    stored anew; the output is that of a cold engine."""
    rng = random.Random(f"full {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world, max_batched_tokens=2048)
    for chunks, more in ((1, 0), (rng.randint(1, 4), 1), (rng.randint(2, 5), -1), (3, 0)):
        length = max(sizes.chunk, chunks * sizes.chunk + more)
        prompt = text(f"full {seed} {length}", length)
        fill_server(engine, prompt)
        stored = world.server.totals()["stored"]
        request = engine.add(prompt)
        engine.run()
        hit = length // sizes.chunk * sizes.chunk
        assert engine.external_hit(request) == hit
        assert engine.allocations(request)[0].is_async
        assert scheduled(engine, request) == [max(1, length - hit)]
        assert world.runs(engine, request) == [("loaded", hit // sizes.chunk)]
        assert world.server.totals()["stored"] == stored
        assert engine.outputs[request] == sizes.cold(prompt, 1)
        engine.reset_prefix_cache()


@seeds(8)
def test_kind_09_hit_behind_a_local_one(world: World, seed: int) -> None:
    """Wherever a local hit ends: the load writes the blocks behind it up to the end of the
    external one, and no other block of the whole pool."""
    rng = random.Random(f"behind {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world, options={"min_hit_tokens": 1}, max_batched_tokens=2048)
    for turn in range(4):
        known = rng.randint(1, 900 // sizes.chunk)
        prompt = text(f"behind {seed} {turn}", known * sizes.chunk + rng.randint(1, 60))
        fill_server(engine, prompt[: known * sizes.chunk])
        kept = rng.randint(1, known * sizes.chunk)
        fill_local(engine, prompt[:kept])
        lanes = engine.workers.ranks[0].memory.lanes
        request = engine.add(prompt)
        engine.begin_step()
        local = kept // sizes.block * sizes.block
        external = known * sizes.chunk - local
        assert engine.external_hit(request) == external
        table = engine.allocations(request)[0].block_ids[0]
        before = lanes.copy()
        engine.run_workers()
        if external:
            changed = {
                block
                for block in range(lanes.shape[1])
                if not np.array_equal(lanes[:, block], before[:, block])
            }
            wanted = range(local // sizes.block, known * sizes.chunk // sizes.block)
            assert changed == {table[index] for index in wanted}
        engine.run()
        engine.reset_prefix_cache()


@seeds(6)
def test_kind_11_blocks_shared_with_running_requests(world: World, seed: int) -> None:
    """Some requests decode on shared blocks while others, which share a head of any length with
    them, load the rest: the shared blocks stay as they are, and so do all outputs."""
    rng = random.Random(f"shared {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world, max_batched_tokens=1024)
    prompt = text(f"shared {seed}", 4 * sizes.chunk + 8)
    fill_server(engine, prompt)
    length = rng.randint(sizes.block, 3 * sizes.chunk)
    first = engine.add(prompt[:length], max_tokens=40, transfer_params=NO_STORE | NO_LOAD)
    for _ in range(6):
        engine.step()
    shared = list(engine.allocations(first)[0].block_ids[0][: length // sizes.block])
    lanes = engine.workers.ranks[0].memory.lanes
    before = lanes[:, shared].copy()
    others = {}
    for n in range(3):
        tokens = [*prompt[: rng.randint(length, len(prompt))], *text(f"tail {seed} {n}", 20)]
        others[engine.add(tokens, max_tokens=10)] = tokens
        engine.step()
    engine.run()
    assert np.array_equal(lanes[:, shared], before)
    assert engine.outputs[first] == sizes.cold(prompt[:length], 40)
    for request, tokens in others.items():
        assert engine.outputs[request] == sizes.cold(tokens, 10)


@seeds(6)
def test_kind_12_promises_are_whole_blocks(world: World, seed: int) -> None:
    """Whatever the server holds and whatever is held locally: no answer to a look-up ends inside
    a block or beyond the prompt, and every token that was not promised is computed."""
    rng = random.Random(f"promise {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world)
    base = text(f"promise {seed}", 900)
    for turn in range(6):
        fill_server(engine, [*base[: rng.randint(1, 900)], *text(f"own {seed} {turn}", 30)])
        if rng.random() < 0.5:
            fill_local(engine, base[: rng.randint(1, 900)])
        request = engine.add(base[: rng.randint(1, 900)])
        engine.run()
        length = engine.clients.length(request) - 1
        for event in engine.events:
            if event.kind is Kind.LOOKED_UP and event.request_id == request and event.tokens:
                assert (event.local + event.tokens) % sizes.block == 0
                assert event.local + event.tokens <= length
        hits = engine.local_hit(request) + engine.external_hit(request)
        assert sum(scheduled(engine, request)) == max(1, length - hits)
        engine.reset_prefix_cache()


@seeds(6)
def test_kind_18_leases_of_hits_not_needed(world: World, seed: int) -> None:
    """A hit that vLLM has no use for, in part or at all, is leased until its request is admitted
    (until it is loaded), and no longer: the request itself lives on."""
    rng = random.Random(f"needed {seed}")
    sizes = Sizes.draw(rng)
    engine = sizes.engine(world, options={"min_hit_tokens": 1}, max_batched_tokens=2048)
    for turn in range(4):
        known = rng.randint(1, 900 // sizes.chunk)
        prompt = text(f"needed {seed} {turn}", known * sizes.chunk + rng.randint(1, 100))
        fill_server(engine, prompt[: known * sizes.chunk])
        kept = rng.randint(1, len(prompt) - 1)
        fill_local(engine, prompt[:kept])
        before = loaded_bytes(engine)
        request = engine.add(prompt, max_tokens=30)
        wait_until(lambda: world.server.totals()["leases"] == 1, "the hit is leased")
        engine.step()
        external = max(0, known * sizes.chunk - kept // sizes.block * sizes.block)
        while external and not count_events(engine, Kind.LOAD_FINISHED, request):
            engine.step()
        while engine.in_flight:
            engine.finish_step()
        wait_until(lambda: world.server.totals()["leases"] == 0, "the lease is given back")
        assert request in engine.scheduler.requests
        assert engine.external_hit(request) == external
        loaded = loaded_bytes(engine) - before
        assert loaded * sizes.chunk == part_bytes(engine) * external
        engine.run()
        engine.reset_prefix_cache()


def fail_copies(engine: SimulatedEngine, rank: int, rng: random.Random, share: float) -> list[int]:
    """A share of a rank's loads fails after a random part was copied; counts them."""
    transfer = engine.workers.ranks[rank].connector.worker._attachment.transfer
    load, failures = transfer.load, [0]

    def failing(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        if rng.random() > share:
            return int(load(group, block_ids, offsets, part_offset))
        failures[0] += 1
        count = rng.randrange(len(offsets) + 1)
        order = np.array(rng.sample(range(len(offsets)), count), dtype=int)
        if count:  # some of it, and not where it belongs
            load(group, block_ids[:count], offsets[order], part_offset)
        raise TransferError("a copy that a test lets fail")

    transfer.load = failing
    return failures


@seeds(8)
def test_kind_20_loads_that_fail(world: World, seed: int) -> None:
    """Loads fail on any rank, early or late, after some bytes have come to the wrong places: each
    is reported once, its tokens are computed, and nothing wrong is stored or said. Each request
    asks the server at most once more."""
    rng = random.Random(f"fail {seed}")
    sizes = Sizes.draw(rng)
    ranks = rng.choice([1, 1, 2, 3])
    engine = sizes.engine(world, ranks=ranks)
    base = text(f"fail {seed}", 800)
    fill_server(engine, base)
    failures = fail_copies(engine, rng.randrange(ranks), rng, 0.5)
    for rank in engine.workers.ranks:
        rank.connector.worker._load_budget_bytes = rng.randint(1, 6) * part_bytes(engine)
    requests = {}
    for n in range(6):
        tokens = [*base[: rng.randint(sizes.chunk, 800)], *text(f"fail {seed} {n}", 40)]
        requests[engine.add(tokens, max_tokens=5)] = tokens
        if rng.random() < 0.3:
            engine.run()
            engine.reset_prefix_cache()
    engine.run()
    failed = count_events(engine, Kind.LOAD_FAILED)
    assert failed == failures[0]
    for request, tokens in requests.items():
        assert engine.outputs[request] == sizes.cold(tokens, 5, ranks)
        assert count_events(engine, Kind.LOAD_FAILED, request) <= 1
        hits = [answer for answer in lookups(engine, request) if answer]
        assert len(set(hits)) <= 1
        fates = world.fates(engine, request)
        assert set(fates) <= {"stored", "loaded", "present"}
        sizes.check_readable(world, engine, tokens, len(tokens) // sizes.chunk)
