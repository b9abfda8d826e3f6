"""Per-example gradients of any module, accumulated in a statistic: exact, and nearly as fast as training.

The batch runs as usual, with frozen parameters, so that no ordinary weight gradient is formed. An interceptor finds
every operation that uses a parameter. A hook on the operation's output receives its gradient and passes it, with the
input, to the statistic.

A *probe* runs two examples together and separately. It locates the examples in every operation's input and compares the
result with ordinary gradients of a few examples. Parameters that the probe does not verify use the *fallback*:
``vmap(grad)``, or one example at a time if that fails.

A gradient is the same however it is computed, but the number of uses of a layer is not: a model whose operations depend
on the data may use a layer more often for a batch than for a single example. If a statistic counts uses, such examples
run one at a time.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.core.data_source import Batches
from everlearn.core.forward import forward
from everlearn.core.parameters import Params, has_sharded_parameters, refuse_meta, trainable_parameters, unwrap
from everlearn.core.task import Task
from everlearn.curvature.per_example.fallback import (
    add_single_gradient,
    add_vmap_gradients,
    count_examples,
    select_examples,
)
from everlearn.curvature.per_example.indexing import count_reorderings
from everlearn.curvature.per_example.interceptor import Interceptor
from everlearn.curvature.per_example.layout_probe import (
    Record,
    check_outputs,
    choose_verification_examples,
    find_different_example,
    find_kronecker_layers,
    is_close,
    is_nearly_equal,
    make_plan,
    refuse_mixing,
    rounding_tolerance,
)
from everlearn.curvature.per_example.operations import Broadcast, Expansion, Operation, repeat_per_example
from everlearn.curvature.per_example.recorded_pass import Plan, PlannedOperation, RecordedPass
from everlearn.curvature.per_example.statistics import Elementwise, Statistic, TermMagnitudes

log = logging.getLogger("everlearn")
Cotangents = Callable[[Tensor], Iterable[Tensor]]

DEFAULT_CHUNK_SIZE = 256

# Activations of a chunk that caches still help with.
CHUNK_BYTES = 2**23


class Run(NamedTuple):
    """A forward pass of some examples of a chunk.

    Args:
        rows: the examples.
        plan: how their gradients are computed.
        recorded: the pass, or None if all parameters use the fallback.
    """

    rows: slice
    plan: Plan
    recorded: RecordedPass | None


class PerExample:
    """Accumulates the per-example gradients of a model in a statistic.

    Args:
        model: any module; its trainable parameters are tracked.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"The model must be a torch.nn.Module, got a {type(model).__name__}.")
        self.model = unwrap(model)
        self.parameters = trainable_parameters(model)
        self.plan: Plan | None = None
        self._single_plans: dict[Any, Plan] = {}  # by the operations of a single example
        self._verified_shapes = set[tuple[torch.Size, ...]]()  # of inputs whose outputs were compared

        if not self.parameters:
            raise ValueError(f"{type(self.model).__name__} has no trainable parameters to take gradients of.")
        refuse_meta(self.parameters.values())
        if has_sharded_parameters(self.model):
            raise ValueError(
                "These parameters are sharded (FSDP), and per-example gradients need complete ones: compute the "
                "importance with a copy that is not sharded and pass it, method.consolidate(model, importance), or use "
                "SI, which needs no importance."
            )
        if any(p.is_inference() for p in self.parameters.values()):
            raise ValueError(
                f"The parameters of this {type(self.model).__name__} were made under torch.inference_mode() and cannot "
                "have a gradient: build or load the model outside of it."
            )

    def choose_chunk_size(self, task: Task) -> int:
        """Choose the number of examples per forward pass: as many as fit 8 MB, where caches help, from 64 to 512."""
        # Batches have a size already, and may be iterable only once.
        if isinstance(task.train, Batches):
            return DEFAULT_CHUNK_SIZE
        device = next(iter(self.parameters.values())).device
        for batch in task.examples(2):
            bytes_per_example = self._get_plan(batch.to(device).x).bytes_per_example
            if not bytes_per_example:
                return DEFAULT_CHUNK_SIZE
            return min(512, max(64, CHUNK_BYTES // bytes_per_example))
        return DEFAULT_CHUNK_SIZE

    def update(self, x: Any, cotangents: Cotangents, statistic: Statistic) -> None:
        """Add a chunk of examples to the statistic; call it inside ``preserve_model(model)``.

        Args:
            x: their inputs.
            cotangents: a function of the outputs; yields the vectors s, for each of which the per-example gradients of
                s·output are computed.
            statistic: receives the gradients.
        """
        x = _copy_inference_tensors(x)
        runs = self._start_runs(x, statistic, statistic.counts_uses)
        cotangent_iterator = iter(cotangents(self._get_outputs(x, runs)))
        cotangent = next(cotangent_iterator, None)
        while cotangent is not None:
            following = next(cotangent_iterator, None)
            for run in runs:
                statistic.begin_run(run.plan.kronecker_layers)
                s = cotangent[run.rows]
                if run.recorded:
                    run.recorded.backward([s], is_last=following is None)
                if run.plan.fallback:
                    parameters = {name: p for name, p in self.parameters.items() if name in run.plan.fallback}
                    add_vmap_gradients(self.model, parameters, select_examples(x, run.rows), s, statistic)
            statistic.end_backward()
            cotangent = following
        statistic.end_chunk()

    def update_locally(self, x: Any, mask: Callable[[Tensor], Tensor], statistic: Statistic) -> set[str]:
        """Add a chunk of examples to the statistic, each layer separately.

        The gradients are those of the squared norm of what a linear or convolutional layer passes to the next one, with
        its own input fixed.

        Args:
            x: their inputs.
            mask: a function of the outputs; selects those that count.
            statistic: receives the gradients.

        Returns:
            The names of the parameters in the fallback, whose gradients are missing.
        """
        x = _copy_inference_tensors(x)
        runs = self._start_runs(x, statistic, counts_uses=True, detach_inputs=True)
        outputs = self._get_outputs(x, runs)
        output_cotangent = 2 * outputs * mask(outputs)
        for run in runs:
            if run.recorded is not None:
                layer_cotangents = [2 * layer_input.detach() for layer_input in run.recorded.outputs[:-1]]
                run.recorded.backward([*layer_cotangents, output_cotangent[run.rows]], is_last=True)
        statistic.end_backward()
        statistic.end_chunk()
        return set[str]().union(*(run.plan.fallback for run in runs))

    def _get_outputs(self, x: Any, runs: list[Run]) -> Tensor:
        """Return the outputs of all examples of a chunk."""
        parts = []
        with torch.no_grad():
            for run in runs:
                if run.recorded:
                    parts.append(run.recorded.outputs[-1].detach())
                else:
                    parts.append(forward(self.model, select_examples(x, run.rows)))
        if len(parts) == 1:
            return check_outputs(parts[0], x)
        return check_outputs(torch.cat(parts), x)

    def _start_runs(self, x: Any, statistic: Statistic, counts_uses: bool, detach_inputs: bool = False) -> list[Run]:
        """Run all examples of a chunk at once, or one at a time if uses count and may depend on the other examples."""
        plan, recorded = self._start(x, statistic, detach_inputs)
        if not counts_uses:
            return [Run(slice(None), plan, recorded)]
        if plan.is_batch_invariant and (recorded is None or self._has_same_uses_alone(x, recorded)):
            return [Run(slice(None), plan, recorded)]

        # Break the reference cycle between hooks and graph.
        if recorded is not None:
            recorded.outputs.clear()
        return [self._start_single(x, i, statistic, detach_inputs) for i in range(count_examples(x))]

    def _has_same_uses_alone(self, x: Any, recorded: RecordedPass) -> bool:
        """Whether every example alone uses the layers as in the batch; certain if no data became Python values."""
        if not recorded.data_reads or count_examples(x) == 1:
            return True
        for i in range(count_examples(x)):
            if self._record(select_examples(x, [i])).signatures != recorded.signatures:
                return False
        return True

    def _start_single(self, x: Any, i: int, statistic: Statistic, detach_inputs: bool) -> Run:
        """Run a single example."""
        rows = slice(i, i + 1)
        x_i = select_examples(x, rows)
        record = self._record(x_i)
        operations_key = tuple((type(op), *op.names.items(), op.x.shape) for op in record.operations)
        key = operations_key, frozenset(record.unknown), count_reorderings(record.indexed_axes)
        if key not in self._single_plans:
            self._single_plans[key] = self._plan_single(x_i, record)

        plan = self._single_plans[key]
        if plan.fallback >= set(self.parameters):
            return Run(rows, plan, None)
        try:
            return Run(rows, plan, self._record_pass(x_i, statistic, plan, detach_inputs))
        except _PlanMismatch:  # the model is not deterministic
            return Run(rows, self._fallback_plan(), None)

    def _start(self, x: Any, statistic: Statistic, detach_inputs: bool) -> tuple[Plan, RecordedPass | None]:
        """Return a plan and its recorded pass; a model that no longer follows the plan is probed again, once."""
        for _ in range(2):
            plan = self._get_plan(x)
            try:
                if plan.shared:
                    recorded = self._record_shared_pass(x, statistic, plan, detach_inputs)
                    if recorded is not None:
                        return plan, recorded
                    plan = plan.without_shared()
                    self.plan = plan
                if plan.fallback >= set(self.parameters):
                    return plan, None
                return plan, self._record_pass(x, statistic, plan, detach_inputs)
            except _PlanMismatch:
                self.plan = None
        return self._fallback_plan(), None

    def _record_shared_pass(self, x: Any, statistic: Statistic, plan: Plan, detach_inputs: bool) -> RecordedPass | None:
        """Record a pass that repeats shared tensors per example; None if that changes the outputs.

        A model may inspect the size of a tensor, and the number of examples may equal that size by chance. The outputs
        are therefore compared with those of an ordinary pass, once for every shape of the inputs.
        """
        shapes = tuple(leaf.shape for leaf in tree_leaves(x))
        try:
            recorded = self._record_pass(x, statistic, plan, detach_inputs)
        except (RuntimeError, IndexError, ValueError) as error:
            log.info("%s cannot be repeated for every example (%s)", ", ".join(plan.shared), str(error)[:100])
            return None

        if shapes not in self._verified_shapes:
            with torch.no_grad():
                if not is_nearly_equal(recorded.outputs[-1].detach(), forward(self.model, x)):
                    recorded.outputs.clear()  # breaks the reference cycle between hooks and graph
                    return None
            self._verified_shapes.add(shapes)
        return recorded

    def _fallback_plan(self) -> Plan:
        """Return a plan with all parameters in the fallback."""
        return Plan([], Counter(), set(self.parameters), {}, [], is_batch_invariant=False)

    def _get_plan(self, x: Any) -> Plan:
        """Return the plan; probe the model if there is none."""
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "Per-example gradients were requested under torch.inference_mode(), in which nothing can be "
                "differentiated: leave that block first (torch.no_grad() is allowed)."
            )
        if self.plan is None and count_examples(x) == 1:
            return self._plan_single(x, self._record(x))
        if self.plan is None:
            self.plan = self._probe(x, find_different_example(x))
            self._verified_shapes.clear()
        return self.plan

    def _plan_single(self, x: Any, record: Record) -> Plan:
        """Make a plan for one example, which needs no layout; it is not valid for others."""
        plan = self._verify(x, 0, record, make_plan(x, [record]))
        kronecker_layers = find_kronecker_layers(record.operations, plan.use_counts, plan.fallback)
        return plan._replace(kronecker_layers=kronecker_layers)

    def _probe(self, x: Any, different: int) -> Plan:
        """Locate two examples in every operation, from a joint and two separate passes, and verify the gradients.

        Args:
            x: the inputs.
            different: index of an example that differs from the first.
        """
        joint = self._record(select_examples(x, [0, different]))
        first = self._record(select_examples(x, [0]))
        second = self._record(select_examples(x, [different]))
        refuse_mixing(joint.outputs, first.outputs, second.outputs)

        # An indexed axis that is longer for two examples contains the examples, whose order may change.
        joint_operations = [(type(op), op.names) for op in joint.operations]
        for record in (first, second):
            if [(type(op), op.names) for op in record.operations] != joint_operations:
                return self._fallback_plan()
            if record.indexed_axes != joint.indexed_axes:
                return self._fallback_plan()

        plan = self._verify(x, different, joint, make_plan(x, [joint, first, second]))
        joint_layers = find_kronecker_layers(joint.operations, plan.use_counts, plan.fallback)
        single_layers = find_kronecker_layers(first.operations, plan.use_counts, first.unknown)
        is_batch_invariant = single_layers.items() <= joint_layers.items()
        return plan._replace(kronecker_layers=joint_layers, is_batch_invariant=is_batch_invariant)

    def _verify(self, x: Any, different: int, record: Record, plan: Plan) -> Plan:
        """Move all parameters whose gradients cannot be verified to the fallback."""
        num_examples = count_examples(x)
        unverified = set(self.parameters)
        if plan.shared:
            shared_sizes = set[int]()
            for operation, planned in zip(record.operations, plan.operations, strict=True):
                if planned.layout.is_shared:
                    shared_sizes.update(operation.x.shape)
            rows = choose_verification_examples(num_examples, different, shared_sizes)
            if rows:
                unverified = self._find_unverified(select_examples(x, rows), record.outputs, plan)

        # Without the shared parameters: the examples may not be on the first axis where these are added.
        if unverified:
            plan_without = plan.without_shared()
            rows = choose_verification_examples(num_examples, different)
            unverified_without = self._find_unverified(select_examples(x, rows), record.outputs, plan_without)
            if len(plan_without.fallback | unverified_without) <= len(plan.fallback | unverified):
                plan = plan_without
                unverified = unverified_without
        return plan._replace(fallback=plan.fallback | unverified)

    def _record(self, x: Any) -> Record:
        """Run a forward pass without a graph and record its operations."""
        operations: list[tuple[Operation, int]] = []
        idle = set[str]()
        num_bytes = 0

        def handle(operation: Operation, call: Any, args: Any, kwargs: Any) -> Any:
            nonlocal num_bytes
            y = call(*args, **kwargs)
            if not operation.x.numel():  # no example reaches it
                idle.update(operation.names.values())
                return y
            num_bytes += operation.x.nbytes + y.nbytes
            if isinstance(operation, Expansion):
                operation.x = y
            operations.append((operation, operation.x._version))
            return y

        # Gradients are enabled, as in the recorded pass, but nothing requires one, so there is no graph.
        with torch.enable_grad(), Interceptor(self.parameters, handle, self.model.buffers()) as interceptor:
            outputs = check_outputs(forward(self.model, x), x)

        # An input that was overwritten after the operation is no longer what the gradient is made of.
        overwritten = set[str]()
        for operation, version in operations:
            if operation.x._version != version:
                overwritten.update(operation.names.values())
        unknown = interceptor.unknown | overwritten
        return Record([op for op, _ in operations], outputs, unknown, idle, interceptor.indexed_axes, num_bytes)

    def _find_unverified(self, x: Any, outputs: Tensor, plan: Plan) -> set[str]:
        """Return the parameters whose squared gradients, summed over the examples, differ from ordinary ones.

        Args:
            x: the examples.
            outputs: of the probe, for their shape and dtype.
            plan: to verify.
        """
        generator = torch.Generator().manual_seed(0)
        s = torch.randn(count_examples(x), *outputs.shape[1:], dtype=outputs.dtype, generator=generator)
        s = s.to(outputs.device)
        recorded_squares = Elementwise(self.parameters)
        try:
            self._record_pass(x, recorded_squares, plan).backward([s], is_last=True)
        except (_PlanMismatch, RuntimeError, ValueError, TypeError, IndexError):
            return set(self.parameters)
        recorded_squares.end_chunk()

        ordinary_squares = Elementwise(self.parameters)
        used: set[str] = set()
        for i in range(len(s)):
            x_i = select_examples(x, [i])
            used |= add_single_gradient(self.model, self.parameters, x_i, s[i : i + 1], ordinary_squares)

        unverified = set[str]()
        for name, expected in ordinary_squares.sums.items():
            if not is_close(recorded_squares.sums[name], expected, self.parameters[name].dtype):
                unverified.add(name)

        # Terms that cancel leave nothing but rounding errors, such as those of the bias of the keys in attention.
        if unverified:
            squares = recorded_squares.sums, ordinary_squares.sums
            unverified -= self._find_cancelled(unverified, x, s, plan, squares)

        # A use that was not intercepted, even if its gradient is zero for these examples.
        return unverified | (used - plan.use_counts.keys())

    def _find_cancelled(
        self, names: set[str], x: Any, s: Tensor, plan: Plan, squares: tuple[Params, Params]
    ) -> set[str]:
        """Return the parameters whose gradients are zero up to the rounding of the terms they are a sum of.

        Args:
            names: to examine.
            x: the examples.
            s: the cotangents.
            plan: to follow.
            squares: of the gradients, computed in two ways.
        """
        bounds = TermMagnitudes({name: self.parameters[name] for name in names})
        self._record_pass(x, bounds, plan).backward([s], is_last=True)
        bounds.end_chunk()
        cancelled = set[str]()
        for name, bound in bounds.sums.items():
            tolerance = rounding_tolerance(self.parameters[name].dtype)
            if all(bool((sums[name] <= tolerance**2 * bound).all()) for sums in squares):
                cancelled.add(name)
        return cancelled

    def _record_pass(self, x: Any, statistic: Statistic, plan: Plan, detach_inputs: bool = False) -> RecordedPass:
        """Run a forward pass whose backward passes feed the statistic.

        Args:
            x: the inputs.
            statistic: receives the uses of the parameters.
            plan: to follow; a pass that deviates from it raises ``_PlanMismatch``.
            detach_inputs: whether layers are differentiated separately; their inputs become outputs of the pass.
        """
        num_examples = count_examples(x)
        has_planned_shapes = [leaf.shape[1:] for leaf in tree_leaves(x)] == plan.shapes
        planned_operations = iter(plan.operations)
        layer_inputs = list[Tensor]()

        # Backward passes need an input to differentiate with respect to, and no parameter requires a gradient.
        root = torch.zeros((), requires_grad=True)
        recorded = RecordedPass(root, [], statistic, plan, defaultdict(list), [], [])

        def handle(operation: Operation, call: Any, args: Any, kwargs: Any) -> Any:
            if not operation.x.numel():
                return call(*args, **kwargs)
            planned = next(planned_operations, None)
            if planned is None or planned.kind is not type(operation) or planned.names != operation.names:
                raise _PlanMismatch
            operation.layout = planned.layout
            if operation.has_factors:
                recorded.signatures.append(operation.signature(num_examples))
            if plan.fallback.issuperset(planned.names.values()):
                return call(*args, **kwargs)

            if operation.layout.is_shared:
                y = call(*args, **kwargs)
                indices = operation.x
                operation.x = repeat_per_example(indices, indices, num_examples)
                copies = repeat_per_example(y, indices, num_examples).clone()
                return recorded.capture_grad(copies, operation, num_examples)
            if isinstance(operation, Broadcast):
                index = operation.arg_index
                copies = operation.copy_per_example(args[index], num_examples)
                copies = recorded.capture_grad(copies, operation, num_examples)
                return call(*args[:index], copies, *args[index + 1 :], **kwargs)

            if not isinstance(operation, Expansion):
                _check_axis_length(operation, planned, num_examples, has_planned_shapes)
            if detach_inputs and operation.has_factors:
                if operation.x.requires_grad and not any(operation.x is layer_input for layer_input in layer_inputs):
                    layer_inputs.append(operation.x)
                args = tuple(arg.detach() if arg is operation.x else arg for arg in args)

            operation.x = operation.x.detach()
            y = call(*args, **kwargs)
            if isinstance(operation, Expansion):
                y = y.clone()
            return recorded.capture_grad(y, operation, num_examples)

        with torch.enable_grad(), Interceptor(self.parameters, handle, self.model.buffers()) as interceptor:
            outputs = forward(self.model, x)
        recorded.data_reads.extend(interceptor.data_reads)

        # More or fewer indexed axes than in the probe may mean that examples are reordered.
        if count_reorderings(interceptor.indexed_axes) != plan.num_reorderings:
            raise _PlanMismatch
        recorded.outputs[:] = [*layer_inputs, outputs]
        return recorded


def _check_axis_length(
    operation: Operation, planned: PlannedOperation, num_examples: int, has_planned_shapes: bool
) -> None:
    """Raise if the axis of the examples does not have the planned number of rows per example.

    With inputs of another shape, several rows per example may become another number of rows.
    """
    axis_length = operation.x.shape[planned.layout.axis]
    is_fixed = planned.rows_per_example == 1 or has_planned_shapes
    if axis_length % num_examples or (is_fixed and axis_length != planned.rows_per_example * num_examples):
        raise _PlanMismatch


def _copy_inference_tensors(x: Any) -> Any:
    """Copy inputs created under inference mode, which autograd cannot save."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_inference():
            return leaf.clone()
        return leaf

    return tree_map(copy, x)


class _PlanMismatch(Exception):
    """The model did not repeat the operations of the probe: its control flow depends on the data."""
