"""Confidence intervals for the change of accuracy on the same held-out examples before and after an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean

from torch import Tensor

LEVEL = 0.95


@dataclass(frozen=True)
class PairedCounts:
    """Counts of the examples on which two models differ.

    Args:
        lost: examples that only the first model classifies correctly.
        gained: examples that only the second model classifies correctly.
        examples: the total number.
    """

    lost: int
    gained: int
    examples: int

    @property
    def fall(self) -> float:
        """The fall of accuracy, as a share of the examples."""
        return (self.lost - self.gained) / self.examples

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Compute a confidence interval for the fall: Wald with the Laplace adjustment of Bonett & Price (2012).

            l = (lost + 1) / (n + 2),   g = (gained + 1) / (n + 2)
            l - g ± z √((l + g - (l - g)²) / (n + 2))

        Accuracies of two models on the same examples are not independent: only the examples on which they differ carry
        information, as in McNemar's test. Fagerland, Lydersen & Laake (Statistics in Medicine, 2014) recommend this
        interval for paired proportions. Unlike a bootstrap it does not collapse to a point if no prediction has
        changed.

        >>> low, high = PairedCounts(lost=1, gained=7, examples=21).interval()
        >>> round(low, 4), round(high, 4)
        (-0.5084, -0.0134)
        """
        lost = (self.lost + 1) / (self.examples + 2)
        gained = (self.gained + 1) / (self.examples + 2)
        fall = lost - gained
        z = NormalDist().inv_cdf((1 + level) / 2)
        half_width = z * sqrt((lost + gained - fall**2) / (self.examples + 2))
        return max(fall - half_width, -1.0), min(fall + half_width, 1.0)


def count_pairs(before: Tensor, after: Tensor) -> PairedCounts:
    """Count the differences between two masks of correctly classified examples."""
    lost = int((before & ~after).sum())
    gained = int((after & ~before).sum())
    return PairedCounts(lost, gained, len(before))


def mean_fall_interval(counts: Sequence[PairedCounts], level: float = LEVEL) -> tuple[float, float]:
    """Compute a confidence interval for the mean fall over several independent held-out sets.

        low = d - √(Σ (dₖ - lowₖ)²) / K,   high = d + √(Σ (highₖ - dₖ)²) / K,   d = Σ dₖ / K

    The distances of each set's limits from its estimate are squared and added (MOVER; Zou & Donner, Statistics in
    Medicine, 2008). For a single set these are its limits.
    """
    fall = fmean(pair.fall for pair in counts)
    limits = [pair.interval(level) for pair in counts]
    below = sqrt(sum((pair.fall - low) ** 2 for pair, (low, _) in zip(counts, limits, strict=True)))
    above = sqrt(sum((high - pair.fall) ** 2 for pair, (_, high) in zip(counts, limits, strict=True)))
    return fall - below / len(counts), fall + above / len(counts)
