import pytest
import torch
from torch import nn

from everlearn import AGEM, Batch
from everlearn.methods.replay.agem import project

pytestmark = pytest.mark.usefixtures("double")


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def test_identities_of_the_projection():
    violated = 0
    for _ in range(1000):
        g, g_ref = ([torch.randn(3), torch.randn(2, 2)] for _ in range(2))
        projected = project(g, g_ref)
        product = dot(g, g_ref)
        squared_norm = dot(g_ref, g_ref)
        if product >= 0:
            assert all(torch.equal(a, b) for a, b in zip(projected, g, strict=True))
            continue
        violated += 1
        assert abs(dot(projected, g_ref)) < 1e-12
        assert dot(projected, projected) <= dot(g, g)
        torch.testing.assert_close(dot(g, g) - dot(projected, projected), product**2 / squared_norm)
        for projected_twice, scaled, expected in zip(
            project(projected, g_ref), project(g, [7 * r for r in g_ref]), projected, strict=True
        ):
            torch.testing.assert_close(projected_twice, expected)
            torch.testing.assert_close(scaled, expected)
        for scaled, expected in zip(project([3 * v for v in g], g_ref), projected, strict=True):
            torch.testing.assert_close(scaled, 3 * expected)
    assert 400 < violated < 600


def two_tasks():
    """A model in the second task, whose labels are the opposite of the first task's."""
    model = nn.Linear(3, 2)
    method = AGEM(40)
    x = torch.randn(20, 3)
    first = Batch(x, (x[:, 0] > 0).long(), torch.zeros(20, dtype=torch.long))
    method.observe(first, model(x))
    method.end_task(model, None)
    return model, method, first, Batch(x, 1 - first.y, torch.ones(20, dtype=torch.long))


def test_a_step_does_not_increase_the_old_loss():
    model, method, first, second = two_tasks()
    old_loss = first.loss(model(first.x)).item()
    method.loss(model, second).backward()
    g = [p.grad.clone() for p in model.parameters()]
    g_ref = torch.autograd.grad(first.loss(model(first.x)), list(model.parameters()))
    assert dot(g, g_ref) < 0
    method.before_step(model)
    assert abs(dot([p.grad for p in model.parameters()], g_ref)) < 1e-12
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    assert first.loss(model(first.x)).item() <= old_loss + 1e-9


def test_the_reference_excludes_the_current_task():
    model, method, _, second = two_tasks()
    for _ in range(5):
        method.loss(model, second)
    assert (method.memory["t"] == 1).any()
    drawn, rows = method.draw(second, method.earlier_task_rows(second))
    assert (rows["t"] == 0).all() and len(drawn) == int((method.memory["t"] == 0).sum())


def test_parameters_without_a_gradient_are_not_edited():
    model = nn.ModuleDict({"old": nn.Linear(3, 2), "new": nn.Linear(3, 2), "body": nn.Linear(3, 3)})

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model
            self.head = "old"

        def forward(self, x):
            return model[self.head](model["body"](x))

    net = Heads()
    method = AGEM(20)
    x = torch.randn(20, 3)
    y = (x[:, 0] > 0).long()
    method.observe(Batch(x, y), None)
    method.end_task(net, None)
    net.head = "new"
    method.loss(net, Batch(x, 1 - y)).backward()
    assert model["old"].weight.grad is None
    net.head = "old"
    method.before_step(net)
    assert model["old"].weight.grad is None and model["new"].weight.grad is not None
