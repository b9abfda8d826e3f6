"""Sources of data: published sets by name, and the files and tables that people have."""

from everlearn.sources.arrays import npz
from everlearn.sources.data import Data
from everlearn.sources.folders import image_folder
from everlearn.sources.hub import hugging_face
from everlearn.sources.published import SOURCES, load
from everlearn.sources.tables import table

__all__ = ["SOURCES", "Data", "hugging_face", "image_folder", "load", "npz", "table"]
