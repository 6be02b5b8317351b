"""Plays the situations, each in a process of its own, and gathers what was found."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvledger.errors import ConfigurationError
from kvledger.sim.audit.process import ChildDiedError, run_in_child
from kvledger.sim.audit.report import (
    AuditReport,
    Books,
    Finding,
    Heading,
    SituationReport,
)
from kvledger.sim.audit.scene import Scene
from kvledger.sim.audit.situations import SITUATIONS, Situation
from kvledger.sim.audit.subject import Patience, Subject
from kvledger.sim.engine import SimulatedEngine
from kvledger.sim.model import write_model

BLOCK_SIZE = 16


def audit(
    connector: type | str,
    *,
    extra_config: Mapping[str, object] | None = None,
    seed: int = 0,
    block_size: int = BLOCK_SIZE,
    situations: Collection[str] | None = None,
    patience: Patience | None = None,
    log_path: Path | None = None,
    on_start: Callable[[Situation], None] = lambda _: None,
) -> AuditReport:
    """Play all situations, or those named, and return what was found.

    Args:
        connector: the class, "module:Class", or a name that vLLM knows.
        extra_config: what a user writes into ``kv_connector_extra_config``.
        seed: of the texts and random schedules. A store that outlives an audit holds its texts:
            choose another seed, or empty the store.
        block_size: tokens in one of vLLM's blocks.
        patience: how long to wait for what.
        log_path: file that takes what the engines and the connector print; dropped if None.
        on_start: called before each situation.

    Raises:
        ConfigurationError: a situation's name is unknown.
    """
    chosen = _chosen(situations)
    patience = patience or Patience()
    if patience.is_ready is None and _is_own(connector):
        patience = replace(patience, is_ready=_is_attached, is_settled=_is_closed)
    with tempfile.TemporaryDirectory(prefix="audit-") as directory:
        scratch = Path(directory)
        write_model(scratch / "model", "base")
        subject = Subject(
            connector=connector,
            extra_config=dict(extra_config or {}),
            block_size=block_size,
            seed=seed,
            scratch=scratch,
            patience=patience,
        )
        reports = []
        for situation in chosen:
            on_start(situation)
            reports.append(_play(situation, subject, log_path))
    name = connector if isinstance(connector, str) else connector.__name__
    return AuditReport(connector=name, seed=seed, block_size=block_size, situations=tuple(reports))


def _chosen(names: Collection[str] | None) -> list[Situation]:
    known = {situation.name: situation for situation in SITUATIONS}
    unknown = set(names or ()) - known.keys()
    if unknown:
        raise ConfigurationError(
            f"no such situation: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    return [s for s in SITUATIONS if names is None or s.name in names]


def _play(situation: Situation, subject: Subject, log_path: Path | None) -> SituationReport:
    """One situation in a child of its own."""
    scene = Scene(situation.name, subject)
    started = time.monotonic()

    def report(*more: Finding) -> SituationReport:
        return SituationReport(
            name=situation.name,
            purpose=situation.purpose,
            books=scene.books(),
            findings=(*scene.notes.findings(), *more),
            seconds=time.monotonic() - started,
        )

    def live() -> SituationReport:
        logging.getLogger("vllm").setLevel(logging.WARNING)
        try:
            situation.play(scene)
        except Exception as error:
            scene.crashed(error)
        scene.finish()
        return report()

    def hung(place: str) -> SituationReport:
        seconds = subject.patience.situation_seconds
        return report(Finding(Heading.HUNG, f"no end after {seconds:g} s, stands in {place}"))

    try:
        result = run_in_child(
            live, hung, timeout_seconds=subject.patience.situation_seconds, log_path=log_path
        )
    except ChildDiedError as error:
        return SituationReport(
            name=situation.name,
            purpose=situation.purpose,
            books=Books(),
            findings=(Finding(Heading.CRASHED, str(error)),),
            seconds=time.monotonic() - started,
        )
    assert isinstance(result, SituationReport)
    return result


# ---- our own connector: when it is ready -----------------------------------------------------


def _is_own(connector: type | str) -> bool:
    name = connector if isinstance(connector, str) else connector.__name__
    return name.rpartition(":")[2] == "KVLedgerConnector"


def _is_attached(engine: SimulatedEngine) -> bool:
    """Whether both sides of our connector know the server's namespace, and it answers."""
    connector: Any = engine.connector
    workers = [rank.connector.worker for rank in engine.workers.ranks]
    namespace = connector.scheduler.namespace
    heard = all(worker._namespace == namespace for worker in workers)
    return bool(namespace) and heard and not connector.scheduler.channel.silent


def _is_closed(engine: SimulatedEngine) -> bool:
    """Whether every account of our connector is closed."""
    connector: Any = engine.connector
    return not connector.scheduler.accounts.closing
