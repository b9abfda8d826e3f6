"""Update a deployed model with new data, and replace it only if accuracy on the old data is kept."""

from everlearn.updating.forget import forget
from everlearn.updating.read_data import Reading
from everlearn.updating.update import update
from everlearn.updating.verdict import Rules, Update
from everlearn.updating.weights_file import class_names, load

__all__ = ["Reading", "Rules", "Update", "class_names", "forget", "load", "update"]
