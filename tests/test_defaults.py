"""Defaults are those that benchmarks/defaults.py has chosen by a rule, and the record of it is complete."""

import json
import math
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from everlearn.methods import METHODS

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "docs/results/defaults.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def experiment():
    return runpy.run_path(str(ROOT / "benchmarks/defaults.py"))


def gains(*points):
    return {f"stream {i}": gain for i, gain in enumerate(points)}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ((1.5, 1.4, 1.6, 1.5), True),
        ((0.9, 0.8, 1.0, 0.9), False),  # less than a point
        ((8.0, 0.0, 0.0, 0.0), False),  # one stream alone: the standard error is 2
        ((9.0, 5.0, 7.0, -1.5), False),  # a loss on one stream
        ((9.0, 5.0, 7.0, -0.5), True),
        ((9.0, 9.0, 9.0, float("nan")), False),  # a run that failed
        ((9.0,), False),
    ],
)
def test_a_value_needs_a_clear_gain_and_no_loss(experiment, points, expected):
    assert experiment["passes"](gains(*points)) is expected


def test_a_standard_error_is_that_of_a_mean(experiment):
    # The deviations of 1, 2, 3, 4 from 2.5 have the variance 5/3.
    assert experiment["standard_error"]([1.0, 2.0, 3.0, 4.0]) == pytest.approx((5 / 3 / 4) ** 0.5)


def test_gains_are_means_over_seeds(experiment):
    default = {"a": [10.0, 20.0], "b": [50.0, 50.0]}
    assert experiment["stream_gains"](default, {"a": [30.0, 20.0], "b": [50.0, 49.0]}) == {"a": 10.0, "b": -0.5}
    refused = experiment["stream_gains"](default, {"a": [30.0, None], "b": [50.0, 49.0]})
    assert math.isnan(refused["a"])
    assert refused["b"] == -0.5
    with pytest.raises(ValueError, match="the same streams and seeds"):
        experiment["stream_gains"](default, {"a": [30.0], "b": [50.0, 49.0]})


def test_the_largest_gain_of_a_method_decides(experiment):
    decide = experiment["decide"]
    start = {"alpha": 0.5, "policy": "ring"}
    small = gains(2.0, 2.1, 1.9)
    large = gains(4.0, 4.1, 3.9)
    uncertain = gains(30.0, 0.0, 0.0)
    assert decide(start, {"alpha": {1.0: uncertain}}) == start
    assert decide(start, {"alpha": {1.0: small, 2.0: large}}) == {"alpha": 2.0, "policy": "ring"}
    assert decide(start, {"alpha": {1.0: small}, "policy": {"balanced": large}}) == {"alpha": 0.5, "policy": "balanced"}


def recorded_fields():
    for name, method in RECORD["methods"].items():
        for field_name, recorded in method["fields"].items():
            yield pytest.param(name, field_name, recorded, id=f"{name}.{field_name}")


@pytest.mark.parametrize(("name", "field_name", "recorded"), list(recorded_fields()))
def test_each_default_is_the_recorded_decision(name, field_name, recorded):
    assert getattr(METHODS[name](), field_name) == recorded["decision"]


@pytest.mark.parametrize("name", list(RECORD["methods"]))
def test_each_decision_follows_from_the_recorded_accuracies(experiment, name):
    method = RECORD["methods"][name]
    start = {field_name: recorded["default"] for field_name, recorded in method["fields"].items()}
    by_field = {}
    for field_name, recorded in method["fields"].items():
        by_field[field_name] = {
            candidate["value"]: experiment["stream_gains"](recorded["accuracy"], candidate["accuracy"])
            for candidate in recorded["candidates"]
            if candidate["eligible"]
        }
    decision = {field_name: recorded["decision"] for field_name, recorded in method["fields"].items()}
    assert experiment["decide"](start, by_field) == decision


def test_the_record_is_that_of_the_plans(experiment):
    assert set(RECORD["methods"]) == set(experiment["PLANS"])
    for name, plan in experiment["PLANS"].items():
        method = RECORD["methods"][name]
        assert method["streams"] == list(plan.streams)
        assert set(method["fields"]) == set(plan.candidates)
        for field_name, recorded in method["fields"].items():
            assert field_name in {f.name for f in fields(METHODS[name])}
            assert recorded["default"] == plan.start[field_name]
            candidates = recorded["candidates"]
            assert [c["value"] for c in candidates] == list(plan.candidates[field_name])
            assert {c["value"] for c in candidates if not c["eligible"]} == set(plan.excluded.get(field_name, ()))
            for row in [recorded, *candidates]:
                num_seeds = {stream: len(accuracies) for stream, accuracies in row["accuracy"].items()}
                assert num_seeds == dict.fromkeys(plan.streams, RECORD["seeds"])
