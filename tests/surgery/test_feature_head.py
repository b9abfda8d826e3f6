"""Feature heads: found by name, compared, and restored from a state dict."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn.surgery.feature_head import FeatureHead, RandomFourier, RandomReLU, feature_head, restore_feature_head
from everlearn.surgery.heads import grow_output, output_layer

RANDOM_FEATURES = {
    "none": lambda: None,
    "relu": lambda: RandomReLU(torch.randn(7, 3)),
    "fourier": lambda: RandomFourier(torch.randn(7, 3), torch.randn(7)),
}


def make_net(random_features, normalize=True):
    num_inputs = 3 if random_features is None else 7
    return nn.Sequential(nn.Linear(4, 3), FeatureHead(nn.Linear(num_inputs, 2), normalize, random_features))


@pytest.mark.parametrize("kind", RANDOM_FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_restored_head_has_the_dtype_of_the_model(kind, dtype):
    net = make_net(RANDOM_FEATURES[kind]())
    state = {name: value.to(dtype) for name, value in net.state_dict().items()}
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    restore_feature_head(plain, state)
    plain.load_state_dict(state)
    x = torch.randn(6, 4)
    torch.testing.assert_close(plain(x), net(x), rtol=0.02, atol=0.02)
    assert {value.dtype for value in plain.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_features_stay_finite(dtype):
    net = make_net(None).to(dtype)
    features = torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 4.0]], dtype=dtype)
    normalized = net[1].normalize(features)
    assert torch.equal(normalized, F.normalize(features.double(), dim=1).to(dtype))


def test_a_replaced_layer_is_found_by_its_name():
    net = make_net(RANDOM_FEATURES["relu"]())
    assert output_layer(net, "1") == output_layer(net) == ("1.output", net[1].output)
    assert feature_head(net, "1") == feature_head(net) == ("1", net[1])
    grow_output(net, 6, "1")
    assert net(torch.randn(2, 4)).shape == (2, 6)


def test_heads_are_compared_by_their_random_weights():
    random_features = RANDOM_FEATURES["relu"]()
    head = make_net(random_features)[1]
    assert head.computes(True, random_features)
    assert not head.computes(False, random_features) and not head.computes(True, None)
    assert not head.computes(True, RandomReLU(torch.randn(7, 3)))
    assert not head.computes(True, RandomFourier(random_features.weight, torch.zeros(7)))
