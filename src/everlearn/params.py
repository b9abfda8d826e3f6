"""Parameters by name: the one currency of snapshots, importances, masks and gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real

import torch
from torch import Tensor, nn

Params = dict[str, Tensor]


# Wrappers whose packages take long to import, or may not be there: the class, and the attribute that holds the user's module.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.optim.swa_utils.AveragedModel": "module",
    "lightning.fabric.wrappers._FabricModule": "_original_module",
    "lightning_fabric.wrappers._FabricModule": "_original_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of wrappers inside a model


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside a wrapper that hands its inputs on as they are.

    These are ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, ``AveragedModel``, Lightning Fabric and
    DeepSpeed, known by their classes. Any other module that holds one, whatever it calls it, is a model of its own: it may do
    something with its inputs and outputs. ``FullyShardedDataParallel`` stays on too, since its forward pass gathers the weights.

    >>> net = nn.Linear(2, 1)
    >>> unwrap(nn.DataParallel(net)) is net
    True
    """
    while (attribute := _wrapped(type(model))) is not None:
        model = getattr(model, attribute)
    return model


def _wrapped(kind: type) -> str | None:
    """The attribute of a wrapper's class that holds the user's module; None for any other class."""
    if issubclass(kind, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def named(model: nn.Module) -> Params:
    """The trainable parameters by name; the names do not depend on how the model is wrapped.

    >>> list(named(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    return {name: p for name, p in named_with_frozen(model).items() if p.requires_grad}


def named_with_frozen(model: nn.Module) -> Params:
    """All parameters by name, frozen ones too."""
    inner = unwrap(model)
    if hasattr(inner, "reshard"):  # FSDP leaves some whole after a forward pass
        for reshard in [getattr(module, "reshard", None) for module in inner.modules()]:
            if callable(reshard):
                reshard()
    return {_bare(name): p for name, p in inner.named_parameters()}


def snapshot(model: nn.Module) -> Params:
    """A copy of the trainable parameters, which later steps cannot change."""
    return {name: p.detach().clone() for name, p in named(model).items()}


def remembered(
    model: nn.Module, anchor: Params, parameters: Params | None = None, widened: set[str] | None = None
) -> Params:
    """The model's parameters, or those given if their names are known already, that have an anchor; in its shape, differentiable.

    A parameter that has no anchor is left out, and so are the rows by which one has grown since: what is new is free. What is
    frozen is left out too. An anchor none of whose names the model has is a mistake and raises, and so does a layer that has
    changed in anything but its number of outputs. Inputs that ``growth.widen`` has added are known by their zeros, and names of
    such layers are noted in ``widened``, because those zeros learn.
    """
    parameters = named(model) if parameters is None else parameters
    known = {name: _old_rows(name, p, anchor[name], widened) for name, p in parameters.items() if name in anchor}
    if anchor and not known and not set(anchor) & set(named_with_frozen(model)):
        raise ValueError(
            f"None of the remembered parameters ({_some(anchor)}) is a trainable parameter of this "
            f"{type(unwrap(model)).__name__} ({_some(named(model))}): give the model the method was trained with."
        )
    return known


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; outside, every module's mode as before."""
    learning = [m for m in model.modules() if m.training]
    for module in learning:
        module.training = False
    try:
        yield
    finally:
        for module in learning:
            module.training = True


def grown(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in a larger shape, zero where it was not.

    >>> import torch
    >>> grown(torch.ones(1, 2), (2, 3))
    tensor([[1., 1., 0.],
            [0., 0., 0.]])
    """
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    whole = tensor.new_zeros(tuple(shape))
    corner(whole, tensor.shape).copy_(tensor)
    return whole


def corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The part of a tensor that has this smaller shape: what a parameter was before it grew; not a copy.

    >>> import torch
    >>> corner(torch.arange(6).view(2, 3), (1, 2))
    tensor([[0, 1]])
    """
    return tensor[tuple(slice(length) for length in shape)]


def wide(tensor: Tensor) -> torch.dtype:
    """What to sum in: at least float32, because a long sum in half precision stops growing."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes have shares of it (``fully_shard``): a DTensor, by what it can do, since its module takes long to import."""
    return hasattr(tensor, "full_tensor")


def refuse_sharded(parameters: Iterable[Tensor], who: str) -> None:
    """Say so where parameters would have to be whole."""
    if any(map(is_sharded, parameters)):
        raise ValueError(
            f"{who} needs whole parameters, and these are sharded (FSDP): use SI or L2, or EWC and MAS with importances of a copy "
            "that is not sharded."
        )


def refuse_meta(tensors: Iterable[Tensor]) -> None:
    """Say so where a model has shapes only."""
    if any(v.is_meta for v in tensors):
        raise ValueError(
            "The model is on the meta device, where parameters have shapes but no values: model.to_empty(device=…) and load its "
            "weights, or build it outside torch.device('meta')."
        )


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's share of a tensor that it has whole, where the parameter is sharded."""
    if not is_sharded(parameter) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def on_shares(function: Callable[[Tensor], Tensor], sharded: Tensor) -> Tensor:
    """A function of each number for itself, of every process's share."""
    local, mesh, placements = sharded.to_local(), sharded.device_mesh, sharded.placements  # type: ignore[attr-defined]
    facts = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
    return type(sharded).from_local(function(local), mesh, placements, **facts)  # type: ignore[attr-defined, no-any-return]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b, of complex numbers the real part of aᴴ b, over all processes where these have shares.

    >>> import torch
    >>> inner(torch.ones(2, 2), torch.full((2, 2), 3.0))
    tensor(12.)
    """
    if is_sharded(a):
        return (a * b).sum().full_tensor()  # type: ignore[attr-defined, no-any-return]
    if a.is_complex():
        return torch.vdot(a.reshape(-1), b.reshape(-1)).real
    return torch.dot(a.reshape(-1), b.reshape(-1))


def squared_size(tensor: Tensor) -> Tensor:
    """Every number's square, or |z|² of complex ones.

    >>> import torch
    >>> squared_size(torch.tensor([3 + 4j]))
    tensor([25.])
    """
    return tensor.abs().square() if tensor.is_complex() else tensor.square()


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Nothing can be remembered at a place that is no number."""
    refuse_meta(parameters.values())
    if not all(v.isfinite().all() for v in parameters.values()):
        raise FloatingPointError(
            "The weights are no longer finite: lower the learning rate or the strength of the method, or clip gradients."
        )


def matching(names: Iterable[str], only: str | Mapping[str, float] | None) -> dict[str, float]:
    """The names that a pattern matches, each with its weight; None matches all.

    ``*`` stands for any characters. Of a mapping from patterns to weights the last match counts; weight 0 leaves out. A
    pattern that matches nothing is a mistake and raises.

    >>> matching(["body.w", "head.w"], "body.*")
    {'body.w': 1.0}
    >>> matching(["body.w", "head.w", "head.b"], {"*": 1.0, "head.*": 0.1, "*.b": 0})
    {'body.w': 1.0, 'head.w': 0.1}
    """
    names = list(names)
    patterns = only if isinstance(only, Mapping) else {"*" if only is None else only: 1.0}
    weights = dict.fromkeys(names, 0.0)
    for pattern, weight in patterns.items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ValueError(f"{pattern!r} matches no parameter; there are: {', '.join(names) or 'none'}.")
        if not isinstance(weight, Real) or not 0 <= weight < float("inf"):
            raise ValueError(f"The weight of {pattern!r} must be a number, 0 or more, got {weight!r}.")
        weights |= dict.fromkeys(matched, float(weight))
    if not any(weights.values()):
        raise ValueError(f"{only!r} leaves no parameter to hold; there are: {', '.join(names) or 'none'}.")
    return {name: weight for name, weight in weights.items() if weight}


def check_growth(name: str, parameter: Tensor, old_shape: torch.Size) -> None:
    """Refuse a parameter that has changed since it was remembered in anything but its number of rows.

    An output layer gets rows, and so does a table of embeddings; what the old ones mean stays. A layer with other inputs is
    another layer, whose old corner has nothing to do with what was remembered, unless nothing is read from the new inputs:
    so ``growth.widen`` leaves them.
    """
    shape = parameter.shape
    larger = len(shape) == len(old_shape) and all(new >= old for new, old in zip(shape, old_shape, strict=True))
    if larger and shape[1:] == old_shape[1:]:
        return
    if larger:
        rows = corner(parameter.detach(), [*old_shape[:1], *shape[1:]])
        if rows.count_nonzero() == corner(rows, old_shape).count_nonzero():
            return
    raise ValueError(
        f"{name} has shape {tuple(shape)} and was remembered with shape {tuple(old_shape)}: between tasks a layer may get more "
        "outputs, as everlearn.heads.grow_output(model, outputs) gives them to the output layer, or units by everlearn.growth.widen; "
        "it may not shrink, get other inputs or change its kind. Build the model in its final width before the first task, or begin "
        "anew with another method."
    )


def _old_rows(name: str, p: Tensor, anchor: Tensor, widened: set[str] | None) -> Tensor:
    if p.shape == anchor.shape:
        return p
    if widened is None or name not in widened:
        check_growth(name, p, anchor.shape)
        if widened is not None:
            widened.add(name)
    return corner(p, anchor.shape)


def _bare(name: str) -> str:
    """A parameter's name without what wrappers inside the model add to it."""
    for prefix in _PREFIXES:
        if prefix in name:
            name = name.removeprefix(prefix).replace(f".{prefix}", ".")
    return name


def _some(names: Params) -> str:
    return ", ".join([*list(names)[:3], *(["…"] if len(names) > 3 else [])]) or "none"
