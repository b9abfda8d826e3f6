import pytest
import torch

from everlearn import nets


def test_xavier_weights_and_zero_biases():
    net = nets.mlp(100, 10, hidden=(50,), init="xavier")
    assert all((net[i].bias == 0).all() for i in (1, 3))
    bound = (6 / 150) ** 0.5
    assert 0.9 * bound < net[1].weight.abs().max() <= bound
    assert torch.linalg.vector_norm(nets.mlp(100, 10).get_parameter("1.bias")) > 0


def test_an_unknown_initialization_is_refused():
    with pytest.raises(ValueError, match="init: got 'zeros', allowed: 'torch', 'xavier'"):
        nets.mlp(3, 2, init="zeros")
