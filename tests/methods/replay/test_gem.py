from itertools import product

import pytest
import torch
from torch import nn

from everlearn import GEM, Batch
from everlearn.methods.replay.agem import project
from everlearn.methods.replay.gem import nearest, non_negative

pytestmark = pytest.mark.usefixtures("double")


def by_enumeration(gram, vector):
    """All 2ᵗ active sets, the best of those that satisfy the constraints."""
    best, height = None, torch.inf
    for free in product([False, True], repeat=len(vector)):
        mask, u = torch.tensor(free), torch.zeros_like(vector)
        if mask.any():
            u[mask] = torch.linalg.solve(gram[mask][:, mask], -vector[mask])
        value = u @ gram @ u / 2 + vector @ u
        if (u >= 0).all() and value < height:
            best, height = u, value
    return best


@pytest.mark.parametrize("tasks", [1, 2, 3, 5])
def test_the_quadratic_programme_against_enumeration(tasks):
    for _ in range(100):
        rows = torch.randn(tasks, 8)
        gram, vector = rows @ rows.t() + 1e-6 * torch.eye(tasks), torch.randn(tasks)
        torch.testing.assert_close(non_negative(gram, vector), by_enumeration(gram, vector), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("tasks", [2, 5, 10])
def test_the_conditions_of_optimality(tasks):
    for _ in range(100):
        g, rows = torch.randn(20), torch.randn(tasks, 20)
        z = nearest(g, rows)
        assert (rows @ z >= -1e-9).all()
        v = torch.linalg.lstsq(rows.t(), (z - g)[:, None]).solution[:, 0]
        assert (v >= -1e-9).all() and abs(v @ rows @ z) < 1e-8
        if (rows @ g >= 0).all():
            assert torch.equal(z, g)


def test_one_old_task_is_a_gem():
    for _ in range(100):
        g, row = torch.randn(9), torch.randn(9)
        torch.testing.assert_close(nearest(g, row[None]), project([g], [row])[0])


def test_margin_and_ridge_as_in_the_authors_code():
    """With a ridge the promise is M z ≥ -ridge · v; with a margin v ≥ margin for all tasks as soon as one is violated."""
    for _ in range(100):
        g, rows = torch.randn(12), torch.randn(3, 12)
        if (rows @ g >= 0).all():
            continue
        z = nearest(g, rows, margin=0.5, ridge=1e-3)
        v = torch.linalg.lstsq(rows.t(), (z - g)[:, None]).solution[:, 0]
        assert (v >= 0.5 - 1e-9).all()
        slope = (rows @ rows.t() + 1e-3 * torch.eye(3)) @ v + rows @ g
        assert (slope >= -1e-8).all() and (slope * (v - 0.5)).abs().max() < 1e-7


def test_parallel_old_gradients_do_not_break_it():
    g, row = torch.randn(6), torch.randn(6)
    g = g if g @ row < 0 else -g
    z = nearest(g, torch.stack([row, row, 2 * row]))
    assert z.isfinite().all() and abs(z @ row) < 1e-8


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e9, 1e15])
def test_the_projection_does_not_depend_on_the_unit(size):
    """A gradient in another unit is projected to the same vector in that unit; rows may have units of their own."""
    for _ in range(100):
        g, rows = torch.randn(6), torch.randn(4, 6)
        torch.testing.assert_close(nearest(size * g, size * rows) / size, nearest(g, rows))
        each = torch.tensor([1.0, size, 1 / size, 1.0])[:, None]
        torch.testing.assert_close(nearest(g, each * rows), nearest(g, rows), rtol=1e-6, atol=1e-6)


def test_a_step_respects_every_old_task():
    model, method, x = nn.Linear(5, 2), GEM(80, margin=0.0, ridge=0.0), torch.randn(20, 5)
    old = [Batch(x, (x[:, k] > 0).long(), torch.full((20,), k)) for k in range(3)]
    for batch in old:
        method.observe(batch, model(x))
    now = Batch(x, (x[:, :3].sum(1) < 0).long(), torch.full((20,), 3))
    method.loss(model, now).backward()
    method.before_step(model)
    for batch in old:
        ref = torch.autograd.grad(batch.loss(model(x)), list(model.parameters()))
        assert sum((p.grad * r).sum() for p, r in zip(model.parameters(), ref, strict=True)) > -1e-9


def test_a_task_may_have_a_fixed_share_from_the_start():
    method = GEM(20, each=5)
    for number in range(3):
        x = torch.randn(8, 3)
        method.observe(Batch(x, torch.zeros(8, dtype=torch.long), torch.full((8,), number)), torch.zeros(8, 2))
        assert method.memory["t"].bincount().tolist() == [5] * (number + 1)
