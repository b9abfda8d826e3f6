import pytest
import torch
from torch import nn

from everlearn.surgery.heads import grow_output, output_layer


@pytest.mark.parametrize("bias", [True, False])
def test_growing_keeps_the_old_outputs(bias):
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=bias)).double()
    x = torch.randn(5, 4, dtype=torch.double)
    old_outputs = net(x)
    grow_output(net, 6)
    new_outputs = net(x)
    assert new_outputs.shape == (5, 6)
    torch.testing.assert_close(new_outputs[:, :2], old_outputs, rtol=0, atol=1e-12)
    assert net[2].weight.dtype == torch.double


def test_growing_a_wrapped_model_and_a_named_layer():
    net = nn.ModuleDict({"fc": nn.Linear(2, 2), "aux": nn.Linear(2, 2)})
    grow_output(nn.DataParallel(net), 3, name="fc")
    assert net["fc"].out_features == 3 and net["aux"].out_features == 2


def test_errors_name_the_available_layers():
    net = nn.Sequential(nn.Linear(2, 4))
    with pytest.raises(ValueError, match="cannot shrink to 3"):
        grow_output(net, 3)
    with pytest.raises(ValueError, match="is the output layer itself"):
        grow_output(nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match=r"no nn.Linear layer named 'fc'; its linear layers are: 0"):
        output_layer(net, "fc")
