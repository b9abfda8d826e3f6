import pytest
import torch
from torch import nn

from everlearn.params import named, remembered, snapshot, unwrap


def test_names_do_not_depend_on_wrapping():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names = list(named(net))
    for wrapped in (nn.DataParallel(net), torch.compile(net), torch.compile(nn.DataParallel(net))):
        assert list(named(wrapped)) == names
        assert unwrap(wrapped) is net
    inner = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 1))
    assert list(named(inner)) == names


def test_a_model_with_a_part_called_module_keeps_its_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)

    assert list(named(Net())) == ["module.weight", "module.bias", "head.weight", "head.bias"]


def test_only_trainable_parameters_count():
    net = nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    assert list(snapshot(net)) == ["weight"]


def test_tied_parameters_appear_once():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert list(named(net)) == ["0.weight", "0.bias", "1.bias"]


def test_remembered_parameters_are_differentiable_and_refuses_a_shrunken_layer():
    net = nn.Linear(2, 3)
    anchor = snapshot(net)
    remembered(net, anchor)["weight"].sum().backward()
    assert torch.equal(net.weight.grad, torch.ones(3, 2))
    with pytest.raises(ValueError, match="not shrink"):
        remembered(nn.Linear(2, 2), anchor)


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 2), (3, 3), (3, 4)])
def test_only_outputs_may_have_been_added_since_a_parameter_was_remembered(inputs, outputs):
    anchor = snapshot(nn.Linear(2, 3))
    with pytest.raises(
        ValueError, match=rf"weight has shape \({outputs}, {inputs}\) and was remembered with shape \(3, 2\)"
    ):
        remembered(nn.Linear(inputs, outputs), anchor)
    grown = nn.Linear(2, 5)
    assert torch.equal(remembered(grown, anchor)["weight"], grown.weight[:3])
