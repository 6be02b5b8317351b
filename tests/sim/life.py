"""One random life: engines of one plan on a real server, their surroundings, and all checks."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from books import World, chunk_tokens
from bounds import IMPATIENT, PATIENT, bounded
from committed import Committed
from plans import PLANS, Plan
from sim_server import Server
from standing import Standing
from vllm.v1.request import RequestStatus
from weather import Weather

from kvledger.fates import Fate
from kvledger.reasons import Reason
from kvledger.sim import SimulatedEngine
from kvledger.sim.play import EVENTS_SHOWN, Player
from kvledger.sim.schedule import Action, Do

LIVES = itertools.count(1)
ROUND = 300
"""Actions between two checks of the books: the server keeps the newest thousand accounts."""

DISTURBED_OPTIONS = {"lookup_deadline_ms": 50.0, "load_deadline_ms": 500.0}


def bounds_of(plan: Plan) -> dict[str, float]:
    """The connector's bounds for this plan."""
    bounds = IMPATIENT if plan.is_disturbed else PATIENT
    return {**bounds, "scheduler_side.ANSWER_WAIT_SECONDS": 0.0} if plan.late else bounds


class Servers:
    """A server of each size, started when it is needed, used by one life after the other.

    A context manager; at its end the servers end, and their folder goes.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lives-")
        self._servers: dict[str, Server] = {}

    def ready(self, memory: str) -> Server:
        """A running, empty one."""
        if memory not in self._servers:
            place = Path(self._directory.name) / memory
            place.mkdir()
            self._servers[memory] = Server(place, memory)
        server = self._servers[memory]
        server.resume()
        if server.is_up:
            server.clear()
        else:
            server.start()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()
        self._directory.cleanup()


class Life:
    """A stage for :func:`kvledger.sim.play.play`.

    Attributes:
        statistics: what was done and met; complete after :meth:`finish`.
    """

    def __init__(self, servers: Servers, name: str, seed: int) -> None:
        self.plan = plan = PLANS[name]
        self.statistics: Counter[str] = Counter()
        self._open = ExitStack()
        self._open.enter_context(bounded(bounds_of(plan)))
        self._server = servers.ready("16MiB" if plan.small else "64MiB")
        self._evicted_before = self._server.totals()["evicted"]
        # Another name each time: the server keeps accounts of lives before.
        self.world = World(self._server, f"{name} {seed} {next(LIVES)}")
        self.world.lossy = plan.is_disturbed
        options = dict(plan.options)
        if plan.is_disturbed or "stall" in plan.outside:
            options |= DISTURBED_OPTIONS
        self.engines = [
            self.world.engine(options=options, seed=seed + number, **plan.engine)
            for number in range(plan.engines)
        ]
        self.players = [Player(engine, seed, plan.mix) for engine in self.engines]
        self._standing = [Standing(engine, chunk_tokens(engine)) for engine in self.engines]
        self._committed = [Committed(engine, chunk_tokens(engine)) for engine in self.engines]
        self._weather = Weather(
            self._server,
            self.engines,
            random.Random(f"weather {seed}"),
            failing=plan.failing,
            late_attachment=plan.is_disturbed,
        )
        self._applied = 0
        self._is_over = False
        for engine, standing in zip(self.engines, self._standing, strict=True):
            self._watch_ends(engine, standing)

    def apply(self, action: Action) -> None:
        """See :class:`kvledger.sim.play.Stage`."""
        self._applied += 1
        self.statistics[f"actions: {action.do}"] += 1
        number = action.engine % len(self.engines)
        player, standing = self.players[number], self._standing[number]
        if action.do is Do.OUTSIDE:
            kinds = self.plan.outside
            self._weather.change(kinds[action.numbers[0] % len(kinds)], action.numbers[0])
        elif action.do is not Do.CHECK:
            if action.do is Do.DRAIN:
                self._weather.calm()
            player.apply(action)
        if action.do is Do.RESET and action.numbers[0] & 1:
            standing.after_connector_reset()
        standing.look()
        assert not self._committed[number].violations, self._committed[number].violations
        if action.do is Do.CHECK or self._applied % ROUND == 0:
            self._check()

    def log(self) -> str:
        """See :class:`kvledger.sim.play.Stage`."""
        lines = []
        for number, engine in enumerate(self.engines):
            lines += [f"{number}/ {event}" for event in list(engine.events)[-EVENTS_SHOWN:]]
        return "\n".join(lines)

    def finish(self) -> None:
        """Everything comes back, every account closes, nothing is held; see ``Stage``."""
        self._weather.calm()
        for player in self.players:
            player.end_sessions()
        for engine in self.engines:
            self.world.attach(engine)
        self.world.check()
        self._count()
        self._is_over = True

    def close(self) -> None:
        """See :class:`kvledger.sim.play.Stage`."""
        try:
            self._server.resume()
            for engine in self.engines:
                engine.close()
        finally:
            if not self._is_over:  # what a failure has left behind is not the next one's trouble
                self._server.kill()
            self._open.close()

    def _check(self) -> None:
        """The standing checks, if the server can be asked; then old requests are forgotten."""
        for engine, player in zip(self.engines, self.players, strict=True):
            if engine.waits_for_workers:
                continue
            if self.plan.is_disturbed:
                engine.check()
            else:
                self._weather.let_loads_through()
                player.end_sessions()
                self.world.check_engine(engine)
            engine.forget_finished()

    def _count(self) -> None:
        self.statistics["full blocks"] = sum(s.full_chunks for s in self._standing)
        for engine, player in zip(self.engines, self.players, strict=True):
            accounts = engine.connector.scheduler.accounts
            self.statistics.update(engine.counts)
            self.statistics.update(player.statistics)
            self.statistics.update({f"fate {k}": n for k, n in accounts.totals.items()})
            self.statistics["accounts"] += accounts.closed
            self.statistics["failed loads"] += accounts.failed_loads
        for committed in self._committed:
            self.statistics.update(committed.statistics)
        self.statistics.update(self._weather.statistics)
        evicted = self._server.totals()["evicted"]
        self.statistics["evicted"] += evicted - (
            0 if self.plan.is_disturbed else self._evicted_before
        )

    # ---- what is owed when a request ends ---------------------------------------------------

    def _watch_ends(self, engine: SimulatedEngine, standing: Standing) -> None:
        """Count the full blocks that a request still owes at its end, and what becomes of them."""
        accounts = engine.connector.scheduler.accounts
        begin, close = accounts.begin_closing, accounts._close
        owed: dict[int, list[int]] = {}

        def begin_closing(tracked: Any) -> None:
            chunks = [
                chunk for chunk, fate in enumerate(tracked.account.fates) if fate is Fate.OWED
            ]
            request = tracked.request
            aborted = request.status == RequestStatus.FINISHED_ABORTED
            standing.ended(request, is_aborted=aborted, is_loading=tracked.load is not None)
            self.statistics["ends"] += 1
            if chunks:
                # Another request was writing the same chunk when this one asked for a slot.
                behind = tracked.refusal is Reason.BEING_WRITTEN
                word = "aborted" if aborted else "behind another" if behind else "by themselves"
                self.statistics[f"ends that owe, {word}"] += 1
                owed[id(tracked)] = chunks
            begin(tracked)

        def closing(tracked: Any) -> None:
            account = tracked.account
            for chunk in owed.pop(id(tracked), ()):
                reason = account.reasons.get(chunk)
                word = f"{account.fates[chunk]}{':' + reason if reason else ''}"
                self.statistics[f"owed at the end: {word}"] += 1
            standing.closed(account)
            close(tracked)

        accounts.begin_closing, accounts._close = begin_closing, closing
