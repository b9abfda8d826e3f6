"""Take learned rows out of a deployed model again, exactly."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.core.task import Task
from everlearn.runtime.fingerprint import fingerprint
from everlearn.sources.labeled_data import first_few
from everlearn.updating import read_data, weights_file
from everlearn.updating.commit import accept_forgetting
from everlearn.updating.deployed import MODEL, DeployedModel, build_deployed, load_deployed
from everlearn.updating.held_out_sets import (
    HeldOutSet,
    compute_accuracies,
    evaluate_held_out,
    example_digests,
    exclude_examples,
)
from everlearn.updating.learned_rows import Pair, Row, RowCounts, can_forget, identify_rows, total_count
from everlearn.updating.learning import check_device, check_method, use_output
from everlearn.updating.read_data import Reading, check_known_columns, is_table
from everlearn.updating.state_folder import StateFolder
from everlearn.updating.stored_method import latest_method
from everlearn.updating.verdict import Rules, Update
from everlearn.updating.weights_file import Factory, Weights

# The split into training and held-out rows does not matter here: all rows are forgotten.
HOLDOUT = 0.2


def forget(
    make_model: Factory,
    weights: str | os.PathLike[str],
    state: str | os.PathLike[str],
    rows: Any,
    method: Method | None = None,
    *,
    read: Reading = Reading(),  # noqa: B008 - frozen
    versions: int = 5,
    output: str | None = None,
    device: str | torch.device | None = None,
    accept_weights: bool = False,
    dry_run: bool = False,
) -> Update:
    """Take rows that updates have learned out of the deployed model, which then equals one that never saw them.

    For heads on frozen features, whose statistics are sums: nearest mean, streaming LDA, RanPAC and KLDA. The equality
    is up to rounding. A row that was learned several times is taken out as often. Rows in held-out sets are deleted
    there. The new model is written as ``update`` writes an accepted one, whatever its accuracy. Rows that were never
    given to an update are refused, and nothing changes.

    What is not forgotten: the features of the model, if it was trained on the rows before its first update, and earlier
    versions in the state folder, unless ``versions`` is 1.

    Args:
        make_model: a function without arguments that returns the model.
        weights: the deployed weights, which are replaced.
        state: the state folder of the updates.
        rows: the rows with their labels, as they were given to ``update``; of the same kinds as its ``data``.
        method: the method of the updates; only needed if it is a class of your own.
        read: which columns are inputs and labels, if other than in the updates.
        versions: how many versions are stored at most; 1 deletes all earlier ones, which still contain the rows.
        output: name of the output layer; by default the last ``nn.Linear``.
        device: the device to compute features on.
        accept_weights: whether to continue from the weights file even if the latest update did not write it.
        dry_run: whether to measure, but write nothing.

    Returns:
        The accuracies and the report.
    """
    check_device(device)
    rules = Rules(versions=versions)
    folder = StateFolder(state)
    if folder.current() is None:
        raise ValueError(
            f"There is no update in {folder.folder}, so nothing can be forgotten: give the state folder of the updates "
            "that have learned the rows."
        )

    def build_model(model_weights: Weights) -> nn.Module:
        return weights_file.build_model(make_model, model_weights, output).to(device)

    with nullcontext() if dry_run else folder.lock():
        method = latest_method(folder) if method is None else copy.deepcopy(method)
        check_method(method)
        if not can_forget(method):
            raise ValueError(
                f"{label(method)} cannot forget rows: what it has learned of them is spread over all weights. Only "
                "heads on frozen features (nearest-mean, streaming-lda, ranpac, klda) keep sums that rows can be "
                "subtracted from; otherwise train again without the rows."
            )
        use_output(method, output)
        deployed = load_deployed(folder, Path(weights), build_model, method, None, accept_weights, output)

        check_known_columns(deployed.columns, read.x if is_table(rows) else ())
        deployed.reading = read.with_defaults(deployed.reading)
        pair = _read_rows(deployed, rows)
        request_digest = str(fingerprint(list(pair)))
        if _is_forgotten(deployed, request_digest):
            return _report_forgotten(folder, deployed, rules, dry_run)

        request = _find_rows(deployed, pair)
        update = _forget_and_measure(deployed, request, rules, build_model)
        if dry_run:
            update.notes.append("Dry run: nothing is written.")
        else:
            accept_forgetting(
                folder, deployed, update, request.row_counts, _remaining_data(deployed, request), request_digest
            )
        return update


@dataclass(frozen=True, eq=False)
class _Request:
    """Rows to forget.

    Args:
        learned: the rows that were learned, each as often as it was.
        held_out_sets: the held-out sets without the rows.
        row_counts: for the number of each update, its rows without these.
        num_rows: the number of different rows.
        num_unverified: how many of them could not be checked, because an update with ``keep=0`` recorded none.
    """

    learned: Pair
    held_out_sets: list[HeldOutSet]
    row_counts: dict[int, RowCounts]
    num_rows: int
    num_unverified: int


def _read_rows(deployed: DeployedModel, rows: Any) -> Pair:
    """Read all rows, with indices of outputs as labels."""
    title = "the rows to forget"
    data = read_data.read(rows, deployed.reading, HOLDOUT, deployed.columns)
    read_data.check_inputs_and_labels(data, title)
    (x, y), (x_test, y_test) = deployed.classes.relabel(data, title)
    if not len(y) + len(y_test):
        raise ValueError("There are no rows to forget: give at least one.")
    return torch.cat([x, x_test]), torch.cat([y, y_test])


def _find_rows(deployed: DeployedModel, pair: Pair) -> _Request:
    """Find out which of the rows were learned, how often, and which are held out; raise if some were never given."""
    held_out_digests = {digest for held_out in deployed.held_out_sets for digest in example_digests(held_out.x)}
    known_rows = {row for counts in deployed.row_counts.values() for row in counts}
    given_rows = identify_rows(pair)

    # Rows that were not recorded count as learned, as often as they are given.
    unknown = [row for row in given_rows if row not in known_rows and row[0] not in held_out_digests]
    if unknown and deployed.has_all_rows:
        raise ValueError(_describe_unknown(unknown, given_rows, known_rows))

    repeats = torch.zeros(len(given_rows), dtype=torch.long)
    forgotten_rows: set[Row] = set()
    unknown_rows = set(unknown)
    for i, row in enumerate(given_rows):
        if row in unknown_rows:
            repeats[i] = 1
        elif row not in forgotten_rows:
            repeats[i] = total_count(row, deployed.row_counts)
        forgotten_rows.add(row)

    x, y = pair
    forgotten_digests = {digest for digest, _ in forgotten_rows}
    remaining_sets = [exclude_examples(held_out, forgotten_digests) for held_out in deployed.held_out_sets]
    return _Request(
        learned=(x.repeat_interleave(repeats, 0), y.repeat_interleave(repeats, 0)),
        held_out_sets=[held_out for held_out in remaining_sets if len(held_out)],
        row_counts={
            number: {row: count for row, count in counts.items() if row not in forgotten_rows}
            for number, counts in deployed.row_counts.items()
        },
        num_rows=len(forgotten_rows),
        num_unverified=len(unknown_rows),
    )


def _describe_unknown(unknown: list[Row], given: list[Row], known: set[Row]) -> str:
    """Describe rows that were never given to an update."""
    known_digests = {digest for digest, _ in known}
    message = (
        f"{len(unknown):,} of the {len(given):,} rows to forget are not among those that updates have learned, or were "
        f"forgotten already; the first has the label {unknown[0][1]}. Give the rows exactly as they were learned"
    )
    if any(digest in known_digests for digest, _ in unknown):
        message += "; some were learned with another label"
    return f"{message}. Nothing was changed."


def _forget_and_measure(deployed: DeployedModel, request: _Request, rules: Rules, build_model: Any) -> Update:
    """Subtract the rows from the method, write the output layer, and measure the remaining held-out sets."""
    correct_before = evaluate_held_out(deployed.model, request.held_out_sets)
    notes = list(deployed.notes)
    x, y = request.learned
    method: Any = deployed.method
    if len(y):
        method.forget(deployed.model, Task(request.learned, name="the rows to forget"))
    compared_inputs = torch.cat([x, *(held_out.x for held_out in request.held_out_sets)])
    new_model, deployment_notes = build_deployed(deployed, build_model, compared_inputs)
    correct_after = evaluate_held_out(new_model, request.held_out_sets)

    update = Update(
        number=deployed.next_number,
        method=label(deployed.method),
        held_out_sets=request.held_out_sets,
        learned={number: row[number] for number, row in deployed.history.items() if number in row},
        before=compute_accuracies(correct_before),
        after=compute_accuracies(correct_after),
        rules=rules,
        forgotten=request.num_rows,
    )
    update.fall = rules.fall(update.before, update.after, update.old)
    update.notes = [*notes, *deployment_notes, *_describe_limits(deployed, request, rules)]
    return update


def _describe_limits(deployed: DeployedModel, request: _Request, rules: Rules) -> list[str]:
    """Describe what was forgotten, and what this cannot promise."""
    num_held_out = sum(map(len, deployed.held_out_sets)) - sum(map(len, request.held_out_sets))
    notes = []
    notes.append(
        f"{len(request.learned[1]):,} learned examples were subtracted, and {num_held_out:,} were deleted from "
        "held-out sets. The output layer equals one that never saw them, up to rounding."
    )
    if request.num_unverified:
        notes.append(
            f"Warning: {request.num_unverified:,} rows could not be checked, because updates with keep=0 record none: "
            "if they were not learned, or not as often as they were given, the model is now wrong."
        )

    counts = getattr(deployed.method, "statistics", {}).get("counts")
    empty = []
    if counts is not None:
        empty = [c for c in request.learned[1].unique().tolist() if counts[c] < 0.5]
    if empty:
        names = [deployed.classes.names[c] if deployed.classes.names else str(c) for c in empty]
        notes.append(
            f"Classes without examples now: {first_few(names)}. They are never predicted; their outputs and names stay "
            "in the file."
        )

    notes.append(
        "Not forgotten: what the features of the model have learned of these rows, if it was trained on them before "
        "its first update."
    )
    if rules.versions > 1:
        notes.append(
            "Other versions in the state folder still contain the rows: with versions=1 (--versions 1 on the command "
            "line) they are deleted."
        )
    else:
        notes.append("All other versions in the state folder are deleted: there is no way back.")
    notes.append("Copies of the weights or of the state elsewhere are not changed.")
    return notes


def _remaining_data(deployed: DeployedModel, request: _Request) -> dict[str, int]:
    """List the data sets that still count as learned: those of which a learned row remains."""
    return {
        digest: number
        for digest, number in deployed.data_digests.items()
        if number not in request.row_counts or any(request.row_counts[number].values())
    }


def _is_forgotten(deployed: DeployedModel, request_digest: str) -> bool:
    """Return whether the current version was written by the same call."""
    facts = deployed.latest.facts if deployed.latest is not None else {}
    is_current = bool(facts.get("files", {}).get(MODEL) == deployed.weights.digest)
    return is_current and bool(facts.get("forgotten", {}).get("digest") == request_digest)


def _report_forgotten(folder: StateFolder, deployed: DeployedModel, rules: Rules, dry_run: bool) -> Update:
    """Report that these rows are forgotten already, and complete the call if it was interrupted."""
    notes = list(deployed.notes)
    if not dry_run:
        notes += deployed.finish_interrupted(folder)
        assert deployed.version is not None  # for the type checker
        with suppress(OSError):
            folder.delete_old_versions(rules.versions, deployed.version.facts["from"])
    notes.append(f"These rows were forgotten in update {deployed.number}: there is nothing to do.")
    return Update(deployed.number, label(deployed.method), new=False, notes=notes)
