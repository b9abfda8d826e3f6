"""Finding a method's strength: trials that share what is identical, judged on data held back."""

from everlearn.fields import Search
from everlearn.tuning.side_by_side import Lost
from everlearn.tuning.study import Tuned, tune
from everlearn.tuning.trials import Trial

__all__ = ["Lost", "Search", "Trial", "Tuned", "tune"]
