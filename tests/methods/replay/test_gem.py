from itertools import product

import pytest
import torch
from torch import nn

from everlearn import GEM, Batch
from everlearn.methods.replay.agem import project
from everlearn.methods.replay.gem import project_to_cone
from everlearn.methods.replay.quadratic_program import minimize_nonnegative

pytestmark = pytest.mark.usefixtures("double")


def minimize_by_enumeration(gram, vector):
    """Try all 2ᵗ active sets; return the best solution that satisfies the constraints."""
    best = None
    best_value = torch.inf
    for free_variables in product([False, True], repeat=len(vector)):
        is_free = torch.tensor(free_variables)
        u = torch.zeros_like(vector)
        if is_free.any():
            u[is_free] = torch.linalg.solve(gram[is_free][:, is_free], -vector[is_free])
        value = u @ gram @ u / 2 + vector @ u
        if (u >= 0).all() and value < best_value:
            best = u
            best_value = value
    return best


@pytest.mark.parametrize("tasks", [1, 2, 3, 5])
def test_the_quadratic_program_against_enumeration(tasks):
    for _ in range(100):
        rows = torch.randn(tasks, 8)
        gram = rows @ rows.t() + 1e-6 * torch.eye(tasks)
        vector = torch.randn(tasks)
        torch.testing.assert_close(
            minimize_nonnegative(gram, vector), minimize_by_enumeration(gram, vector), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("tasks", [2, 5, 10])
def test_the_conditions_of_optimality(tasks):
    for _ in range(100):
        g = torch.randn(20)
        rows = torch.randn(tasks, 20)
        z = project_to_cone(g, rows)
        assert (rows @ z >= -1e-9).all()
        v = torch.linalg.lstsq(rows.t(), (z - g)[:, None]).solution[:, 0]
        assert (v >= -1e-9).all() and abs(v @ rows @ z) < 1e-8
        if (rows @ g >= 0).all():
            assert torch.equal(z, g)


def test_with_one_old_task_gem_equals_agem():
    for _ in range(100):
        g = torch.randn(9)
        row = torch.randn(9)
        torch.testing.assert_close(project_to_cone(g, row[None]), project([g], [row])[0])


def test_margin_and_ridge_as_in_the_authors_code():
    """A ridge guarantees M z ≥ -ridge · v; a margin v ≥ margin for all tasks as soon as one is violated."""
    for _ in range(100):
        g = torch.randn(12)
        rows = torch.randn(3, 12)
        if (rows @ g >= 0).all():
            continue
        z = project_to_cone(g, rows, margin=0.5, ridge=1e-3)
        v = torch.linalg.lstsq(rows.t(), (z - g)[:, None]).solution[:, 0]
        assert (v >= 0.5 - 1e-9).all()
        slope = (rows @ rows.t() + 1e-3 * torch.eye(3)) @ v + rows @ g
        assert (slope >= -1e-8).all() and (slope * (v - 0.5)).abs().max() < 1e-7


def test_parallel_old_gradients():
    g = torch.randn(6)
    row = torch.randn(6)
    g = g if g @ row < 0 else -g
    z = project_to_cone(g, torch.stack([row, row, 2 * row]))
    assert z.isfinite().all() and abs(z @ row) < 1e-8


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e9, 1e15])
def test_the_projection_does_not_depend_on_the_scale(size):
    """A scaled gradient has a scaled projection; each row may have its own scale."""
    for _ in range(100):
        g = torch.randn(6)
        rows = torch.randn(4, 6)
        torch.testing.assert_close(project_to_cone(size * g, size * rows) / size, project_to_cone(g, rows))
        row_scales = torch.tensor([1.0, size, 1 / size, 1.0])[:, None]
        torch.testing.assert_close(
            project_to_cone(g, row_scales * rows), project_to_cone(g, rows), rtol=1e-6, atol=1e-6
        )


def test_a_step_increases_no_old_loss():
    model = nn.Linear(5, 2)
    method = GEM(80, margin=0.0, ridge=0.0)
    x = torch.randn(20, 5)
    old = [Batch(x, (x[:, k] > 0).long(), torch.full((20,), k)) for k in range(3)]
    for batch in old:
        method.observe(batch, model(x))
    current = Batch(x, (x[:, :3].sum(1) < 0).long(), torch.full((20,), 3))
    method.loss(model, current).backward()
    method.before_step(model)
    for batch in old:
        g_ref = torch.autograd.grad(batch.loss(model(x)), list(model.parameters()))
        assert sum((p.grad * r).sum() for p, r in zip(model.parameters(), g_ref, strict=True)) > -1e-9


def test_a_task_may_have_a_fixed_quota_from_the_start():
    method = GEM(20, max_per_task=5)
    for number in range(3):
        x = torch.randn(8, 3)
        method.observe(Batch(x, torch.zeros(8, dtype=torch.long), torch.full((8,), number)), torch.zeros(8, 2))
        assert method.memory["t"].bincount().tolist() == [5] * (number + 1)
