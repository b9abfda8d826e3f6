"""Intercept every torch call that uses a tracked parameter.

Calls are intercepted, not modules, so functional calls, shared weights and attention are covered like any layer. A call
is recognized as one of the ``operations``. A Python function of ``torch.nn.functional`` that is not recognized is
entered, so that the calls inside it are intercepted. Any other call is an unknown use of its parameters. Calls without
parameters are inspected for indexing and for values that are independent of the data.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from everlearn.core.parameters import Params
from everlearn.curvature.per_example.convolution import Convolution, expand_size, same_padding
from everlearn.curvature.per_example.indexing import IndexedAxis, find_indexed_axes, has_tensor_bounds
from everlearn.curvature.per_example.operations import Broadcast, Embedding, Expansion, Linear, Norm, Operation

Call = Callable[..., Any]
Handler = Callable[[Operation, Call, tuple[Any, ...], dict[str, Any]], Any]

ARITHMETIC = {
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__),
    *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__),
    *(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, torch.div, Tensor.div, Tensor.__truediv__),
}
IN_PLACE = {Tensor.add_, Tensor.__iadd__, Tensor.mul_, Tensor.__imul__}

# Calls that write into a tensor, or return its memory for writing.
WRITES = re.compile(r"__setitem__|__i\w+__|\w*[^_]_|numpy|__array__|__dlpack__")

# Calls that convert data to Python values, on which the rest of the forward pass may depend.
READS = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__contains__", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
}

# Constructors whose result is independent of the data. torch.tensor is not, it may get numbers read from the data.
CONSTANT_CONSTRUCTORS = {"arange", "zeros", "ones", "full", "eye"}
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
TRANSPOSES = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
HARMLESS = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]

# Number of dimensions, and whether it is transposed.
CONVOLUTIONS: dict[Call, tuple[int, bool]] = {
    torch.conv1d: (1, False), torch.conv2d: (2, False), torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True), torch.conv_transpose2d: (2, True), torch.conv_transpose3d: (3, True),
}  # fmt: skip

# Arguments after the input.
NORMS: dict[Call, tuple[str, ...]] = {
    F.layer_norm: ("normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("normalized_shape", "weight", "eps"),
    F.group_norm: ("num_groups", "weight", "bias", "eps"),
    F.batch_norm: ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
}


class Interceptor(TorchFunctionMode):
    """Pass every recognized operation to a handler, and collect the parameters of unknown ones.

    Args:
        parameters: to track, by name.
        handler: called with the operation and its call; makes the call and returns the result.
        constants: tensors that are independent of the data, such as buffers.

    Attributes:
        unknown: parameters in calls that are not recognized.
        indexed_axes: axes that were indexed.
        data_reads: names of calls that converted data to Python values.
    """

    def __init__(self, parameters: Params, handler: Handler, constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.unknown = set[str]()
        self.indexed_axes: list[IndexedAxis] = []
        self.data_reads: list[str] = []
        self._handler = handler

        # Name by tensor id, and whether the tensor is a transposed view of the parameter.
        self._tracked = {id(p): (name, False) for name, p in parameters.items()}

        # References to the transposed views, so that no other tensor gets their id.
        self._transposed_views: list[Tensor] = []

        # Tensors that are independent of the data, by the address of their memory.
        self._constants: dict[int, Tensor] = {}
        self._add_constants(constants)

    def __torch_function__(self, func: Call, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*_iterate_tensors((args, kwargs))]
        names = {self._tracked[id(tensor)][0] for tensor in tensors if id(tensor) in self._tracked}
        self.indexed_axes += find_indexed_axes(func, args, kwargs, self.is_constant)

        function_name = getattr(func, "__name__", "")
        reads_values = function_name in READS or has_tensor_bounds(function_name, args)
        if reads_values and not all(map(self.is_constant, tensors)):
            self.data_reads.append(function_name)

        if not names:
            result = func(*args, **kwargs)
            self._update_constants(function_name, tensors, kwargs, result)
            return result

        # Inside a custom autograd function, whose backward pass does not follow from these calls.
        if not torch.is_grad_enabled():
            self.unknown |= names
            return func(*args, **kwargs)

        operation = self._recognize(func, args, kwargs)
        if operation is not None:
            return self._handler(operation, func, args, kwargs)
        if isinstance(func, types.FunctionType) and func.__module__ == F.__name__:
            with self:
                return _without_override(func)(*args, **kwargs)

        result = func(*args, **kwargs)
        if func in TRANSPOSES and args[0].dim() == 2:
            name, is_transposed = self._tracked[id(args[0])]
            self._tracked[id(result)] = (name, not is_transposed)
            self._transposed_views.append(result)
        elif func not in HARMLESS and any(True for _ in _iterate_tensors(result)):
            self.unknown |= names
        return result

    def _update_constants(self, name: str, tensors: list[Tensor], kwargs: dict[str, Any], result: Any) -> None:
        """Track which tensors are independent of the data after a call without parameters.

        The result is if all arguments are. A tensor that is written to, through any view of its memory, no longer is.
        """
        if WRITES.fullmatch(name) or kwargs.get("out") is not None:
            for tensor in [*_iterate_tensors(kwargs.get("out")), *tensors[:1]]:
                address = _memory_address(tensor)
                if address is not None:
                    self._constants.pop(address, None)
            return

        has_constant_arguments = bool(tensors) and all(map(self.is_constant, tensors))
        if has_constant_arguments or (not tensors and name in CONSTANT_CONSTRUCTORS):
            self._add_constants(_iterate_tensors(result))

    def _add_constants(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that are independent of the data."""
        for tensor in tensors:
            address = _memory_address(tensor)
            if address is not None:
                self._constants[address] = tensor

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is independent of the data."""
        return _memory_address(tensor) in self._constants

    def _name(self, tensor: Any) -> str | None:
        """Return the name of a tracked parameter, or None for other values."""
        if id(tensor) in self._tracked:
            return self._tracked[id(tensor)][0]
        return None

    def _is_transposed(self, tensor: Any) -> bool:
        """Whether a value is a transposed view of a tracked parameter."""
        return id(tensor) in self._tracked and self._tracked[id(tensor)][1]

    def _names_by_role(self, **tensors: Any) -> dict[str, str]:
        """Return the names of the tracked parameters among these tensors, by role."""
        names = {role: self._name(tensor) for role, tensor in tensors.items()}
        return {role: name for role, name in names.items() if name is not None}

    def _recognize(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
        """Return the operation that a call is, or None."""
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in PRODUCTS and len(args) == 2:
            x, weight = args
            if weight.dim() != 2 or x.dim() < 2:
                return None
            return self._linear(x, weight, transposed=True)
        if func is torch.addmm and len(args) == 3 and not kwargs:
            bias, x, weight = args
            if bias.dim() != 1:
                return None
            return self._linear(x, weight, bias, transposed=True)
        if func in CONVOLUTIONS:
            return self._convolution(*CONVOLUTIONS[func], *args, **kwargs)
        if func in NORMS:
            return self._norm(func, *args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func in ARITHMETIC and len(args) == 2 and not kwargs:
            return self._arithmetic(func, *args)
        if func is Tensor.expand and not kwargs:
            return self._expansion(*args)
        return None

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Linear | None:
        if self._name(x) or weight.dim() != 2:
            return None
        return Linear(self._names_by_role(weight=weight, bias=bias), x, transposed != self._is_transposed(weight))

    def _convolution(
        self,
        num_dims: int,
        transposed: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Convolution | None:
        option_names: tuple[str, ...] = ("dilation", "groups")
        if transposed:
            option_names = ("output_padding", "groups", "dilation")
        options: dict[str, Any] = {"output_padding": 0, "groups": 1, "dilation": 1}
        options |= dict(zip(option_names, args, strict=False))
        options |= kwargs

        dilation = expand_size(options["dilation"], num_dims)
        if padding == "same":
            padding = same_padding(dilation, weight.shape[2:])
        elif padding == "valid":
            padding = 0
        if self._name(input) or input.dim() != num_dims + 2 or padding is None:
            return None

        return Convolution(
            self._names_by_role(weight=weight, bias=bias),
            input,
            weight.detach(),
            stride=expand_size(stride, num_dims),
            padding=expand_size(padding, num_dims),
            dilation=dilation,
            groups=options["groups"],
            transposed=transposed,
            output_padding=expand_size(options["output_padding"], num_dims),
        )

    def _norm(self, func: Call, input: Tensor, *args: Any, **kwargs: Any) -> Norm | None:
        if self._name(input):
            return None
        options = dict(zip(NORMS[func], args, strict=False)) | kwargs
        if options.get("training"):
            raise ValueError(
                "A BatchNorm without running statistics mixes the examples of a batch, so there are no per-example "
                "gradients: use track_running_stats=True, or a norm over single examples (GroupNorm, LayerNorm)."
            )

        weight = options.pop("weight", None)
        bias = options.pop("bias", None)
        names = self._names_by_role(weight=weight, bias=bias)
        affine_parameter = bias
        if weight is not None:
            affine_parameter = weight
        shape = tuple(affine_parameter.shape)
        per_channel = "normalized_shape" not in NORMS[func]
        return Norm(names, input, partial(func, **options), shape, per_channel)

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Embedding | None:
        if max_norm is not None or scale_grad_by_freq or self._is_transposed(weight):
            return None
        if padding_idx is not None and padding_idx < 0:
            padding_idx += len(weight)
        return Embedding(self._names_by_role(weight=weight), input, len(weight), padding_idx, self.is_constant(input))

    def _arithmetic(self, func: Call, a: Any, b: Any) -> Broadcast | None:
        if self._name(a):
            arg_index = 0
            parameter = a
            x = b
        else:
            arg_index = 1
            parameter = b
            x = a

        if not isinstance(x, Tensor) or self._name(x) or self._is_transposed(parameter):
            return None
        if arg_index == 0 and func in IN_PLACE:
            return None
        if parameter.dim() > x.dim() or (parameter.dim() == x.dim() and len(parameter) != 1):
            return None
        return Broadcast(self._names_by_role(weight=parameter), x, tuple(parameter.shape), arg_index)

    def _expansion(self, parameter: Tensor, *sizes: Any) -> Expansion | None:
        size = list(sizes)
        if isinstance(sizes[0], (tuple, list)):
            size = list(sizes[0])
        adds_axis = len(size) == parameter.dim() + 1
        expands_first_axis = len(size) == parameter.dim() and len(parameter) == 1
        if self._is_transposed(parameter) or not (adds_axis or expands_first_axis):
            return None
        return Expansion(self._names_by_role(weight=parameter), parameter, tuple(parameter.shape))


def _memory_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage, which all its views share; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # sparse or fake tensors
        return None


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _iterate_tensors(element)
    elif isinstance(value, dict):
        yield from _iterate_tensors(list(value.values()))


@cache
def _without_override(function: types.FunctionType) -> types.FunctionType:
    """Copy a function of ``torch.nn.functional`` so that the mode intercepts its calls, not the function itself."""

    def return_false(*args: Any, **kwargs: Any) -> bool:
        return False

    override_checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(override_checks, return_false)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
