"""Every reason has its word and its sentence."""

from __future__ import annotations

import re

from kvledger.reasons import EXPLANATIONS, Reason


def test_every_reason_has_a_sentence() -> None:
    assert EXPLANATIONS.keys() == set(Reason)
    assert len(set(EXPLANATIONS.values())) == len(EXPLANATIONS)
    for reason, sentence in EXPLANATIONS.items():
        assert len(sentence.split()) >= 4, reason
        assert not sentence.endswith("."), reason
        assert sentence[0].islower() or sentence.startswith("vLLM"), reason


def test_words_are_stable_identifiers() -> None:
    for reason in Reason:
        assert reason.value == reason.name.lower()
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason.value)
        assert Reason(reason.value) is reason


def test_there_is_no_reason_that_says_nothing() -> None:
    assert not {"other", "unknown", "error", "none"} & {reason.value for reason in Reason}
