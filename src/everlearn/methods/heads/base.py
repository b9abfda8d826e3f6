"""Base of heads on frozen features: statistics of the features by class, and an output layer computed from them."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.check import format_bytes
from everlearn.core.data_source import unlisted
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating, grown, refuse_sharded, unwrap
from everlearn.core.task import Task, as_task
from everlearn.methods.heads.statistics import (
    PASS_BATCH_SIZE,
    Statistics,
    add_sums,
    as_float64,
    check_classes,
    features_of,
    grow_statistic,
    iterate_features,
    match_labels,
    sum_statistics,
)
from everlearn.runtime import distributed
from everlearn.surgery.feature_head import FeatureHead, RandomFourier, RandomReLU, feature_head, replace_output
from everlearn.surgery.features import FeatureRecorder, computes_outputs
from everlearn.surgery.freezing import FrozenEntries
from everlearn.surgery.heads import grow_output, output_layer, tied_parameters, update_num_labels
from everlearn.surgery.hooks import recompile

# Logit of a class without examples: finite, so that a loss stays a number, and below all others.
UNSEEN_LOGIT = -1e30

# Trait of all heads.
NEEDS_FEATURES = "learns no features: pretrain the model, or train it on a large first task (adapt_first=True)"


@dataclass(eq=False)
class FrozenHead(Method):
    """Base class of heads on frozen features.

        φ(x): the input of the output layer;   h = φ/‖φ‖, or random features of it
        n_c = Σ 1,   s_c = Σ h   over the examples of class c, in float64;   (W, b) = a function of these sums

    The model is frozen, and no gradient step is taken. ``end_task`` passes over the task once, adds its statistics to
    those of earlier tasks, and writes W and b into the model's output layer, so that ``model(x)`` gives the outputs.
    Sums do not depend on their order: any order of tasks and classes gives the same model, up to rounding, and no
    example is stored. ``forget`` subtracts examples again.

    A subclass defines ``solve``; ``add`` if it needs other statistics than n and s; ``make_random_features`` if h is
    not φ/‖φ‖.

    Args:
        normalize: whether features are scaled to length 1.
        online: collect statistics in ``observe``, batch by batch, for loops without ``end_task``. In the trainer each
            example counts once, in the first epoch; in a loop of your own, each time it is observed. Otherwise
            ``end_task`` collects them.
        adapt_first: train the model on the first task as fine-tuning does, then freeze it; of a task in parts, on the
            first part.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    # Whether the classes that W predicts do not depend on the length of φ, so that a plain layer needs no
    # normalization.
    is_scale_free: ClassVar[bool] = False

    # Whether statistics of two sets of examples can be added; otherwise every process passes over all examples.
    is_additive: ClassVar[bool] = True

    normalize: bool = field(default=True, kw_only=True)
    online: bool = field(default=False, kw_only=True)
    adapt_first: bool = field(default=False, kw_only=True)
    output: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.statistics: Statistics = {}
        self.is_adapting: bool = self.adapt_first
        self.is_stale: bool = False  # whether the output layer lacks statistics that were observed
        self.is_warned: bool = False  # whether the user knows of outputs without examples
        self.settings: dict[str, Any] = {}  # fields that the statistics depend on
        self.feature_checksum: int | None = None
        self.random_checksum: int | None = None
        self._frozen = FrozenEntries(type(self).__name__)
        self._recorder = FeatureRecorder(type(self).__name__)
        self._random_features: RandomReLU | RandomFourier | None = None

    @property
    def trains(self) -> bool:  # type: ignore[override]
        """Whether the model is trained: only on the first task, and only with ``adapt_first``."""
        return self.is_adapting

    def changes(self, hook: str) -> bool:
        """Whether the method uses a hook; ``observe`` and ``predict`` only if it learns online."""
        if hook in ("observe", "predict") and getattr(type(self), hook) is getattr(FrozenHead, hook):
            return self.online
        return super().changes(hook)

    def conflict_with(self, other: Method) -> str:
        """Refuse methods that would train the model, or compute its output layer too."""
        if not other.trains and not isinstance(other, FrozenHead):
            return ""
        name = type(self).__name__
        conflict = f"{name} freezes the model and computes its output layer. Use it alone"
        if self.adapt_first:
            return f"{conflict}."
        return f"{conflict}, or as {name}(adapt_first=True) to train the model on the first task."

    # What a subclass defines.

    def make_random_features(self, num_features: int) -> RandomReLU | RandomFourier | None:
        """Create the fixed random features h of φ; by default there are none."""
        return None

    def add(self, h: Tensor, y: Tensor, sign: float) -> None:
        """Add examples to the statistics, or subtract them (``sign`` -1).

        Args:
            h: representations, in float64.
            y: their classes.
            sign: 1 or -1.
        """
        add_sums(self.statistics, type(self).__name__, h, y, sign)

    def statistics_settings(self) -> dict[str, Any]:
        """Return the fields that the statistics depend on, which must not change with a stored state."""
        return {"method": type(self).__name__, "normalize": self.normalize}

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return W (classes × representation) and b of the output layer, from the statistics."""
        raise NotImplementedError(f"{type(self).__name__} must define solve().")

    def use_output(self, name: str | None) -> None:
        """Use the output layer of this name, unless the field ``output`` names it already.

        Args:
            name: name of the layer; None changes nothing.
        """
        if name is None:
            return
        if self.output not in (None, name):
            raise ValueError(
                f"{type(self).__name__}.output is {self.output!r}, and the output layer is to be {name!r}: name one."
            )
        self.output = name

    # Hooks.

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze the model, unless its first task trains it."""
        self._check_likelihood(task)
        refuse_sharded(model, type(self).__name__)
        if self.is_adapting:
            return
        self._freeze(model)

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Collect the statistics of a batch, if the method learns online."""
        if not self.online or self.is_adapting or batch.epoch:
            return
        features = self._recorder.take()
        rows = distributed.all_gather_object((features, batch.labels()))
        for process_features, process_labels in rows:
            self._add_features(process_features.to(features.device), process_labels.to(features.device), 1.0)
        self.is_stale = True

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Add the statistics of the task, and write the output layer."""
        self._check_likelihood(task)
        has_observed = self.online and not self.is_adapting
        is_first = not self.statistics
        self._freeze(model)
        with self._restored_on_error():
            if not has_observed:
                self._collect(model, as_task(task), 1.0)
                self._warn_of_lost_classes(model, task)
            elif not self.statistics:
                raise ValueError(
                    f"{type(self).__name__}(online=True) has observed no examples: give epochs=1, call "
                    "observe(batch, outputs) after each forward pass, or leave online out."
                )
            self.write_head(model)
            if is_first:
                self._check_output_layer(model, as_task(task))
        self.is_adapting = False

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """Return the outputs of the model, after writing what was observed into its output layer."""
        if self.is_stale:
            self.write_head(model)
        return super().predict(model, x, task)

    def forget(self, model: nn.Module, data: Any) -> None:
        """Subtract examples that were learned, so that the head equals one that never saw them, up to rounding.

        Give exactly the examples that were learned, with their labels: none are stored, so that only their numbers by
        class can be checked. Features are not unlearned: a model that was trained on the examples, by ``adapt_first``
        or before, keeps what it has learned of them.

        Args:
            model: the model.
            data: the examples with their labels: a Task or any data that a Task accepts.
        """
        task = as_task(data)
        self._check_likelihood(task)
        self._check_learned(task)
        self._freeze(model)
        with self._restored_on_error():
            self._collect(model, task, -1.0)
            try:
                self.write_head(model)
            except ValueError as error:
                raise ValueError(
                    "Without these examples the statistics are not those of any examples: some were never learned, "
                    f"had other labels, or are forgotten already. Nothing has changed. ({error})"
                ) from error

    def detach(self, model: nn.Module) -> None:
        """Unfreeze the model; its output layer stays."""
        self._frozen.detach(model)
        _, head = feature_head(model, self.output)
        head.requires_grad_(True)
        self._recorder.remove(unwrap(model))

    # The output layer.

    @torch.no_grad()
    def write_head(self, model: nn.Module) -> None:
        """Compute the output layer from the statistics, and write it into the model."""
        if not self.statistics:
            return
        weight, bias = self.solve()
        layer = self._output_layer(model, weight)

        # Classes without examples are never predicted.
        unseen_logit = max(UNSEEN_LOGIT, torch.finfo(layer.bias.dtype).min)
        is_unseen = self.statistics["counts"] < 0.5
        weight[is_unseen] = 0.0
        bias[is_unseen] = unseen_logit

        num_classes = len(weight)
        layer.weight.zero_()
        layer.weight[:num_classes] = weight.to(layer.weight)
        layer.bias.fill_(unseen_logit)
        layer.bias[:num_classes] = bias.to(layer.bias)
        self.is_stale = False

    def _output_layer(self, model: nn.Module, weight: Tensor) -> nn.Linear:
        """Return the linear layer that W is written into, with enough outputs, and a bias."""
        name, head = feature_head(model, self.output)
        if not name:
            raise ValueError(
                "The model is the output layer itself and cannot be replaced: put it into nn.Sequential(layer)."
            )
        output = head.output if isinstance(head, FeatureHead) else head
        random_features = self._get_random_features(head.in_features, weight.device)
        needs_normalize = self.normalize and not self.is_scale_free

        # In half precision, only directions of class means are exact enough.
        dtype = torch.promote_types(output.weight.dtype, torch.float32)
        is_half = dtype != output.weight.dtype and not isinstance(head, FeatureHead)
        needs_head = needs_normalize or random_features is not None or (is_half and not self.is_scale_free)
        if not needs_head:
            dtype = output.weight.dtype
        num_outputs = max(output.out_features, len(weight))

        if isinstance(head, FeatureHead):
            is_fitting = needs_head and head.computes(needs_normalize, random_features)
        else:
            is_fitting = not needs_head
        if not is_fitting or output.bias is None:
            output = nn.Linear(weight.shape[1], num_outputs, dtype=dtype).requires_grad_(False)
            new_head: nn.Module = output
            if needs_head:
                new_head = FeatureHead(output, needs_normalize, copy.deepcopy(random_features)).to(dtype)
            replace_output(model, name, new_head)
            update_num_labels(model, num_outputs)
            if self.online:
                self._recorder.register(unwrap(model), name)
        elif num_outputs > output.out_features:
            output_name = f"{name}.output" if needs_head else name
            grow_output(model, num_outputs, output_name)
            _, output = output_layer(model, output_name)
        return output

    # The statistics.

    def _freeze(self, model: nn.Module) -> None:
        """Freeze the model, and raise if its features have changed since the first statistics."""
        name, head = feature_head(model, self.output)
        tied_names = tied_parameters(model, name)
        if tied_names:
            raise ValueError(
                f"The output layer {name!r} shares its weight with {tied_names[0]}: writing it would change the "
                f"features. Give it a separate weight, model.{name}.weight = "
                f"nn.Parameter(model.{name}.weight.detach().clone()), or name another layer, output=…."
            )
        self._frozen.release(model)
        self._frozen.freeze_features(model, f"{name}.output" if isinstance(head, FeatureHead) else name)
        head.requires_grad_(False)
        checksum = _feature_checksum(unwrap(model), name)
        if self.feature_checksum not in (None, checksum):
            raise ValueError(
                f"The features of this {type(unwrap(model)).__name__} have changed since {type(self).__name__} "
                "collected its first statistics, so that old and new ones do not fit together: do not train or replace "
                f"the layers below {name!r}, or begin with a new {type(self).__name__}()."
            )
        self.feature_checksum = checksum
        if self.online:
            self._recorder.register(unwrap(model), name)
            recompile(model)

    @contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Restore the statistics if the code inside fails, so that a second attempt does not count examples twice."""
        previous = self.statistics
        try:
            yield
        except BaseException:
            self.statistics = previous
            raise

    @torch.no_grad()
    def _collect(self, model: nn.Module, task: Task, sign: float) -> None:
        """Pass over a task once, and replace the statistics by new ones."""
        name, _ = feature_head(model, self.output)
        previous = self.statistics
        is_shared = self.is_additive and distributed.world_size() > 1

        # With several processes, each sums up its share of the examples.
        self.statistics = {}
        if not is_shared:
            self.statistics = {key: value.clone() for key, value in previous.items()}
        if not previous:
            self._check_output_layer(model, task)
        for features, labels in iterate_features(model, name, task, is_shared):
            self._add_features(features, labels, sign)
        if is_shared:
            self.statistics = sum_statistics(self.statistics, previous)
        if _count_examples(self.statistics) == _count_examples(previous):
            raise ValueError(f"{task} has no labeled examples for {type(self).__name__}.")

    def _check_output_layer(self, model: nn.Module, task: Task) -> None:
        """Raise if the output layer, found or named, does not compute the outputs of the model."""
        name, _ = feature_head(model, self.output)
        _, layer = output_layer(model, self.output)
        first_batch = next(task.examples(1), None)
        if first_batch is None:
            return
        x = unlisted(first_batch.to(layer.weight.device).x)
        num_outputs = Method.predict(self, model, x).shape[-1]
        if num_outputs != layer.out_features:
            raise ValueError(
                f"The layer {name!r} has {layer.out_features} outputs, and {type(unwrap(model)).__name__} gives "
                f"{num_outputs}: it is not the output layer. Name the one that is, output=…."
            )
        # A layer that was named may be followed by a softmax.
        with evaluating(model):
            if self.output is None and not computes_outputs(model, name, x):
                raise ValueError(
                    f"The last linear layer, {name!r}, does not compute the outputs of "
                    f"{type(unwrap(model)).__name__}: name the output layer, output=…."
                )

    def _warn_of_lost_classes(self, model: nn.Module, task: Any) -> None:
        """Warn if the first data of a loop lack classes that the model could predict before."""
        # Tasks of a stream have ids, and bring their classes one after the other.
        if self.is_warned or getattr(task, "id", None) is not None:
            return
        self.is_warned = True
        _, layer = output_layer(model, self.output)
        counts = grown(self.statistics["counts"], [max(layer.out_features, len(self.statistics["counts"]))])
        missing = (counts[: layer.out_features] < 0.5).nonzero().flatten().tolist()
        if missing:
            warnings.warn(
                f"{type(self).__name__} has no examples of {len(missing)} of the model's {layer.out_features} outputs "
                f"({', '.join(map(str, missing[:5]))}{', …' * (len(missing) > 5)}), and will not predict them. If they "
                "are old classes, give some of their examples too, once; ignore this if they are classes to come.",
                UserWarning,
                stacklevel=3,
            )

    def compute_features(self, model: nn.Module, x: Any) -> Tensor:
        """Return the features φ of some inputs, in evaluation mode."""
        name, _ = feature_head(model, self.output)
        return features_of(model, name, x)

    def _add_features(self, features: Tensor, y: Tensor, sign: float) -> None:
        """Add the features of labeled examples or tokens to the statistics."""
        features, labels = match_labels(features, y, type(self).__name__)
        if len(labels):
            self.settings = self.statistics_settings()
            self.add(self.represent(features), labels, sign)

    def represent(self, features: Tensor) -> Tensor:
        """Return h, the representation whose statistics are kept, in float64.

        Args:
            features: inputs of the output layer, a row per example.
        """
        h = as_float64(features)
        if self.normalize:
            h = F.normalize(h, dim=-1)
        random_features = self._get_random_features(h.shape[1], h.device)
        if random_features is None:
            return h
        represented: Tensor = random_features(h)
        return represented

    def _get_random_features(self, num_features: int, device: torch.device) -> RandomReLU | RandomFourier | None:
        """Return the random features in float64, drawn once; raise if they are not those of the statistics."""
        if self._random_features is None:
            random_features = self.make_random_features(num_features)
            if random_features is None:
                return None
            checksum = _checksum(random_features.state_dict().values())
            if self.random_checksum not in (None, checksum):
                raise ValueError(
                    f"The random features of {self!r} are not those of its statistics: create it with the fields "
                    "(seed, dimension, …) that it was saved with."
                )
            self.random_checksum = checksum
            self._random_features = random_features.double().to(device)
        return self._random_features

    def _statistic(self, key: str, like: Tensor, *shape: int) -> Tensor:
        """Return a sum, created with zeros or grown to this shape."""
        return grow_statistic(self.statistics, type(self).__name__, key, like, *shape)

    def _check_learned(self, task: Task) -> None:
        """Raise unless as many examples of every class were learned as are to be forgotten."""
        counts = self.statistics.get("counts", torch.zeros(0))
        forgotten = torch.zeros(len(counts), dtype=torch.float64)
        for batch in task.examples(PASS_BATCH_SIZE):
            labels = batch.labels().flatten().cpu()
            batch_counts = labels[labels >= 0].bincount(minlength=len(counts)).double()
            forgotten = grown(forgotten, batch_counts.shape) + batch_counts

        learned = grown(counts.cpu(), forgotten.shape)
        excess = (forgotten > learned + 0.5).nonzero().flatten().tolist()
        if excess:
            c = excess[0]
            raise ValueError(
                f"{int(forgotten[c])} examples of class {c} are to be forgotten, but {int(learned[c])} were learned: "
                "give only examples that were learned, each once."
            )
        if forgotten.sum() > counts.sum() - 0.5:
            raise ValueError(
                f"All {int(counts.sum())} examples that were learned are to be forgotten, so that none would be left: "
                f"begin with a new {type(self).__name__}() instead."
            )

    def _check_likelihood(self, task: Any) -> None:
        """Raise unless the labels are classes."""
        check_classes(task, type(self).__name__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a head with the same settings."""
        stored_settings = state.get("settings") or self.statistics_settings()
        stored_method = stored_settings.get("method")
        if stored_method != type(self).__name__:
            raise ValueError(f"This state is of {stored_method}, got {self!r}: load it into the method that saved it.")
        for name, value in self.statistics_settings().items():
            if name in stored_settings and stored_settings[name] != value:
                raise ValueError(
                    f"The statistics are those of {type(self).__name__}({name}={stored_settings[name]!r}), and do not "
                    f"fit {name}={value!r}: create it with the fields that it was saved with."
                )
        super().load_state_dict(state)
        self._random_features = None

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Return the features, the classes and the size of the statistics."""
        name, _ = feature_head(model, self.output)
        facts = {"features": f"the inputs of {name!r}; all layers are frozen"}
        if self.statistics:
            num_classes = int((self.statistics["counts"] > 0.5).sum())
            num_bytes = sum(value.numel() * value.element_size() for value in self.statistics.values())
            facts["statistics"] = f"of {num_classes} classes, {format_bytes(num_bytes)}"
        return facts


def _count_examples(statistics: Statistics) -> float:
    """Return the number of examples in some statistics."""
    return float(statistics["counts"].sum()) if statistics else 0.0


def _feature_checksum(model: nn.Module, name: str) -> int:
    """Compute a checksum of all weights and buffers outside the output layer."""
    state = model.state_dict()
    return _checksum(value for key, value in state.items() if not key.startswith(f"{name}."))


def _checksum(tensors: Any) -> int:
    checksum = 0
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        checksum = zlib.crc32(content.data, checksum)
    return checksum
