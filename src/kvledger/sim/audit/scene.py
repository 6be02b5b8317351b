"""One situation of an audit while it is played: its engines, its texts, and the look afterwards.

A situation asks the scene for engines and texts and lets them live. When it ends, well or not, the
scene lets everything settle, looks for what is missing or leaked, and reads every text back through
a fresh engine with another id: whatever that one is promised was stored.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from kvledger.sim.audit.process import describe
from kvledger.sim.audit.recorder import NUDGE, Recorder, Text
from kvledger.sim.audit.report import Books, Heading, Notes
from kvledger.sim.audit.subject import Subject
from kvledger.sim.engine import IDLE_SECONDS, EngineStuckError, SimulatedEngine
from kvledger.sim.model import VOCABULARY, EngineFields
from kvledger.sim.oracle import OracleError

READER_CRASHES = 3
"""Second engines that may die before the rest of the texts counts as not stored."""

TAIL = 2
"""Tokens that follow the full blocks of a text when it is read back: a connector that leaves
a token, or one more, to be computed has still to find all of these blocks."""


@dataclass(slots=True)
class _Player:
    """An engine and its recorder.

    Attributes:
        is_reader: it only looks what was stored.
        is_dead: an exception has left it somewhere between two steps.
        is_stuck: it has been noted that it does not become idle.
    """

    engine: SimulatedEngine
    recorder: Recorder
    is_reader: bool = False
    is_dead: bool = False
    is_stuck: bool = False


@dataclass(slots=True)
class _Found:
    """Full blocks by the hash of everything before and in them: whether they were found."""

    computed: set[bytes] = field(default_factory=set)
    judged: set[bytes] = field(default_factory=set)
    stored: set[bytes] = field(default_factory=set)


class Scene:
    """See the module.

    Attributes:
        notes: findings so far.
        subject: what is audited.
    """

    def __init__(self, name: str, subject: Subject) -> None:
        self.name = name
        self.subject = subject
        self.notes = Notes()
        self._players: list[_Player] = []
        self._blocks = _Found()
        self._nudges = 0

    # ---- what a situation asks for ----------------------------------------------------------

    def text(self, label: object, count: int) -> list[int]:
        """``count`` tokens; a longer text of the same label begins with the shorter one."""
        rng = random.Random(f"{self.subject.seed} {self.name} {label}")
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def engine(self, **fields: Unpack[EngineFields]) -> SimulatedEngine:
        """A warm engine of the situation; roomy unless ``fields`` say otherwise."""
        return self._build("kv_both", fields)

    def ask(self, engine: SimulatedEngine, tokens: Sequence[int], **details: Any) -> str:
        """Queue a request and run the engine until it is idle; the request's id."""
        request_id = engine.add(tokens, **details)
        self.run(engine)
        return request_id

    def run(self, engine: SimulatedEngine) -> None:
        """Run until idle. Raises EngineStuckError, or what the connector or vLLM raise."""
        while self.tolerate(
            lambda: engine.run(
                max_steps=20_000, deadline_seconds=self.subject.patience.stuck_seconds
            )
        ):
            pass

    def tolerate(self, act: Callable[[], object]) -> bool:
        """Call; True if the oracle raised. What it saw is noted, and the engine can go on."""
        try:
            act()
        except OracleError:
            return True
        return False

    def advance(self, engine: SimulatedEngine, phase: str) -> None:
        """One phase of a step if it is due: "begin", "work" or "finish"."""
        if phase == "begin" and not engine.in_flight and engine.scheduler.has_requests():
            engine.begin_step()
        elif phase == "work" and engine.waits_for_workers:
            self.tolerate(engine.run_workers)
        elif phase == "finish" and engine.in_flight and not engine.oldest_waits_for_workers:
            self.tolerate(engine.finish_step)

    def begin_until_admitted(self, engine: SimulatedEngine, request_id: str) -> bool:
        """Begin steps until vLLM has admitted a request; the last step is only begun.

        Returns whether the connector has promised it anything.
        """
        end = time.monotonic() + self.subject.patience.stuck_seconds
        while time.monotonic() < end:
            self.advance(engine, "begin")
            if engine.allocations(request_id):
                return engine.external_hit(request_id) > 0
            self.advance(engine, "work")
            self.advance(engine, "finish")
            time.sleep(IDLE_SECONDS)
        raise EngineStuckError(f"{request_id} is not admitted")

    def forget(self, engine: SimulatedEngine) -> None:
        """Let stores end, then empty vLLM's own prefix cache; the connector's stays."""
        self.settle(engine)
        engine.reset_prefix_cache()

    def settle(self, engine: SimulatedEngine) -> None:
        """Nudge an idle engine until stores have had their time and nothing is owed."""
        patience = self.subject.patience
        recorder = self._player(engine).recorder
        is_settled = patience.is_settled or (lambda _: True)
        self.run(engine)
        self._nudge_until(
            engine,
            lambda: recorder.owes_nothing and is_settled(engine),
            patience.settle_seconds,
            patience.stuck_seconds,
        )

    # ---- engines ----------------------------------------------------------------------------

    def _build(
        self, role: str, fields: EngineFields, *, is_reader: bool = False
    ) -> SimulatedEngine:
        subject = self.subject
        roomy: EngineFields = {"num_blocks": 256, "max_batched_tokens": 2048}
        chosen: EngineFields = {**roomy, "block_size": subject.block_size, **fields}
        engine = SimulatedEngine(
            subject.connector,
            extra_config=dict(subject.extra_config),
            kv_role=role,
            engine_id=f"audit-{subject.seed}-{self.name.replace(' ', '-')}-{len(self._players)}",
            model_directory=subject.scratch / "model",
            seed=subject.seed,
            **chosen,
        )
        recorder = Recorder(engine, self.notes)
        self._players.append(_Player(engine, recorder, is_reader))
        if subject.patience.is_ready is None:
            self._nudge_until(engine, lambda: True, subject.patience.warmup_seconds, 0.0)
        self._wait_until_ready(engine)
        return engine

    def _wait_until_ready(self, engine: SimulatedEngine) -> None:
        """Nudge until the connector is ready, where it can be asked."""
        is_ready = self.subject.patience.is_ready
        if is_ready is not None:
            ready = is_ready
            seconds = self.subject.patience.stuck_seconds
            self._nudge_until(engine, lambda: ready(engine), 0.0, seconds)

    def _player(self, engine: SimulatedEngine) -> _Player:
        return next(player for player in self._players if player.engine is engine)

    def _nudge_until(
        self,
        engine: SimulatedEngine,
        condition: Callable[[], bool],
        least_seconds: float,
        most_seconds: float,
    ) -> None:
        """Nudge for ``least_seconds``, then until the condition holds, for ``most_seconds``."""
        least = time.monotonic() + least_seconds
        most = least + most_seconds
        while (now := time.monotonic()) < least or (now < most and not condition()):
            self._nudges += 1
            engine.add([0, 1], request_id=f"{NUDGE}{self._nudges}")
            self.run(engine)
            time.sleep(IDLE_SECONDS)

    # ---- the end ----------------------------------------------------------------------------

    def crashed(self, error: Exception) -> None:
        """Note an exception; the newest engine is taken for dead unless it is only stuck."""
        if isinstance(error, EngineStuckError):
            self._note_stuck(error)
            return
        self.notes.add(Heading.CRASHED, *describe(error, self._connector_files()))
        for player in self._players[-1:]:
            player.is_dead = True

    def _note_stuck(self, error: EngineStuckError) -> None:
        """Note the engines that are stuck, once each.

        Where only ended requests keep an engine from being idle, nobody waits: what is missing or
        leaked then is noted as that.
        """
        for player in self._players:
            requests = player.engine.scheduler.requests.values()
            if not player.is_stuck and any(not request.is_finished() for request in requests):
                self.notes.add(Heading.HUNG, "requests wait for ever", f"({error})")
            player.is_stuck |= bool(requests)

    def finish(self) -> None:
        """Settle, look for what is missing and leaked, read everything back, close."""
        for player in self._players:
            self._conclude(player)
        texts = [text for player in self._players for text in player.recorder.texts()]
        self._read_back(texts)
        for player in self._players:
            try:
                player.engine.close()
            except Exception as error:
                if not player.is_dead:
                    self.crashed(error)

    def books(self) -> Books:
        """The numbers so far; can be asked at any time."""
        recorders = [player.recorder for player in self._players]
        own = [player.recorder for player in self._players if not player.is_reader]
        steps = [step for recorder in own for step in recorder.engine.steps]
        return Books(
            requests=sum(recorder.requests for recorder in own),
            steps=sum(any(not name.startswith(NUDGE) for name in step.scheduled) for step in steps),
            computed=len(self._blocks.computed),
            stored=len(self._blocks.stored),
            promised=sum(recorder.promised() for recorder in recorders),
            loaded=sum(recorder.loaded() for recorder in recorders),
            wrong=sum(len(recorder.wrong) for recorder in recorders),
            wrong_outputs=sum(len(recorder.wrong_outputs) for recorder in recorders),
        )

    def _conclude(self, player: _Player) -> None:
        """The end of one engine's life; a dead one owes nothing that could be told."""
        for act in (self.settle, self._note_missing, self._end_requests, self._check):
            if player.is_dead:
                return
            try:
                act(player.engine)
            except EngineStuckError as error:
                self._note_stuck(error)
            except Exception as error:
                self.crashed(error)
                player.is_dead = True

    def _note_missing(self, engine: SimulatedEngine) -> None:
        self._player(engine).recorder.protocol.note_missing()

    def _end_requests(self, engine: SimulatedEngine) -> None:
        """Abort what still lives, as clients do that have waited for too long."""
        live = [r.request_id for r in engine.scheduler.requests.values() if not r.is_finished()]
        for request_id in live:
            engine.abort(request_id)
        if live:
            self.settle(engine)

    def _check(self, engine: SimulatedEngine) -> None:
        self.tolerate(engine.check)
        self._player(engine).recorder.note_leaks()

    # ---- reading back -----------------------------------------------------------------------

    def _read_back(self, texts: Sequence[Text]) -> None:
        """Ask second engines for all texts; the first answer about a block counts.

        A second engine may store what it computes itself if the connector does not heed its role.
        So a block is judged by the first text that covers it, and never again.
        """
        size = self.subject.block_size
        for text in texts:
            self._blocks.computed |= set(self._names(text, len(text.tokens) // size))
        reader: SimulatedEngine | None = None
        crashes = 0
        for text in texts:
            for tokens in self._readings(text):
                names = self._names(text, len(tokens) // size, tokens)
                if self._blocks.computed.isdisjoint(set(names) - self._blocks.judged):
                    continue
                hit = 0
                if crashes < READER_CRASHES:
                    try:
                        reader = reader or self._reader()
                        hit = self._read(reader, text, tokens)
                    except Exception as error:
                        self.crashed(error)
                        crashes += 1
                        reader = None
                fresh = set(names) & self._blocks.computed - self._blocks.judged
                self._blocks.stored |= fresh & set(names[: hit // size])
                self._blocks.judged |= fresh
        for player in self._players:
            if player.is_reader:
                self._conclude(player)
        lost = len(self._blocks.computed) - len(self._blocks.stored)
        if lost:
            what = f"{lost} of {len(self._blocks.computed)} full blocks do not come back"
            self.notes.add(Heading.NOT_STORED, what)

    def _readings(self, text: Text) -> list[tuple[int, ...]]:
        """The prompt as it was, for a connector that knows whole prompts; then all of the text."""
        size = self.subject.block_size
        tail = tuple(self.text("tail", TAIL))
        whole = text.tokens[: len(text.tokens) // size * size] + tail
        if len(text.tokens) // size <= len(text.prompt) // size:
            return [text.prompt]
        return [text.prompt, whole]

    def _names(self, text: Text, count: int, tokens: Sequence[int] | None = None) -> list[bytes]:
        """What tells the first ``count`` blocks of a text from all others."""
        size = self.subject.block_size
        source = text.tokens if tokens is None else tokens
        adapter = text.adapter.lora_name if text.adapter is not None else ""
        digest = hashlib.blake2b(repr((text.salt or "", adapter)).encode(), digest_size=16)
        names = []
        for index in range(count):
            digest.update(repr(tuple(source[index * size : (index + 1) * size])).encode())
            names.append(digest.digest())
        return names

    def _reader(self) -> SimulatedEngine:
        """A fresh, roomy engine of the same shape that is told to load and not to store."""
        like = self._players[0].engine.options
        shape: EngineFields = {
            "ranks": like.ranks,
            "pickle_metadata": like.pickle_metadata,
            "windows": like.windows,
            "layout": like.layout,
            "num_blocks": 1024,
            "max_batched_tokens": 8192,
            "max_model_len": 8192,
        }
        return self._build("kv_consumer", shape, is_reader=True)

    def _read(self, reader: SimulatedEngine, text: Text, tokens: Sequence[int]) -> int:
        """Tokens that a fresh request for these is promised."""
        reader.reset_prefix_cache()
        self._wait_until_ready(reader)
        request_id = self.ask(reader, tokens, salt=text.salt, adapter=text.adapter)
        return reader.external_hit(request_id)

    def _connector_files(self) -> set[str]:
        """Source files of the connector's classes, vLLM's base class left out."""
        if not self._players:
            return set()
        connector = self._players[0].engine.connector
        classes = [c for c in type(connector).__mro__ if c is not object]
        files = {inspect.getsourcefile(c) or "" for c in classes}
        return {name for name in files if not name.endswith(("kv_connector/v1/base.py", "abc.py"))}
