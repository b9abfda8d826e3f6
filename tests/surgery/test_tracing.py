import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import nets
from everlearn.core.task import Task
from everlearn.surgery.tracing import Link, find_structure, keeps_units_separate, links, read_example
from tests.architectures import ConvNeXt, DataDependentDepth, VisionTransformer

IMAGES = torch.randn(4, 1, 8, 8)


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
    assert links(Net(), torch.randn(4, 1, 10, 10)) == [
        Link("conv1", "conv2", ("norm",), 4),
        Link("conv2", "fc1", (), 6, 4),
        Link("fc1", "fc2", (), 10),
    ]


def test_a_residual_stream_has_no_link_but_what_branches_off_it_has():
    assert links(Residual(), torch.randn(4, 4)) == [Link("b", "c", (), 4)]


def test_our_nets():
    mlp = links(nets.mlp(4, 2, hidden=(5, 6)), torch.randn(4, 4))
    assert [(link.producer, link.consumer) for link in mlp] == [("1", "3"), ("3", "5")]
    assert links(nets.cnn((1, 8, 8), 2, channels=(3, 5)), IMAGES) == [
        Link("0.0", "1.0", ("0.1",), 3),
        Link("1.0", "4", ("1.1",), 5),
    ]
    resnet = links(nets.resnet((1, 8, 8), 2, width=4, blocks=(1, 1)), IMAGES)
    assert resnet == [
        Link("3.conv1", "3.conv2", ("3.norm1",), 4),
        Link("4.conv1", "4.conv2", ("4.norm1",), 8),
    ]
    transformer = links(nets.transformer((1, 8, 8), 2, width=16, depth=2, heads=2), IMAGES)
    assert [k.producer for k in transformer] == [f"encoder.layers.{i}.linear1" for i in range(2)]


@pytest.mark.parametrize(
    "between",
    [nn.LayerNorm(6), nn.Softmax(-1), nn.MaxPool1d(3, 1, 1), nn.GroupNorm(2, 6), nn.PReLU(6), nn.Bilinear(6, 6, 6)],
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

    structure = find_structure(Small(), torch.randn(4, 4))
    assert structure.links == []
    name, reason = structure.unlinked[0]
    assert name == "a" and "its units" in reason


def test_layers_called_twice_shared_or_grouped_have_no_link():
    shared = nn.Linear(4, 4)
    structure = find_structure(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2)), torch.randn(4, 4))
    assert structure.links == []
    assert structure.unlinked[0] == ("0", "it is called 2 times in a forward pass")
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 2, 1))
    structure = find_structure(grouped, torch.randn(4, 4, 5, 5))
    assert structure.links == []
    assert structure.unlinked[0] == ("0", "convolution mixes its units (in '1', Conv2d)")


def test_links_need_examples_or_names():
    class Branching(Residual):
        def forward(self, x):
            return self.c(self.b(x)) if x.sum() > 0 else x

    with pytest.raises(
        ValueError, match=r'give a batch of inputs, links\(model, x\), or .*groups=\{"conv1": "conv2"\}'
    ):
        links(Branching())
    assert links(Branching(), groups={"b": "c"}) == [Link("b", "c", (), 4)]
    with pytest.raises(ValueError, match="'d' is no linear"):
        links(Branching(), groups={"b": "d"})
    with pytest.raises(ValueError, match="'norm' is no BatchNorm"):
        links(Branching(), groups={"b": ["norm", "c"]})
    with pytest.raises(ValueError, match="not a multiple of the 6 units"):
        links(nn.Sequential(nn.Linear(4, 6), nn.Linear(4, 2)), groups={"0": "1"})


def test_wrapped_models_have_the_same_links():
    net = Net()
    x = torch.randn(4, 1, 10, 10)
    assert links(nn.DataParallel(net), x) == links(net, x) != []


