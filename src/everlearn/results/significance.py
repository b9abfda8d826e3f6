"""A paired t test over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of the paired t test, with n - 1 degrees of freedom; NaN for fewer than two pairs.

    Args:
        a: values of the first condition.
        b: values of the second condition, in the same order.

    >>> round(paired_t_test([0.9, 0.8, 0.7], [0.5, 0.5, 0.4]), 4)
    0.0099
    """
    differences = np.subtract(a, b)
    if len(differences) < 2:
        return math.nan
    mean = float(differences.mean())
    standard_error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if standard_error == 0:
        return 1.0 if mean == 0 else 0.0
    return _t_tails(mean / standard_error, len(differences) - 1)


def _t_tails(t: float, freedom: int) -> float:
    """Return P(|T| > |t|) of Student's distribution (Abramowitz & Stegun 26.7.3 and 26.7.4).

        θ = atan(|t|/√ν)
        ν even:  P = 1 - sin θ (1 + 1/2 cos² θ + (1·3)/(2·4) cos⁴ θ + …)           ν/2 terms
        ν odd:   P = 1 - 2/π (θ + sin θ (cos θ + 2/3 cos³ θ + (2·4)/(3·5) cos⁵ θ + …))   (ν - 1)/2 terms

    Args:
        t: the statistic.
        freedom: ν, the degrees of freedom.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    series = 0.0
    for k in range(freedom // 2):
        series += term
        term *= math.cos(angle) ** 2 * (2 * k + 1 + is_odd) / (2 * k + 2 + is_odd)
    probability_inside = math.sin(angle) * series
    if is_odd:
        probability_inside = 2 / math.pi * (angle + probability_inside)
    return 1 - probability_inside
