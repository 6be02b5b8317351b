"""The account of one request, by example; every number is computed here from the tokens."""

from __future__ import annotations

import pytest

from kvledger.fates import Fate, LedgerError
from kvledger.ledger import MAX_HEALS, Account, Grant, StoreRule
from kvledger.reasons import Reason

ALL = StoreRule()


def account(*, chunk_tokens: int = 16, block_tokens: int = 16, rule: StoreRule = ALL) -> Account:
    return Account(
        "r", chunk_tokens=chunk_tokens, blocks_per_chunk=chunk_tokens // block_tokens, rule=rule
    )


def table(blocks: int, first: int = 101) -> list[int]:
    """A block table without the null block."""
    return list(range(first, first + blocks))


def step(books: Account, valid_tokens: int, blocks: int = 64, first: int = 101) -> None:
    """What the scheduler side does with the numbers of a step."""
    books.advance(valid_tokens)
    if books.needs_table:
        books.capture(table(blocks, first))


def ask(books: Account, question: int = 1) -> list[range]:
    runs = list(books.runs_to_ask())
    for run in runs:
        books.ask(run, question)
    return runs


def grant_all(books: Account, question: int = 1) -> list[range]:
    """Every run is asked for, and every chunk gets the reservation ``1000 * question + chunk``."""
    runs = ask(books, question)
    for run in runs:
        grants = [Grant(1000 * question + chunk, 4096 * chunk) for chunk in run]
        assert books.answer(run, question, 0, grants) == []
    return runs


def store_all(books: Account, question: int = 1) -> list[int]:
    """All that is owed is stored; the chunks."""
    grant_all(books, question)
    taken = books.take_granted()
    for chunk, grant, _ in taken:
        books.settle(chunk, grant.reservation, None)
    return [chunk for chunk, _, _ in taken]


def fates(books: Account) -> str:
    """One letter for each chunk: its fate's first, in capitals if it is final."""
    letters = {
        Fate.OWED: "o",
        Fate.ASKED: "a",
        Fate.GRANTED: "g",
        Fate.IN_FLIGHT: "i",
        Fate.LOADING: "l",
        Fate.PRESENT: "P",
        Fate.STORED: "S",
        Fate.LOADED: "L",
        Fate.SKIPPED: "X",
    }
    return "".join(letters[fate] for fate in books.fates)


# ---------------------------------------------------------------- the bugs that started it


