"""Simulated engines with our connector beside a real server, and the books of both.

A :class:`World` is one test's view: its own namespace on a server that other tests use too, and
every engine that the test makes. When the test ends, :meth:`World.check` asks what must hold after
any life of an engine (the standing checks), whatever the test itself has asked.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sim_server import Server

from kvledger.sim import Event, Kind, SimulatedEngine
from kvledger.sim.model import VOCABULARY, write_model

CONNECTOR = "kvledger.vllm:KVLedgerConnector"
DEADLINE_SECONDS = 30.0
"""Liveness bound of every poll here: what takes milliseconds gets thousands of times as long."""

NO_STORE = {"kvledger.store": False}
NO_LOAD = {"kvledger.load": False}

NUDGE = "nudge-"
"""How the ids of requests begin that only give the engine something to do."""

Runs = list[tuple[str, int]]
"""Fates along the chain of one request: (fate, number of chunks)."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; fails with ``what`` after a generous deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"still waiting after {DEADLINE_SECONDS:g} s for: {what}"
        time.sleep(0.002)


def text(seed: object, count: int) -> list[int]:
    """``count`` tokens; a longer text of the same seed begins with the shorter one."""
    rng = random.Random(f"text {seed}")
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def full_chunks(engine: SimulatedEngine, tokens: int) -> int:
    """Whole chunks in so many tokens."""
    return tokens // chunk_tokens(engine)


def chunk_tokens(engine: SimulatedEngine) -> int:
    """The unit of storage that the test has asked for."""
    chosen = engine.connector._setup.options.chunk_tokens
    return int(chosen or engine.options.block_size)


