"""The situations of an audit: short lives of engines, each with something to ask of a connector.

Lengths are chosen so that most prompts end inside a block, and so that units of storage of up to
256 tokens fill several times.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

from vllm.lora.request import LoRARequest

from kvledger.sim.audit.scene import Scene
from kvledger.sim.engine import SimulatedEngine
from kvledger.sim.model import EngineFields

LENGTH = 1003
RANDOM_STEPS = 300
LIVE_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Situation:
    """A name, what it asks of a connector, and how it is played."""

    name: str
    purpose: str
    play: Callable[[Scene], None]


def _single(scene: Scene) -> None:
    engine = scene.engine()
    tokens = scene.text("a", LENGTH)
    scene.ask(engine, tokens)
    scene.forget(engine)
    scene.ask(engine, tokens, max_tokens=8)


def _whole_blocks(scene: Scene) -> None:
    engine = scene.engine()
    tokens = scene.text("a", 64 * scene.subject.block_size)
    scene.ask(engine, tokens)
    scene.forget(engine)
    scene.ask(engine, tokens, max_tokens=8)


def _short(scene: Scene) -> None:
    engine = scene.engine()
    size = scene.subject.block_size
    for _ in range(2):
        for count in (1, 2, size - 1, size, size + 1):
            scene.ask(engine, scene.text(count, count), max_tokens=2)
            scene.forget(engine)


def _prefill_in_steps(scene: Scene) -> None:
    engine = scene.engine(max_batched_tokens=200)
    tokens = scene.text("a", LENGTH)
    scene.ask(engine, tokens, max_tokens=4)
    scene.forget(engine)
    scene.ask(engine, [*tokens, *scene.text("b", 450)], max_tokens=4)
    scene.forget(engine)
    scene.ask(engine, tokens, max_tokens=4)


def _local_and_external(scene: Scene) -> None:
    engine = scene.engine()
    tokens = scene.text("a", LENGTH)
    scene.ask(engine, tokens)
    for held in (150, 600, 980):
        scene.forget(engine)
        scene.ask(engine, tokens[:held])
        scene.ask(engine, tokens, max_tokens=4)


def _odd_offsets(scene: Scene) -> None:
    engine = scene.engine()
    trunk = scene.text("trunk", LENGTH)
    scene.ask(engine, trunk[:777])
    for label, shared, own in (("b", 777, 300), ("c", 333, 400), ("d", 259, 259), ("e", 520, 41)):
        scene.forget(engine)
        scene.ask(engine, [*trunk[:shared], *scene.text(label, own)], max_tokens=3)
    scene.forget(engine)
    scene.ask(engine, [*trunk[:333], *scene.text("c", 400)], max_tokens=3)


def _asked_again(scene: Scene) -> None:
    engine = scene.engine(num_blocks=80, max_batched_tokens=512)
    texts = [scene.text(number, 700) for number in range(3)]
    for _ in range(2):
        for tokens in texts:
            engine.add(tokens, max_tokens=3)
        scene.run(engine)
        scene.forget(engine)


def _decode(scene: Scene) -> None:
    engine = scene.engine()
    tokens = scene.text("a", 403)
    for turn in range(3):
        request = scene.ask(engine, tokens, max_tokens=130)
        scene.forget(engine)
        tokens = [*tokens, *engine.outputs[request], *scene.text(f"turn {turn}", 37)]


def _preempted(scene: Scene) -> None:
    engine = scene.engine(num_blocks=72, max_batched_tokens=256)
    texts = [scene.text(number, 257 + 5 * number) for number in range(6)]
    for _ in range(2):
        for tokens in texts:
            engine.add(tokens, max_tokens=150)
        scene.run(engine)
        scene.forget(engine)


def _aborted_in_queue(scene: Scene) -> None:
    engine = scene.engine(max_requests=2)
    tokens = scene.text("a", LENGTH)
    scene.ask(engine, tokens)
    scene.forget(engine)
    for steps in (0, 1, 2):
        requests = [engine.add(scene.text(number, 300), max_tokens=20) for number in range(2)]
        requests += [engine.add(tokens, max_tokens=4) for _ in range(2)]
        for _ in range(steps):
            scene.tolerate(engine.step)
        engine.abort(requests[2])
        scene.run(engine)
        scene.forget(engine)


def _aborted_in_load(scene: Scene, phases: int) -> None:
    """Abort when so many phases of the step that begins the load have passed after the first."""
    engine = scene.engine(num_blocks=72)
    tokens = scene.text("a", LENGTH)
    scene.ask(engine, tokens)
    scene.forget(engine)
    request = engine.add(tokens, max_tokens=4)
    scene.begin_until_admitted(engine, request)
    for phase in ("work", "finish")[:phases]:
        scene.advance(engine, phase)
    engine.abort(request)
    for phase in ("work", "finish")[phases:]:
        scene.advance(engine, phase)
    # The pool is small: another request gets the blocks that the load was to fill.
    scene.ask(engine, scene.text("next", LENGTH), max_tokens=4)
    scene.forget(engine)
    scene.ask(engine, tokens, max_tokens=4)


def _aborted_running(scene: Scene) -> None:
    engine = scene.engine(num_blocks=72, max_batched_tokens=300)
    for number, steps in enumerate((1, 2, 4, 20)):
        request = engine.add(scene.text(number, 900), max_tokens=40)
        for _ in range(steps):
            scene.tolerate(engine.step)
        engine.abort(request)
        scene.ask(engine, scene.text(f"next {number}", 900), max_tokens=4)
        scene.forget(engine)
        scene.ask(engine, scene.text(number, 900), max_tokens=4)


def _several(scene: Scene, **fields: Unpack[EngineFields]) -> None:
    """Prompts with common beginnings and some generation, asked twice, on one kind of engine."""
    engine = scene.engine(**fields)
    trunk = scene.text("trunk", 600)
    for _ in range(2):
        for number in range(4):
            own = scene.text(number, 90 + 70 * number)
            engine.add([*trunk[: 200 * number], *own], max_tokens=60)
        scene.run(engine)
        scene.forget(engine)


def _asynchronous(scene: Scene) -> None:
    _several(scene, async_scheduling=True)


def _drafts(scene: Scene) -> None:
    _several(scene, drafts=3)


def _asynchronous_drafts(scene: Scene) -> None:
    _several(scene, drafts=3, async_scheduling=True)


def _runner_two(scene: Scene) -> None:
    _several(scene, model_runner=2, async_scheduling=True)


def _ranks(scene: Scene) -> None:
    _several(scene, ranks=2, pickle_metadata=True)


def _second_engine(scene: Scene) -> None:
    engines = [scene.engine(), scene.engine(max_batched_tokens=300)]
    tokens = scene.text("a", 500)
    for turn in range(4):
        engine = engines[turn % 2]
        request = scene.ask(engine, tokens, max_tokens=20)
        scene.settle(engine)
        tokens = [*tokens, *engine.outputs[request], *scene.text(f"turn {turn}", 120)]


def _salts(scene: Scene) -> None:
    engine = scene.engine()
    tokens = scene.text("a", 600)
    for _ in range(2):
        for salt in (None, "one", "two"):
            scene.ask(engine, tokens, salt=salt, max_tokens=4)
            scene.forget(engine)


def _adapters(scene: Scene) -> None:
    engine = scene.engine()
    tokens = scene.text("a", 600)
    for _ in range(2):
        for adapter in (None, _adapter(scene, 1), _adapter(scene, 2)):
            scene.ask(engine, tokens, adapter=adapter, max_tokens=4)
            scene.forget(engine)


def _adapter(scene: Scene, number: int) -> LoRARequest:
    path = scene.subject.scratch / f"adapter-{number}"
    Path(path).mkdir(exist_ok=True)
    return LoRARequest(f"adapter-{number}", number, str(path))


def _random(scene: Scene) -> None:
    tight: EngineFields = {"num_blocks": 72, "max_batched_tokens": 200}
    _live(scene, scene.engine(**tight))


def _random_asynchronous(scene: Scene) -> None:
    tight: EngineFields = {"num_blocks": 72, "max_batched_tokens": 200}
    tight |= {"async_scheduling": True, "drafts": 2}
    _live(scene, scene.engine(**tight))


def _live(scene: Scene, engine: SimulatedEngine) -> None:
    """Some hundred steps of arrivals, aborts and resets of vLLM's own cache."""
    rng = random.Random(f"{scene.subject.seed} {scene.name}")
    trunks = [scene.text(f"trunk {number}", 600) for number in range(3)]
    for number in range(RANDOM_STEPS):
        live = [r.request_id for r in engine.scheduler.requests.values() if not r.is_finished()]
        chance = rng.random()
        if chance < 0.15 and len(live) < LIVE_LIMIT:
            shared = rng.choice((0, rng.randrange(600)))
            own = scene.text(f"own {number}", rng.randint(2, 150))
            salt = rng.choice((None, None, None, "salt"))
            tokens = [*rng.choice(trunks)[:shared], *own]
            engine.add(tokens, max_tokens=rng.choice((1, 8, 60)), salt=salt)
        elif chance < 0.18 and live:
            engine.abort(rng.choice(live))
        elif chance < 0.20:
            engine.reset_prefix_cache()
        scene.tolerate(engine.step)
    scene.run(engine)


