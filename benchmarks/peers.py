"""Compare Kronecker factors and the full Fisher matrix with those of curvlinops.

    python benchmarks/peers.py

This needs ``pip install ".[peers]"`` in a separate environment: curvlinops installs torchvision, whose wheel does not
import with a CPU build of torch, and then transformers and Lightning do not import either.
"""

import torch
from curvlinops import FisherType, GGNLinearOperator, KFACLinearOperator
from torch import nn

from everlearn import nets
from everlearn.curvature import fisher

FISHER_TYPES = {"exact": FisherType.TYPE2, "true": FisherType.EMPIRICAL}


def kronecker_error(model, x, y, labels):
    """Return the relative difference of δᵀFδ in a random direction δ."""
    parameters = dict(model.named_parameters())
    peer = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(parameters.values()),
        [(x, y)],
        fisher_type=FISHER_TYPES[labels],
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    delta = {name: torch.randn_like(p) for name, p in parameters.items()}
    product = peer @ list(delta.values())
    expected = sum((a * b).sum() for a, b in zip(product, delta.values(), strict=True))
    computed = fisher(model, (x, y), labels, structure="kronecker").quad(delta)
    return float((computed - expected).abs() / expected)


def full_error(model, x, y):
    """Return the largest difference between entries, relative to the largest entry."""
    peer = GGNLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)], check_deterministic=False
    )
    expected = peer @ torch.eye(peer.shape[1])
    computed = fisher(model, x, structure="full").dense()
    return float((computed - expected).abs().max() / expected.abs().max())


def main():
    """Print all differences."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.double)
    y = torch.randint(3, (12,))
    mlp = nets.mlp(5, 3, hidden=(6,))
    vectors = torch.randn(12, 5)
    cnn = nets.cnn((2, 6, 6), 3, channels=(3, 4), norm=False)
    images = torch.randn(12, 2, 6, 6)

    errors = {}
    for labels in FISHER_TYPES:
        errors[f"Kronecker, {labels}, MLP"] = kronecker_error(mlp, vectors, y, labels)
        errors[f"Kronecker, {labels}, CNN"] = kronecker_error(cnn, images, y, labels)
    errors["full, exact, MLP"] = full_error(mlp, vectors, y)
    for name, error in errors.items():
        print(f"{name:24} {error:.1e}")
    if max(errors.values()) > 1e-8:
        raise SystemExit("The values of curvlinops differ.")


if __name__ == "__main__":
    main()
