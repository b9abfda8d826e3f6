"""GEM: project the gradient so that a step does not increase the loss on any earlier task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.traits import Traits
from everlearn.memory import Memory
from everlearn.methods.replay.base import Replay, Rows, divide_among_processes
from everlearn.methods.replay.quadratic_program import minimize_nonnegative
from everlearn.methods.replay.reference_gradients import (
    dense_gradient,
    parameters_with_gradient,
    reference_gradient,
    write_gradient,
)
from everlearn.runtime import distributed


@dataclass(eq=False)
class GEM(Replay):
    """Gradient episodic memory (Lopez-Paz & Ranzato, NeurIPS 2017): project gradients that raise an old task's loss.

        g̃ = the vector nearest to g with g̃·gₖ ≥ 0 for every earlier task k:   g̃ = g + Mᵀv,
        v = argmin ½ vᵀ(M Mᵀ + ridge)v + (M g)ᵀv   subject to v ≥ margin

    The rows of M are the gradients gₖ on the stored examples of task k, at the current parameters: a backward pass per
    earlier task in every step. A gradient that violates no constraint is not changed. As in the authors' code, the
    margin (their γ) is a lower bound of v as soon as one task is violated, and with a ridge the guarantee is
    g̃·gₖ ≥ -ridge · vₖ. Every step waits once for an accelerator: the program for v is solved on the CPU.

    Args:
        capacity: number of stored examples.
        size: number of examples per task in gₖ; by default all.
        margin: γ; larger values move the gradient further toward the old tasks.
        ridge: keeps the small quadratic program well posed.
        max_per_task: maximum number of examples per task. The authors store capacity / tasks examples of each from the
            start; by default tasks share the capacity equally, so that the first ones have more while there are few.
    """

    traits = Traits(
        family="replay",
        pro="no step increases the loss of any old task, to first order",
        con="one more gradient per earlier task and step",
        step=4.6,
        step_growth=0.7,
        copies=(0.0,),
        keeps_examples=True,
    )

    margin: Annotated[NonNegative, Search(0, 1, log=False, late=True)] = 0.5
    ridge: NonNegative = 1e-3
    policy: Literal["reservoir", "balanced", "ring"] = field(default="ring", kw_only=True)
    max_per_task: Annotated[int, Range(1)] | None = field(default=None, kw_only=True)

    def make_memory(self) -> Memory:
        """Create an empty memory with at most ``each`` examples per task."""
        max_per_task = None
        if self.max_per_task is not None:
            max_per_task = divide_among_processes(self.max_per_task)
        capacity = divide_among_processes(self.capacity)
        return Memory(capacity, self.policy, max_per_group=max_per_task, seed=distributed.rank())

    def before_step(self, model: nn.Module) -> None:
        """Project the gradient if it would increase the loss of an earlier task."""
        self._gradients_edited = True
        parameters = parameters_with_gradient(model)
        gradient_rows = []
        for k in self._earlier_tasks():
            g_k = reference_gradient(model, parameters, self._examples_of_task(k))
            if g_k is not None:
                gradient_rows.append(torch.cat([part.flatten() for part in g_k]))
        if not gradient_rows:
            return

        g = torch.cat([dense_gradient(p).flatten() for p in parameters])
        projected = project_to_cone(g, torch.stack(gradient_rows), self.margin, self.ridge)
        if projected is g:
            return
        parts = projected.split([p.numel() for p in parameters])
        write_gradient(parameters, [part.view_as(p) for p, part in zip(parameters, parts, strict=True)])

    def _earlier_tasks(self) -> list[int]:
        """List the ids of the earlier tasks of which any process has stored examples."""
        local_ids: list[int] = []
        if self._current_batch is not None and len(self.memory):
            earlier_rows = self.earlier_task_rows(self._current_batch)
            local_ids = self.memory["t"][earlier_rows].unique().tolist()

        # All processes must compute the same gradients in the same order.
        task_ids: set[int] = set()
        for process_ids in distributed.all_gather_object(local_ids):
            task_ids.update(process_ids)
        return sorted(task_ids)

    def _examples_of_task(self, k: int) -> Batch | None:
        """Return the stored examples of an earlier task, or ``size`` of them; None if there are none."""
        rows = self._rows_of_task(k)
        if not rows or self._current_batch is None:
            return None
        replayed, _ = self.as_batch(self._current_batch, rows)
        return replayed

    def _rows_of_task(self, k: int) -> Rows:
        is_of_task = self.memory["t"] == k
        if self.size is None:
            return self.memory.rows(is_of_task)
        return self.memory.sample(self.size, is_of_task)


def project_to_cone(g: Tensor, m: Tensor, margin: float = 0.0, ridge: float = 0.0) -> Tensor:
    """Return the vector g̃ nearest to g with M g̃ ≥ 0; g itself if M g ≥ 0, and NaN if M g is not finite.

    Only M g and M Mᵀ are copied from an accelerator, once: the program has a variable per task, and solving it there
    would start hundreds of kernels.

    Args:
        g: the gradient of the current batch.
        m: M, the gradient of each earlier task in a row.
        margin: lower bound of the dual variables v.
        ridge: added to the diagonal of M Mᵀ.
    """
    products = torch.cat([(m @ g)[:, None], m @ m.t()], 1).cpu().double()
    m_g = products[:, 0]
    if (m_g >= 0).all():
        return g
    if not m_g.isfinite().all():  # a gradient scaler will skip this step
        return torch.full_like(g, torch.nan)

    # With v = margin + u the constraint is u ≥ 0.
    p = products[:, 1:] + ridge * torch.eye(len(m), dtype=torch.double)
    u = minimize_nonnegative(p, m_g + margin * p.sum(1))
    v = margin + u
    return g + m.t() @ v.to(g)
