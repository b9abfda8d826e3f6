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


def built(net, count=2):
    model = NETS[net]()
    name = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    extractors = FeatureBank(name)
    for _ in range(count):
        other = NETS[net]()
        extractors.add(other, other.get_submodule(name).weight)
    extractors.lead_into(model)
    return model.eval(), extractors, model.get_submodule(name)


def body(net, name):
    """The network with its output layer cut off: what is left gives the features."""
    net = copy.deepcopy(net)
    net.set_submodule(name, nn.Identity())
    return net.eval()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("net", NETS)
def test_one_classifier_over_all_features(net):
    model, extractors, layer = built(net)
    x, name = torch.randn(5, 1, 8, 8), extractors.output
    clean = NETS[net]()
    clean.load_state_dict(model.state_dict())
    phi = torch.cat([body(n, name)(x) for n in [*extractors.nets, clean]], 1)
    torch.testing.assert_close(extractors.all_features(model, x), phi)
    truth = phi @ torch.cat([*extractors.blocks, layer.weight], 1).T + layer.bias
    torch.testing.assert_close(model(x), truth)
    torch.testing.assert_close(extractors.classifier(layer)(phi), truth)
    whole = nn.Linear(phi.shape[1], 6)
    extractors.write(layer, whole)
    torch.testing.assert_close(model(x), whole(phi))


def test_gradients_reach_the_classifier_and_the_newest_alone():
    model, extractors, _ = built("cnn")
    model.train()
    before = copy.deepcopy(extractors.nets.state_dict())
    model(torch.randn(5, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in [*model.parameters(), *extractors.learning()])
    assert not any(p.requires_grad for p in extractors.nets.parameters())
    assert not any(m.training for m in extractors.nets.modules())
    assert all(torch.equal(v, before[n]) for n, v in extractors.nets.state_dict().items()), "statistics stay, too"


def test_a_layer_that_has_grown():
    model, extractors, layer = built("mlp")
    x = torch.randn(5, 1, 8, 8)
    before = model(x)
    grown = nn.Linear(8, 9)
    with torch.no_grad():
        grown.weight[:6], grown.bias[:6] = layer.weight, layer.bias
    model[-1] = grown
    assert not extractors.is_on(model)
    extractors.lead_into(model)
    assert extractors.is_on(model)
    torch.testing.assert_close(model(x)[:, :6], before)
    torch.testing.assert_close(extractors.classifier(grown)(extractors.all_features(model, x)), model(x))
    old = [b.clone() for b in extractors.blocks]
    extractors.widen(9)
    assert all(
        len(b) == 9 and torch.equal(b[:6], o) and b[6:].any() for b, o in zip(extractors.blocks, old, strict=True)
    )


def test_features_are_asked_for_once():
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
    model, _, _ = built("mlp")
    with pytest.raises(RuntimeError, match="call the model as a whole, not its part 5 alone"):
        model[5](torch.zeros(1, 8))


class _Skips(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Identity(), nn.Linear(2, 2))

    def forward(self, x):
        return x
