"""Look-ups against a real server: the same answer for ever, and no lease is ever lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from conversation import names
from kvledger.naming import Name, unpack_names
from kvledger.reasons import Reason
from kvledger.vllm.lookups import Lookup, Lookups
from servers import RunningServer, StartServer, wait_until
from vllm_desk import Desk, go_on, stop, total, wait_total

DEADLINE_SECONDS = 0.05
LONG_SECONDS = 30.0


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server()


@pytest.fixture
def desk(running: RunningServer) -> Iterator[Desk]:
    with Desk(running.socket_path) as desk:
        desk.open()
        yield desk


@pytest.fixture
def lookups(desk: Desk) -> Lookups:
    return Lookups(desk.channel, LONG_SECONDS)


def prompt(text: str, chunks: int) -> list[Name]:
    return unpack_names(names(text, chunks))


def answered(desk: Desk, lookup: Lookup) -> None:
    desk.poll_until(lambda: lookup.answered)


def result(lookups: Lookups, lookup: Lookup) -> int:
    """Ask until there is an answer, as vLLM does at each step."""
    found: list[int | None] = []

    def asked() -> bool:
        found.append(lookups.result(lookup))
        return found[-1] is not None

    wait_until(asked)
    assert found[-1] is not None
    return found[-1]


def flush_all(lookups: Lookups, running: RunningServer) -> None:
    """What is due is sent, and then the server holds no lease."""
    lookups.flush()
    wait_total(running, "leases", 0)
    assert lookups.leases == 0


@pytest.mark.pitfall(13)
def test_asking_again_changes_nothing(desk: Desk, lookups: Lookups, running: RunningServer) -> None:
    desk.store(names("a", 3))
    lookup = lookups.ask(prompt("a", 5), None)
    answered(desk, lookup)
    before = total(running, "lookups")
    desk.store(names("a", 1, first=3), parent=prompt("a", 3)[-1])
    assert [lookups.result(lookup) for _ in range(5)] == [3] * 5, "of before, as it was promised"
    assert lookup.reason is Reason.NEVER_SEEN
    assert total(running, "lookups") == before, "the server was asked once"
    assert (lookups.leases, total(running, "leases")) == (1, 1)
    for _ in range(3):
        lookups.release(lookup)
    flush_all(lookups, running)
    again = lookups.ask(prompt("a", 5), None)
    assert result(lookups, again) == 4, "a new question sees what was stored meanwhile"


def test_a_whole_hit_has_no_reason_and_a_miss_has_no_lease(
    desk: Desk, lookups: Lookups, running: RunningServer
) -> None:
    desk.store(names("a", 3))
    whole, none = lookups.ask(prompt("a", 3), None), lookups.ask(prompt("b", 3), None)
    assert (result(lookups, whole), whole.reason) == (3, None)
    assert (result(lookups, none), none.reason) == (0, Reason.NEVER_SEEN)
    assert (lookups.leases, total(running, "leases")) == (1, 1)
    lookups.release(none)
    lookups.release(whole)
    flush_all(lookups, running)


def test_what_needs_no_question_is_not_asked(lookups: Lookups, running: RunningServer) -> None:
    empty = lookups.ask([], None)
    assert (lookups.result(empty), empty.reason) == (0, Reason.NO_FULL_CHUNK)
    unknown = lookups.ask(prompt("a", 3), Reason.IDENTITY_PENDING)
    assert (lookups.result(unknown), unknown.reason) == (0, Reason.IDENTITY_PENDING)
    assert total(running, "lookups") == 0


def test_a_namespace_that_is_not_open_is_a_reason(running: RunningServer) -> None:
    with Desk(running.socket_path, engine="lonely", with_worker=False) as desk:
        desk.poll_until(lambda: desk.channel.connected)
        lookups = Lookups(desk.channel, LONG_SECONDS)
        lookup = lookups.ask(prompt("a", 3), None)
        assert result(lookups, lookup) == 0
        assert lookup.reason is Reason.NAMESPACE_OPENING


@pytest.mark.pitfall(15)
def test_a_late_answer_is_a_miss_and_gives_its_lease_back(
    desk: Desk, running: RunningServer
) -> None:
    lookups = Lookups(desk.channel, DEADLINE_SECONDS)
    desk.store(names("a", 3))
    stop(running)
    lookup = lookups.ask(prompt("a", 3), None)
    begin = time.monotonic()
    first = lookups.result(lookup)
    assert first is None or time.monotonic() - begin > DEADLINE_SECONDS, "it may still come"
    assert result(lookups, lookup) == 0
    assert time.monotonic() - begin >= DEADLINE_SECONDS
    assert lookup.reason is Reason.LOOKUP_DEADLINE
    assert desk.channel.silent
    second = lookups.ask(prompt("a", 3), None)
    assert lookups.result(second) == 0, "while the breaker is open nobody waits"
    go_on(running)
    desk.poll_until(lambda: lookups.leases == 0 and not desk.channel.silent)
    assert lookups.result(lookup) == 0, "the late answer does not change the first one"
    assert total(running, "lookups") == 1, "the second question was never sent"
    flush_all(lookups, running)


def test_without_giving_back_the_lease_would_stay(
    desk: Desk, lookups: Lookups, running: RunningServer
) -> None:
    """Negative control: the server does hold the lease of a late answer until it is told."""
    desk.store(names("a", 3))
    stop(running)
    lookup = lookups.ask(prompt("a", 3), None)
    desk.channel.trip()
    assert result(lookups, lookup) == 0
    go_on(running)
    desk.poll_until(lambda: not desk.channel.silent)
    assert total(running, "leases") == 1
    flush_all(lookups, running)


def test_released_before_it_was_answered(
    desk: Desk, lookups: Lookups, running: RunningServer
) -> None:
    """A request that is aborted in the queue."""
    desk.store(names("a", 3))
    stop(running)
    lookup = lookups.ask(prompt("a", 3), None)
    lookups.release(lookup)
    lookups.flush()
    go_on(running)
    answered(desk, lookup)
    assert lookups.leases == 0
    flush_all(lookups, running)


def test_releases_are_kept_while_the_server_is_silent(
    desk: Desk, lookups: Lookups, running: RunningServer
) -> None:
    desk.store(names("a", 3))
    held = [lookups.ask(prompt("a", 3), None) for _ in range(3)]
    assert [result(lookups, lookup) for lookup in held] == [3, 3, 3]
    assert total(running, "leases") == 3
    stop(running)
    late = lookups.ask(prompt("a", 3), None)
    desk.channel.trip()
    assert result(lookups, late) == 0
    for lookup in held:
        lookups.release(lookup)
    lookups.flush()
    go_on(running)
    desk.poll_until(lambda: not desk.channel.silent)
    assert total(running, "leases") == 4, "nothing was sent while it was silent"
    flush_all(lookups, running)


def test_a_killed_server_is_a_miss(desk: Desk, lookups: Lookups, running: RunningServer) -> None:
    desk.store(names("a", 3))
    held = lookups.ask(prompt("a", 3), None)
    assert result(lookups, held) == 3
    stop(running)
    lookup = lookups.ask(prompt("a", 3), None)
    desk.on_gone = lookups.lost
    running.kill()
    assert result(lookups, lookup) == 0
    assert lookup.reason in (Reason.SERVER_ABSENT, Reason.LOOKUP_DEADLINE)
    desk.poll_until(lambda: desk.count("lost"))
    assert lookups.leases == 0
    after = lookups.ask(prompt("a", 3), None)
    assert (lookups.result(after), after.reason) == (0, Reason.SERVER_ABSENT)
    lookups.flush()
