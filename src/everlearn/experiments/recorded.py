"""Recorded results of published tables: written by ``everlearn reproduce --record``, quoted by ``everlearn advise``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import fmean

from everlearn.experiments.advice import Measured
from everlearn.experiments.published_tables import read_table, select_cells, table_names
from everlearn.experiments.reproduce import Runs, recorded_runs
from everlearn.methods import METHODS


def results_folder() -> Traversable:
    """Folder of the record files: in the installed package, or in docs/results of a source checkout."""
    packaged = resources.files("everlearn.experiments") / "results"
    if packaged.is_dir():
        return packaged
    return Path(__file__).parents[3] / "docs" / "results"


def load_recorded() -> list[Measured]:
    """Load the recorded results of all cells that run a single method with the current protocol."""
    results: list[Measured] = []
    for name in table_names():
        file = results_folder() / f"{name}.json"
        if file.is_file():
            results += _load_table(name, file)
    return results


def _load_table(name: str, file: Traversable) -> Iterator[Measured]:
    table_record = json.loads(file.read_text(encoding="utf-8"))
    table = read_table(name)
    cell_runs = [(cell, recorded_runs(cell, table_record)) for cell in select_cells(name)]
    cell_runs = [(cell, runs) for cell, runs in cell_runs if runs]

    # Fine-tuning and joint training of the same table and scenario are the ends of the scale.
    mean_accuracy = {
        (cell.options["methods"], cell.options["scenario"]): fmean(_accuracies(runs)) for cell, runs in cell_runs
    }
    for cell, runs in cell_runs:
        method = cell.options["methods"]
        scenario = cell.options["scenario"]
        if method in METHODS:
            yield Measured(
                method,
                scenario,
                name,
                table.title,
                cell.name,
                _accuracies(runs),
                cell.options.get("set", {}),
                finetune=mean_accuracy.get(("finetune", scenario)),
                joint=mean_accuracy.get(("joint", scenario)),
                data=table.data,
                pretrained=table.pretrained,
            )


def _accuracies(runs: Runs) -> tuple[float, ...]:
    return tuple(run["accuracy"] for run in runs.values())
