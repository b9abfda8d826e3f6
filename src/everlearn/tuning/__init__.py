"""Finding a method's strength: trials that share what is identical, judged on data held back."""

from everlearn.fields import Search
from everlearn.tuning.study import Trial, Tuned, tune

__all__ = ["Search", "Trial", "Tuned", "tune"]