SITUATIONS: tuple[Situation, ...] = (
    Situation("single prompt", "store a prompt, bring it back", _single),
    Situation(
        "whole blocks", "a hit over the whole prompt leaves a token to compute", _whole_blocks
    ),
    Situation("short prompts", "one token, and lengths around one block", _short),
    Situation("prefill in steps", "a prompt is computed over several steps", _prefill_in_steps),
    Situation("local and external", "load only what the engine does not hold", _local_and_external),
    Situation("odd offsets", "prompts part inside a unit of storage", _odd_offsets),
    Situation("asked again", "look-ups are repeated while no blocks are free", _asked_again),
    Situation("decode growth", "generated tokens fill blocks, turn by turn", _decode),
    Situation("preempt and resume", "requests lose their blocks and come back", _preempted),
    Situation("abort in queue", "a request goes before it was admitted", _aborted_in_queue),
    Situation(
        "abort before load",
        "a request goes before the workers hear of its load",
        partial(_aborted_in_load, phases=0),
    ),
    Situation(
        "abort in load",
        "a request goes in the step in which its load began",
        partial(_aborted_in_load, phases=1),
    ),
    Situation(
        "abort after load",
        "a request goes after the step in which its load began",
        partial(_aborted_in_load, phases=2),
    ),
    Situation("abort while running", "a request goes in prefill or decode", _aborted_running),
    Situation("async scheduling", "a step is scheduled before the last one ended", _asynchronous),
    Situation("drafts", "rejected draft tokens leave other bytes behind", _drafts),
    Situation("drafts, async", "both together", _asynchronous_drafts),
    Situation("runner 2, async", "the call order of vLLM's model runner 2", _runner_two),
    Situation("two ranks", "a block is whole when both ranks' parts are", _ranks),
    Situation("second engine", "two engines continue each other's texts", _second_engine),
    Situation("salts", "equal tokens under other salts are other blocks", _salts),
    Situation("adapters", "equal tokens under other adapters are other blocks", _adapters),
    Situation("random", "some hundred steps in a tight pool", _random),
    Situation("random, async, drafts", "the same, with all of it", _random_asynchronous),
)
