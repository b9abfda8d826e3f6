"""Teachers for distillation: snapshots of the model at the end of an earlier task."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.likelihood import Bernoulli, Categorical, Likelihood
from everlearn.core.method import Method
from everlearn.core.parameters import check_finite, evaluating, refuse_sharded, unwrap
from everlearn.curvature.divergence import output_kl

# Keys: "state" (tensors by name), "frozen" (names), "ids" (tasks learned) and "rows" (their allowed outputs, or None).
Teacher = dict[str, Any]


class DistillationGroup(NamedTuple):
    """Old tasks that share their outputs."""

    old_outputs: Tensor  # indices of the outputs that the teacher had for these tasks
    new_outputs: Tensor  # indices of the outputs that were added to these tasks since
    num_tasks: int
    task_id: int  # of one of these tasks


def snapshot_teacher(model: nn.Module, task: Any, learned: list[int]) -> Teacher:
    """Copy the model's trainable parameters and buffers, with the tasks learned and their allowed outputs.

    Args:
        model: at the end of a task.
        task: with a table ``allowed`` of outputs by task, or without.
        learned: ids of the tasks that the model has learned.
    """
    inner = unwrap(model)
    refuse_sharded(inner, "A teacher")
    check_finite(dict(inner.named_parameters()))

    # Tasks without a number have a negative id and no table: all outputs are allowed.
    allowed = getattr(task, "allowed", None)
    rows = None
    if allowed is not None:
        all_outputs = torch.ones_like(allowed[0])
        rows = torch.stack([allowed[k] if k >= 0 else all_outputs for k in learned])

    # Frozen parameters, such as the base model under an adapter, do not change and are shared, not copied.
    frozen = [n for n, p in inner.named_parameters() if not p.requires_grad]
    trainable = [(n, p) for n, p in inner.named_parameters() if p.requires_grad]
    state = {n: v.detach().clone() for n, v in [*trainable, *inner.named_buffers()]}
    return {"state": state, "frozen": frozen, "ids": list(learned), "rows": rows}


def find_teacher_conflict(other: Method) -> str:
    """Why a teacher cannot be used together with another method; empty if it can."""
    if other.deployable:
        return ""
    return (
        "the teacher is a copy of the model's weights, and "
        f"{type(other).__name__} predicts with more than these, such as gates, added units or a sub-network per task."
    )


def append_task(learned: list[int], task: Any) -> list[int]:
    """Return the ids of the tasks learned, this one last; a task without an id gets a negative one."""
    task_id = getattr(task, "id", None)
    if task_id is None:
        task_id = -1 - len(learned)
    return [*(k for k in learned if k != task_id), task_id]


def teacher_outputs(model: nn.Module, teacher: Teacher, x: Any) -> Tensor:
    """Compute the outputs of the model with the teacher's parameters and buffers, in evaluation mode."""
    check_same_parameters(model, teacher)
    inner = unwrap(model)
    with torch.no_grad(), evaluating(inner):
        return forward(inner, x, teacher["state"])


def check_same_parameters(model: nn.Module, teacher: Teacher) -> None:
    """Raise if the model has parameters that the teacher does not know."""
    parameters = dict(unwrap(model).named_parameters())
    thawed = [name for name in teacher["frozen"] if name in parameters and parameters[name].requires_grad]
    if thawed:
        raise ValueError(
            f"{', '.join(thawed[:3])}: frozen when the last task ended and trainable now. The teacher shares frozen "
            "parameters and would change too. Make them trainable before end_task(model, task), which copies all "
            "trainable parameters."
        )
    refuse_added_layers(model, teacher)


def refuse_added_layers(model: nn.Module, teacher: Teacher) -> None:
    """Raise if the model has parameters that did not exist when the teacher was stored."""
    known_names = {*teacher["state"], *teacher["frozen"]}
    added = [name for name, _ in unwrap(model).named_parameters() if name not in known_names]
    if added:
        raise ValueError(
            f"{', '.join(added[:3])} did not exist when the last task ended, so the teacher cannot run this model: "
            "grow the output layer (everlearn.surgery.heads.grow_output), or end the task after adding layers."
        )


