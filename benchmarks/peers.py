"""Whether a library that we did not write gives the same Kronecker factors and the same full matrix.

    python benchmarks/peers.py

It needs ``pip install ".[peers]"``, in an environment of its own: curvlinops brings torchvision, whose wheel does not
import beside a CPU build of torch, and with it neither do transformers and Lightning.
"""

import torch
from curvlinops import FisherType, GGNLinearOperator, KFACLinearOperator
from torch import nn

from everlearn import nets
from everlearn.curvature import fisher

KINDS = {"exact": FisherType.TYPE2, "true": FisherType.EMPIRICAL}


def kronecker_error(model, x, y, labels):
    """The relative difference of δᵀ F δ in a random direction."""
    parameters = dict(model.named_parameters())
    loss = nn.CrossEntropyLoss()
    peer = KFACLinearOperator(
        model,
        loss,
        list(parameters.values()),
        [(x, y)],
        fisher_type=KINDS[labels],
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    delta = {n: torch.randn_like(p) for n, p in parameters.items()}
    product = peer @ list(delta.values())
    right = sum((a * b).sum() for a, b in zip(product, delta.values(), strict=True))
    found = fisher(model, (x, y), labels, structure="kronecker").quad(delta)
    return float((found - right).abs() / right)


def full_error(model, x, y):
    """The largest difference between entries, as a share of the largest entry."""
    peer = GGNLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)], check_deterministic=False
    )
    right = peer @ torch.eye(peer.shape[1])
    found = fisher(model, x, structure="full").dense()
    return float((found - right).abs().max() / right.abs().max())


def main():
    """Print every difference."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.double)
    y = torch.randint(3, (12,))
    mlp, vectors = nets.mlp(5, 3, hidden=(6,)), torch.randn(12, 5)
    cnn, images = nets.cnn((2, 6, 6), 3, channels=(3, 4), norm=False), torch.randn(12, 2, 6, 6)
    errors = {}
    for labels in KINDS:
        errors[f"Kronecker, {labels}, MLP"] = kronecker_error(mlp, vectors, y, labels)
        errors[f"Kronecker, {labels}, CNN"] = kronecker_error(cnn, images, y, labels)
    errors["full, exact, MLP"] = full_error(mlp, vectors, y)
    for name, error in errors.items():
        print(f"{name:24} {error:.1e}")
    if max(errors.values()) > 1e-8:
        raise SystemExit("curvlinops gives other values.")


if __name__ == "__main__":
    main()
