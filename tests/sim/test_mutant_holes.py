"""Lives that found mutants which the rest of the suite had let live; see tests/mutants."""

from __future__ import annotations

from typing import Any

from books import (
    NO_LOAD,
    NO_STORE,
    World,
    await_lookup,
    text,
    wait_until,
)

from kvledger.vllm.transfer import TransferError


def test_store_after_a_load_that_failed_half_way(world: World) -> None:
    """Wrong bytes lie in its blocks, which vLLM lets it keep because it has a local hit before
    them; the tokens are computed over three steps, and the server has lost all it had. Each block
    is stored when it has been computed, not before."""
    engine = world.engine(num_blocks=64, max_batched_tokens=64)
    prompt = text("half way", 256)
    engine.add(prompt)
    world.settle(engine)
    engine.reset_prefix_cache()
    engine.add(prompt[:65], transfer_params=NO_LOAD | NO_STORE)
    world.settle(engine)
    transfer = engine.workers.ranks[0].connector.worker._attachment.transfer
    load = transfer.load

    def half(group: int, block_ids: Any, offsets: Any, part_offset: int) -> int:
        load(group, block_ids, offsets[::-1], part_offset)
        transfer.load = load
        raise TransferError("a copy that a test lets fail half-way")

    transfer.load = half
    request = engine.add(prompt)
    engine.step()
    wait_until(lambda: not world.server.totals()["leases"], "the lease is given back")
    world.server.clear()
    engine.run()
    assert world.runs(engine, request) == [("stored", 16)]
    assert world.stored_chunks(engine, prompt) == 16


def test_what_is_used_is_kept(small_world: World) -> None:
    """Of two prompts the older one is looked up again; then the newer one is evicted first."""
    world = small_world
    shape = {"layers": 4, "heads": 12, "num_blocks": 256, "max_batched_tokens": 1024}
    engine = world.engine(options={"chunk_tokens": 256}, **shape)
    used, unused = text("used", 1024), text("unused", 1024)
    for prompt in (used, unused, used):
        engine.add(prompt)
        engine.run()
        engine.reset_prefix_cache()
    before, n = world.server.totals()["evicted"], 0
    while world.server.totals()["evicted"] == before:
        engine.add(text(f"filler {n}", 256))
        engine.run()
        n += 1
    found = {}
    for name, prompt in {"used": used, "unused": unused}.items():
        request = engine.add(prompt, transfer_params=NO_STORE)
        engine.run()
        engine.reset_prefix_cache()
        found[name] = (engine.external_hit(request), world.accounts(engine)[request]["miss"])
    assert found == {"used": (1024, ""), "unused": (768, "evicted")}


def test_hit_is_counted_once(world: World) -> None:
    """Asked about at many steps, and taken up once; of its first chunk half is there already."""
    engine = world.engine(options={"chunk_tokens": 64}, num_blocks=32, max_batched_tokens=512)
    prompt = text("once", 256)
    engine.add(prompt[:192])
    engine.run()
    engine.reset_prefix_cache()
    engine.add(prompt[:33], transfer_params=NO_LOAD | NO_STORE)
    engine.run()
    big = engine.add(text("big", 260), max_tokens=80)
    engine.step()
    request = engine.add(prompt)
    engine.run()
    assert engine.outputs[big]
    hits = (engine.local_hit(request), engine.external_hit(request))
    assert sum(hits) == 192
    account = world.accounts(engine)[request]
    assert account["external_tokens"] == hits[1]


def test_allocation_that_cannot_be_noted(world: World) -> None:
    """A hook of ours raises after vLLM has begun to wait for a load: the load is answered."""
    engine = world.engine(num_blocks=64)
    prompt = text("not noted", 160)
    first = engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    loads = engine.connector.scheduler.loads

    def fail(*_: Any) -> None:
        del loads.begin
        raise RuntimeError("a bug that a test puts in")

    loads.begin = fail
    second = engine.add(prompt)
    engine.run()
    assert engine.outputs[second] == engine.outputs[first]
    assert engine.connector.guard.failures == 1
    engine.connector.guard.failures = 0  # it was this test's own


def test_every_account_is_reported_once(world: World) -> None:
    """The server counts as many requests and tokens as there were."""
    engine = world.engine(num_blocks=64)
    world.settle(engine)
    before = world.server.status()["accounts"]
    requests = [engine.add(text(f"report {n}", 40 + n)) for n in range(3)]
    engine.run()
    assert world.accounts(engine).keys() >= set(requests)
    after = world.server.status()["accounts"]
    assert after["reports"] - before["reports"] == 3
    assert after["tokens"] - before["tokens"] == 3 * 41 + 3


