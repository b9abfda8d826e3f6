"""A classifier of arrays that goes on learning, with the words of scikit-learn, which itself is not needed."""

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
from everlearn.integrations.sklearn_validation import Array, inputs, labels, merged
from everlearn.nets import mlp
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.heads import grow_output
from everlearn.trainer import train
from everlearn.trainer.config import build
from everlearn.trainer.evaluate import outputs_of
from everlearn.trainer.settings import OptimizerFactory, adam, device_of


@dataclass(eq=False)
class Known:
    """What a classifier has met.

    Args:
        shape: of one example.
        outputs: which stands for which label, in the order of their coming.
        tasks: the outputs of every task with a number; empty where tasks have none.
        calls: how often it has learned.
        last: the number of the last task.
        part: which part of it was the last.
    """

    shape: tuple[int, ...]
    outputs: dict[Any, int] = field(default_factory=dict)
    tasks: list[set[int]] = field(default_factory=list)
    calls: int = 0
    last: int | None = None
    part: int = 0

    @property
    def allowed(self) -> Tensor | None:
        """Which outputs each numbered task has; None where tasks have no numbers, and all outputs compete."""
        return allowed_classes("task", [sorted(own) for own in self.tasks], 0) if self.tasks else None

    def numbers(self, task: Any, count: int) -> Tensor:
        """The task of each of so many examples, if it was learned."""
        given, known = np.asarray(task), [n for n, own in enumerate(self.tasks) if own]
        if not known:
            raise ValueError(f"task: got {task!r}, but tasks had no numbers in partial_fit: leave it out.")
        if given.dtype.kind not in "iu" or given.shape not in ((), (1,), (count,)):
            raise ValueError(
                f"task: got {given.dtype} of shape {given.shape}, allowed: a whole number for all examples, or one for each of the {count}."
            )
        if unknown := sorted(set(given.ravel().tolist()) - set(known)):
            some = ", ".join(map(str, unknown[:5]))
            raise ValueError(
                f"task: got {some}, but the tasks learned are {', '.join(map(str, known))}: give one of these."
            )
        return torch.from_numpy(given.astype(np.int64)).expand(count)

    def enter(self, number: int | None, own: set[int]) -> None:
        """Note that a task, or another part of the last one, is learned."""
        if number is not None:
            self.tasks += [set() for _ in range(number + 1 - len(self.tasks))]
            self.tasks[number] |= own
        here = self.calls if number is None else number
        self.part = self.part + 1 if here == self.last else 0
        self.last, self.calls = here, self.calls + 1


