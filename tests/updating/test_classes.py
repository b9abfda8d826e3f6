"""Class names and their outputs."""

import pytest
import safetensors.torch
import torch

from everlearn.sources import Data
from everlearn.updating import Reading, class_names
from everlearn.updating.held_out_sets import example_digests
from tests.updating.deployments import NAMES, digits, run_update, write_csv


def test_class_names_keep_their_outputs(deployment):
    read = Reading(y="kind")
    write_csv(deployment / "old.csv", digits(0, 1, 2, 3), NAMES)
    write_csv(deployment / "a.csv", digits(1, 3), NAMES)  # alphabetical indices would differ
    first = run_update("a.csv", old="old.csv", read=read, classes=NAMES[:4])
    assert first.before[0] > 0.8 and first.before[1] > 0.8
    assert class_names("model.safetensors") == NAMES[:4]
    shuffled = list(reversed(range(64)))
    write_csv(deployment / "b.csv", digits(2, 5, 4), NAMES, shuffled)  # columns in another order, new classes
    second = run_update("b.csv")
    assert class_names("model.safetensors") == ["zero", "one", "two", "three", "five", "four"]
    assert set(second.held_out_sets[-1].y.tolist()) == {2, 4, 5}
    assert "New classes: five, four. The output" in str(second)
    assert torch.equal(second.held_out_sets[0].x, first.held_out_sets[0].x)
    stored_inputs = safetensors.torch.load_file("state/update-0002/held-out-0002.safetensors")["x"]
    write_csv(deployment / "c.csv", digits(2, 5, 4), NAMES)
    assert set(example_digests(stored_inputs)) <= set(
        example_digests(run_update("c.csv", repeat=True).held_out_sets[-1].x)
    ), "columns are matched by name"


def test_numbers_as_class_names(deployment):
    data = digits(0, 1)
    renamed = Data(*((x, torch.where(y == 0, 40, 17)) for x, y in data))
    outcome = run_update(renamed, classes=["40", "17"])
    assert outcome.before[1] > 0.8 and set(outcome.held_out_sets[0].y.tolist()) == {0, 1}


def test_numbers_index_named_outputs(deployment):
    first = run_update(digits(0, 1), classes=["zero", "one"])
    assert first.before[1] > 0.8 and "New classes" not in str(first)
    with pytest.raises(ValueError, match="has the label 3, but only the outputs 0 to 1 have names"):
        run_update(digits(2, 3))


def test_class_names_cannot_change(deployment):
    run_update(digits(0, 1), classes=["zero", "one", "two", "three"])
    with pytest.raises(ValueError, match="have names since the first update"):
        run_update(digits(2, 3), classes=["one", "zero"])
