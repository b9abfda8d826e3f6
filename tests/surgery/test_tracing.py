import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import nets
from everlearn.surgery.tracing import Link, keeps_units_separate, links


class Net(nn.Module):
    """Functional calls, and sizes read from tensors."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc1 = nn.Linear(6 * 4, 10)
        self.fc2 = nn.Linear(10, 2)

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        x = F.relu(self.conv2(x))
        x = x.view(x.size(0), -1)
        return self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.1, self.training))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        x = self.a(x)
        x = x + self.c(torch.relu(self.b(x)))
        return self.head(self.norm(x))


def test_a_net_with_functional_calls():
    assert links(Net()) == [
        Link("conv1", "conv2", ("norm",), 4),
        Link("conv2", "fc1", (), 6, 4),
        Link("fc1", "fc2", (), 10),
    ]


def test_only_layers_inside_a_residual_branch_are_linked():
    assert links(Residual()) == [Link("b", "c", (), 4)]


def test_nets_of_everlearn():
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
def test_operations_that_mix_units_end_a_link(between):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 6)
            self.between = between
            self.b = nn.Linear(6, 2)

        def forward(self, x):
            h = self.a(x)
            return self.b(self.between(h, h) if isinstance(between, nn.Bilinear) else self.between(h))

    assert links(Small()) == []


def test_layers_called_twice_shared_or_grouped_have_no_link():
    shared = nn.Linear(4, 4)
    assert links(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2))) == []
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 2, 1))
    assert links(grouped) == []


def test_a_model_that_cannot_be_traced_needs_named_groups():
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
    with pytest.raises(ValueError, match="not a multiple of the 6 units"):
        links(nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 2)), {"0": "1"})


def test_wrapped_models_have_the_same_links():
    net = Net()
    assert links(nn.DataParallel(net)) == links(net)


class Between(nn.Module):
    """Two layers with an operation between them that tracing may accept wrongly."""

    def __init__(self, a, b, between):
        super().__init__()
        self.a = a
        self.b = b
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x))).flatten(1)


class SoftmaxEncoderLayer(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return self.linear2(torch.softmax(self.linear1(x), -1))


class SoftmaxInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        return self.b(h if self.training else h.softmax(-1))


def net_with_softmax_hook():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    net[0].register_forward_hook(lambda module, args, outputs: outputs.softmax(-1))
    return net


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Between(nn.Conv1d(2, 4, 1), nn.Conv1d(4, 2, 1), nn.MaxPool2d((3, 1), 1, (1, 0))), torch.randn(4, 2, 5)),
        (Between(nn.Linear(4, 6), nn.Linear(6, 2), nn.BatchNorm1d(6)), torch.randn(4, 6, 4)),
        (SoftmaxEncoderLayer(4, 2, 6, batch_first=True), torch.randn(4, 5, 4)),
        (SoftmaxInEvaluation(), torch.randn(4, 4)),
        (net_with_softmax_hook(), torch.randn(4, 4)),
    ],
    ids=["pooled", "norm over positions", "subclass", "mode", "hook"],
)
def test_mixing_that_tracing_misses_is_detected_numerically(net, x):
    initial_state = {n: v.clone() for n, v in net.state_dict().items()}
    initial_modes = [m.training for m in net.modules()]
    traced_links = [Link("linear1", "linear2", (), 6)] if isinstance(net, SoftmaxEncoderLayer) else links(net)
    assert traced_links and not all(keeps_units_separate(net, link, x) for link in traced_links)
    assert all(torch.equal(v, net.state_dict()[n]) for n, v in initial_state.items())
    assert initial_modes == [m.training for m in net.modules()]


def test_the_numerical_check_accepts_correct_links():
    for net, x in (
        (Net(), torch.randn(4, 1, 10, 10)),
        (nets.resnet((1, 8, 8), 2, width=4, blocks=(1, 1)), torch.randn(4, 1, 8, 8)),
        (nets.transformer((1, 8, 8), 2, width=16, depth=1, heads=2), torch.randn(4, 1, 8, 8)),
        (nets.cnn((1, 8, 8), 2, channels=(3, 5)), torch.randn(4, 1, 8, 8)),
    ):
        assert links(net) and all(keeps_units_separate(net, link, x) for link in links(net))


def test_parametrized_and_tied_weights_have_no_links():
    for norm in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        assert links(nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))) == []
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[4].weight = net[0].weight
    assert links(net) == []


def test_tracing_stores_no_attribute_on_the_model():
    class StoredActivation(Residual):
        def forward(self, x):
            self.last = self.a(x)
            return self.head(torch.relu(self.last))

    net = StoredActivation()
    assert links(net) == [Link("a", "head", (), 4)]
    assert not hasattr(net, "last")


def test_hard_coded_sizes_make_a_link_rigid():
    class FixedSize(Net):
        def forward(self, x):
            x = F.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
            return self.fc2(self.fc1(F.relu(self.conv2(x)).view(-1, 24)))

    assert [link.rigid for link in links(FixedSize())] == [False, True, False]
    assert not any(link.rigid for link in links(Net()))


@pytest.mark.parametrize("wrong", [[], 3, None])
def test_groups_of_the_wrong_type(wrong):
    with pytest.raises(ValueError, match="allowed: a layer's name"):
        links(Net(), {"conv1": wrong})
