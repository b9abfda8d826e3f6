import copy

import pytest
import torch
from torch import nn

from everlearn.surgery.freezing import FrozenEntries, compute_checksums, find_changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_frozen_entries_are_restored_bit_for_bit(dtype):
    model = nn.Linear(5, 4).to(dtype)
    frozen = FrozenEntries()
    initial = model.weight.detach().clone()
    initial[0, 0] = -0.0
    with torch.no_grad():
        model.weight.copy_(initial)
    mask = torch.rand(4, 5) > 0.5
    mask[0, :2] = torch.tensor([True, False])
    frozen.lock(model, "weight", mask)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    frozen.mask_gradients(model)
    assert (model.weight.grad[mask] == 0).all() and model.weight.grad[~mask].isnan().all()
    update = torch.randn(4, 5).to(dtype)
    update[0, 0] = float("nan")
    with torch.no_grad():
        model.weight.copy_(update)
    with pytest.raises(ValueError, match=r"Locked entries of weight have moved.*EWC.before_step"):
        frozen.check(model, "EWC")
    frozen.restore(model)
    frozen.check(model, "EWC")
    assert torch.equal(model.weight[mask], initial[mask]) and torch.equal(model.weight[~mask], update[~mask])
    assert model.weight[0, 0].signbit()


def test_a_completely_frozen_parameter_has_no_gradient_and_is_restored():
    model = nn.Linear(5, 4)
    frozen = FrozenEntries()
    frozen.lock(model, "bias", torch.ones(4, dtype=torch.bool))
    initial_bias = model.bias.detach().clone()
    model.bias.grad = torch.ones(4)
    frozen.mask_gradients(model)
    assert model.bias.grad is None
    model.bias.grad = torch.ones(4)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    frozen.restore(model)
    assert torch.equal(model.bias, initial_bias)


def test_an_empty_mask_freezes_nothing():
    model = nn.Linear(5, 4)
    frozen = FrozenEntries()
    frozen.lock(model, "bias", torch.zeros(4, dtype=torch.bool))
    assert not frozen.masks


def test_released_buffers_are_updated_again():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    frozen = FrozenEntries()
    frozen.lock_buffers(model, [n for n, _ in model.named_buffers()])
    model.train()(torch.randn(8, 5))
    assert model[1].num_batches_tracked == 0
    frozen.release(model)
    model.train()(torch.randn(8, 5))
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_checksums_detect_changes_of_masked_entries_only(dtype):
    model = nn.Linear(5, 4).to(dtype)
    mask = torch.rand(4, 5) > 0.5
    mask[0, :2] = torch.tensor([True, False])
    masks = {"weight": mask, "bias": torch.zeros(4, dtype=torch.bool)}
    checksums = compute_checksums(model, masks)
    with torch.no_grad():
        model.weight[0, 1] += 1
        model.bias += 1
    assert find_changed(model, masks, checksums) == []
    for row, column in mask.nonzero().tolist():
        changed_model = copy.deepcopy(model)
        with torch.no_grad():
            changed_model.weight[row, column] *= 1 + torch.finfo(dtype).eps  # the smallest possible change
        assert find_changed(changed_model, masks, checksums) == ["weight"]
    assert find_changed(nn.Sequential(nn.Linear(5, 4)), masks, checksums) == ["weight", "bias"]


def test_checksums_survive_conversion_to_double_precision():
    model = nn.Linear(5, 4)
    masks = {"weight": torch.ones(4, 5, dtype=torch.bool)}
    checksums = compute_checksums(model, masks)
    assert find_changed(model.double(), masks, checksums) == []
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert find_changed(model, masks, checksums) == ["weight"]
    assert find_changed(model.half(), masks, checksums) == [], "rounded values cannot be compared"
