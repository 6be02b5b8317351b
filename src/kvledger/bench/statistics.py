"""Medians with an interval that assumes nothing about how times are distributed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

WANTED_COVERAGE = 0.95


class Median(msgspec.Struct, frozen=True, kw_only=True):
    """A median and where the true one lies.

    Attributes:
        value: the median of the samples.
        low, high: the interval between two of the samples.
        coverage: probability that such an interval holds the true median. At least 0.95 where
            the number of samples allows it; five samples give 0.94 at most.
        samples: how many there were.
    """

    value: float
    low: float
    high: float
    coverage: float
    samples: int


def median_of(samples: Sequence[float]) -> Median:
    """The median with the narrowest interval, symmetric in rank, that covers 95 %.

    The k-th smallest and k-th largest of n independent samples enclose the median unless fewer
    than k of them fall on one side of it, which is a matter of n fair coins.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a median needs at least one sample")
    ordered = sorted(samples)
    count = len(ordered)
    rank = 1
    while 2 * (rank + 1) <= count + 1 and _coverage(count, rank + 1) >= WANTED_COVERAGE:
        rank += 1
    return Median(
        value=quantile(ordered, 0.5),
        low=ordered[rank - 1],
        high=ordered[-rank],
        coverage=_coverage(count, rank),
        samples=count,
    )


def _coverage(count: int, rank: int) -> float:
    """Probability that the ``rank``-th smallest and largest of ``count`` enclose the median."""
    outside = sum(math.comb(count, fewer) for fewer in range(rank)) / (1 << count)
    return max(0.0, 1.0 - 2.0 * outside)


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the samples lie, between the two nearest of them.

    Raises:
        ValueError: there are no samples, or the share is not within 0 to 1.
    """
    if not samples or not 0 <= share <= 1:
        raise ValueError(f"a quantile needs samples and a share of 0 to 1, found {share}")
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    weight = position - below
    return ordered[below] * (1 - weight) + ordered[above] * weight
