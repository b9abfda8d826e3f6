import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlearn.results import metrics

R = [[0.9, 0.4, 0.5], [0.6, 0.8, 0.5], [0.5, 0.7, 1.0]]


def test_values_computed_by_hand():
    assert metrics.average_accuracy(R) == pytest.approx((0.5 + 0.7 + 1.0) / 3)
    assert metrics.average_incremental_accuracy(R) == pytest.approx((0.9 + 0.7 + 2.2 / 3) / 3)
    assert metrics.learning_accuracy(R) == pytest.approx(0.9)
    assert metrics.forgetting(R) == pytest.approx((0.4 + 0.1) / 2)
    assert metrics.backward_transfer(R) == pytest.approx((-0.4 - 0.1) / 2)
    assert metrics.forward_transfer(R, [0.1, 0.2, 0.3]) == pytest.approx((0.2 + 0.2) / 2)
    assert metrics.intransigence(R, [1.0, 1.0, 1.0]) == pytest.approx(0.1)


def test_examples_have_equal_weight_in_the_overall_accuracy():
    examples = [700, 200, 100]
    num_correct = [[row[j] * n for j, n in enumerate(examples)] for row in R]
    assert metrics.overall_accuracy(R, examples) == pytest.approx(sum(num_correct[2]) / 1000)
    over_time = [num_correct[0][0] / 700, sum(num_correct[1][:2]) / 900, sum(num_correct[2]) / 1000]
    assert metrics.average_incremental_accuracy(R, examples) == pytest.approx(sum(over_time) / 3)
    assert metrics.overall_accuracy(R, [5, 5, 5]) == pytest.approx(metrics.average_accuracy(R))
    assert metrics.overall_accuracy([[0.9, 0.8]], [30, 10]) == pytest.approx(0.875), "joint training"
    for wrong in ([1, 2], [1, 2, 0], [[1, 2, 3]]):
        with pytest.raises(ValueError, match="the number of test examples of each of the 3 tasks"):
            metrics.overall_accuracy(R, wrong)


def test_forgetting_starts_from_the_best_accuracy_since_learning():
    assert metrics.forgetting([[0.5, 0.9, 0], [0.8, 0.5, 0], [0.6, 0.4, 1]]) == pytest.approx((0.2 + 0.1) / 2)


matrices = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(matrices)
def test_relations_that_always_hold(matrix):
    r = np.array(matrix)
    assert metrics.forgetting(r) >= -metrics.backward_transfer(r) - 1e-9
    n = len(r)
    earlier = (n - 1) / n * metrics.backward_transfer(r)
    assert metrics.average_accuracy(r) == pytest.approx(metrics.learning_accuracy(r) + earlier)


def test_metrics_that_compare_rows_are_nan_for_joint_training():
    assert metrics.average_accuracy([[0.9, 0.8]]) == pytest.approx(0.85)
    for metric in (metrics.forgetting, metrics.backward_transfer, metrics.learning_accuracy):
        assert math.isnan(metric([[0.9, 0.8]]))
    assert math.isnan(metrics.forgetting([[0.9]]))


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"got shape \(2,\)"):
        metrics.average_accuracy([0.5, 0.5])
