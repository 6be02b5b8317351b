"""What the catalog keeps: entries in chains, leases, reservations. Values and links, no policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from kvledger.eviction import LeafQueue
from kvledger.naming import NAME_BYTES, Name, NamespaceId
from kvledger.reasons import Reason


class GroupIndex:
    """The objects of one namespace and KV-cache group, by name."""

    def __init__(self, namespace: NamespaceId, group: int, object_bytes: int) -> None:
        self.namespace = namespace
        self.group = group
        self.object_bytes = object_bytes
        self.entries: dict[bytes, Entry] = {}
        self.leaves = LeafQueue()
        self.ghosts: OrderedDict[bytes, float] = OrderedDict()
        """Names evicted, and when; the oldest first."""

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that its entries occupy."""
        return len(self.entries) * self.object_bytes

    def visible_prefix(self, names: bytes) -> Entry | None:
        """The last entry of the longest visible prefix of the packed ``names``.

        Visibility along a chain is monotone, so this is a binary search; the two ends, which are
        the common cases, are tried first. Names that are no chain find a shorter prefix or none.
        """
        total = len(names) // NAME_BYTES
        if not total:
            return None
        found = self._visible(names, total - 1)
        if found is not None:
            return found
        found = self._visible(names, 0)
        if found is None:
            return None
        low, high = 0, total - 1  # low is visible, high is not
        while high - low > 1:
            middle = (low + high) // 2
            entry = self._visible(names, middle)
            if entry is None:
                high = middle
            else:
                low, found = middle, entry
        return found

    def why_missing(self, name: bytes, now: float) -> tuple[Reason, float]:
        """Why a look-up does not find ``name``, and seconds since its eviction (else 0)."""
        if name in self.entries:
            return Reason.BEING_WRITTEN, 0.0
        evicted_at = self.ghosts.get(name)
        if evicted_at is not None:
            return Reason.EVICTED, max(0.0, now - evicted_at)
        return Reason.NEVER_SEEN, 0.0

    def _visible(self, names: bytes, position: int) -> Entry | None:
        entry = self.entries.get(names[position * NAME_BYTES : (position + 1) * NAME_BYTES])
        if entry is None or not entry.visible or entry.depth != position:
            return None
        return entry


class Entry:
    """One object: reserved, then written by every rank, then visible once its parent is visible.

    Attributes:
        name: the chunk's name.
        index: the group it belongs to.
        parent: the chunk before it; None at the root of a chain.
        depth: number of chunks before it.
        children: the chunks after it: None, one entry, or a set of several (most have one).
        offset: its slot in the arena, in bytes.
        visible: may be found; its bytes and those of all its ancestors are complete.
        leases: how many leases end here.
        last_used: time of last use of it, or of a descendant that has been evicted since.
        reservation: while it is not visible: who writes it.
        queued: owned by the leaf queue.
    """

    __slots__ = (
        "children", "depth", "index", "last_used", "leases", "name", "offset", "parent",
        "queued", "reservation", "visible",
    )  # fmt: skip

    def __init__(self, name: Name, index: GroupIndex, parent: Entry | None, now: float) -> None:
        self.name = name
        self.index = index
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: Entry | set[Entry] | None = None
        self.offset = -1
        self.visible = False
        self.leases = 0
        self.last_used = now
        self.reservation: Reservation | None = None
        self.queued = False

    @property
    def evictable(self) -> bool:
        """Whether nothing hangs on it: visible, no lease, no children."""
        return self.visible and not self.leases and self.children is None

    def add_child(self, child: Entry) -> None:
        if self.children is None:
            self.children = child
        elif isinstance(self.children, set):
            self.children.add(child)
        else:
            self.children = {self.children, child}

    def remove_child(self, child: Entry) -> None:
        if self.children is child:
            self.children = None
        elif isinstance(self.children, set):
            self.children.remove(child)
            if len(self.children) == 1:
                self.children = self.children.pop()
        else:
            raise ValueError("not a child of this entry")

    def iterate_children(self) -> Iterator[Entry]:
        if isinstance(self.children, set):
            yield from self.children
        elif self.children is not None:
            yield self.children

    def offsets_to_here(self, first: int) -> list[int]:
        """Slots of the chunks from depth ``first`` to this one, in the order of the chain."""
        offsets: list[int] = []
        entry: Entry | None = self
        while entry is not None and entry.depth >= first:
            offsets.append(entry.offset)
            entry = entry.parent
        offsets.reverse()
        return offsets

    def subtree(self) -> Iterator[Entry]:
        """This entry and all its descendants, each before its children."""
        stack = [self]
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.iterate_children())


@dataclass(slots=True, eq=False)
class Reservation:
    """A slot that the ranks of one engine are writing, or may still be writing.

    Attributes:
        number: its id; never reused in a boot.
        entry: what is being written; None once aborted (the slot is then quarantined).
        offset: the slot.
        step: the engine's step at which it was made.
        waiting_ranks: bit mask of ranks that have not committed or let go.
    """

    number: int
    entry: Entry | None
    offset: int
    step: int
    waiting_ranks: int


@dataclass(slots=True, eq=False)
class EngineBooks:
    """What one engine holds.

    Attributes:
        namespace: the namespace it works in.
        world_size: number of ranks that must commit an object.
        leases: lease id → last entry of the leased prefix.
        open: reservations not yet settled.
        quarantine: aborted reservations whose slot a rank may still be writing.
    """

    namespace: NamespaceId
    world_size: int
    leases: dict[int, Entry] = field(default_factory=dict)
    open: dict[int, Reservation] = field(default_factory=dict)
    quarantine: dict[int, Reservation] = field(default_factory=dict)

    def reserved_before(self, step: int) -> list[Reservation]:
        """Open reservations that were made before this step of the engine, the oldest first."""
        return list(takewhile(lambda reservation: reservation.step < step, self.open.values()))


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Longest visible prefix: its length, and why the chunk after it is not there."""

    chunks: int
    reason: Reason | None = None
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What became of one chain of a reserve: ``present`` are there already, the next ones got a
    slot, and what is behind them was stopped by ``reason``."""

    present: int
    reservations: list[int]
    offsets: list[int]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """Reservations of ``engine`` that have ended: stored, or aborted for ``reason``."""

    engine: str
    stored: list[int]
    aborted: list[int]
    reason: Reason | None = None