@dataclass(eq=False)
class ContinualClassifier:
    """A classifier whose every ``partial_fit`` is a task, while a method keeps the earlier ones.

    Labels may be numbers or words; classes that come later widen the output layer. Whole numbers in X become floats. With
    ``task=`` in every ``partial_fit`` the classes of a task compete among themselves alone, and ``predict`` may be told the task;
    calls with one number after each other are parts of one task. Without, all classes met so far compete. One seed gives one
    classifier, bit for bit; your random state, module and method stay as they were.

    After learning there are ``classes_`` (sorted; the columns of ``predict_proba``), ``n_features_in_``, ``model_`` and
    ``method_``.

    Args:
        model: a function of (inputs, outputs), the shape of one example and the number of outputs, such as ``nets.mlp``; or one
            without arguments; or a module, which is copied.
        method: what protects earlier tasks; by default nothing does.
        optimizer: a function of the parameters that makes one, anew for every call.
        epochs: passes over the data of a call.
        batch_size: examples per step.
        seed: of the first weights and of the order of examples.
        output: name of the output layer; by default the last ``nn.Linear``.
        device: where to train; by default where the model is.

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
        """Forget everything and learn these examples.

        Args:
            X: a row per example.
            y: a label for each.
        """
        for name in ("_known", "model_", "method_", "classes_", "n_features_in_"):
            vars(self).pop(name, None)
        return self.partial_fit(X, y)

    def partial_fit(self, X: Any, y: Any, task: int | None = None, *, classes: Any = None) -> Self:
        """Learn these examples as a task, after all that came before.

        Args:
            X: a row per example.
            y: a label for each.
            task: the number of the task, from 0, in all calls or in none.
            classes: classes that will come, for methods that want all outputs from the start.
        """
        known = copy.deepcopy(vars(self).get("_known"))
        x, own = inputs(X, None if known is None else known.shape), labels(y)
        known = known or Known(tuple(x.shape[1:]))
        if len(x) != len(own):
            raise ValueError(f"X has {len(x)} examples and y has {len(own)} labels: give one for each.")
        if task is not None and (not isinstance(task, Integral) or task < 0):
            raise ValueError(f"task: got {task!r}, allowed: a whole number from 0, or None in all calls.")
        if known.calls and (task is None) == bool(known.tasks):
            raise ValueError(
                "task: give it in every call of partial_fit or in none; tasks with and without numbers do not mix."
            )
        named = merged(vars(self).get("classes_"), own, None if classes is None else labels(classes))
        for label in named.tolist():
            known.outputs.setdefault(label, len(known.outputs))
        pair = x, torch.tensor([known.outputs[label] for label in own.tolist()])
        known.enter(None if task is None else int(task), set(pair[1].tolist()))
        self._learn(pair, known)
        self._known, self.classes_, self.n_features_in_ = known, named, int(np.prod(known.shape))
        return self

    def predict(self, X: Any, task: Any = None) -> Array:
        """The most likely class of each example.

        Args:
            X: a row per example.
            task: the number of its task, for all examples or for each, where it is known.
        """
        self._check()
        answer: Array = self.classes_[self._logits(X, task).argmax(1).numpy()]
        return answer

    def predict_proba(self, X: Any, task: Any = None) -> Array:
        """The probability of every class, in the order of ``classes_``.

        Args:
            X: a row per example.
            task: the number of its task, for all examples or for each, where it is known.
        """
        self._check()
        return self._logits(X, task).double().softmax(1).numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None, *, task: Any = None) -> float:
        """The share of right answers.

        Args:
            X: a row per example.
            y: a label for each.
            sample_weight: how much each example counts; by default all alike.
            task: the number of its task, for all examples or for each, where it is known.
        """
        return float(np.average(self.predict(X, task) == np.asarray(y), weights=sample_weight))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments; with ``deep`` also the method's fields, as ``method__strength``.

        Args:
            deep: whether to look inside the method.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if deep and isinstance(self.method, Method) and not isinstance(self.method, Chain):
            given |= {f"method__{f.name}": getattr(self.method, f.name) for f in fields(self.method)}
        return given

    def set_params(self, **params: Any) -> Self:
        """Change arguments, or fields of the method, for what is learned from scratch.

        Args:
            params: by name; fields are those of a method that is given with them.
        """
        for name, value in sorted(params.items(), key=lambda param: "__" in param[0]):
            if name not in (known := self.get_params()):
                raise ValueError(f"ContinualClassifier has no parameter {name!r}; there are: {', '.join(known)}.")
            own, _, inner = name.partition("__")
            setattr(self, own, replace(getattr(self, own), **{inner: value}) if inner else value)
        return self

    def __sklearn_tags__(self) -> Any:  # only scikit-learn asks, so it is there
        tags = importlib.import_module("sklearn.utils")
        return tags.Tags(
            estimator_type="classifier",
            target_tags=tags.TargetTags(required=True),
            classifier_tags=tags.ClassifierTags(),
            input_tags=tags.InputTags(),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return "_known" in vars(self)

    def _learn(self, pair: tuple[Tensor, Tensor], known: Known) -> None:
        """In place, on a model that is wide enough; a call that fails leaves what was learned before."""
        task = Task(pair, id=known.last, part=known.part, allowed=known.allowed, known_at_test=bool(known.tasks))
        model: nn.Module
        method: Method
        if not self.__sklearn_is_fitted__():
            with seeded(derive(self.seed, "model")):
                stream = Stream([task], "domain", inputs=known.shape, outputs=len(known.outputs))
                model = build(self.model, stream).to(self.device)
            method = copy.deepcopy(self.method) if self.method is not None else Method()
        else:
            both = vars(self)["model_"], vars(self)["method_"]
            model, method = copy.deepcopy(both)  # together: they may hold each other's tensors
        with seeded(derive(self.seed, "partial_fit", known.calls), device_of(model)):
            if outputs_of(model, pair[0], "X") < len(known.outputs):
                grow_output(model, len(known.outputs), self.output)
            train(
                model, method, task, optimizer=self.optimizer, epochs=self.epochs, batch_size=self.batch_size, seed=self.seed,
                progress=False,
            )  # fmt: skip
        self.model_, self.method_ = model, method

    @torch.no_grad()
    def _logits(self, X: Any, task: Any) -> Tensor:
        """Of every class, in the order of ``classes_``; minus infinity where a task does not have it."""
        x, table = inputs(X, self._known.shape), self._known.allowed
        t = None if task is None else self._known.numbers(task, len(x))
        device, rows = device_of(self.model_), []
        for i in torch.arange(len(x)).split(1024):
            of = None if t is None else t[i].to(device)
            rows.append(self.method_.predict(self.model_, x[i].to(device), of).cpu())
        out = torch.cat(rows)
        if t is not None and table is not None:
            out = Categorical().logits(out, table[t])
        return out[:, [self._known.outputs[label] for label in self.classes_.tolist()]]

    def _check(self) -> None:
        if not self.__sklearn_is_fitted__():
            kind = getattr(sys.modules.get("sklearn.exceptions"), "NotFittedError", ValueError)  # which is one
            raise kind("This ContinualClassifier has learned nothing yet: call partial_fit(X, y) first.")
