"""Growing methods accept models whose code symbolic tracing cannot follow, or say why they do not."""

import copy

import pytest
import torch
from torch import nn

import everlearn
from everlearn import DEN, ExpandNet, Task
from tests.architectures import ConvNeXt, DataDependentDepth, VisionTransformer


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def expand_net():
    return ExpandNet(units=4, threshold=0.0, look=0.2)


def den():
    return DEN(units=3, splits=2, threshold=0.0)


ARCHITECTURES = pytest.mark.parametrize("architecture", [VisionTransformer, ConvNeXt, DataDependentDepth])


@ARCHITECTURES
def test_expandnet_forgets_nothing(architecture, small_stream, check_isolation):
    methods = []

    def make_method():
        methods.append(expand_net())
        return methods[-1]

    check_isolation(make_method, lambda stream: architecture(stream.outputs), adam, small_stream())
    assert methods[0].diagnostics()["units added so far"] > 0


@ARCHITECTURES
def test_den_grows(architecture, small_stream):
    torch.manual_seed(0)
    stream = small_stream()
    model = architecture(stream.outputs)
    method = den()
    for task in stream.tasks[:2]:
        everlearn.train(model, method, task, optimizer=adam, epochs=3, batch_size=16)
    assert sum(method.growth()[1].values()) > 0

    # A loaded method finds the layers without examples, and an export is a plain wider model.
    x = next(stream[0].examples(6, "test")).x
    outputs = method.predict(model, x, 1)
    loaded = den()
    loaded.load_state_dict(method.state_dict())
    other = architecture(stream.outputs)
    other.load_state_dict(model.state_dict())
    assert torch.equal(loaded.predict(other, x, 1), outputs)
    exported = loaded.export(copy.deepcopy(other), 1).eval()
    torch.testing.assert_close(exported(x), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [expand_net, den])
def test_what_cannot_be_widened_is_refused_with_reasons(make):
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(4, 6)
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.norm(self.enter(x)))

    task = Task((torch.randn(8, 4), torch.arange(8) % 2), id=0)
    with pytest.raises(ValueError, match=r"no layer to widen in Stream.*'enter': native_layer_norm mixes its units"):
        make().begin_task(Stream(), task)


@pytest.mark.parametrize("make", [expand_net, den])
def test_a_fixed_number_of_units_is_a_reason(make):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(4, 6)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(torch.relu(self.enter(x)).view(len(x), 6))

    task = Task((torch.randn(8, 4), torch.arange(8) % 2), id=0)
    with pytest.raises(ValueError, match=r"'enter': the model's code fixes the number of its units"):
        make().begin_task(Fixed(), task)
