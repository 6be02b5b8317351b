"""A rank follows plans: real memory, real arena, real server; every byte against a pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvledger.client import Client
from kvledger.fates import Fate
from kvledger.protocol import Closed, Describe, Opened, Reply, Settled, unpack_u64
from kvledger.reasons import Reason
from kvledger.vllm.metadata import SKIP_BLOCK, CopyPlan, StepPlan
from kvledger.vllm.transfer import HostTransfer
from servers import RunningServer, StartServer
from vllm_desk import go_on, stop, total, tracked, wait_total
from vllm_rank import BLOCKS, CANARY, LAYERS, PAGE, Rank, World, chunk_bytes, load_plan

MakeWorld = Callable[..., World]


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def make(running: RunningServer) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def open_world(**options: int) -> World:
        worlds.append(World.open(running, **options))
        return worlds[-1]

    yield open_world
    for world in worlds:
        world.close()


# ---------------------------------------------------------------- stores and loads


@pytest.mark.parametrize("width", [1, 3])
def test_what_is_stored_is_loaded_byte_by_byte(make: MakeWorld, width: int) -> None:
    world = make(width=width)
    item = tracked(4, blocks_per_chunk=width)
    copies = world.stored(item)
    assert item.account.fates == [Fate.STORED] * 4
    ids = np.frombuffer(copies.block_ids, np.int32).reshape(4, width).tolist()
    for blocks, offset in zip(ids, unpack_u64(copies.offsets), strict=True):
        assert world.arena(offset, LAYERS * width * PAGE) == chunk_bytes(blocks)
    assert world.rank.side.stored_bytes == 4 * width * LAYERS * PAGE
    targets = list(range(30, 30 + 4 * width))
    results = world.rank.step(world.plan(loads=(load_plan(copies, targets),)))
    assert results == ({"r"}, set())
    sources = [block for blocks in ids for block in blocks]
    assert all(world.rank.holds(t, s) for t, s in zip(targets, sources, strict=True))
    assert world.rank.untouched(29)
    assert world.rank.untouched(30 + 4 * width)
    assert world.rank.side.loaded_bytes == 4 * width * LAYERS * PAGE
    assert world.rank.step(world.plan()) == (set(), set()), "each load is answered once"


def test_blocks_that_are_not_wanted_are_not_written(make: MakeWorld) -> None:
    world = make(width=3)
    copies = world.stored(tracked(2, blocks_per_chunk=3))
    targets = [SKIP_BLOCK, SKIP_BLOCK, 32, 33, 34, SKIP_BLOCK]
    world.rank.step(world.plan(loads=(load_plan(copies, targets),)))
    written = [block for block in range(20, BLOCKS) if not world.rank.untouched(block)]
    assert written == [32, 33, 34]
    sources = np.frombuffer(copies.block_ids, np.int32).tolist()
    assert all(world.rank.holds(t, sources[targets.index(t)]) for t in written)


@pytest.mark.pitfall(42)
def test_rescues_are_read_before_the_step_writes(make: MakeWorld) -> None:
    world = make()
    item = tracked(2)
    copies = world.reserved(item)
    world.rank.compute([1, 2])
    plan = world.plan(rescues=(copies,))
    world.rank.side.before_step(plan)
    world.rank.cells[:, 1:3] = 0  # the blocks' new owner
    world.settled()
    first, second = unpack_u64(copies.offsets)
    assert world.arena(first, LAYERS * PAGE) == chunk_bytes([1])
    assert world.arena(second, LAYERS * PAGE) == chunk_bytes([2])
    assert item.account.fates == [Fate.STORED] * 2


@pytest.mark.pitfall(54)
def test_a_rank_that_is_not_asked_to_save_stores_before_the_next_step(make: MakeWorld) -> None:
    world = make()
    item = tracked(1)
    copies = world.reserved(item)
    world.rank.compute([1])
    world.rank.side.begin_step(world.plan(stores=(copies,)))
    world.rank.side.before_step(world.plan())
    world.settled()
    assert item.account.fates == [Fate.STORED]


def test_a_block_out_of_bounds_is_not_stored(make: MakeWorld) -> None:
    """Our own mistake ends as a refusal, not as foreign bytes."""
    world = make()
    item = tracked(1)
    copies = replace(world.reserved(item), block_ids=np.array([BLOCKS], np.int32).tobytes())
    world.rank.step(world.plan(stores=(copies,)))
    world.settled()
    assert item.account.reasons == {0: Reason.WRITER_FAILED}


# ---------------------------------------------------------------- plans of others

FOREIGN: list[dict[str, object]] = [{"boot": "another"}, {"arena_generation": 99}]


@pytest.mark.parametrize("foreign", FOREIGN, ids=["boot", "generation"])
def test_a_plan_of_another_attachment_is_not_followed(
    make: MakeWorld, running: RunningServer, foreign: dict[str, object]
) -> None:
    """Stores are skipped without a word: the numbers may mean other slots to this server."""
    world = make()
    there = world.stored(tracked(1, text="there"))
    item = tracked(1)
    copies = world.reserved(item)
    world.rank.compute([1, 2])
    plan = world.plan(stores=(copies,), loads=(load_plan(there, [40]),))
    finished, failed = world.rank.step(replace(plan, **foreign))  # type: ignore[arg-type]
    assert finished == failed == {"r"}
    assert world.rank.untouched(40)
    assert total(running, "reservations") == 1
    assert world.rank.step(plan) == ({"r"}, set()), "negative control: the same plan, of here"
    world.settled()
    assert item.account.fates == [Fate.STORED]


def test_a_plan_of_another_namespace_is_not_followed(
    make: MakeWorld, running: RunningServer
) -> None:
    """The weights may have changed in between; the server is told that nothing was written."""
    world = make()
    there = world.stored(tracked(1, text="there"))
    item = tracked(1)
    copies = world.reserved(item)
    plan = world.plan(stores=(copies,), loads=(load_plan(there, [40]),))
    finished, failed = world.rank.step(replace(plan, namespace="another"))
    assert finished == failed == {"r"}
    assert world.rank.untouched(40)
    world.settled()
    assert item.account.reasons == {0: Reason.WRITER_FAILED}
    wait_total(running, "quarantined", 0)


def test_a_new_epoch_ends_plans_of_before(make: MakeWorld) -> None:
    """The scheduler describes itself anew, as at a reset of the cache."""
    world = make()
    copies = world.stored(tracked(2))
    old = world.plan(loads=(load_plan(copies, [40, 41]),))
    fields = {**world.desk.fields, "weights.epoch": "1"}
    world.desk.channel.send(lambda number: Describe(id=number, fields=fields))
    world.ready(times=2)
    finished, failed = world.rank.step(old)
    assert finished == failed == {"r"}
    assert world.rank.untouched(40)
    again = world.stored(tracked(2))
    new = world.plan(loads=(load_plan(again, [40, 41]),))
    assert world.rank.step(new) == ({"r"}, set())
    assert world.rank.holds(40, 1)


def test_a_load_that_was_overtaken_by_an_epoch_fails(make: MakeWorld) -> None:
    """The slots were ours when the copy began and not when it was complete."""
    world = make()
    copies = world.stored(tracked(1))
    load = world.rank.side

    class Overtaken(HostTransfer):
        """While the bytes are copied, the server hears of new weights."""

        def load(self, *arguments: object) -> int:
            done = super().load(*arguments)  # type: ignore[arg-type]
            fields = {**world.desk.fields, "weights.epoch": "1"}
            replies: list[Reply] = []
            world.desk.channel.send(lambda i: Describe(id=i, fields=fields), replies.append)
            world.desk.poll_until(lambda: replies)
            return done

    attachment = load._attachment
    assert attachment is not None
    connection = world.rank.channel.connection
    assert connection is not None
    arena = np.frombuffer(connection.map_arena(), dtype=np.uint8)
    load._attachment = replace(attachment, transfer=Overtaken(world.rank.memory, arena))
    finished, failed = world.rank.step(world.plan(loads=(load_plan(copies, [40]),)))
    assert finished == failed == {"r"}


# ---------------------------------------------------------------- budgets and cancellation


def test_a_load_takes_as_many_steps_as_the_budget_says(make: MakeWorld) -> None:
    chunks, per_step = 7, 3
    world = make(budget=per_step * LAYERS * PAGE)
    copies = world.stored(tracked(chunks))
    plan = world.plan(loads=(load_plan(copies, list(range(30, 30 + chunks))),))
    progress = []
    while True:
        results = world.rank.step(plan if not progress else world.plan())
        progress.append(sum(not world.rank.untouched(30 + chunk) for chunk in range(chunks)))
        if results != (set(), set()):
            break
    assert progress == [3, 6, 7]
    assert results == ({"r"}, set())


def test_the_budget_is_shared_and_each_step_gets_on(make: MakeWorld) -> None:
    """A chunk larger than the budget is still loaded, one a step."""
    world = make(budget=1)
    copies = world.stored(tracked(2))
    loads = tuple(load_plan(copies, [30 + 2 * n, 31 + 2 * n], f"r{n}") for n in range(2))
    answers = [world.rank.step(world.plan(loads=loads))[0]]
    answers += [world.rank.step(world.plan())[0] for _ in range(4)]
    assert answers == [set(), {"r0"}, set(), {"r1"}, set()]
    assert all(world.rank.holds(30 + n, 1 + n % 2) for n in range(4))


@pytest.mark.pitfall(34, 35)
def test_a_cancelled_load_is_answered_once(make: MakeWorld) -> None:
    world = make(budget=1)
    copies = world.stored(tracked(3))
    assert world.rank.step(world.plan(loads=(load_plan(copies, [30, 31, 32]),))) == (set(), set())
    assert world.rank.step(world.plan(cancelled_loads=("r",))) == ({"r"}, {"r"})
    assert world.rank.step(world.plan(cancelled_loads=("r",))) == (set(), set())
    assert world.rank.untouched(31), "nothing is copied after that"


@pytest.mark.pitfall(35)
def test_a_load_that_is_complete_cannot_be_cancelled(make: MakeWorld) -> None:
    world = make()
    copies = world.stored(tracked(1))
    world.rank.step(world.plan(loads=(load_plan(copies, [30]),)))
    assert world.rank.step(world.plan(cancelled_loads=("r",))) == (set(), set())


def test_loads_that_no_worker_was_told_of_are_answered(make: MakeWorld) -> None:
    world = make()
    assert world.rank.step(world.plan(failed_loads=("x", "y"))) == ({"x", "y"}, {"x", "y"})
    assert world.rank.step(world.plan()) == (set(), set())


def test_all_loads_fail_on_demand(make: MakeWorld) -> None:
    world = make(budget=1)
    copies = world.stored(tracked(3))
    world.rank.step(world.plan(loads=(load_plan(copies, [30, 31, 32]),)))
    world.rank.side.fail_loads()
    assert world.rank.side.take_results() == ({"r"}, {"r"})


# ---------------------------------------------------------------- servers that stop and go


def test_without_a_server_stores_are_skipped_and_loads_fail(tmp_path) -> None:
    rank = Rank(str(tmp_path / "nobody.sock"))
    copies = CopyPlan(0, bytes(8), np.array([1], np.int32).tobytes(), bytes(8))
    plan = StepPlan("boot", 1, "namespace", stores=(copies,), loads=(load_plan(copies, [30]),))
    assert rank.step(plan) == ({"r"}, {"r"})
    assert rank.untouched(30)
    rank.side.shutdown()


def test_a_killed_server_fails_loads_under_way(
    make: MakeWorld, running: RunningServer, server: StartServer
) -> None:
    world = make(budget=1)
    copies = world.stored(tracked(3))
    old = world.plan(loads=(load_plan(copies, [30, 31, 32]),))
    world.rank.step(old)
    running.kill()
    world.desk.poll_until(lambda: world.rank.step(StepPlan()) == ({"r"}, {"r"}))
    world.desk.poll_until(lambda: world.desk.count("lost"))
    server(socket_path=running.socket_path)
    world.ready(times=2)
    world.rank.cells[:, 30:33] = CANARY
    assert world.rank.step(old) == ({"r"}, {"r"}), "a plan of the old server means nothing now"
    assert world.rank.untouched(30)
    item = tracked(2)
    world.stored(item)
    assert item.account.fates == [Fate.STORED] * 2


def test_commits_wait_in_the_socket_of_a_stopped_server(
    make: MakeWorld, running: RunningServer
) -> None:
    world = make()
    item = tracked(2)
    copies = world.reserved(item)
    world.rank.compute([1, 2])
    stop(running)
    world.rank.step(world.plan(stores=(copies,)))
    assert world.stores.open_reservations == 2
    go_on(running)
    world.settled()
    assert item.account.fates == [Fate.STORED] * 2


def test_a_rank_that_left_and_came_back_follows_nothing_of_before(
    make: MakeWorld, running: RunningServer
) -> None:
    """Its connection breaks: the engine is attached anew, under another generation."""
    world = make()
    copies = world.stored(tracked(1))
    old = world.plan(loads=(load_plan(copies, [40]),))
    connection = world.rank.channel.connection
    assert connection is not None
    connection.close()
    world.desk.poll_until(lambda: world.desk.count("lost"))
    world.ready(times=2)
    assert world.rank.step(old) == ({"r"}, {"r"})
    assert world.rank.untouched(40)
    with Client(running.socket_path) as client:
        assert client.status()["totals"]["objects"] == 1, "what is complete stays"


def test_the_server_closes_before_it_drops(make: MakeWorld) -> None:
    """What the check after a copy relies on: a rank hears Closed before a lease is dropped."""
    world = make()
    closings: list[object] = []
    side = world.rank.side
    hear = side.on_push

    def listen(push: Opened | Closed | Settled) -> None:
        closings.append(type(push))
        hear(push)

    side.on_push = listen  # type: ignore[method-assign]
    fields = {**world.desk.fields, "weights.epoch": "1"}
    replies: list[Reply] = []
    world.desk.channel.send(lambda i: Describe(id=i, fields=fields), replies.append)
    world.desk.poll_until(lambda: replies)
    world.rank.step(StepPlan())
    assert closings[0] is Closed
