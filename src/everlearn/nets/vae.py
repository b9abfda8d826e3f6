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
        pixels: whether inputs lie in [0, 1] and p(x | z) is Bernoulli; otherwise it is Gaussian with unit variance.
        hidden: width of the two hidden layers of encoder and decoder.
        latent: dimension of z.

    >>> VAE((1, 8, 8)).sample(torch.randn(3, 100)).shape
    torch.Size([3, 1, 8, 8])
    """

    def __init__(self, inputs: Sequence[int], pixels: bool = True, hidden: int = 400, latent: int = 100) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.pixels = pixels
        self.latent = latent
        size = math.prod(inputs)
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.posterior = nn.Linear(hidden, 2 * latent)  # mean and log-variance of q(z | x)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, size)
        )

    def loss(self, x: Tensor, noise: Tensor, weights: Tensor | None = None) -> Tensor:
        """Compute -ELBO per input dimension, averaged over examples.

        Args:
            x: the inputs.
            noise: standard normal noise, from which z is computed.
            weights: weights of the examples, which sum to 1; equal by default.
        """
        mean, log_variance = self.posterior(self.encoder(x)).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * noise
        reconstruction = self.decoder(z)

        x = x.flatten(1)
        if self.pixels:
            nll = F.binary_cross_entropy_with_logits(reconstruction, x, reduction="none")
        else:
            nll = (reconstruction - x).square() / 2
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        negative_elbo: Tensor = (nll.sum(1) + kl) / x.shape[1]
        if weights is None:
            return negative_elbo.mean()
        return negative_elbo @ weights

    @torch.no_grad()
    def sample(self, z: Tensor) -> Tensor:
        """Decode latent vectors to generated inputs."""
        generated: Tensor = self.decoder(z)
        if self.pixels:
            generated = generated.sigmoid()
        return generated.view(-1, *self.inputs)
