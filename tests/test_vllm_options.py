"""Options: every key, every wrong type, and sentences that name what to write."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvledger.config import default_socket_path
from kvledger.errors import ConfigurationError
from kvledger.vllm.options import Options, check_chunk_tokens, parse_options

GOOD: dict[str, object] = {
    "socket": "/run/x.sock",
    "namespace": "team-a",
    "model_revision": "v7",
    "weights_version": "rl-step-40",
    "chunk_tokens": 256,
    "min_hit_tokens": 64,
    "lookup_deadline_ms": 12.5,
    "load_deadline_ms": 900,
    "store": "prompt",
    "load": False,
    "keep_failure_policy": True,
}
# Of each key, values of every type that it does not take.
TEXT_IS_WRONG = [1, 1.5, True, None, ["a"]]
NUMBER_IS_WRONG = ["1", True, None, [1]]
BAD: dict[str, list[object]] = {
    "socket": TEXT_IS_WRONG,
    "namespace": TEXT_IS_WRONG,
    "model_revision": TEXT_IS_WRONG,
    "weights_version": TEXT_IS_WRONG,
    "chunk_tokens": [*NUMBER_IS_WRONG, 1.5, 0, -16],
    "min_hit_tokens": [*NUMBER_IS_WRONG, 1.5, -1],
    "lookup_deadline_ms": [*NUMBER_IS_WRONG, 0, -3.0, float("inf"), float("nan")],
    "load_deadline_ms": [*NUMBER_IS_WRONG, 0, -3, float("inf"), float("nan")],
    "store": [1, True, None, "prompts", "", "ALL"],
    "load": [0, 1, "true", None],
    "keep_failure_policy": [0, 1, "yes", None],
}


def test_the_tables_of_this_test_know_every_key() -> None:
    known = {field.name for field in fields(Options)}
    assert GOOD.keys() == BAD.keys() == known


@pytest.mark.parametrize("key", GOOD)
def test_each_key_is_taken(key: str) -> None:
    options = parse_options({f"kvledger.{key}": GOOD[key]})
    assert getattr(options, key) == GOOD[key]
    defaults = Options(socket=default_socket_path())
    others = [field.name for field in fields(Options) if field.name != key]
    assert [getattr(options, o) for o in others] == [getattr(defaults, o) for o in others]


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD.items() for v in values])
def test_each_wrong_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_options({f"kvledger.{key}": value})
    assert f"kvledger.{key}" in str(refusal.value)
    assert repr(value) in str(refusal.value)


@pytest.mark.parametrize("value", [0, 1, 7])
def test_the_shortest_hit_may_be_nothing(value: int) -> None:
    assert parse_options({"kvledger.min_hit_tokens": value}).min_hit_tokens == value


def test_defaults() -> None:
    options = parse_options({})
    assert options.socket == default_socket_path()
    assert (options.store, options.load, options.keep_failure_policy) == ("all", True, False)
    assert options.chunk_tokens is options.min_hit_tokens is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("kvledger.chunk_token", "chunk_tokens"),
        ("kvledger.chunk-tokens", "chunk_tokens"),
        ("kvledger.min_hits", "min_hit_tokens"),
        ("kvledger.lookup_deadline", "lookup_deadline_ms"),
        ("kvledger.load_deadline_s", "load_deadline_ms"),
        ("kvledger.sockets", "socket"),
        ("kvledger.Store", "store"),
        ("kvledger.name_space", "namespace"),
        ("kvledger.weight_version", "weights_version"),
        ("kvledger.revision", "model_revision"),
        ("kvledger.keep_policy", "keep_failure_policy"),
        ("socket", "socket"),  # the prefix was forgotten
        ("chunk_tokens", "chunk_tokens"),
        ("chunk-tokens", "chunk_tokens"),
        ("kvledger_store", "store"),
    ],
)
def test_the_nearest_key_is_named(wrong: str, right: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_options({wrong: GOOD[right]})
    sentence = str(refusal.value)
    assert repr(wrong) in sentence
    assert f'did you mean "kvledger.{right}"?' in sentence
    for key in GOOD:
        assert f"kvledger.{key}" in sentence


def test_keys_of_others_are_left_alone() -> None:
    options = parse_options({"connectors": [], "lmcache.chunk_size": 3, "kvledger.store": "none"})
    assert options == Options(socket=default_socket_path(), store="none")


@pytest.mark.parametrize("wanted", [16, 32, 48, 512])
def test_chunks_are_whole_blocks(wanted: int) -> None:
    options = Options(socket="s", chunk_tokens=wanted)
    assert check_chunk_tokens(options, 16) == wanted


def test_a_chunk_is_a_block_by_default() -> None:
    assert check_chunk_tokens(Options(socket="s"), 528) == 528


@pytest.mark.parametrize(
    ("wanted", "block", "would_do"), [(24, 16, 16), (100, 32, 96), (8, 16, 16), (1000, 528, 528)]
)
def test_other_chunks_are_refused_with_one_that_would_do(
    wanted: int, block: int, would_do: int
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        check_chunk_tokens(Options(socket="s", chunk_tokens=wanted), block)
    sentence = str(refusal.value)
    assert "kvledger.chunk_tokens" in sentence
    assert f"block size {block}, found {wanted}; {would_do} would do" in sentence
    assert check_chunk_tokens(Options(socket="s", chunk_tokens=would_do), block) == would_do
