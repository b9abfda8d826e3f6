"""Picking: calls that take out, or write to, some places of an axis, so that others may stand there than did before.

Where examples are on such an axis, nobody knows which of them come out where: the numbers may be made of the data, and an
order that leaves two examples in place may move the third. Where the numbers come from is not asked, a Python list would
not tell; only ``x[torch.arange(len(x)), …]``, which takes all in their order, is no picking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FLAT = {"take", "put", "masked_select", "masked_scatter"}  # as if the tensor had one axis
ALONG: dict[str, tuple[int, int | None]] = {  # where the axis is among the arguments, and which it is if not given
    **dict.fromkeys(("index_select", "gather", "select", "narrow"), (1, None)),
    **dict.fromkeys(("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"), (1, None)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), (2, 0)),
    **dict.fromkeys(("take_along_dim", "roll"), (2, None)),
    "unbind": (1, 0), "sort": (1, -1), "topk": (2, -1), "repeat_interleave": (2, None),
}  # fmt: skip


class Pick(NamedTuple):
    """The length of an axis that something was picked from, and whether by a slice."""

    length: int
    sliced: bool = False


def picked(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_constant: Callable[[Tensor], bool]
) -> list[Pick]:
    """The axes that a call picks from.

    >>> x, never = torch.zeros(2, 3, 5), lambda t: False
    >>> picked(Tensor.__getitem__, (x, (slice(None), [2, 0])), {}, never)
    [Pick(length=3, sliced=False)]
    >>> picked(torch.gather, (x, -1, x.long()), {}, never)
    [Pick(length=5, sliced=False)]
    """
    name = getattr(func, "__name__", "")
    name = name if name.endswith("__") else name.removesuffix("_")
    if name == "__getitem__" or (name == "__setitem__" and not _is_number(args[2])):
        return _indexed(args[0], args[1] if isinstance(args[1], tuple) else (args[1],), is_constant)
    if name == "index_put":
        given = args[1] if len(args) > 1 else kwargs["indices"]
        return _indexed(args[0], tuple(slice(None) if entry is None else entry for entry in given), is_constant)
    if func is F.embedding:
        return [Pick(len(args[1] if len(args) > 1 else kwargs["weight"]))]
    source = args[0] if args else kwargs.get("input")
    if not isinstance(source, Tensor) or not source.dim():
        return []
    if name == "repeat_interleave" and _is_number(args[1] if len(args) > 1 else kwargs.get("repeats")):
        return []  # all rows equally often
    if name in FLAT:
        return [Pick(source.numel())]
    return _along(source, *ALONG[name], args, kwargs) if name in ALONG else []


def has_bounds(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call cuts a slice whose bounds are tensors, numbers that the data may have made.

    >>> x = torch.zeros(2, 3)
    >>> has_bounds("__getitem__", (x, (slice(None), slice(torch.tensor(2)))))
    True
    """
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    slices = [entry for entry in index if isinstance(entry, slice)]
    return any(isinstance(bound, Tensor) for s in slices for bound in (s.start, s.stop, s.step))


def count(picks: list[Pick]) -> int:
    """How many there are, but for slices, which take all or not as sizes are."""
    return sum(not pick.sliced for pick in picks)


def _along(source: Tensor, place: int, default: int | None, args: Any, kwargs: Any) -> list[Pick]:
    given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", default))
    if given is None:
        return [Pick(source.numel())]
    return [Pick(source.shape[axis]) for axis in (given if isinstance(given, (tuple, list)) else (given,))]


def _indexed(source: Tensor, index: tuple[Any, ...], is_constant: Callable[[Tensor], bool]) -> list[Pick]:
    """The axes that are not taken as they are."""
    spare = source.dim() - sum(map(_axes, index))  # what an ellipsis stands for
    found: list[Pick] = []
    axis = 0
    for entry in index:
        taken = source.shape[axis : axis + (spare if entry is Ellipsis else _axes(entry))]
        axis += len(taken)
        if entry is not Ellipsis and not all(_is_whole(entry, length, is_constant) for length in taken):
            found += [Pick(length, isinstance(entry, slice)) for length in taken]
    return found


def _is_whole(entry: Any, length: int, is_constant: Callable[[Tensor], bool]) -> bool:
    """Whether all of an axis is taken, in its order."""
    if isinstance(entry, slice):
        return entry.indices(length) == (0, length, 1)
    if not isinstance(entry, Tensor) or entry.numel() != length or not is_constant(entry):
        return False
    return torch.equal(entry.flatten(), torch.arange(length, device=entry.device))  # along whatever axis


def _axes(entry: Any) -> int:
    """How many axes an entry of an index is for."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _is_number(value: Any) -> bool:
    """Whether it is the same wherever it is written."""
    return value.numel() == 1 if isinstance(value, Tensor) else True
