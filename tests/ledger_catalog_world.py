"""Two engines, three requests and one catalog, without any I/O: the real ledger and the real books.

An engine here is the least that a scheduler's side and its ranks do: it looks up, admits, computes,
asks for slots, copies, commits, ends, dies. Which tokens a block of an engine holds, and which a
slot of the arena, is written down apart from both, as *bytes*: the name of the chunk whose KV it
is, or None for anything. After each event the books are compared (:meth:`Joint.check`).

Two requests, one on each engine, have the text ``a→b``; a third one shares their head, ``a→c→d``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from catalog_checked import CheckedCatalog
from catalog_spec import require
from kvledger.catalog import Catalog
from kvledger.entries import EngineBooks, Entry
from kvledger.fates import FINAL, Fate
from kvledger.ledger import Account, Grant, StoreRule
from kvledger.naming import Name, NamespaceId, name_of
from kvledger.reasons import Reason

NAMESPACE = NamespaceId("joint")
CHUNK_TOKENS = 8
TEXTS = {"p": "ab", "q": "ab", "r": "acd"}
ENGINE_OF = {"p": "X", "q": "Y", "r": "Y"}
WORLD = {"X": 1, "Y": 1}
NAMES: dict[str, Name] = {letter: name_of(letter.encode()) for letter in "abcd"}
LETTERS = {name: letter for letter, name in NAMES.items()}


@dataclass
class Live:
    """One request.

    Attributes:
        account: its fates, the real ones.
        phase: new, asked (a hit is leased), running, loading, ended, closed.
        hit: chunks that the server has promised.
        valid: chunks whose KV is valid in the request's blocks, by the test's own books.
        ever: the most that were.
        blocks: bytes of each of its blocks.
        questions: number of reserves sent.
        failed_load: it does not look up again.
    """

    account: Account
    phase: str = "new"
    hit: int = 0
    valid: int = 0
    ever: int = 0
    blocks: dict[int, str] = field(default_factory=dict)
    questions: int = 0
    failed_load: bool = False


class Joint:
    """The world; see the module. Only the requests that are named ever arrive."""

    def __init__(
        self,
        slots: int,
        requests: str = "pqr",
        account: type[Account] = Account,
        catalog: type[Catalog] = Catalog,
    ) -> None:
        books = catalog(pages=1, page_bytes=slots, max_entries=64)
        books.add_page()
        books.open_namespace(NAMESPACE, [1])
        self.checked = CheckedCatalog(books, slots=slots, audit=False)
        for engine, ranks in WORLD.items():
            self.checked.attach(engine, NAMESPACE, ranks)
        self.requests = {
            name: Live(
                account(name, chunk_tokens=CHUNK_TOKENS, blocks_per_chunk=1, rule=StoreRule()),
                phase="new" if name in requests else "closed",
            )
            for name in TEXTS
        }
        self.writing: dict[int, tuple[str, int]] = {}
        """reservation → request and chunk, for slots that the server has not settled"""
        self.in_hand: dict[int, str] = {}
        """reservation → engine, for slots that its rank was told of and has not spoken of"""
        self.arena: dict[int, str | None] = {}
        self.deaths = self.failures = self.preemptions = 0

    # ------------------------------------------------------------ requests

    def names(self, request: str) -> list[Name]:
        return [NAMES[letter] for letter in TEXTS[request]]

    def lease(self, request: str) -> int:
        return list(TEXTS).index(request)

    def look_up(self, request: str) -> None:
        """I6: asked twice, the answer is the same, and so are the books."""
        live, engine = self.requests[request], ENGINE_OF[request]
        for _ in range(2):
            self.checked.match(engine, self.lease(request), 0, self.names(request))
        tail = self.checked.catalog.engines[engine].leases.get(self.lease(request))
        live.hit = 0 if tail is None else tail.depth + 1
        live.phase = "asked"

    def admit(self, request: str) -> None:
        """All of a hit is loaded; without one the request begins to compute."""
        live = self.requests[request]
        live.account.known_chunks = live.hit
        if live.hit:
            live.account.begin_load(0, live.hit)
            live.phase = "loading"
        else:
            self.release(request)
            live.phase = "running"

    def load(self, request: str, *, arrives: bool) -> None:
        """I1: what a look-up has promised is there, under the lease, until the load is over."""
        live, engine = self.requests[request], ENGINE_OF[request]
        offsets = self.checked.catalog.locate(engine, self.lease(request), 0, live.hit)
        if arrives:
            require(offsets is not None, "a leased chunk has gone")
            assert offsets is not None
            for chunk, offset in enumerate(offsets):
                held, wanted = self.arena.get(offset), TEXTS[request][chunk]
                require(held == wanted, f"{request} loads {held} for {wanted}")
                live.blocks[chunk] = wanted
            live.valid = max(live.valid, live.hit)
            live.ever = max(live.ever, live.valid)
        else:
            live.failed_load = True
        live.account.end_load(arrived=arrives)
        self.release(request)
        live.phase = "running"
        live.account.advance(live.valid * CHUNK_TOKENS)
        self.capture(request)

    def compute(self, request: str) -> None:
        """One more chunk becomes valid."""
        live = self.requests[request]
        live.blocks[live.valid] = TEXTS[request][live.valid]
        live.valid += 1
        live.ever = max(live.ever, live.valid)
        live.account.advance(live.valid * CHUNK_TOKENS)
        self.capture(request)

    def capture(self, request: str) -> None:
        live = self.requests[request]
        if live.account.needs_table:
            live.account.capture(range(1, len(TEXTS[request]) + 1))

    def preempt(self, request: str) -> None:
        """Its blocks are another's at once; it will be looked up again."""
        live = self.requests[request]
        self.preemptions += 1
        live.account.lose_blocks()
        self.give_back(ENGINE_OF[request], live.account.forget_blocks())
        live.valid, live.blocks, live.phase = 0, {}, "new"

    def end(self, request: str) -> None:
        live = self.requests[request]
        self.release(request)
        live.account.end()
        unused = live.account.forget_blocks()
        unused += live.account.give_up(Reason.ENGINE_IDLE)
        self.give_back(ENGINE_OF[request], unused)
        live.blocks, live.phase = {}, "ended"

    def release(self, request: str) -> None:
        self.checked.release(ENGINE_OF[request], self.lease(request))
        self.requests[request].hit = 0

    # ------------------------------------------------------------ stores

    def ask(self, request: str) -> None:
        """One reserve for what is owed, answered at once."""
        live, engine = self.requests[request], ENGINE_OF[request]
        names = self.names(request)
        for run in list(live.account.runs_to_ask()):
            live.questions += 1
            live.account.ask(run, live.questions)
            parent = names[run.start - 1] if run.start else b""
            before = self.checked.present()
            result = self.checked.reserve(engine, 0, parent, names[run.start : run.stop])
            grants = [
                Grant(number, offset)
                for number, offset in zip(result.reservations, result.offsets, strict=True)
            ]
            for position, grant in enumerate(grants):
                chunk = run.start + result.present + position
                key = self.checked.key(engine, 0, names[chunk])
                require(key not in before, f"{key} is copied in a second time")  # I3
                self.writing[grant.reservation] = (request, chunk)
                self.arena[grant.offset] = None
            unused = live.account.answer(run, live.questions, result.present, grants)
            self.give_back(engine, unused)
            if result.reason is Reason.PARENT_MISSING:
                live.account.heal()
                self.capture(request)

    def copy(self, request: str) -> None:
        """The rank copies what was granted, and says so later."""
        live, engine = self.requests[request], ENGINE_OF[request]
        for chunk, grant, _ in live.account.take_granted():
            held, wanted = live.blocks.get(chunk), TEXTS[request][chunk]
            require(chunk < live.valid and held == wanted, f"{request} stores {held} as {wanted}")
            self.arena[grant.offset] = held
            self.in_hand[grant.reservation] = engine

    def settle(self, number: int, *, fails: bool) -> None:
        """The rank commits a slot, or says that it could not write it."""
        engine = self.in_hand.pop(number)
        before = self.settled(engine)
        if fails:
            self.failures += 1
            self.checked.abort(engine, 0, number)
        else:
            self.checked.commit(engine, 0, number)
        self.tell(before - self.settled(engine), Reason.WRITER_FAILED)

    def settled(self, engine: str) -> set[int]:
        return set(self.checked.catalog.engines[engine].open)

    def tell(self, numbers: set[int], failure: Reason) -> None:
        """The server's settlements reach the accounts, as its pushes do."""
        shown = {entry.offset for entry in self.entries() if entry.visible}
        for number in sorted(numbers):
            request, chunk = self.writing.pop(number)
            grant = self.requests[request].account.grants.get(chunk)
            if grant is None or grant.reservation != number:
                continue
            stored = grant.offset in shown
            account = self.requests[request].account
            if account.settle(chunk, number, None if stored else failure):
                self.checked.abort(ENGINE_OF[request], None, number)

    def give_back(self, engine: str, numbers: list[int]) -> None:
        for number in numbers:
            self.writing.pop(number, None)
            before = self.settled(engine)
            self.checked.abort(engine, None, number)
            self.tell(before - self.settled(engine) - {number}, Reason.WRITER_FAILED)

    # ------------------------------------------------------------ engines

    def die(self, engine: str) -> None:
        """All its processes are gone, and its requests with them; another one takes its place."""
        self.deaths += 1
        self.checked.forget(engine)
        self.checked.attach(engine, NAMESPACE, WORLD[engine])
        for name, live in self.requests.items():
            if ENGINE_OF[name] == engine:
                live.phase = "closed"
        self.in_hand = {n: owner for n, owner in self.in_hand.items() if owner != engine}
        self.writing = {n: w for n, w in self.writing.items() if ENGINE_OF[w[0]] != engine}

    def clear(self) -> None:
        self.checked.clear(None)

    # ------------------------------------------------------------ books

    def entries(self) -> list[Entry]:
        return list(self.checked.catalog.space.indexes[NAMESPACE][0].entries.values())

    def check(self) -> None:
        """I1 to I4, as far as the two can state them, after any event."""
        self.checked.check()
        for entry in self.entries():
            if entry.visible:  # I1: what can be found is complete, and is what its name says
                held, wanted = self.arena.get(entry.offset), LETTERS[Name(entry.name)]
                require(held == wanted, f"{wanted} can be found and holds {held}")
        slots = [entry.offset for entry in self.entries()]
        require(len(set(slots)) == len(slots), "two names share a slot")
        for engine in WORLD:
            self.check_engine(engine)
        for name, live in self.requests.items():
            if live.phase != "closed":
                self.check_account(name, live)

    def check_engine(self, engine: str) -> None:
        """What the server keeps for an engine is what its requests know of."""
        books = self.checked.catalog.engines[engine]
        mine = {n for n, owner in self.writing.items() if ENGINE_OF[owner[0]] == engine}
        require(set(books.open) <= mine, f"{engine} has forgotten {set(books.open) - mine}")
        alive = {
            self.lease(name)
            for name, live in self.requests.items()
            if ENGINE_OF[name] == engine and live.phase in ("asked", "loading")
        }
        require(set(books.leases) <= alive, f"{engine} leases for nobody")  # I4

    def check_account(self, name: str, live: Live) -> None:
        account = live.account
        require(account.ever_valid == live.ever, f"{name}: {account.ever_valid}, not {live.ever}")
        due = max(live.ever, live.hit if live.phase == "loading" else 0)
        require(len(account.fates) == due, f"{name}: {len(account.fates)} fates for {due} chunks")
        for chunk, fate in enumerate(account.fates):
            if fate in (Fate.GRANTED, Fate.IN_FLIGHT):
                number = account.grants[chunk].reservation
                require(self.writing.get(number) == (name, chunk), f"{name} writes {number}")
        if live.phase == "ended" and not account.grants:  # I2
            require(account.imbalance() is None, f"{name}: {account.imbalance()}")
            require(all(fate in FINAL for fate in account.fates), f"{name}: {account.fates}")
            require(sum(account.balance().values()) == live.ever, f"{name} has lost a chunk")

    def drain(self) -> None:
        """Destroys the world: everything ends in order, and nothing is left (I2, I4)."""
        for name, live in self.requests.items():
            if live.phase == "loading":
                self.load(name, arrives=True)
            if live.phase not in ("ended", "closed"):
                self.end(name)
        for number in sorted(self.in_hand):
            self.settle(number, fails=False)
        self.check()
        for engine, books in self.checked.catalog.engines.items():
            require(not books.open, f"{engine} still writes")
            require(not books.leases, f"{engine} still reads")
            require(not books.quarantine, f"{engine} still quarantines")
        self.checked.check_nothing_leaks()

    def key(self) -> object:
        """Equal for states that nothing that may follow can tell apart: numbers go, times become
        ranks."""
        entries = sorted(self.entries(), key=lambda entry: entry.name)
        times = sorted({entry.last_used for entry in entries})
        kept = tuple(
            (entry.name, times.index(entry.last_used), entry.visible, entry.leases,
             self.writing.get(entry.reservation.number) if entry.reservation else None,
             entry.reservation.number in self.in_hand if entry.reservation else False)
            for entry in entries
        )  # fmt: skip
        quarantine = tuple(
            sorted((engine, number in self.in_hand) for engine, books in self.engines()
                   for number in books.quarantine)
        )  # fmt: skip
        requests = tuple(
            (live.phase, live.hit, live.valid, live.ever, live.failed_load,
             tuple(live.account.fates), tuple(sorted(live.account.reasons.items())),
             live.account.known_chunks, live.account._heals, live.account.valid_chunks,
             tuple(sorted(live.account.grants)), tuple(sorted(live.account._blocks)))
            for live in self.requests.values()
        )  # fmt: skip
        return kept, quarantine, requests, self.deaths, self.failures, self.preemptions

    def engines(self) -> list[tuple[str, EngineBooks]]:
        return sorted(self.checked.catalog.engines.items())