class World:
    """One test's engines on one server; see the module.

    Attributes:
        server: the server, shared with other tests.
        namespace: ``kvledger.namespace`` of this test's engines.
        engines: those that are open.
        lossy: the server was replaced or a load was made to fail, so that accounts of a boot are
            gone with it: the comparison of reports with the engine's log is left out.
    """

    def __init__(self, server: Server, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.engines: list[SimulatedEngine] = []
        self.lossy = False
        self._made = 0

    # ---- engines ----------------------------------------------------------------------------

    def engine(
        self,
        *,
        attached: bool = True,
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> SimulatedEngine:
        """An engine with our connector; ``options`` are its keys without ``kvledger.``.

        Engines of a test with equal ``weights`` have one model, and share blocks.
        """
        self._made += 1
        weights = fields.get("weights", "base")
        model = self.server.socket.parent / f"model-{weights}"
        if not model.exists():
            write_model(model, weights)
        given = {
            "socket": str(self.server.socket),
            "namespace": self.namespace,
            # The files are younger than this process, so the connector does not trust them.
            "model_revision": "1",
            # A busy machine stops any process for some ten milliseconds; a test that counts hits
            # must not depend on it. Tests of the deadlines set their own.
            "lookup_deadline_ms": 20_000.0,
            "load_deadline_ms": 60_000.0,
            **(options or {}),
        }
        engine = SimulatedEngine(
            CONNECTOR,
            extra_config={f"kvledger.{key}": value for key, value in given.items()},
            engine_id=f"{self.namespace}/{self._made}",
            model_directory=model,
            **fields,
        )
        self.engines.append(engine)
        if attached:
            self.attach(engine)
        return engine

    def attach(self, engine: SimulatedEngine) -> None:
        """Wait until the server has opened the engine's namespace and the engine has heard so.

        Requests of one token (no block) give the engine the steps in which it says who it is.
        """

        def is_attached() -> bool:
            self.nudge(engine)
            namespace = self.status_of(engine).get("namespace")
            workers = [rank.connector.worker for rank in engine.workers.ranks]
            heard = [engine.connector.scheduler.namespace, *(w._namespace for w in workers)]
            return bool(namespace) and all(name == namespace for name in heard)

        wait_until(is_attached, "the engine attaches to the server")

    def nudge(self, engine: SimulatedEngine) -> None:
        """Give the engine a few steps in which it can hear what the server has said."""
        engine.add([0], request_id=f"{NUDGE}{engine.step_count}", transfer_params=NO_STORE)
        engine.run()

    def status_of(self, engine: SimulatedEngine) -> dict[str, Any]:
        """The server's entry for an engine; empty if it does not know it."""
        engine_id = self.id_of(engine)
        found = [e for e in self.server.status()["engines"] if e["engine"] == engine_id]
        return found[0] if found else {}

    @staticmethod
    def id_of(engine: SimulatedEngine) -> str:
        """The engine id that joins its processes."""
        return str(engine.connector._vllm_config.kv_transfer_config.engine_id)

    def close(self, engine: SimulatedEngine) -> None:
        """Check an engine and end it."""
        self.check_engine(engine)
        self.engines.remove(engine)
        engine.close()

    # ---- books ------------------------------------------------------------------------------

    def settle(self, engine: SimulatedEngine) -> None:
        """Run until idle and until every account is closed."""
        engine.run()
        scheduler = engine.connector.scheduler

        def is_settled() -> bool:
            if scheduler.accounts.closing:
                self.nudge(engine)
            return not scheduler.accounts.closing

        wait_until(is_settled, "every account is closed")

    def accounts(self, engine: SimulatedEngine) -> dict[str, dict[str, Any]]:
        """The server's copy of the closed accounts of an engine, by request.

        Waits until every request that has ended by itself is among them; the server keeps some
        thousand, so of very many the newest must do.
        """
        self.settle(engine)
        engine_id = self.id_of(engine)
        ended = [e.request_id for e in engine.events if e.kind is Kind.FINISHED]
        awaited = {name for name in ended[-256:] if not name.startswith(NUDGE)}
        found: dict[str, dict[str, Any]] = {}

        def are_reported() -> bool:
            documents = self.server.explain()
            found.update({d["request"]: d for d in documents if d["engine"] == engine_id})
            return self.lossy or awaited <= found.keys()

        try:
            wait_until(are_reported, "the reports arrive")
        except AssertionError as error:
            channel = engine.connector.scheduler.channel
            raise AssertionError(
                f"{error}: {sorted(awaited - found.keys())} of {engine_id} are missing; "
                f"connected: {channel.connected}, silent: {channel.silent}"
            ) from None
        return found

    def runs(self, engine: SimulatedEngine, request_id: str) -> Runs:
        """Fates along the chain of one request, as the server was told."""
        account = self.accounts(engine)[request_id]
        assert not account["imbalance"], account
        return [(fate, count) for fate, count in account["fates"]]

    def fates(self, engine: SimulatedEngine, request_id: str) -> Counter[str]:
        """Number of chunks of each fate of one request."""
        counts: Counter[str] = Counter()
        for fate, count in self.runs(engine, request_id):
            counts[fate] += count
        return counts

    def stored_chunks(
        self, engine: SimulatedEngine, tokens: Sequence[int], *, settled: bool = True
    ) -> int:
        """Leading chunks of a text that the server can give back, byte for byte.

        A fresh engine of the same kind loads them, stores nothing, and its oracle compares.
        ``settled`` False: whatever the other engines have under way.
        """
        if settled:
            for other in self.engines:
                self.settle(other)
        kept = ("block_size", "layers", "heads", "ranks", "layout", "weights", "windows")
        same = {name: getattr(engine.options, name) for name in kept}
        given = {"chunk_tokens": chunk_tokens(engine), "store": "none"}
        blocks = len(tokens) // engine.options.block_size + 8
        reader = self.engine(options=given, num_blocks=blocks, max_model_len=8192, **same)
        request = reader.add(tokens)
        reader.run()
        hit = reader.external_hit(request)
        miss = self.accounts(reader)[request]["miss"]
        plausible = {"", "never_seen", "evicted"} | (set() if settled else {"being_written"})
        assert miss in plausible, f"the reader was told {miss}"
        self.close(reader)
        return hit // chunk_tokens(engine)

    # ---- standing checks --------------------------------------------------------------------

    def check(self) -> None:
        """All standing checks, for each engine and for the server."""
        for engine in list(self.engines):
            self.check_engine(engine)
        if self.server.is_up:
            self.check_nothing_held()

    def check_engine(self, engine: SimulatedEngine) -> None:
        """After any life: idle, no hook failed, books balanced, bytes right, nothing leaked."""
        self.settle(engine)
        connector = engine.connector
        failures = [connector.guard.failures]
        failures += [rank.connector.guard.failures for rank in engine.workers.ranks]
        assert not any(failures), f"hooks have failed: {failures}"
        scheduler = connector.scheduler
        assert scheduler.accounts.unbalanced == 0
        assert not scheduler.live, f"alive: {list(scheduler.live)} (end every session)"
        assert not scheduler.loads.active
        assert scheduler.stores.open_reservations == 0
        assert scheduler.lookups.leases == 0
        engine.check()
        check_protocol(engine)
        if self.server.is_up:
            self.check_accounts(engine)

    def check_accounts(self, engine: SimulatedEngine) -> None:
        """I2 from the engine's log alone: every full block with KV has exactly one fate.

        A request that has ended by itself has KV for all its tokens but the last one sampled.
        """
        accounts = self.accounts(engine)
        ended = {e.request_id for e in engine.events if e.kind is Kind.FINISHED}
        for request_id in ended & accounts.keys() & engine.clients.request_ids:
            account = accounts[request_id]
            if not engine.outputs[request_id]:
                continue  # it ended with an error
            length = engine.clients.length(request_id)
            found = sum(count for _, count in account["fates"])
            assert found == full_chunks(engine, length - 1), (request_id, account)
            assert account["tokens"] == length, (request_id, account)
        for account in accounts.values():
            assert not account["imbalance"], account

    def check_nothing_held(self) -> None:
        """I4: no lease, no reservation, no quarantined slot once no request is alive."""

        def nothing_held() -> bool:
            totals = self.server.totals()
            return not (totals["leases"] or totals["reservations"] or totals["quarantined"])

        try:
            wait_until(nothing_held, "the server holds nothing for idle engines")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.server.totals()}") from None


class LoadAnswers:
    """I5 and I6 from an engine's log: one answer for each asynchronous load that the engine still
    waited for, none unasked, none for anything else; nothing is ever sent."""

    def __init__(self) -> None:
        self._pending: set[str] = set()

    def follow(self, event: Event) -> None:
        """The next event of the log."""
        name = event.request_id
        assert event.kind is not Kind.SEND_FINISHED, f"I5: something was sent: {event}"
        if event.kind is Kind.ALLOCATED and event.tokens:
            assert name not in self._pending, f"I5: a second load at once: {event}"
            self._pending.add(name)
        elif event.kind in (Kind.LOAD_FINISHED, Kind.LOAD_FAILED):
            assert name in self._pending, f"I5: an answer that nobody asked for: {event}"
            self._pending.remove(name)

    def check_none_left(self) -> None:
        """At the end of a life."""
        assert not self._pending, f"loads that nobody has answered: {self._pending}"


def check_protocol(engine: SimulatedEngine) -> None:
    """:class:`LoadAnswers` over the whole log."""
    answers = LoadAnswers()
    for event in engine.events:
        answers.follow(event)
    answers.check_none_left()


def warm(world: World, prompt: Sequence[int], **fields: Any) -> SimulatedEngine:
    """An engine whose server holds the prompt, and whose own cache is empty."""
    engine = world.engine(**{"num_blocks": 128, **fields})
    engine.add(prompt)
    engine.run()
    engine.reset_prefix_cache()
    return engine


def await_lookup(engine: SimulatedEngine, request_id: str) -> None:
    """Wait until the server has answered the look-up of a request."""
    scheduler = engine.connector.scheduler

    def is_answered() -> bool:
        scheduler.channel.poll()
        return bool(scheduler.live[request_id].lookup.answered)

    wait_until(is_answered, "the look-up is answered")


def lookups(engine: SimulatedEngine, request_id: str) -> list[int | None]:
    """What the connector has answered to vLLM's look-ups of a request."""
    return [
        event.tokens
        for event in engine.events
        if event.kind is Kind.LOOKED_UP and event.request_id == request_id
    ]


def count_events(engine: SimulatedEngine, kind: Kind, request_id: str | None = None) -> int:
    """How often something has happened."""
    return sum(
        event.kind is kind and request_id in (None, event.request_id) for event in engine.events
    )


def loaded_bytes(engine: SimulatedEngine) -> int:
    """Bytes that the first rank has copied in."""
    return int(engine.workers.ranks[0].connector.worker.loaded_bytes)


def part_bytes(engine: SimulatedEngine) -> int:
    """Bytes of one rank's part of one chunk, from the shape of the tensors: each token has
    ``layers`` × ``heads`` lanes of eight bytes."""
    return chunk_tokens(engine) * engine.options.layers * engine.options.heads * 8


def cold_output(tokens: Sequence[int], *, max_tokens: int = 1, **fields: Any) -> list[int]:
    """What an engine without any connector generates."""
    with SimulatedEngine(None, **{"num_blocks": 1024, **fields}) as engine:
        request = engine.add(tokens, max_tokens=max_tokens)
        engine.run()
        return engine.outputs[request]
