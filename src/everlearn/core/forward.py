"""Call a model with one tensor, several inputs, or a dict of inputs as Hugging Face models take it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from everlearn.core.parameters import Params, unwrap

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def forward(model: nn.Module, x: Any, state: Params | None = None) -> Tensor:
    """Compute the outputs of a model, which must return a tensor or an object with a tensor ``.logits``.

    Args:
        model: any module.
        x: inputs: a tensor; a dict, passed as keyword arguments if the model has arguments of these names; or a tuple
            or list, passed as positional arguments if the model requires several inputs.
        state: parameters and buffers by name, used instead of the model's own.
    """
    args: tuple[Any, ...] = (x,)
    kwargs: dict[str, Any] = {}
    if not isinstance(x, Tensor):
        args, kwargs = arguments(model, x)

    if state is None:
        return read_outputs(model(*args, **kwargs))
    return read_outputs(functional_call(model, state, args, kwargs))


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split inputs into the positional and keyword arguments of a model.

    >>> class Pair(nn.Module):
    ...     def forward(self, left, right): ...
    >>> arguments(Pair(), {"left": 1, "right": 2}), arguments(Pair(), (1, 2)), arguments(nn.Linear(1, 1), {"left": 1})
    (((), {'left': 1, 'right': 2}), ((1, 2), {}), (({'left': 1},), {}))
    """
    is_named = isinstance(x, Mapping) and bool(x) and all(isinstance(key, str) for key in x)
    if is_named and _accepts_names(model, set(x)):
        return (), dict(x)

    # A DataLoader turns tuples into lists.
    is_several = isinstance(x, (tuple, list)) and len(x) > 1
    if is_several and _requires_several(model, len(x)):
        return tuple(x), {}

    return (x,), {}


def _forward_parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Signature of ``forward``; of the wrapped module's if a wrapper, such as PEFT's, passes all arguments on."""
    model = unwrap(model)
    while True:
        parameters = list(inspect.signature(model.forward).parameters.values())
        children = list(model.children())
        has_explicit_parameter = any(p.kind in (*POSITIONAL, *NAMED) for p in parameters)
        if len(children) != 1 or has_explicit_parameter:
            return parameters
        model = unwrap(children[0])


def _accepts_names(model: nn.Module, names: set[str]) -> bool:
    """Whether the model can be called with keyword arguments of these names."""
    parameters = _forward_parameters(model)
    parameter_names = {p.name for p in parameters if p.kind in NAMED}
    if names <= parameter_names:
        return True

    # With **kwargs any name is accepted; at least one must be explicit, or no parameter may be positional.
    has_var_keyword = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    has_positional = any(p.kind in POSITIONAL for p in parameters)
    return has_var_keyword and (bool(names & parameter_names) or not has_positional)


def _requires_several(model: nn.Module, count: int) -> bool:
    """Whether the model requires more than one input and accepts this many."""
    positional = [p for p in _forward_parameters(model) if p.kind in POSITIONAL]
    required = sum(p.default is inspect.Parameter.empty for p in positional)
    return 1 < required <= count <= len(positional)


def read_outputs(outputs: Any) -> Tensor:
    """Extract the tensor of outputs from a model's return value: itself or its ``.logits``."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise TypeError(
        f"The model must give a tensor of outputs, it gave a {type(outputs).__name__} without a tensor of .logits: "
        "wrap it in a module whose forward(x) returns only the outputs."
    )


def next_token_labels(labels: Tensor) -> Tensor:
    """Shift labels by one position, so that each is the next token; the last label is ignored (-100).

    >>> import torch
    >>> next_token_labels(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    return F.pad(labels[..., 1:], (0, 1), value=-100)


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model shifts labels by one position in its own loss, as causal models of transformers do."""
    base_model: Any = unwrap(model)
    if hasattr(base_model, "get_base_model"):
        base_model = base_model.get_base_model()

    loss_type = getattr(base_model, "loss_type", None)
    if loss_type is None:
        return type(base_model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    return bool(loss_type == "ForCausalLM")


def check_next_tokens(model: nn.Module, x: Any, y: Tensor | None) -> None:
    """Raise ValueError if a causal language model gets its inputs as labels: it would learn to repeat them.

    Such a model shifts labels by one position in its own loss. A loss of its logits needs labels that are shifted.
    """
    if y is None or not isinstance(x, Mapping) or not shifts_labels(model):
        return
    tokens = x.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.shape != y.shape or tokens.shape[-1] < 2:
        return

    # Constant sequences equal their shifted labels and are accepted.
    is_counted = y != -100
    is_varied = bool((tokens[..., 1:] != tokens[..., :-1]).any())
    if is_varied and bool(is_counted.any()) and bool((tokens == y)[is_counted].all()):
        raise ValueError(
            f"The labels of {type(unwrap(model)).__name__} equal its inputs. It shifts labels by one position in its "
            "own loss, but this loss is computed from its logits: give "
            "everlearn.integrations.huggingface.Pairs(loader, model), which shifts them, or labels that are the next "
            "tokens."
        )
