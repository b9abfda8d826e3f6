"""Follow the units of each layer through the operations of a real forward pass.

A mode intercepts every operation below autograd. For each tensor that holds the units of a layer it records the axis
along which they lie. An operation that keeps units apart (element-wise, pooling, reshaping around the axis) passes the
record on. Any other operation ends it, with a reason. Python branches, loops, ``len(x)`` and shapes need no special
treatment: only the operations that run are seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.surgery.link import NORMS, is_plain_layer, num_units

# A tensor's memory and layout. Below autograd a tensor may get another Python object, but not another layout.
TensorKey = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]

# Element-wise operations that torch does not tag as such.
ELEMENT_WISE = {
    *(
        "_prelu_kernel",
        "_to_copy",
        "alias",
        "bernoulli",
        "copy",
        "detach",
        "dropout",
        "fill",
        "hardswish",
        "lift_fresh",
    ),
    *("log_sigmoid_forward", "native_dropout", "normal", "uniform", "zero"),
}

# Operations that read nothing but the shape of their input. The results of the first kind have the same shape.
CREATES_ALIKE = {"empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"}
CREATES_OTHER = {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"}

# Operations that move entries without computing with them.
REARRANGES = {
    *("_reshape_alias", "_unsafe_view", "cat", "diagonal", "expand", "flip", "gather", "index"),
    *("index_select", "permute", "repeat", "reshape", "roll", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "stack", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
}

# Operations that mix entries along the last axes only, with the number of these axes.
SPATIAL = {
    "_adaptive_avg_pool2d": 2, "_adaptive_avg_pool3d": 3, "adaptive_avg_pool1d": 1, "adaptive_max_pool1d": 1,
    "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3, "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3,
    "max_pool1d": 1, "max_pool1d_with_indices": 1, "max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3,
    "reflection_pad1d": 1, "reflection_pad2d": 2, "replication_pad1d": 1, "replication_pad2d": 2,
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
}  # fmt: skip

# Operations that mix entries along the axes in their second argument.
REDUCTIONS = {"amax", "amin", "logsumexp", "max", "mean", "min", "prod", "std", "sum", "var"}


@dataclass(frozen=True)
class Units:
    """Where a tensor holds the units of a layer: along one axis, ``repeat`` neighboring entries per unit.

    Args:
        producer: name of the layer.
        width: number of units.
        axis: the axis, counted from 0.
        repeat: entries per unit along the axis.
        norms: names of the BatchNorms passed since the layer.
    """

    producer: str
    width: int
    axis: int
    repeat: int = 1
    norms: tuple[str, ...] = ()


class UnitsMixedError(Exception):
    """An operation after which units are no longer separate; the message says which one."""


class UnitTracker(TorchDispatchMode):
    """Record where the units of each layer go in a forward pass.

    Use it as ``with tracker.hooked(), tracker: outputs = model(x)`` and then ``tracker.end_pass(outputs)``.

    Args:
        model: the model; its weights must be its own parameters during the pass.

    Attributes:
        num_calls: for each layer, how often it was called.
        readers: for each layer, the layers that read its units, with the units as they were read.
        reasons: for each layer whose units do not stay separate, the first reason.
        read_directly: layers whose weight is read outside of the layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = Counter[str]()
        self.readers: dict[str, list[tuple[str, Units]]] = {}
        self.reasons: dict[str, str] = {}
        self.read_directly = set[str]()
        self._model = model
        self._units: dict[TensorKey, Units] = {}

        # Memory of tensors that depend neither on the data nor on parameters, such as dropout masks.
        self._constants = set[int]()

        # References, so that no other tensor gets the memory of a recorded one.
        self._recorded_tensors: list[Tensor] = []

        # Names of the modules whose forward pass is running, and the layer that is treated as one operation.
        self._module_stack: list[str] = []
        self._running_layer: str | None = None
        self._norm_input: Units | None = None

        self._layer_by_weight: dict[int, str] = {}
        for name, module in model.named_modules():
            if is_plain_layer(module):
                weight: Any = module.weight
                self._layer_by_weight[weight.data_ptr()] = name

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register the hooks that recognize layers and norms, inside the context."""
        handles = []
        for name, module in self._model.named_modules():
            # A scripted module accepts no hooks of this kind. Its operations are followed all the same.
            if isinstance(module, torch.jit.ScriptModule):
                continue
            # Hooks of the user run between these two hooks and the neighboring layers: their operations are followed.
            handles.append(module.register_forward_pre_hook(self._make_enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._make_leave(name), prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_pass(self, outputs: Any) -> None:
        """End the records of units that are outputs of the model."""
        for tensor in _list_tensors(outputs):
            units = self._find_units(tensor)
            if units is not None:
                self._end_record(units, "its units are outputs of the model")

    def _make_enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._module_stack.append(name)
            if self._running_layer is not None:
                return
            if is_plain_layer(module):
                self._read_layer_input(name, module, args, kwargs)
                self._running_layer = name
            elif isinstance(module, NORMS):
                self._running_layer = name
                self._norm_input = self._read_norm_input(name, module, args)

        return enter

    def _make_leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, outputs: Any) -> None:
            self._module_stack.pop()
            if self._running_layer != name:
                return
            self._running_layer = None
            self.num_calls[name] += 1
            if isinstance(module, NORMS):
                if self._norm_input is not None:
                    self._record_units(outputs, replace(self._norm_input, norms=(*self._norm_input.norms, name)))
                return

            axis = _unit_axis(module, outputs)
            if axis is None:
                self.reasons.setdefault(name, "it is called without a batch dimension")
            else:
                self._record_units(outputs, Units(name, num_units(module), axis))

        return leave

    def _read_layer_input(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Record that a layer reads units."""
        for tensor in _list_tensors((args[1:], kwargs)):
            units = self._find_units(tensor)
            if units is not None:
                self._end_record(units, f"{name!r} gets its units as a keyword argument")
        units = self._find_units(args[0]) if args else None
        if units is None:
            return
        if units.axis == _unit_axis(layer, args[0]):
            self.readers.setdefault(units.producer, []).append((name, units))
        else:
            self._end_record(units, f"{name!r} does not read its units as inputs of their own")

    def _read_norm_input(self, name: str, norm: Any, args: Any) -> Units | None:
        """Return the units that a BatchNorm normalizes one by one; None if it does not."""
        units = self._find_units(args[0]) if args else None
        if units is None:
            return None
        if units.axis == 1 and units.repeat == 1 and norm.num_features == units.width:
            return units
        self._end_record(units, f"{name!r} does not normalize its units one by one")
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if self._running_layer is None:
            self._follow(func, args, kwargs, results)
        return results

    def _follow(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Pass the records of an operation's inputs on to its results, or end them."""
        tensors = _list_tensors((args, kwargs))
        for tensor in tensors:
            layer_name = self._layer_by_weight.get(tensor.data_ptr())
            if layer_name is not None:
                self.read_directly.add(layer_name)

        all_units = [units for units in map(self._find_units, tensors) if units is not None]
        written = _written_tensors(func, args, kwargs)
        if not all_units:
            self._update_constants(tensors, written, results)
            return

        operation = _operation_name(func)
        if operation in CREATES_OTHER:
            self._update_constants([], [], results)
            return
        try:
            propagated = self._propagate(operation, func, args, kwargs, results)
            # Other views of a tensor that is written to must hold the same units as before.
            for tensor in written:
                if [self._find_units(tensor)] != list({units for _, units in propagated}):
                    raise UnitsMixedError(f"{operation} writes its units into a tensor of other values")
        except UnitsMixedError as error:
            for units in all_units:
                self._end_record(units, str(error))
            propagated = []
        for tensor, units in propagated:
            self._record_units(tensor, units)

    def _propagate(self, operation: str, func: Any, args: Any, kwargs: Any, results: Any) -> list[tuple[Tensor, Units]]:
        """Return the results of an operation that hold units; raise if it mixes units."""
        if operation in CREATES_ALIKE or operation in ELEMENT_WISE or torch.Tag.pointwise in func.tags:
            return self._combine(operation, _list_tensors((args, kwargs)), _list_tensors(results))
        if operation in REARRANGES:
            return self._rearrange(operation, func, args, kwargs, results)

        # The operations below have one tensor argument, the first one.
        units = self._find_units(args[0]) if args and isinstance(args[0], Tensor) else None
        if units is None:
            raise UnitsMixedError(f"{operation} mixes its units with other values")
        num_mixed_axes = SPATIAL.get(operation)
        if operation == "constant_pad_nd":
            num_mixed_axes = len(args[1]) // 2
        if num_mixed_axes is not None:
            if units.axis >= args[0].dim() - num_mixed_axes:
                raise UnitsMixedError(f"{operation} mixes its units")
            return [(result, units) for result in _list_tensors(results)]
        if operation in REDUCTIONS:
            axis = _axis_after_reduction(operation, units.axis, args, kwargs, results)
            return [(result, replace(units, axis=axis)) for result in _list_tensors(results)]
        raise UnitsMixedError(f"{operation} mixes its units")

    def _combine(self, operation: str, tensors: list[Tensor], results: list[Tensor]) -> list[tuple[Tensor, Units]]:
        """Combine tensors element by element: all must hold the same units, or have one entry for all units."""
        num_dims = max(tensor.dim() for tensor in tensors)
        combined: Units | None = None
        for tensor in tensors:
            units = self._find_units(tensor)
            if units is None:
                continue
            aligned = replace(units, axis=units.axis + num_dims - tensor.dim())
            if combined is not None and combined != aligned:
                raise UnitsMixedError(_describe_combination(operation))
            combined = aligned
        if combined is None:
            return []

        for tensor in tensors:
            axis = combined.axis - num_dims + tensor.dim()
            is_per_unit = axis >= 0 and tensor.shape[axis] > 1
            if is_per_unit and self._find_units(tensor) is None and _memory(tensor) not in self._constants:
                raise UnitsMixedError(_describe_combination(operation))
        return [(result, combined) for result in results]

    def _rearrange(self, operation: str, func: Any, args: Any, kwargs: Any, results: Any) -> list[tuple[Tensor, Units]]:
        """Apply the operation to the index of each entry's unit, and find the axis along which the units lie then."""
        rearranged = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
        all_units = {self._find_units(tensor) for tensor in rearranged}
        reference = all_units.pop()
        if reference is None or all_units:
            raise UnitsMixedError(f"{operation} joins its units with other values")

        def unit_indices(value: Any) -> Any:
            is_rearranged = any(value is tensor for tensor in rearranged)
            return _unit_indices(value, reference) if is_rearranged else value

        index_results = func(*tree_map(unit_indices, args), **tree_map(unit_indices, kwargs))
        propagated = []
        for result, indices in zip(_list_tensors(results), _list_tensors(index_results), strict=True):
            position = _find_axis(indices, reference.width)
            if position is None:
                raise UnitsMixedError(f"{operation} splits or regroups its units, as attention heads do")
            axis, repeat = position
            propagated.append((result, replace(reference, axis=axis, repeat=repeat)))
        return propagated

    def _update_constants(self, tensors: list[Tensor], written: list[Tensor], results: Any) -> None:
        """Record which tensors depend neither on the data nor on parameters."""
        are_constant = all(_memory(tensor) in self._constants for tensor in tensors)
        for tensor in written:
            if not are_constant:
                self._constants.discard(_memory(tensor))
        if are_constant:
            for tensor in _list_tensors(results):
                self._constants.add(_memory(tensor))
                self._recorded_tensors.append(tensor)

    def _find_units(self, tensor: Any) -> Units | None:
        """Return the units that a tensor holds; None if it holds none, or if they are mixed."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        return self._units.get(_tensor_key(tensor))

    def _record_units(self, tensor: Tensor, units: Units) -> None:
        self._units[_tensor_key(tensor)] = units
        self._recorded_tensors.append(tensor)

    def _end_record(self, units: Units, reason: str) -> None:
        """Note why the units of a layer do not stay separate, and in which module."""
        if self._module_stack and self._module_stack[-1]:
            module = self._model.get_submodule(self._module_stack[-1])
            reason += f" (in {self._module_stack[-1]!r}, {type(module).__name__})"
        self.reasons.setdefault(units.producer, reason)


def _unit_axis(layer: nn.Module, tensor: Tensor) -> int | None:
    """Return the axis of units in a layer's input or output; None for an image without a batch dimension."""
    if isinstance(layer, nn.Linear):
        return tensor.dim() - 1
    num_spatial_axes = len(layer.kernel_size)  # type: ignore[arg-type]
    return 1 if tensor.dim() == num_spatial_axes + 2 else None


def _axis_after_reduction(operation: str, axis: int, args: Any, kwargs: Any, results: Any) -> int:
    """Return the axis of units after a reduction over other axes; raise if it includes them."""
    reduced: Any = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(reduced, int):
        reduced = [reduced]
    if not isinstance(reduced, (tuple, list)) or not reduced:
        raise UnitsMixedError(f"{operation} mixes its units")
    num_dims: int = args[0].dim()
    reduced_axes = {int(dim) % num_dims for dim in reduced}
    if axis in reduced_axes:
        raise UnitsMixedError(f"{operation} mixes its units")
    keeps_dims = _list_tensors(results)[0].dim() == num_dims
    if keeps_dims:
        return axis
    num_removed = sum(dim < axis for dim in reduced_axes)
    return axis - num_removed


def _unit_indices(tensor: Tensor, units: Units) -> Tensor:
    """Return a tensor of the same shape that holds the index of each entry's unit."""
    indices = torch.arange(units.width, device=tensor.device).repeat_interleave(units.repeat)
    shape = [1] * tensor.dim()
    shape[units.axis] = len(indices)

    # The strides of the tensor, so that any view that it allows is allowed here.
    return torch.empty_like(tensor, dtype=torch.long).copy_(indices.view(shape))


def _find_axis(indices: Tensor, width: int) -> tuple[int, int] | None:
    """Return the axis along which units lie in order, and the entries per unit; None if there is none."""
    for axis, length in enumerate(indices.shape):
        if length % width or not length:
            continue
        ordered = torch.arange(width, device=indices.device).repeat_interleave(length // width)
        shape = [1] * indices.dim()
        shape[axis] = length
        if bool((indices == ordered.view(shape)).all()):
            return axis, length // width
    return None


def _describe_combination(operation: str) -> str:
    if operation in ("add", "sub", "rsub"):
        return "its units are added to other values, as in a residual stream"
    return f"{operation} combines its units with other values per unit"


def _operation_name(func: Any) -> str:
    """Return the name of an operation without its namespace; the in-place form has the same name."""
    name = str(func._schema.name).removeprefix("aten::")
    return name.rstrip("_")


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += _list_tensors(value)
    return written


def _list_tensors(value: Any) -> list[Tensor]:
    """List the tensors in nested tuples, lists and dicts that have memory of their own, which sparse ones have not."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _memory(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def _tensor_key(tensor: Tensor) -> TensorKey:
    return _memory(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype
