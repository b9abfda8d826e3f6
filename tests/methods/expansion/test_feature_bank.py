import copy

import pytest
import torch
from torch import nn

from everlearn import nets
from everlearn.methods.expansion.feature_bank import FeatureBank
from everlearn.surgery.features import compute_features

NETS = {
    "mlp": lambda: nets.mlp((1, 8, 8), 6, hidden=(12, 8)),
    "cnn": lambda: nets.cnn((1, 8, 8), 6, channels=(4, 6)),
    "resnet": lambda: nets.resnet((1, 8, 8), 6, width=4, blocks=(1, 1)),
    "transformer": lambda: nets.transformer((1, 8, 8), 6, width=16, depth=1, heads=2),
}


def build_bank(net, count=2):
    model = NETS[net]()
    name = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    bank = FeatureBank(name)
    for _ in range(count):
        extractor = NETS[net]()
        bank.add(extractor, extractor.get_submodule(name).weight)
    bank.connect(model)
    return model.eval(), bank, model.get_submodule(name)


def without_output_layer(net, name):
    """Replace the output layer of a copy by the identity, so that it returns the features."""
    net = copy.deepcopy(net)
    net.set_submodule(name, nn.Identity())
    return net.eval()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("net", NETS)
def test_one_classifier_over_all_features(net):
    model, bank, layer = build_bank(net)
    x = torch.randn(5, 1, 8, 8)
    name = bank.output
    clean = NETS[net]()
    clean.load_state_dict(model.state_dict())
    phi = torch.cat([without_output_layer(n, name)(x) for n in [*bank.nets, clean]], 1)
    torch.testing.assert_close(bank.all_features(model, x), phi)
    expected = phi @ torch.cat([*bank.blocks, layer.weight], 1).T + layer.bias
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(bank.merge_classifier(layer)(phi), expected)
    classifier = nn.Linear(phi.shape[1], 6)
    bank.write_classifier(layer, classifier)
    torch.testing.assert_close(model(x), classifier(phi))


def test_gradients_reach_only_the_classifier_and_the_newest_extractor():
    model, bank, _ = build_bank("cnn")
    model.train()
    before = copy.deepcopy(bank.nets.state_dict())
    model(torch.randn(5, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in [*model.parameters(), *bank.trained_parameters()])
    assert not any(p.requires_grad for p in bank.nets.parameters())
    assert not any(m.training for m in bank.nets.modules())
    assert all(torch.equal(v, before[n]) for n, v in bank.nets.state_dict().items()), (
        "running statistics are frozen, too"
    )


def test_an_output_layer_may_grow():
    model, bank, layer = build_bank("mlp")
    x = torch.randn(5, 1, 8, 8)
    before = model(x)
    grown = nn.Linear(8, 9)
    with torch.no_grad():
        grown.weight[:6] = layer.weight
        grown.bias[:6] = layer.bias
    model[-1] = grown
    assert not bank.is_connected(model)
    bank.connect(model)
    assert bank.is_connected(model)
    torch.testing.assert_close(model(x)[:, :6], before)
    torch.testing.assert_close(bank.merge_classifier(grown)(bank.all_features(model, x)), model(x))
    old_blocks = [b.clone() for b in bank.blocks]
    bank.grow_outputs(9)
    for block, old_block in zip(bank.blocks, old_blocks, strict=True):
        assert len(block) == 9 and torch.equal(block[:6], old_block) and block[6:].any()


def test_the_output_layer_is_called_once_in_a_forward_pass():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(input=self.head(x))

    with pytest.raises(ValueError, match="'head' is called 2 times in a forward pass"):
        compute_features(Twice(), "head", torch.zeros(1, 2))
    with pytest.raises(ValueError, match="'1' is called 0 times"):
        compute_features(_Skips(), "1", torch.zeros(1, 2))
    model, _, _ = build_bank("mlp")
    with pytest.raises(RuntimeError, match="call the entire model, not its layer 5 alone"):
        model[5](torch.zeros(1, 8))


class _Skips(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Identity(), nn.Linear(2, 2))

    def forward(self, x):
        return x
