"""Updating a deployed model: new data in, the old skills kept, or nothing replaced."""

from everlearn.updating.outcome import Rules, Update
from everlearn.updating.process import update
from everlearn.updating.reading import Reading
from everlearn.updating.weights import class_names, load

__all__ = ["Reading", "Rules", "Update", "class_names", "load", "update"]
