import copy

import pytest
import torch
from torch import nn

from everlearn.surgery.freezing import FrozenEntries, compute_checksums, find_changed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_frozen_entries_are_restored_bit_for_bit(dtype):
    model = nn.Linear(5, 4).to(dtype)
    frozen = FrozenEntries("EWC")
    initial = model.weight.detach().clone()
    initial[0, 0] = -0.0
    with torch.no_grad():
        model.weight.copy_(initial)
    mask = torch.rand(4, 5) > 0.5
    mask[0, :2] = torch.tensor([True, False])
    frozen.lock(model, {"weight": mask})
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    frozen.mask_gradients(model)
    assert (model.weight.grad[mask] == 0).all() and model.weight.grad[~mask].isnan().all()
    update = torch.randn(4, 5).to(dtype)
    update[0, 0] = float("nan")
    with torch.no_grad():
        model.weight.copy_(update)
    with pytest.raises(ValueError, match=r"Locked entries of weight have moved.*EWC.before_step"):
        frozen.check(model)
    frozen.restore(model)
    frozen.check(model)
    assert torch.equal(model.weight[mask], initial[mask]) and torch.equal(model.weight[~mask], update[~mask])
    assert model.weight[0, 0].signbit()


def test_a_completely_frozen_parameter_has_no_gradient_and_is_restored():
    model = nn.Linear(5, 4)
    frozen = FrozenEntries("EWC")
    frozen.lock(model, {"bias": torch.ones(4, dtype=torch.bool)})
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
    frozen = FrozenEntries("EWC")
    frozen.lock(model, {"bias": torch.zeros(4, dtype=torch.bool)})
    assert not frozen.masks


def test_released_buffers_are_updated_again():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    frozen = FrozenEntries("EWC")
    frozen.lock_buffers(model, [n for n, _ in model.named_buffers()])
    model.train()(torch.randn(8, 5))
    assert model[1].num_batches_tracked == 0
    frozen.release(model)
    model.train()(torch.randn(8, 5))
    assert model[1].num_batches_tracked == 1


def make_features():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def train_steps(model, frozen, num_steps=3):
    """Train with momentum and weight decay, which would move weights without a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        loss = model.train()(torch.randn(8, 5, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        frozen.mask_gradients(model)
        optimizer.step()
        frozen.restore(model)
    return {name: v.clone() for name, v in model.state_dict().items()}


def changed_names(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_frozen_features_keep_all_but_the_output_layer():
    model = make_features()
    model[0].bias.requires_grad_(False)  # frozen by the user
    model[0].weight.grad = torch.ones(4, 5)
    frozen = FrozenEntries("Freeze")
    frozen.freeze_features(model)
    initial = {name: v.clone() for name, v in model.state_dict().items()}
    final = train_steps(model, frozen)
    assert changed_names(initial, final) == ["3.weight", "3.bias"]
    assert not model[1].training and model[3].training, "BatchNorm normalizes by its running statistics"

    frozen.release(model)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]
    released = train_steps(model, frozen)
    assert set(initial) - set(changed_names(final, released)) == {"0.bias"}


def test_frozen_features_are_copied_together_with_their_model():
    model = make_features()
    frozen = FrozenEntries("Freeze")
    frozen.freeze_features(model)
    model_copy, frozen_copy = copy.deepcopy((model, frozen))
    expected = train_steps(model, frozen)
    assert not changed_names(expected, train_steps(model_copy, frozen_copy))

    # The copies belong together: to release one leaves the other frozen.
    frozen_copy.release(model_copy)
    assert all(p.requires_grad for p in model_copy.parameters())
    assert not any(module._forward_pre_hooks for module in model_copy.modules())
    assert changed_names(expected, train_steps(model, frozen)) == ["3.weight", "3.bias"]


def test_batch_statistics_are_used_while_running_ones_are_only_restored():
    model = make_features()
    frozen = FrozenEntries("LwF")
    frozen.lock_buffers(model, [n for n, _ in model.named_buffers()], evaluate=False)
    initial = {name: v.clone() for name, v in model.named_buffers()}
    train_steps(model, frozen)
    assert model[1].training
    assert not changed_names(initial, dict(model.named_buffers()))


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