class Between(nn.Module):
    """Two layers, and something between them that looks harmless."""

    def __init__(self, a, b, between):
        super().__init__()
        self.a, self.b, self.between = a, b, between

    def forward(self, x):
        return self.b(self.between(self.a(x))).flatten(1)


class Mixed(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return self.linear2(torch.softmax(self.linear1(x), -1))


class ByMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        return self.b(h if self.training else h.softmax(-1))


def with_hook():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    net[0].register_forward_hook(lambda module, args, out: out.softmax(-1))
    return net


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Between(nn.Conv1d(2, 6, 1), nn.Conv1d(6, 2, 1), nn.MaxPool2d((3, 1), 1, (1, 0))), torch.randn(4, 2, 5)),
        (Between(nn.Linear(4, 6), nn.Linear(6, 2), nn.BatchNorm1d(6)), torch.randn(4, 6, 4)),
        (Mixed(4, 2, 6, batch_first=True), torch.randn(4, 5, 4)),
        (ByMode(), torch.randn(4, 4)),
        (with_hook(), torch.randn(4, 4)),
    ],
    ids=["pooled", "norm of places", "subclass", "mode", "hook"],
)
def test_units_that_only_seem_separate(net, x):
    state = {n: v.clone() for n, v in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    seeming_link = Link("a", "b", (), 6)
    if isinstance(net, Mixed):
        seeming_link = Link("linear1", "linear2", (), 6)
    if isinstance(net, nn.Sequential):
        seeming_link = Link("0", "2", (), 6)
    if isinstance(getattr(net, "between", None), nn.BatchNorm1d):
        seeming_link = Link("a", "b", ("between",), 6)
    assert links(net, x) == []
    assert not keeps_units_separate(net, seeming_link, x)
    assert all(torch.equal(v, net.state_dict()[n]) for n, v in state.items())
    assert modes == [m.training for m in net.modules()]


def test_a_trial_passes_what_is_right():
    for net, x in (
        (Net(), torch.randn(4, 1, 10, 10)),
        (nets.resnet((1, 8, 8), 2, width=4, blocks=(1, 1)), torch.randn(4, 1, 8, 8)),
        (nets.transformer((1, 8, 8), 2, width=16, depth=1, heads=2), torch.randn(4, 1, 8, 8)),
        (nets.cnn((1, 8, 8), 2, channels=(3, 5)), torch.randn(4, 1, 8, 8)),
    ):
        all_links = links(net, x)
        assert all_links and all(keeps_units_separate(net, link, x) for link in all_links)


def test_computed_and_tied_weights_have_no_links():
    x = torch.randn(4, 4)
    for norm in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        assert links(nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2)), x) == []
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[4].weight = net[0].weight
    structure = find_structure(net, x)
    assert structure.links == []
    assert ("0", "it shares a weight with another layer") in structure.unlinked


def test_tracing_leaves_nothing_on_the_model():
    class Noted(Residual):
        def forward(self, x):
            self.last = self.a(x)
            return self.out(torch.relu(self.last))

    net = Noted()
    x = torch.randn(4, 4)
    random_state = torch.get_rng_state()
    assert links(net, x) == [Link("a", "out", (), 4)]
    assert not hasattr(net, "last") and net.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_lengths_that_are_written_out_make_a_link_rigid():
    class Fixed(Net):
        def forward(self, x):
            x = F.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
            return self.fc2(self.fc1(F.relu(self.conv2(x)).view(-1, 24)))

    x = torch.randn(4, 1, 10, 10)
    assert [link.rigid for link in links(Fixed(), x)] == [False, True, False]
    assert not any(link.rigid for link in links(Net(), x))


@pytest.mark.parametrize("wrong", [[], 3, None])
def test_groups_of_another_kind(wrong):
    with pytest.raises(ValueError, match="allowed: a layer's name"):
        links(Net(), groups={"conv1": wrong})


# Operations between two layers.


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def tanh_gelu(h):
    return 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h.pow(3))))


