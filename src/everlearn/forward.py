"""How a model is called: one tensor, several inputs, or a dict of them as Hugging Face's models take it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from everlearn.params import Params, unwrap

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def ask(model: nn.Module, x: Any, state: Params | None = None) -> Tensor:
    """The outputs of a model, which must be a tensor or have one as ``.logits``.

    Args:
        model: any module.
        x: its inputs: a tensor; a dict, which is spread over the model's arguments if it names them; or a tuple or list, which is
            spread if the model cannot be called with fewer inputs.
        state: parameters and buffers to call it with instead of its own, by name.
    """
    args, kwargs = ((x,), {}) if isinstance(x, Tensor) else arguments(model, x)
    out = model(*args, **kwargs) if state is None else functional_call(model, state, args, kwargs)
    return read_outputs(out)


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments with which a model takes these inputs.

    >>> class Pair(nn.Module):
    ...     def forward(self, left, right): ...
    >>> arguments(Pair(), {"left": 1, "right": 2}), arguments(Pair(), (1, 2)), arguments(nn.Linear(1, 1), {"left": 1})
    (((), {'left': 1, 'right': 2}), ((1, 2), {}), (({'left': 1},), {}))
    """
    if isinstance(x, Mapping) and x and all(isinstance(key, str) for key in x):
        return ((), dict(x)) if _takes_names(model, set(x)) else ((x,), {})
    if isinstance(x, (tuple, list)) and len(x) > 1:  # a DataLoader makes lists of tuples
        return (tuple(x), {}) if _takes_several(model, len(x)) else ((x,), {})
    return (x,), {}


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Of ``forward``; that of the module inside where it hands on whatever it is given, as PEFT's and Accelerate's do."""
    model = unwrap(model)
    while True:
        found = list(inspect.signature(model.forward).parameters.values())
        children = list(model.children())
        if len(children) != 1 or any(p.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY) for p in found):
            return found
        model = unwrap(children[0])


def _takes_names(model: nn.Module, names: set[str]) -> bool:
    parameters = _parameters(model)
    named = {
        p.name
        for p in parameters
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    if names <= named:
        return True
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return any_name and (bool(names & named) or not any(p.kind in POSITIONAL for p in parameters))


def _takes_several(model: nn.Module, count: int) -> bool:
    """Whether a call with a single input would miss some."""
    positional = [p for p in _parameters(model) if p.kind in POSITIONAL]
    required = sum(p.default is inspect.Parameter.empty for p in positional)
    return 1 < required <= count <= len(positional)


def read_outputs(out: Any) -> Tensor:
    """The tensor of outputs in what a model has returned: itself, or its ``.logits``."""
    if isinstance(out, Tensor):
        return out
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(
        f"The model must give a tensor of outputs, it gave a {type(out).__name__} without a tensor of .logits: wrap it in a module "
        "whose forward(x) returns the outputs alone."
    )


def next_token_labels(labels: Tensor) -> Tensor:
    """The label of each place is the next one; the last has none.

    >>> import torch
    >>> next_token_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    return F.pad(labels[..., 1:], (0, 1), value=-100)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model itself takes labels one place later, as transformers' causal ones do."""
    inner: Any = unwrap(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    name, kind = type(inner).__name__, getattr(inner, "loss_type", None)
    return kind == "ForCausalLM" or (kind is None and name.endswith(("LMHeadModel", "ForCausalLM")))


def check_next_tokens(model: nn.Module, x: Any, y: Tensor | None) -> None:
    """Refuse a causal language model's own inputs as its labels: it would learn to repeat them.

    Such a model shifts labels by one place when it takes its loss itself; whoever takes the loss of its logits must do so.
    """
    if y is None or not isinstance(x, Mapping) or not shifts_labels(model):
        return
    tokens = x.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.shape != y.shape or tokens.shape[-1] < 2:
        return
    counted = y != -100
    varied = bool((tokens[..., 1:] != tokens[..., :-1]).any())
    if varied and bool(counted.any()) and bool((tokens == y)[counted].all()):
        raise ValueError(
            f"The labels of {type(unwrap(model)).__name__} are its own inputs, which it shifts by one place when it takes the loss "
            "itself; here the loss is taken of its logits: give everlearn.integrations.huggingface.Pairs(loader, model), which shifts "
            "them, or labels that are the next tokens."
        )
