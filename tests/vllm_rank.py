"""One rank with real memory, a real arena and a real server, and a scheduler that plans for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from conversation import WORKER_FIELDS, hello
from kvledger.client import Connection, Link
from kvledger.protocol import Opened, Role, Welcome
from kvledger.vllm.channel import Channel
from kvledger.vllm.layouts import BlockRows, EngineMemory, GroupLayout
from kvledger.vllm.metadata import CopyPlan, LoadPlan, StepPlan
from kvledger.vllm.stores import Stores
from kvledger.vllm.tracked import Tracked
from kvledger.vllm.transfer import HostTransfer
from kvledger.vllm.worker_side import WorkerSide
from servers import RunningServer
from vllm_desk import Desk

LAYERS, BLOCKS, PAGE = 2, 64, 1024
CANARY = 0xEE


def pattern(block: int, layer: int) -> NDArray[np.uint8]:
    """What the engine has computed into a block of a layer; no two are equal."""
    return ((np.arange(PAGE) * 7 + block * 131 + layer * 29) % 251).astype(np.uint8)


def chunk_bytes(blocks: list[int]) -> bytes:
    """A chunk as it lies in the arena: layer by layer, then block by block."""
    return b"".join(pattern(b, layer).tobytes() for layer in range(LAYERS) for b in blocks)


class Rank:
    """A worker with memory of its own."""

    def __init__(self, socket_path: str, *, width: int = 1, budget: int = 1 << 30) -> None:
        self.width = width
        rows = torch.full((LAYERS, BLOCKS, PAGE), CANARY, dtype=torch.uint8)
        self.cells = rows.numpy()
        layers = tuple(BlockRows((f"l{i}",), rows[i]) for i in range(LAYERS))
        group = GroupLayout(0, layers, 16, "", "", "", "")
        self.memory = EngineMemory((group,), BLOCKS, torch.device("cpu"))
        self.part_bytes = group.part_bytes(width)
        self.side = WorkerSide(
            make_transfer=self._make_transfer,
            fields=dict(WORKER_FIELDS),
            part_bytes=[self.part_bytes],
            blocks_per_chunk=width,
            load_budget_bytes=budget,
        )
        self.link = Link(
            socket_path,
            lambda: hello("e", Role.WORKER),
            on_connected=self.side.on_link_connected,
        )
        self.channel = Channel(self.link, self.side)
        self.side.attach(self.channel)

    def _make_transfer(self, connection: Connection) -> HostTransfer:
        arena = np.frombuffer(connection.map_arena(), dtype=np.uint8)
        return HostTransfer(self.memory, arena)

    def compute(self, blocks: list[int]) -> None:
        for block in blocks:
            for layer in range(LAYERS):
                self.cells[layer, block] = pattern(block, layer)

    def holds(self, block: int, computed_as: int) -> bool:
        """Whether a block has the bytes that were computed into another one."""
        return all(
            (self.cells[layer, block] == pattern(computed_as, layer)).all()
            for layer in range(LAYERS)
        )

    def untouched(self, block: int) -> bool:
        return bool((self.cells[:, block] == CANARY).all())

    def step(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """One step in vLLM's order, without a forward pass."""
        self.side.before_step(plan)
        self.side.begin_step(plan)
        self.side.start_loads(plan)
        self.side.store_planned()
        return self.side.take_results()


@dataclass
class World:
    """A server, the scheduler's desk and one rank."""

    desk: Desk
    rank: Rank
    stores: Stores

    @classmethod
    def open(cls, running: RunningServer, **options: int) -> World:
        desk = Desk(running.socket_path, with_worker=False)
        world = cls(desk, Rank(running.socket_path, **options), Stores(desk.channel))
        desk.on_settled = world.stores.settle
        desk.on_gone = world.stores.lost
        world.ready()
        return world

    def ready(self, times: int = 1) -> None:
        """The namespace is open, and the rank has heard it."""
        self.desk.open(times)
        opened = self.opened
        self.desk.poll_until(
            lambda: self.rank.step(StepPlan()) and self.rank.side._namespace == opened.namespace
        )

    @property
    def opened(self) -> Opened:
        return [heard for heard in self.desk.heard if isinstance(heard, Opened)][-1]

    def plan(self, **parts: object) -> StepPlan:
        """A plan of the server as it is now."""
        welcome = [heard for heard in self.desk.heard if isinstance(heard, Welcome)][-1]
        return StepPlan(
            boot=welcome.boot,
            arena_generation=welcome.arena_generation,
            namespace=self.opened.namespace,
            **parts,  # type: ignore[arg-type]
        )

    def reserved(self, item: Tracked) -> CopyPlan:
        """Slots for all that the request owes; its copies."""
        assert self.stores.ask([item], 1)
        self.desk.poll_until(lambda: not self.stores.waiting)
        (copies,) = self.stores.take([item])
        return copies

    def stored(self, item: Tracked) -> CopyPlan:
        """All that the request owes is computed, copied and committed."""
        copies = self.reserved(item)
        self.rank.compute(np.frombuffer(copies.block_ids, np.int32).tolist())
        self.rank.step(self.plan(stores=(copies,)))
        self.settled()
        return copies

    def settled(self) -> None:
        self.desk.poll_until(lambda: not self.stores.open_reservations)

    def arena(self, offset: int, size: int) -> bytes:
        connection = self.desk.channel.connection
        assert connection is not None
        return bytes(connection.map_arena(writable=False)[offset : offset + size])

    def close(self) -> None:
        self.desk.close()
        self.rank.side.shutdown()


def load_plan(copies: CopyPlan, blocks: list[int], request_id: str = "r") -> LoadPlan:
    """Load what was stored into other blocks."""
    ids = np.array(blocks, np.int32).tobytes()
    return LoadPlan(request_id, (CopyPlan(0, copies.offsets, ids),))
