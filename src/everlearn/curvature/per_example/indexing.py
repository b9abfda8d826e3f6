"""Detect indexing operations that could reorder examples.

Indexing selects from an axis, or writes to positions of it, so other rows may be there afterwards. If the examples are
on that axis, their order is unknown: the indices may depend on the data, and an order that leaves two examples in place
may move the third. The origin of the indices is not traced, because it cannot be for a Python list. The one exception
is ``x[torch.arange(len(x)), …]``, which selects all rows in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Calls that treat the tensor as if it had one axis.
FLAT_CALLS = {"take", "put", "masked_select", "masked_scatter"}

# Calls along an axis: its position among the arguments, and its default.
AXIS_CALLS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("index_select", "gather", "select", "narrow"), (1, None)),
    **dict.fromkeys(("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"), (1, None)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), (2, 0)),
    **dict.fromkeys(("take_along_dim", "roll"), (2, None)),
    "unbind": (1, 0), "sort": (1, -1), "topk": (2, -1), "repeat_interleave": (2, None),
}  # fmt: skip


class IndexedAxis(NamedTuple):
    """An axis that a call indexed.

    Args:
        length: of the axis.
        is_slice: whether it was indexed by a slice.
    """

    length: int
    is_slice: bool = False


def find_indexed_axes(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_constant: Callable[[Tensor], bool]
) -> list[IndexedAxis]:
    """Find the axes that a call indexes.

    Args:
        func: the torch function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_constant: whether a tensor is independent of the data.

    >>> x, never = torch.zeros(2, 3, 5), lambda t: False
    >>> find_indexed_axes(Tensor.__getitem__, (x, (slice(None), [2, 0])), {}, never)
    [IndexedAxis(length=3, is_slice=False)]
    >>> find_indexed_axes(torch.gather, (x, -1, x.long()), {}, never)
    [IndexedAxis(length=5, is_slice=False)]
    """
    name = getattr(func, "__name__", "")
    if not name.endswith("__"):
        name = name.removesuffix("_")

    # A number is the same at whatever position it is written.
    if name == "__getitem__" or (name == "__setitem__" and not _is_single_value(args[2])):
        return _find_subscript_axes(args[0], _as_tuple(args[1]), is_constant)
    if name == "index_put":
        indices = _argument(args, kwargs, 1, "indices")
        subscripts = tuple(slice(None) if entry is None else entry for entry in indices)
        return _find_subscript_axes(args[0], subscripts, is_constant)
    if func is F.embedding:
        return [IndexedAxis(len(_argument(args, kwargs, 1, "weight")))]

    source = _argument(args, kwargs, 0, "input")
    if not isinstance(source, Tensor) or not source.dim():
        return []
    if name == "repeat_interleave" and _is_single_value(_argument(args, kwargs, 1, "repeats")):
        return []  # every row equally often
    if name in FLAT_CALLS:
        return [IndexedAxis(source.numel())]
    if name in AXIS_CALLS:
        return _find_call_axes(source, *AXIS_CALLS[name], args, kwargs)
    return []


def has_tensor_bounds(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call has a slice whose bounds are tensors, which may depend on the data.

    >>> x = torch.zeros(2, 3)
    >>> has_tensor_bounds("__getitem__", (x, (slice(None), slice(torch.tensor(2)))))
    True
    """
    if name not in ("__getitem__", "__setitem__"):
        return False
    slices = [entry for entry in _as_tuple(args[1]) if isinstance(entry, slice)]
    return any(isinstance(bound, Tensor) for entry in slices for bound in (entry.start, entry.stop, entry.step))


def count_reorderings(indexed_axes: list[IndexedAxis]) -> int:
    """Count the indexed axes without slices, which select all or not depending on sizes."""
    return sum(not indexed.is_slice for indexed in indexed_axes)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """Return an argument given by position or by name; None if it is missing."""
    if len(args) > index:
        return args[index]
    return kwargs.get(name)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a subscript as a tuple of entries."""
    if isinstance(value, tuple):
        return value
    return (value,)


def _find_call_axes(source: Tensor, index: int, default: int | None, args: Any, kwargs: Any) -> list[IndexedAxis]:
    """Find the axes of a call that has a ``dim`` or ``dims`` argument."""
    dims = kwargs.get("dim", kwargs.get("dims", default))
    if len(args) > index:
        dims = args[index]
    if dims is None:
        return [IndexedAxis(source.numel())]
    if not isinstance(dims, (tuple, list)):
        dims = (dims,)
    return [IndexedAxis(source.shape[axis]) for axis in dims]


def _find_subscript_axes(
    source: Tensor, subscripts: tuple[Any, ...], is_constant: Callable[[Tensor], bool]
) -> list[IndexedAxis]:
    """Find the axes that a subscript does not select completely and in order."""
    num_ellipsis_axes = source.dim() - sum(map(_count_axes, subscripts))
    indexed_axes: list[IndexedAxis] = []
    axis = 0
    for entry in subscripts:
        if entry is Ellipsis:
            axis += num_ellipsis_axes
            continue
        lengths = source.shape[axis : axis + _count_axes(entry)]
        axis += len(lengths)
        if not all(_selects_all(entry, length, is_constant) for length in lengths):
            indexed_axes += [IndexedAxis(length, isinstance(entry, slice)) for length in lengths]
    return indexed_axes


def _selects_all(entry: Any, length: int, is_constant: Callable[[Tensor], bool]) -> bool:
    """Whether an entry of a subscript selects a complete axis, in its order."""
    if isinstance(entry, slice):
        return entry.indices(length) == (0, length, 1)
    if not isinstance(entry, Tensor) or entry.numel() != length or not is_constant(entry):
        return False
    return torch.equal(entry.flatten(), torch.arange(length, device=entry.device))


def _count_axes(entry: Any) -> int:
    """Number of axes that an entry of a subscript covers."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 1


def _is_single_value(value: Any) -> bool:
    """Whether a value is a number or a tensor with one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return True