SEPARATE_UNITS = {
    "own gelu": tanh_gelu,
    "quick gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "in place": lambda h: h.mul_(2).relu_().add_(1),
    "double precision": lambda h: h.double().abs().sqrt().float(),
    "drop path": lambda h: h * (torch.rand(len(h), 1) > 0.3) / 0.7,
    "centered over the batch": lambda h: h - h.mean(0, keepdim=True),
    "rows": lambda h: torch.stack(list(h)),
    "halves of the batch": lambda h: torch.cat([part * 2 for part in h.split(2)]),
    "branch on shapes": lambda h: h.relu() if len(h) > 1 else h.clamp(min=0),
    "constant mask": lambda h: h * torch.ones(h.shape[-1]).cumsum(0),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "log sigmoid": nn.LogSigmoid(),
    "one parameter for all": nn.PReLU(),
    "alpha dropout": nn.AlphaDropout(0.2),
}

MIXED_UNITS = {
    "branch on units": lambda h: h if h.sum() > 0 else -h,
    "number": lambda h: h * h.max().item(),
    "list": lambda h: h * h.tolist()[0][0],
    "shifted": lambda h: h.roll(1, -1),
    "reversed": lambda h: h.flip(-1),
    "attention heads": lambda h: h.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
    "every other unit": lambda h: h[:, ::2].repeat(1, 2),
    "scaled by the norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "written elsewhere": lambda h: torch.zeros(len(h), 6).add_(h),
}


@pytest.mark.parametrize("between", SEPARATE_UNITS)
def test_operations_that_keep_units_separate(between):
    net = nn.Sequential(nn.Linear(4, 6), Function(SEPARATE_UNITS[between]), nn.Linear(6, 2))
    assert links(net, torch.randn(4, 4)) == [Link("0", "2", (), 6)]


@pytest.mark.parametrize("between", MIXED_UNITS)
def test_operations_that_mix_units(between):
    net = nn.Sequential(nn.Linear(4, 6), Function(MIXED_UNITS[between]), nn.Linear(6, 2))
    assert links(net, torch.randn(4, 4)) == []


FEATURE_MAPS = {
    "max pool": (nn.MaxPool2d(2), nn.Conv2d(6, 2, 1), 1),
    "adaptive pool": (nn.AdaptiveAvgPool2d(2), nn.Conv2d(6, 2, 1), 1),
    "dropout of channels": (nn.Dropout2d(), nn.Conv2d(6, 2, 1), 1),
    "upsampled": (nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(6, 2, 1), 1),
    "padded": (nn.ZeroPad2d(1), nn.Conv2d(6, 2, 1), 1),
    "channels last": (Function(lambda h: h.contiguous(memory_format=torch.channels_last)), nn.Conv2d(6, 2, 1), 1),
    "tokens": (Function(lambda h: h.flatten(2).transpose(1, 2)), nn.Linear(6, 2), 1),
    "statistics": (Function(lambda h: h.mean((2, 3)) + h.std((2, 3))), nn.Linear(6, 2), 1),
    "loop over rows": (Function(lambda h: sum(h[:, :, i] for i in range(h.shape[2])).amax(-1)), nn.Linear(6, 2), 1),
    "flattened": (nn.Flatten(), nn.Linear(6 * 64, 2), 64),
}


@pytest.mark.parametrize("between", FEATURE_MAPS)
def test_operations_on_feature_maps(between):
    operation, consumer, repeat = FEATURE_MAPS[between]
    net = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), operation, consumer)
    assert links(net, IMAGES) == [Link("0", "2", (), 6, repeat)]


def test_permuted_feature_maps_are_not_in_the_order_of_units():
    flatten_last = Function(lambda h: h.permute(0, 2, 3, 1).flatten(1))
    assert links(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), flatten_last, nn.Linear(6 * 64, 2)), IMAGES) == []


