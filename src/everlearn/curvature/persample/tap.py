"""Tapping operations: a mode that sees every torch call in which a tracked parameter takes part.

Modules are not asked, so functional calls, shared weights and attention are seen like any layer. A call is recognised
as one of the ``operations``; a Python function of ``torch.nn.functional`` that is not is opened, so that the calls
inside it are seen; anything else is an unknown use of the parameters in it. The other calls are looked at for what is
picked in them, and for numbers that are the same for all examples.
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

from everlearn.curvature.persample.convolution import Convolution, same_padding, spread
from everlearn.curvature.persample.operations import Broadcast, Embedding, Expansion, Linear, Norm, Operation
from everlearn.curvature.persample.picks import Pick, has_bounds, picked
from everlearn.params import Params

Call = Callable[..., Any]
Handle = Callable[[Operation, Call, tuple[Any, ...], dict[str, Any]], Any]

ARITHMETIC = {
    *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__),
    *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__),
    *(torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, torch.div, Tensor.div, Tensor.__truediv__),
}
IN_PLACE = {Tensor.add_, Tensor.__iadd__, Tensor.mul_, Tensor.__imul__}
WRITES = re.compile(r"__setitem__|__i\w+__|\w*[^_]_|numpy|__array__|__dlpack__")  # or hands out its memory for it
READS = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__contains__", "is_nonzero", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
}  # numbers of Python, on which the rest of the forward pass may depend
MADE_OF_NUMBERS = {"arange", "zeros", "ones", "full", "eye"}  # torch.tensor may be given numbers read from the data
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
TURNED = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
HARMLESS = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


class Tap(TorchFunctionMode):
    """Hand every recognised operation to ``meet`` and remember the parameters of unknown ones.

    Args:
        parameters: those tracked, by name.
        meet: called with the operation and the call behind it; does the call and returns its result.
        constants: tensors that do not depend on the data, such as buffers.
    """

    def __init__(self, parameters: Params, meet: Handle, constants: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.meet, self.unknown = meet, set[str]()
        self.picks: list[Pick] = []
        self.reads: list[str] = []  # calls that read numbers of the data
        self._known = {id(p): (name, False) for name, p in parameters.items()}  # False: as it is, True: transposed
        self._alive: list[Tensor] = []  # transposed views, kept so that their ids stay theirs
        self._constant: dict[int | None, Tensor] = {
            memory: t for t in constants if (memory := _memory(t))
        }  # and what is made of them alone

    def __torch_function__(self, func: Call, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [*_tensors((args, kwargs))]
        met = {self._known[id(t)][0] for t in used if id(t) in self._known}
        self.picks += picked(func, args, kwargs, self.is_constant)
        if (name := getattr(func, "__name__", "")) in READS or has_bounds(name, args):
            self.reads += [name] if not all(map(self.is_constant, used)) else []
        if not met:
            return self._followed(func, used, kwargs, func(*args, **kwargs))
        if not torch.is_grad_enabled():  # inside a custom function: its backward pass is not made of what is seen here
            self.unknown |= met
            return func(*args, **kwargs)
        if (operation := self._recognise(func, args, kwargs)) is not None:
            return self.meet(operation, func, args, kwargs)
        if isinstance(func, types.FunctionType) and func.__module__ == F.__name__:
            with self:
                return _opened(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in TURNED and args[0].dim() == 2:
            name, turned = self._known[id(args[0])]
            self._known[id(result)] = (name, not turned)
            self._alive.append(result)
        elif func not in HARMLESS and any(True for _ in _tensors(result)):
            self.unknown |= met
        return result

    def _followed(self, func: Call, used: list[Tensor], kwargs: dict[str, Any], result: Any) -> Any:
        """The result, known as a constant if it is made of constants, or of numbers in a way that data have no part in.

        Whoever writes into a tensor, through whatever view of its memory, may write data.
        """
        name = getattr(func, "__name__", "")
        if WRITES.fullmatch(name) or kwargs.get("out") is not None:
            for tensor in [*_tensors(kwargs.get("out")), *used[:1]]:
                self._constant.pop(_memory(tensor), None)
        elif all(map(self.is_constant, used)) if used else name in MADE_OF_NUMBERS:
            self._constant |= {memory: t for t in _tensors(result) if (memory := _memory(t))}
        return result

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it is the same whatever the data are."""
        return _memory(tensor) in self._constant

    def _name(self, tensor: Any) -> str | None:
        return self._known[id(tensor)][0] if id(tensor) in self._known else None

    def _is_turned(self, tensor: Any) -> bool:
        return id(tensor) in self._known and self._known[id(tensor)][1]

    def _roles(self, **tensors: Any) -> dict[str, str]:
        return {role: name for role, t in tensors.items() if (name := self._name(t)) is not None}

    def _recognise(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation | None:
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in PRODUCTS and len(args) == 2:
            return self._product(*args)
        if func is torch.addmm and len(args) == 3 and not kwargs:
            bias, x, weight = args
            return self._linear(x, weight, bias, turned=True) if bias.dim() == 1 else None
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

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, turned: bool = False) -> Linear | None:
        if self._name(x) or weight.dim() != 2:
            return None
        return Linear(self._roles(weight=weight, bias=bias), x, turned != self._is_turned(weight))

    def _product(self, a: Tensor, b: Tensor) -> Linear | None:
        return self._linear(a, b, turned=True) if b.dim() == 2 and a.dim() >= 2 else None

    def _convolution(
        self,
        space: int,
        transposed: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **named: Any,
    ) -> Convolution | None:
        order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        given = {"output_padding": 0, "groups": 1, "dilation": 1, **dict(zip(order, rest, strict=False)), **named}
        dilation = spread(given["dilation"], space)
        if padding == "same":
            padding = same_padding(dilation, weight.shape[2:])
        if self._name(input) or input.dim() != space + 2 or padding is None:
            return None
        return Convolution(
            self._roles(weight=weight, bias=bias), input, weight.detach(), spread(stride, space),
            [0] * space if padding == "valid" else spread(padding, space), dilation, given["groups"], transposed,
            spread(given["output_padding"], space),
        )  # fmt: skip

    def _norm(self, func: Call, input: Tensor, *args: Any, **kwargs: Any) -> Norm | None:
        if self._name(input):
            return None
        given = dict(zip(NORMS[func], args, strict=False)) | kwargs
        if given.get("training"):
            raise ValueError(
                "A BatchNorm without running statistics mixes the examples of a batch, so none has a gradient of its own: "
                "use track_running_stats=True, or a norm over single examples (GroupNorm, LayerNorm)."
            )
        weight, bias = given.get("weight"), given.get("bias")
        bare = {k: v for k, v in given.items() if k not in ("weight", "bias")}
        shape = tuple((weight if weight is not None else bias).shape)  # type: ignore[union-attr]
        per_channel = "normalized_shape" not in NORMS[func]
        return Norm(self._roles(weight=weight, bias=bias), input, partial(func, **bare), shape, per_channel)

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
        if max_norm is not None or scale_grad_by_freq or self._is_turned(weight):
            return None
        padding = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + len(weight)
        return Embedding(self._roles(weight=weight), input, len(weight), padding, self.is_constant(input))

    def _arithmetic(self, func: Call, a: Any, b: Any) -> Broadcast | None:
        place = 0 if self._name(a) else 1
        parameter, x = (a, b) if place == 0 else (b, a)
        if (
            not isinstance(x, Tensor)
            or self._name(x)
            or self._is_turned(parameter)
            or (place == 0 and func in IN_PLACE)
        ):
            return None
        if parameter.dim() > x.dim() or (parameter.dim() == x.dim() and len(parameter) != 1):
            return None
        return Broadcast(self._roles(weight=parameter), x, tuple(parameter.shape), place)

    def _expansion(self, parameter: Tensor, *sizes: Any) -> Expansion | None:
        size = list(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)
        new_axis = len(size) == parameter.dim() + 1
        one_to_many = len(size) == parameter.dim() and len(parameter) == 1
        if self._is_turned(parameter) or not (new_axis or one_to_many):
            return None
        return Expansion(self._roles(weight=parameter), parameter, tuple(parameter.shape))


CONVOLUTIONS: dict[Call, tuple[int, bool]] = {  # dimensions, transposed
    torch.conv1d: (1, False), torch.conv2d: (2, False), torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True), torch.conv_transpose2d: (2, True), torch.conv_transpose3d: (3, True),
}  # fmt: skip
NORMS: dict[Call, tuple[str, ...]] = {  # their arguments after the input
    F.layer_norm: ("normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("normalized_shape", "weight", "eps"),
    F.group_norm: ("num_groups", "weight", "bias", "eps"),
    F.batch_norm: ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
}


def _memory(tensor: Tensor) -> int | None:
    """Where its memory begins, which all its views share; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # sparse, or not there in earnest
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@cache
def _opened(function: types.FunctionType) -> types.FunctionType:
    """A copy of a function of ``torch.nn.functional`` that does not hand itself over to the mode, only what it calls."""

    def no(*args: Any, **kwargs: Any) -> bool:
        return False

    world = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), no)
    opened = types.FunctionType(
        function.__code__,
        {**function.__globals__, **world},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened
