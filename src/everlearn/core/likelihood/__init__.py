"""Likelihoods p(label | outputs), which define loss, score and Fisher information."""

from everlearn.core.likelihood.base import Likelihood
from everlearn.core.likelihood.bernoulli import Bernoulli
from everlearn.core.likelihood.categorical import Categorical
from everlearn.core.likelihood.gaussian import Gaussian

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood"]
