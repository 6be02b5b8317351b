"""What happens around an engine: servers that go, connections that break, copies that fail."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from typing import Any

from sim_server import Server

from kvledger.sim import SimulatedEngine
from kvledger.vllm.transfer import TransferError

ONE_CHUNK = 1
"""A budget that lets a rank copy a single chunk of a load in each step."""
REATTACH_SECONDS = 0.02
"""So much later than another one a rank may attach to a new server."""


class Weather:
    """Disturbs the surroundings of some engines on one server.

    Attributes:
        statistics: what was done.
    """

    def __init__(
        self,
        server: Server,
        engines: list[SimulatedEngine],
        rng: random.Random,
        *,
        failing: int,
        late_attachment: bool,
    ) -> None:
        self.statistics: Counter[str] = Counter()
        self._server = server
        self._engines = engines
        self._rng = rng
        self._failing = failing
        self._late_attachment = late_attachment
        self._shuffles = False
        self._fail_next = 0
        self._workers = [rank.connector.worker for e in engines for rank in e.workers.ranks]
        self._budget = self._workers[0]._load_budget_bytes
        for worker in self._workers:
            self._let_copies_fail(worker)
            self._let_loads_change_places(worker)

    def change(self, what: str, number: int) -> None:
        """Do one thing; see ``plans``."""
        self.statistics[f"outside: {what}"] += 1
        getattr(self, f"_{what}")(number)

    def calm(self) -> None:
        """No load is held up any more, and the server is there."""
        self.let_loads_through()
        self._server.resume()
        if not self._server.is_up:
            self._server.start()

    # ---- the server -----------------------------------------------------------------------

    def _pause(self, _: int) -> None:
        self._server.pause()

    def _resume(self, _: int) -> None:
        self._server.resume()

    def _kill(self, _: int) -> None:
        self._server.kill()

    def _replace(self, _: int) -> None:
        self._server.replace()

    def _start(self, _: int) -> None:
        if not self._server.is_running:
            self._server.start()

    def _clear(self, _: int) -> None:
        if self._server.is_up:
            self._server.clear()

    def _detach(self, number: int) -> None:
        """The connection of one process breaks; the server then ends those of its engine."""
        engine = self._engines[number % len(self._engines)]
        channels = [engine.connector.scheduler.channel]
        channels += [rank.connector.worker._channel for rank in engine.workers.ranks]
        connection = channels[number // 7 % len(channels)].connection
        if connection is None:
            return
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as stream:
                stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.statistics["outside: detach came too late"] += 1  # it has broken by itself

    # ---- loads ------------------------------------------------------------------------------

    def _slow(self, _: int) -> None:
        for worker in self._workers:
            worker._load_budget_bytes = ONE_CHUNK

    def _uneven(self, number: int) -> None:
        for index, worker in enumerate(self._workers):
            worker._load_budget_bytes = self._budget if (number >> index) & 1 else ONE_CHUNK

    def _stall(self, number: int) -> None:
        """Loads of some ranks never end; only the deadline ends them."""
        for index, worker in enumerate(self._workers):
            worker._load_budget_bytes = 0 if (number >> index) & 1 else self._budget

    def _shuffle(self, _: int) -> None:
        self._shuffles = True
        self._slow(0)

    def _short(self, _: int) -> None:
        """The next load loses its second chunk."""
        self._slow(0)
        self._fail_next = 2

    def _calm(self, _: int) -> None:
        self.let_loads_through()

    def let_loads_through(self) -> None:
        """Loads are as fast as they can be."""
        self._shuffles = False
        self._fail_next = 0
        for worker in self._workers:
            worker._load_budget_bytes = self._budget

    def _let_loads_change_places(self, worker: Any) -> None:
        start_loads = worker.start_loads

        def start(plan: Any) -> None:
            if self._shuffles:
                loads = list(worker._loads.items())
                self._rng.shuffle(loads)
                worker._loads = dict(loads)
            start_loads(plan)

        worker.start_loads = start

    # ---- copies -----------------------------------------------------------------------------

    def _let_copies_fail(self, worker: Any) -> None:
        make_transfer = worker._make_transfer

        def make(connection: Any) -> Any:
            if self._late_attachment:
                time.sleep(self._rng.random() * REATTACH_SECONDS)
            return self._failing_transfer(make_transfer(connection))

        worker._make_transfer = make
        if worker._attachment is not None:
            self._failing_transfer(worker._attachment.transfer)

    def _failing_transfer(self, transfer: Any) -> Any:
        for name in ("load", "store"):
            copy = getattr(transfer, name)

            def fail_at_random(*arguments: Any, copy: Any = copy, name: str = name) -> int:
                is_short = name == "load" and self._fail_next > 0
                if is_short:
                    self._fail_next -= 1
                if (is_short and not self._fail_next) or self._rng.randrange(1000) < self._failing:
                    self.statistics[f"failed copies: {name}"] += 1
                    raise TransferError("a copy that the schedule lets fail")
                return int(copy(*arguments))

            setattr(transfer, name, fail_at_random)
        return transfer
