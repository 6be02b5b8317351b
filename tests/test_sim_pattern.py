"""The pattern against a slow formula written down a second time."""

from __future__ import annotations

import numpy as np
import pytest

from kvledger.sim.pattern import (
    Pattern,
    PatternShape,
    Prefix,
    mix,
    mix_int,
    next_token,
    seed_of,
)

SHAPE = PatternShape(ranks=2, groups=2, layers=3, lanes=2, max_tokens=256)
MODULUS = 2**64


def splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % MODULUS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % MODULUS
    return value ^ (value >> 31)


def slow_states(seed: int, tokens: list[int]) -> list[int]:
    states, state = [], seed
    for position, token in enumerate(tokens):
        step = token * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1
        state = (state + splitmix(step % MODULUS)) % MODULUS
        states.append(state)
    return states


def slow_checksum(pattern: Pattern, states: list[int], group: int, start: int, end: int) -> int:
    total = 0
    for position in range(start, end):
        for rank in range(SHAPE.ranks):
            for layer in range(SHAPE.layers):
                for lane in range(SHAPE.lanes):
                    value = splitmix(states[position] ^ int(pattern.keys[rank, group, layer, lane]))
                    weight = int(pattern.lane_weights[layer, lane])
                    total += value * weight * int(pattern.position_weights[position])
    return total % MODULUS


@pytest.fixture(scope="module")
def pattern() -> Pattern:
    return Pattern(SHAPE)


def test_mix_is_splitmix_and_maps_zero_to_zero() -> None:
    values = [0, 1, 2**63, MODULUS - 1, 0xDEADBEEF]
    expected = [splitmix(value) for value in values]
    assert mix(np.array(values, dtype=np.uint64)).tolist() == expected
    assert [mix_int(value) for value in values] == expected
    assert expected[0] == 0


@pytest.mark.parametrize("parts", [[100], [1] * 100, [2, 98], [60, 1, 2, 37]])
def test_prefix_is_the_same_however_it_grows(pattern: Pattern, parts: list[int]) -> None:
    tokens = [(7 * i * i + 3) % 512 for i in range(100)]
    prefix = Prefix(pattern, 12345, [])
    start = 0
    for part in parts:
        prefix.append(tokens[start : start + part])
        start += part
    states = slow_states(12345, tokens)
    assert prefix.states(0, 100).tolist() == states
    for group, start, end in [(0, 0, 100), (1, 0, 1), (1, 17, 63), (0, 40, 40)]:
        assert prefix.checksum(group, start, end) == slow_checksum(
            pattern, states, group, start, end
        )


def test_values_are_those_of_the_formula(pattern: Pattern) -> None:
    states = slow_states(9, [5, 6, 7])
    values = pattern.values(np.array(states, dtype=np.uint64), 1, 0)
    assert values.shape == (3, SHAPE.layers, SHAPE.lanes)
    assert int(values[2, 1, 0]) == splitmix(states[2] ^ int(pattern.keys[1, 0, 1, 0]))


def test_truncated_prefix_forgets(pattern: Pattern) -> None:
    prefix = Prefix(pattern, 1, [1, 2, 3, 4])
    prefix.append([5])
    prefix.truncate(3)
    prefix.append([9, 9, 9, 9])
    fresh = Prefix(pattern, 1, [1, 2, 3, 9, 9, 9, 9])
    assert prefix.states(0, 7).tolist() == fresh.states(0, 7).tolist()
    assert prefix.checksum(0, 0, 7) == fresh.checksum(0, 0, 7)


def test_every_token_before_a_position_decides_its_bytes(pattern: Pattern) -> None:
    tokens = list(range(50))
    base = Prefix(pattern, 1, tokens).states(49, 50).tolist()
    for changed in (0, 10, 49):
        other = [*tokens[:changed], 300, *tokens[changed + 1 :]]
        assert Prefix(pattern, 1, other).states(49, 50).tolist() != base
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    assert Prefix(pattern, 1, swapped).states(49, 50).tolist() != base
    assert Prefix(pattern, 2, tokens).states(49, 50).tolist() != base


def test_reseeded_prefix_keeps_its_tokens(pattern: Pattern) -> None:
    prefix = Prefix(pattern, 1, [4, 5, 6])
    prefix.reseed(2)
    assert prefix.tokens == [4, 5, 6]
    assert prefix.states(0, 3).tolist() == slow_states(2, [4, 5, 6])


def test_seed_keeps_its_parts_apart() -> None:
    assert seed_of("a", "bc") != seed_of("ab", "c")
    assert seed_of("a", "bc") == seed_of("a", "bc")


def test_next_tokens_are_spread() -> None:
    tokens = {next_token(checksum, 512) for checksum in range(2000)}
    assert len(tokens) > 480
    assert max(tokens) < 512
