"""Proximal operators of group and elementwise sparsity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_norms(groups: Sequence[Tensor]) -> Tensor:
    """Compute the Euclidean norm of each unit's group. The group of unit i is entry i of each tensor.

    >>> group_norms([torch.tensor([[3.0, 0.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0])])
    tensor([5., 0.])
    """
    rows = []
    for tensor in groups:
        # reshape(0, -1) is ambiguous for a layer without units.
        rows.append(tensor.detach().reshape(len(tensor), -1) if len(tensor) else tensor.detach().new_zeros(0, 1))
    norms: Tensor = torch.linalg.vector_norm(torch.cat(rows, 1), dim=1)
    return norms


@torch.no_grad()
def group_soft_threshold_(groups: Sequence[Tensor], threshold: float | Tensor) -> Tensor:
    """Apply the proximal step of the group lasso in place.

        v ← v · max(0, 1 - threshold/‖v‖₂) = argmin_u ½‖u - v‖² + threshold·‖u‖₂

    Returns:
        a boolean per unit, True where the group is not zero after the step.

    >>> v = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> group_soft_threshold_([v], 1.0), v
    (tensor([ True, False]), tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]]))
    """
    norms = group_norms(groups)
    is_nonzero = norms > threshold
    factor = torch.where(is_nonzero, 1 - threshold / torch.where(is_nonzero, norms, 1), 0)
    for v in groups:
        v.mul_(factor.view(-1, *(1,) * (v.dim() - 1)).to(v.dtype))
    return is_nonzero


@torch.no_grad()
def soft_threshold_(values: Tensor, threshold: float) -> None:
    """Apply the proximal step of the L1 norm in place.

        v ← sign(v) · max(0, |v| - threshold)

    >>> v = torch.tensor([3.0, -0.5, -2.0])
    >>> soft_threshold_(v, 1.0); v
    tensor([ 2., -0., -1.])
    """
    values.copy_(values.sign() * (values.abs() - threshold).clamp(min=0))
