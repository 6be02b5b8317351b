"""Raw conversations with a real server: in this process, or in one that a test may kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

from kvledger.client import Client, Connection
from kvledger.naming import NAME_BYTES
from kvledger.protocol import (
    PROTOCOL_VERSION,
    PUSH_ID,
    Chain,
    Commit,
    Describe,
    Done,
    Hello,
    Opened,
    Reply,
    Reserve,
    Reserved,
    Role,
    Settled,
    pack_u64,
    unpack_u64,
)
from servers import RunningServer, wait_until

ANSWER_SECONDS = 10.0


def hello(engine: str, role: Role, rank: int = 0, world_size: int = 1, **changes: object) -> Hello:
    fields = {
        "id": 1,
        "protocol": PROTOCOL_VERSION,
        "engine": engine,
        "role": role,
        "rank": rank,
        "world_size": world_size,
        "label": f"test {role} {rank}",
    }
    return Hello(**{**fields, **changes})


def names(prefix: str, count: int, first: int = 0) -> bytes:
    """``count`` packed names, all different for different prefixes and positions."""
    return b"".join(
        f"{prefix}-{position}".encode().ljust(NAME_BYTES, b".")
        for position in range(first, first + count)
    )


class Talker:
    """One connection, and the patience to wait for answers."""

    def __init__(self, socket_path: str, greeting: Hello) -> None:
        self.connection = Connection.open(socket_path, greeting)
        self.pushes: list[Reply] = []

    def ask(self, message_type: type, **fields: object) -> Reply:
        """The reply to a request; what is pushed meanwhile is kept."""
        number = self.connection.next_id()
        assert self.connection.send(message_type(id=number, **fields))
        end = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < end and not self.connection.closed:
            replies = self.connection.receive(0.5)
            self.pushes += [reply for reply in replies if reply.id == PUSH_ID]
            for reply in replies:
                if reply.id == number:
                    return reply
        raise AssertionError(f"no answer to {message_type.__name__}")

    def wait_push(self, push_type: type) -> Reply:
        """The next push of a type; earlier ones of other types stay."""
        end = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < end:
            for push in self.pushes:
                if isinstance(push, push_type):
                    self.pushes.remove(push)
                    return push
            if self.connection.closed:
                break
            self.pushes += self.connection.receive(0.5)
        raise AssertionError(f"no {push_type.__name__} among {self.pushes}")

    def wait_closed(self) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while not self.connection.closed:
            assert time.monotonic() < end, "the server did not close the connection"
            self.pushes += self.connection.receive(0.5)


SCHEDULER_FIELDS = {"weights.digest": "w", "hashing.algorithm": "sha256", "display.model": "m"}
WORKER_FIELDS = {"worker.backend": "b", "rank.device": "d"}


def attach(
    socket_path: str,
    engine: str = "e",
    *,
    world_size: int = 1,
    part_bytes: tuple[int, ...] = (4096,),
    scheduler_fields: dict[str, str] = SCHEDULER_FIELDS,
) -> tuple[Talker, list[Talker]]:
    """A scheduler and its workers, all in this process, with the namespace open."""
    scheduler = Talker(socket_path, hello(engine, Role.SCHEDULER, 0, world_size))
    workers = [
        Talker(socket_path, hello(engine, Role.WORKER, rank, world_size))
        for rank in range(world_size)
    ]
    scheduler.ask(Describe, fields=scheduler_fields)
    for worker in workers:
        worker.ask(Describe, fields=WORKER_FIELDS, part_bytes=list(part_bytes))
    for talker in [scheduler, *workers]:
        talker.wait_push(Opened)
    return scheduler, workers


class EngineProcess:
    """A process of its own that holds connections, does what it is told, and can be killed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self.process = context.Process(target=_obey, args=(remote,), daemon=True)
        self.process.start()
        remote.close()

    def open(self, key: str, socket_path: str, greeting: Hello) -> str:
        """Connect under ``key``; empty, or the refusal."""
        return self._do("open", key, socket_path, greeting)

    def ask(self, key: str, message_type: type, **fields: object) -> Reply:
        return self._do("ask", key, message_type, fields)

    def wait_push(self, key: str, push_type: type) -> Reply:
        return self._do("wait_push", key, push_type)

    def close(self, key: str) -> None:
        """Close a connection; the process lives on."""
        self._do("close", key)

    def fork_holder(self, key: str) -> int:
        """Fork a child that only holds a copy of the connection; its pid."""
        return self._do("fork_holder", key)

    def kill(self) -> None:
        self.process.kill()

    def join(self) -> None:
        self.process.join(10)

    def _do(self, verb: str, *arguments: object) -> object:
        self._pipe.send((verb, arguments))
        assert self._pipe.poll(30), f"the process did not do {verb}"
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result


def _obey(pipe: Pipe) -> None:
    talkers: dict[str, Talker] = {}
    while True:
        verb, arguments = pipe.recv()
        try:
            result: object = ""
            key, *rest = arguments
            if verb == "open":
                talkers[key] = Talker(*rest)
            elif verb == "ask":
                result = talkers[key].ask(rest[0], **rest[1])
            elif verb == "wait_push":
                result = talkers[key].wait_push(*rest)
            elif verb == "close":
                talkers[key].connection.close()
            elif verb == "fork_holder":
                result = os.fork()
                if result == 0:
                    pipe.close()
                    signal.pause()
            pipe.send(result)
        except Exception as error:
            pipe.send(error)


def totals(running: RunningServer) -> dict[str, Any]:
    with Client(running.socket_path) as client:
        return client.status()["totals"]


def held(running: RunningServer) -> tuple[int, int, int]:
    """Leases, open reservations, quarantined slots."""
    now = totals(running)
    return now["leases"], now["reservations"], now["quarantined"]


def reserve(scheduler: Talker, packed: bytes, parent: bytes = b"", step: int = 1) -> list[int]:
    reply = scheduler.ask(Reserve, step=step, group=0, chains=[Chain(parent=parent, names=packed)])
    assert isinstance(reply, Reserved)
    return unpack_u64(reply.chains[0].reservations)


def store(scheduler: Talker, workers: list[Talker], packed: bytes) -> None:
    """Wait for room, reserve, and commit on every rank."""
    numbers: list[int] = []

    def reserved() -> bool:
        numbers.extend(reserve(scheduler, packed))
        return bool(numbers)

    wait_until(reserved)
    for worker in workers:
        assert isinstance(worker.ask(Commit, reservations=pack_u64(numbers)), Done)
    settled = scheduler.wait_push(Settled)
    assert isinstance(settled, Settled)
    assert unpack_u64(settled.stored) == numbers
