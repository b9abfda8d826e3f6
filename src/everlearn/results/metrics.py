"""Metrics of the accuracy matrix R, where R[i, j] is the accuracy on task j after learning task i.

Each row follows the learning of a task, and each column is a tested task. Entries right of the diagonal belong to tasks
that are not learned yet. A metric that compares rows is NaN if there is only one, as for joint training.

Most metrics weight all tasks equally. If tasks differ in size, that is not the accuracy over all test examples, which
is ``overall_accuracy``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def average_accuracy(accuracy: ArrayLike) -> float:
    """Mean accuracy over tasks after the last task: 1/T Σⱼ R[T-1, j].

    ACC of Lopez-Paz & Ranzato (2017) and A_T of Chaudhry et al. (2018). All tasks have equal weight, however many test
    examples they have; see ``overall_accuracy``.

    >>> average_accuracy([[1.0, 0.5], [0.4, 0.8]])
    0.6
    """
    return _mean(_matrix(accuracy)[-1])


def overall_accuracy(accuracy: ArrayLike, examples: ArrayLike) -> float:
    """Accuracy over all test examples after the last task: Σⱼ nⱼ R[T-1, j] / Σⱼ nⱼ.

    Most papers on class-incremental learning report it (Rebuffi et al., 2017: the accuracy over all classes so far). It
    is the accuracy in deployment if classes are as frequent as in the test data.

    Args:
        accuracy: the matrix R.
        examples: number of test examples of each task, n.

    >>> overall_accuracy([[0.9, 0.0], [0.0, 0.9]], examples=[80, 20])
    0.18
    """
    final_accuracy = _matrix(accuracy)[-1]
    n = _counts(examples, len(final_accuracy))
    return _mean([np.average(final_accuracy, weights=n)])


def average_incremental_accuracy(accuracy: ArrayLike, examples: ArrayLike | None = None) -> float:
    """Mean over time of the accuracy on the tasks learned so far.

    Tasks have equal weight, which makes it the mean of A_1 … A_T of Chaudhry et al. (2018). If ``examples`` is given,
    test examples have equal weight, as in the average incremental accuracy of Rebuffi et al. (2017). The two agree if
    tasks are equally large.

    Args:
        accuracy: the matrix R.
        examples: number of test examples of each task, n.

    >>> average_incremental_accuracy([[1.0, 0.5], [0.4, 0.8]])
    0.8
    >>> average_incremental_accuracy([[1.0, 0.5], [0.4, 0.8]], examples=[30, 10])
    0.75
    """
    r = _square(accuracy)
    if examples is None:
        examples = np.ones(len(r))
    n = _counts(examples, len(r))
    return _mean([np.average(r[i, : i + 1], weights=n[: i + 1]) for i in range(len(r))])


def learning_accuracy(accuracy: ArrayLike) -> float:
    """Mean accuracy on each task just after learning it: 1/T Σⱼ R[j, j] (Riemer et al., 2019).

    >>> learning_accuracy([[1.0, 0.5], [0.4, 0.8]])
    0.9
    """
    return _mean(np.diagonal(_square(accuracy)))


def forgetting(accuracy: ArrayLike) -> float:
    """Mean over earlier tasks of the best accuracy since they were learned, minus the last: max R[i, j] - R[T-1, j].

    Chaudhry et al. (2018) take the maximum over all earlier rows, including those before the task was learned.

    >>> forgetting([[1.0, 0.5], [0.4, 0.8]])
    0.6
    """
    r = _square(accuracy)
    return _mean([r[j:-1, j].max() - r[-1, j] for j in range(len(r) - 1)])


def backward_transfer(accuracy: ArrayLike) -> float:
    """Effect of later tasks on earlier ones: mean of R[T-1, j] - R[j, j] over j < T-1.

    BWT of Lopez-Paz & Ranzato (2017). Díaz-Rodríguez et al. (2018) give this name to a different number, the mean of
    R[i, j] - R[j, j] over all i > j.

    >>> backward_transfer([[1.0, 0.5], [0.4, 0.8]])
    -0.6
    """
    r = _square(accuracy)
    return _mean(r[-1, :-1] - np.diagonal(r)[:-1])


def forward_transfer(accuracy: ArrayLike, initial: ArrayLike) -> float:
    """Effect of earlier tasks on later ones: mean of R[j-1, j] minus the untrained model's accuracy on j, over j > 0.

    FWT of Lopez-Paz & Ranzato (2017). Díaz-Rodríguez et al. (2018) give this name to the mean of R[i, j] over all
    i < j. It is meaningful only if the classes of a task can be predicted before it is learned. In class-incremental
    learning they cannot, so both accuracies are 0.

    Args:
        accuracy: the matrix R.
        initial: accuracy of the untrained model on each task.

    >>> forward_transfer([[1.0, 0.7], [0.4, 0.8]], initial=[0.5, 0.5])
    0.2
    """
    r = _square(accuracy)
    return _mean(np.diagonal(r, 1) - np.asarray(initial, float)[1 : len(r)])


def intransigence(accuracy: ArrayLike, joint: ArrayLike) -> float:
    """Cost of sequential learning for new tasks: mean of joint training's accuracy on j minus R[j, j].

    Chaudhry et al. (2018) compare task j with a model trained jointly on the tasks up to j; here a single model trained
    jointly on all tasks is the reference for every j.

    Args:
        accuracy: the matrix R.
        joint: accuracy of joint training on each task.

    >>> intransigence([[1.0, 0.5], [0.4, 0.8]], joint=[1.0, 1.0])
    0.1
    """
    r = _square(accuracy)
    return _mean(np.asarray(joint, float)[: len(r)] - np.diagonal(r))


def _matrix(accuracy: ArrayLike) -> Matrix:
    r = np.asarray(accuracy, dtype=np.float64)
    if r.ndim != 2 or not r.size:
        raise ValueError(f"An accuracy matrix has a row per learned and a column per tested task, got shape {r.shape}.")
    return r


def _square(accuracy: ArrayLike) -> Matrix:
    """Return a square matrix, filled with NaN if there is not a row per task."""
    r = _matrix(accuracy)
    num_rows, num_tasks = r.shape
    if num_rows == num_tasks:
        return r
    return np.full((num_tasks, num_tasks), np.nan)


def _counts(examples: ArrayLike, tasks: int) -> Matrix:
    counts = np.asarray(examples, dtype=np.float64)
    if counts.shape != (tasks,) or not (counts > 0).all():
        raise ValueError(f"examples: give the number of test examples of each of the {tasks} tasks, got {examples!r}.")
    return counts


def _mean(values: ArrayLike) -> float:
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        return float("nan")
    # Rounding gives 0.3 instead of 0.30000000000000004; adding 0.0 turns -0.0 into 0.0.
    return round(float(values.mean()), 12) + 0.0
