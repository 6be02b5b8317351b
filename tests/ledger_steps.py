"""Steps of one account, as the scheduler side and the server take them."""

from __future__ import annotations

from kvledger.fates import Fate
from kvledger.ledger import Account, Grant, StoreRule

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


def taken(books: Account) -> list[tuple[int, Grant, tuple[int, ...]]]:
    grant_all(books)
    return books.take_granted()
