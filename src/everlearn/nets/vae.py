"""A small variational autoencoder, for generative replay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VAE(nn.Module):
    """Variational autoencoder (Kingma & Welling, 2014) of vectors and small images.

        -ELBO = E over z ~ q(z | x) of [-log p(x | z)] + KL( q(z | x) ‖ N(0, 1) )

    Args:
        inputs: shape of one input.
        pixels: inputs lie in [0, 1] and are read as probabilities; otherwise as numbers with Gaussian noise.
        hidden: width of the two hidden layers on either side.
        latent: length of z.

    >>> VAE((1, 8, 8)).sample(torch.randn(3, 100)).shape
    torch.Size([3, 1, 8, 8])
    """

    def __init__(self, inputs: Sequence[int], pixels: bool = True, hidden: int = 400, latent: int = 100) -> None:
        super().__init__()
        self.inputs, self.pixels, self.latent = tuple(inputs), pixels, latent
        size = math.prod(inputs)
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.code = nn.Linear(hidden, 2 * latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, size)
        )

    def loss(self, x: Tensor, noise: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean of -ELBO over examples, with weights that sum to 1, and inputs; z is drawn with this standard normal noise."""
        mean, log_variance = self.code(self.encoder(x)).chunk(2, 1)
        out = self.decoder(mean + (log_variance / 2).exp() * noise)
        x = x.flatten(1)
        apart = F.binary_cross_entropy_with_logits(out, x, reduction="none") if self.pixels else (out - x).square() / 2
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        each: Tensor = (apart.sum(1) + kl) / x.shape[1]
        return each.mean() if weights is None else each @ weights

    @torch.no_grad()
    def sample(self, z: Tensor) -> Tensor:
        """Inputs as they might have been."""
        out: Tensor = self.decoder(z)
        return (out.sigmoid() if self.pixels else out).view(-1, *self.inputs)
