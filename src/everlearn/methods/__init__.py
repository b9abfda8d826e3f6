"""All methods; the table is the whole registry."""

from everlearn.method import Method
from everlearn.methods.freeze import Freeze
from everlearn.methods.l2 import L2

METHODS: dict[str, type[Method]] = {"finetune": Method, "freeze": Freeze, "l2": L2}
