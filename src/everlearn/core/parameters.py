"""Parameters by name, the representation of snapshots, importances, masks and gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real

import torch
from torch import Tensor, nn

Params = dict[str, Tensor]


# Wrappers that are recognized by name, because their packages are slow to import or may not be installed:
# the class, and the attribute that holds the user's module.
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.optim.swa_utils.AveragedModel": "module",
    "lightning.fabric.wrappers._FabricModule": "_original_module",
    "lightning_fabric.wrappers._FabricModule": "_original_module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}

# Prefixes that wrappers inside a model add to parameter names.
_WRAPPER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside wrappers that pass their inputs on unchanged.

    These are ``torch.compile``, ``DataParallel``, ``DistributedDataParallel``, ``AveragedModel``, Lightning Fabric and
    DeepSpeed, recognized by their classes. Any other module is a model of its own, since it may transform its inputs
    and outputs. ``FullyShardedDataParallel`` is kept too, since its forward pass gathers the weights.

    >>> net = nn.Linear(2, 1)
    >>> unwrap(nn.DataParallel(net)) is net
    True
    """
    attribute = _wrapped_attribute(type(model))
    while attribute is not None:
        model = getattr(model, attribute)
        attribute = _wrapped_attribute(type(model))
    return model


def _wrapped_attribute(module_type: type) -> str | None:
    """Name the attribute of a wrapper class that holds the user's module; None for any other class."""
    if issubclass(module_type, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    for base in module_type.__mro__:
        qualified_name = f"{base.__module__}.{base.__qualname__}"
        if qualified_name in _WRAPPERS:
            return _WRAPPERS[qualified_name]
    return None


def trainable_parameters(model: nn.Module) -> Params:
    """Trainable parameters by name; the names do not depend on wrappers of the model.

    >>> list(trainable_parameters(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    return {name: p for name, p in all_parameters(model).items() if p.requires_grad}


def all_parameters(model: nn.Module) -> Params:
    """All parameters by name, including frozen ones."""
    inner_model = unwrap(model)

    # FSDP leaves some parameters gathered after a forward pass.
    if hasattr(inner_model, "reshard"):
        for module in inner_model.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard):
                reshard()

    return {_strip_wrapper_prefixes(name): p for name, p in inner_model.named_parameters()}


def snapshot(model: nn.Module) -> Params:
    """Copy the trainable parameters."""
    return {name: p.detach().clone() for name, p in trainable_parameters(model).items()}


def remembered_parameters(
    model: nn.Module, anchor: Params, parameters: Params | None = None, widened: set[str] | None = None
) -> Params:
    """Select the trainable parameters that have an anchor, in the anchor's shape and differentiable.

    Parameters without an anchor are left out, and so are rows added since: they are not constrained. Raises ValueError
    if the model has none of the anchor's names, or if a layer has changed in anything but its number of outputs.
    Inputs added by ``resize.widen`` are recognized by their zero weights. Since training changes those weights, such
    layers are recorded in ``widened`` and not checked again.

    Args:
        model: the model.
        anchor: earlier values of parameters, by name.
        parameters: the model's trainable parameters, if they are known already.
        widened: names of layers that were checked already; extended in place.
    """
    if parameters is None:
        parameters = trainable_parameters(model)
    remembered = {}
    for name, p in parameters.items():
        if name in anchor:
            remembered[name] = _select_old_entries(name, p, anchor[name], widened)

    if anchor and not remembered and not set(anchor) & set(all_parameters(model)):
        raise ValueError(
            f"None of the remembered parameters ({_abbreviate_names(anchor)}) is a trainable parameter of this "
            f"{type(unwrap(model)).__name__} ({_abbreviate_names(trainable_parameters(model))}): "
            "give the model the method was trained with."
        )
    return remembered


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the context; restore the mode of every module afterwards."""
    training_modules = [module for module in model.modules() if module.training]
    for module in training_modules:
        module.training = False
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


def grown(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad a tensor with zeros to a larger shape.

    >>> import torch
    >>> grown(torch.ones(1, 2), (2, 3))
    tensor([[1., 1., 0.],
            [0., 0., 0.]])
    """
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    padded = tensor.new_zeros(tuple(shape))
    leading_block(padded, tensor.shape).copy_(tensor)
    return padded


def leading_block(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """View of a tensor's leading entries in a smaller shape: the entries of a parameter before it grew.

    >>> import torch
    >>> leading_block(torch.arange(6).view(2, 3), (1, 2))
    tensor([[0, 1]])
    """
    return tensor[tuple(slice(length) for length in shape)]


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype for sums: at least float32, because a long sum in half precision stops growing."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, divided among processes by ``fully_shard``."""
    # Checked by attribute, because the module of DTensor is slow to import.
    return hasattr(tensor, "full_tensor")


def has_sharded_parameters(model: nn.Module) -> bool:
    """Whether parameters are divided among processes, by ``fully_shard`` or by ``FullyShardedDataParallel``."""
    is_flattened = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return is_flattened or any(map(is_sharded, model.parameters()))


def refuse_sharded(model: nn.Module, caller: str) -> None:
    """Raise ValueError if parameters are sharded, in the name of the method or function that needs them whole."""
    if has_sharded_parameters(model):
        raise ValueError(
            f"{caller} needs whole parameters, and these are sharded (FSDP): use SI, L2, ER or DER, or EWC and MAS "
            "with importances of a copy that is not sharded."
        )


def refuse_meta(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if tensors are on the meta device."""
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            "The model is on the meta device, where parameters have shapes but no values: model.to_empty(device=…) and "
            "load its weights, or build it outside torch.device('meta')."
        )


def sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shard a full tensor like the parameter; return it unchanged if the parameter is not sharded."""
    if not is_sharded(parameter) or is_sharded(tensor):
        return tensor

    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    placements = parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def on_shares(function: Callable[[Tensor], Tensor], sharded: Tensor) -> Tensor:
    """Apply an elementwise function to the local shard of each process."""
    local_result = function(sharded.to_local())  # type: ignore[attr-defined]
    mesh = sharded.device_mesh  # type: ignore[attr-defined]
    placements = sharded.placements  # type: ignore[attr-defined]
    layout = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride()}
    return type(sharded).from_local(local_result, mesh, placements, **layout)  # type: ignore[attr-defined, no-any-return]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product aᵀ b over all entries, across processes if sharded; the real part of aᴴ b if complex.

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
    """Elementwise square; |z|² of complex numbers.

    >>> import torch
    >>> squared_size(torch.tensor([3 + 4j]))
    tensor([25.])
    """
    if tensor.is_complex():
        return tensor.abs().square()
    return tensor.square()


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raise FloatingPointError if a parameter is NaN or infinite, since it cannot serve as an anchor."""
    refuse_meta(parameters.values())
    if not all(p.isfinite().all() for p in parameters.values()):
        raise FloatingPointError(
            "The weights are no longer finite: lower the learning rate or the strength of the method, or clip "
            "gradients."
        )


def select_by_pattern(names: Iterable[str], only: str | Mapping[str, float] | None) -> dict[str, float]:
    """Select parameter names by pattern, with their weights.

    ``*`` matches any characters. A pattern that matches no name raises ValueError.

    Args:
        names: parameter names.
        only: a pattern; a mapping from patterns to weights, of which the last match counts and weight 0 excludes; or
            None for all names.

    >>> select_by_pattern(["body.w", "head.w"], "body.*")
    {'body.w': 1.0}
    >>> select_by_pattern(["body.w", "head.w", "head.b"], {"*": 1.0, "head.*": 0.1, "*.b": 0})
    {'body.w': 1.0, 'head.w': 0.1}
    """
    names = list(names)
    if only is None:
        only = "*"
    patterns = only if isinstance(only, Mapping) else {only: 1.0}

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
    """Raise ValueError if a parameter has changed since it was remembered in anything but its number of rows.

    New rows of an output layer or an embedding do not change the meaning of the old ones. A layer with more inputs is
    accepted only if the weights of the new inputs are zero, as ``resize.widen`` leaves them.
    """
    shape = parameter.shape
    is_larger = len(shape) == len(old_shape) and all(new >= old for new, old in zip(shape, old_shape, strict=True))
    if is_larger and shape[1:] == old_shape[1:]:
        return

    # With more inputs, all weights of the new inputs must be zero.
    if is_larger:
        old_rows = leading_block(parameter.detach(), [*old_shape[:1], *shape[1:]])
        if old_rows.count_nonzero() == leading_block(old_rows, old_shape).count_nonzero():
            return

    raise ValueError(
        f"{name} has shape {tuple(shape)} and was remembered with shape {tuple(old_shape)}: between tasks a layer may "
        "get more outputs, by everlearn.surgery.heads.grow_output(model, outputs) for the output layer, or more units, "
        "by everlearn.surgery.resize.widen. It may not shrink, get other inputs or change its type. Build the model in "
        "its final width before the first task, or start again with a new method."
    )


def _select_old_entries(name: str, p: Tensor, anchor: Tensor, widened: set[str] | None) -> Tensor:
    """Select the entries of a parameter that have an anchor; layers in ``widened`` are not checked again."""
    if p.shape == anchor.shape:
        return p
    if widened is None or name not in widened:
        check_growth(name, p, anchor.shape)
        if widened is not None:
            widened.add(name)
    return leading_block(p, anchor.shape)


def _strip_wrapper_prefixes(name: str) -> str:
    """Remove the prefixes that wrappers inside the model add to a parameter name."""
    for prefix in _WRAPPER_PREFIXES:
        if prefix in name:
            name = name.removeprefix(prefix).replace(f".{prefix}", ".")
    return name


def _abbreviate_names(names: Params) -> str:
    """List the first three names."""
    shown = list(names)[:3]
    if len(names) > 3:
        shown.append("…")
    return ", ".join(shown) or "none"
