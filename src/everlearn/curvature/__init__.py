"""Fisher information and related importances: quadratic forms on parameters, and their estimators."""

from everlearn.curvature.cotangents import count_backward_passes, estimate_epochs
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.divergence import gaussian_kl, kl, predictive_kl
from everlearn.curvature.fisher import FisherEstimator, fisher, from_adam
from everlearn.curvature.full import Full
from everlearn.curvature.kronecker import Kronecker
from everlearn.curvature.plot import histogram
from everlearn.curvature.progress import show_progress
from everlearn.curvature.quadratic import Quadratic
from everlearn.curvature.sensitivity import sensitivity

__all__ = [
    "Diagonal",
    "FisherEstimator",
    "Full",
    "Kronecker",
    "Quadratic",
    "count_backward_passes",
    "estimate_epochs",
    "fisher",
    "from_adam",
    "gaussian_kl",
    "histogram",
    "kl",
    "predictive_kl",
    "sensitivity",
    "show_progress",
]
