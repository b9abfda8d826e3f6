"""Memory: a bounded number of examples for replay, and the policies that select them."""

from everlearn.memory.memory import Memory
from everlearn.memory.quotas import herding_order

__all__ = ["Memory", "herding_order"]
