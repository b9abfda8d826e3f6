"""The overview of ``everlearn compare``: methods in families against scenarios, with a test against fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everlearn.core.scenario import SCENARIOS
from everlearn.core.traits import FAMILIES
from everlearn.methods import METHODS
from everlearn.results.report.table import Group, align_columns, group_results, mean_and_std, score_name, unit
from everlearn.results.result import Result
from everlearn.results.significance import paired_t_test
from everlearn.runtime.escaping import printable

LEVEL = 0.05  # of the test against fine-tuning
REFERENCES = ("joint", "finetune")
# The scenario that a family is made for, by which its methods are sorted.
MAIN_SCENARIOS = {
    "baselines": "domain",
    "regularization": "domain",
    "replay": "class",
    "isolation": "task",
    "expansion": "task",
    "heads": "class",
}
FAMILY_OF_CLASS = {target.partition(":")[2]: target.split(".")[2] for target in METHODS.targets.values()}
NAME_OF_CLASS = {target.partition(":")[2]: name for name, target in METHODS.targets.items()}


@dataclass(frozen=True)
class _Cell:
    """Parts of a cell, which are aligned one by one."""

    mean: str = ""
    std: str = ""
    forgetting: str = ""
    mark: str = ""


def overview(results: Iterable[Result]) -> str:
    """Format a table of methods against scenarios: average accuracy after the last task, and forgetting in brackets.

    Methods are grouped by family. Each family is sorted by the scenario that it is made for.
    """
    columns = dict(sorted(group_results(results).items(), key=lambda item: _scenario_index(item[0][1])))
    runs_of_method: dict[str, list[Result]] = {}
    for group in columns.values():
        for method, runs in group.items():
            runs_of_method.setdefault(method, []).extend(runs)
    families = _group_by_family({method: runs[0].config["method"] for method, runs in runs_of_method.items()})
    names = _row_names(runs_of_method)

    titles: list[str] = ["method", *_column_titles(columns), "s"]
    first_column: list[str] = []
    cells: list[list[_Cell]] = []
    seconds: list[str] = []
    for family, members in families.items():
        main_index = _main_column(family, list(columns))
        first_column.append(family)
        cells.append([_Cell(mean="↓" * (len(members) > 1 and index == main_index)) for index in range(len(columns))])
        seconds.append("")
        main_group = list(columns.values())[main_index]
        for method in sorted(members, key=lambda method: -_mean_accuracy(main_group.get(method, []))):
            first_column.append("  " + names[method])
            cells.append([_format_cell(method, members, family, group) for group in columns.values()])
            seconds.append(f"{np.mean([result.seconds for result in runs_of_method[method]]):.1f}")

    aligned_columns = [_align_cells(column) for column in zip(*cells, strict=True)]
    rows = [titles, *(list(row) for row in zip(first_column, *aligned_columns, seconds, strict=True))]
    table_text = align_columns(_center_titles(rows))
    return "\n".join([_title(columns), table_text, *_legend(columns, runs_of_method)])


def _scenario_index(scenario: str) -> int:
    if scenario in SCENARIOS:
        return SCENARIOS.index(scenario)
    return len(SCENARIOS)


def _column_titles(columns: Mapping[tuple[str, str], Group]) -> list[str]:
    scenarios = [scenario for _, scenario in columns]
    if len(set(scenarios)) == len(scenarios):
        return [f"{scenario}-incremental" for scenario in scenarios]
    return [f"{stream}, {scenario}" for stream, scenario in columns]


def _group_by_family(labels: Mapping[str, str]) -> dict[str, list[str]]:
    """Group methods by family, in the order of the library, after the references."""
    order = ["references", *FAMILIES, "chains", "other"]
    families: dict[str, list[str]] = {family: [] for family in order}
    for method, label in labels.items():
        families[_family(label)].append(method)
    return {family: members for family, members in families.items() if members}


def _family(label: str) -> str:
    """Return the family of a method, given its label.

    >>> _family("EWC(strength=3.0)"), _family("LwF + EWC"), _family("joint")
    ('regularization', 'chains', 'references')
    """
    if label in REFERENCES:
        return "references"
    if " + " in label:
        return "chains"
    return FAMILY_OF_CLASS.get(label.partition("(")[0], "other")


def _row_names(runs_of_method: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """Return the name of each method on the command line, with its settings only if it has several rows."""
    short_names = {}
    for method, runs in runs_of_method.items():
        label = printable(runs[0].config["method"])
        class_name = label.partition("(")[0]
        short_names[method] = NAME_OF_CLASS.get(class_name, class_name) + method.removeprefix(label)
        if " + " in label:
            short_names[method] = method
    is_unique = {name: list(short_names.values()).count(name) == 1 for name in short_names.values()}
    return {method: name if is_unique[name] else method for method, name in short_names.items()}


def _main_column(family: str, settings: Sequence[tuple[str, str]]) -> int:
    """Return the index of the column by which a family is sorted; the last if its scenario is not shown."""
    for index, (_, scenario) in enumerate(settings):
        if scenario == MAIN_SCENARIOS.get(family):
            return index
    return len(settings) - 1


def _mean_accuracy(runs: Sequence[Result]) -> float:
    if not runs:
        return -np.inf
    return float(np.mean([result.average_accuracy for result in runs]))


def _format_cell(method: str, members: Sequence[str], family: str, group: Group) -> _Cell:
    runs = group.get(method, [])
    if not runs:
        return _Cell(mean="–")
    mean, separator, std = _average(runs).partition(" ± ")

    forgetting = ""
    mean_forgetting = float(np.mean([result.forgetting for result in runs]))
    if not np.isnan(mean_forgetting):
        forgetting = f" ({mean_and_std([mean_forgetting], score_name(runs)):>4})"

    # Equal after rounding counts as best, too.
    rivals = [_average(group[member]).partition(" ± ")[0] for member in members if member in group]
    is_best = family != "references" and len(rivals) > 1 and float(mean) == max(map(float, rivals))
    mark = _difference_mark(method, runs, group) + "*" * is_best
    return _Cell(mean, "±" * bool(separator) + std, forgetting, mark)


def _average(runs: Sequence[Result]) -> str:
    return mean_and_std([result.average_accuracy for result in runs], score_name(runs))


def _difference_mark(method: str, runs: Sequence[Result], group: Group) -> str:
    """Return + if a method is significantly better than fine-tuning on the same seeds, - if worse, else a space."""
    # Settings that differ within the table follow the label.
    variant = method.removeprefix(printable(runs[0].config["method"]))
    accuracy = {result.config.get("seed"): result.average_accuracy for result in runs}
    finetuned = {result.config.get("seed"): result.average_accuracy for result in group.get("finetune" + variant, [])}
    seeds = [seed for seed in accuracy if seed in finetuned]
    differences = [accuracy[seed] - finetuned[seed] for seed in seeds]
    p_value = paired_t_test([accuracy[seed] for seed in seeds], [finetuned[seed] for seed in seeds])
    if not p_value < LEVEL:
        return " "
    return "+" if sum(differences) > 0 else "-"


def _align_cells(cells: Sequence[_Cell]) -> list[str]:
    """Align the parts of a column's cells: numbers below numbers, marks below marks."""
    widths = [max(len(getattr(cell, part)) for cell in cells) for part in ("mean", "std", "forgetting", "mark")]
    return [
        cell.mean.rjust(widths[0])
        + cell.std.ljust(widths[1])
        + cell.forgetting.rjust(widths[2])
        + cell.mark.ljust(widths[3])
        for cell in cells
    ]


