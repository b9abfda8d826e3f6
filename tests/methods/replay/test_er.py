import copy

import pytest
import torch
from torch import nn

from everlearn import ER, ERACE, Batch, Gaussian

pytestmark = pytest.mark.usefixtures("double")


def observed(method, model, n=12):
    old = Batch(torch.randn(n, 4), torch.randint(3, (n,)))
    method.observe(old, model(old.x))
    return old


def gradient(loss, model):
    return torch.autograd.grad(loss, model.weight)[0]


@pytest.mark.parametrize(("num_new", "size"), [(8, None), (8, 5), (8, 100)])
def test_the_gradient_is_that_of_the_joint_batch(num_new, size):
    model = nn.Linear(4, 3)
    method = ER(12, size)
    old = observed(method, model)
    batch = Batch(torch.randn(num_new, 4), torch.randint(3, (num_new,)))
    state = copy.deepcopy(method.memory.state_dict())
    g = gradient(method.loss(model, batch), model)
    method.memory.load_state_dict(state)
    drawn, _ = method.draw(batch)
    count = min(size or num_new, len(old))
    assert len(drawn) == count
    joint_batch = Batch(torch.cat([batch.x, drawn.x]), torch.cat([batch.y, drawn.y]))
    torch.testing.assert_close(g, gradient(joint_batch.loss(model(joint_batch.x)), model))


def test_current_examples_are_not_replayed_at_once():
    model = nn.Linear(4, 3)
    method = ER(100)
    batch = Batch(torch.randn(8, 4), torch.randint(3, (8,)))
    torch.testing.assert_close(method.loss(model, batch), batch.loss(model(batch.x)))
    assert len(method.memory) == 8


def test_balance_by_tasks_weights_the_memory_by_the_number_of_earlier_tasks():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    er = ER(30, 4, balance="tasks")
    for t in range(3):
        x = torch.randn(10, 3)
        y = torch.randint(2, (10,))
        batch = Batch(x, y, torch.full((10,), t))
        expected = batch.loss(model(x))
        if t:
            # A copy draws the same examples.
            replayed, _ = copy.deepcopy(er).draw(batch, er.earlier_task_rows(batch))
            assert len(replayed) == 4 and set(replayed.t.tolist()) <= set(range(t))
            expected = expected / (1 + t) + replayed.loss(model(replayed.x)) * t / (1 + t)
        loss, outputs = er.task_loss(model, batch)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(outputs, model(x))
        er.observe(batch, outputs.detach())
        er.end_task(model, None)


def test_ace_changes_only_logits_of_the_batchs_classes():
    model = nn.Linear(4, 5)
    method = ERACE(50)
    batch = Batch(torch.randn(8, 4), torch.tensor([0, 2] * 4))
    outputs = model(batch.x)
    expected = nn.functional.cross_entropy(outputs[:, [0, 2]], torch.tensor([0, 1] * 4))
    loss, _ = method.task_loss(model, batch)
    torch.testing.assert_close(loss, expected)
    g = gradient(loss, model)
    assert (g[[1, 3, 4]] == 0).all() and (g[[0, 2]] != 0).any()


def test_ace_on_the_memory_is_over_all_classes():
    model = nn.Linear(4, 3)
    method = ERACE(12, 12)
    old = observed(method, model)
    batch = Batch(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    torch.testing.assert_close(method.penalty(model, batch), old.loss(model(old.x)))


@pytest.mark.parametrize("kind", [ER, ERACE])
def test_ignored_tokens(kind):
    """Means are over tokens that count; examples without any are not replayed."""
    model = nn.Linear(4, 3)
    method = kind(4, 4)
    x = torch.randn(4, 5, 4)
    y = torch.randint(3, (4, 5))
    y[:, 3:] = -100
    old = Batch(x, y)
    method.observe(old, model(x))
    new_batch = Batch(torch.randn(2, 5, 4), torch.randint(3, (2, 5)))
    loss = method.loss(model, new_batch)
    losses = [b.loss(model(b.x)) for b in (new_batch, old)]
    expected = (losses[0] * 10 + losses[1] * 12) / 22 if kind is ER else losses[0] + losses[1]
    torch.testing.assert_close(loss, expected)
    unlabeled = kind(4, 4)
    unlabeled.observe(Batch(x, torch.full((4, 5), -100)), model(x))
    torch.testing.assert_close(unlabeled.loss(model, new_batch), losses[0])


def test_ace_needs_classes():
    with pytest.raises(TypeError, match=r"ER-ACE needs classes; Gaussian.* use ER"):
        ERACE().task_loss(nn.Linear(4, 1), Batch(torch.randn(2, 4), torch.randn(2, 1), likelihood=Gaussian()))


@pytest.mark.parametrize("method", [ER(20), ERACE(20)], ids=["ER", "ERACE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_not_classes_raise(method, dtype):
    y = torch.tensor([0, 1, 1, 0]).to(dtype)
    with pytest.raises(TypeError, match=rf"Class labels must be integers, got {dtype}: use y.long\(\)"):
        method.loss(nn.Linear(4, 3), Batch(torch.randn(4, 4), y))
