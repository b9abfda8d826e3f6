"""Divergences between predicted distributions, whose curvature is the Fisher information.

For a small step δ of the parameters, KL(p_θ ‖ p_θ+δ) ≈ ½ δᵀ F δ.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Distribution, kl_divergence

from everlearn.core.forward import forward
from everlearn.core.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from everlearn.core.parameters import Params, trainable_parameters, unwrap
from everlearn.core.task import as_task
from everlearn.curvature.per_example.preserve_model import preserve_model

Direction = Literal["forward", "reverse"]


def kl(p: Distribution, q: Distribution, direction: Direction = "forward", samples: int = 10_000) -> Tensor:
    """Compute the KL divergence between two distributions.

        forward:  E_p[log p/q], whose minimum over q covers p
        reverse:  E_q[log q/p], whose minimum over q picks a mode of p

    In closed form where torch has one (Gaussians, categoricals, …), otherwise a mean over samples.

    Args:
        p: a ``torch.distributions`` distribution.
        q: another one over the same values.
        direction: which of the two.
        samples: to draw where there is no closed form.

    >>> from torch.distributions import Normal
    >>> kl(Normal(0.0, 1.0), Normal(1.0, 1.0))
    tensor(0.5000)
    """
    _check_direction(direction)
    if direction == "reverse":
        p, q = q, p
    try:
        return torch.as_tensor(kl_divergence(p, q))
    except NotImplementedError:
        x = p.sample((samples,))
        return torch.as_tensor(p.log_prob(x) - q.log_prob(x)).mean(0)


def gaussian_kl(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """Compute the KL divergence of two Gaussians with full covariance.

        ½ [tr(Σ₂⁻¹Σ₁) + (μ₂-μ₁)ᵀ Σ₂⁻¹ (μ₂-μ₁) - d + log det Σ₂ / det Σ₁]

    Args:
        mean: μ₁.
        covariance: Σ₁.
        other_mean: μ₂.
        other_covariance: Σ₂.

    >>> identity = torch.eye(2)
    >>> gaussian_kl(torch.zeros(2), identity, torch.ones(2), identity)
    tensor(1.)
    """
    cholesky_1 = torch.linalg.cholesky(covariance)
    cholesky_2 = torch.linalg.cholesky(other_covariance)
    shift = (other_mean - mean)[:, None]
    trace_term = torch.linalg.solve_triangular(cholesky_2, cholesky_1, upper=False).square().sum()
    mean_term = torch.linalg.solve_triangular(cholesky_2, shift, upper=False).square().sum()
    log_det_ratio = 2 * (cholesky_2.diagonal().log().sum() - cholesky_1.diagonal().log().sum())
    total: Tensor = trace_term + mean_term - len(mean) + log_det_ratio
    return total / 2


def predictive_kl(
    model: nn.Module,
    delta: Params,
    data: Any,
    direction: Direction = "forward",
    likelihood: Likelihood | None = None,
    chunk: int = 256,
) -> Tensor:
    """Compute the mean KL divergence between the model's predictions before and after a step δ.

    The mean is over labels, counted as in ``fisher``: one per example, or per token; labels of -100 do not count.

    Args:
        model: any module; left as it was.
        delta: the step, by parameter name.
        data: inputs, or anything a task can be made of.
        direction: "forward" is KL(before ‖ after).
        likelihood: of the outputs; by default the task's.
        chunk: examples per pass.
    """
    _check_direction(direction)
    parameters = trainable_parameters(model)
    if not isinstance(delta, dict) or not set(delta) <= set(parameters):
        raise ValueError("delta must be a step by parameter name, a dict whose keys are names of trainable parameters.")
    task = as_task(data, likelihood)
    module = unwrap(model)
    stepped = {name: p.detach() for name, p in parameters.items()}
    stepped |= {name: stepped[name] + step for name, step in delta.items()}
    device = next(iter(stepped.values())).device

    divergence_sums = []
    num_labels = 0
    with preserve_model(module), torch.no_grad():
        for batch in task.examples(chunk):
            batch = batch.to(device)
            batch_likelihood = likelihood or batch.likelihood
            p = forward(module, batch.x)
            q = forward(module, batch.x, stepped)
            if direction == "reverse":
                p, q = q, p

            divergence = output_kl(batch_likelihood, p, q, batch.allowed_rows)
            counted = batch_likelihood.counted(batch.y)
            if counted is not None:
                divergence = divergence * counted
            divergence_sums.append(divergence.sum())
            num_labels += batch_likelihood.label_count(p, batch.y)

    if not num_labels:
        raise ValueError(f"{task} has no examples to take the divergence on, or all its labels are ignored.")
    return torch.stack(divergence_sums).sum() / num_labels


def output_kl(likelihood: Likelihood, p: Tensor, q: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Compute the terms whose sum is KL(p ‖ q) of the distributions with these outputs.

    Args:
        likelihood: of the outputs.
        p: outputs of the first distribution.
        q: outputs of the second.
        allowed: which outputs count, by example; by default all.
    """
    if isinstance(likelihood, Categorical):
        log_p = likelihood.logits(p, allowed).log_softmax(-1)
        log_q = likelihood.logits(q, allowed).log_softmax(-1)

        # Classes that are not allowed have log 0 in both: their term is 0, not 0 · ∞.
        return torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
    if isinstance(likelihood, Bernoulli):
        terms = kl_divergence(BernoulliDistribution(logits=p), BernoulliDistribution(logits=q))
        if allowed is not None:
            terms = terms * F.pad(allowed, (0, p.shape[-1] - allowed.shape[-1]))
        return terms
    if isinstance(likelihood, Gaussian):
        return (p - q).square() / (2 * likelihood.variance)
    raise TypeError(f"No divergence is known for {likelihood}.")


def _check_direction(direction: str) -> None:
    """Raise if the direction is unknown."""
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction: got {direction!r}, allowed: 'forward', 'reverse'.")