def test_an_external_hit_counts_in_the_bound() -> None:
    """Block 64, chunk 256: 60 blocks hit, 4 scheduled. Wrong: 256/64 - 60 = -56 blocks."""
    tokens, hit, scheduled = 4096, 3840, 256
    books = account(chunk_tokens=256, block_tokens=64)
    books.known_chunks = hit // 256
    step(books, hit)
    step(books, hit + scheduled)
    runs = grant_all(books)
    assert hit + scheduled == tokens
    assert runs == [range(3840 // 256, 4096 // 256)]
    ((chunk, _, blocks),) = books.take_granted()
    assert chunk == 15
    assert list(blocks) == table(64)[60:64], "blocks 60 to 63 of the request"
    assert len(blocks) == 4096 // 64 - 3840 // 64 == 4


def test_an_external_hit_that_is_loaded_counts_in_the_bound() -> None:
    books = account(chunk_tokens=256, block_tokens=64)
    books.known_chunks = 15
    books.begin_load(0, 15)
    step(books, 0)
    books.end_load(arrived=True)
    step(books, 3840 + 256)
    assert fates(books) == "L" * 15 + "o"
    assert store_all(books) == [15]


def test_cumulative_numbers_are_not_added_up() -> None:
    """Two rounds of 2048 tokens of a prompt of 4096. Wrong: 2048 + 4096 = 6144 tokens."""
    books = account(chunk_tokens=256, block_tokens=64)
    prompt = 4096
    for computed in (0, 2048):
        step(books, min(computed + 2048, prompt))
    assert books.valid_chunks == books.ever_valid == 4096 // 256 == 16
    assert len(books.fates) == 16
    assert [chunk for chunk, _, _ in _taken(books)] == list(range(16))


def test_the_same_step_twice_changes_nothing() -> None:
    books = account()
    step(books, 40)
    before = list(books.fates)
    step(books, 40)
    assert books.fates == before
    assert books.valid_chunks == 40 // 16


@pytest.mark.parametrize(
    ("chunk_tokens", "first_stored_block"),
    [pytest.param(64, 32, id="chunk 64"), pytest.param(256, 32, id="chunk 256")],
)
def test_overlapping_hits_count_the_longer_one(chunk_tokens: int, first_stored_block: int) -> None:
    """Local 44 blocks, external 32: valid are 44, not 32 and not 76; 32..43 are stored too."""
    local, external, width = 44, 32, chunk_tokens // 64
    books = account(chunk_tokens=chunk_tokens, block_tokens=64)
    books.known_chunks = external // width
    step(books, local * 64)
    assert books.valid_chunks == max(local, external) // width
    stored = [block for _, _, blocks in _taken(books) for block in blocks]
    assert stored == table(64)[first_stored_block:44]


def test_overlapping_hits_with_an_unaligned_local_one() -> None:
    """Block 16, chunk 256: local 704 tokens, external 512, then two steps of 256."""
    books = account(chunk_tokens=256, block_tokens=16)
    books.known_chunks = 512 // 256
    stored = []
    for question, valid in enumerate((704, 960, 1216), start=1):
        step(books, valid, blocks=80)
        stored.append(store_all(books, question))
    assert stored == [[], [2], [3]], "tokens 512 to 767, then 768 to 1023; 1024 on is partial"
    assert fates(books) == "PPSS"


def _taken(books: Account) -> list[tuple[int, Grant, tuple[int, ...]]]:
    grant_all(books)
    return books.take_granted()


# ---------------------------------------------------------------- valid


def test_a_partial_chunk_has_no_fate() -> None:
    books = account(chunk_tokens=64)
    for valid in (1, 63):
        step(books, valid)
        assert books.fates == []
        assert not books.needs_table
    step(books, 64)
    assert fates(books) == "o"


def test_what_the_server_has_is_present_at_once() -> None:
    books = account()
    books.known_chunks = 2
    step(books, 3 * 16)
    assert fates(books) == "PPo"
    assert list(books.runs_to_ask()) == [range(2, 3)]


def test_the_null_block_is_never_read() -> None:
    books = account(chunk_tokens=32)
    books.advance(96)
    books.capture([5, 6, 7, 0, 9, 10])
    assert list(books.runs_to_ask()) == [range(1), range(2, 3)]
    assert books.needs_table


def test_a_short_table_gives_no_blocks() -> None:
    books = account(chunk_tokens=32)
    books.advance(64)
    books.capture([5, 6, 7])
    assert list(books.runs_to_ask()) == [range(1)]


def test_a_rule_bounds_what_is_stored() -> None:
    books = account(rule=StoreRule(2, Reason.GENERATED_NOT_STORED))
    step(books, 4 * 16)
    assert fates(books) == "ooXX"
    assert books.reasons == {2: Reason.GENERATED_NOT_STORED, 3: Reason.GENERATED_NOT_STORED}
    assert store_all(books) == [0, 1]


# ---------------------------------------------------------------- stores


def test_an_answer_of_all_three_kinds() -> None:
    books = account()
    step(books, 5 * 16)
    (run,) = ask(books)
    grants = [Grant(7, 0), Grant(8, 4096)]
    assert books.answer(run, 1, 2, grants) == []
    assert fates(books) == "PPggo"
    assert books.grants == {2: grants[0], 3: grants[1]}
    taken = books.take_granted()
    assert taken == [(2, grants[0], (103,)), (3, grants[1], (104,))]
    assert fates(books) == "PPiio"
    assert books.take_granted() == [], "each chunk is handed out once"
    books.settle(2, 7, None)
    books.settle(3, 8, Reason.WRITER_GONE)
    assert fates(books) == "PPSXo"
    assert books.grants == {}
    assert books.balance() == {
        "present": 2,
        "stored": 1,
        "skipped:writer_gone": 1,
        "owed": 1,
    }


def test_runs_skip_what_is_settled() -> None:
    books = account()
    step(books, 16)
    store_all(books)
    step(books, 3 * 16)
    (run,) = ask(books)
    books.answer(run, 1, 0, [Grant(1, 0)])
    step(books, 5 * 16)
    assert fates(books) == "Sgooo"
    assert list(books.runs_to_ask()) == [range(2, 5)]


def test_a_late_answer_after_preemption_is_given_back() -> None:
    books = account()
    step(books, 3 * 16)
    (run,) = ask(books)
    books.lose_blocks()
    assert books.forget_blocks() == []
    assert books.answer(run, 1, 1, [Grant(1, 0), Grant(2, 4096)]) == [1, 2]
    assert fates(books) == "ooo"


def test_an_answer_belongs_to_its_question() -> None:
    """Asked, forgotten, asked again: the first answer changes nothing, the second one does."""
    books = account()
    step(books, 16)
    (run,) = ask(books, 1)
    books.lose_blocks()
    books.forget_blocks()
    step(books, 16, first=201)
    ask(books, 2)
    assert books.answer(run, 1, 0, [Grant(1, 0)]) == [1]
    assert fates(books) == "a"
    assert books.answer(run, 2, 0, [Grant(2, 4096)]) == []
    assert books.take_granted() == [(0, Grant(2, 4096), (201,))]


def test_a_late_slot_is_not_used_for_other_tokens() -> None:
    """The tokens were replaced meanwhile: the slot has the name of the old ones."""
    books = account()
    step(books, 2 * 16)
    (run,) = ask(books, 1)
    books.truncate(16)
    step(books, 2 * 16)
    assert list(books.runs_to_ask()) == [range(1, 2)]
    books.ask(range(1, 2), 2)
    assert books.answer(run, 1, 0, [Grant(1, 0), Grant(2, 4096)]) == [2]
    assert fates(books) == "ga"


def test_a_settlement_of_an_older_reservation_is_ignored() -> None:
    books = account()
    step(books, 16)
    grant_all(books, 1)
    books.take_granted()
    books.truncate(0)
    step(books, 16)
    grant_all(books, 2)
    books.settle(0, 1000, None)
    assert fates(books) == "g"
    books.settle(0, 2000, Reason.RESERVATION_EXPIRED)
    assert fates(books) == "X"


# ---------------------------------------------------------------- preemption


def test_preemption_reads_what_it_can_and_forgets_the_rest() -> None:
    books = account()
    step(books, 4 * 16)
    (run,) = ask(books, 1)
    books.answer(run, 1, 0, [Grant(1, 0)])
    books.lose_blocks()
    assert books.valid_chunks == 0
    assert not books.needs_table
    assert list(books.runs_to_ask()) == [range(1, 4)], "still readable before the step runs"
    books.ask(range(1, 4), 2)
    books.answer(range(1, 4), 2, 0, [Grant(2, 4096)])
    assert [(c, b) for c, _, b in books.take_granted()] == [(0, (101,)), (1, (102,))]
    assert books.forget_blocks() == []
    assert fates(books) == "iioo"
    assert list(books.runs_to_ask()) == [], "the blocks belong to others"
    step(books, 3 * 16, first=501)
    assert list(books.runs_to_ask()) == [range(2, 3)]
    assert books.ever_valid == 4


def test_slots_that_were_not_used_in_time_are_returned() -> None:
    books = account()
    step(books, 3 * 16)
    grant_all(books)
    books.lose_blocks()
    assert books.forget_blocks() == [1000, 1001, 1002]
    assert fates(books) == "ooo"
    assert books.grants == {}


def test_a_resumed_request_loads_what_it_had_stored() -> None:
    books = account()
    step(books, 4 * 16)
    store_all(books)
    books.lose_blocks()
    books.forget_blocks()
    books.known_chunks = 4
    books.begin_load(1, 4)
    step(books, 16, first=501)
    assert fates(books) == "Slll"
    assert books.loading
    books.end_load(arrived=True)
    step(books, 5 * 16, first=501)
    assert fates(books) == "SLLLo"
    assert [blocks for _, _, blocks in _taken(books)] == [(505,)]


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
    with pytest.raises(LedgerError, match=r"request r, chunk 0: ask cannot happen .* asked"):
        for question in (1, 2):
            books.ask(range(1), question)
    assert fates(books) == "a"
