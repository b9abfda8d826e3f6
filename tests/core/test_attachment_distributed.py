"""A method attached to a data-parallel loop of two processes trains as in a loop that calls its hooks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from everlearn import Batch
from everlearn.runtime import distributed
from tests.core.test_attachment import METHODS, as_task, net, tasks  # noqa: F401 - tasks is a fixture
from tests.helpers import state_vector

# The others are slow.
QUICK = ["finetune", "ewc", "si", "lwf", "er", "agem", "hat"]


def train(method, tasks, *, attach, use_attached_loss=True, clip=None):  # noqa: F811
    """Train on half of every batch in each process: attached, or with the method's hooks and averaged gradients."""
    model = net()
    for task_index, task in enumerate(tasks):
        torch.manual_seed(10 * task_index + dist.get_rank())
        method.begin_task(model, as_task(task))
        if not attach:
            distributed.broadcast_(method.parameters())
        parameters = [*model.parameters(), *method.parameters()]
        wrapped = model
        if any(p.requires_grad for p in model.parameters()):
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)
        attached = method.attach(model, optimizer) if attach else None
        for _ in range(3):
            for joint_x, joint_y in task:
                x = joint_x[dist.get_rank() :: 2]
                y = joint_y[dist.get_rank() :: 2]
                optimizer.zero_grad()
                if attached is None:
                    method.loss(model, Batch(x, y)).backward()
                    distributed.average_gradients(parameters, 1.0, 0.0)
                    method.before_step(model)
                else:
                    outputs = wrapped(x)
                    loss = F.cross_entropy(outputs, y)
                    if use_attached_loss:
                        loss = attached.loss(loss, x, y, outputs)
                    loss.backward()
                    if clip is not None:
                        attached.before_step()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                if attached is None:
                    method.after_step(model)
        if attached is not None:
            attached.remove()
        method.end_task(model, as_task(task))
    return state_vector(model)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_attached_equals_loop_with_hooks_in_two_processes(name, run_two_processes, tasks):  # noqa: F811
    def train_both():
        options = {"clip": 0.02} if name in ("ewc online", "derpp", "gem") else {}
        return [train(METHODS[name](), tasks, attach=attach, **options) for attach in (True, False)]

    (first, expected), (second, _) = run_two_processes(train_both)
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["ewc", *(pytest.param(n, marks=pytest.mark.slow) for n in ("l2", "mas", "si"))])
def test_penalties_need_no_line_in_two_processes(name, run_two_processes, tasks):  # noqa: F811
    def train_both():
        return [train(METHODS[name](), tasks, attach=attach, use_attached_loss=False) for attach in (True, False)]

    for attached_weights, expected in run_two_processes(train_both):
        torch.testing.assert_close(attached_weights, expected, rtol=1e-7, atol=1e-9)
