"""Slow, obviously right: the oracles our estimators are tested against."""

import torch
from torch import nn


def gradients(model, x, column):
    """The gradient of Σ column · model(x) for every example, an example at a time: a list of {name: tensor}."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(x)):
        out = model(x[i : i + 1])
        found = torch.autograd.grad(out, list(parameters.values()), column[i : i + 1], allow_unused=True)
        zeros = (torch.zeros_like(p) for p in parameters.values())
        rows.append({n: z if g is None else g for n, g, z in zip(parameters, found, zeros, strict=True)})
    return rows


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


def kronecker_factors(model, x, columns):
    """A and G of every linear and convolutional layer by their definition (KFAC-expand), an example and a position at a time.

    A is the mean over examples and positions of a aᵀ, with a 1 for the bias; G the mean over examples of the sum over
    positions and columns of d dᵀ.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    seen = {}
    hooks = [
        m.register_forward_hook(lambda m, args, out, n=n: seen.update({n: (args[0], out)})) for n, m in layers.items()
    ]
    factors = {n: [0.0, 0.0] for n in layers}
    for i in range(len(x)):
        outputs = model(x[i : i + 1])
        for n, layer in layers.items():
            inputs, answers = seen[n]
            rows = inputs
            if isinstance(layer, nn.Conv2d):
                patches = nn.functional.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
                rows = patches[0].t()
            for a in rows:
                a = torch.cat([a, a.new_ones(1)]) if layer.bias is not None else a
                factors[n][0] = factors[n][0] + torch.outer(a, a).detach() / (len(rows) * len(x))
            for column in columns:
                (d,) = torch.autograd.grad(outputs, answers, column[i : i + 1], retain_graph=True)
                for one in d[0].flatten(1).t() if d.dim() == 4 else d:
                    factors[n][1] = factors[n][1] + torch.outer(one, one) / len(x)
    for hook in hooks:
        hook.remove()
    return factors
