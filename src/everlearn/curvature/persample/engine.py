"""Per-example gradients of any module, streamed into a statistic: exact, and nearly as fast as training.

The batch runs as always, with the parameters frozen, so that no ordinary gradient of a weight is ever formed. A tap sees
every operation that uses a parameter; a hook on its output receives the output's gradient and hands it, with the input,
to the statistic. A *probe* on two examples, together and each alone, finds where the examples are in every operation's
input, and compares what the taps give with ordinary gradients of the two examples. Whatever the probe does not confirm,
parameter by parameter, goes the general way: ``vmap(grad)``, or an example at a time where that is refused.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.curvature.persample.operations import Broadcast, Expansion, Layout, Operation, repeated
from everlearn.curvature.persample.probe import close, find_layout, kronecker_pairs, refuse_mixing, unlike_the_first
from everlearn.curvature.persample.statistics import Elementwise, Statistic
from everlearn.curvature.persample.tap import Tap
from everlearn.curvature.persample.tapped import Plan, Tapped
from everlearn.data import Batches
from everlearn.params import Params, evaluating, is_sharded, named, unwrap
from everlearn.seeds import seeded
from everlearn.stream import Task

log = logging.getLogger("everlearn")
Cotangents = Callable[[Tensor], Iterable[Tensor]]


class PerExample:
    """Streams the per-example gradients of a model into a statistic.

    Args:
        model: any module; its trainable parameters are tracked.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"The model must be a torch.nn.Module, got a {type(model).__name__}.")
        self.model = unwrap(model)
        self.parameters = named(model)
        self.plan: Plan | None = None
        if not self.parameters:
            raise ValueError(f"{type(self.model).__name__} has no trainable parameters to take gradients of.")
        if any(map(is_sharded, self.parameters.values())):
            raise ValueError(
                "No process has these parameters whole (FSDP), which gradients of single examples need: take the importance of a "
                "copy that is not sharded and hand it over, method.consolidate(model, importance), or use SI, which needs none."
            )

    def chunk(self, task: Task) -> int:
        """How many examples go through the model best at once: as many as fit 8 MB, where caches still help; 64 to 512."""
        if isinstance(task.train, Batches):  # which come as they are, and may come once only
            return 256
        for some in task.examples(2):
            held = self._plan(some.to(next(iter(self.parameters.values())).device).x).held
            return 256 if not held else min(512, max(64, 2**23 // held))
        return 256

    def update(self, x: Any, cotangents: Cotangents, statistic: Statistic) -> None:
        """Take in a chunk of examples; only inside ``untouched(model)``.

        Args:
            x: their inputs.
            cotangents: from the outputs, the vectors s for each of which the gradients of Σ s·output are taken.
            statistic: what receives them.
        """
        plan, tapped = self._start(x, statistic)
        statistic.begin_chunk(plan.pairs)
        with torch.no_grad():
            out = _checked(tapped.outputs[-1] if tapped else self.model(x), x)
        columns = iter(cotangents(out.detach()))
        column = next(columns, None)
        while column is not None:
            following = next(columns, None)
            if tapped:
                tapped.backward([column], last=following is None)
            if plan.general:
                self._general(x, column, statistic, plan.general)
            statistic.end_backward()
            column = following
        statistic.end_chunk()

    def update_locally(self, x: Any, mask: Callable[[Tensor], Tensor], statistic: Statistic) -> set[str]:
        """Take in a chunk of examples, each layer for itself: the gradients of the squared length of what a linear or
        convolutional layer hands to the next, its own input held fixed. Returns the parameters it could not see.

        Args:
            x: their inputs.
            mask: from the outputs, which of them count.
            statistic: what receives the gradients.
        """
        plan, tapped = self._start(x, statistic, cut=True)
        if tapped is not None:
            *between, out = (o.detach() for o in tapped.outputs)
            tapped.backward([*(2 * b for b in between), 2 * out * mask(out)], last=True)
        statistic.end_backward()
        statistic.end_chunk()
        return plan.general

    def _start(self, x: Any, statistic: Statistic, cut: bool = False) -> tuple[Plan, Tapped | None]:
        """A plan and the tapped forward pass it allows; a model that has changed its ways is probed again, once."""
        for _ in range(2):
            plan = self._plan(x)
            try:
                return plan, None if plan.general >= set(self.parameters) else self._tapped(x, statistic, plan, cut)
            except _Changed:
                self.plan = None
        return self._all_general(), None

    def _all_general(self) -> Plan:
        return Plan([], Counter(), set(self.parameters), {}, [])

    def _plan(self, x: Any) -> Plan:
        if self.plan is None and _length(x) == 1:
            return self._probe([x])
        if self.plan is None:
            other = unlike_the_first(x)
            self.plan = self._probe([_rows(x, [0, other]), _rows(x, [0]), _rows(x, [other])])
        return self.plan

    def _probe(self, inputs: list[Any]) -> Plan:
        """Find the examples in every operation, given two together and each alone, and confirm with ordinary gradients.

        A single example is everywhere in its tensors; a plan made from one is not kept.
        """
        records = [self._record(x) for x in inputs]
        first = records[0]
        if len(records) > 1:
            refuse_mixing(*(record.out for record in records))
        kinds = [[(type(o), o.names) for o in record.operations] for record in records]
        if any(k != kinds[0] for k in kinds) or any(record.reorders for record in records):
            return self._all_general()
        general = set().union(*(record.unknown for record in records))
        operations = []
        for joint, *alone in zip(*(record.operations for record in records), strict=True):
            layout = find_layout(joint, alone) if alone else Layout(0)
            if layout is None:
                general |= set(joint.names.values())
            rows = joint.x.shape[layout.axis] // len(first.out) if layout and joint.x.dim() else 1
            operations.append((type(joint), joint.names, layout or Layout(0), rows))
        uses = Counter(name for operation in first.operations for name in operation.names.values())
        shapes = [v.shape[1:] for v in tree_leaves(inputs[0])]
        plan = Plan(operations, uses, general, {}, shapes, first.held // len(first.out))
        wrong = self._unconfirmed(inputs[0], first.out, plan)
        shared = {name for _, names, layout, _ in operations if layout.shared for name in names.values()}
        if wrong and shared:  # perhaps examples do not come first where its vectors go
            plan = plan._replace(general=general | shared)
            wrong = self._unconfirmed(inputs[0], first.out, plan)
        general = plan.general | wrong
        return plan._replace(general=general, pairs=kronecker_pairs(first.operations, uses, general))

    def _record(self, x: Any) -> _Record:
        met: list[tuple[Operation, int]] = []
        held = 0

        def meet(operation: Operation, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal held
            y = call(*args, **kwargs)
            held += operation.x.nbytes + y.nbytes
            if isinstance(operation, Expansion):
                operation.x = y
            met.append((operation, operation.x._version))
            return y

        with (
            torch.enable_grad(),
            Tap(self.parameters, meet, self.model.buffers()) as tap,
        ):  # nothing needs a gradient, so no graph is made
            out = _checked(self.model(x), x)
        changed = {n for o, version in met if o.x._version != version for n in o.names.values()}
        return _Record([operation for operation, _ in met], out, tap.unknown | changed, tap.reorders, held)

    def _unconfirmed(self, some: Any, out: Tensor, plan: Plan) -> set[str]:
        """Parameters whose squared gradients, summed over these examples, are not what ordinary gradients give."""
        s = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0)).to(out.device)
        squares = Elementwise(self.parameters)
        try:
            self._tapped(some, squares, plan).backward([s], last=True)
        except (_Changed, RuntimeError, ValueError, TypeError, IndexError):
            return set(self.parameters)
        squares.end_chunk()
        truth = Elementwise(self.parameters)
        met: set[str] = set()
        for i in range(len(out)):
            met |= self._one_by_one(_rows(some, [i]), s[i : i + 1], truth, set(self.parameters))
        return {
            name
            for name, right in truth.sums.items()
            if not close(squares.sums[name], right, self.parameters[name].dtype)
            or (name in met and name not in plan.uses)  # autograd met a use that no tap saw, perhaps asleep just now
        }

    def _tapped(self, x: Any, statistic: Statistic, plan: Plan, cut: bool = False) -> Tapped:
        """A forward pass whose backward passes feed the statistic; ``cut`` takes every layer's input as given."""
        examples, expected, between = _length(x), iter(plan.operations), list[Tensor]()
        same_shape = [v.shape[1:] for v in tree_leaves(x)] == plan.shapes
        root = torch.zeros((), requires_grad=True)  # what backward passes run towards, through no parameter
        tapped = Tapped(root, [], statistic, plan, defaultdict(list))

        def meet(operation: Operation, call: Any, args: Any, kwargs: Any) -> Any:
            kind, names, operation.layout, rows = next(expected, (None, {}, Layout(0), 1))
            if kind is not type(operation) or names != operation.names:
                raise _Changed
            if plan.general.issuperset(names.values()):
                return call(*args, **kwargs)
            if operation.layout.shared:
                y, numbers = call(*args, **kwargs), operation.x
                operation.x = repeated(numbers, numbers, examples)
                return tapped.listen(repeated(y, numbers, examples).clone(), operation, examples)
            if not isinstance(operation, (Broadcast, Expansion)):
                length = operation.x.shape[operation.layout.axis]
                if length % examples or ((rows == 1 or same_shape) and length != rows * examples):
                    raise _Changed
            if isinstance(operation, Broadcast):
                copies = operation.copies(args[operation.place], examples)
                args = (
                    *args[: operation.place],
                    tapped.listen(copies, operation, examples),
                    *args[operation.place + 1 :],
                )
                return call(*args, **kwargs)
            if cut and operation.factorable:
                if operation.x.requires_grad and not any(operation.x is b for b in between):
                    between.append(operation.x)
                args = tuple(a.detach() if a is operation.x else a for a in args)
            operation.x = operation.x.detach()
            y = call(*args, **kwargs)
            return tapped.listen(y.clone() if isinstance(operation, Expansion) else y, operation, examples)

        with torch.enable_grad(), Tap(self.parameters, meet):
            out = self.model(x)
        tapped.outputs[:] = [*between, out]
        return tapped

    def _general(self, x: Any, column: Tensor, statistic: Statistic, names: set[str]) -> None:
        """``vmap(grad)`` over a bounded number of examples at a time, for these parameters only."""
        some = {n: p.detach() for n, p in self.parameters.items() if n in names}

        def one(parameters: Params, xi: Any, s: Tensor) -> Tensor:
            out: Tensor = functional_call(self.model, parameters, (tree_map(lambda v: v[None], xi),))
            return (out[0] * s).sum()

        size = max(1, 2**24 // max(1, sum(p.numel() for p in some.values())))
        for i in range(0, len(column), size):
            part, s = _rows(x, slice(i, i + size)), column[i : i + size]
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "There is a performance drop")  # it is still faster than a loop
                    gradients = vmap(grad(one), (None, 0, 0))(some, part, s)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
                log.info("vmap refuses %s (%s): an example at a time for it", ", ".join(some), str(refusal)[:100])
                for k in range(len(s)):
                    self._one_by_one(_rows(part, [k]), s[k : k + 1], statistic, names)
            else:
                for name, g in gradients.items():
                    statistic.add(name, g.clone(memory_format=torch.contiguous_format))  # may be shared or expanded

    def _one_by_one(self, x: Any, s: Tensor, statistic: Statistic, names: set[str]) -> set[str]:
        """The ordinary gradient of a single example; returns the parameters it depends on."""
        some = {n: p.detach().requires_grad_() for n, p in self.parameters.items() if n in names}
        with torch.enable_grad():
            out = functional_call(self.model, some, (x,))
        found = torch.autograd.grad(out, list(some.values()), s, allow_unused=True)
        for (name, p), g in zip(some.items(), found, strict=True):
            dense = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g.clone()  # an LSTM shares
            statistic.add(name, dense[None])
        return {name for name, g in zip(some, found, strict=True) if g is not None}


class _Changed(Exception):
    """The model did not do what it did in the probe: its control flow depends on the data."""


class _Record(NamedTuple):
    operations: list[Operation]
    out: Tensor
    unknown: set[str]
    reorders: bool
    held: int


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside; outside, modes, flags, gradients and random numbers as before."""
    learning = [p for p in model.parameters() if p.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for p in learning:
            p.requires_grad_(False)
        torch.backends.mha.set_fastpath_enabled(False)  # one fused call that no tap can see into
        with evaluating(model), seeded(0):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for p in learning:
            p.requires_grad_(True)


def _checked(out: Any, x: Any) -> Tensor:
    if not isinstance(out, Tensor) or not out.dim() or len(out) != _length(x):
        kind = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise TypeError(
            f"The model must give a tensor with a row per example, it gave {kind}: wrap it to return the outputs alone."
        )
    return out


def _length(x: Any) -> int:
    return len(tree_leaves(x)[0])


def _rows(x: Any, index: Any) -> Any:
    return tree_map(lambda v: v[index], x)
