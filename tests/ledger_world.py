"""A scheduler and a server around one account, as small as can be, with books of their own.

The exhaustive test walks through everything these two can do to an :class:`Account`. Nothing here
is derived from the account: which chunks are valid, what each chunk's name is, in which blocks its
bytes lie and who holds a reservation is written down independently, and compared after each event.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from kvledger.fates import FINAL, Fate
from kvledger.ledger import Account, Grant, StoreRule
from kvledger.reasons import Reason

WIDTH = 2  # engine blocks of one chunk
TOKENS = 8  # of one chunk

COPIED = ("fates", "reasons", "grants", "dropped", "_blocks", "_asked")
"""What is mutable in an account."""

Name = tuple[int, int]
"""A chunk's index, and how often its tokens were replaced by others."""


WANTING = frozenset({Fate.OWED, Fate.ASKED, Fate.GRANTED})


class Question(NamedTuple):
    number: int
    chains: tuple[tuple[range, tuple[Name, ...]], ...]


class Reservation(NamedTuple):
    name: Name
    place: str  # account, workers, unused, settled, void


class Limits(NamedTuple):
    """How often the rare events may happen along one path."""

    chunks: int
    preempts: int = 1
    losses: int = 1
    freezes: int = 1
    truncates: int = 1
    heals: int = 1
    loads: int = 2
    questions: int = 2


