"""The model as an earlier task left it, kept as tensors and asked in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everlearn.forward import ask
from everlearn.params import Params, check_finite, evaluating, refuse_sharded, unwrap

Teacher = dict[str, Any]


def remember(model: nn.Module, task: Any, learned: list[int]) -> Teacher:
    """The model as it is, with the tasks it has learned and, where there is a table, the outputs each may be answered with."""
    inner, allowed = unwrap(model), getattr(task, "allowed", None)
    refuse_sharded(inner.parameters(), "A teacher")
    check_finite(dict(inner.named_parameters()))
    rows = None
    if allowed is not None:  # a task without a number had no table: it may be answered with everything
        rows = torch.stack([allowed[k] if k >= 0 else torch.ones_like(allowed[0]) for k in learned])
    frozen = [n for n, p in inner.named_parameters() if not p.requires_grad]  # an adapter's base stays what it is
    kept = [(n, p) for n, p in inner.named_parameters() if p.requires_grad]
    state = {n: v.detach().clone() for n, v in [*kept, *inner.named_buffers()]}
    return {"state": state, "frozen": frozen, "ids": list(learned), "rows": rows}


def with_task(learned: list[int], task: Any) -> list[int]:
    """The tasks learned so far, this one last; one without a number gets a negative one."""
    place = getattr(task, "id", None)
    place = -1 - len(learned) if place is None else place
    return [*(k for k in learned if k != place), place]


def answer(model: nn.Module, teacher: Teacher, x: Any) -> Tensor:
    """What the model would say with the teacher's parameters and statistics, in evaluation mode."""
    check_known(model, teacher)
    inner = unwrap(model)
    with torch.no_grad(), evaluating(inner):
        return ask(inner, x, teacher["state"])


def check_known(model: nn.Module, teacher: Teacher) -> None:
    """Refuse a model with parameters the teacher has not."""
    known: Params = teacher["state"]
    others = [(n, p) for n, p in unwrap(model).named_parameters() if n not in known]
    if thawed := [n for n, p in others if n in teacher["frozen"] and p.requires_grad]:
        raise ValueError(
            f"{', '.join(thawed[:3])}: frozen when the last task ended and trainable now, so that the teacher, which shares what is "
            "frozen, would change too. Make them trainable before end_task(model, task), which keeps a copy of what is trainable then."
        )
    if new := [n for n, _ in others if n not in teacher["frozen"]]:
        raise ValueError(
            f"{', '.join(new[:3])} did not exist when the last task ended, so the teacher would be another model: grow the "
            "output layer (everlearn.heads.grow_output), or end the task after adding layers."
        )


def questions(
    teacher: Teacher, current: int | None, target: Tensor, now: tuple[Tensor, Tensor | None] | None = None
) -> list[tuple[Tensor, Tensor, int, int]]:
    """The outputs each old task may be answered with, those it got since (only with ``now``, the model's outputs and table),
    how many tasks share them, and one of these tasks.
    """
    old = [i for i, k in enumerate(teacher["ids"]) if k != current]
    out, allowed = now or (target, None)
    if not old:
        return []
    if teacher["rows"] is None:
        every = torch.arange(max(target.shape[-1], out.shape[-1]), device=target.device)
        width = target.shape[-1]
        return [(every[:width], every[width:], len(old), teacher["ids"][old[0]])]
    then = teacher["rows"][old]
    since = then if allowed is None else allowed[[teacher["ids"][i] for i in old]].to(then.device) | then
    rows, which, times = torch.stack([then, since & ~then], 1).unique(dim=0, return_inverse=True, return_counts=True)
    places = [[row.nonzero().flatten().to(target.device) for row in pair] for pair in rows]
    ids = [teacher["ids"][old[which.tolist().index(group)]] for group in range(len(rows))]
    return [(a, b, int(n), k) for (a, b), n, k in zip(places, times, ids, strict=True)]


def softened_kl(t: Tensor, z: Tensor, new: Tensor, temperature: float) -> Tensor:
    """KL( softmax(t/T) ‖ softmax(z/T) ) of each row, where the second softmax also runs over outputs the first has not.

    Outputs that the teacher rules out by minus infinity have no part.
    """
    log_p = (t / temperature).log_softmax(-1)
    log_q = (torch.cat([z, new], -1) / temperature).log_softmax(-1)[..., : z.shape[-1]]
    log_ratio = torch.where(log_p.isneginf(), 0.0, log_p - log_q)  # 0 · (-∞ + ∞) would be NaN, in the gradient too
    return (log_p.exp() * log_ratio).sum(-1)
