"""Dimensions of the search and their values."""

import pytest

import everlearn
from everlearn import ER, EWC, SI, LwF, Method
from everlearn.tuning import tune
from everlearn.tuning.search_space import find_dimensions, with_values
from tests.tuning.studies import TRAINING, digits, make_net


def test_field_is_not_late_with_consolidation_within_tasks(tmp_path):
    (dimension,) = find_dimensions(SI(consolidate_every=3))
    assert not dimension.search.late and find_dimensions(SI())[0].search.late
    study = tune(make_net, SI(consolidate_every=3), digits(), trials=2, prune=False, training=TRAINING, out=tmp_path)
    for trial in study.trials:
        direct_run = everlearn.run(
            make_net,
            SI(trial.values["strength"], consolidate_every=3),
            digits(),
            epochs=2,
            batch_size=32,
            split="valid",
        )
        assert trial.score == direct_run.average_accuracy


def test_dimensions_of_chains_choices_and_given_ranges():
    chain = EWC() + LwF()
    assert [dimension.name for dimension in find_dimensions(chain)] == ["EWC.strength", "LwF.strength"]
    dimensions = find_dimensions(chain, {"mode": None, "LwF.strength": (1, 2)})
    assert dimensions[0].options == ("separate", "online")
    assert (dimensions[1].search.low, dimensions[1].search.high) == (1, 2)
    changed = with_values(chain, dimensions, ["online", 1.5])
    assert (changed.methods[0].mode, changed.methods[1].strength) == ("online", 1.5)
    assert (chain.methods[0].mode, chain.methods[1].strength) == ("separate", 1.0)


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (EWC(), {"strenght": None}, "'strenght' is no field that can be tuned: there are strength"),
        (EWC() + LwF(), {"strength": None}, "several fields"),
        (EWC(), {"strength": (2, 1)}, "low < high"),
        (EWC(), {"strength": (0, 1)}, "begins above 0"),
        (EWC(), {"strength": 5}, r"needs a range \(low, high\)"),
        (EWC(), {"strength": (1, 2, 3)}, r"needs a range \(low, high\)"),
        (EWC(), {}, "No field is named"),
        (ER(), {"capacity": (0.2, 20.5)}, "integer ends"),
        (EWC(), {"mode": (0, 1)}, "a range has no meaning"),
        (EWC(), {"prior": None}, "needs a range"),
        (Method(), None, "no field with a default range"),
    ],
)
def test_invalid_fields_are_refused(method, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tune(make_net, method, digits(), fields=fields, out=tmp_path)
