"""The account of one request, by example: loads, cuts, resets, lost servers, and how it ends."""

from __future__ import annotations

import pytest

from kvledger.fates import Fate, LedgerError
from kvledger.ledger import MAX_HEALS, Account, Grant, StoreRule
from kvledger.reasons import Reason
from ledger_steps import account, ask, fates, grant_all, step, store_all

# ---------------------------------------------------------------- loads


def test_a_failed_load_of_what_was_never_valid_leaves_the_account() -> None:
    books = account()
    books.known_chunks = 5
    books.begin_load(2, 5)
    assert fates(books) == "PPlll"
    step(books, 2 * 16)
    books.end_load(arrived=False)
    assert fates(books) == "oo", "nothing that the server said is believed"
    assert books.known_chunks == 0
    books.end()
    assert books.give_up(Reason.ENGINE_IDLE) == []
    assert books.balance() == {"skipped:engine_idle": 2}
    assert books.imbalance() is None


def test_after_a_failed_load_the_tokens_are_computed_and_stored() -> None:
    books = account()
    books.known_chunks = 3
    books.begin_load(0, 3)
    books.end_load(arrived=False)
    assert books.fates == []
    step(books, 3 * 16)
    assert store_all(books) == [0, 1, 2]


def test_a_load_may_begin_within_a_chunk() -> None:
    """Chunk 64, block 16: 5 blocks are local, so chunk 1 is loaded in part."""
    books = account(chunk_tokens=64, block_tokens=16)
    books.known_chunks = 3
    books.begin_load(5 * 16 // 64, 3)
    step(books, 5 * 16)
    assert fates(books) == "Pll"
    books.end_load(arrived=True)
    assert fates(books) == "PLL"
    assert books.ever_valid == 3


def test_a_failed_load_does_not_make_a_consumer_store() -> None:
    books = account(rule=StoreRule(0, Reason.STORE_DISABLED))
    books.known_chunks = 3
    books.begin_load(1, 3)
    step(books, 16)
    books.end_load(arrived=False)
    step(books, 3 * 16)
    assert fates(books) == "XXX"
    assert set(books.reasons.values()) == {Reason.STORE_DISABLED}
    assert not books.needs_table


# ---------------------------------------------------------------- truncation


def test_truncation_takes_names_away() -> None:
    books = account()
    step(books, 16)
    store_all(books)
    step(books, 6 * 16)
    (run,) = ask(books, 2)
    books.answer(run, 2, 1, [Grant(1, 0), Grant(2, 4096)])
    assert fates(books) == "SPggoo"
    assert books.truncate(3 * 16 + 5) == [2], "48 tokens are 3 chunks"
    assert fates(books) == "SPg"
    assert books.dropped == {"skipped:tokens_truncated": 3}
    assert (books.valid_chunks, books.ever_valid) == (3, 3)
    assert books.truncate(16) == [1]
    assert books.dropped == {"skipped:tokens_truncated": 4, "present": 1}
    assert sum(books.balance().values()) == 6


def test_truncation_leaves_what_workers_copy_to_the_server() -> None:
    books = account()
    step(books, 16)
    grant_all(books)
    books.take_granted()
    assert books.truncate(0) == [], "the workers commit it under its old name"
    books.settle(0, 1000, None)
    books.end()
    assert books.imbalance() is None


# ---------------------------------------------------------------- resets, healing, lost servers


def test_freeze_stops_everything_that_is_not_under_way() -> None:
    books = account()
    step(books, 4 * 16)
    (run,) = ask(books)
    books.answer(run, 1, 1, [Grant(1, 0), Grant(2, 4096)])
    books.take_granted()
    step(books, 6 * 16)
    (run,) = ask(books, 2)
    books.answer(run, 2, 0, [Grant(3, 8192)])
    assert fates(books) == "Piigoo"
    assert books.freeze(Reason.EPOCH_CHANGED) == [3]
    assert fates(books) == "PiiXXX"
    step(books, 7 * 16)
    assert fates(books) == "PiiXXXX"
    books.settle(1, 1, None)
    books.settle(2, 2, Reason.WRITER_FAILED)
    assert fates(books) == "PSXXXXX"
    assert set(books.reasons.values()) == {Reason.EPOCH_CHANGED}


def test_a_frozen_account_stores_nothing_after_a_new_server() -> None:
    """Its bytes are of old weights: they must not be stored under the new ones' names."""
    books = account()
    step(books, 2 * 16)
    store_all(books)
    step(books, 3 * 16)
    grant_all(books, 2)
    books.take_granted()
    books.freeze(Reason.EPOCH_CHANGED)
    books.lose_server()
    step(books, 4 * 16)
    assert fates(books) == "XXXX"
    assert list(books.runs_to_ask()) == []
    assert not books.heal() or fates(books) == "XXXX"


def test_a_lost_server_makes_everything_owed_again() -> None:
    books = account()
    books.known_chunks = 1
    step(books, 5 * 16)
    (run,) = ask(books)
    books.answer(run, 1, 0, [Grant(1, 0), Grant(2, 4096)])
    books.take_granted()
    books.settle(1, 1, None)
    assert fates(books) == "PSioo"
    books.lose_server()
    assert fates(books) == "ooooo"
    assert books.grants == {}
    books.settle(2, 2, None)
    assert fates(books) == "ooooo", "a late word of the old server is ignored"
    assert books.needs_table, "the blocks of what was stored are to be found again"
    step(books, 5 * 16)
    assert store_all(books, 2) == [0, 1, 2, 3, 4]


def test_a_lost_server_leaves_what_has_ended() -> None:
    books = account()
    step(books, 3 * 16)
    (run,) = ask(books)
    books.answer(run, 1, 1, [Grant(1, 0)])
    books.take_granted()
    books.end()
    books.lose_server()
    assert fates(books) == "Poo"
    books.give_up(Reason.SERVER_ABSENT)
    assert books.balance() == {"present": 1, "skipped:server_absent": 2}
    assert books.imbalance() is None


def test_a_lost_server_does_not_make_a_consumer_store() -> None:
    books = account(rule=StoreRule(0, Reason.STORE_DISABLED))
    books.known_chunks = 2
    step(books, 2 * 16)
    assert fates(books) == "PP"
    books.lose_server()
    assert fates(books) == "XX"


def test_heal_owes_the_chain_again_a_few_times() -> None:
    books = account(rule=StoreRule(3, Reason.GENERATED_NOT_STORED))
    books.known_chunks = 1
    step(books, 4 * 16)
    for question in range(1, MAX_HEALS + 1):
        assert store_all(books, question) == ([1, 2] if question == 1 else [0, 1, 2])
        assert books.heal()
        assert fates(books) == "oooX", "what the rule forbids stays skipped"
        assert books.known_chunks == 0
        step(books, 4 * 16)
    store_all(books, 9)
    assert not books.heal()
    assert fates(books) == "SSSX"


def test_heal_needs_the_blocks() -> None:
    books = account()
    step(books, 16)
    store_all(books)
    books.lose_blocks()
    assert not books.heal()
    step(books, 16)
    books.end()
    assert not books.heal()
    assert fates(books) == "S"


# ---------------------------------------------------------------- ends


def test_an_ended_account_waits_for_what_is_under_way() -> None:
    books = account()
    step(books, 3 * 16)
    (run,) = ask(books)
    books.answer(run, 1, 0, [Grant(1, 0), Grant(2, 4096)])
    books.take_granted()
    books.end()
    assert books.ended
    assert list(books.runs_to_ask()) == [range(2, 3)], "read in the next step, if one follows"
    assert books.give_up(Reason.ENGINE_IDLE) == []
    assert books.open_chunks == 2
    assert "no final fate" in str(books.imbalance())
    books.settle(0, 1, None)
    books.settle(1, 2, Reason.WRITER_GONE)
    assert books.open_chunks == 0
    assert books.imbalance() is None
    assert books.balance() == {"stored": 1, "skipped:writer_gone": 1, "skipped:engine_idle": 1}


def test_give_up_returns_granted_slots() -> None:
    books = account()
    step(books, 2 * 16)
    grant_all(books)
    books.end()
    assert books.give_up(Reason.RESERVE_DEADLINE) == [1000, 1001]
    assert books.imbalance() is None


def test_a_late_answer_to_an_ended_account_is_given_back() -> None:
    books = account()
    step(books, 2 * 16)
    (run,) = ask(books)
    books.end()
    books.forget_blocks()
    books.give_up(Reason.RESERVE_DEADLINE)
    assert books.answer(run, 1, 1, [Grant(9, 0)]) == [9]
    assert books.balance() == {"skipped:reserve_deadline": 2}


# ---------------------------------------------------------------- wrong books are found


def balanced() -> Account:
    books = account()
    books.known_chunks = 1
    step(books, 3 * 16)
    (run,) = ask(books)
    books.answer(run, 1, 0, [Grant(1, 0)])
    books.take_granted()
    books.settle(1, 1, None)
    books.end()
    books.give_up(Reason.NO_ROOM)
    assert books.imbalance() is None
    return books


def test_imbalance_says_what_is_wrong() -> None:
    """Negative control: every way to cook the books is noticed."""
    books = balanced()
    books.fates[1] = Fate.IN_FLIGHT
    assert books.imbalance() == "chunks [1] have no final fate"

    books = balanced()
    books.fates.pop()
    assert books.imbalance() == "3 chunks were valid, 2 are accounted for"

    books = balanced()
    books.fates.append(Fate.STORED)
    assert books.imbalance() == "3 chunks were valid, 4 are accounted for"

    books = balanced()
    del books.reasons[2]
    assert books.imbalance() == "a reason and a skipped chunk do not match"

    books = balanced()
    books.reasons[0] = Reason.NO_ROOM
    assert books.imbalance() == "a reason and a skipped chunk do not match"

    books = balanced()
    books.grants[1] = Grant(5, 0)
    assert books.imbalance() == "slots are still held for chunks [1]"


def test_an_event_that_cannot_happen_is_refused() -> None:
    books = account()
    step(books, 16)
    books.ask(range(1), 1)
    with pytest.raises(LedgerError, match=r"request r, chunk 0: ask cannot happen .* asked"):
        books.ask(range(1), 2)
    assert fates(books) == "a"
