"""An engine's two ends of a conversation with a real server, as the connector holds them.

Scheduler and worker live in this process: the server tells them apart by role and rank.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from conversation import SCHEDULER_FIELDS, WORKER_FIELDS, hello
from kvledger.client import Client, Connection, Link
from kvledger.ledger import Account, StoreRule
from kvledger.naming import NAME_BYTES, Name
from kvledger.protocol import (
    Abort,
    Chain,
    Closed,
    Commit,
    Describe,
    Error,
    Opened,
    Reply,
    Reserve,
    Reserved,
    Role,
    Settled,
    Welcome,
    unpack_u64,
)
from kvledger.reasons import Reason
from kvledger.vllm.channel import Channel, Listener
from kvledger.vllm.tracked import Tracked
from servers import RunningServer, wait_until

PART_BYTES = 4096
BLOCK_TOKENS = 16


@dataclass
class FakeRequest:
    """What is read of vLLM's request; ``text`` stands for its tokens."""

    request_id: str
    chunks: int
    text: str = "a"
    blocks_per_chunk: int = 1
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: object = None
    lora_request: object = None

    @property
    def block_hashes(self) -> list[bytes]:
        blocks = self.chunks * self.blocks_per_chunk
        return [f"{self.text}/{block}".encode().ljust(NAME_BYTES, b".") for block in range(blocks)]

    @property
    def num_tokens(self) -> int:
        return self.chunks * self.blocks_per_chunk * BLOCK_TOKENS


def tracked(
    chunks: int,
    *,
    text: str = "a",
    blocks_per_chunk: int = 1,
    valid: bool = True,
    rule: StoreRule | None = None,
) -> Tracked:
    """A request whose chunks are all valid (or none), in blocks 1, 2, 3 and so on."""
    request = FakeRequest(f"{text}-{chunks}", chunks, text, blocks_per_chunk)
    account = Account(
        request.request_id,
        chunk_tokens=BLOCK_TOKENS * blocks_per_chunk,
        blocks_per_chunk=blocks_per_chunk,
        rule=rule or StoreRule(),
    )
    if valid:
        account.advance(request.num_tokens)
        account.capture(range(1, chunks * blocks_per_chunk + 1))
    return Tracked(request=request, account=account)


def names_of(item: Tracked) -> list[Name]:
    return item.names(0, item.named_chunks)


@dataclass
class Desk(Listener):
    """The scheduler's channel, and the worker's plain connection; both come back by themselves.

    Attributes:
        heard: what the server said unasked, and what became of the connection, in order.
        stored: reservations that were settled as stored.
        on_settled: gets each Settled.
        on_gone: called when the server is lost.
        silence_seconds: patience of the channel; long, so that a busy machine fails no test.
    """

    socket_path: str
    engine: str = "e"
    with_worker: bool = True
    fields: dict[str, str] = field(default_factory=lambda: dict(SCHEDULER_FIELDS))
    heard: list[Welcome | Opened | Closed | Error | str] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    on_settled: Callable[[Settled], None] = field(default=lambda _push: None)
    on_gone: Callable[[], None] = field(default=lambda: None)
    silence_seconds: float = 30.0

    def __post_init__(self) -> None:
        self.channel = Channel(
            Link(
                self.socket_path,
                lambda: hello(self.engine, Role.SCHEDULER),
                on_connected=self._describe_scheduler,
            ),
            self,
            silence_seconds=self.silence_seconds,
        )
        self.worker: Link | None = None
        if self.with_worker:
            self.worker = Link(
                self.socket_path,
                lambda: hello(self.engine, Role.WORKER),
                on_connected=self._describe_worker,
            )

    def _describe_scheduler(self, connection: Connection) -> None:
        connection.send(Describe(id=connection.next_id(), fields=self.fields))

    def _describe_worker(self, connection: Connection) -> None:
        connection.send(
            Describe(id=connection.next_id(), fields=WORKER_FIELDS, part_bytes=[PART_BYTES])
        )

    # ------------------------------------------------------------ listener

    def on_connected(self, welcome: Welcome) -> None:
        self.heard.append(welcome)

    def on_lost(self) -> None:
        self.heard.append("lost")
        self.on_gone()

    def on_push(self, push: Opened | Closed | Settled) -> None:
        if isinstance(push, Settled):
            self.stored.update(unpack_u64(push.stored))
            self.on_settled(push)
        else:
            self.heard.append(push)

    def on_refused(self, error: Error) -> None:
        self.heard.append(error)

    # ------------------------------------------------------------ verbs

    def store(self, packed: bytes, parent: bytes = b"") -> list[int]:
        """Reserve and commit these names; the slots' offsets, in order."""
        got: list[Reply] = []
        chain = Chain(parent=parent, names=packed)
        self.channel.send(lambda i: Reserve(id=i, step=1, group=0, chains=[chain]), got.append)
        self.poll_until(lambda: got)
        assert isinstance(got[0], Reserved)
        (reserved,) = got[0].chains
        assert reserved.reason == "", reserved
        assert len(reserved.offsets) == 8 * len(packed) // NAME_BYTES, "some are there already"
        self.commit(reserved.reservations)
        self.poll_until(lambda: self.stored.issuperset(unpack_u64(reserved.reservations)))
        return unpack_u64(reserved.offsets)

    def count(self, kind: type | str) -> int:
        return sum(h == kind if isinstance(kind, str) else isinstance(h, kind) for h in self.heard)

    def poll_until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Poll the channel until the condition holds; a generous deadline."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not come true; heard {self.heard}"
            self.channel.poll(0.005)

    def open(self, times: int = 1) -> None:
        """Wait for the namespace, and then for room in the arena."""
        self.poll_until(lambda: self.count(Opened) >= times)
        wait_until(lambda: status(self.socket_path)["memory"]["pages_ready"] > 0)

    def commit(self, reservations: bytes) -> None:
        """The worker says that it has written these."""
        connection = self._worker_connection()
        assert connection.send(Commit(id=connection.next_id(), reservations=reservations))

    def abort(self, reservations: bytes, reason: Reason = Reason.WRITER_FAILED) -> None:
        """The worker says that it has not."""
        connection = self._worker_connection()
        assert connection.send(
            Abort(id=connection.next_id(), reservations=reservations, reason=reason)
        )

    def _worker_connection(self) -> Connection:
        assert self.worker is not None
        connection = self.worker.connection
        assert connection is not None
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()
        if self.worker is not None:
            self.worker.close()


def stop(running: RunningServer) -> None:
    """From now on the server does nothing, and its sockets stay open."""
    running.process.send_signal(signal.SIGSTOP)


def go_on(running: RunningServer) -> None:
    running.process.send_signal(signal.SIGCONT)


def status(socket_path: str) -> dict[str, dict[str, int]]:
    with Client(socket_path) as client:
        return client.status()


def total(running: RunningServer, what: str) -> int:
    """One of the server's totals, which it is asked for."""
    return status(running.socket_path)["totals"][what]


def wait_total(running: RunningServer, what: str, expected: int) -> None:
    """The server's total becomes that; what was sent before on any connection counts."""
    wait_until(lambda: total(running, what) == expected)