def distillation_groups(
    teacher: Teacher, current: int | None, target: Tensor, student: tuple[Tensor, Tensor | None] | None = None
) -> list[DistillationGroup]:
    """Group old tasks by the outputs that they share.

    Args:
        teacher: with the tasks it has learned.
        current: id of the current task, which is left out.
        target: outputs of the teacher.
        student: outputs of the model and its table of allowed outputs, to include outputs added since the teacher.
    """
    positions = [i for i, k in enumerate(teacher["ids"]) if k != current]
    if not positions:
        return []
    ids = [teacher["ids"][i] for i in positions]
    outputs, allowed = student or (target, None)

    # Without a table of allowed outputs, all tasks share all outputs.
    if teacher["rows"] is None:
        width = target.shape[-1]
        indices = torch.arange(max(width, outputs.shape[-1]), device=target.device)
        return [DistillationGroup(indices[:width], indices[width:], len(ids), ids[0])]

    old_rows = teacher["rows"][positions]
    new_rows = torch.zeros_like(old_rows)
    if allowed is not None:
        new_rows = allowed[ids].to(old_rows.device) & ~old_rows
    pairs, group_of_task, counts = torch.stack([old_rows, new_rows], 1).unique(
        dim=0, return_inverse=True, return_counts=True
    )

    groups = []
    for group, (pair, count) in enumerate(zip(pairs, counts, strict=True)):
        old_outputs, new_outputs = (row.nonzero().flatten().to(target.device) for row in pair)
        first_task = group_of_task.tolist().index(group)
        groups.append(DistillationGroup(old_outputs, new_outputs, int(count), ids[first_task]))
    return groups


def check_student_outputs(likelihood: Likelihood, t: Tensor, z: Tensor) -> None:
    """Raise if the outputs z of the model cannot be compared with the outputs t of the teacher."""
    if isinstance(likelihood, Categorical) and z.shape[-1] == 1:
        raise ValueError("One output cannot separate classes: give Batch(x, likelihood=Gaussian()) or Bernoulli().")
    lacks_graph = torch.is_grad_enabled() and not z.requires_grad
    if z.dim() != t.dim() or len(z) != len(t) or lacks_graph:
        description = f"{tuple(z.shape)}"
        if not z.requires_grad:
            description += " without a graph"
        raise ValueError(
            "outputs must be the model's outputs for these inputs, with their graph, of shape "
            f"{tuple(t.shape)}; got {description}."
        )


def check_distillable(likelihood: Likelihood, t: Tensor, groups: list[DistillationGroup]) -> None:
    """Raise if the outputs t of the teacher exclude all classes of an old task."""
    if not isinstance(likelihood, Categorical):
        return
    for group in groups:
        if t[..., group.old_outputs].isneginf().all(-1).any():
            raise ValueError(
                f"The teacher's outputs are minus infinity for every output of task {group.task_id} on some inputs, "
                "so there is nothing to distill: return unmasked outputs, and give the task a table of allowed classes."
            )


def softened_kl(t: Tensor, z: Tensor, z_new: Tensor, temperature: float) -> Tensor:
    """Compute KL( softmax(t/T) ‖ softmax([z, z_new]/T) ) per row.

    Outputs that the teacher excludes by minus infinity contribute nothing.

    Args:
        t: logits of the teacher.
        z: logits of the student for the same outputs.
        z_new: logits of the student for outputs with probability 0 under the teacher.
        temperature: T.
    """
    log_p = (t / temperature).log_softmax(-1)
    log_q = (torch.cat([z, z_new], -1) / temperature).log_softmax(-1)[..., : z.shape[-1]]
    # Without the mask 0 · (-∞ + ∞) would be NaN, also in the gradient.
    log_ratio = torch.where(log_p.isneginf(), 0.0, log_p - log_q)
    return (log_p.exp() * log_ratio).sum(-1)


def divergence_terms(likelihood: Likelihood, t: Tensor, z: Tensor, z_new: Tensor, temperature: float) -> Tensor:
    """Return the terms of KL(teacher ‖ student), with the temperature for classes and yes/no labels.

    Args:
        likelihood: of the outputs.
        t: outputs of the teacher.
        z: outputs of the student.
        z_new: outputs of the student with probability 0 under the teacher.
        temperature: T.
    """
    if isinstance(likelihood, Categorical):
        return softened_kl(t, z, z_new, temperature)[..., None]
    if isinstance(likelihood, Bernoulli):
        return output_kl(likelihood, t / temperature, z / temperature)
    return output_kl(likelihood, t, z)
