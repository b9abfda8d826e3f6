"""Accuracy on held-out sets compared with chance."""

import pytest
import torch

from everlearn.sources import Data
from everlearn.updating.held_out_sets import HeldOutSet, skill_above_chance
from tests.updating.deployments import SHUFFLED, digits, run_update


def test_old_data_near_chance_give_warning(deployment):
    shuffled = Data(*((x.flatten(1)[:, SHUFFLED].reshape(x.shape), y) for x, y in digits(0, 1, 2, 3)))
    with pytest.warns(
        UserWarning, match=r"classifies only \d+\.\d % of old skills \(the old data\) correctly, hardly more"
    ):
        outcome = run_update(digits(0, 1, 2, 3, shift=1), old=shuffled, dry_run=True)
    assert outcome.before[0] < 0.4 and "Warning: Before this update the model classifies only" in str(outcome)
    relabelled = Data(*((x, (y + 1) % 4) for x, y in digits(0, 1, 2, 3)))
    with pytest.warns(UserWarning, match=r"the labels \(--classes\)"):
        run_update(digits(0, 1, shift=1), old=relabelled, dry_run=True)
    run_update(digits(0, 1, 2, 3, shift=1), old=digits(0, 1, 2, 3), dry_run=True)  # without a warning


def test_skill_above_chance_ignores_class_frequencies():
    y = torch.tensor([0] * 90 + [1] * 10)
    held_out = HeldOutSet(0, "", torch.zeros(100, 1), y)
    assert skill_above_chance(held_out, y == 0) == 0.0, "always predicting class 0 has 90 % accuracy"
    assert skill_above_chance(held_out, torch.ones(100, dtype=torch.bool)) == 1.0
    single_class = HeldOutSet(0, "", torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    assert skill_above_chance(single_class, torch.tensor([True, True, False, False])) == 0.5
