import copy

import pytest
import torch
from torch import nn

from everlearn import nets
from everlearn.surgery import heads, proximal, resize
from everlearn.surgery.tracing import Link, links

NETS = {
    "mlp": lambda: nets.mlp(5, 3, hidden=(7, 6)),
    "cnn": lambda: nets.cnn((2, 8, 8), 3, channels=(4, 5)),
    "resnet": lambda: nets.resnet((2, 8, 8), 3, width=4, blocks=(1, 1)),
    "transformer": lambda: nets.transformer((1, 8, 8), 3, width=8, depth=1, heads=2),
    "bare": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)
    ),
}
INPUTS = {"mlp": (6, 5), "transformer": (6, 1, 8, 8)}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("net", NETS)
def test_a_wider_model_says_the_same(net, mode, double):
    model, x = NETS[net](), torch.randn(INPUTS.get(net, (6, 2, 8, 8)))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
    getattr(model, mode)()
    plain = copy.deepcopy(model)
    for module in (model, plain):
        for m in module.modules():
            if isinstance(m, (nn.Dropout, nn.MultiheadAttention)):
                m.eval()
    before = copy.deepcopy(model.state_dict())
    found = links(model, x)
    after = [resize.widen(model, link, 3) for link in found]
    assert [a.width for a in after] == [b.width + 3 for b in found]
    assert links(model, x) == after, "a run shows the new widths"
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)
    for name, old in before.items():
        now = model.state_dict()[name]
        if now.shape != old.shape:
            assert torch.equal(now[tuple(slice(n) for n in old.shape)], old) or "running" in name
    for link, wide in zip(found, after, strict=True):
        read = model.get_submodule(wide.consumer).weight[
            : units(found, link.consumer, model), link.width * link.repeat :
        ]
        assert not read.any(), "nobody reads them yet"
        assert model.get_submodule(wide.producer).weight[link.width :].abs().min() > 0


def units(found, name, model):
    """How many units a layer had before it grew."""
    layer = model.get_submodule(name)
    return next((link.width for link in found if link.producer == name), len(layer.weight))


def test_new_batchnorm_entries_are_those_of_a_new_norm():
    model = NETS["cnn"]()
    link = links(model, torch.randn(4, 2, 8, 8))[0]
    resize.widen(model, link, 2)
    norm = model.get_submodule(link.norms[0])
    assert norm.num_features == 6
    assert norm.weight[4:].tolist() == norm.running_var[4:].tolist() == [1, 1]
    assert norm.bias[4:].tolist() == norm.running_mean[4:].tolist() == [0, 0]


def test_cut_undoes_widen(double):
    model, x = NETS["cnn"](), torch.randn(4, 2, 8, 8)
    plain = copy.deepcopy(model)
    for link in links(model, x):
        wide = resize.widen(model, link, 3)
        assert resize.cut(model, wide, (torch.arange(wide.width) < link.width).double()) == link
    assert all(torch.equal(v, plain.state_dict()[n]) for n, v in model.state_dict().items())
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)


def test_frozen_parameters_stay_frozen_and_wrong_links_are_refused():
    model = NETS["mlp"]()
    link = links(model, torch.randn(4, 5))[0]
    model.get_submodule(link.producer).weight.requires_grad_(False)
    resize.widen(model, link, 1)
    assert not model.get_submodule(link.producer).weight.requires_grad
    assert model.get_submodule(link.consumer).weight.requires_grad
    with pytest.raises(ValueError, match="the link has 7"):
        resize.widen(model, link, 1)
    with pytest.raises(ValueError, match="not -1"):
        resize.widen(model, Link(link.producer, link.consumer, (), 8), -1)


def test_a_grown_output_layer_keeps_its_rows(double):
    model, x = NETS["mlp"](), torch.randn(4, 5)
    said, old = model(x), heads.output_layer(model)[1].weight.detach().clone()
    heads.grow_output(model, 8)
    assert torch.equal(heads.output_layer(model)[1].weight[:3], old)
    torch.testing.assert_close(model(x)[:, :3], said, rtol=0, atol=1e-12)


def test_group_shrinking_is_the_proximal_step_of_the_norm(double):
    for threshold in (0.1, 1.0, 2.5):
        v = [torch.randn(6, 3, 2), torch.randn(6)]
        flat = torch.cat([v[0].flatten(1), v[1][:, None]], 1)
        left = proximal.group_soft_threshold_(v, threshold)
        got = torch.cat([v[0].flatten(1), v[1][:, None]], 1)
        for old, new, kept in zip(flat, got, left, strict=True):
            size = float(old.norm())
            assert bool(kept) == (size > threshold)
            want = old * (1 - threshold / size) if kept else torch.zeros_like(old)
            torch.testing.assert_close(new, want)
            cost = lambda u, old=old, threshold=threshold: 0.5 * (u - old).square().sum() + threshold * u.norm()
            assert all(cost(new) <= cost(new + 0.01 * torch.randn(7)) + 1e-12 for _ in range(50))


def test_shrinking_is_the_proximal_step_of_the_absolute_value(double):
    old = torch.randn(200)
    new = old.clone()
    proximal.soft_threshold_(new, 0.3)
    grid = torch.linspace(-4, 4, 80001)
    for a, b in zip(old[:20], new[:20], strict=True):
        best = grid[(0.5 * (grid - a).square() + 0.3 * grid.abs()).argmin()]
        assert abs(best - b) < 2e-4
    assert torch.equal(new == 0, old.abs() <= 0.3)
