"""The audit: right connectors come out clean, and each wrong one under the heading of its fault."""

# ruff: noqa: ARG002
from __future__ import annotations

import os
import threading
import time

import pytest

from kvledger.errors import ConfigurationError
from kvledger.sim.audit import audit
from kvledger.sim.audit.report import Books, Finding, Heading, SituationReport
from kvledger.sim.audit.situations import SITUATIONS
from kvledger.sim.audit.subject import Patience
from sim_reference_connector import (
    LateStoreConnector,
    ReferenceConnector,
    SaltBlindConnector,
    StrayWriteConnector,
    TwiceReportedConnector,
    UncappedConnector,
    WrongTargetConnector,
)

AT_ONCE = Patience(warmup_seconds=0.0, settle_seconds=0.0)
"""For connectors that do everything within a step."""

HASTY = Patience(warmup_seconds=0.0, settle_seconds=0.0, stuck_seconds=0.3)
"""For connectors that are known never to answer."""


def played(connector, *situations, extra_config=None, patience=AT_ONCE):
    """The report of a few situations."""
    return audit(connector, extra_config=extra_config, situations=situations, patience=patience)


# ---- right ones --------------------------------------------------------------------------------


LIVELY = (
    "short prompts",
    "asked again",
    "preempt and resume",
    "abort in load",
    "drafts, async",
    "two ranks",
)
"""Situations in which everything stored comes back, and what happens is not trivial."""

OPTIONS = [{}, {"delay": 2}, {"load": "sync"}]


def assert_clean(report, most_lost=0):
    assert report.is_clean, [str(f) for s in report.situations for f in s.faults]
    for situation in report.situations:
        assert situation.books.loaded > 0
        assert situation.books.loaded == situation.books.promised
        assert 0 <= situation.books.computed - situation.books.stored <= most_lost, situation


@pytest.mark.parametrize("options", OPTIONS)
def test_reference_connector_is_clean_and_gives_everything_back(options):
    # A synchronous load cannot bring the last block of a prompt that ends with it.
    most_lost = 1 if options.get("load") == "sync" else 0
    assert_clean(played(ReferenceConnector, *LIVELY, extra_config=options), most_lost)


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS)
def test_reference_connector_is_clean_in_all_situations(options):
    report = audit(ReferenceConnector, extra_config=options, patience=AT_ONCE)
    assert [s.name for s in report.situations] == [s.name for s in SITUATIONS]
    # An abort can catch a block between its last token and the step after, which would store it.
    assert_clean(report, most_lost=10)


def test_books_of_a_single_prompt():
    """1003 tokens and then 8 more: 62 full blocks of 16, and a 63rd with the answer."""
    books = played(ReferenceConnector, "single prompt").situation("single prompt").books
    # Loads: the prompt in the engine itself, then the prompt and the whole text in the second one.
    loads = 62 + 62 + 63
    assert books == Books(requests=2, steps=9, computed=63, stored=63, promised=loads, loaded=loads)


def test_an_audit_repeats_itself():
    first, second = (played(ReferenceConnector, "random").situations[0] for _ in range(2))
    assert first.books == second.books


# ---- wrong ones --------------------------------------------------------------------------------


class ForgetfulConnector(ReferenceConnector):
    """Loses every fifth block that it is to store."""

    def save(self, copies):
        copies.blocks = [b for b in copies.blocks if b[2][1][0] % 5]
        super().save(copies)


class SkippingConnector(ReferenceConnector):
    """Does not copy the last block of a load, and says that it did."""

    def finish_load(self, load):
        load.blocks.pop()
        super().finish_load(load)


class SwappedConnector(ReferenceConnector):
    """Exchanges the keys' and the values' halves of what it loads."""

    def finish_load(self, load):
        super().finish_load(load)
        for group, block_id, _ in load.blocks:
            for tensor in self.layers[group].values():
                tensor[block_id].copy_(tensor[block_id].flip(-1).clone())


class BoastfulConnector(ReferenceConnector):
    """Promises one block more than the request has."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        external, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (external + self.block_size if external else 0), is_async


class SilentConnector(ReferenceConnector):
    """Never says that a load has ended."""

    def get_finished(self, finished_req_ids):
        return None, None


class UndecidedConnector(ReferenceConnector):
    """Asks to be asked again about every prompt of some length, for ever."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.num_tokens > self.block_size:
            return None, False
        return 0, False


class KeepingConnector(ReferenceConnector):
    """Keeps the blocks of every request that ends, and never gives them back."""

    def request_finished_all_groups(self, request, block_ids):
        super().request_finished_all_groups(request, block_ids)
        return True, None


class HoardingConnector(ReferenceConnector):
    """Keeps vLLM's request objects after their end."""

    def request_finished_all_groups(self, request, block_ids):
        self.hoard = [*getattr(self, "hoard", ()), request]
        return super().request_finished_all_groups(request, block_ids)


class SendingConnector(ReferenceConnector):
    """Reports a send at the end of each request, though it has kept nothing."""

    def get_finished(self, finished_req_ids):
        return set(finished_req_ids) or None, super().get_finished(finished_req_ids)[1]


