"""Kinds of faults in what is kept: other chains, other orders, other ranks than in the list.

See test_kinds_stores.py for how its tests draw their numbers.
"""

from __future__ import annotations

import random
from typing import Any

from books import NO_STORE, World, text, wait_until
from test_kinds_stores import Sizes, seeds
from test_scenarios import HeldCommits, fill_server
from test_scenarios_faults import ROOM, tight

from kvledger.sim import SimulatedEngine
from kvledger.vllm.transfer import TransferError


@seeds(6)
def test_kind_23_chains_are_eaten_from_their_ends(small_world: World, seed: int) -> None:
    """Chains with common heads are stored piece by piece, in turn, and looked up in between; the
    server is far too small. What is left of each is a prefix, of whole objects (each of the parts
    of all ranks), and nothing is kept that no look-up finds."""
    rng = random.Random(f"eaten {seed}")
    world = small_world
    engine = tight(world, ranks=rng.choice([1, 2, 3, 4]), num_blocks=300)
    chains = []
    for family in range(5):
        head = text(f"eaten {seed} {family}", 256 * rng.randint(1, 5))
        for n in range(rng.randint(2, 3)):
            tail = text(f"eaten {seed} {family} {n}", 256 * rng.randint(8, 11))
            chains.append([*head, *tail])
    before = world.server.totals()
    for _ in range(5 * len(chains)):
        chain = rng.choice(chains)
        switches = NO_STORE if rng.random() < 0.3 else {}
        end = rng.randint(len(chain) // 2, len(chain)) // 256 * 256
        engine.add(chain[:end], transfer_params=switches)
        engine.run()
        engine.reset_prefix_cache()
    world.settle(engine)
    totals = world.server.totals()
    assert totals["evicted"] > before["evicted"]
    stored = totals["stored"] - before["stored"]
    assert totals["objects"] == stored - totals["evicted"] + before["evicted"] <= ROOM
    found = set()
    for chain in chains:
        request = engine.add(chain, transfer_params=NO_STORE)
        engine.run()  # the oracle compares what is loaded
        engine.reset_prefix_cache()
        hit = engine.external_hit(request)
        assert hit % 256 == 0
        misses = {""} if hit == len(chain) else {"evicted", "never_seen"}
        assert world.accounts(engine)[request]["miss"] in misses
        found |= {tuple(chain[:end]) for end in range(256, hit + 1, 256)}
    assert len(found) == totals["objects"]


def fail_stores(engine: SimulatedEngine, rng: random.Random, share: float) -> list[int]:
    """A share of the stores of all ranks fails, some after a part was written; counts them."""
    failures = [0]
    for rank in engine.workers.ranks:
        transfer = rank.connector.worker._attachment.transfer

        def failing(
            group: int, block_ids: Any, offsets: Any, part_offset: int, store: Any = transfer.store
        ) -> int:
            if rng.random() > share:
                return int(store(group, block_ids, offsets, part_offset))
            failures[0] += 1
            part = rng.randrange(len(offsets) + 1)
            store(group, block_ids[:part][::-1], offsets[:part], part_offset)
            raise TransferError("a write that a test lets fail")

        transfer.store = failing
    return failures


@seeds(6)
def test_kind_25_26_writes_that_fail(world: World, seed: int) -> None:
    """Any write of any rank may fail, with wrong bytes in the slots: outputs are right, what can
    be read is right on every rank, everything has a fate; and without faults all is stored by
    asking again."""
    rng = random.Random(f"writes {seed}")
    sizes = Sizes.draw(rng)
    ranks = rng.choice([1, 2, 3, 4])
    engine = sizes.engine(world, ranks=ranks, max_batched_tokens=rng.choice([64, 128, 256]))
    reader = sizes.engine(world, ranks=ranks)
    prompts = [text(f"writes {seed} {n}", rng.randint(sizes.chunk, 700)) for n in range(4)]
    failures = fail_stores(engine, rng, 0.3)
    for turn in range(3):
        for prompt in prompts:
            request = engine.add(prompt, max_tokens=8)
            engine.run()
            assert engine.outputs[request] == sizes.cold(prompt, 8, ranks)
            fates = world.fates(engine, request)
            assert fates.total() == (len(prompt) + 7) // sizes.chunk
            allowed = {"stored", "present", "loaded", "skipped:writer_failed"}
            assert set(fates) <= allowed | {"skipped:parent_missing", "skipped:engine_idle"}
            looking = reader.add(prompt, transfer_params=NO_STORE)
            reader.run()  # the oracle compares what is loaded, on every rank
            assert reader.external_hit(looking) <= len(prompt)
            reader.reset_prefix_cache()
        engine.reset_prefix_cache()
        if turn == 1:
            assert failures[0]
            for rank in engine.workers.ranks:
                del rank.connector.worker._attachment.transfer.store
    for prompt in prompts:
        sizes.check_readable(world, engine, prompt, len(prompt) // sizes.chunk)


@seeds(4)
def test_kind_26_ranks_that_are_late(world: World, seed: int) -> None:
    """Commits of one rank are lost for many steps: the reservations end, the slots stay nobody's
    until the rank has spoken, in any order, and its words publish nothing any more."""
    rng = random.Random(f"late {seed}")
    ranks = rng.choice([2, 3])
    engine = world.engine(num_blocks=200, ranks=ranks, max_batched_tokens=64)
    length = rng.randint(100, 400)
    steps = -(-length // 64)
    commits = steps if length % 64 == 0 or length % 64 >= 16 else steps - 1
    held = HeldCommits(engine, rng.randrange(ranks), commits)
    prompt = text(f"late {seed}", length)
    lost = engine.add(prompt)
    for _ in range(steps):
        engine.step()
    assert len(held.messages) == commits
    engine.add(text(f"long {seed}", 40), max_tokens=150)  # asks for a slot at every 16th step
    engine.run()
    chunks = length // 16
    assert world.fates(engine, lost) == {"skipped:reservation_expired": chunks}
    assert world.server.totals()["quarantined"] == chunks
    fill_server(engine, prompt)
    stored = world.server.totals()["stored"]
    while held.messages:
        held.release(rng.randrange(len(held.messages)))
    wait_until(lambda: not world.server.totals()["quarantined"], "the slots are free")
    assert world.server.totals()["stored"] == stored
    assert world.stored_chunks(engine, prompt) == chunks
