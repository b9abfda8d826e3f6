"""GEM: a step that does not raise the loss on any old task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.traits import Traits
from everlearn.memory import Memory
from everlearn.methods.replay.base import Replay, dense_gradient, gradient_on, with_gradient, write_gradient
from everlearn.runtime import distributed


@dataclass(eq=False)
class GEM(Replay):
    """Gradient episodic memory (Lopez-Paz & Ranzato, NeurIPS 2017).

        g̃ = the nearest to g with g̃·gₖ ≥ 0 for every earlier task k:   g̃ = g + Mᵀv,
        v = argmin ½ vᵀ(M Mᵀ + ridge)v + (M g)ᵀv   subject to v ≥ margin

    The rows of M are the gradients gₖ on the remembered examples of task k, at the same weights: a backward pass per earlier
    task at every step. The gradient is left as it is where it violates nothing. As in the authors' code the margin (their γ) is
    a lower bound of v as soon as one task is violated, and the ridge makes the promise g̃·gₖ ≥ -ridge · vₖ.

    Args:
        capacity: how many examples are kept.
        size: how many of each task make up its gradient; by default all.
        margin: γ; larger ones push more towards the old tasks.
        ridge: keeps the small quadratic programme well posed.
        each: the most examples of one task. The authors keep capacity / tasks of each from the start; by default tasks share what
            there is equally, so that the first ones have more as long as there are few.
    """

    traits = Traits(
        family="replay",
        pro="takes no step that raises the loss of any old task, to first order",
        con="a gradient for every earlier task at every step",
        step=3.9,
        step_growth=0.7,
        keeps_examples=True,
    )

    margin: Annotated[NonNegative, Search(0, 1, log=False, late=True)] = 0.5
    ridge: NonNegative = 1e-3
    policy: Literal["reservoir", "balanced", "ring"] = field(default="ring", kw_only=True)
    each: Annotated[int, Range(1)] | None = field(default=None, kw_only=True)

    def make_memory(self) -> Memory:
        """With a share for each task."""
        each = None if self.each is None else -(-self.each // distributed.world_size())
        return Memory(-(-self.capacity // distributed.world_size()), self.policy, each=each, seed=distributed.rank())

    def before_step(self, model: nn.Module) -> None:
        """Turn the gradient so that it lowers, or leaves, every old task's loss."""
        self._edited = True
        parameters = with_gradient(model)
        rows = []
        for k in sorted({k for known in distributed.all_gather_object(self._earlier_tasks()) for k in known}):
            reference = gradient_on(model, parameters, self._drawn_of(k))
            if reference is not None:
                rows.append(torch.cat([g.flatten() for g in reference]))
        if not rows:
            return
        g = torch.cat([dense_gradient(p).flatten() for p in parameters])
        turned = nearest(g, torch.stack(rows), self.margin, self.ridge)
        if turned is g:  # it violates nothing
            return
        parts = turned.split([p.numel() for p in parameters])
        write_gradient(parameters, [part.view_as(p) for p, part in zip(parameters, parts, strict=True)])

    def _earlier_tasks(self) -> list[int]:
        if self._now is None or not len(self.memory):
            return []
        numbers: list[int] = self.memory["t"][self.earlier(self._now)].unique().tolist()
        return numbers

    def _drawn_of(self, k: int) -> Batch | None:
        """Examples of an earlier task, if there are any."""
        own = self.memory["t"] == k
        some = self.memory.rows(own) if self.size is None else self.memory.sample(self.size, own)
        return self.as_batch(self._now, some)[0] if some and self._now is not None else None


def nearest(g: Tensor, rows: Tensor, margin: float = 0.0, ridge: float = 0.0) -> Tensor:
    """The vector nearest to g whose products with all rows are not negative."""
    products = rows @ g
    if (products >= 0).all():
        return g
    gram = (rows @ rows.t()).double()
    gram += ridge * torch.eye(len(rows), dtype=gram.dtype, device=gram.device)
    v = margin + non_negative(gram, products.double() + margin * gram.sum(1))
    return g + rows.t() @ v.to(g.dtype)


def non_negative(matrix: Tensor, vector: Tensor) -> Tensor:
    """The u ≥ 0 with the least ½ uᵀPu + qᵀu, by the active-set method of Lawson & Hanson (1974).

    >>> non_negative(torch.eye(2), torch.tensor([-1.0, 1.0]))
    tensor([1., 0.])
    """
    diagonal = matrix.diagonal()
    scale = torch.where(diagonal > 0, diagonal.clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt(), 1.0)
    size = (vector * scale).abs().max()
    if not size:
        return torch.zeros_like(vector)
    # In these units the diagonal of P is 1 and the largest entry of q too, so that one tolerance fits slopes and u alike.
    solution = _active_set(matrix * scale[:, None] * scale, vector * (scale / size))
    return solution * (scale * size)


def _active_set(matrix: Tensor, vector: Tensor, tolerance: float = 1e-12) -> Tensor:
    """``non_negative`` of a problem without units."""
    u = torch.zeros_like(vector)
    free = torch.zeros_like(vector, dtype=torch.bool)
    for _ in range(10 * len(vector)):
        slope = -(matrix @ u + vector)
        slope[free] = 0
        if slope.max() <= tolerance:
            break
        free[slope.argmax()] = True
        trial = _unconstrained(matrix, vector, free)
        while (trial[free] <= 0).any():
            blocking = free & (trial <= 0)
            steps = torch.where(blocking, u / (u - trial).clamp(min=torch.finfo(u.dtype).tiny), torch.inf)
            first = steps.argmin()
            u = u + steps[first] * (trial - u)
            free &= u > tolerance
            free[first] = False
            u[~free] = 0
            trial = _unconstrained(matrix, vector, free)
        u = trial
    return u


def _unconstrained(matrix: Tensor, vector: Tensor, free: Tensor) -> Tensor:
    """The least ½ uᵀPu + qᵀu over the free entries of u, the others zero."""
    u = torch.zeros_like(vector)
    if free.any():
        u[free] = torch.linalg.lstsq(matrix[free][:, free], -vector[free][:, None]).solution[:, 0]
    return u
