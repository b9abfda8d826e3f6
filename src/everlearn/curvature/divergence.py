"""Distances between predicted distributions, of which the Fisher information is the curvature.

For a small step δ of the parameters, KL(p_θ ‖ p_θ+δ) ≈ ½ δᵀ F δ.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Distribution, kl_divergence

from everlearn.curvature.persample.untouched import untouched
from everlearn.forward import ask
from everlearn.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from everlearn.params import Params, named, unwrap
from everlearn.stream import as_task

Direction = Literal["forward", "reverse"]


def kl(p: Distribution, q: Distribution, direction: Direction = "forward", samples: int = 10_000) -> Tensor:
    """KL divergence of q from p: forward, E_p[log p/q], makes q cover p; reverse, E_q[log q/p], lets q pick a mode of p.

    In closed form where torch knows one (Gaussians, categoricals, …), otherwise the mean over samples.

    Args:
        p: a ``torch.distributions`` distribution.
        q: another over the same values.
        direction: which of the two.
        samples: drawn where there is no closed form.

    >>> from torch.distributions import Normal
    >>> kl(Normal(0.0, 1.0), Normal(1.0, 1.0))
    tensor(0.5000)
    """
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction: got {direction!r}, allowed: 'forward', 'reverse'.")
    first, second = (p, q) if direction == "forward" else (q, p)
    try:
        return torch.as_tensor(kl_divergence(first, second))
    except NotImplementedError:
        x = first.sample((samples,))
        return torch.as_tensor(first.log_prob(x) - second.log_prob(x)).mean(0)


def gaussian_kl(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """KL of two Gaussians with full covariance: ½ [tr(Σ₂⁻¹Σ₁) + (μ₂-μ₁)ᵀ Σ₂⁻¹ (μ₂-μ₁) - d + log det Σ₂ / det Σ₁].

    >>> one = torch.eye(2)
    >>> gaussian_kl(torch.zeros(2), one, torch.ones(2), one)
    tensor(1.)
    """
    left, right = torch.linalg.cholesky(covariance), torch.linalg.cholesky(other_covariance)
    spread = torch.linalg.solve_triangular(right, left, upper=False).square().sum()
    shift = torch.linalg.solve_triangular(right, (other_mean - mean)[:, None], upper=False).square().sum()
    volume = 2 * (right.diagonal().log().sum() - left.diagonal().log().sum())
    total: Tensor = spread + shift - len(mean) + volume
    return total / 2


def predictive_kl(
    model: nn.Module,
    delta: Params,
    data: Any,
    direction: Direction = "forward",
    likelihood: Likelihood | None = None,
    chunk: int = 256,
) -> Tensor:
    """Mean over labels of the KL divergence between what the model predicts now and what it would after a step δ.

    Labels are counted as in ``fisher``: one for each example, or for each token; those of -100 are left out.

    Args:
        model: any module; left as it was.
        delta: the step, by parameter name.
        data: inputs, or anything a task can be made of.
        direction: "forward" is KL(now ‖ then).
        likelihood: what the outputs mean; by default the task's.
        chunk: examples per pass.
    """
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction: got {direction!r}, allowed: 'forward', 'reverse'.")
    if not isinstance(delta, dict) or not set(delta) <= set(named(model)):
        raise ValueError("delta must be a step by parameter name, a dict whose keys are names of trainable parameters.")
    inner, task, parts, count = unwrap(model), as_task(data, likelihood), [], 0
    moved = {n: p.detach() + delta[n] if n in delta else p.detach() for n, p in named(model).items()}
    device = next(iter(moved.values())).device
    with untouched(inner), torch.no_grad():
        for batch in task.examples(chunk):
            here, meaning = batch.to(device), likelihood or batch.likelihood
            outputs = [ask(inner, here.x), ask(inner, here.x, moved)]
            p, q = outputs if direction == "forward" else outputs[::-1]
            apart = output_kl(meaning, p, q, here.allowed_rows)
            counted = meaning.counted(here.y)
            parts.append((apart if counted is None else apart * counted).sum())
            count += meaning.label_count(p, here.y)
    if not count:
        raise ValueError(f"{task} has no examples to take the divergence on, or all its labels are ignored.")
    return torch.stack(parts).sum() / count


def output_kl(likelihood: Likelihood, p: Tensor, q: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The terms whose sum is KL(p ‖ q) of the distributions that these outputs stand for."""
    if isinstance(likelihood, Categorical):
        log_p, log_q = (likelihood.logits(out, allowed).log_softmax(-1) for out in (p, q))
        return torch.where(
            log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q)
        )  # classes nobody may name: 0, not 0 · ∞
    if isinstance(likelihood, Bernoulli):
        terms = kl_divergence(BernoulliDistribution(logits=p), BernoulliDistribution(logits=q))
        return terms if allowed is None else terms * F.pad(allowed, (0, p.shape[-1] - allowed.shape[-1]))
    if isinstance(likelihood, Gaussian):
        return (p - q).square() / (2 * likelihood.variance)
    raise TypeError(f"No divergence is known for {likelihood}.")
