"""Parameters by name: the one currency of snapshots, importances, masks and gradients."""

from __future__ import annotations

from torch import Tensor, nn

Params = dict[str, Tensor]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside ``torch.compile``, ``DataParallel``, ``DistributedDataParallel`` and their like.

    >>> net = nn.Linear(2, 1)
    >>> unwrap(nn.DataParallel(net)) is net
    True
    """
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif [name for name, _ in model.named_children()] == ["module"] and not model._parameters:
            model = model.get_submodule("module")
        else:
            return model


def named(model: nn.Module) -> Params:
    """The trainable parameters by name; the names do not depend on how the model is wrapped.

    >>> list(named(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    return {name.replace("_orig_mod.", ""): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def snapshot(model: nn.Module) -> Params:
    """A copy of the trainable parameters, which later steps cannot change."""
    return {name: p.detach().clone() for name, p in named(model).items()}


def difference(model: nn.Module, anchor: Params) -> Params:
    """How far each parameter has moved from its anchor, differentiable in the model's parameters.

    A parameter that has no anchor is left out, and so are the rows by which one has grown since: what is new is free.
    An anchor none of whose names the model has is a mistake and raises.
    """
    moved = {name: _old_rows(p, anchor[name]) - anchor[name] for name, p in named(model).items() if name in anchor}
    if anchor and not moved:
        raise ValueError(
            f"None of the remembered parameters ({_some(anchor)}) is a trainable parameter of this "
            f"{type(unwrap(model)).__name__} ({_some(named(model))}): give the model the method was trained with."
        )
    return moved


def _old_rows(p: Tensor, anchor: Tensor) -> Tensor:
    if p.shape == anchor.shape:
        return p
    if p.dim() != anchor.dim() or any(new < old for new, old in zip(p.shape, anchor.shape, strict=True)):
        raise ValueError(
            f"A parameter of shape {tuple(p.shape)} was remembered with shape {tuple(anchor.shape)}: "
            "a layer may grow between tasks, not shrink or change its kind."
        )
    return p[tuple(slice(old) for old in anchor.shape)]


def _some(names: Params) -> str:
    return ", ".join([*list(names)[:3], *(["…"] if len(names) > 3 else [])]) or "none"
