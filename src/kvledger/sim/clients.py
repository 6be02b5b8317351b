"""What the clients of a simulated engine have sent, and what they have to receive.

A plain request has one prompt and one answer. A *session* (vLLM's streaming input) has turns: when
an answer is complete, the next input is appended to what stands in the engine, without the last
token of the answer, whose KV was never computed (vLLM's ``_update_request_as_session``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvledger.sim.oracle import Oracle
from kvledger.sim.pattern import Pattern, Prefix
from kvledger.sim.requests import Prompt


@dataclass(slots=True)
class _Client:
    """One request and its answer.

    Attributes:
        context: tokens before the current answer.
        answer: the current answer, as far as it was received.
        inputs: turns that were sent and have not begun.
        longest: tokens of all inputs and of the longest answers they allow.
        turn_over: the answer is complete, and no next turn has begun.
        checked: answers are compared with what a cold engine says.
    """

    prompt: Prompt
    context: list[int]
    is_session: bool
    longest: int
    answer: list[int] = field(default_factory=list)
    inputs: deque[Sequence[int]] = field(default_factory=deque)
    turn_over: bool = False
    checked: bool = True


class Clients:
    """See the module.

    Attributes:
        outputs: request id → all tokens received, over all turns.
    """

    def __init__(self, pattern: Pattern, oracle: Oracle) -> None:
        self.outputs: dict[str, list[int]] = {}
        self._pattern = pattern
        self._oracle = oracle
        self._clients: dict[str, _Client] = {}
        self._prefixes: dict[str, Prefix] = {}

    def send(self, request_id: str, prompt: Prompt, weights: str, *, is_session: bool) -> None:
        """A client sends its first input."""
        longest = len(prompt.tokens) + prompt.max_tokens
        self._clients[request_id] = _Client(prompt, list(prompt.tokens), is_session, longest)
        self._prefixes[request_id] = Prefix(self._pattern, prompt.seed(weights), prompt.tokens)
        self.outputs[request_id] = []

    def send_more(self, request_id: str, tokens: Sequence[int], max_tokens: int) -> None:
        """The client of a session sends the next input."""
        client = self._clients[request_id]
        client.longest += len(tokens) + max_tokens
        client.inputs.append(tokens)
        if client.turn_over:
            self._next_turn(client)

    def receive(
        self, request_id: str, tokens: Sequence[int], weights: str, *, is_complete: bool
    ) -> None:
        """The engine gives tokens out.

        Raises:
            OracleError: a complete answer is not the one of a cold engine.
        """
        client = self._clients[request_id]
        self.outputs[request_id] += tokens
        client.answer += tokens
        if not is_complete:
            return
        if client.checked:
            whole = [*client.context, *client.answer]
            prefix = Prefix(self._pattern, client.prompt.seed(weights), whole)
            self._oracle.check_output(request_id, prefix, len(client.context))
        client.checked = True
        client.turn_over = True
        if client.inputs:
            self._next_turn(client)

    def change_weights(self, request_id: str, weights: str) -> None:
        """The model changes under a live request; its current answer is no model's."""
        client = self._clients[request_id]
        self._prefixes[request_id].reseed(client.prompt.seed(weights))
        client.checked = False

    def prompt(self, request_id: str) -> Prompt:
        """The first input."""
        return self._clients[request_id].prompt

    def knows(self, request_id: str) -> bool:
        """Whether the request was not forgotten."""
        return request_id in self._clients

    def is_session(self, request_id: str) -> bool:
        """Whether more input may follow."""
        return self._clients[request_id].is_session

    def length(self, request_id: str) -> int:
        """Tokens of the request, the last one received included."""
        client = self._clients[request_id]
        return len(client.context) + len(client.answer)

    def longest(self, request_id: str) -> int:
        """Tokens it comes to once every input that was sent is answered in full, at most."""
        client = self._clients[request_id]
        return client.longest

    def prefix(self, request_id: str) -> Prefix:
        """The pattern of the request's tokens, shared with the workers."""
        return self._prefixes[request_id]

    def forget(self, request_ids: set[str]) -> None:
        """Drop everything about these."""
        for request_id in request_ids:
            del self._clients[request_id], self._prefixes[request_id], self.outputs[request_id]

    @property
    def request_ids(self) -> set[str]:
        """All that were not forgotten."""
        return set(self._clients)

    @staticmethod
    def _next_turn(client: _Client) -> None:
        client.context += [*client.answer[:-1], *client.inputs.popleft()]
        client.answer = []
        client.turn_over = False
