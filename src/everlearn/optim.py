"""Natural gradient descent: steepest descent where distance is the change of the predicted distribution."""

from __future__ import annotations

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
    """Steps along the natural gradient (Amari, 1998; with Kronecker factors Martens & Grosse, 2015):

        θ ← θ - lr · v,   v = (F + damping · I)⁻¹ g

    with F the Fisher information at θ on the inputs of the last forward pass, labels from the model, averaged over steps
    as F ← decay · F + (1 - decay) · F_now (F_now alone at first). Momentum is that of the natural gradient.

    F is always taken in evaluation mode, g is what ``backward()`` left. In training mode dropout is another model in every pass
    and BatchNorm mixes the examples of a batch, so that none has a gradient of its own. With such layers in training mode F and
    g are those of two models; a warning says so once. Put these layers into evaluation mode to step on one.

    Args:
        model: whose trainable parameters are stepped; its inputs are noted by a hook, so call ``model(x)`` itself.
        lr: the step along the natural gradient; 1 is Newton's step where the Fisher information is the Hessian.
        structure: "diagonal" (no square root: that would be Adam's relative), "kronecker" per layer, or "full", which is
            exact and chooses by itself the smaller of parameter and sample space.
        damping: added to F.
        momentum: of the natural gradient.
        decay: of the running average of F; 0 uses the last batch alone.
        update_every: steps between two estimates of F.
        kl_clip: bound on lr² vᵀg, twice the KL divergence a step causes, before momentum; None for none.
        labels: how F is estimated, as in ``curvature.fisher``; over all outputs, since tasks are not known here.
        likelihood: what the outputs mean; classes by default.
        factored: damp the two Kronecker factors apart instead of exactly in their eigenbasis.

    >>> from everlearn import Gaussian
    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[2.0], [3.0]])
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
                "NaturalGradient needs lr > 0, damping >= 0, momentum and decay from 0 to below 1, update_every >= 1; got "
                f"lr={lr}, damping={damping}, momentum={momentum}, decay={decay}, update_every={update_every}."
            )
        if labels == "true":
            raise ValueError(
                "labels='true' needs the data's labels, which an optimizer never sees: use 'exact' or 'signs'."
            )
        if kl_clip is not None and kl_clip <= 0:
            raise ValueError(f"kl_clip must be above 0 or None, got {kl_clip}.")
        self._named = trainable_parameters(model)
        super().__init__(list(self._named.values()), {"lr": lr, "damping": damping, "momentum": momentum})
        self.decay, self.update_every, self.kl_clip, self.structure = decay, update_every, kl_clip, structure
        self.manner: SolveMethod = "factored" if factored else "eigenbasis"
        self.curvature: Form | None = None
        self.steps = 0
        self._estimate = FisherEstimator(model, labels, structure, likelihood)
        self._inputs: Any = None
        self._estimating = False
        self._two_faced = {name: m for name, m in unwrap(model).named_modules() if _has_two_modes(m)}
        self._hook = unwrap(model).register_forward_pre_hook(_Noting(weakref.ref(self)), with_kwargs=True)
        weakref.finalize(self, self._hook.remove)

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs of a forward pass that may lead to a step."""
        if torch.is_grad_enabled() and not self._estimating and module is self._estimate.engine.model:
            self._inputs = [*args, *kwargs.values()]
            if training := [name for name, m in self._two_faced.items() if m.training]:
                self._two_faced = {}  # said once
                _warn_of_two_modes(training)

    def __deepcopy__(self, memo: dict[int, Any]) -> NaturalGradient:
        raise TypeError("NaturalGradient belongs to its model: make one for the copied model and load the state_dict.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        gradients = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        self._update(gradients)
        direction = self._direction(gradients, group["damping"])
        scale = self._trust(gradients, direction, group["lr"])
        for name, v in direction.items():
            p = self._named[name]
            if group["momentum"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                v = buffer.mul_(group["momentum"]).add_(v, alpha=scale)
                p.add_(v, alpha=-group["lr"])
            else:
                p.add_(v, alpha=-group["lr"] * scale)
        self.steps += 1
        self._inputs = None  # the next step must not be taken with these
        return loss

    def detach(self) -> None:
        """Take the hook off the model."""
        self._hook.remove()

    def _update(self, gradients: Params) -> None:
        if self.curvature is not None and self.steps % self.update_every:
            return
        if self._inputs is None:
            raise RuntimeError(
                "NaturalGradient has seen no forward pass since the last step: call model(x) with gradients before step()."
            )
        if len(self._inputs) != 1:
            raise TypeError(
                f"NaturalGradient works with models called with one argument, this one got {len(self._inputs)}."
            )
        self._estimating = True
        try:
            now: Any = self._estimate(Arrays(self._inputs[0]), seed=derive(0, self.steps))
        finally:
            self._estimating = False
        if self.curvature is None or not self.decay:
            self._say_what_falls_back(now)
            self.curvature = now
        elif isinstance(now, Kronecker) and isinstance(self.curvature, Kronecker):
            self.curvature = self.curvature.average_with(now, self.decay)
        else:
            self.curvature = self.curvature * self.decay + now * (1 - self.decay)

    def _direction(self, gradients: Params, damping: float) -> Params:
        assert self.curvature is not None
        if isinstance(self.curvature, Kronecker):
            return self.curvature.solve(gradients, damping, self.manner)
        if isinstance(self.curvature, Full):
            whole = {n: gradients.get(n, torch.zeros_like(p)) for n, p in self._named.items()}
            solved = self.curvature.solve(whole, damping)
            return {n: solved[n] for n in gradients}
        return self.curvature.solve(gradients, damping)

    def _trust(self, gradients: Params, direction: Params, lr: float) -> float:
        """min(1, √(kl_clip / (lr² vᵀg)))."""
        if self.kl_clip is None:
            return 1.0
        change = lr**2 * sum(float((direction[n] * g).sum()) for n, g in gradients.items())
        return min(1.0, (self.kl_clip / change) ** 0.5) if change > 0 else 1.0

    def _say_what_falls_back(self, form: Form) -> None:
        if isinstance(form, Kronecker) and form.rest.values and self.curvature is None:
            warnings.warn(
                f"No Kronecker factors for {', '.join(form.rest.values)}: these parameters get the diagonal.",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Torch's, with the curvature and the number of steps."""
        held = None if self.curvature is None else self.curvature.state_dict()
        return {**super().state_dict(), "curvature": held, "steps": self.steps, "structure": self.structure}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was taken, by an optimizer made with the same arguments."""
        state = dict(state_dict)
        if (structure := state.pop("structure")) != self.structure:
            raise ValueError(
                f"This state has structure={structure!r}, this optimizer {self.structure!r}: make it alike."
            )
        held, self.steps = state.pop("curvature"), state.pop("steps")
        super().load_state_dict(state)
        if held is None:
            self.curvature = None
        else:
            self.curvature = FORMS[self.structure]()
            self.curvature.load_state_dict(held)


def _has_two_modes(module: nn.Module) -> bool:
    """Whether a layer of torch does something else in training mode."""
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)):
        return bool(getattr(module, "p", getattr(module, "track_running_stats", False)))
    share = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    return isinstance(share, float) and share > 0


def _warn_of_two_modes(names: list[str]) -> None:
    some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
    warnings.warn(
        f"NaturalGradient takes F in evaluation mode, and these gradients come from training mode, in which {some} (dropout or "
        "running statistics) does something else: F is that of another model than g. Put these layers into evaluation mode "
        "before the forward pass, model.eval() for all of them, or take the step as an approximation.",
        stacklevel=2,
    )


class _Noting:
    """A hook that does not keep the optimizer alive, and that is forgotten when the model is pickled."""

    def __init__(self, optimizer: weakref.ref[NaturalGradient] | None = None) -> None:
        self.optimizer = optimizer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.optimizer is not None and (alive := self.optimizer()) is not None:
            alive.note(module, args, kwargs)

    def __reduce__(self) -> tuple[type[_Noting], tuple[()]]:
        return _Noting, ()
