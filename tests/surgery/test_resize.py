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
def test_widening_preserves_the_outputs(net, mode, double):
    model = NETS[net]()
    x = torch.randn(INPUTS.get(net, (6, 2, 8, 8)))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_()
    getattr(model, mode)()
    original = copy.deepcopy(model)
    for module in (model, original):
        for m in module.modules():
            if isinstance(m, (nn.Dropout, nn.MultiheadAttention)):
                m.eval()
    initial_state = copy.deepcopy(model.state_dict())
    old_links = links(model, x)
    new_links = [resize.widen(model, link, 3) for link in old_links]
    assert [new_link.width for new_link in new_links] == [old_link.width + 3 for old_link in old_links]
    assert links(model, x) == new_links, "tracing finds the new widths"
    torch.testing.assert_close(model(x), original(x), rtol=0, atol=1e-12)
    for name, old_value in initial_state.items():
        new_value = model.state_dict()[name]
        if new_value.shape != old_value.shape:
            assert torch.equal(new_value[tuple(slice(n) for n in old_value.shape)], old_value) or "running" in name
    for link, wide_link in zip(old_links, new_links, strict=True):
        old_rows = count_old_units(old_links, link.consumer, model)
        outgoing_weights = model.get_submodule(wide_link.consumer).weight[:old_rows, link.width * link.repeat :]
        assert not outgoing_weights.any(), "outgoing weights of new units are zero"
        assert model.get_submodule(wide_link.producer).weight[link.width :].abs().min() > 0


def count_old_units(old_links, name, model):
    """Return the number of units of a layer before it was widened."""
    layer = model.get_submodule(name)
    return next((link.width for link in old_links if link.producer == name), len(layer.weight))


def test_new_batchnorm_entries_have_initial_values():
    model = NETS["cnn"]()
    link = links(model, torch.randn(4, 2, 8, 8))[0]
    resize.widen(model, link, 2)
    norm = model.get_submodule(link.norms[0])
    assert norm.num_features == 6
    assert norm.weight[4:].tolist() == norm.running_var[4:].tolist() == [1, 1]
    assert norm.bias[4:].tolist() == norm.running_mean[4:].tolist() == [0, 0]


def test_cut_undoes_widen(double):
    model = NETS["cnn"]()
    x = torch.randn(4, 2, 8, 8)
    original = copy.deepcopy(model)
    for link in links(model, x):
        wide_link = resize.widen(model, link, 3)
        assert resize.cut(model, wide_link, (torch.arange(wide_link.width) < link.width).double()) == link
    assert all(torch.equal(v, original.state_dict()[n]) for n, v in model.state_dict().items())
    torch.testing.assert_close(model(x), original(x), rtol=0, atol=1e-12)


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
    model = NETS["mlp"]()
    x = torch.randn(4, 5)
    old_outputs = model(x)
    old_weight = heads.output_layer(model)[1].weight.detach().clone()
    heads.grow_output(model, 8)
    assert torch.equal(heads.output_layer(model)[1].weight[:3], old_weight)
    torch.testing.assert_close(model(x)[:, :3], old_outputs, rtol=0, atol=1e-12)


def test_group_soft_threshold_is_the_proximal_operator_of_the_norm(double):
    for threshold in (0.1, 1.0, 2.5):
        v = [torch.randn(6, 3, 2), torch.randn(6)]
        flat_input = torch.cat([v[0].flatten(1), v[1][:, None]], 1)
        nonzero = proximal.group_soft_threshold_(v, threshold)
        flat_result = torch.cat([v[0].flatten(1), v[1][:, None]], 1)
        for row, shrunken, is_nonzero in zip(flat_input, flat_result, nonzero, strict=True):
            norm = float(row.norm())
            assert bool(is_nonzero) == (norm > threshold)
            expected = row * (1 - threshold / norm) if is_nonzero else torch.zeros_like(row)
            torch.testing.assert_close(shrunken, expected)
            cost = lambda u, row=row, threshold=threshold: 0.5 * (u - row).square().sum() + threshold * u.norm()
            assert all(cost(shrunken) <= cost(shrunken + 0.01 * torch.randn(7)) + 1e-12 for _ in range(50))


def test_soft_threshold_is_the_proximal_operator_of_the_absolute_value(double):
    values = torch.randn(200)
    shrunken = values.clone()
    proximal.soft_threshold_(shrunken, 0.3)
    grid = torch.linspace(-4, 4, 80001)
    for value, result in zip(values[:20], shrunken[:20], strict=True):
        minimizer = grid[(0.5 * (grid - value).square() + 0.3 * grid.abs()).argmin()]
        assert abs(minimizer - result) < 2e-4
    assert torch.equal(shrunken == 0, values.abs() <= 0.3)
