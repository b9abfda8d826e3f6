"""``method.check`` tells what a method will do, and finds known misuse, without changing anything."""

import copy

import pytest
import torch
from torch import nn

import everlearn
from everlearn import ER, EWC, HAT, L2, METHODS, SI, Batch, LwF, Method, Task


def net(*last_layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3), *last_layers)


def batch():
    torch.manual_seed(1)
    return Batch(torch.randn(8, 4), torch.randint(3, (8,)))


def sgd(model, *others):
    return torch.optim.SGD([*model.parameters(), *others], lr=0.1)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_described_without_a_problem(name):
    model = net()
    method = METHODS[name]()
    b = batch()
    method.begin_task(model, Task((b.x, b.y), id=0, steps=4, valid=(b.x, b.y)))
    optimizer = sgd(model, *method.parameters())
    model_state = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    report = method.check(model, optimizer, b)
    assert not report.problems, report.problems
    assert report.facts["running statistics"] == "1 layers: 1"
    assert all(torch.equal(v, model_state[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state) and model.training


def test_known_misuse_is_found():
    model = net(nn.Softmax(-1)).eval()
    report = (EWC(10.0) + ER(100)).check(model, torch.optim.SGD(model[0].parameters(), 0.1), batch())
    assert len(report.problems) == 3
    assert "does not have 1.weight, 1.bias" in report.problems[0]
    assert "evaluation mode" in report.problems[1]
    assert "probabilities" in report.problems[2]
    text = str(report)
    assert text.count("PROBLEM") == 3 and "63 trainable, 0 frozen" in text and "of 100 examples" in text
    assert report._repr_html_().count("<tr>") == len(report.rows)


def test_the_size_of_the_state_is_unknown_if_it_is_not_measured():
    class Unmeasured(EWC):
        """The traits of EWC need not hold for it."""

    assert EWC().check(net()).facts["state"].startswith("about 0.5 KB after 1"), "two copies of 63 numbers"
    assert (EWC() + Unmeasured()).check(net()).facts["state"] == "not measured"


def test_an_optimizer_that_was_created_too_early():
    model = net()
    method = HAT()
    optimizer = sgd(model)
    b = batch()
    method.begin_task(model, Task((b.x, b.y), id=0, steps=4))
    (problem,) = method.check(model, optimizer).problems
    assert "create it after begin_task" in problem


def test_nothing_to_protect_and_nothing_to_train():
    model = net()
    (problem,) = EWC(only="head.*").check(model).problems
    assert "head.*" in problem
    method = L2()
    everlearn.train(model, method, (batch().x, batch().y))
    (problem,) = method.check(nn.Sequential(model)).problems
    assert "nothing to protect" in problem
    (problem,) = Method().check(net().requires_grad_(False)).problems
    assert "nothing to train" in problem


def test_penalized_and_skipped_parameters_are_named():
    facts = SI(only="0.*").check(net()).facts
    assert facts["penalized"] == "30 entries of 0.weight, 0.bias"
    assert facts["not penalized"].startswith("33 entries of 1.weight")


def test_wrong_labels_are_found():
    b = batch()
    (problem,) = Method().check(net(), batch=Batch(b.x, b.y + 3)).problems
    assert "3 outputs" in problem or "label" in problem


def test_the_trainer_refuses_problems_before_the_first_step():
    model = net()
    method = L2()
    data = (batch().x, batch().y)
    everlearn.train(model, method, data)
    with pytest.raises(ValueError, match="nothing to protect"):
        everlearn.train(nn.Sequential(model), method, data)


def test_the_teacher_is_described():
    model = net()
    method = LwF()
    assert "none yet" in method.check(model).facts["teacher"]
    everlearn.train(model, method, (batch().x, batch().y))
    assert "one more forward pass" in method.check(model).facts["teacher"]
