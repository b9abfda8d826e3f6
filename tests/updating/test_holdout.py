"""Training and held-out examples are disjoint across updates."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from everlearn import EWC, Result
from everlearn.sources import Data
from everlearn.trainer import Training
from tests.updating.deployments import (
    QUICK,
    digits,
    run_update,
)


def test_repeated_data_are_counted_once(deployment):
    first = run_update(digits(0, 1, shift=1), training=QUICK, tolerance=100.0)
    repeated = run_update(digits(0, 1, shift=1), repeat=True, training=QUICK, tolerance=100.0)
    assert repeated.old == [1] and torch.equal(repeated.held_out_sets[-1].x, first.held_out_sets[-1].x)
    assert 0 <= repeated.after[2] <= 1 and "are in earlier held-out sets, and count only there" in str(repeated)
    later = run_update(digits(2, 3, shift=1), training=QUICK, tolerance=100.0)
    num_examples = len(first.held_out_sets[-1])
    assert later.old == [1] and sum(score.examples for score in later.classes) == num_examples
    assert f"points ({num_examples} old examples)" in str(later), "the confidence interval counts them once"


def test_examples_in_earlier_held_out_sets_count_only_there(deployment):
    first = run_update(digits(0, 1, shift=1), training=QUICK, tolerance=100.0)
    (x, y), (x_test, y_test) = digits(2, 3, shift=1)
    joint_held_out = (
        torch.cat([first.held_out_sets[-1].x[:20], x_test]),
        torch.cat([first.held_out_sets[-1].y[:20], y_test]),
    )
    second = run_update(Data((x, y), joint_held_out), training=QUICK, tolerance=100.0)
    assert torch.equal(second.held_out_sets[-1].x, x_test)
    assert "20 held-out examples of the new data are in earlier held-out sets" in str(second)


def test_repeated_old_data_are_counted_once(deployment):
    run_update(digits(0, 1, shift=1), old=digits(0, 1, 2, 3), training=QUICK, tolerance=100.0)
    second = run_update(digits(2, 3, shift=1), old=digits(0, 1, 2, 3), training=QUICK, tolerance=100.0)
    assert second.old == [0, 1]


def test_keep_zero_stores_no_examples(deployment):
    run_update(digits(0, 1, shift=1), EWC(), keep=0, old=digits(0, 1, 2, 3))
    assert not list(Path("state").rglob("held-out*")) and not list(Path("state").rglob("learned*"))
    without_old_data = run_update(digits(0, 1, shift=2), EWC(), keep=0)
    assert without_old_data.fall is None
    with_old_data = run_update(digits(0, 1, shift=3), EWC(), keep=0, old=digits(0, 1, 2, 3))
    assert with_old_data.fall is not None and "old data (the old data)" in str(with_old_data)
    assert not list(Path("state").rglob("held-out*"))
    assert Result.load("state/update-0003/result.json").accuracy.shape == (2, 2)


def test_keep_limits_stored_examples(deployment):
    run_update(digits(0, 1, 2, 3, shift=1), keep=17)
    assert len(safetensors.torch.load_file("state/update-0001/held-out-0001.safetensors")["y"]) == 17
    assert len(run_update(digits(0, 1, shift=2)).held_out_sets[0]) == 17


def test_held_out_examples_of_arrays_are_not_learned(deployment):
    x, y = torch.rand(50, 1, 8, 8), torch.arange(50) % 2
    outcome = run_update((x.numpy(), y.numpy()), holdout=0.4)
    assert len(outcome.held_out_sets[0]) == 20
    memory = torch.load("state/update-0001/method.pt", weights_only=True)["memory"]["rows"]["x"].flatten(1)
    assert len(memory.unique(dim=0)) == 30
    held_out = outcome.held_out_sets[0].x.flatten(1)
    assert not (memory[:, None] == held_out[None]).all(2).any(), "held-out examples are not learned"


def test_cumulative_file_does_not_leak_held_out_examples(deployment):
    january = digits(0, 1, shift=1)
    february = digits(2, 3, shift=1)
    run_update(january)
    all_months = tuple(torch.cat(parts) for parts in zip(*january, *february, strict=True))
    outcome = run_update(all_months)
    num_held_out = len(january[1][1])
    assert " examples of the new data are in held-out sets of old skills, and were not trained on." in str(outcome)
    assert (
        " examples of the new data were trained on, in this update or before, and are not in its held-out set."
        in str(outcome)
    )
    learned_inputs = torch.cat(
        [january[0][0], torch.load("state/update-0002/method.pt")["memory"]["rows"]["x"]]
    ).flatten(1)
    new = outcome.held_out_sets[-1]
    assert len(new)
    assert not (learned_inputs[:, None] == new.x.flatten(1)[None]).all(2).any(), "learned examples are not held out"
    facts = json.loads(Path("state/update-0002/facts.json").read_text())
    assert facts["data"]["examples"] + len(outcome.held_out_sets[-1]) < len(all_months[1])
    assert len(outcome.held_out_sets[0]) == num_held_out
    rows = torch.load("state/update-0002/method.pt", weights_only=True)["memory"]["rows"]["x"].flatten(1)
    assert not (rows[:, None] == outcome.held_out_sets[0].x.flatten(1)[None]).all(2).any()
    with pytest.raises(ValueError, match="are in held-out sets of old skills: there is nothing to train on"):
        run_update(Data(january[1], february[1]))
    one_step = Training(iterations=1, batch_size=8)
    trained_before = run_update(Data(digits(2, 3, shift=2)[0], january[0]), training=one_step)
    message = (
        "held-out examples of the new data were trained on, in this update or before: "
        "their accuracy is training accuracy"
    )
    assert message in str(trained_before)
    old = Data(january[1], digits(2, 3, shift=2)[0])
    with pytest.warns(UserWarning, match="hardly more than by chance"):  # trained on a single batch of these digits
        old_trained_before = run_update(digits(2, 3, shift=3), old=old, training=one_step)
    assert "160 held-out examples of the old data were trained on" in str(old_trained_before), (
        "training examples of all updates are remembered"
    )
