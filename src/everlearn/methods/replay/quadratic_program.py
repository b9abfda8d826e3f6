"""Non-negative quadratic programs of a few variables, for GEM: active-set method of Lawson & Hanson (1974)."""

from __future__ import annotations

import torch
from torch import Tensor


def minimize_nonnegative(p: Tensor, q: Tensor) -> Tensor:
    """Minimize ½ uᵀPu + qᵀu subject to u ≥ 0.

    Args:
        p: P, symmetric and positive semidefinite.
        q: the linear term.

    Returns:
        The minimizer u.

    >>> minimize_nonnegative(torch.eye(2), torch.tensor([-1.0, 1.0]))
    tensor([1., 0.])
    """
    diagonal = p.diagonal()
    smallest_positive = torch.finfo(p.dtype).tiny
    scale = torch.where(diagonal > 0, diagonal.clamp(min=smallest_positive).rsqrt(), 1.0)
    size = (q * scale).abs().max()
    if not size:
        return torch.zeros_like(q)

    # Scaled so that the diagonal of P and the largest entry of q are 1: one tolerance then suits gradients and u.
    u = _minimize_scaled(p * scale[:, None] * scale, q * (scale / size))
    return u * (scale * size)


def _minimize_scaled(p: Tensor, q: Tensor, tolerance: float = 1e-12) -> Tensor:
    """Solve a scaled program by adding one free variable at a time."""
    u = torch.zeros_like(q)
    is_free = torch.zeros_like(q, dtype=torch.bool)
    for _ in range(10 * len(q)):
        # Free the variable along which the objective falls fastest; without one, u is optimal.
        descent = -(p @ u + q)
        descent[is_free] = 0
        if descent.max() <= tolerance:
            break
        is_free[descent.argmax()] = True

        # Move toward the minimum over free variables; one that becomes zero on the way is fixed there.
        target = _minimize_free(p, q, is_free)
        while (target[is_free] <= 0).any():
            is_blocking = is_free & (target <= 0)
            decrease = (u - target).clamp(min=torch.finfo(u.dtype).tiny)
            steps = torch.where(is_blocking, u / decrease, torch.inf)
            first_blocking = steps.argmin()
            u = u + steps[first_blocking] * (target - u)
            is_free &= u > tolerance
            is_free[first_blocking] = False
            u[~is_free] = 0
            target = _minimize_free(p, q, is_free)
        u = target
    return u


def _minimize_free(p: Tensor, q: Tensor, is_free: Tensor) -> Tensor:
    """Minimize ½ uᵀPu + qᵀu over the free entries of u; the other entries are zero."""
    u = torch.zeros_like(q)
    if is_free.any():
        u[is_free] = torch.linalg.lstsq(p[is_free][:, is_free], -q[is_free][:, None]).solution[:, 0]
    return u
