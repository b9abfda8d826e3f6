import pytest
import torch
from torch import nn

from everlearn import PackNet, Task, train
from everlearn.core.parameters import remembered_parameters, snapshot, trainable_parameters, unwrap
from everlearn.curvature import fisher


def test_names_do_not_depend_on_wrapping():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names = list(trainable_parameters(net))
    for wrapped in (nn.DataParallel(net), torch.compile(net), torch.compile(nn.DataParallel(net))):
        assert list(trainable_parameters(wrapped)) == names
        assert unwrap(wrapped) is net
    inner = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 1))
    assert list(trainable_parameters(inner)) == names


def test_a_child_named_module_keeps_its_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.head = nn.Linear(2, 1)

    assert list(trainable_parameters(Net())) == ["module.weight", "module.bias", "head.weight", "head.bias"]


def test_known_wrappers_are_unwrapped():
    from lightning.fabric import Fabric

    net = nn.Linear(2, 1)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    assert unwrap(averaged) is averaged.module and list(trainable_parameters(averaged)) == ["weight", "bias"]
    fabric = Fabric(accelerator="cpu", devices=1).setup(net)
    assert unwrap(fabric) is net and list(trainable_parameters(fabric)) == ["weight", "bias"]


class Doubled(nn.Module):
    """A custom wrapper whose only child has the name used by torch's wrappers."""

    def __init__(self, child, name):
        super().__init__()
        self.add_module(name, child)
        self.name = name

    def forward(self, x):
        return 2 * getattr(self, self.name)(x)


@pytest.mark.parametrize("name", ["module", "_original_module", "_fsdp_wrapped"])
def test_a_custom_wrapper_keeps_its_forward_pass_and_names(name):
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x = torch.randn(20, 4, dtype=torch.double)
    wrapped = Doubled(net, name)
    assert unwrap(wrapped) is wrapped and unwrap(nn.DataParallel(wrapped)) is wrapped
    assert list(trainable_parameters(wrapped)) == [f"{name}.weight", f"{name}.bias"]
    p = wrapped(x).softmax(1).detach()
    expected = 4 * torch.einsum("nc,ni->ci", p * (1 - p), x**2) / 20
    torch.testing.assert_close(fisher(wrapped, x).values[f"{name}.weight"], expected)


def test_packnet_predicts_through_a_custom_wrapper():
    torch.manual_seed(0)
    model = Doubled(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "module")
    method = PackNet()
    x = torch.randn(16, 4)
    y = torch.randint(2, (16,))
    train(model, method, Task((x, y), id=0), epochs=1, batch_size=16)
    torch.testing.assert_close(method.predict(model, x, torch.zeros(16, dtype=torch.long)), model.eval()(x))


def test_only_trainable_parameters_are_in_a_snapshot():
    net = nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    assert list(snapshot(net)) == ["weight"]


def test_tied_parameters_appear_once():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert list(trainable_parameters(net)) == ["0.weight", "0.bias", "1.bias"]


def test_remembered_parameters_are_differentiable_and_shrunken_layers_refused():
    net = nn.Linear(2, 3)
    anchor = snapshot(net)
    remembered_parameters(net, anchor)["weight"].sum().backward()
    assert torch.equal(net.weight.grad, torch.ones(3, 2))
    with pytest.raises(ValueError, match="not shrink"):
        remembered_parameters(nn.Linear(2, 2), anchor)


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 2), (3, 3), (3, 4)])
def test_only_outputs_may_be_added_after_a_parameter_was_remembered(inputs, outputs):
    anchor = snapshot(nn.Linear(2, 3))
    with pytest.raises(
        ValueError, match=rf"weight has shape \({outputs}, {inputs}\) and was remembered with shape \(3, 2\)"
    ):
        remembered_parameters(nn.Linear(inputs, outputs), anchor)
    grown = nn.Linear(2, 5)
    assert torch.equal(remembered_parameters(grown, anchor)["weight"], grown.weight[:3])
