"""What the model's output means: a probability of the label, from which loss, score and Fisher information follow."""

from everlearn.likelihood.base import Likelihood
from everlearn.likelihood.bernoulli import Bernoulli
from everlearn.likelihood.categorical import Categorical
from everlearn.likelihood.gaussian import Gaussian

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood"]
