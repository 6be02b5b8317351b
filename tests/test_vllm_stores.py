"""Slots for owed chunks, against a real server: asked, granted, copied, settled, or given back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("vllm")

from conversation import names
from kvledger.client import Client
from kvledger.fates import Fate
from kvledger.ledger import MAX_HEALS, StoreRule
from kvledger.protocol import unpack_u64
from kvledger.reasons import Reason
from kvledger.vllm.accounts import Accounts, run_lengths
from kvledger.vllm.metadata import CopyPlan
from kvledger.vllm.stores import MAX_BACKOFF_STEPS, MAX_CHUNKS_PER_STEP, Stores
from kvledger.vllm.tracked import Tracked
from servers import RunningServer, StartServer, wait_until
from vllm_desk import PART_BYTES, Desk, go_on, stop, total, tracked, wait_total


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def desk(running: RunningServer) -> Iterator[Desk]:
    with Desk(running.socket_path) as desk:
        desk.open()
        yield desk


@pytest.fixture
def stores(desk: Desk) -> Stores:
    stores = Stores(desk.channel)
    desk.on_settled = stores.settle
    return stores


def fates(item: Tracked) -> list[tuple[str, int]]:
    return run_lengths(item.account)


def ask(desk: Desk, stores: Stores, items: Sequence[Tracked], step: int = 1) -> None:
    """Ask, and wait for the answer."""
    assert stores.ask(items, step)
    desk.poll_until(lambda: not stores.waiting)


def store_all(desk: Desk, stores: Stores, item: Tracked, step: int = 1) -> list[int]:
    """All that is owed is stored; the reservations."""
    ask(desk, stores, [item], step)
    numbers = [n for plan in stores.take([item]) for n in unpack_u64(plan.reservations)]
    for plan_reservations in numbers:
        desk.commit(np.array([plan_reservations], np.uint64).tobytes())
    desk.poll_until(lambda: not stores.open_reservations)
    return numbers


# ---------------------------------------------------------------- the straight way


def test_from_owed_to_stored(desk: Desk, stores: Stores, running: RunningServer) -> None:
    item = tracked(3, blocks_per_chunk=2)
    ask(desk, stores, [item])
    assert fates(item) == [("granted", 3)]
    assert stores.open_reservations == total(running, "reservations") == 3
    (plan,) = stores.take([item])
    assert stores.take([item]) == (), "handed out once"
    offsets = unpack_u64(plan.offsets)
    assert len(set(offsets)) == 3
    assert all(offset % PART_BYTES == 0 for offset in offsets)
    assert np.frombuffer(plan.block_ids, np.int32).tolist() == [1, 2, 3, 4, 5, 6]
    assert plan.group == 0
    desk.commit(plan.reservations)
    desk.poll_until(lambda: not stores.open_reservations)
    assert fates(item) == [("stored", 3)]
    assert total(running, "stored") == 3


def test_a_second_request_finds_what_is_there(desk: Desk, stores: Stores) -> None:
    store_all(desk, stores, tracked(3))
    longer = tracked(5)
    assert len(store_all(desk, stores, longer)) == 2
    assert fates(longer) == [("present", 3), ("stored", 2)]


def test_a_chain_goes_on_where_it_ended(desk: Desk, stores: Stores) -> None:
    """The parent of the next chunk is named, whether stored or still being written."""
    item = tracked(2)
    ask(desk, stores, [item])
    (first,) = stores.take([item])
    item.request.chunks = 4
    item.account.advance(item.request.num_tokens)
    item.account.capture([1, 2, 3, 4])
    ask(desk, stores, [item], step=2)
    (second,) = stores.take([item])
    desk.commit(second.reservations)
    desk.commit(first.reservations)
    desk.poll_until(lambda: not stores.open_reservations)
    assert fates(item) == [("stored", 4)]


def test_nothing_to_ask_sends_nothing(desk: Desk, stores: Stores, running: RunningServer) -> None:
    assert not stores.ask([], 1)
    assert not stores.ask([tracked(0), tracked(3, valid=False)], 1)
    assert not stores.ask([tracked(3, rule=StoreRule(0))], 1)
    assert stores.waiting == 0
    assert stores.take([]) == ()
    assert total(running, "reservations") == 0
    assert desk.channel.usable


def test_a_reserve_has_a_bound(desk: Desk, stores: Stores) -> None:
    """One step asks for no more slots than an engine may hold; the rest stays owed."""
    items = [tracked(3000, text="long"), tracked(2000, text="other")]
    assert stores.ask(items, 1)
    asked = [item.account.fates.count(Fate.ASKED) for item in items]
    assert asked == [3000, MAX_CHUNKS_PER_STEP - 3000]
    desk.poll_until(lambda: not stores.waiting)
    assert 0 < stores.open_reservations <= MAX_CHUNKS_PER_STEP


# ---------------------------------------------------------------- refusals


def test_a_rank_that_could_not_write(desk: Desk, stores: Stores, running: RunningServer) -> None:
    item = tracked(2)
    ask(desk, stores, [item])
    (plan,) = stores.take([item])
    desk.abort(plan.reservations)
    desk.poll_until(lambda: not stores.open_reservations)
    assert fates(item) == [("skipped:writer_failed", 2)]
    wait_total(running, "quarantined", 0)


def test_what_another_request_writes_is_asked_for_again_soon(desk: Desk, stores: Stores) -> None:
    """Two equal prompts in one step: the second is present once the first is written."""
    one, two = tracked(3), tracked(3)
    ask(desk, stores, [one, two], step=7)
    assert fates(one) == [("granted", 3)]
    assert fates(two) == [("owed", 3)]
    assert (two.refusal, two.retry_step) == (Reason.BEING_WRITTEN, 8)
    (plan,) = stores.take([one, two])
    desk.commit(plan.reservations)
    desk.poll_until(lambda: not stores.open_reservations)
    ask(desk, stores, [two], step=8)
    assert fates(two) == [("present", 3)]
    assert two.retry_step == 0


def test_who_is_refused_asks_less_and_less_often(running: RunningServer) -> None:
    with Desk(running.socket_path, engine="lonely", with_worker=False) as desk:
        desk.poll_until(lambda: desk.channel.connected)
        stores, item = Stores(desk.channel), tracked(1)
        pauses = []
        for _ in range(9):
            ask(desk, stores, [item], step=100)
            pauses.append(item.retry_step - 100)
        assert pauses == [min(2**n, MAX_BACKOFF_STEPS) for n in range(1, 10)]
        assert item.refusal is Reason.NAMESPACE_OPENING
        assert fates(item) == [("owed", 1)]


def test_a_chain_whose_head_is_gone_is_stored_anew(
    desk: Desk, stores: Stores, running: RunningServer
) -> None:
    item = tracked(2)
    store_all(desk, stores, item)
    with Client(running.socket_path) as client:
        assert client.clear() == 2
    item.request.chunks = 3
    item.account.advance(item.request.num_tokens)
    item.account.capture([1, 2, 3])
    ask(desk, stores, [item])
    assert fates(item) == [("owed", 3)], "the server has none of it any more"
    assert item.retry_step == 0
    assert item.account.needs_table
    item.account.capture([1, 2, 3])
    store_all(desk, stores, item)
    assert fates(item) == [("stored", 3)]
    assert total(running, "objects") == 3


def test_a_chain_is_not_stored_anew_for_ever(
    desk: Desk, stores: Stores, running: RunningServer
) -> None:
    item = tracked(2)
    with Client(running.socket_path) as client:
        for round_number in range(MAX_HEALS + 1):
            item.account.capture(range(1, 100))
            store_all(desk, stores, item)
            client.clear()
            item.request.chunks += 1
            item.account.advance(item.request.num_tokens)
            item.account.capture(range(1, 100))
            ask(desk, stores, [item], step=5)
            healed = round_number < MAX_HEALS
            assert (item.refusal is None) == healed
    assert item.refusal is Reason.PARENT_MISSING
    assert fates(item) == [("stored", 5), ("owed", 1)]


# ---------------------------------------------------------------- late, silent, gone


def test_a_late_slot_is_used_in_the_next_step(
    desk: Desk, stores: Stores, running: RunningServer
) -> None:
    item = tracked(2)
    stop(running)
    assert stores.ask([item], 1)
    assert stores.take([item]) == ()
    assert fates(item) == [("asked", 2)]
    go_on(running)
    desk.poll_until(lambda: not stores.waiting)
    (plan,) = stores.take([item])
    assert len(unpack_u64(plan.reservations)) == 2


def test_a_slot_that_comes_too_late_is_given_back(
    desk: Desk, stores: Stores, running: RunningServer
) -> None:
    """The request is preempted while its reserve is under way."""
    item = tracked(2)
    stop(running)
    assert stores.ask([item], 1)
    item.account.lose_blocks()
    stores.give_back(item.account.forget_blocks())
    go_on(running)
    desk.poll_until(lambda: not stores.waiting)
    assert total(running, "reservations") == 2, "negative control: they stay until it is told"
    assert stores.take([item]) == ()
    assert stores.open_reservations == 0
    stores.flush()
    wait_total(running, "reservations", 0)
    assert total(running, "quarantined") == 0, "no worker was told, so nothing needs quarantine"
    assert fates(item) == [("owed", 2)]


def test_what_is_given_back_is_kept_while_the_server_is_silent(
    desk: Desk, stores: Stores, running: RunningServer
) -> None:
    item = tracked(2)
    ask(desk, stores, [item])
    stop(running)
    assert stores.ask([tracked(1, text="b")], 2)
    desk.channel.trip()
    assert desk.channel.silent
    stores.give_back(item.account.give_up(Reason.RESERVE_DEADLINE))
    stores.flush()
    assert not stores.ask([tracked(1, text="c")], 3), "nothing is asked of a silent server"
    go_on(running)
    desk.poll_until(lambda: not stores.waiting)
    assert total(running, "reservations") == 3
    stores.flush()
    wait_total(running, "reservations", 1)


def test_a_lost_server_owes_everything_again(
    desk: Desk, stores: Stores, running: RunningServer, server: StartServer
) -> None:
    stored, flying = tracked(2, text="s"), tracked(2, text="f")
    store_all(desk, stores, stored)
    ask(desk, stores, [flying])
    assert stores.take([flying])

    def gone() -> None:
        stores.lost()
        for item in (stored, flying):
            item.account.lose_server()

    desk.on_gone = gone
    running.kill()
    desk.poll_until(lambda: desk.count("lost"))
    assert fates(stored) == fates(flying) == [("owed", 2)]
    assert stores.open_reservations == stores.waiting == 0
    new = server(socket_path=running.socket_path)
    desk.open(times=2)
    for item in (stored, flying):
        item.account.capture([1, 2])
        store_all(desk, stores, item)
        assert fates(item) == [("stored", 2)]
    assert total(new, "objects") == 4


def test_answers_of_a_lost_server_never_come(
    desk: Desk, stores: Stores, running: RunningServer
) -> None:
    item = tracked(1)

    def gone() -> None:
        stores.lost()
        item.account.lose_server()

    desk.on_gone = gone
    stop(running)
    assert stores.ask([item], 1)
    running.kill()
    desk.poll_until(lambda: desk.count("lost"))
    assert stores.waiting == 0
    assert fates(item) == [("owed", 1)]


def test_accounts_are_closed_once_though_the_server_dies_meanwhile(
    desk: Desk, running: RunningServer
) -> None:
    """The report of a closed account may be what notices the loss."""
    accounts = Accounts(desk.channel)
    desk.on_gone = accounts.lose_server
    items = [tracked(2, text=text) for text in "abc"]
    for item in items:
        item.account.give_up(Reason.NO_ROOM)
    running.kill()
    connection = desk.channel.connection
    assert connection is not None
    wait_until(lambda: connection.closed)  # the link has seen it, the channel has not
    accounts.closing = list(items)
    for item in items:
        item.account.end()
    accounts.close_settled()
    assert desk.count("lost") == 1, "otherwise this test shows nothing"
    assert accounts.closed == 3
    assert accounts.totals == {"skipped:no_room": 6}
    assert accounts.closing == []


@pytest.mark.pitfall(28)
def test_plans_are_flat_bytes(desk: Desk, stores: Stores) -> None:
    """What travels to the workers holds no object of ours."""
    item = tracked(4)
    ask(desk, stores, [item])
    (plan,) = stores.take([item])
    assert isinstance(plan, CopyPlan)
    assert len(plan.offsets) == len(plan.reservations) == 4 * 8
    assert len(plan.block_ids) == 4 * 4
    assert names("a", 1) not in plan.offsets + plan.block_ids + plan.reservations
