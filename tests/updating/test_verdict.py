"""Acceptance or refusal of an update, and its report."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from everlearn import EWC, Method, Result
from everlearn.sources import Data
from everlearn.updating import load
from everlearn.updating.held_out_sets import HeldOutSet
from everlearn.updating.intervals import PairedCounts
from everlearn.updating.verdict import Rules, Update
from tests.updating.deployments import (
    NAMES,
    digits,
    make_model,
    read_files,
    run_update,
    with_class_names,
)


def test_refusal_changes_no_file(deployment):
    run_update(digits(0, 1, 2, 3, shift=1), EWC(), old=digits(0, 1, 2, 3))
    files_before = read_files(deployment)
    outcome = run_update(digits(4, 5), EWC(), tolerance=2.0)
    assert not outcome.accepted and outcome.fall > 0 and outcome.number == 2
    assert read_files(deployment) == files_before
    assert "refused, nothing is replaced" in str(outcome) and outcome.folder == Path("state/refused")
    assert Result.load("state/refused/result.json").accuracy.shape == (3, 3)
    assert (Path("state/refused/report.txt")).read_text() == f"{outcome}\n"
    assert run_update(digits(4, 5), EWC()).number == 2, "refused data may be used again"


def test_fall_is_mean_or_maximum_over_sets(deployment):
    accuracy_before = {0: 0.9, 1: 0.5, 2: 0.1}
    accuracy_after = {0: 0.9, 1: 0.44, 2: 0.9}
    assert Rules().fall(accuracy_before, accuracy_after, [0, 1]) == 3.0
    assert Rules(per_set=True).fall(accuracy_before, accuracy_after, [0, 1]) == 6.0
    assert Rules().fall(accuracy_before, accuracy_after, []) is None
    run_update(digits(0, 1, 2, 3, shift=1), old=digits(0, 1, 2, 3))
    assert "in the held-out set that lost most" in str(run_update(digits(0, 1, shift=2), per_set=True))


def test_verdict_has_interval_of_paired_difference(deployment):
    old = digits(0, 1, 2, 3)
    outcome = run_update(digits(4, 5), EWC(), old=old, tolerance=2.0, dry_run=True)
    model = load(make_model, "model.safetensors")
    x, y = outcome.held_out_sets[0].x, outcome.held_out_sets[0].y
    correct_before = model(x).argmax(1) == y
    assert outcome.before[0] == correct_before.double().mean().item() > 0.9
    assert not outcome.accepted
    assert outcome.is_certain
    low, high = outcome.interval
    assert low < outcome.fall < high and low > 2.0
    assert f"With 95 % confidence the loss is between {low:.1f} and {high:.1f} points ({len(y)} old examples)." in str(
        outcome
    )


def test_interval_of_small_held_out_set_includes_tolerance():
    """Two points of 197 examples are only four examples."""
    low, high = PairedCounts(lost=8, gained=4, examples=197).interval()
    # The formula of Bonett & Price (2012).
    lost = 9 / 199
    gained = 5 / 199
    width = 1.959964 * np.sqrt((lost + gained - (lost - gained) ** 2) / 199)
    assert (low, high) == pytest.approx((lost - gained - width, lost - gained + width), abs=1e-7)
    held_out = HeldOutSet(0, "old.csv", torch.zeros(197, 1), torch.zeros(197, dtype=torch.long))
    outcome = Update(
        1,
        "er",
        held_out_sets=[held_out],
        before={0: 0.9},
        after={0: 0.88},
        fall=2.0,
        interval=(100 * low, 100 * high),
        accepted=True,
    )
    assert not outcome.is_certain
    assert "the loss is between -1.7 and 5.7 points (197 old examples). It may be more than the tolerance" in str(
        outcome
    )


def test_classes_with_largest_loss_are_listed(deployment):
    new = with_class_names(digits(4, 5), True)
    old = with_class_names(digits(0, 1, 2, 3), True)
    outcome = run_update(new, Method(), old=old, classes=NAMES[:4])
    assert not outcome.suggestions
    model_before = make_model()
    model_after = load(make_model, "model.safetensors")
    model_before.load_state_dict(safetensors.torch.load_file("state/update-0000/model.safetensors"))
    x, y = outcome.held_out_sets[0].x, outcome.held_out_sets[0].y
    assert [score.name for score in outcome.classes] == NAMES[:4]
    for label, score in enumerate(outcome.classes):
        num_correct = [
            sum(int(model(x[i : i + 1]).argmax() == label) for i in range(len(y)) if y[i] == label)
            for model in (model_before, model_after)
        ]
        assert [score.before, score.after] == pytest.approx([r / score.examples for r in num_correct])
    outcome.rules = Rules(tolerance=1.0)
    worst = max(outcome.classes, key=lambda score: score.fall * score.examples)
    rows = str(outcome).split("old classes that lost most, in %")[1].splitlines()
    assert worst.fall > 1 and rows[2].split() == [
        worst.name, str(worst.examples), f"{100 * worst.before:.1f}", f"{100 * worst.after:.1f}",
    ]  # fmt: skip
    facts = json.loads(Path("state/update-0001/facts.json").read_text())["accuracy"]
    assert facts["interval"] == list(outcome.interval) and facts["classes"][0]["name"] == "zero"


def test_small_held_out_set_is_reported(deployment):
    small_old_data = Data(digits(0, 1)[0], tuple(values[:20] for values in digits(0, 1)[1]))
    report = str(run_update(digits(0, 1, shift=1), old=small_old_data, tolerance=4.0, dry_run=True))
    assert "one example is worth 5.0 points" in report
    assert "one example is worth" not in str(
        run_update(digits(0, 1, shift=1), old=small_old_data, tolerance=5.0, dry_run=True)
    )


def test_first_update_without_old_data_reports_limits(deployment):
    outcome = run_update(digits(0, 1, shift=1), EWC(), tolerance=0.0)
    assert outcome.accepted and outcome.fall is None
    assert "EWC does not know the old skills" in str(outcome)
    assert "--old" in str(outcome)
    assert "not measured" in str(outcome)
    later = run_update(digits(2, 3, shift=1), EWC())
    assert later.fall is not None and later.old == [1] and later.learned == {1: outcome.after[1]}


def test_update_without_improvement_is_reported():
    assert "Accuracy on the new data has not improved" in Update(1, "er", before={1: 0.5}, after={1: 0.5}).caveats()[0]
    assert not Update(1, "er", before={1: 0.5}, after={1: 0.6}).caveats()
    assert not Update(1, "er", before={1: 1.0}, after={1: 1.0}).caveats(), "accuracy cannot improve"


def test_escape_sequences_in_names_are_printed_escaped(deployment):
    outcome = run_update(digits(0, 1))
    assert "\x1b" not in str(replace(outcome, notes=["New classes: \x1b[31mRED."]))
    assert r"\x1b[31mRED" in str(replace(outcome, notes=["New classes: \x1b[31mRED."]))
