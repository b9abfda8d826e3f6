import copy

import pytest
import torch
from torch import nn

from everlearn.surgery.freezing import FrozenEntries, compute_checksums, find_changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_locked_entries_stay_bit_for_bit_whatever_a_step_does(dtype):
    model, locks = nn.Linear(5, 4).to(dtype), FrozenEntries()
    before = model.weight.detach().clone()
    before[0, 0] = -0.0
    with torch.no_grad():
        model.weight.copy_(before)
    mask = torch.rand(4, 5) > 0.5
    mask[0, :2] = torch.tensor([True, False])
    locks.lock(model, "weight", mask)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    locks.mask_gradients(model)
    assert (model.weight.grad[mask] == 0).all() and model.weight.grad[~mask].isnan().all()
    after = torch.randn(4, 5).to(dtype)
    after[0, 0] = float("nan")
    with torch.no_grad():
        model.weight.copy_(after)
    with pytest.raises(ValueError, match=r"Locked entries of weight have moved.*EWC.before_step"):
        locks.check(model, "EWC")
    locks.restore(model)
    locks.check(model, "EWC")
    assert torch.equal(model.weight[mask], before[mask]) and torch.equal(model.weight[~mask], after[~mask])
    assert model.weight[0, 0].signbit()


def test_a_parameter_locked_as_a_whole_has_no_gradient_unless_another_gives_it_one():
    model, locks = nn.Linear(5, 4), FrozenEntries()
    locks.lock(model, "bias", torch.ones(4, dtype=torch.bool))
    before = model.bias.detach().clone()
    model.bias.grad = torch.ones(4)
    locks.mask_gradients(model)
    assert model.bias.grad is None
    model.bias.grad = torch.ones(4)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    locks.restore(model)
    assert torch.equal(model.bias, before)


def test_nothing_is_locked_by_an_empty_mask():
    model, locks = nn.Linear(5, 4), FrozenEntries()
    locks.lock(model, "bias", torch.zeros(4, dtype=torch.bool))
    assert not locks.masks


def test_released_it_learns_again():
    model, locks = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), FrozenEntries()
    locks.lock_buffers(model, [n for n, _ in model.named_buffers()])
    model.train()(torch.randn(8, 5))
    assert model[1].num_batches_tracked == 0
    locks.release(model)
    model.train()(torch.randn(8, 5))
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_checksums_tell_of_any_change_of_what_is_masked_and_of_no_other(dtype):
    model = nn.Linear(5, 4).to(dtype)
    mask = torch.rand(4, 5) > 0.5
    mask[0, :2] = torch.tensor([True, False])
    masks = {"weight": mask, "bias": torch.zeros(4, dtype=torch.bool)}
    before = compute_checksums(model, masks)
    with torch.no_grad():
        model.weight[0, 1] += 1
        model.bias += 1
    assert find_changed(model, masks, before) == []
    for row, column in mask.nonzero().tolist():
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.weight[row, column] *= 1 + torch.finfo(dtype).eps  # the smallest step there is
        assert find_changed(other, masks, before) == ["weight"]
    assert find_changed(nn.Sequential(nn.Linear(5, 4)), masks, before) == ["weight", "bias"]


def test_checksums_outlive_a_move_to_double_precision():
    model = nn.Linear(5, 4)
    masks = {"weight": torch.ones(4, 5, dtype=torch.bool)}
    before = compute_checksums(model, masks)
    assert find_changed(model.double(), masks, before) == []
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert find_changed(model, masks, before) == ["weight"]
    assert find_changed(model.half(), masks, before) == [], "rounded numbers cannot be compared"
