"""Per-example gradients of any module, streamed into a statistic: exact, and nearly as fast as training.

The batch runs as always, with the parameters frozen, so that no ordinary gradient of a weight is ever formed. A tap sees
every operation that uses a parameter; a hook on its output receives the output's gradient and hands it, with the input,
to the statistic. A *probe* on two examples, together and each alone, finds where the examples are in every operation's
input, and compares what the taps give with ordinary gradients of a few examples. Whatever the probe does not confirm,
parameter by parameter, goes the general way: ``vmap(grad)``, or an example at a time where that is refused.

A gradient is the same however it is taken; how often an example uses a layer is not: a model whose operations depend on the
data may run an example more often among others than alone. Where a statistic counts uses, such examples run one at a time.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.curvature.persample.general import add_in_general, add_one, length, rows
from everlearn.curvature.persample.operations import Broadcast, Expansion, Layout, Operation, repeated
from everlearn.curvature.persample.picks import count
from everlearn.curvature.persample.probe import (
    Record,
    checked,
    close,
    first_plan,
    kronecker_pairs,
    refuse_mixing,
    same,
    unlike_the_first,
    witnesses,
)
from everlearn.curvature.persample.statistics import Elementwise, Statistic
from everlearn.curvature.persample.tap import Tap
from everlearn.curvature.persample.tapped import Plan, Tapped
from everlearn.data import Batches
from everlearn.forward import ask
from everlearn.params import Params, is_sharded, named, refuse_meta, unwrap
from everlearn.stream import Task

log = logging.getLogger("everlearn")
Cotangents = Callable[[Tensor], Iterable[Tensor]]
ALL = slice(None)


class Run(NamedTuple):
    """A forward pass of some of a chunk's examples.

    Args:
        rows: which of them.
        plan: how their gradients are found.
        tapped: the pass, None where all parameters go the general way.
    """

    rows: slice
    plan: Plan
    tapped: Tapped | None


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
        self.plans_alone: dict[Any, Plan] = {}  # of single examples, by what was done with them
        self.confirmed = set[tuple[torch.Size, ...]]()  # shapes of inputs for which it gives the model's own outputs
        if not self.parameters:
            raise ValueError(f"{type(self.model).__name__} has no trainable parameters to take gradients of.")
        refuse_meta(self.parameters.values())
        if any(map(is_sharded, self.parameters.values())):
            raise ValueError(
                "No process has these parameters whole (FSDP), which gradients of single examples need: take the importance of a "
                "copy that is not sharded and hand it over, method.consolidate(model, importance), or use SI, which needs none."
            )
        if any(p.is_inference() for p in self.parameters.values()):
            raise ValueError(
                f"The parameters of this {type(self.model).__name__} were made under torch.inference_mode() and can have no "
                "gradient: build or load the model outside of it."
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
        x = _recordable(x)
        runs = self._runs(x, statistic, statistic.counts_uses)
        columns = iter(cotangents(self._outputs(x, runs)))
        column = next(columns, None)
        while column is not None:
            following = next(columns, None)
            for run in runs:
                statistic.begin_run(run.plan.pairs)
                own = column[run.rows]
                if run.tapped:
                    run.tapped.backward([own], last=following is None)
                if run.plan.general:
                    add_in_general(self.model, self._only(run.plan.general), rows(x, run.rows), own, statistic)
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
        x = _recordable(x)
        runs = self._runs(x, statistic, counts_uses=True, cut=True)
        out = self._outputs(x, runs)
        last = 2 * out * mask(out)
        for run in runs:
            if run.tapped is not None:
                between = [2 * b.detach() for b in run.tapped.outputs[:-1]]
                run.tapped.backward([*between, last[run.rows]], last=True)
        statistic.end_backward()
        statistic.end_chunk()
        return set[str]().union(*(run.plan.general for run in runs))

    def _outputs(self, x: Any, runs: list[Run]) -> Tensor:
        """The outputs of a whole chunk."""
        with torch.no_grad():
            outputs = [
                run.tapped.outputs[-1].detach() if run.tapped else ask(self.model, rows(x, run.rows)) for run in runs
            ]
        return checked(outputs[0] if len(outputs) == 1 else torch.cat(outputs), x)

    def _runs(self, x: Any, statistic: Statistic, counts_uses: bool, cut: bool = False) -> list[Run]:
        """All examples of a chunk at once; one at a time where uses count and may be others among others."""
        plan, tapped = self._start(x, statistic, cut)
        if not counts_uses or (plan.steady and (tapped is None or self._same_alone(x, tapped))):
            return [Run(ALL, plan, tapped)]
        if tapped is not None:
            tapped.outputs.clear()  # or hooks and graph would hold each other
        return [self._alone(x, i, statistic, cut) for i in range(length(x))]

    def _same_alone(self, x: Any, tapped: Tapped) -> bool:
        """Whether every example alone meets the layers as it did among the others: sure where no number of the data was read."""
        if not tapped.reads or length(x) == 1:
            return True
        return all(self._record(rows(x, [i])).layers == tapped.layers for i in range(length(x)))

    def _alone(self, x: Any, i: int, statistic: Statistic, cut: bool) -> Run:
        """The pass of a single example."""
        one = rows(x, slice(i, i + 1))
        record = self._record(one)
        met = tuple((type(o), *o.names.items(), o.x.shape) for o in record.operations)
        key = met, frozenset(record.unknown), count(record.picks)
        if key not in self.plans_alone:
            self.plans_alone[key] = self._single(one, record)
        plan = self.plans_alone[key]
        try:
            tapped = None if plan.general >= set(self.parameters) else self._tapped(one, statistic, plan, cut)
        except _Changed:  # it does not do the same twice
            plan, tapped = self._all_general(), None
        return Run(slice(i, i + 1), plan, tapped)

    def _start(self, x: Any, statistic: Statistic, cut: bool = False) -> tuple[Plan, Tapped | None]:
        """A plan and the tapped forward pass it allows; a model that has changed its ways is probed again, once."""
        for _ in range(2):
            plan = self._plan(x)
            try:
                if plan.shared and (tapped := self._confirmed(x, statistic, plan, cut)) is not None:
                    return plan, tapped
                if plan.shared:
                    plan = self.plan = plan.without_shared()
                return plan, None if plan.general >= set(self.parameters) else self._tapped(x, statistic, plan, cut)
            except _Changed:
                self.plan = None
        return self._all_general(), None

    def _confirmed(self, x: Any, statistic: Statistic, plan: Plan, cut: bool) -> Tapped | None:
        """The tapped pass of a plan that repeats what all examples share; None if the model does not do the same with that.

        A model may look at the size of what it is given, and few examples may be as many as that size was: so the outputs are
        compared with those of a plain pass, for every new shape of the inputs.
        """
        shapes = tuple(v.shape for v in tree_leaves(x))
        try:
            tapped = self._tapped(x, statistic, plan, cut)
        except (RuntimeError, IndexError, ValueError) as refusal:
            log.info("%s cannot be repeated for every example (%s)", ", ".join(plan.shared), str(refusal)[:100])
            return None
        if shapes not in self.confirmed:
            with torch.no_grad():
                if not same(tapped.outputs[-1].detach(), ask(self.model, x)):
                    tapped.outputs.clear()  # or hooks and graph would hold each other
                    return None
            self.confirmed.add(shapes)
        return tapped

    def _all_general(self) -> Plan:
        return Plan([], Counter(), set(self.parameters), {}, [], steady=False)

    def _plan(self, x: Any) -> Plan:
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "Gradients of single examples were asked for under torch.inference_mode(), in which nothing can be "
                "differentiated: leave that block first (torch.no_grad() is no obstacle)."
            )
        if self.plan is None and length(x) == 1:
            return self._single(x, self._record(x))
        if self.plan is None:
            self.plan = self._probe(x, unlike_the_first(x))
            self.confirmed.clear()
        return self.plan

    def _single(self, x: Any, record: Record) -> Plan:
        """A plan for one example, which is everywhere in its tensors; good for no other."""
        plan = self._settled(x, 0, record, first_plan(x, [record]))
        return plan._replace(pairs=kronecker_pairs(record.operations, plan.uses, plan.general))

    def _probe(self, x: Any, other: int) -> Plan:
        """Find the examples in every operation, given two together and each alone, and confirm with ordinary gradients."""
        records = [self._record(rows(x, some)) for some in ([0, other], [0], [other])]
        refuse_mixing(*(record.out for record in records))
        kinds = [[(type(o), o.names) for o in record.operations] for record in records]
        # Where something is picked from an axis that is longer for two examples, examples are on it, and may change places.
        if any(k != kinds[0] for k in kinds) or any(record.picks != records[0].picks for record in records):
            return self._all_general()
        plan = self._settled(x, other, records[0], first_plan(x, records))
        pairs = kronecker_pairs(records[0].operations, plan.uses, plan.general)
        alone = kronecker_pairs(records[1].operations, plan.uses, records[1].unknown)
        return plan._replace(pairs=pairs, steady=alone.items() <= pairs.items())

    def _settled(self, x: Any, other: int, record: Record, plan: Plan) -> Plan:
        """The plan with all that ordinary gradients do not confirm going the general way."""
        shared = [o for o, p in zip(record.operations, plan.operations, strict=True) if p[2].shared]
        sizes, wrong = {size for o in shared for size in o.x.shape}, set(self.parameters)
        if plan.shared and (some := witnesses(length(x), other, sizes)):
            wrong = self._unconfirmed(rows(x, some), record.out, plan)
        if wrong:  # perhaps examples do not come first where the vectors for all go
            plan = plan.without_shared()
            wrong = self._unconfirmed(rows(x, witnesses(length(x), other)), record.out, plan)
        return plan._replace(general=plan.general | wrong)

    def _only(self, names: set[str]) -> Params:
        return {name: p for name, p in self.parameters.items() if name in names}

    def _record(self, x: Any) -> Record:
        met: list[tuple[Operation, int]] = []
        idle = set[str]()
        held = 0

        def meet(operation: Operation, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal held
            y = call(*args, **kwargs)
            if not operation.x.numel():  # no example is in it
                idle.update(operation.names.values())
                return y
            held += operation.x.nbytes + y.nbytes
            if isinstance(operation, Expansion):
                operation.x = y
            met.append((operation, operation.x._version))
            return y

        with (
            torch.enable_grad(),
            Tap(self.parameters, meet, self.model.buffers()) as tap,
        ):  # nothing needs a gradient, so no graph is made
            out = checked(ask(self.model, x), x)
        changed = {n for o, version in met if o.x._version != version for n in o.names.values()}
        return Record([operation for operation, _ in met], out, tap.unknown | changed, idle, tap.picks, held)

    def _unconfirmed(self, some: Any, out: Tensor, plan: Plan) -> set[str]:
        """Parameters whose squared gradients, summed over these examples, are not what ordinary gradients give."""
        random = torch.Generator().manual_seed(0)
        s = torch.randn(length(some), *out.shape[1:], dtype=out.dtype, generator=random).to(out.device)
        squares = Elementwise(self.parameters)
        try:
            self._tapped(some, squares, plan).backward([s], last=True)
        except (_Changed, RuntimeError, ValueError, TypeError, IndexError):
            return set(self.parameters)
        squares.end_chunk()
        truth = Elementwise(self.parameters)
        met: set[str] = set()
        for i in range(len(s)):
            met |= add_one(self.model, self.parameters, rows(some, [i]), s[i : i + 1], truth)
        return {
            name
            for name, right in truth.sums.items()
            if not close(squares.sums[name], right, self.parameters[name].dtype)
            or (name in met and name not in plan.uses)  # autograd met a use that no tap saw, perhaps asleep just now
        }

    def _tapped(self, x: Any, statistic: Statistic, plan: Plan, cut: bool = False) -> Tapped:
        """A forward pass whose backward passes feed the statistic; ``cut`` takes every layer's input as given."""
        examples, expected, between = length(x), iter(plan.operations), list[Tensor]()
        same_shape = [v.shape[1:] for v in tree_leaves(x)] == plan.shapes
        root = torch.zeros((), requires_grad=True)  # what backward passes run towards, through no parameter
        tapped = Tapped(root, [], statistic, plan, defaultdict(list), [], [])

        def meet(operation: Operation, call: Any, args: Any, kwargs: Any) -> Any:
            if not operation.x.numel():
                return call(*args, **kwargs)
            kind, names, operation.layout, several = next(expected, (None, {}, Layout(0), 1))
            if kind is not type(operation) or names != operation.names:
                raise _Changed
            if operation.factorable:
                tapped.layers.append(operation.met(examples))
            if plan.general.issuperset(names.values()):
                return call(*args, **kwargs)
            if operation.layout.shared:
                y, numbers = call(*args, **kwargs), operation.x
                operation.x = repeated(numbers, numbers, examples)
                return tapped.listen(repeated(y, numbers, examples).clone(), operation, examples)
            if not isinstance(operation, (Broadcast, Expansion)):
                long = operation.x.shape[operation.layout.axis]
                if long % examples or ((several == 1 or same_shape) and long != several * examples):
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

        with torch.enable_grad(), Tap(self.parameters, meet, self.model.buffers()) as tap:
            out = ask(self.model, x)
        tapped.reads.extend(tap.reads)
        if count(tap.picks) != plan.picks:  # perhaps it orders examples now
            raise _Changed
        tapped.outputs[:] = [*between, out]
        return tapped


def _recordable(x: Any) -> Any:
    """The inputs, copied where they were made under inference mode, of which autograd saves nothing."""
    return tree_map(lambda v: v.clone() if isinstance(v, Tensor) and v.is_inference() else v, x)


class _Changed(Exception):
    """The model did not do what it did in the probe: its control flow depends on the data."""
