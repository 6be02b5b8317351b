"""Engines: the processes that belong together, and the namespace their descriptions add up to.

No process of an engine knows all that decides the bytes of a block. The scheduler knows the
model and how tokens are hashed; each worker knows how its own tensors lie. Their parts are joined
here, and the namespace opens when all of them are there and all ranks agree. Pure values and
checks; the conversation is in :mod:`kvledger.server.service`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvledger.naming import DISPLAY_PREFIX, Descriptor, NamespaceId, namespace_id
from kvledger.protocol import Role

if TYPE_CHECKING:
    from kvledger.server.session import Session

RANK_PREFIX = "rank."
"""Worker fields under this prefix may differ from rank to rank."""
PART_ALIGNMENT_BYTES = 64
OBJECT_ALIGNMENT_BYTES = 4096
MAX_PART_BYTES = 1 << 40
MAX_GROUPS = 64
MAX_FIELDS = 1024


@dataclass(slots=True, eq=False)
class Process:
    """One process in one role.

    Attributes:
        engine: the engine it belongs to.
        role: scheduler or worker.
        rank: its rank as a worker; 0 as a scheduler.
        label: for people.
        pid: its process id as seen from here; 0 if it is not visible.
        identity: tells processes apart, see :func:`kvledger.server.peers.identity_of_pidfd`.
        pidfd: becomes readable when it ends.
        session: its connection; None while it lives without one.
        fields: its part of the descriptor; None before Describe.
        part_bytes: workers: bytes of its part of an object, for each group.
    """

    engine: Engine
    role: Role
    rank: int
    label: str
    pid: int
    identity: tuple[int, int] | None
    pidfd: int
    session: Session | None
    fields: Descriptor | None = None
    part_bytes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        name = "scheduler" if self.role is Role.SCHEDULER else f"rank {self.rank}"
        return f"{name} of engine {self.engine.id} (pid {self.pid})"


@dataclass(slots=True, eq=False)
class Engine:
    """The processes of one engine.

    Attributes:
        id: chosen by the engine.
        world_size: number of ranks.
        generation: counts attachments: when one process loses its connection, all must come back,
            and get a new number. No plan made before is valid after.
        processes: those that live, attached or not, by role and rank.
        namespace: the open namespace, or None.
        object_bytes: with an open namespace: slot size of each group.
        part_offsets: with an open namespace: for each rank and group, where its part begins.
        trouble: why the namespace cannot open, as a sentence for people; empty if nothing is wrong.
        opened: the namespace has been open in this generation, so plans may have been made.
    """

    id: str
    world_size: int
    generation: int
    processes: dict[tuple[Role, int], Process] = field(default_factory=dict)
    namespace: NamespaceId | None = None
    object_bytes: tuple[int, ...] = ()
    part_offsets: tuple[tuple[int, ...], ...] = ()
    opened: bool = False
    trouble: str = ""

    @property
    def scheduler(self) -> Process | None:
        return self.processes.get((Role.SCHEDULER, 0))

    def attached(self) -> list[Process]:
        """Processes with a connection."""
        return [process for process in self.processes.values() if process.session is not None]

    def workers(self) -> Iterator[Process]:
        """Known ranks, attached or not."""
        return (p for p in self.processes.values() if p.role is Role.WORKER)

    def missing(self) -> list[str]:
        """Who has not described itself yet, for people; empty if the namespace can open."""
        waited_for = [(Role.SCHEDULER, 0)] + [(Role.WORKER, r) for r in range(self.world_size)]
        missing: list[str] = []
        for role, rank in waited_for:
            process = self.processes.get((role, rank))
            if process is None or process.fields is None:
                missing.append("scheduler" if role is Role.SCHEDULER else f"rank {rank}")
        return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The whole description of an engine.

    Attributes:
        namespace: digest of the descriptor.
        descriptor: all fields, flat.
        object_bytes: slot size for each group.
        part_offsets: for each rank and group, where the rank's part begins in an object.
    """

    namespace: NamespaceId
    descriptor: Descriptor
    object_bytes: tuple[int, ...]
    part_offsets: tuple[tuple[int, ...], ...]


def disagreement(process: Process, others: Sequence[Process]) -> str:
    """The field in which a process contradicts the others that have described themselves.

    Empty if there is none. Fields for display, and a rank's own fields, may differ.
    """
    assert process.fields is not None
    for other in others:
        if other is process or other.fields is None:
            continue
        same_role = process.role is Role.WORKER and other.role is Role.WORKER
        names = process.fields.keys() & other.fields.keys()
        if same_role:
            names = process.fields.keys() | other.fields.keys()
            if len(process.part_bytes) != len(other.part_bytes):
                return "number of KV-cache groups"
        for name in sorted(names):
            if name.startswith((DISPLAY_PREFIX, RANK_PREFIX)):
                continue
            if process.fields.get(name) != other.fields.get(name):
                return name
    return ""


def join_parts(scheduler: Mapping[str, str], workers: Sequence[Process]) -> Joined:
    """Join the parts of a scheduler and of all ranks, in order of their rank, which agree.

    The layout of an object is part of what decides bytes, so it is a field of its own.
    """
    descriptor: Descriptor = dict(scheduler)
    for worker in workers:
        assert worker.fields is not None
        for name, value in worker.fields.items():
            if name.startswith(RANK_PREFIX):
                descriptor[f"rank{worker.rank}.{name.removeprefix(RANK_PREFIX)}"] = value
            else:
                descriptor.setdefault(name, value)
    parts = [worker.part_bytes for worker in workers]
    descriptor["layout.part_bytes"] = ";".join(",".join(map(str, part)) for part in parts)
    object_bytes, part_offsets = lay_out(parts)
    return Joined(
        namespace=namespace_id(descriptor),
        descriptor=descriptor,
        object_bytes=object_bytes,
        part_offsets=part_offsets,
    )


def lay_out(
    parts: Sequence[tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Size of an object of each group, and for each rank where its parts begin.

    Args:
        parts: for each rank, the bytes of its part for each group.
    """
    ends = [0] * len(parts[0])
    offsets: list[tuple[int, ...]] = []
    for part in parts:
        offsets.append(tuple(ends))
        ends = [
            end + _round_up(size, PART_ALIGNMENT_BYTES)
            for end, size in zip(ends, part, strict=True)
        ]
    return tuple(_round_up(end, OBJECT_ALIGNMENT_BYTES) for end in ends), tuple(offsets)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
