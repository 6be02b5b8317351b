"""The driving end of the socket, against a child that is played by the test."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvledger.lab import messages
from kvledger.lab.conversation import Conversation

DEADLINE_SECONDS = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[Conversation, socket.socket]]:
    own, child = socket.socketpair()
    conversation = Conversation(own)
    yield conversation, child
    child.close()
    conversation.close()


def finished(number: int) -> messages.Finished:
    return messages.Finished(
        id=number,
        token_ids=[1],
        local_hit_tokens=0,
        external_hit_tokens=32,
        ttft_seconds=0.5,
        total_seconds=1.0,
        finish_reason="length",
        kv_transfer_params=None,
    )


def generate(conversation: Conversation) -> messages.Generate:
    return messages.Generate(id=conversation.next_id(), prompt=[1, 2], sampling={"max_tokens": 1})


def test_reports_reach_the_one_who_asked(ends: tuple[Conversation, socket.socket]) -> None:
    conversation, child = ends
    one, other = generate(conversation), generate(conversation)
    one_answer, other_answer = conversation.send(one), conversation.send(other)
    with child.makefile("rb") as lines:
        assert [messages.commands.decode(lines.readline()) for _ in range(2)] == [one, other]
    child.sendall(messages.encode([messages.FirstToken(id=other.id), finished(other.id)]))
    assert other_answer.report.result(DEADLINE_SECONDS) == finished(other.id)
    assert other_answer.first_token.is_set()
    assert not one_answer.report.done()
    assert not one_answer.first_token.is_set()


def test_a_child_that_ends_fails_all_who_wait(ends: tuple[Conversation, socket.socket]) -> None:
    conversation, child = ends
    answered = conversation.send(generate(conversation))
    waiting = conversation.send(generate(conversation))
    child.sendall(messages.encode([finished(1)]))
    assert answered.report.result(DEADLINE_SECONDS) == finished(1)
    child.close()
    for answer in (waiting, conversation.ready):
        with pytest.raises(EOFError):
            answer.report.result(DEADLINE_SECONDS)
        assert answer.first_token.wait(DEADLINE_SECONDS), "who waits for a token is woken too"
    assert answered.report.result(0) == finished(1), "what has come stays"


def test_a_command_to_a_child_that_is_gone_fails(
    ends: tuple[Conversation, socket.socket],
) -> None:
    conversation, child = ends
    child.close()
    with pytest.raises(EOFError):
        conversation.ready.report.result(DEADLINE_SECONDS)
    with pytest.raises(EOFError):
        conversation.send(generate(conversation)).report.result(DEADLINE_SECONDS)
