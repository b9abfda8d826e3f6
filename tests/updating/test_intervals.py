"""Confidence intervals of the fall in accuracy."""

import math

import numpy as np
import pytest

from everlearn.updating.intervals import PairedCounts, mean_fall_interval
from everlearn.updating.verdict import Rules


@pytest.mark.parametrize(("lost", "gained"), [(0.02, 0.02), (0.1, 0.02), (0.3, 0.1), (0.05, 0.0)])
def test_interval_has_nominal_coverage(lost, gained):
    """Sum the exact probabilities of all outcomes of 60 pairs whose interval covers the true difference."""
    n = 60
    coverage = 0.0
    for a in range(n + 1):
        for b in range(n + 1 - a):
            if (a and not lost) or (b and not gained):
                continue
            unchanged = n - a - b
            num_arrangements = math.comb(n, a) * math.comb(n - a, b)
            probability = num_arrangements * lost**a * gained**b * (1 - lost - gained) ** unchanged
            low, high = PairedCounts(a, b, n).interval()
            coverage += probability * (low <= lost - gained <= high)
    assert 0.94 <= coverage <= 1.0


def test_interval_of_mean_over_held_out_sets():
    pairs = [PairedCounts(20, 10, 300), PairedCounts(5, 5, 100), PairedCounts(2, 0, 50)]
    assert mean_fall_interval(pairs[:1]) == pytest.approx(pairs[0].interval())
    low, high = mean_fall_interval(pairs)
    rng = np.random.default_rng(0)
    draws = []
    for pair in pairs:  # bootstrap of the pairs of each held-out set
        shares = [pair.lost / pair.examples, pair.gained / pair.examples]
        counts = rng.multinomial(pair.examples, [*shares, 1 - sum(shares)], size=20_000)
        draws.append((counts[:, 0] - counts[:, 1]) / pair.examples)
    assert (low, high) == pytest.approx(np.quantile(np.mean(draws, axis=0), [0.025, 0.975]), abs=0.012)
    rules = Rules(per_set=True)
    assert rules.interval(pairs)[1] == pytest.approx(100 * pairs[2].interval(1 - 0.05 / 3)[1]), (
        "interval of the set with the largest fall"
    )
    assert Rules().interval([]) is None
