"""What a continual-learning method is: eleven optional verbs, spoken at fixed places of a training loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn.attachment import Attachment
from everlearn.batch import Batch
from everlearn.data import unlisted
from everlearn.fields import check_field
from everlearn.forward import ask, check_next_tokens
from everlearn.likelihood import Likelihood
from everlearn.params import evaluating
from everlearn.running_statistics import warn_if_statistics_move
from everlearn.stream import SCENARIOS
from everlearn.traits import Traits


@dataclass(eq=False)
class Method:
    """Plain fine-tuning: learn each task as if nothing had been learned before. The base of every method.

        L = L_task

    The lower bound of every comparison, and of every method the verbs it does not change. The loop that speaks them,
    yours or the trainer's::

        for task in stream:
            method.begin_task(model, task)
            optimizer = SGD([*model.parameters(), *method.parameters()], lr=0.1)
            for batch in task.batches(64):
                loss = method.loss(model, batch)
                optimizer.zero_grad(); loss.backward()
                method.before_step(model)          # where clip_grad_norm_ would stand
                optimizer.step()
                method.after_step(model)
            method.end_task(model, task)

    Hyper-parameters are the dataclass fields, stored unchanged, so ``repr(method)`` is its configuration. State is what
    is not a field: tensors, numbers and dicts of them, set in ``__post_init__``; a leading underscore marks what is
    passing and not saved. A method never sees the trainer, the optimizer or the scenario.

    A method whose knowledge is not in the model's weights alone (hooks on the model, a sub-network per task, added units,
    a ``predict`` of its own) states ``deployable = False``: ``update``, which deploys weights, refuses it.
    """

    traits: ClassVar[Traits] = Traits(
        family="reference",
        pro="costs nothing",
        con="does nothing against forgetting: the lower bound of every comparison",
        step=1.0,
        needs_labels=False,
        without_boundaries={},
        weak=dict.fromkeys(SCENARIOS, "does nothing against forgetting: the lower bound of every comparison"),
    )

    deployable: ClassVar[bool] = True  # whether a plain model with the same weights answers as ``predict`` does

    _owes = False  # a penalty's gradient, since a loss that was taken without it
    _checked_outputs = False
    _checked_statistics = False
    _attached = cast("Attachment | None", None)  # what speaks the verbs in a loop that does not

    def __post_init__(self) -> None:
        for f, hint in _hints(self):
            check_field(f"{type(self).__name__}.{f}", getattr(self, f), hint)

    # The verbs. In brackets: how a chain of methods composes them.

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Grow, wrap or snapshot the model before the optimizer is made. [in order]"""

    def resume(self, model: nn.Module, task: Any) -> None:
        """Go on in the middle of a task: it has begun, and then model and state became what they were when they were saved. [in order]"""

    def join(self, batch: Batch) -> Batch:
        """What goes through the model for the task loss: the batch, then whatever is replayed. [at most one may replace it]"""
        return batch

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """The loss of what ``join`` gave. [at most one method may replace it]"""
        return batch.loss(out)

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """What is added to the task loss. [summed]"""
        return 0.0

    def penalty_gradient(self, model: nn.Module) -> None:
        """Add to ``p.grad`` the gradient of ``penalty(model)``, where it is of the parameters alone and known by heart. [in order]

        It costs half of what a penalty in the loss does, and ``pull`` calls for it in its stead; a class that changes
        ``penalty`` alone is not taken at this word.
        """

    def observe(self, batch: Batch, out: Tensor) -> None:
        """Remember what just passed, outputs detached; once per micro-batch. [all]"""

    def before_step(self, model: nn.Module) -> None:
        """Edit the gradients in ``p.grad``. [in order]"""

    def after_step(self, model: nn.Module) -> None:
        """Repair parameters or gather statistics after the optimizer moved. [in order]"""

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Consolidate what the task taught; ``task`` may be any data a task can be made of. [in order]"""

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """Outputs at test time, in evaluation mode; ``task`` holds each example's where known. [at most one may replace it]"""
        with evaluating(model):
            return ask(model, unlisted(x))

    # Given.

    def loss(self, model: nn.Module, batch: Batch, *, pulled: bool = False) -> Tensor:
        """Task loss plus penalty: the one call a training step needs.

        Args:
            model: in training mode.
            batch: of the task.
            pulled: leave out penalties whose gradient ``pull(model)`` adds after ``backward()``.
        """
        if not isinstance(batch, Batch):
            raise TypeError(f"A loss is of a Batch, got a {type(batch).__name__}: {_as_batch(batch)}.")
        if not self._checked_outputs:  # of the first batch alone: it waits for the device
            check_next_tokens(model, batch.x, batch.y)
        whole = self.join(batch)
        out = ask(model, whole.x)
        if not self._checked_outputs:
            self._checked_outputs = True
            batch.likelihood.check_outputs(out)
        self._after_forward(model)
        loss = self.task_loss(whole, out)
        out = out if whole is batch else out[: len(batch)]
        penalty = (self.unpulled if pulled else self.penalty)(model, batch, out)
        self.observe(batch, out.detach())
        self._noted(loss if self.changes("join") or self.changes("task_loss") else penalty)
        return loss if isinstance(penalty, float) and penalty == 0.0 else loss + penalty

    def _noted(self, loss: Tensor | float) -> Tensor | float:
        """A penalty or loss as it is; an attachment, which adds it too, hears of it."""
        if self._attached is not None:
            self._attached.note_loss(loss)
        return loss

    def unpulled(self, model: nn.Module, batch: Batch | None, out: Tensor | None) -> Tensor | float:
        """The penalty but for what ``pull`` adds."""
        self._owes = self._pulls and self.changes("penalty")
        return 0.0 if self._owes else self.penalty(model, batch, out)

    def pull(self, model: nn.Module) -> None:
        """Add to ``p.grad`` the gradient of what ``loss(model, batch, pulled=True)`` has left out, once per step."""
        if self._owes:
            self._owes = False
            self.penalty_gradient(model)

    def attach(self, model: nn.Module, optimizer: Optimizer, likelihood: Likelihood | None = None) -> Attachment:
        """Speak the verbs of every step by the optimizer's hooks, in any loop; see ``Attachment``.

        ``begin_task`` and ``end_task`` stay yours to call, and replay is told the labels by ``attachment.see(x, y)``.
        """
        return Attachment(self, model, optimizer, likelihood)

    def changes(self, verb: str) -> bool:
        """Whether it has a verb of its own."""
        return getattr(type(self), verb) is not getattr(Method, verb)

    @property
    def of_parameters(self) -> bool:
        """Whether its loss, beyond the task's, is of the parameters alone."""
        return not any(map(self.changes, ("join", "task_loss", "observe"))) and self._pulls

    @property
    def _pulls(self) -> bool:
        """Whether the gradient of its penalty is known by heart."""
        known = _nearest(self, "penalty_gradient") <= _nearest(self, "penalty")
        return known or not self.changes("penalty")

    def _after_forward(self, model: nn.Module) -> None:
        """Look at the model after the forward pass of a loss, where there is something to notice."""

    def _check_statistics(self, model: nn.Module) -> None:
        """Warn once, after a forward pass of a later task, of running statistics that the method does not protect."""
        if not self._checked_statistics:
            self._checked_statistics = warn_if_statistics_move(model, type(self).__name__)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Trainable tensors of the method itself; most have none."""
        return ()

    def extra_parameters(self, model: nn.Module) -> int:
        """How many parameters prediction needs beyond those of the model; by default all of ``parameters()``.

        Added units, columns, extractors and what each task has for itself count; what serves training alone, such as a
        memory, a teacher or a generator, does not: it is state.
        """
        return sum(p.numel() for p in self.parameters())

    def facts(self) -> dict[str, float]:
        """Numbers about itself that a result keeps after every task, such as the share of its capacity in use."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, made of tensors, numbers and dicts: ``torch.load(weights_only=True)`` reads it back."""
        hyper = {f.name for f in fields(self)}
        state = {k: v for k, v in vars(self).items() if k not in hyper and not k.startswith("_")}
        return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a method of the same kind had learned."""
        if wrong := set(state) ^ set(self.state_dict()):
            raise ValueError(
                f"This state does not fit {type(self).__name__}: one of them has {', '.join(sorted(wrong))}, the other has not. Load it "
                "into the kind of method that saved it, in the version of Everlearn that saved it."
            )
        for name, value in state.items():
            if hasattr(own := getattr(self, name), "load_state_dict"):
                own.load_state_dict(copy.deepcopy(value))  # or two methods would share what they learn
            else:
                setattr(self, name, copy.deepcopy(value))

    def detach(self, model: nn.Module) -> None:
        """Take off whatever the method has put on the model (hooks, frozen flags) and leave a plain module."""

    def __add__(self, other: Method) -> Chain:
        return Chain(self, other)


class Chain(Method):
    """Several methods as one: penalties add, edits run in the order written, state nests.

    >>> from everlearn import Freeze, LwF
    >>> LwF(strength=0.5) + Freeze()
    LwF(strength=0.5, temperature=2.0, refuse_new=False, warmup=0, output=None) + Freeze(what='features', output=None)
    """

    def __init__(self, *methods: Method) -> None:
        for m in methods:
            if not isinstance(m, Method):
                raise TypeError(f"A chain is made of methods, got a {type(m).__name__}.")
        if not methods:
            raise ValueError("A chain needs at least one method.")
        self.methods: list[Method] = [
            m for method in methods for m in (method.methods if isinstance(method, Chain) else [method])
        ]
        self._owner = {verb: self._only(verb) for verb in ("join", "task_loss", "predict")}

    def _only(self, verb: str) -> Method:
        owners = [m for m in self.methods if m.changes(verb)]
        if len(owners) > 1:
            names = " and ".join(type(m).__name__ for m in owners)
            raise ValueError(f"{names} both define {verb}(); a chain can hold only one method that does.")
        return owners[0] if owners else self.methods[0]

    def changes(self, verb: str) -> bool:
        """Whether any of them does."""
        return any(m.changes(verb) for m in self.methods)

    @property
    def deployable(self) -> bool:  # type: ignore[override]
        """Whether all of them are."""
        return all(m.deployable for m in self.methods)

    @property
    def of_parameters(self) -> bool:
        """Whether all of them are."""
        return all(m.of_parameters for m in self.methods)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.methods))

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Each in order."""
        for m in self.methods:
            m.begin_task(model, task)

    def resume(self, model: nn.Module, task: Any) -> None:
        """Each in order."""
        for m in self.methods:
            m.resume(model, task)

    def join(self, batch: Batch) -> Batch:
        """That of the one method that replaces it."""
        return self._owner["join"].join(batch)

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """That of the one method that replaces it."""
        return self._owner["task_loss"].task_loss(batch, out)

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """The sum."""
        return _sum(m.penalty(model, batch, out) for m in self.methods)

    def unpulled(self, model: nn.Module, batch: Batch | None, out: Tensor | None) -> Tensor | float:
        """The sum."""
        return _sum(m.unpulled(model, batch, out) for m in self.methods)

    def penalty_gradient(self, model: nn.Module) -> None:
        """Each in order."""
        for m in self.methods:
            m.penalty_gradient(model)

    def pull(self, model: nn.Module) -> None:
        """Each in order."""
        for m in self.methods:
            m.pull(model)

    def observe(self, batch: Batch, out: Tensor) -> None:
        """All see it."""
        for m in self.methods:
            m.observe(batch, out)

    def before_step(self, model: nn.Module) -> None:
        """Each in order."""
        for m in self.methods:
            m.before_step(model)

    def after_step(self, model: nn.Module) -> None:
        """Each in order."""
        for m in self.methods:
            m.after_step(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Each in order."""
        for m in self.methods:
            m.end_task(model, task)

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """That of the one method that replaces it."""
        return self._owner["predict"].predict(model, x, task)

    def _after_forward(self, model: nn.Module) -> None:
        """Each in order."""
        for m in self.methods:
            m._after_forward(model)

    def detach(self, model: nn.Module) -> None:
        """Each, the last first."""
        for m in reversed(self.methods):
            m.detach(model)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those of all."""
        return [p for m in self.methods for p in m.parameters()]

    def extra_parameters(self, model: nn.Module) -> int:
        """Those of all."""
        return sum(m.extra_parameters(model) for m in self.methods)

    def facts(self) -> dict[str, float]:
        """Those of all; of two with one name the later."""
        return {name: value for m in self.methods for name, value in m.facts().items()}

    def state_dict(self) -> dict[str, Any]:
        """Each method's state under its place in the chain."""
        return {str(i): m.state_dict() for i, m in enumerate(self.methods)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a chain of the same methods."""
        if not all(name.isdigit() for name in state):
            raise ValueError("This state is of a single method, not of a chain.")
        if len(state) != len(self.methods):
            raise ValueError(f"This state is of a chain of {len(state)} methods, this chain has {len(self.methods)}.")
        for i, m in enumerate(self.methods):
            m.load_state_dict(state[str(i)])


def _as_batch(given: Any) -> str:
    """How to make a Batch of what was given as one."""
    if not isinstance(given, Mapping):
        return "write Batch(x, y)"
    return 'write Batch({k: v for k, v in batch.items() if k != "labels"}, batch["labels"]), the inputs by name and the labels apart'


def _nearest(method: Method, verb: str) -> int:
    """How far up its ancestors a method has a verb from."""
    return next(i for i, kind in enumerate(type(method).__mro__) if verb in vars(kind))


def _sum(penalties: Iterable[Tensor | float]) -> Tensor | float:
    """Zeros that are no tensors cost nothing."""
    total: Tensor | float = 0.0
    for penalty in penalties:
        total = total + penalty
    return total


def parts(method: Method) -> list[Method]:
    """The methods of a chain, or the one that there is."""
    return method.methods if isinstance(method, Chain) else [method]


def count_parameters(model: nn.Module, method: Method) -> int:
    """Parameters that prediction needs: the model's, and whatever the method has added beside it.

    >>> from everlearn import L2
    >>> count_parameters(nn.Linear(3, 2), L2())
    8
    """
    return sum(p.numel() for p in model.parameters()) + method.extra_parameters(model)


def label(method: Method) -> str:
    """A short name for tables: the kind of method and the fields that are not at their default.

    >>> from everlearn import L2
    >>> label(Method()), label(L2()), label(L2(strength=3.0) + Method())
    ('finetune', 'L2', 'L2(strength=3.0) + finetune')
    """
    if isinstance(method, Chain):
        return " + ".join(map(label, method.methods))
    changed = [f"{f.name}={v!r}" for f in fields(method) if (v := getattr(method, f.name)) != f.default]
    name = "finetune" if type(method) is Method else type(method).__name__
    return f"{name}({', '.join(changed)})" if changed else name


def _hints(method: Method) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(type(method), include_extras=True)
    return ((f.name, hints[f.name]) for f in fields(method))
