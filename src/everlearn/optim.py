"""Natural gradient descent: steepest descent in the metric of the Fisher information."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everlearn.core.data_source import Arrays
from everlearn.core.likelihood import Likelihood
from everlearn.core.parameters import Params, trainable_parameters, unwrap
from everlearn.curvature.fisher import FisherEstimator, Labels, Structure
from everlearn.curvature.full import Full
from everlearn.curvature.kronecker import Kronecker, SolveMethod
from everlearn.curvature.quadratic import FORMS, Form
from everlearn.runtime.randomness import derive


class NaturalGradient(Optimizer):
    """Natural gradient descent (Amari, 1998; with Kronecker factors Martens & Grosse, 2015).

        θ ← θ - lr · v,   v = (F + damping · I)⁻¹ g

    F is the Fisher information at θ on the inputs of the last forward pass, with labels from the model. It is averaged
    over steps as F ← decay · F + (1 - decay) · F_batch, starting from F_batch. Momentum averages the natural gradient.

    F is always estimated in evaluation mode, while g is the gradient of ``backward()``. In training mode, dropout gives
    a different model in every pass, and BatchNorm mixes the examples of a batch, so that no example has a gradient of
    its own. With such layers in training mode, F and g belong to different models, and a warning is given once. Put
    these layers into evaluation mode to avoid it.

    Args:
        model: model whose trainable parameters are updated. A hook records its inputs, so call ``model(x)`` itself.
        lr: learning rate; 1 is Newton's step if the Fisher information is the Hessian.
        structure: "diagonal" (without Adam's square root), "kronecker" per layer, or "full", which is exact and works
            in the smaller of parameter and sample space.
        damping: added to the diagonal of F.
        momentum: momentum of the natural gradient.
        decay: decay of the running average of F; 0 uses the last batch only.
        update_every: steps between two estimates of F.
        kl_clip: bound on lr² vᵀg, twice the KL divergence of a step, before momentum; None for no bound.
        labels: how F is estimated, as in ``curvature.fisher``; over all outputs, because tasks are not known here.
        likelihood: distribution of the outputs; categorical by default.
        factored: damp the two Kronecker factors separately instead of exactly in their eigenbasis.

    >>> from everlearn import Gaussian
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    >>> y = torch.tensor([[2.0], [3.0]])
    >>> optimizer = NaturalGradient(model, lr=1.0, structure="full", damping=0.0, likelihood=Gaussian())
    >>> loss = Gaussian().loss(model(x), y)
    >>> loss.backward()
    >>> optimizer.step()
    >>> model.weight.detach().round(decimals=3)
    tensor([[2., 1.]])
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        structure: Structure = "kronecker",
        damping: float = 1e-3,
        momentum: float = 0.0,
        decay: float = 0.0,
        update_every: int = 1,
        kl_clip: float | None = None,
        labels: Labels = "exact",
        likelihood: Likelihood | None = None,
        factored: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError("NaturalGradient takes the model, not its parameters: NaturalGradient(model, lr=…).")
        if lr <= 0 or damping < 0 or not 0 <= momentum < 1 or not 0 <= decay < 1 or update_every < 1:
            raise ValueError(
                "NaturalGradient needs lr > 0, damping >= 0, momentum and decay from 0 to below 1, update_every >= 1; "
                f"got lr={lr}, damping={damping}, momentum={momentum}, decay={decay}, update_every={update_every}."
            )
        if labels == "true":
            raise ValueError(
                "labels='true' needs the data's labels, which an optimizer never sees: use 'exact' or 'signs'."
            )
        if kl_clip is not None and kl_clip <= 0:
            raise ValueError(f"kl_clip must be above 0 or None, got {kl_clip}.")

        self._parameters = trainable_parameters(model)
        super().__init__(list(self._parameters.values()), {"lr": lr, "damping": damping, "momentum": momentum})
        self.decay = decay
        self.update_every = update_every
        self.kl_clip = kl_clip
        self.structure = structure
        self.solve_method: SolveMethod = "factored" if factored else "eigenbasis"
        self.curvature: Form | None = None
        self.steps = 0
        self._estimate_fisher = FisherEstimator(model, labels, structure, likelihood)
        self._inputs: list[Any] | None = None
        self._is_estimating = False
        self._mode_dependent = {name: m for name, m in unwrap(model).named_modules() if _depends_on_mode(m)}
        self._hook = unwrap(model).register_forward_pre_hook(_InputRecorder(weakref.ref(self)), with_kwargs=True)
        weakref.finalize(self, self._hook.remove)

    def record_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of a forward pass that may lead to a step."""
        is_own_model = module is self._estimate_fisher.engine.model
        if not torch.is_grad_enabled() or self._is_estimating or not is_own_model:
            return
        self._inputs = [*args, *kwargs.values()]
        training_layers = [name for name, m in self._mode_dependent.items() if m.training]
        if training_layers:
            self._mode_dependent = {}  # warn once
            _warn_of_training_mode(training_layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> NaturalGradient:
        raise TypeError(
            "NaturalGradient belongs to its model: create one for the copied model and load the state_dict."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._update_curvature()
        natural_gradient = self._solve(gradients, group["damping"])
        scale = self._clip_factor(gradients, natural_gradient, group["lr"])
        for name, v in natural_gradient.items():
            p = self._parameters[name]
            if group["momentum"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(v, alpha=scale)
                p.add_(buffer, alpha=-group["lr"])
            else:
                p.add_(v, alpha=-group["lr"] * scale)
        self.steps += 1
        self._inputs = None  # the next step needs a new forward pass
        return loss

    def detach(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def _update_curvature(self) -> None:
        """Estimate F on the last inputs and add it to the running average."""
        if self.curvature is not None and self.steps % self.update_every:
            return
        if self._inputs is None:
            raise RuntimeError(
                "NaturalGradient has seen no forward pass since the last step: call model(x) with gradients enabled "
                "before step()."
            )
        if len(self._inputs) != 1:
            raise TypeError(
                f"NaturalGradient works with models called with one argument, this one got {len(self._inputs)}."
            )

        self._is_estimating = True
        try:
            batch_curvature: Any = self._estimate_fisher(Arrays(self._inputs[0]), seed=derive(0, self.steps))
        finally:
            self._is_estimating = False

        if self.curvature is None or not self.decay:
            self._warn_of_diagonal_fallback(batch_curvature)
            self.curvature = batch_curvature
        elif isinstance(batch_curvature, Kronecker) and isinstance(self.curvature, Kronecker):
            self.curvature = self.curvature.average_with(batch_curvature, self.decay)
        else:
            self.curvature = self.curvature * self.decay + batch_curvature * (1 - self.decay)

    def _solve(self, gradients: Params, damping: float) -> Params:
        """Compute v = (F + damping · I)⁻¹ g."""
        assert self.curvature is not None
        if isinstance(self.curvature, Kronecker):
            return self.curvature.solve(gradients, damping, self.solve_method)
        if isinstance(self.curvature, Full):
            # The full matrix couples all parameters, so missing gradients count as zero.
            all_gradients = {name: gradients.get(name, torch.zeros_like(p)) for name, p in self._parameters.items()}
            solution = self.curvature.solve(all_gradients, damping)
            return {name: solution[name] for name in gradients}
        return self.curvature.solve(gradients, damping)

    def _clip_factor(self, gradients: Params, natural_gradient: Params, lr: float) -> float:
        """Compute min(1, √(kl_clip / (lr² vᵀg)))."""
        if self.kl_clip is None:
            return 1.0
        twice_kl = lr**2 * sum(float((natural_gradient[name] * g).sum()) for name, g in gradients.items())
        if twice_kl <= 0:
            return 1.0
        return min(1.0, math.sqrt(self.kl_clip / twice_kl))

    def _warn_of_diagonal_fallback(self, form: Form) -> None:
        if isinstance(form, Kronecker) and form.rest.values and self.curvature is None:
            warnings.warn(
                f"No Kronecker factors for {', '.join(form.rest.values)}: these parameters get the diagonal.",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state with the curvature and the number of steps."""
        curvature = None if self.curvature is None else self.curvature.state_dict()
        return {**super().state_dict(), "curvature": curvature, "steps": self.steps, "structure": self.structure}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer created with the same arguments."""
        state = dict(state_dict)
        structure = state.pop("structure")
        if structure != self.structure:
            raise ValueError(
                f"This state has structure={structure!r}, this optimizer {self.structure!r}: use the same structure."
            )
        curvature = state.pop("curvature")
        self.steps = state.pop("steps")
        super().load_state_dict(state)
        self.curvature = None
        if curvature is not None:
            self.curvature = FORMS[self.structure]()
            self.curvature.load_state_dict(curvature)


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a layer of torch behaves differently in training mode."""
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)):
        return bool(getattr(module, "p", getattr(module, "track_running_stats", False)))
    dropout = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    return isinstance(dropout, float) and dropout > 0


def _warn_of_training_mode(names: list[str]) -> None:
    layers = ", ".join(names[:3])
    if len(names) > 3:
        layers += ", …"
    warnings.warn(
        "NaturalGradient estimates F in evaluation mode, but these gradients come from training mode, in which "
        f"{layers} (dropout or running statistics) behaves differently: F and g belong to different models. Put these "
        "layers into evaluation mode before the forward pass, model.eval() for all of them, or accept the step as an "
        "approximation.",
        stacklevel=2,
    )


class _InputRecorder:
    """Forward pre-hook with a weak reference to the optimizer, which is dropped when the model is pickled."""

    def __init__(self, optimizer: weakref.ref[NaturalGradient] | None = None) -> None:
        self.optimizer = optimizer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None:
            optimizer.record_inputs(module, args, kwargs)

    def __reduce__(self) -> tuple[type[_InputRecorder], tuple[()]]:
        return _InputRecorder, ()
