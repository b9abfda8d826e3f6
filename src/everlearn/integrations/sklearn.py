"""Continual classifier with the interface of scikit-learn, which need not be installed."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from everlearn.core.chain import Chain
from everlearn.core.likelihood import Categorical
from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.core.task import Task, allowed_classes
from everlearn.integrations.sklearn_validation import Array, check_inputs, check_labels, merge_classes
from everlearn.methods.heads.base import FrozenHead
from everlearn.nets import mlp
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.heads import grow_output
from everlearn.trainer import train
from everlearn.trainer.config import build
from everlearn.trainer.evaluate import outputs_of
from everlearn.trainer.settings import OptimizerFactory, adam, device_of

PREDICTION_BATCH_SIZE = 1024


@dataclass(eq=False)
class TrainingRecord:
    """Shapes, labels and tasks that a classifier was trained on.

    Args:
        shape: shape of one example.
        outputs: output index of each label, in order of first occurrence.
        task_outputs: outputs of every numbered task; empty if tasks have no numbers.
        calls: number of calls of ``partial_fit``.
        last_task: number of the last task.
        part: number of the last part of that task.
    """

    shape: tuple[int, ...]
    outputs: dict[Any, int] = field(default_factory=dict)
    task_outputs: list[set[int]] = field(default_factory=list)
    calls: int = 0
    last_task: int | None = None
    part: int = 0

    @property
    def allowed(self) -> Tensor | None:
        """Mask of the outputs of each numbered task; None if tasks have no numbers, so that all outputs compete."""
        if not self.task_outputs:
            return None
        return allowed_classes("task", [sorted(outputs) for outputs in self.task_outputs], 0)

    def expand_task(self, task: Any, count: int) -> Tensor:
        """Return the task number of each of ``count`` examples, which must be a learned task.

        Args:
            task: one number for all examples, or one for each.
            count: number of examples.
        """
        numbers = np.asarray(task)
        learned = [number for number, outputs in enumerate(self.task_outputs) if outputs]
        if not learned:
            raise ValueError(f"task: got {task!r}, but tasks had no numbers in partial_fit: omit it.")
        if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (1,), (count,)):
            raise ValueError(
                f"task: got {numbers.dtype} of shape {numbers.shape}, allowed: one integer for all examples, or one "
                f"for each of the {count}."
            )
        unknown = sorted(set(numbers.ravel().tolist()) - set(learned))
        if unknown:
            raise ValueError(
                f"task: got {', '.join(map(str, unknown[:5]))}, but the tasks learned are "
                f"{', '.join(map(str, learned))}: give one of these."
            )
        return torch.from_numpy(numbers.astype(np.int64)).expand(count)

    def add_call(self, number: int | None, outputs: set[int]) -> None:
        """Record a call of ``partial_fit``, on a new task or on another part of the last one."""
        if number is not None:
            num_missing = number + 1 - len(self.task_outputs)
            self.task_outputs += [set() for _ in range(num_missing)]
            self.task_outputs[number] |= outputs

        # Without numbers every call is a task.
        current_task = self.calls if number is None else number
        is_same_task = current_task == self.last_task
        self.part = self.part + 1 if is_same_task else 0
        self.last_task = current_task
        self.calls += 1


@dataclass(eq=False)
class ContinualClassifier:
    """Classifier that learns a task with every ``partial_fit``, while a method prevents forgetting of earlier tasks.

    Labels are numbers or strings, and new classes widen the output layer. Integers in X become floats. With a head on
    frozen features, such as ``RanPAC``, ``model`` is a pretrained module: nothing is trained, each example counts once,
    and ``forget`` takes examples out again. Probabilities of ``RanPAC`` and ``NearestMean`` are not calibrated.

    With ``task=`` in every ``partial_fit``, only the classes of the same task compete, and ``predict`` can be given the
    task; consecutive calls with the same number are parts of one task. Without it, all classes so far compete.

    Equal seeds give bit-identical classifiers. The global random state, a given module and the given method are not
    changed. After training there are ``classes_`` (sorted; the columns of ``predict_proba``), ``n_features_in_``,
    ``model_`` and ``method_``.

    Args:
        model: a function of (inputs, outputs), the shape of one example and the number of outputs, such as
            ``nets.mlp``; a function without arguments; or a module, which is copied.
        method: method against forgetting; fine-tuning by default.
        optimizer: a function that creates an optimizer from parameters, called for every task.
        epochs: passes over the data of a call.
        batch_size: examples per step.
        seed: seed of the initial weights and of the order of examples.
        output: name of the output layer; by default the last ``nn.Linear``.
        device: device of training; by default that of the model.

    >>> from everlearn import ER
    >>> x, y = np.eye(6).repeat(5, 0), np.array(list("aabbcc")).repeat(5)
    >>> classifier = ContinualClassifier(method=ER(50), epochs=20).partial_fit(x[:20], y[:20])
    >>> print(*classifier.partial_fit(x[20:], y[20:]).classes_)
    a b c
    >>> classifier.score(x, y)
    1.0
    """

    model: Callable[..., nn.Module] | nn.Module = mlp
    method: Method | None = None
    optimizer: OptimizerFactory = adam
    epochs: int = 10
    batch_size: int = 32
    seed: int = 0
    output: str | None = None
    device: str | torch.device | None = None

    _estimator_type = "classifier"

    def fit(self, X: Any, y: Any) -> Self:
        """Discard everything learned so far and train on these examples.

        Args:
            X: a row per example.
            y: a label per example.
        """
        for name in ("_record", "model_", "method_", "classes_", "n_features_in_"):
            vars(self).pop(name, None)
        return self.partial_fit(X, y)

    def partial_fit(self, X: Any, y: Any, task: int | None = None, *, classes: Any = None) -> Self:
        """Train on these examples as a task that follows all earlier ones.

        Args:
            X: a row per example.
            y: a label per example.
            task: number of the task, from 0; in all calls or in none.
            classes: classes of later tasks, for methods that need all outputs from the start.
        """
        # A copy, so that a call that fails changes nothing.
        record = copy.deepcopy(vars(self).get("_record"))
        x = check_inputs(X, None if record is None else record.shape)
        labels = check_labels(y)
        if record is None:
            record = TrainingRecord(tuple(x.shape[1:]))
        _check_lengths(x, labels)
        if task is not None and (not isinstance(task, Integral) or task < 0):
            raise ValueError(f"task: got {task!r}, allowed: an integer from 0, or None in all calls.")
        if record.calls and (task is None) == bool(record.task_outputs):
            raise ValueError(
                "task: give it in every call of partial_fit or in none; tasks with and without numbers do not mix."
            )

        future_classes = None if classes is None else check_labels(classes)
        all_classes = merge_classes(vars(self).get("classes_"), labels, future_classes)
        for label in all_classes.tolist():
            record.outputs.setdefault(label, len(record.outputs))
        output_indices = torch.tensor([record.outputs[label] for label in labels.tolist()])
        record.add_call(None if task is None else int(task), set(output_indices.tolist()))
        self._train(x, output_indices, record)

        self._record = record
        self.classes_ = all_classes
        self.n_features_in_ = int(np.prod(record.shape))
        return self

    def forget(self, X: Any, y: Any) -> Self:
        """Take learned examples out again, so that the classifier equals one that never saw them, up to rounding.

        Only heads on frozen features can: ``NearestMean``, ``StreamingLDA``, ``RanPAC``, ``KLDA`` and ``FeCAM``. The
        features are not changed. That the examples were learned is checked only by their number in each class.

        Args:
            X: a row per example, as they were learned.
            y: a label per example.
        """
        self._check_is_fitted()
        # In one deep copy, because model and method may share tensors; a call that fails changes nothing.
        model, method = copy.deepcopy((vars(self)["model_"], vars(self)["method_"]))
        if not hasattr(method, "forget"):
            raise ValueError(
                f"{type(method).__name__} cannot forget examples: what it has learned of them is spread over all "
                "weights. Use a head on frozen features, such as method=RanPAC(), or fit again without them."
            )
        x = check_inputs(X, self._record.shape)
        labels = check_labels(y)
        _check_lengths(x, labels)
        unknown = [label for label in np.unique(labels).tolist() if label not in self._record.outputs]
        if unknown:
            raise ValueError(
                f"y has the label {unknown[0]!r}, which was never learned: give only examples that were learned."
            )

        output_indices = torch.tensor([self._record.outputs[label] for label in labels.tolist()])
        method.forget(model, (x, output_indices))
        self.model_ = model
        self.method_ = method
        return self

    def predict(self, X: Any, task: Any = None) -> Array:
        """Predict the most likely class of each example.

        Args:
            X: a row per example.
            task: task number, one for all examples or one for each, if it is known.
        """
        self._check_is_fitted()
        predicted: Array = self.classes_[self._logits(X, task).argmax(1).numpy()]
        return predicted

    def predict_proba(self, X: Any, task: Any = None) -> Array:
        """Predict the probability of every class, in the order of ``classes_``.

        Args:
            X: a row per example.
            task: task number, one for all examples or one for each, if it is known.
        """
        self._check_is_fitted()
        return self._logits(X, task).double().softmax(1).numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None, *, task: Any = None) -> float:
        """Compute the accuracy.

        Args:
            X: a row per example.
            y: a label per example.
            sample_weight: weights of the examples; equal by default.
            task: task number, one for all examples or one for each, if it is known.
        """
        return float(np.average(self.predict(X, task) == np.asarray(y), weights=sample_weight))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor.

        Args:
            deep: also return the method's hyperparameters, such as ``method__strength``.
        """
        params = {f.name: getattr(self, f.name) for f in fields(self)}
        if deep and isinstance(self.method, Method) and not isinstance(self.method, Chain):
            params |= {f"method__{f.name}": getattr(self.method, f.name) for f in fields(self.method)}
        return params

    def set_params(self, **params: Any) -> Self:
        """Change arguments or hyperparameters of the method; a method that is trained already keeps its own.

        Args:
            params: values by name, such as ``epochs`` or ``method__strength``. A method is set before its
                hyperparameters.
        """
        for name, value in sorted(params.items(), key=lambda param: "__" in param[0]):
            allowed = self.get_params()
            if name not in allowed:
                raise ValueError(f"ContinualClassifier has no parameter {name!r}; there are: {', '.join(allowed)}.")
            argument, _, hyperparameter = name.partition("__")
            if hyperparameter:
                value = replace(getattr(self, argument), **{hyperparameter: value})
            setattr(self, argument, value)
        return self

    def __sklearn_tags__(self) -> Any:  # called by scikit-learn only, so it is installed
        tags = importlib.import_module("sklearn.utils")
        return tags.Tags(
            estimator_type="classifier",
            target_tags=tags.TargetTags(required=True),
            classifier_tags=tags.ClassifierTags(),
            input_tags=tags.InputTags(),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return "_record" in vars(self)

    def _train(self, x: Tensor, y: Tensor, record: TrainingRecord) -> None:
        """Train copies of model and method, so that a call that fails leaves them unchanged."""
        task = Task(
            (x, y),
            id=record.last_task,
            part=record.part,
            allowed=record.allowed,
            known_at_test=bool(record.task_outputs),
        )
        model: nn.Module
        method: Method
        if not self.__sklearn_is_fitted__():
            with seeded(derive(self.seed, "model")):
                stream = Stream([task], "domain", inputs=record.shape, outputs=len(record.outputs))
                model = build(self.model, stream).to(self.device)
            method = Method() if self.method is None else copy.deepcopy(self.method)
            if isinstance(method, FrozenHead):
                method.use_output(self.output)
        else:
            # In one deep copy, because model and method may share tensors.
            model, method = copy.deepcopy((vars(self)["model_"], vars(self)["method_"]))

        with seeded(derive(self.seed, "partial_fit", record.calls), device_of(model)):
            if outputs_of(model, x, "X") < len(record.outputs):
                grow_output(model, len(record.outputs), self.output)
            train(
                model,
                method,
                task,
                optimizer=self.optimizer,
                epochs=self.epochs,
                batch_size=self.batch_size,
                seed=self.seed,
                progress=False,
            )
        self.model_ = model
        self.method_ = method

    @torch.no_grad()
    def _logits(self, X: Any, task: Any) -> Tensor:
        """Compute the logits in the order of ``classes_``; minus infinity for classes of other tasks."""
        x = check_inputs(X, self._record.shape)
        task_ids = None if task is None else self._record.expand_task(task, len(x))
        device = device_of(self.model_)
        batches = []
        for rows in torch.arange(len(x)).split(PREDICTION_BATCH_SIZE):
            batch_ids = None if task_ids is None else task_ids[rows].to(device)
            batches.append(self.method_.predict(self.model_, x[rows].to(device), batch_ids).cpu())
        logits = torch.cat(batches)

        allowed = self._record.allowed
        if task_ids is not None and allowed is not None:
            logits = Categorical().logits(logits, allowed[task_ids])
        return logits[:, [self._record.outputs[label] for label in self.classes_.tolist()]]

    def _check_is_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            # NotFittedError of scikit-learn is a ValueError too.
            error_class = getattr(sys.modules.get("sklearn.exceptions"), "NotFittedError", ValueError)
            raise error_class("This ContinualClassifier is not trained yet: call partial_fit(X, y) first.")


def _check_lengths(x: Tensor, labels: Array) -> None:
    if len(x) != len(labels):
        raise ValueError(f"X has {len(x)} examples and y has {len(labels)} labels: give one label per example.")
