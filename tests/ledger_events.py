"""What a scheduler and a server can do next in a :class:`ledger_world.World`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvledger.fates import Fate
from kvledger.reasons import Reason
from ledger_world import World

Event = tuple[str, Callable[[World], None]]
"""What it is called in a path, and what it does."""


def events(world: World) -> Iterator[Event]:
    """Everything that a scheduler and a server may do now."""
    account, phase = world.account, world.phase
    running = phase in ("live", "loading", "window", "ended")
    if phase == "waiting":
        yield from _admissions(world, "admit", World.admit)
    if phase == "live":
        for chunk in range(world.readable[1], world.limits.chunks + 1):
            yield f"advance({chunk})", lambda w, c=chunk: w.valid_until(c)
        if world.can_spend("preempts"):
            yield "preempt", World.preempt
            yield from _admissions(world, "preempt+admit", World.preempt_and_admit)
    if phase in ("live", "waiting") and world.can_spend("truncates"):
        for keep in range(len(account.fates)):
            yield f"truncate({keep})", lambda w, k=keep: w.truncate(k)
    if phase in ("live", "waiting", "loading"):
        yield "finish", World.finish
        if world.can_spend("heals"):
            yield "heal", World.heal
    if phase in ("loading", "closing"):
        for arrived in (True, False):
            yield f"end_load({arrived})", lambda w, a=arrived: w.end_load(a)
    if phase == "window":
        yield "leave_window", World.leave_window
    if phase == "ended":
        yield "give_up", World.give_up
    if phase != "waiting" or account.fates:
        for what, event in (("losses", World.lose_server), ("freezes", World.freeze)):
            if world.can_spend(what):
                yield what, event
    if running and len(world.questions) < world.limits.questions and any(account.runs_to_ask()):
        yield "ask", World.ask
    if running and Fate.GRANTED in account.fates:
        yield "take", World.take
    yield from _answers(world)
    yield from _settlements(world)


def _admissions(
    world: World, label: str, event: Callable[[World, int, int, bool], None]
) -> Iterator[Event]:
    chunks = world.limits.chunks
    writing = [r.name for r in world.reservations if r.place in ("account", "workers")]
    hidden = [c for c in range(chunks) if world.name(c) in writing]  # being written: no hit
    longest_hit = 0 if world.frozen else min(hidden, default=chunks)
    for local in range(chunks + 1):
        for hit in range(longest_hit + 1):
            yield (
                f"{label}({local}, {hit})",
                lambda w, x=local, h=hit: event(w, x, h, False),
            )
            if hit > local and world.can_spend("loads"):
                yield (
                    f"{label}({local}, {hit}, load)",
                    lambda w, x=local, h=hit: event(w, x, h, True),
                )


def _answers(world: World) -> Iterator[Event]:
    if not world.questions:
        return
    splits: list[tuple[tuple[int, int], ...]] = [()]
    for chunks, _ in world.questions[0].chains:
        size = len(chunks)
        pairs = [(p, g) for p in range(size + 1) for g in range(size + 1 - p)]
        splits = [(*before, pair) for before in splits for pair in pairs]
    for split in splits:
        yield f"answer{split}", lambda w, s=split: w.answer(s)


def _settlements(world: World) -> Iterator[Event]:
    for number, reservation in enumerate(world.reservations):
        if reservation.place == "workers":
            yield f"commit({number})", lambda w, n=number: w.settle(n, None)
        if reservation.place in ("account", "workers"):
            yield (
                f"abort({number})",
                lambda w, n=number: w.settle(n, Reason.WRITER_FAILED),
            )
