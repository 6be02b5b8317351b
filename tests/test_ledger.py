"""The account of one request, by example: what is valid, and how it is stored.

Every number is computed here from the tokens.
"""

from __future__ import annotations

import pytest

from kvledger.ledger import Grant, StoreRule
from kvledger.reasons import Reason
from ledger_steps import account, ask, fates, grant_all, step, store_all, table, taken

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
    assert [chunk for chunk, _, _ in taken(books)] == list(range(16))


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
    stored = [block for _, _, blocks in taken(books) for block in blocks]
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


@pytest.mark.pitfall(47)
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
    assert [blocks for _, _, blocks in taken(books)] == [(505,)]
