"""Reports of engines: what is taken, what is kept, and how much one answer can hold."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from kvledger.errors import RefusedError
from kvledger.fates import FINAL
from kvledger.protocol import MAX_FRAME_BYTES, MAX_REPORT_RUNS, Report, encode
from kvledger.reasons import Reason
from kvledger.server.reports import Reports
from kvledger.server.status import (
    AccountTotals,
    EngineStatus,
    MemoryStatus,
    ServerStatus,
    StatusDocument,
    Totals,
    encode_document,
)
from kvledger.vllm.accounts import Accounts, reportable, run_lengths

HUGE = 1 << 63


def report(**changes: object) -> Report:
    fields = {
        "id": 1,
        "request": "r",
        "tokens": 16,
        "chunk_tokens": 16,
        "local_tokens": 0,
        "external_tokens": 0,
        "miss": "",
        "fates": [("stored", 1)],
        "dropped": {},
        "imbalance": "",
    }
    return Report(**{**fields, **changes})


def explained(reports: Reports, request: str = "") -> list[dict[str, object]]:
    document = msgspec.json.decode(msgspec.json.encode(reports.latest(request, 1.0)))
    return document["accounts"]


@pytest.mark.parametrize("word", [*FINAL, *(f"skipped:{reason}" for reason in Reason)])
def test_every_fate_is_taken(word: str) -> None:
    reports = Reports()
    reports.add("e", report(fates=[(word, 3)], dropped={word: 2}), 0.0)
    assert reports.fates == {word: 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"fates": [("eaten", 1)]},
        {"fates": [("stored:no_room" * 1000, 1)]},
        {"dropped": {"skipped:whim": 1}},
        {"fates": [("stored", 1)] * (MAX_REPORT_RUNS + 1)},
        {"tokens": HUGE},
        {"tokens": -1},
        {"chunk_tokens": -1},
        {"local_tokens": HUGE},
        {"external_tokens": HUGE},
        {"fates": [("stored", -1)]},
        {"fates": [("stored", 1 << 31)] * 3},
        {"dropped": {"stored": HUGE}},
    ],
)
def test_what_no_engine_reports_is_refused_and_not_counted(changes: dict[str, object]) -> None:
    reports = Reports()
    with pytest.raises(RefusedError) as caught:
        reports.add("e", report(**changes), 0.0)
    assert len(str(caught.value)) < 400
    assert (reports.received, reports.tokens, explained(reports)) == (0, 0, [])


def test_texts_are_cut_and_still_found() -> None:
    reports = Reports()
    long = "x" * 10_000
    reports.add("e", report(request=long, miss=long, imbalance=long), 0.0)
    (account,) = explained(reports, long)
    assert {account[key] for key in ("request", "miss", "imbalance")} == {"x" * 256}


def test_an_answer_fits_into_a_frame_and_begins_with_the_newest() -> None:
    reports = Reports()
    worst = "\x01" * 256
    for number in range(1024):
        name = f"{number:04}" + worst
        runs = [("skipped:too_many_reservations", 1 << 20)] * 63
        reports.add(worst, report(request=name, miss=worst, imbalance=worst, fates=runs), 0.0)
    document = msgspec.json.encode(reports.latest("", 1.0))
    assert len(document) < MAX_FRAME_BYTES * 0.6
    shown = [str(account["request"])[:4] for account in explained(reports)]
    assert shown == [f"{number:04}" for number in range(1023, 1023 - len(shown), -1)]
    assert 200 < len(shown) < 1024


@dataclass
class Chunks:
    """An account as far as its report looks at it."""

    fates: list[str]
    reasons: dict[int, Reason]


def test_run_lengths_are_bounded_and_lose_no_chunk() -> None:
    few = Chunks(["stored", "stored", "skipped"], {2: Reason.NO_ROOM})
    assert run_lengths(few) == [("stored", 2), ("skipped:no_room", 1)]
    reasons = list(Reason)
    fates = ["stored" if chunk % 2 else "skipped" for chunk in range(20_000)]
    many = Chunks(fates, {c: reasons[c % len(reasons)] for c in range(0, 20_000, 2)})
    runs = run_lengths(many)
    every_word = {f"skipped:{reason}": 1 for reason in Reason} | dict.fromkeys(FINAL, 1)
    reports = Reports()
    reports.add("e", report(fates=runs, dropped=every_word), 0.0)
    assert reports.fates["stored"] == 10_000
    assert reports.fates.total() == 20_000


@pytest.mark.parametrize("text", ["x" * (9 << 20), "\ud800" * 300, "\U0001f600" * 300, "\0\x1b"])
def test_any_request_id_can_be_reported(text: str) -> None:
    name = reportable(text)
    assert len(name) <= 256
    assert len(encode(report(request=name))) < 4096


class Server:
    """Takes what a channel sends, as far as its encoding."""

    usable = True

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, make) -> bool:
        self.frames.append(encode(make(1)))
        return True


class Over:
    """A request that is over."""

    def __init__(self, request_id: str) -> None:
        self.load = None
        self.miss = None
        self.first_local_tokens = None
        self.external_tokens = 0
        self.request = self
        self.num_tokens = 16
        self.account = self
        self.request_id = request_id
        self.chunk_tokens = 16
        self.open_chunks = 0
        self.ended = True
        self.fates = ["stored"]
        self.reasons: dict[int, Reason] = {}
        self.dropped: dict[str, int] = {}

    def end(self) -> None:
        pass

    def balance(self) -> dict[str, int]:
        return {"stored": 1}

    def imbalance(self) -> str:
        return "\ud800" * (9 << 20)


@pytest.mark.parametrize("request_id", ["x" * (9 << 20), "\ud800"])
def test_closing_an_account_never_raises(request_id: str) -> None:
    server = Server()
    accounts = Accounts(server)
    accounts.begin_closing(Over(request_id))
    assert (accounts.closed, len(server.frames)) == (1, 1)
    assert len(server.frames[0]) < 4096


def test_a_status_document_fits_into_a_frame() -> None:
    engine = EngineStatus(
        engine="\x01" * 256,
        label="\x01" * 512,
        world_size=1,
        scheduler_attached=True,
        ranks_attached=[0],
        namespace="n",
        waiting_for=[],
        trouble="",
    )
    document = StatusDocument(
        server=ServerStatus(
            version="1",
            boot="b",
            pid=1,
            uptime_seconds=0.0,
            socket="s",
            http="",
            sessions=4096,
            draining=False,
        ),
        memory=MemoryStatus(
            **dict.fromkeys(
                set(MemoryStatus.__struct_fields__) - {"growth", "growth_limited_by"}, 0
            ),
            growth="complete",
            growth_limited_by="",
        ),
        engines=[engine] * 4096,
        namespaces=[],
        totals=Totals(
            **dict.fromkeys(set(Totals.__struct_fields__) - {"aborted", "refused"}, 0),
            aborted={},
            refused={},
        ),
        accounts=AccountTotals(
            reports=0, unbalanced=0, tokens=0, local_tokens=0, external_tokens=0, fates={}
        ),
    )
    encoded = encode_document(document)
    assert len(encoded) < MAX_FRAME_BYTES
    shown = msgspec.json.decode(encoded, type=StatusDocument)
    assert 100 < len(shown.engines) < 4096
