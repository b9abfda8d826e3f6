"""Data sources: published data sets by name, and the user's own files and tables."""

from everlearn.sources.arrays import npz
from everlearn.sources.folders import image_folder
from everlearn.sources.huggingface import hugging_face
from everlearn.sources.labeled_data import Data
from everlearn.sources.registry import SOURCES, load
from everlearn.sources.tables import table

__all__ = ["SOURCES", "Data", "hugging_face", "image_folder", "load", "npz", "table"]