def test_updates_of_two_engines(world: World) -> None:
    """Both engines get their first new weights, and not the same ones: they do not meet."""
    prompt = text("updated", 160)
    for weights in ("first", "second"):
        engine = world.engine(num_blocks=64)
        engine.update_weights(weights)
        world.attach(engine)
        request = engine.add(prompt)
        engine.run()
        assert engine.external_hit(request) == 0
        assert world.stored_chunks(engine, prompt) == 0, "nor does an engine that had no update"


def test_resumed_in_other_blocks(world: World) -> None:
    """Nothing is asked for until the victim has been preempted and resumed elsewhere."""
    engine = world.engine(num_blocks=10, prefix_caching=False)
    stores = engine.connector.scheduler.stores
    ask, stores.ask = stores.ask, lambda *_: False
    engine.add(text("grower", 60), max_tokens=40)
    engine.step()
    prompt = text("victim", 72)
    victim = engine.add(prompt, max_tokens=50)
    while len(engine.allocations(victim)) < 2:
        engine.step()
    first, second = (set(admission.block_ids[0]) for admission in engine.allocations(victim))
    assert first != second
    stores.ask = ask
    engine.run()
    whole = prompt + engine.outputs[victim]
    assert world.stored_chunks(engine, whole) == (72 + 50 - 1) // 16


def test_boot_without_another_chunk(world: World) -> None:
    """All chunks of a running request are stored when the server is replaced, and it completes no
    other: the new server gets them all."""
    world.lossy = True
    engine = world.engine(num_blocks=64)
    prompt = text("no other", 160)
    request = engine.add(prompt, max_tokens=10)
    for _ in range(4):
        engine.step()
    world.server.replace()
    wait_until(lambda: bool(world.status_of(engine).get("namespace")), "the engine is back")
    assert request in engine.scheduler.requests
    engine.run()
    assert world.stored_chunks(engine, prompt) == 10


def test_reader_of_a_write_that_fails(world: World) -> None:
    """While one rank has yet to write, another engine needs the same blocks; then that rank cannot
    write. The reader must not have counted on them."""
    engine = world.engine(num_blocks=64, ranks=2)
    reader = world.engine(num_blocks=64, ranks=2, options={"load": False})
    prompt = text("fails later", 160)
    last = engine.workers.ranks[1].connector
    save = last.wait_for_save
    requests: list[str] = []

    def fail(*_: Any) -> int:
        raise TransferError("a copy that a test lets fail")

    def fail_late() -> None:
        last.wait_for_save = save
        requests.append(reader.add(prompt))
        reader.run()
        last.worker._attachment.transfer.store = fail
        save()

    last.wait_for_save = fail_late
    writer = engine.add(prompt)
    engine.run()
    assert world.runs(engine, writer) == [("skipped:writer_failed", 10)]
    fates = world.fates(reader, requests[0])
    assert fates.total() == 10
    assert not fates["present"]


def test_lease_of_an_engine_that_is_gone(world: World) -> None:
    """An engine ends with a hit that it never took up; then nothing keeps what it had leased."""
    engine = world.engine(num_blocks=64)
    prompt = text("gone", 160)
    engine.add(prompt)
    world.settle(engine)
    engine.reset_prefix_cache()
    engine.add(prompt)
    wait_until(lambda: world.server.totals()["leases"] == 1, "the hit is leased")
    world.engines.remove(engine)
    engine.close()
    world.check_nothing_held()
    world.server.clear()
    assert world.server.totals()["objects"] == 0


def test_stored_by_another_meanwhile(world: World) -> None:
    """Looked up in vain; then another engine stores the first half; then it computes them all."""
    engine = world.engine(num_blocks=64)
    other = world.engine(num_blocks=64)
    prompt = text("meanwhile", 160)
    request = engine.add(prompt)
    await_lookup(engine, request)
    other.add(prompt[:80])
    world.settle(other)
    engine.run()
    assert world.runs(engine, request) == [("present", 5), ("stored", 5)]


def test_edges_in_flight(world: World) -> None:
    """Requests that stop while their next step is in flight already: the last token sampled is fed
    in that step, and belongs to nobody. Some stop with it at the end of a block."""
    engine = world.engine(num_blocks=128, async_scheduling=True)
    ended_at = set()
    for n in range(48):
        prompt = text(f"stops {n}", 30 + n % 16)
        request = engine.add(prompt, max_tokens=40, stop_token_ids=range(0, 512, 12))
        engine.run()
        tokens = len(prompt) + len(engine.outputs[request])
        ended_at.add(tokens % 16)
        assert world.fates(engine, request).total() == (tokens - 1) // 16
    assert 0 in ended_at


def test_hooks_keep_no_block(world: World) -> None:
    """What a finished request held is free at once."""
    engine = world.engine(num_blocks=64, prefix_caching=False)
    request = engine.add(text("keeps nothing", 160))
    while not engine.outputs[request]:
        engine.step()
    assert request not in engine.scheduler.requests
    assert engine.scheduler.kv_cache_manager.usage == 0
