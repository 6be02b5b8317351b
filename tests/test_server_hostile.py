"""Engines that behave badly must not hurt others: found by attacking the server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conversation import SCHEDULER_FIELDS, Talker, attach, hello, names
from kvledger.client import Client
from kvledger.errors import RefusedError
from kvledger.protocol import (
    Abort,
    Chain,
    Closed,
    Commit,
    Describe,
    Error,
    ErrorCode,
    Match,
    Matched,
    Release,
    Reserve,
    Role,
)
from servers import RunningServer, wait_until

StartServer = Callable[..., RunningServer]


def _do_not_read(worker: Talker, messages: int) -> None:
    """Fill the worker's socket with answers it has not read."""
    for _ in range(messages):
        assert worker.connection.send(Commit(id=7, reservations=b""))


@pytest.mark.parametrize("unread", [0, 2000])
def test_one_look_after_a_copy_sees_that_the_slots_are_gone(
    server: StartServer, unread: int
) -> None:
    """A new epoch drops the leases. A rank that has copied under one looks once: it must see the
    server's word or the end of its connection, however much it has left unread."""
    running = server()
    scheduler, (worker,) = attach(running.socket_path)
    _do_not_read(worker, unread)
    fields = {**SCHEDULER_FIELDS, "weights.epoch": "next"}
    assert scheduler.connection.send(Describe(id=99, fields=fields))
    wait_until(lambda: scheduler.connection.closed or bool(scheduler.connection.receive(0.1)))
    replies = worker.connection.receive(0.0)
    assert worker.connection.closed or any(isinstance(reply, Closed) for reply in replies)


@pytest.mark.parametrize("unread", [0, 2000])
def test_one_look_after_a_copy_sees_that_the_engine_is_detached(
    server: StartServer, unread: int
) -> None:
    running = server()
    scheduler, (worker,) = attach(running.socket_path)
    _do_not_read(worker, unread)
    scheduler.connection.close()
    with Client(running.socket_path) as client:
        wait_until(lambda: not client.status()["engines"])
    replies = worker.connection.receive(0.0)
    assert worker.connection.closed or any(isinstance(reply, Closed) for reply in replies)


@pytest.mark.parametrize("message", [Reserve, Release, Commit, Abort])
def test_a_message_with_too_many_items_changes_nothing(server: StartServer, message: type) -> None:
    running = server()
    scheduler, (worker,) = attach(running.socket_path)
    count = 65_537
    speaker, fields = {
        Reserve: (
            scheduler,
            {"step": 1, "group": 0, "chains": [Chain(parent=b"", names=b"")] * count},
        ),
        Release: (scheduler, {"leases": list(range(count))}),
        Commit: (worker, {"reservations": bytes(8 * count)}),
        Abort: (worker, {"reservations": bytes(8 * count), "reason": "writer_failed"}),
    }[message]
    reply = speaker.ask(message, **fields)
    assert isinstance(reply, Error)
    assert reply.code is ErrorCode.LIMIT_REACHED
    answer = scheduler.ask(Match, lease=1, group=0, names=names("still", 1))
    assert isinstance(answer, Matched)


def test_engines_that_leave_in_a_living_process_are_forgotten(server: StartServer) -> None:
    """A notebook starts and ends engines without ending itself."""
    running = server()
    with Client(running.socket_path) as client:
        for number in range(20):
            scheduler, (worker,) = attach(running.socket_path, f"engine {number}")
            worker.connection.close()
            scheduler.connection.close()
            wait_until(lambda: not client.status()["engines"])
        assert client.status()["namespaces"] == []


def test_a_rank_that_ends_while_it_is_told_of_a_new_epoch(server: StartServer) -> None:
    """Telling the ranks finds that one has gone; the server answers and logs no error."""
    running = server()
    scheduler, workers = attach(running.socket_path, world_size=3)
    workers[1].connection.close()
    scheduler.connection.send(Describe(id=99, fields={**SCHEDULER_FIELDS, "weights.epoch": "n"}))
    with Client(running.socket_path) as client:
        wait_until(lambda: not client.status()["engines"])
    assert "Traceback" not in running.log()
    again = Talker(running.socket_path, hello("e", Role.SCHEDULER, 0, 3))
    assert not again.connection.closed


@pytest.mark.parametrize("role", list(Role))
def test_another_protocol_version_is_refused(server: StartServer, role: Role) -> None:
    running = server()
    with pytest.raises(RefusedError, match="speaks protocol") as refused:
        Talker(running.socket_path, hello("e", role, protocol=99))
    assert refused.value.code == ErrorCode.WRONG_VERSION
