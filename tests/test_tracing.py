import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import nets
from everlearn.tracing import Link, links


class Net(nn.Module):
    """Functional calls, and lengths asked of tensors."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc1, self.fc2 = nn.Linear(6 * 4, 10), nn.Linear(10, 2)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        x = F.relu(self.conv2(x))
        x = x.view(x.size(0), -1)
        return self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.1, self.training))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = self.a(x)
        x = x + self.c(torch.relu(self.b(x)))
        return self.out(self.norm(x))


def test_a_net_with_functional_calls():
    assert links(Net()) == [
        Link("conv1", "conv2", ("norm",), 4),
        Link("conv2", "fc1", (), 6, 4),
        Link("fc1", "fc2", (), 10),
    ]


def test_a_residual_stream_has_no_link_but_what_branches_off_it_has():
    assert links(Residual()) == [Link("b", "c", (), 4)]


def test_our_nets():
    assert [(k.producer, k.consumer) for k in links(nets.mlp(4, 2, hidden=(5, 6)))] == [("1", "3"), ("3", "5")]
    assert links(nets.cnn((1, 8, 8), 2, channels=(3, 5))) == [
        Link("0.0", "1.0", ("0.1",), 3),
        Link("1.0", "4", ("1.1",), 5),
    ]
    resnet = links(nets.resnet((1, 8, 8), 2, width=4, blocks=(1, 1)))
    assert resnet == [
        Link("3.conv1", "3.conv2", ("3.norm1",), 4),
        Link("4.conv1", "4.conv2", ("4.norm1",), 8),
    ]
    transformer = links(nets.transformer((1, 8, 8), 2, width=16, depth=2, heads=2))
    assert [k.producer for k in transformer] == [f"encoder.layers.{i}.linear1" for i in range(2)]


@pytest.mark.parametrize(
    "between",
    [nn.LayerNorm(6), nn.Softmax(-1), nn.MaxPool1d(2), nn.GroupNorm(2, 6), nn.PReLU(6), nn.Bilinear(6, 6, 6)],
    ids=lambda m: type(m).__name__,
)
def test_what_mixes_units_ends_a_link(between):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.between, self.b = nn.Linear(4, 6), between, nn.Linear(6, 2)

        def forward(self, x):
            h = self.a(x)
            return self.b(self.between(h, h) if isinstance(between, nn.Bilinear) else self.between(h))

    assert links(Small()) == []


def test_layers_called_twice_shared_or_grouped_have_no_link():
    shared = nn.Linear(4, 4)
    assert links(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2))) == []
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 2, 1))
    assert links(grouped) == []


def test_a_model_that_cannot_be_traced_is_told_to_name_groups():
    class Branching(Residual):
        def forward(self, x):
            return self.c(self.b(x)) if x.sum() > 0 else x

    with pytest.raises(ValueError, match=r'cannot be traced .*groups=\{"conv1": "conv2"\}'):
        links(Branching())
    assert links(Branching(), {"b": "c"}) == [Link("b", "c", (), 4)]
    with pytest.raises(ValueError, match="'d' is no linear"):
        links(Branching(), {"b": "d"})
    with pytest.raises(ValueError, match="'norm' is no BatchNorm"):
        links(Branching(), {"b": ["norm", "c"]})
    with pytest.raises(ValueError, match="no multiple of the 6 units"):
        links(nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 2)), {"0": "1"})


def test_wrapped_models_have_the_same_links():
    net = Net()
    assert links(nn.DataParallel(net)) == links(net)
