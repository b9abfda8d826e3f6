"""Slow reference implementations, one example at a time, that the estimators are tested against."""

import copy
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn


def gradients(model, x, column):
    """Compute the gradient of Σ column · model(x) for each example: a list of {name: tensor}."""
    rows = []
    for i in range(len(x)):
        model_copy = copy.deepcopy(model)
        model_copy.zero_grad()
        (model_copy(x[i : i + 1]) * column[i : i + 1]).sum().backward()
        parameters = {n: p for n, p in model_copy.named_parameters() if p.requires_grad}
        rows.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()})
    return rows


def squared_size(gradient):
    """Compute |g|², for real and complex gradients."""
    return (gradient * gradient.conj()).real


def mean_of(model, x, columns, reduce):
    """Compute the mean over examples of Σ over columns of reduce(gradient), by parameter name."""
    rows = [row for column in columns for row in gradients(model, x, column)]
    return {n: sum(reduce(row[n]) for row in rows) / len(x) for n in rows[0]}


def softmax_scores(outputs, allowed=None):
    """Compute √p(c) ∂(-log p(c))/∂outputs for each class c: the columns of the exact Fisher information."""
    logits = outputs if allowed is None else outputs.masked_fill(~allowed, float("-inf"))
    p = logits.softmax(-1)
    return [
        p[:, c : c + 1].sqrt() * (p - nn.functional.one_hot(torch.tensor(c), outputs.shape[1]))
        for c in range(outputs.shape[1])
    ]


def full_fisher(model, x, columns):
    """Compute the mean over examples of Σ over columns of g gᵀ over all parameters, as a matrix."""
    rows = [torch.cat([g.flatten() for g in row.values()]) for c in columns for row in gradients(model, x, c)]
    return sum(torch.outer(r, r) for r in rows) / len(x)


def kronecker_factors(model, x, columns, biased):
    """Compute the Kronecker factors of each weight by their definition, one example at a time: {name: (A, G)}.

    A is the mean over the examples that use the weight of the mean over positions of a aᵀ, with a 1 appended to a
    where the weight's name is in ``biased``; G is the mean over all examples of Σ over columns and positions of d dᵀ.
    """
    sums = {}
    for i in range(len(x)):
        for k, column in enumerate(columns):
            model_copy = copy.deepcopy(model)
            names = {id(p): n for n, p in model_copy.named_parameters()}
            with record_uses(names) as uses:
                (model_copy(x[i : i + 1]) * column[i : i + 1]).sum().backward()
            for name, recorded_rows in uses.items():
                a, d = (torch.cat(parts) for parts in zip(*recorded_rows, strict=True))
                if not len(a):
                    continue
                if name in biased:
                    a = torch.cat([a, torch.ones(len(a), 1)], 1)
                input_sum, output_sum, users = sums.get(name, (0, 0, set()))
                # The inputs are the same for every column.
                if k == 0:
                    input_sum = input_sum + a.t() @ a / len(a)
                sums[name] = input_sum, output_sum + d.t() @ d / len(x), users | {i}
    return {name: (input_sum / len(users), output_sum) for name, (input_sum, output_sum, users) in sums.items()}


@contextmanager
def record_uses(names):
    """Record inputs and output gradients, a row per position, of F.linear and F.conv2d with a weight in `names`."""
    linear = F.linear
    conv2d = F.conv2d
    uses = {}

    def record_use(weight, rows, y, channels_last):
        if id(weight) in names and y.requires_grad:  # False in the first run of a reentrant checkpoint
            y.register_hook(
                lambda d: uses.setdefault(names[id(weight)], []).append(
                    (rows.detach(), channels_last(d).reshape(-1, len(weight)))
                )
            )
        return y

    def recorded_linear(x, weight, bias=None):
        return record_use(weight, x.reshape(-1, x.shape[-1]), linear(x, weight, bias), lambda d: d)

    def recorded_conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        patches = F.unfold(x, weight.shape[2:], dilation, padding, stride).mT.flatten(0, 1)
        y = conv2d(x, weight, bias, stride, padding, dilation, groups)
        return record_use(weight, patches, y, lambda d: d.movedim(1, -1))

    F.linear = recorded_linear
    F.conv2d = recorded_conv2d
    try:
        yield uses
    finally:
        F.linear = linear
        F.conv2d = conv2d
