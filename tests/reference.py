"""Slow, obviously right: the oracles our estimators are tested against."""

import copy
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn


def gradients(model, x, column):
    """The gradient of Σ column · model(x) for every example, an example at a time: a list of {name: tensor}."""
    rows = []
    for i in range(len(x)):
        fresh = copy.deepcopy(model)
        fresh.zero_grad()
        (fresh(x[i : i + 1]) * column[i : i + 1]).sum().backward()
        parameters = {n: p for n, p in fresh.named_parameters() if p.requires_grad}
        rows.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()})
    return rows


def squared_size(gradient):
    """|g|², the square of a real number."""
    return (gradient * gradient.conj()).real


def mean_of(model, x, columns, each):
    """Mean over examples of Σ over columns of each(gradient), by name."""
    rows = [row for column in columns for row in gradients(model, x, column)]
    return {n: sum(each(row[n]) for row in rows) / len(x) for n in rows[0]}


def softmax_scores(out, allowed=None):
    """For every class c, √p(c) ∂(-log p(c))/∂out: the columns of the exact Fisher by its definition."""
    logits = out if allowed is None else out.masked_fill(~allowed, float("-inf"))
    p = logits.softmax(-1)
    return [
        p[:, c : c + 1].sqrt() * (p - nn.functional.one_hot(torch.tensor(c), out.shape[1])) for c in range(out.shape[1])
    ]


def full_fisher(model, x, columns):
    """Mean over examples of Σ over columns of g gᵀ over all parameters, as a matrix."""
    rows = [torch.cat([g.flatten() for g in row.values()]) for c in columns for row in gradients(model, x, c)]
    return sum(torch.outer(r, r) for r in rows) / len(x)


def kronecker_factors(model, x, columns, biased):
    """The factors of every weight by their definition, each example alone: {name: (A, G)}.

    A is the mean over the examples that use the weight of the mean over positions of a aᵀ, with a 1 appended to a where the
    weight's name is in ``biased``; G is the mean over all examples of Σ over columns and positions of d dᵀ.
    """
    found = {}
    for i in range(len(x)):
        for k, column in enumerate(columns):
            fresh = copy.deepcopy(model)
            names = {id(p): n for n, p in fresh.named_parameters()}
            with recorded(names) as uses:
                (fresh(x[i : i + 1]) * column[i : i + 1]).sum().backward()
            for name, met in uses.items():
                a, d = (torch.cat(parts) for parts in zip(*met, strict=True))
                if not len(a):
                    continue
                a = torch.cat([a, torch.ones(len(a), 1)], 1) if name in biased else a
                inputs, outputs, users = found.get(name, (0, 0, set()))
                inputs = inputs if k else inputs + a.t() @ a / len(a)
                found[name] = inputs, outputs + d.t() @ d / len(x), users | {i}
    return {name: (inputs / len(users), outputs) for name, (inputs, outputs, users) in found.items()}


@contextmanager
def recorded(names):
    """Inputs and output gradients, a row per position, of all that goes through a known weight of F.linear or F.conv2d."""
    linear, conv2d = F.linear, F.conv2d
    uses = {}

    def noted(weight, rows, y, last):
        if id(weight) in names and y.requires_grad:  # which it is not when a reentrant checkpoint runs it first
            y.register_hook(
                lambda d: uses.setdefault(names[id(weight)], []).append(
                    (rows.detach(), last(d).reshape(-1, len(weight)))
                )
            )
        return y

    def tapped_linear(x, weight, bias=None):
        return noted(weight, x.reshape(-1, x.shape[-1]), linear(x, weight, bias), lambda d: d)

    def tapped_conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        patches = F.unfold(x, weight.shape[2:], dilation, padding, stride).mT.flatten(0, 1)
        y = conv2d(x, weight, bias, stride, padding, dilation, groups)
        return noted(weight, patches, y, lambda d: d.movedim(1, -1))

    F.linear, F.conv2d = tapped_linear, tapped_conv2d
    try:
        yield uses
    finally:
        F.linear, F.conv2d = linear, conv2d
