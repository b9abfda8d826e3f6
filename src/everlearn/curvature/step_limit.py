"""Limit of a quadratic's curvature, so that gradient descent on it does not diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from everlearn.core.parameters import Params
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.quadratic import Form, Quadratic

LIMITED_CURVATURE = 0.5  # η F, where it was above 1
POWER_ITERATIONS = 30


def limit_curvature(quadratic: Quadratic, rates: Mapping[str, float]) -> Quadratic:
    """Return a quadratic on which gradient descent with rate η does not diverge.

    A step multiplies the distance from the minimum by 1 - η F: it overshoots where η F > 1, and diverges where η F > 2.
    In parameters with η F > 1, F is limited to 1/(2η), so that the curvature of the task, momentum and other penalties
    have room. The minimum stays where it is. A diagonal F is limited entry by entry; another form is scaled as a whole.

    Args:
        quadratic: q.
        rates: η by parameter name; parameters without one are not limited.

    Returns:
        A limited copy, or the quadratic itself if its curvature is small enough.
    """
    form = quadratic.form
    if not isinstance(form, Diagonal):
        return _limit_whole(quadratic, max((rates[name] for name in form.names if name in rates), default=0.0))
    limited = {}
    for name, value in form.values.items():
        rate = rates.get(name, 0.0)
        if rate and value.numel() and rate * float(value.max()) > 1:
            limited[name] = value.clamp(max=LIMITED_CURVATURE / rate)
    if not limited:
        return quadratic
    return replace(quadratic, form=Diagonal(form.values | limited))


def _limit_whole(quadratic: Quadratic, rate: float) -> Quadratic:
    """Scale a quadratic so that η times its largest eigenvalue is ½, if it is above 1."""
    if not rate:
        return quadratic
    curvature = rate * largest_eigenvalue(quadratic.form)
    if curvature <= 1:
        return quadratic
    limited = replace(quadratic)
    limited.rescale(LIMITED_CURVATURE / curvature)
    return limited


def largest_eigenvalue(form: Form) -> float:
    """Estimate the largest eigenvalue by power iteration; the estimate is never too large.

    >>> largest_eigenvalue(Diagonal({"w": torch.tensor([1.0, 3.0])}))
    3.0
    """
    generator = torch.Generator().manual_seed(0)
    vector: Params = {}
    for name, value in form.diagonal().items():
        noise = torch.randn(value.shape, generator=generator)
        vector[name] = noise.to(value.device, value.dtype)

    eigenvalue = 0.0
    for _ in range(POWER_ITERATIONS):
        norm = math.sqrt(sum(float(v.square().sum()) for v in vector.values()))
        if not norm:
            return 0.0
        vector = {name: v / norm for name, v in vector.items()}
        product = form.times(vector)
        eigenvalue = sum(float((v * product[name]).sum()) for name, v in vector.items() if name in product)
        vector = product
    return round(eigenvalue, 12)