# Models that symbolic tracing cannot follow.


def test_vision_transformer():
    structure = find_structure(VisionTransformer(3), IMAGES)
    assert structure.links == [Link(f"blocks.{i}.fc1", f"blocks.{i}.fc2", (), 12) for i in range(2)]
    reasons = dict(structure.unlinked)
    assert reasons["patches"] == "cat joins its units with other values"
    assert reasons["blocks.0.attention.qkv"] == (
        "view splits or regroups its units, as attention heads do (in 'blocks.0.attention', Attention)"
    )
    assert reasons["blocks.1.fc2"] == (
        "its units are added to other values, as in a residual stream (in 'blocks.1', EncoderBlock)"
    )
    assert reasons["head"] == "its units are outputs of the model"


def test_convnext():
    structure = find_structure(ConvNeXt(3), IMAGES)
    assert structure.links == [Link(f"blocks.{i}.expand", f"blocks.{i}.project", (), 12) for i in range(2)]
    assert "convolution mixes its units (in 'blocks.0.depthwise', Conv2d)" in dict(structure.unlinked)["stem"]


def test_only_links_that_hold_for_all_examples_are_kept():
    brightness = torch.tensor([-0.4, 0.0, 0.4]).view(3, 1, 1, 1)
    structure = find_structure(DataDependentDepth(3), 0.01 * torch.randn(3, 1, 8, 8) + brightness)
    assert [link.producer for link in structure.links] == ["first", "blocks.0.0", "hidden"]
    reasons = dict(structure.unlinked)
    assert reasons["blocks.2.0"] == "it is called a varying number of times, depending on the data"

    class Skipping(DataDependentDepth):
        def forward(self, x):
            h = torch.relu(self.first(x.flatten(1)))
            if self.depth(x) > 1:
                h = torch.relu(self.second(h))
            return self.head(h)

    structure = find_structure(Skipping(3), 0.01 * torch.randn(3, 1, 8, 8) + brightness)
    assert structure.links == []
    assert "depending on the data" in dict(structure.unlinked)["first"]


def test_layers_that_functions_bypass():
    class Bypassed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))) + F.linear(x, self.b.weight)

    structure = find_structure(Bypassed(), torch.randn(4, 4))
    assert structure.links == []
    assert dict(structure.unlinked)["a"] == (
        "'b', to which its units go, has a weight that is also read outside of the layer"
    )


def test_a_model_that_does_not_run_on_the_examples():
    class WholeBatches(nn.Sequential):
        def forward(self, x):
            return super().forward(x.view(32, 4))

    net = WholeBatches(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(
        ValueError, match=r"WholeBatches cannot be run on 8 examples to find its units .*name the layers"
    ):
        links(net, torch.randn(8, 4))
    assert links(net, torch.randn(32, 4)) == [Link("0", "2", (), 6)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_parts_are_followed():
    net = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.ReLU()), nn.Linear(6, 2))
    assert links(net, torch.randn(4, 4)) == [Link("0", "2", (), 6)]
    mixed = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.Softmax(-1)), nn.Linear(6, 2))
    assert links(mixed, torch.randn(4, 4)) == []


# Examples of a task.


def test_examples_are_read_without_loss():
    net = nn.Linear(4, 2)
    inputs = torch.arange(48.0).view(12, 4)
    batches = [(x, torch.zeros(4, dtype=torch.long)) for x in inputs.split(4)]
    assert len(read_example(net, Task(inputs))) == 8

    task = Task(iter(batches), id=0)
    assert torch.equal(read_example(net, task), inputs[:4])
    assert torch.equal(torch.cat([batch.x for batch in task.batches(4)]), inputs)

    iterator = iter(batches)
    assert read_example(net, iterator) is None
    assert len(list(iterator)) == 3
    assert read_example(net, Task()) is None
    assert torch.equal(read_example(net, Task(valid=inputs[:1])), inputs[:1])
