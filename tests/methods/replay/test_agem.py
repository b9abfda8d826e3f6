import pytest
import torch
from torch import nn

from everlearn import AGEM, Batch
from everlearn.methods.replay.agem import project

pytestmark = pytest.mark.usefixtures("double")


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def test_the_identities_of_the_projection():
    violated = 0
    for _ in range(1000):
        g, ref = ([torch.randn(3), torch.randn(2, 2)] for _ in range(2))
        turned, product, length = project(g, ref), dot(g, ref), dot(ref, ref)
        if product >= 0:
            assert all(torch.equal(a, b) for a, b in zip(turned, g, strict=True))
            continue
        violated += 1
        assert abs(dot(turned, ref)) < 1e-12
        assert dot(turned, turned) <= dot(g, g)
        torch.testing.assert_close(dot(g, g) - dot(turned, turned), product**2 / length)
        for again, scaled, whole in zip(project(turned, ref), project(g, [7 * r for r in ref]), turned, strict=True):
            torch.testing.assert_close(again, whole)
            torch.testing.assert_close(scaled, whole)
        for scaled, whole in zip(project([3 * v for v in g], ref), turned, strict=True):
            torch.testing.assert_close(scaled, 3 * whole)
    assert 400 < violated < 600


def two_tasks():
    """A model in the second task, whose labels say the opposite of the first's."""
    model, method, x = nn.Linear(3, 2), AGEM(40), torch.randn(20, 3)
    first = Batch(x, (x[:, 0] > 0).long(), torch.zeros(20, dtype=torch.long))
    method.observe(first, model(x))
    method.end_task(model, None)
    return model, method, first, Batch(x, 1 - first.y, torch.ones(20, dtype=torch.long))


def test_the_step_does_not_raise_the_old_loss():
    model, method, first, second = two_tasks()
    before = first.loss(model(first.x)).item()
    method.loss(model, second).backward()
    g = [p.grad.clone() for p in model.parameters()]
    ref = torch.autograd.grad(first.loss(model(first.x)), list(model.parameters()))
    assert dot(g, ref) < 0
    method.before_step(model)
    assert abs(dot([p.grad for p in model.parameters()], ref)) < 1e-12
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    assert first.loss(model(first.x)).item() <= before + 1e-9


def test_the_current_task_is_no_reference():
    model, method, _, second = two_tasks()
    for _ in range(5):
        method.loss(model, second)
    assert (method.memory["t"] == 1).any()
    drawn, rows = method.draw(second, method.earlier(second))
    assert (rows["t"] == 0).all() and len(drawn) == int((method.memory["t"] == 0).sum())


def test_parameters_that_only_one_side_uses_are_left_alone():
    model = nn.ModuleDict({"old": nn.Linear(3, 2), "new": nn.Linear(3, 2), "body": nn.Linear(3, 3)})

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.head = model, "old"

        def forward(self, x):
            return model[self.head](model["body"](x))

    net, method, x = Heads(), AGEM(20), torch.randn(20, 3)
    y = (x[:, 0] > 0).long()
    method.observe(Batch(x, y), None)
    method.end_task(net, None)
    net.head = "new"
    method.loss(net, Batch(x, 1 - y)).backward()
    assert model["old"].weight.grad is None
    net.head = "old"
    method.before_step(net)
    assert model["old"].weight.grad is None and model["new"].weight.grad is not None