class SlowlySendingConnector(ReferenceConnector):
    """Keeps the blocks of every request that ends for some steps; allowed, and done right."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.kept = []

    def request_finished_all_groups(self, request, block_ids):
        super().request_finished_all_groups(request, block_ids)
        return True, None

    def get_finished(self, finished_req_ids):
        self.kept.append(set(finished_req_ids))
        sent = self.kept.pop(0) if len(self.kept) > 3 else None
        return sent or None, super().get_finished(finished_req_ids)[1]


class OneRankConnector(ReferenceConnector):
    """Only rank 0 says that a load has ended."""

    def get_finished(self, finished_req_ids):
        answer = super().get_finished(finished_req_ids)
        return answer if self.rank == 0 else (None, None)


class RaisingConnector(ReferenceConnector):
    """Cannot load."""

    def finish_load(self, load):
        raise RuntimeError("no such file")


class BlockingConnector(ReferenceConnector):
    """A hook that waits for what nobody does."""

    def finish_load(self, load):
        threading.Event().wait()


class DyingConnector(ReferenceConnector):
    """Takes its process with it."""

    def finish_load(self, load):
        os.kill(os.getpid(), 9)


class UnbuildableConnector(ReferenceConnector):
    """Finds no server."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        raise ConnectionError("nobody listens")


WRONG = [
    (SkippingConnector, "single prompt", {Heading.WRONG_BYTES, Heading.WRONG_OUTPUT}),
    (SwappedConnector, "single prompt", {Heading.WRONG_BYTES, Heading.WRONG_OUTPUT}),
    (SaltBlindConnector, "salts", {Heading.WRONG_BYTES, Heading.WRONG_OUTPUT}),
    (UncappedConnector, "drafts", {Heading.WRONG_BYTES, Heading.WRONG_OUTPUT}),
    (StrayWriteConnector, "single prompt", {Heading.FOREIGN_WRITE}),
    (BoastfulConnector, "whole blocks", {Heading.OVER_REPORTED, Heading.CRASHED}),
    (TwiceReportedConnector, "single prompt", {Heading.UNASKED, Heading.CRASHED}),
    (SendingConnector, "single prompt", {Heading.UNASKED, Heading.CRASHED}),
    (SilentConnector, "single prompt", {Heading.HUNG, Heading.MISSING, Heading.LEAKED}),
    (OneRankConnector, "two ranks", {Heading.HUNG, Heading.MISSING, Heading.LEAKED}),
    (UndecidedConnector, "single prompt", {Heading.HUNG, Heading.MISSING}),
    (KeepingConnector, "single prompt", {Heading.MISSING, Heading.LEAKED}),
    (HoardingConnector, "salts", {Heading.LEAKED}),
    (RaisingConnector, "single prompt", {Heading.CRASHED}),
    (UnbuildableConnector, "single prompt", {Heading.CRASHED}),
]


@pytest.mark.parametrize(("connector", "situation", "headings"), WRONG)
def test_wrong_connectors_are_found_under_their_heading(connector, situation, headings):
    report = played(connector, situation, patience=HASTY)
    assert report.headings() == headings, [str(f) for f in report.situations[0].findings]
    assert not report.is_clean


def test_kept_blocks_that_are_sent_later_are_no_fault():
    assert_clean(played(SlowlySendingConnector, "single prompt", "salts"))


def test_lost_blocks_are_not_stored_and_no_fault():
    situation = played(ForgetfulConnector, "single prompt").situations[0]
    assert situation.books.stored < situation.books.computed == 63
    assert [finding.heading for finding in situation.findings] == [Heading.NOT_STORED]
    assert not situation.faults


def test_every_wrong_block_is_counted():
    """Each of the three loads of "single prompt" lacks its last block."""
    books = played(SkippingConnector, "single prompt").situations[0].books
    assert books.wrong == 3
    assert books.loaded == 62 + 62 + 63


def test_blocks_read_too_late_hold_other_bytes_after_a_preemption():
    report = played(LateStoreConnector, "preempt and resume")
    assert report.situations[0].books.wrong > 0
    assert Heading.WRONG_BYTES in report.headings()


def test_loads_into_held_blocks_are_seen():
    report = played(WrongTargetConnector, "local and external")
    assert report.headings() & {Heading.FOREIGN_WRITE, Heading.WRONG_BYTES}


def test_failed_loads_are_not_loaded_and_no_fault():
    report = played(ReferenceConnector, "single prompt", extra_config={"failures": 1.0})
    books = report.situations[0].books
    assert report.is_clean
    assert (books.promised, books.loaded) == (187, 0)


def test_a_blocked_hook_does_not_end_the_audit():
    patience = Patience(warmup_seconds=0.0, settle_seconds=0.0, situation_seconds=15.0)
    began = time.monotonic()
    report = played(BlockingConnector, "single prompt", patience=patience)
    (situation,) = report.situations
    (finding,) = situation.faults
    assert finding.heading is Heading.HUNG
    assert "finish_load" in finding.text
    assert situation.books.promised > 0
    assert time.monotonic() - began < 10 * patience.situation_seconds


def test_a_dead_process_does_not_end_the_audit():
    report = played(DyingConnector, "single prompt", "short prompts")
    (finding,) = report.situation("single prompt").faults
    assert finding.heading is Heading.CRASHED
    assert "SIGKILL" in finding.text


def test_an_unknown_situation_is_refused():
    with pytest.raises(ConfigurationError, match="no such situation: dance; there are single"):
        played(ReferenceConnector, "dance")


def test_what_counts_as_a_violation():
    kinds = {heading for heading in Heading if _report_of(heading).violations}
    bytes_and_leaks = {Heading.WRONG_BYTES, Heading.WRONG_OUTPUT, Heading.LEAKED}
    assert kinds == set(Heading) - bytes_and_leaks - {Heading.NOT_STORED}


def _report_of(heading):
    return SituationReport(name="one", purpose="", findings=(Finding(heading, "a"),))
