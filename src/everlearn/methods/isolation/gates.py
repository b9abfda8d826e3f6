"""Gates on the units of a network: find the units, register the gates as hooks, and check that the gates learn."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.data_source import Batches
from everlearn.core.forward import arguments
from everlearn.core.parameters import Params, unwrap
from everlearn.core.task import Task
from everlearn.methods.isolation.base import Isolation, shorten_names
from everlearn.runtime import distributed
from everlearn.surgery.hooks import Hook, is_compiled, make_hook, recompile, remove_hooks
from everlearn.surgery.tracing import (
    NOT_CALLED,
    Link,
    find_structure,
    keeps_units_separate,
    links,
    read_example,
    repeat_per_input,
)


class GatedUnits(Isolation):
    """Isolation by gates on units.

    A link, from a layer that produces units to the only layer that reads them, gets a gate before its consumer. Links
    are found by running the model on examples of the first task. Links named by the user are tested on the same
    examples, or on the first batch in training.
    """

    groups: dict[str, Any] | None  # a field of the method: links named by the user

    def __post_init__(self) -> None:
        super().__post_init__()
        self.embedding: Params = {}  # e of the last task, by the name of the layer whose units are gated
        self.masks: list[Params] = []  # gates of the tasks that have ended
        self.batch = 0  # b, counted from 0
        self.batches: int | None = None  # B
        self.link_fields: list[dict[str, Any]] = []  # links of the first task, which later tasks use, too
        self.unlinked: list[tuple[str, str]] = []  # layers whose units have no gates, each with the reason
        self._links: list[Link] = []
        self._links_untested = False
        self._gates_moved: bool = False  # whether an optimizer step has moved the gates in this task
        self._probes: list[tuple[Tensor, Tensor]] | None = None  # a gate and a weight, with copies before the step
        self._first_step_examples = 0
        self._task_examples: int | None = None

    def gate(self, producer: str, training: bool) -> Tensor | None:
        """Return the gates of a layer's units for the active task; None before the first task."""
        raise NotImplementedError

    def _lock(self, model: nn.Module) -> None:
        """Lock the weights of earlier tasks."""
        raise NotImplementedError

    def parameters(self) -> list[nn.Parameter]:
        """Return the embeddings e of the current task."""
        return [e for e in self.embedding.values() if isinstance(e, nn.Parameter)]

    def extra_parameters(self, model: nn.Module) -> int:
        """Count the gates of all tasks and the parameters that each task has for itself."""
        count = super().extra_parameters(model)
        for gates_by_layer in self.masks[: max(0, len(self.tasks) - 1)]:
            count += sum(gates.numel() for gates in gates_by_layer.values())
        return count

    def capacity(self) -> dict[str, float]:
        """Return the share of units in use in each gated layer."""
        return {name: float((u > 0.5).float().mean()) for name, u in cumulative_gates(self.masks).items()}

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Return which units have gates, and why others have none."""
        producers = [fields["producer"] for fields in self.link_fields]
        return self.describe_units("gates", producers, self.unlinked)

    def diagnostics(self) -> dict[str, float]:
        """Return the share of gated units in use in the network."""
        if not self.masks:
            return {}
        is_used = [u > 0.5 for u in cumulative_gates(self.masks).values()]
        return {"capacity used": float(torch.cat(is_used).float().mean())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a method of the same class; the next ``begin_task`` or ``predict`` registers the gates."""
        super().load_state_dict(state)
        self._links = [Link(**fields) for fields in self.link_fields]
        self._links_untested = False

    def detach(self, model: nn.Module) -> None:
        """Remove the gates and unlock everything; the model then uses the units of all tasks."""
        self._locks.detach(model)
        remove_hooks(unwrap(model), type(self).__name__)

    # Batches of an epoch.

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Count the examples of the first step, from which the number of batches in an epoch follows."""
        if self.batches is None:
            self._first_step_examples += len(batch)

    def _reset_batch_count(self, planned_batches: int | None) -> None:
        """Start at the first batch; the number of batches is as planned, or None if it follows from the data."""
        self.batch = 0
        self.batches = planned_batches
        self._first_step_examples = 0

    def _read_epoch_length(self, data: Task) -> None:
        """Read B from the data, or else the number of examples, from which ``_advance_batch`` computes B."""
        if self.batches is not None:
            return
        # The size of arrays and datasets is known, but not yet the batch size of the loop.
        if data.train is not None and not isinstance(data.train, Batches):
            self._task_examples = len(data.train)
            return

        if data.train is not None:
            self.batches = data.steps_per_epoch(1)
        self.batches = self.batches or data.steps
        if self.batches is None:
            raise ValueError("HAT must know how many batches an epoch has, and these data do not tell: set task.steps.")

    def _advance_batch(self, restart: bool) -> None:
        """Go to the next batch, and with ``restart`` back to the first at the end of an epoch."""
        self.batch += 1
        if self.batches is None and self._task_examples is not None:
            # A step may consist of several micro-batches, on several processes.
            step_examples = max(1, int(distributed.sum_across(self._first_step_examples)))
            self.batches = -(-self._task_examples // step_examples)
        if restart and self.batches is not None and self.batch >= self.batches:
            self.batch = 0

    # Links and gates.

    def _attach_gates(self, model: nn.Module, task: Any = None) -> None:
        """Register each gate before the layer that reads its units."""
        inner = unwrap(model)
        owner = type(self).__name__
        if not self._links:
            remove_hooks(inner, owner, Gate)
            self._use_links(inner, self._find_links(inner, task))

        if self._links_untested:
            remove_hooks(inner, owner, LinkTest)
            test = make_hook(owner, LinkTest(self, is_compiled(model)))
            inner.register_forward_pre_hook(test, with_kwargs=True)

        consumers = [inner.get_submodule(link.consumer) for link in self._links]
        if all(self._has_gate(consumer) for consumer in consumers):
            return

        # A copied model has the gates of the method that it was copied from.
        remove_hooks(inner, owner, Gate)
        for link, consumer in zip(self._links, consumers, strict=True):
            consumer.register_forward_pre_hook(make_hook(owner, Gate(self, link)))

        # A layer in a branch that no traced example takes would read units without their gates.
        remove_hooks(inner, owner, UntracedLayer)
        for name, reason in self.unlinked:
            if reason == NOT_CALLED:
                inner.get_submodule(name).register_forward_pre_hook(make_hook(owner, UntracedLayer(name)))
        recompile(model)

    def _has_gate(self, layer: nn.Module) -> bool:
        gates = [hook.func for hook in layer._forward_pre_hooks.values() if isinstance(hook, Hook)]
        return any(isinstance(gate, Gate) and gate.method is self for gate in gates)

    def _find_links(self, inner: nn.Module, task: Any) -> list[Link]:
        """Find links by running the model on examples, or test those that the user named."""
        x = read_example(inner, task)
        if self.groups is None:
            if x is None:
                raise ValueError(
                    "HAT finds the units to gate by running the model on examples, and this task has none: give it "
                    "training or validation data (an iterator only inside a Task), or name the layers, "
                    'groups={"conv1": "conv2"}.'
                )
            structure = find_structure(inner, x)
            self.unlinked = structure.unlinked
            return structure.links

        named_links = links(inner, groups=self.groups)
        if x is not None:
            outcome = _test_links(inner, named_links, *arguments(inner, x))
            if not isinstance(outcome, Exception):
                return self._select_valid(named_links, outcome)

        # Without examples that the model accepts, the first batch in training is the test.
        self._links_untested = True
        return named_links

    def _use_links(self, inner: nn.Module, valid_links: list[Link]) -> None:
        """Gate these links; raise if there are none."""
        if not valid_links:
            reasons = "".join(f" {name!r}: {reason}." for name, reason in self.unlinked[:3])
            raise ValueError(
                f"HAT finds no units to gate in {type(inner).__name__}: it needs two linear or convolution layers with "
                f'nothing between them that mixes units; name them, groups={{"conv1": "conv2"}}.{reasons}'
            )
        self._links = valid_links
        self.link_fields = [asdict(link) for link in valid_links]

    def test_links(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Test the links on the inputs of a forward pass, and remove the gates of units that are mixed."""
        self._links_untested = False
        for kind in (Gate, UntracedLayer, LinkTest):
            remove_hooks(inner, type(self).__name__, kind)
        outcome = _test_links(inner, self._links, args, kwargs)
        if isinstance(outcome, Exception):
            warnings.warn(
                f"HAT could not test whether the units it gates are separate ({str(outcome)[:100]}): if the model "
                "mixes them or reads them elsewhere, later tasks change the outputs of earlier ones.",
                UserWarning,
                stacklevel=2,
            )
        else:
            self._use_links(inner, self._select_valid(self._links, outcome))
            # Embeddings of removed gates must not count in the penalty.
            producers = {link.producer for link in self._links}
            self.embedding = {n: e for n, e in self.embedding.items() if n in producers}
            self._lock(inner)
        self._attach_gates(inner)

    def _select_valid(self, tested_links: list[Link], are_separate: list[bool]) -> list[Link]:
        """Drop links that failed the test; raise if the user named them or earlier tasks use them."""
        failed = [link for link, is_separate in zip(tested_links, are_separate, strict=True) if not is_separate]
        if failed and (self.groups is not None or self.masks):
            prefix = ""
            if self.groups is not None:
                prefix = "groups: "
            raise ValueError(
                f"{prefix}the units of {failed[0].producer!r} do not go to {failed[0].consumer!r} alone, or are mixed "
                "on their way."
            )
        return [link for link in tested_links if link not in failed]

    # Loops in which gates would not learn.

    def _check_modes(self, model: nn.Module) -> None:
        """Raise in evaluation mode, where gates are 0 or 1 and have no gradient."""
        inner = unwrap(model)
        evaluated = [link.consumer for link in self._links if not inner.get_submodule(link.consumer).training]
        if evaluated:
            raise ValueError(
                f"HAT's gates learn in training mode only, and {shorten_names(evaluated)} is in evaluation mode: call "
                "model.train() before the loss is computed. To freeze the statistics of a BatchNorm, set that layer "
                "alone to eval()."
            )

    def _record_probes(self, model: nn.Module) -> None:
        """Copy a gate and a weight that the step should move, until the gates have moved once."""
        if self._gates_moved:
            return
        gate = _first_with_gradient(self.parameters())
        weight = _first_with_gradient(unwrap(model).parameters())
        self._probes = None
        if gate is not None and weight is not None:
            self._probes = [(gate, gate.clone()), (weight, weight.clone())]

    def _check_optimizer(self) -> None:
        """Raise if the optimizer has moved the model's weights but not the gates."""
        if self._gates_moved or self._probes is None:
            return
        gate_moved, weight_moved = (not torch.equal(p, before_step) for p, before_step in self._probes)
        self._gates_moved = gate_moved
        if weight_moved and not gate_moved:
            raise ValueError(
                "The optimizer does not move HAT's gates, so that they would never learn: make it after "
                "begin_task(model, task), of [*model.parameters(), *method.parameters()]."
            )