def _center_titles(rows: list[list[str]]) -> list[list[str]]:
    """Move the titles of the columns over their numbers, which end before the marks."""
    header, *body = rows
    titles = []
    for index, title in enumerate(header):
        width = max(len(row[index]) for row in body)
        titles.append(title.center(width) if 0 < index < len(header) - 1 else title)
    return [titles, *body]


def _title(columns: Mapping[tuple[str, str], Group]) -> str:
    return f"Average {unit(next(iter(columns.values())))} after the last task, forgetting in brackets"


def _legend(columns: Mapping[tuple[str, str], Group], runs_of_method: Mapping[str, Sequence[Result]]) -> list[str]:
    """Explain the marks below the table."""
    num_seeds = max(len(runs) for group in columns.values() for runs in group.values())
    streams = ", ".join(f"{scenario} {stream}" for stream, scenario in columns)
    lines = ["", f"streams: {streams}; s: seconds per run"]
    lines.append("↓ sorts a family; * best of its family; joint learns all tasks at once")
    if num_seeds > 1:
        lines.append(f"± standard deviation over {num_seeds} seeds")
        lines.append(
            f"+ better, - worse than finetune: paired t test over seeds, p < {LEVEL:g} for each cell by itself"
        )
    else:
        lines.append("1 seed: neither ± nor a test against finetune; --seeds 3 gives both")
    labels = dict.fromkeys(printable(runs[0].config["method"]) for runs in runs_of_method.values())
    changed = [label for label in labels if "(" in label]
    if changed:
        lines.append(f"not at its defaults: {', '.join(changed)}")
    return lines
