"""An executable specification of the catalog; catalog_checked.py compares the two at each step.

The model is written from the rules, not from the code: sets and dicts, no queues, no bit masks, no
lazy anything. It keeps who may be writing which bytes of the arena, which bytes every rank has put
into every slot, and what a look-up therefore must answer. *Which* object is evicted is the
catalog's choice: the model learns it by looking, and checks that the choice was allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvledger.entries import ChainResult, MatchResult, Settlement
from kvledger.naming import NamespaceId
from kvledger.reasons import Reason

Key = tuple[str, int, bytes]
"""Namespace, group, name."""

ROOM_REASONS = {Reason.NO_ROOM, Reason.ARENA_GROWING, Reason.TOO_MANY_RESERVATIONS}


class SpecViolation(AssertionError):
    """The catalog did what the specification forbids."""


def require(condition: bool, complaint: str) -> None:
    if not condition:
        raise SpecViolation(complaint)


@dataclass
class Object:
    """What the arena holds, or is about to hold, under a name."""

    key: Key
    parent: Key | None
    offset: int
    size: int
    world: int
    used: float
    number: int
    visible: bool = False


@dataclass
class Writer:
    """A reservation some rank of which may still write."""

    engine: str
    key: Key
    offset: int
    size: int
    step: int
    ranks: set[int]
    open: bool = True


@dataclass
class Engine:
    namespace: NamespaceId
    world: int
    leases: dict[int, list[Key]] = field(default_factory=dict)


class Spec:
    """The model. Each method is told what the catalog answered and complains."""

    def __init__(self, *, slots: int | None, reservation_steps: int, max_reservations: int) -> None:
        self.slots = slots
        """Number of slots if all objects have one size: then evictions are predicted exactly."""
        self.reservation_steps = reservation_steps
        self.max_reservations = max_reservations
        self.engines: dict[str, Engine] = {}
        self.objects: dict[Key, Object] = {}
        self.writers: dict[int, Writer] = {}
        self.memory: dict[tuple[int, int], Key | None] = {}
        """Offset and rank → the name whose bytes the rank's part of the slot holds."""
        self.evicted: dict[Key, float] = {}
        self.remembers_all = True
        """Whether the catalog has room for the names of all that it has ever evicted."""

    # ------------------------------------------------------------ helpers

    def children(self, key: Key) -> list[Object]:
        return [o for o in self.objects.values() if o.parent == key]

    def ancestry(self, key: Key | None) -> Iterator[Key]:
        while key is not None:
            yield key
            key = self.objects[key].parent

    def leased(self) -> set[Key]:
        return {k for e in self.engines.values() for chain in e.leases.values() for k in chain}

    def leaves(self, spared: set[Key]) -> list[Object]:
        """Visible, nothing hangs on them, nobody has leased them, and not spared."""
        leased = self.leased()
        parents = {o.parent for o in self.objects.values()}
        return [
            o
            for key, o in self.objects.items()
            if o.visible and key not in parents and key not in leased and key not in spared
        ]

    def held(self, engine: str) -> int:
        return sum(w.engine == engine for w in self.writers.values() if w.ranks or w.open)

    def remove(self, key: Key) -> Object:
        gone = self.objects.pop(key)
        if gone.parent is not None:
            parent = self.objects[gone.parent]
            parent.used = max(parent.used, gone.used)
        return gone

    def visible_prefix(self, keys: Sequence[Key]) -> list[Key]:
        prefix: list[Key] = []
        for key in keys:
            found = self.objects.get(key)
            if found is None or not found.visible:
                break
            prefix.append(key)
        return prefix

    # ------------------------------------------------------------ reading

    def match(
        self, engine: str, lease: int, keys: Sequence[Key], now: float, answer: MatchResult
    ) -> None:
        prefix = self.visible_prefix(keys)
        self.engines[engine].leases.pop(lease, None)
        require(answer.chunks == len(prefix), f"match says {answer.chunks}, not {len(prefix)}")
        if prefix:
            self.engines[engine].leases[lease] = prefix
            self.objects[prefix[-1]].used = now
        if len(prefix) == len(keys):
            require(answer.reason is None, "a reason without a miss")
            return
        missing = keys[len(prefix)]
        if missing in self.objects:
            expected = (Reason.BEING_WRITTEN, 0.0)
        elif missing in self.evicted:
            expected = (Reason.EVICTED, now - self.evicted[missing])
        else:
            expected = (Reason.NEVER_SEEN, 0.0)
        if not self.remembers_all and answer.reason is Reason.NEVER_SEEN:
            expected = (Reason.NEVER_SEEN, 0.0) if missing not in self.objects else expected
        require((answer.reason, answer.age_seconds) == expected, f"{answer} is not {expected}")

    def locate(
        self, engine: str, lease: int, first: int, count: int, answer: list[int] | None
    ) -> None:
        chain = self.engines[engine].leases.get(lease)
        if chain is None or first + count > len(chain):
            require(answer is None, "slots of chunks that are not leased")
            return
        require(answer is not None and len(answer) == count, "wrong number of slots")
        assert answer is not None
        for key, offset in zip(chain[first : first + count], answer, strict=True):
            self.require_bytes(key, offset)

    def require_bytes(self, key: Key, offset: int) -> None:
        """A reader of the slot finds exactly the named bytes, of every rank."""
        found = self.objects.get(key)
        require(found is not None and found.visible, f"{key} is handed out, but not visible")
        assert found is not None
        for rank in range(found.world):
            held = self.memory.get((offset, rank))
            require(held == key, f"slot {offset} of {key} holds {held} in the part of rank {rank}")

    # ------------------------------------------------------------ writing

    def reserve(
        self, engine: str, step: int, parent: Key | None, keys: Sequence[Key], size: int,
        now: float, answer: ChainResult, gone: set[Key], expired: list[Settlement],
    ) -> None:  # fmt: skip
        late = [
            number
            for number, w in self.writers.items()
            if w.open and w.engine == engine and w.step < step - self.reservation_steps
        ]
        self.abort_all(engine, late, Reason.RESERVATION_EXPIRED, expired)
        blocked = self.cannot_follow(engine, parent)
        if blocked is not None:
            require(answer == ChainResult(0, [], [], blocked), f"{answer} after {blocked}")
            require(not gone, "evicted for nothing")
            return
        before = len(self.objects)
        self.evict(gone, set(keys) | set(self.ancestry(parent)), now)
        present = 0
        placed = 0
        for key in keys:
            found = self.objects.get(key)
            if found is None:
                if placed == len(answer.reservations):
                    self.require_no_room(engine, size, set(self.ancestry(parent)), answer.reason)
                    break
                number, offset = answer.reservations[placed], answer.offsets[placed]
                self.hand_out(engine, step, number, offset, size, key, parent, now)
                placed += 1
            elif found.visible:
                present += 1
                found.used = now
            else:
                require(answer.reason is Reason.BEING_WRITTEN, "somebody is writing it")
                break
            parent = key
        else:
            require(answer.reason is None, f"{answer.reason}, though nothing stopped the chain")
        require(answer.present == present, f"{answer.present} present, not {present}")
        require(len(answer.reservations) == len(answer.offsets) == placed, "slots too many")
        self.require_needed(before, placed, gone)

    def cannot_follow(self, engine: str, parent: Key | None) -> Reason | None:
        if parent is None:
            return None
        found = self.objects.get(parent)
        if found is None:
            return Reason.PARENT_MISSING
        if not found.visible and self.writers[found.number].engine != engine:
            return Reason.BEING_WRITTEN
        return None

    def evict(self, gone: set[Key], spared: set[Key], now: float) -> None:
        """Allowed only leaf by leaf; and the oldest leaf first, where sizes do not matter."""
        left = set(gone)
        while left:
            leaves = self.leaves(spared)
            if self.slots is not None:
                oldest = min((o.used for o in leaves), default=0.0)
                leaves = [o for o in leaves if o.used == oldest]
            victims = [o.key for o in leaves if o.key in left]
            require(bool(victims), f"{left} evicted, and each was protected or not the oldest")
            self.remove(victims[0])
            self.evicted[victims[0]] = now
            left.discard(victims[0])
        self.forget_void()

    def forget_void(self) -> None:
        """A namespace that nobody works in and that holds nothing leaves no memory of it."""
        alive = {e.namespace for e in self.engines.values()} | {key[0] for key in self.objects}
        self.evicted = {key: when for key, when in self.evicted.items() if key[0] in alive}

    def require_needed(self, before: int, placed: int, gone: set[Key]) -> None:
        if self.slots is not None:
            quarantined = sum(not w.open for w in self.writers.values())
            free = self.slots - before - quarantined
            require(len(gone) == max(0, placed - free), "evicted more than what was needed")

    def require_no_room(
        self, engine: str, size: int, spared: set[Key], reason: Reason | None
    ) -> None:
        require(reason in ROOM_REASONS, f"refused for {reason}")
        if reason is Reason.TOO_MANY_RESERVATIONS:
            require(self.held(engine) >= self.max_reservations, "not too many reservations")
        elif reason is Reason.NO_ROOM:
            namespace = self.engines[engine].namespace
            for leaf in self.leaves(spared):
                same = leaf.key[0] == namespace and leaf.size == size
                require(not same, f"no room, though {leaf.key} could have gone")

    def hand_out(
        self, engine: str, step: int, number: int, offset: int, size: int, key: Key,
        parent: Key | None, now: float,
    ) -> None:  # fmt: skip
        require(number not in self.writers, "a reservation's number was used again")
        for used in [*self.objects.values(), *self.writers.values()]:
            overlap = used.offset < offset + size and offset < used.offset + used.size
            require(not overlap, f"slot {offset} was handed out while {used} has it")
        world = self.engines[engine].world
        for rank in range(world):
            self.memory[offset, rank] = None  # anything, from now on
        self.writers[number] = Writer(engine, key, offset, size, step, set(range(world)))
        self.objects[key] = Object(key, parent, offset, size, world, now, number)
        self.evicted.pop(key, None)
        if parent is not None:
            self.objects[parent].used = now

    def commit(
        self, engine: str, rank: int, number: int, now: float, answer: list[Settlement]
    ) -> None:
        writer = self.writers.get(number)
        stored: list[int] = []
        if writer is not None and rank in writer.ranks:
            writer.ranks.discard(rank)
            self.memory[writer.offset, rank] = writer.key
            if not writer.open and not writer.ranks:
                del self.writers[number]
            elif writer.open:
                self.show(writer.key, now, stored)
        expected = [Settlement(engine, stored, [])] if stored else []
        require(sorted_parts(answer) == sorted_parts(expected), f"{answer} is not {expected}")
        shown = [number for settlement in answer for number in settlement.stored]
        require(len(shown) == len(set(shown)), "settled twice")

    def show(self, key: Key, now: float, stored: list[int]) -> None:
        found = self.objects[key]
        complete = not found.visible and not self.writers[found.number].ranks
        if complete and (found.parent is None or self.objects[found.parent].visible):
            found.visible, found.used = True, now
            del self.writers[found.number]
            stored.append(found.number)
            for child in self.children(key):
                self.show(child.key, now, stored)

    def abort(
        self, engine: str, rank: int | None, number: int, reason: Reason, answer: list[Settlement]
    ) -> None:
        writer = self.writers.get(number)
        if writer is None:
            require(not answer, "nothing was open")
            return
        writer.ranks -= writer.ranks if rank is None else {rank}
        self.abort_all(engine, [number] if writer.open else [], reason, answer)
        self.sweep()

    def abort_all(
        self, engine: str, numbers: list[int], reason: Reason, answer: list[Settlement]
    ) -> None:
        """These and all that hangs on them end; who may be writing may go on writing."""
        doomed: list[int] = []
        stack = [self.writers[number].key for number in numbers]
        while stack:
            found = self.objects.get(stack.pop())
            if found is not None and found.number not in doomed:
                require(not found.visible, "something visible hangs on what is not")
                doomed.append(found.number)
                stack += [child.key for child in self.children(found.key)]
        for number in sorted(doomed, reverse=True):  # a child's number is above its parent's
            self.remove(self.writers[number].key)
            self.writers[number].open = False
        expected = [Settlement(engine, [], doomed, reason)] if doomed else []
        require(sorted_parts(answer) == sorted_parts(expected), f"{answer} is not {expected}")
        self.sweep()

    def sweep(self) -> None:
        done = [n for n, w in self.writers.items() if not w.open and not w.ranks]
        for number in done:
            del self.writers[number]

    # ------------------------------------------------------------ lifetimes

    def attach(self, engine: str, namespace: NamespaceId, world: int) -> None:
        self.engines[engine] = Engine(namespace, world)
        self.forget_void()

    def let_go(self, engine: str, rank: int) -> None:
        """The rank does not write what was aborted before."""
        for writer in self.writers.values():
            if writer.engine == engine and not writer.open:
                writer.ranks.discard(rank)
        self.sweep()

    def drop(self, engine: str, gone_rank: int | None, answer: list[Settlement]) -> None:
        self.engines[engine].leases.clear()
        for writer in self.writers.values():
            if writer.engine == engine:
                writer.ranks.discard(-1 if gone_rank is None else gone_rank)
        numbers = [n for n, w in self.writers.items() if w.open and w.engine == engine]
        self.abort_all(engine, numbers, Reason.WRITER_GONE, answer)
        self.sweep()

    def forget(self, engine: str, answer: list[Settlement]) -> None:
        self.drop(engine, None, answer)
        self.writers = {n: w for n, w in self.writers.items() if w.engine != engine}
        del self.engines[engine]
        self.forget_void()

    def clear(self, namespace: NamespaceId | None, answer: int) -> None:
        def meant(key: Key) -> bool:
            return namespace is None or key[0] == namespace

        dropped = 0
        while leaves := [o for o in self.leaves(set()) if meant(o.key)]:
            self.remove(leaves[0].key)
            dropped += 1
        self.evicted = {k: v for k, v in self.evicted.items() if not meant(k)}
        self.forget_void()
        require(answer == dropped, f"{answer} dropped, not {dropped}")


def sorted_parts(settlements: list[Settlement]) -> list[tuple[str, list[int], list[int], object]]:
    return [(s.engine, sorted(s.stored), sorted(s.aborted), s.reason) for s in settlements]