class Gate:
    """A forward pre-hook that multiplies the inputs of a layer by gates. A copied model keeps the same gates."""

    def __init__(self, method: GatedUnits, link: Link) -> None:
        self.method = method
        self.link = link

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the layer's inputs, h · a."""
        gate = self.method.gate(self.link.producer, module.training)
        if gate is None:
            return args
        h = args[0]
        a = repeat_per_input(gate, self.link).to(h.device, h.dtype)
        if not isinstance(module, nn.Linear):
            a = a.view(-1, *[1] * (h.dim() - 2))
        return h * a, *args[1:]

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self


class UntracedLayer:
    """Pre-hook of a layer that no traced example has called: raises when it is called after all."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Raise."""
        raise ValueError(
            f"The layer {self.name!r} is called, but the examples on which HAT found the units did not call it: it "
            "would read units without their gates, and earlier tasks would change. Put an example that takes this "
            "branch among the first eight of the first task, or name the layers, groups=…."
        )


class LinkTest:
    """A forward pre-hook of the model that tests the links on its first batch in training."""

    def __init__(self, method: GatedUnits, compiled: bool) -> None:
        self.method = method
        self.run = method.test_links
        if compiled:
            self.run = torch.compiler.disable(method.test_links)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Test once, in training mode."""
        if self.method._links_untested and module.training:
            self.run(module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinkTest:
        return self


def cumulative_gates(masks: list[Params]) -> Params:
    """Return the maximum over tasks of their gates, by layer."""
    if not masks:
        return {}
    return {name: torch.stack([gates[name] for gates in masks]).amax(0) for name in masks[0]}


def _test_links(
    inner: nn.Module, tested_links: list[Link], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[bool] | Exception:
    """Return for each link whether its units are separate, or the error that prevented the test."""
    try:
        return [keeps_units_separate(inner, link, *args, kwargs=kwargs) for link in tested_links]
    except (RuntimeError, ValueError, TypeError) as error:
        return error


def _first_with_gradient(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the first parameter with a dense gradient that is not zero."""
    for p in parameters:
        if p.grad is not None and not p.grad.is_sparse and p.grad.any():
            return p
    return None
