"""Results of runs: the accuracy matrix, its metrics, files and reports."""

from everlearn.results import metrics
from everlearn.results.result import Result, file_name, load, result_files

__all__ = ["Result", "file_name", "load", "metrics", "result_files"]