@dataclass
class World:
    """The account, and the truth about it.

    Attributes:
        phase: waiting (no blocks), live, loading, window (blocks lost, still readable this step),
            closing (over, while a load is under way), ended.
        after_window: phase and block table that follow the window.
        table: number of the block table the request holds.
        readable: the table whose bytes can be read, and how many chunks of it are valid.
    """

    account: Account
    limits: Limits
    phase: str = "waiting"
    after_window: tuple[str, int] = ("waiting", 0)
    table: int = 0
    readable: tuple[int, int] = (0, 0)
    versions: list[int] = field(default_factory=list)
    ever_valid: int = 0
    dropped: int = 0
    local: int = 0
    load: tuple[int, int] | None = None
    frozen: bool = False
    spent: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    questions: list[Question] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)

    def clone(self) -> World:
        account = object.__new__(type(self.account))
        attributes = account.__dict__
        attributes.update(self.account.__dict__)
        for name in COPIED:
            attributes[name] = attributes[name].copy()
        other = copy(self)
        other.account = account
        other.versions = self.versions.copy()
        other.spent = self.spent.copy()
        other.questions = self.questions.copy()
        other.reservations = self.reservations.copy()
        return other

    def key(self) -> object:
        """Equal for states that cannot be told apart from now on: numbers are counted anew."""
        account = self.account
        order = {number: index for index, number in enumerate(sorted(account._asked.values()))}
        order |= {q.number: index for index, q in enumerate(self.questions)}
        held = [(r.name, r.place) for r in self.reservations if r.place in ("account", "workers")]
        return (
            tuple(account.fates),
            tuple(sorted(account.reasons.items())),
            (account.valid_chunks, account.ever_valid, account.known_chunks, account._heals),
            tuple(sorted(account._blocks.items())),
            tuple(sorted((c, order[n]) for c, n in account._asked.items())),
            tuple(sorted((c, g.offset) for c, g in account.grants.items())),
            (account.ended, account.frozen, account._settled, account.rule.chunks),
            (self.phase, self.after_window, self.table, self.readable, self.local, self.load),
            tuple(self.versions),
            tuple(sorted(self.spent.items())),
            tuple(q.chains for q in self.questions),
            tuple(sorted(held)),
        )

    # ------------------------------------------------------------ books

    def name(self, chunk: int) -> Name:
        return (chunk, self.versions[chunk])

    def names(self, chunks: range) -> tuple[Name, ...]:
        return tuple(self.name(chunk) for chunk in chunks)

    def move(self, number: int, frm: tuple[str, ...], to: str) -> None:
        """A reservation changes hands; it must have been where its books say."""
        reservation = self.reservations[number]
        assert reservation.place in frm, f"reservation {number} is {reservation.place}, not {frm}"
        self.reservations[number] = reservation._replace(place=to)

    def unused(self, numbers: list[int]) -> None:
        assert len(set(numbers)) == len(numbers), "a reservation was returned twice"
        for number in numbers:
            self.move(number, ("account",), "unused")

    def blocks_of(self, table: int, chunk: int) -> tuple[int, ...]:
        """No two tables and no two chunks share a block."""
        first = 1 + 100 * table + WIDTH * chunk
        return tuple(range(first, first + WIDTH))

    def block_table(self) -> list[int]:
        chunks = range(self.limits.chunks)
        return [block for chunk in chunks for block in self.blocks_of(self.table, chunk)]

    def may_store(self, chunk: int) -> bool:
        rule = self.account.rule.chunks
        return not self.frozen and (rule is None or chunk < rule)

    def spend(self, what: str) -> None:
        self.spent[what] = self.spent.get(what, 0) + 1

    def can_spend(self, what: str) -> bool:
        return self.spent.get(what, 0) < int(getattr(self.limits, what))

    # ------------------------------------------------------------ events

    def valid_until(self, chunk: int) -> None:
        """What the scheduler side does with the engine's numbers, at every step."""
        self.account.advance(chunk * TOKENS + TOKENS // 2)  # a partial chunk is not a chunk
        self.ever_valid = max(self.ever_valid, chunk)
        self.readable = (self.table, chunk)
        if self.account.needs_table:
            self.account.capture(self.block_table())

    def admit(self, local: int, hit: int, load: bool) -> None:
        """From the waiting queue, with blocks of a new table."""
        self.begin_admission(local, hit, load)
        self.phase = "loading" if load else "live"
        self.valid_until(local)

    def begin_admission(self, local: int, hit: int, load: bool) -> None:
        if not self.frozen:
            self.account.known_chunks = hit
        self.local = local
        if load:
            self.spend("loads")
            self.load = (local, hit)
            self.account.begin_load(local, hit)
            self.ever_valid = max(self.ever_valid, local)

    def ask(self) -> None:
        runs = list(self.account.runs_to_ask())
        self.asked += 1
        for run in runs:
            for chunk in run:
                assert self.may_store(chunk), "asked for a slot of what must not be stored"
            self.account.ask(run, self.asked)
        chains = tuple((run, self.names(run)) for run in runs)
        self.questions.append(Question(self.asked, chains))

    def answer(self, splits: tuple[tuple[int, int], ...]) -> None:
        question = self.questions.pop(0)
        for (chunks, names), (present, granted) in zip(question.chains, splits, strict=True):
            grants = []
            for name in names[present : present + granted]:
                grants.append(Grant(len(self.reservations), 4096 * name[0] + name[1]))
                self.reservations.append(Reservation(name, "account"))
            self.unused(self.account.answer(chunks, question.number, present, grants))

    def take(self) -> None:
        table, valid = self.readable
        for chunk, grant, blocks in self.account.take_granted():
            self.move(grant.reservation, ("account",), "workers")
            assert self.may_store(chunk), "stored what must not be stored"
            name = self.reservations[grant.reservation].name
            assert name == self.name(chunk), f"{self.name(chunk)} is written under the name {name}"
            assert chunk < valid, f"chunk {chunk} is not valid"
            assert blocks == self.blocks_of(table, chunk), "the blocks hold other bytes"

    def settle(self, number: int, failure: Reason | None) -> None:
        chunk = self.reservations[number].name[0]
        self.move(number, ("account", "workers"), "settled")
        self.account.settle(chunk, number, failure)

    def end_load(self, arrived: bool) -> None:
        assert self.load is not None
        self.account.end_load(arrived=arrived)
        if not arrived:
            left = self.account.fates[slice(*self.load)]
            assert all(f in (Fate.OWED, Fate.SKIPPED) for f in left), "a failed load is believed"
            assert Fate.PRESENT not in self.account.fates, "what the server said is believed"
        valid = self.load[1] if arrived else self.local
        self.load = None
        self.ever_valid = max(self.ever_valid, valid)
        self.readable = (self.table, valid)
        if self.phase == "closing":
            self.account.end()
            self.phase = "ended"
        else:
            self.phase = "live"

    def preempt(self) -> None:
        """The next step's plan begins, and the blocks belong to others after it."""
        self.spend("preempts")
        self.account.lose_blocks()
        self.phase, self.after_window = "window", ("waiting", self.table + 1)

    def preempt_and_admit(self, local: int, hit: int, load: bool) -> None:
        """Resumed in the very step in which it was preempted: admitted before the plan is made."""
        self.spend("preempts")
        self.begin_admission(local, hit, load)
        self.account.lose_blocks()
        self.phase = "window"
        self.after_window = ("loading" if load else "live", self.table + 1)

    def leave_window(self) -> None:
        self.unused(self.account.forget_blocks())
        self.phase, self.table = self.after_window
        self.readable = (self.table, 0)
        self.after_window = ("waiting", 0)
        if self.phase != "waiting":
            self.valid_until(self.local)

    def lose_server(self) -> None:
        self.spend("losses")
        self.questions.clear()
        for number, reservation in enumerate(self.reservations):
            if reservation.place in ("account", "workers"):
                self.reservations[number] = reservation._replace(place="void")
        self.account.lose_server()
        if self.account.ended:
            self.unused(self.account.give_up(Reason.SERVER_ABSENT))

    def freeze(self) -> None:
        self.spend("freezes")
        self.frozen = True
        self.unused(self.account.freeze(Reason.EPOCH_CHANGED))

    def truncate(self, keep: int) -> None:
        """Tokens are cut back into chunk ``keep`` and others come in their place."""
        self.spend("truncates")
        self.dropped += max(0, len(self.account.fates) - keep)
        self.unused(self.account.truncate(keep * TOKENS + 1))
        self.ever_valid = min(self.ever_valid, keep)
        self.readable = (self.table, min(self.readable[1], keep))
        for chunk in range(keep, len(self.versions)):
            self.versions[chunk] += 1

    def heal(self) -> None:
        self.spend("heals")
        self.account.heal()

    def finish(self) -> None:
        if self.load is not None:
            self.phase = "closing"
        else:
            self.account.end()
            self.phase = "ended"

    def give_up(self) -> None:
        """The step after the end has been planned."""
        self.unused(self.account.forget_blocks())
        self.unused(self.account.give_up(Reason.RESERVE_DEADLINE))

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """What must hold after every event."""
        account = self.account
        fates, grants = account.fates, account.grants
        held = {n for n, r in enumerate(self.reservations) if r.place == "account"}
        granted: set[int] = set()
        skipped = open_chunks = 0
        loading: list[int] = []
        for chunk, fate in enumerate(fates):
            if fate in WANTING:
                assert self.may_store(chunk), f"chunk {chunk} must not be stored"
            if fate is Fate.GRANTED:
                granted.add(grants[chunk].reservation)
            elif fate is Fate.IN_FLIGHT:
                place = self.reservations[grants[chunk].reservation].place
                assert place == "workers", f"the slot of chunk {chunk} is {place}"
            else:
                assert chunk not in grants, f"chunk {chunk} is {fate} and holds a slot"
            if fate is Fate.LOADING:
                loading.append(chunk)
            if fate not in FINAL:
                open_chunks += 1
                assert chunk >= account._settled, "an open chunk is hidden"
            assert (fate is Fate.SKIPPED) == (chunk in account.reasons), f"reason of chunk {chunk}"
            skipped += fate is Fate.SKIPPED
        assert granted == held, f"the account holds {granted}, the books say {held}"
        assert skipped == len(account.reasons), "a reason without its chunk"
        assert all(chunk < len(fates) for chunk in grants), "a slot without its chunk"
        assert account.open_chunks == open_chunks, "open chunks are miscounted"
        assert loading == list(range(*(self.load or (0, 0)))), "other chunks are being loaded"
        longest = max(self.ever_valid, self.load[1] if self.load else 0)
        assert len(fates) == longest, f"{longest} chunks have existed, {len(fates)} have a fate"
        assert account.ever_valid == self.ever_valid

    def drain(self, arrived: bool) -> None:
        """From any state to the end of the request; then the books must balance."""
        if self.phase == "window":
            self.leave_window()
        if self.phase != "ended":
            if self.phase != "closing":
                self.finish()
            if self.load is not None:
                self.end_load(arrived)
        self.give_up()
        for number, reservation in enumerate(self.reservations):
            if reservation.place == "workers":
                self.settle(number, None)
        while self.questions:  # answers that come when nobody wants them any more
            chains = self.questions[0].chains
            self.answer(tuple((0, len(chunks)) for chunks, _ in chains))
        self.check()
        account = self.account
        assert account.imbalance() is None, account.imbalance()
        assert len(account.fates) == self.ever_valid
        assert all(fate in FINAL for fate in account.fates)
        assert sum(account.balance().values()) == self.ever_valid + self.dropped
        places = {reservation.place for reservation in self.reservations}
        assert places <= {"unused", "settled", "void"}, "a reservation has leaked"


def start(limits: Limits, rule: StoreRule, kind: type[Account] = Account) -> World:
    account = kind("r", chunk_tokens=TOKENS, blocks_per_chunk=WIDTH, rule=rule)
    return World(account, limits, versions=[0] * limits.chunks)
