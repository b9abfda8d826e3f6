"""Metrics: functions of the accuracy matrix R, where R[i, j] is the accuracy on task j after learning task i.

Rows are what was learned, columns what is tested; entries right of the diagonal are of tasks not yet learned. A metric
that compares rows is not a number (nan) where there is nothing to compare, as for joint training, which has one row.

Most metrics count every task once, whatever its size. Where tasks differ in size, that is not the accuracy over all test
examples: ``overall_accuracy`` is, and says so by its name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]


def average_accuracy(accuracy: ArrayLike) -> float:
    """Mean over tasks after the last: 1/T Σⱼ R[T-1, j] (ACC of Lopez-Paz & Ranzato, 2017; A_T of Chaudhry et al., 2018).

    Every task counts once, however many test examples it has; see ``overall_accuracy``.

    >>> average_accuracy([[1.0, 0.5], [0.4, 0.8]])
    0.6
    """
    return _mean(_matrix(accuracy)[-1])


def overall_accuracy(accuracy: ArrayLike, examples: ArrayLike) -> float:
    """Share of all test examples that are answered rightly after the last task: Σⱼ nⱼ R[T-1, j] / Σⱼ nⱼ.

    It is what class-incremental learning is mostly reported by (Rebuffi et al., 2017: the accuracy over all classes seen), and
    what a user of the model meets if examples come as often as in the test data.

    Args:
        accuracy: the matrix R.
        examples: how many test examples each task has, n.

    >>> overall_accuracy([[0.9, 0.0], [0.0, 0.9]], examples=[80, 20])
    0.18
    """
    last = _matrix(accuracy)[-1]
    return _mean([np.average(last, weights=_counts(examples, len(last)))])


def average_incremental_accuracy(accuracy: ArrayLike, examples: ArrayLike | None = None) -> float:
    """Mean over time of the accuracy on the tasks learned so far.

    Tasks count equally, which makes it the mean of A_1 … A_T of Chaudhry et al. (2018). With the number of test examples of
    each task, every example does, which is the average incremental accuracy of Rebuffi et al. (2017). The two are the same
    where tasks are equally large.

    >>> average_incremental_accuracy([[1.0, 0.5], [0.4, 0.8]])
    0.8
    >>> average_incremental_accuracy([[1.0, 0.5], [0.4, 0.8]], examples=[30, 10])
    0.75
    """
    r = _square(accuracy)
    n = _counts(np.ones(len(r)) if examples is None else examples, len(r))
    return _mean([np.average(r[i, : i + 1], weights=n[: i + 1]) for i in range(len(r))])


def learning_accuracy(accuracy: ArrayLike) -> float:
    """Mean accuracy on each task just after learning it: 1/T Σⱼ R[j, j] (Riemer et al., 2019).

    >>> learning_accuracy([[1.0, 0.5], [0.4, 0.8]])
    0.9
    """
    return _mean(np.diagonal(_square(accuracy)))


def forgetting(accuracy: ArrayLike) -> float:
    """Mean over earlier tasks of the best accuracy since they were learned, minus the last (Chaudhry et al., 2018).

    Chaudhry et al. take the best of all times, also of those before the task was learned.

    >>> forgetting([[1.0, 0.5], [0.4, 0.8]])
    0.6
    """
    r = _square(accuracy)
    return _mean([r[j:-1, j].max() - r[-1, j] for j in range(len(r) - 1)])


def backward_transfer(accuracy: ArrayLike) -> float:
    """What later tasks did to earlier ones: mean of R[T-1, j] - R[j, j] over j < T-1 (BWT of Lopez-Paz & Ranzato, 2017).

    Díaz-Rodríguez et al. (2018) give this name to the mean of R[i, j] - R[j, j] over all i > j, which is another number.

    >>> backward_transfer([[1.0, 0.5], [0.4, 0.8]])
    -0.6
    """
    r = _square(accuracy)
    return _mean(r[-1, :-1] - np.diagonal(r)[:-1])


def forward_transfer(accuracy: ArrayLike, initial: ArrayLike) -> float:
    """What earlier tasks did for later ones: mean of R[j-1, j] minus the untrained model's accuracy on j, over j > 0.

    FWT of Lopez-Paz & Ranzato (2017); Díaz-Rodríguez et al. (2018) give this name to the mean of R[i, j] over all i < j. It says
    something only where the answers of a task can be given before it is learned, so not in class-incremental learning, where
    both numbers are 0 because the task's classes may not be named yet.

    >>> forward_transfer([[1.0, 0.7], [0.4, 0.8]], initial=[0.5, 0.5])
    0.2
    """
    r = _square(accuracy)
    return _mean(np.diagonal(r, 1) - np.asarray(initial, float)[1 : len(r)])


def intransigence(accuracy: ArrayLike, joint: ArrayLike) -> float:
    """What learning in sequence costs the new task: mean of joint training's accuracy on j minus R[j, j].

    Chaudhry et al. (2018) take for task j a model trained jointly on the tasks up to j; here one model trained jointly
    on all tasks stands for every j.

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
    r = _matrix(accuracy)
    return r if r.shape[0] == r.shape[1] else np.full((r.shape[1],) * 2, np.nan)


def _counts(examples: ArrayLike, tasks: int) -> Matrix:
    counts = np.asarray(examples, dtype=np.float64)
    if counts.shape != (tasks,) or not (counts > 0).all():
        raise ValueError(f"examples: give the number of test examples of each of the {tasks} tasks, got {examples!r}.")
    return counts


def _mean(values: ArrayLike) -> float:
    values = np.asarray(values, dtype=np.float64)  # rounded below: 0.3, not 0.30000000000000004
    return round(float(values.mean()), 12) + 0.0 if values.size else float("nan")
