import copy

import pytest
import torch
from torch import nn

from everlearn import ER, ERACE, Batch, Gaussian

pytestmark = pytest.mark.usefixtures("double")


def filled(method, model, n=12):
    old = Batch(torch.randn(n, 4), torch.randint(3, (n,)))
    method.observe(old, model(old.x))
    return old


def gradient(loss, model):
    return torch.autograd.grad(loss, model.weight)[0]


@pytest.mark.parametrize(("new", "size"), [(8, None), (8, 5), (8, 100)])
def test_the_gradient_is_that_of_all_examples_together(new, size):
    model, method = nn.Linear(4, 3), ER(12, size)
    old = filled(method, model)
    batch = Batch(torch.randn(new, 4), torch.randint(3, (new,)))
    state = copy.deepcopy(method.memory.state_dict())
    g = gradient(method.loss(model, batch), model)
    method.memory.load_state_dict(state)
    drawn, _ = method.draw(batch)
    count = min(size or new, len(old))
    assert len(drawn) == count
    together = Batch(torch.cat([batch.x, drawn.x]), torch.cat([batch.y, drawn.y]))
    torch.testing.assert_close(g, gradient(together.loss(model(together.x)), model))


def test_current_examples_are_not_replayed_at_once():
    model, method = nn.Linear(4, 3), ER(100)
    batch = Batch(torch.randn(8, 4), torch.randint(3, (8,)))
    torch.testing.assert_close(method.loss(model, batch), batch.loss(model(batch.x)))
    assert len(method.memory) == 8


def test_balance_by_tasks_weights_the_memory_by_the_tasks_behind():
    torch.manual_seed(0)
    model, er = nn.Linear(3, 2), ER(30, 4, balance="tasks")
    for t in range(3):
        x, y = torch.randn(10, 3), torch.randint(2, (10,))
        batch = Batch(x, y, torch.full((10,), t))
        whole = er.join(batch)
        out = model(whole.x)
        if t:
            assert len(whole) == 14 and set(whole[10:].t.tolist()) <= set(range(t))
            truth = batch.loss(out[:10]) / (1 + t) + whole[10:].loss(out[10:]) * t / (1 + t)
        else:
            assert whole is batch
            truth = batch.loss(out)
        torch.testing.assert_close(er.task_loss(whole, out), truth)
        er.observe(batch, out[:10])
        er.end_task(model, None)


def test_ace_pushes_only_classes_of_the_batch():
    model, method = nn.Linear(4, 5), ERACE(50)
    batch = Batch(torch.randn(8, 4), torch.tensor([0, 2] * 4))
    out = model(batch.x)
    truth = nn.functional.cross_entropy(out[:, [0, 2]], torch.tensor([0, 1] * 4))
    torch.testing.assert_close(method.task_loss(batch, out), truth)
    g = gradient(method.task_loss(batch, model(batch.x)), model)
    assert (g[[1, 3, 4]] == 0).all() and (g[[0, 2]] != 0).any()


def test_ace_on_the_memory_sees_all_classes():
    model, method = nn.Linear(4, 3), ERACE(12, 12)
    old = filled(method, model)
    batch = Batch(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    torch.testing.assert_close(method.penalty(model, batch), old.loss(model(old.x)))


@pytest.mark.parametrize("kind", [ER, ERACE])
def test_tokens_that_do_not_count(kind):
    """Means run over tokens that count; a draw without any leaves the new examples alone."""
    model, method = nn.Linear(4, 3), kind(4, 4)
    x, y = torch.randn(4, 5, 4), torch.randint(3, (4, 5))
    y[:, 3:] = -100
    old = Batch(x, y)
    method.observe(old, model(x))
    new = Batch(torch.randn(2, 5, 4), torch.randint(3, (2, 5)))
    found = method.loss(model, new)
    both = [b.loss(model(b.x)) for b in (new, old)]
    truth = (both[0] * 10 + both[1] * 12) / 22 if kind is ER else both[0] + both[1]
    torch.testing.assert_close(found, truth)
    silent = kind(4, 4)
    silent.observe(Batch(x, torch.full((4, 5), -100)), model(x))
    torch.testing.assert_close(silent.loss(model, new), both[0])


def test_ace_is_about_classes():
    with pytest.raises(TypeError, match=r"ER-ACE is about classes; Gaussian.* use ER"):
        ERACE().task_loss(Batch(torch.randn(2, 4), torch.randn(2, 1), likelihood=Gaussian()), torch.randn(2, 1))


@pytest.mark.parametrize("method", [ER(20), ERACE(20)], ids=["ER", "ERACE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_no_classes_are_refused_in_a_sentence(method, dtype):
    y = torch.tensor([0, 1, 1, 0]).to(dtype)
    with pytest.raises(TypeError, match=rf"Class labels must be integers, got {dtype}: use y.long\(\)"):
        method.loss(nn.Linear(4, 3), Batch(torch.randn(4, 4), y))
