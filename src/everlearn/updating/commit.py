"""Write an update: a new version and the deployed file if it is accepted, only a report if it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from everlearn.core.method import count_parameters
from everlearn.core.stream import Stream
from everlearn.core.task import Task
from everlearn.results.provenance import provenance
from everlearn.results.report.html import html
from everlearn.results.result import Result
from everlearn.runtime import files
from everlearn.trainer.config import configuration
from everlearn.trainer.cost import state_bytes
from everlearn.updating import weights_file
from everlearn.updating.classes import Classes
from everlearn.updating.deployed import (
    MODEL,
    DeployedModel,
    held_out_file,
    learned_digest_file,
    learned_digest_files,
    replace_file,
    row_file,
)
from everlearn.updating.held_out_sets import NOT_STORED, HeldOutSet, serialize_digests
from everlearn.updating.learned_rows import RowCounts, serialize_rows
from everlearn.updating.learning import TrainingOptions
from everlearn.updating.state_folder import REFUSED, StateFolder
from everlearn.updating.stored_method import METHOD, describe_method, serialize_method
from everlearn.updating.verdict import History, Update, accuracy_matrix, extend_history
from everlearn.updating.weights_file import CLASSES, UPDATE

Files = dict[str, bytes | Path]


@dataclass(eq=False)
class TrainedUpdate:
    """A trained and measured update, before anything is written.

    Args:
        update: the outcome.
        initial_method_state: the method's serialized state before the new data of a first update; else empty.
        classes: names of the new model's outputs.
        pair: the examples that were trained on.
        data_digest: digest of the new data as they were given.
        learned_digests: digests of the examples that no earlier update was trained on.
        old_digests: digests of the old examples that the method was given.
        row_counts: how often each row of the new data was learned; empty if the method cannot forget rows.
        old_row_counts: the same of the old data.
        seconds: time by purpose.
    """

    update: Update
    initial_method_state: bytes
    classes: Classes
    pair: tuple[Tensor, Tensor]
    data_digest: str
    learned_digests: set[bytes]
    old_digests: set[bytes]
    row_counts: RowCounts
    old_row_counts: RowCounts
    seconds: dict[str, float]


def accept(folder: StateFolder, deployed: DeployedModel, trained: TrainedUpdate, options: TrainingOptions) -> None:
    """Write the new version, make it the current one, and only then replace the deployed file."""
    update = trained.update
    run_provenance = provenance()
    history = extend_history(deployed.history, update, deployed.number)
    deployed.remove_unfinished(folder)
    if deployed.is_first:
        _write_initial_version(folder, deployed, trained, run_provenance)

    # The file names the update that wrote it, so that a wrong state folder is detected.
    metadata = {UPDATE: str(update.number), CLASSES: json.dumps(trained.classes.names)}
    new_content = weights_file.serialize_weights(deployed.model, deployed.weights, metadata)

    # The report is complete before the version is written, which contains it.
    update.folder = folder.version_folder(update.number)
    update.notes.append(
        f"Deployed update {update.number}. Weights, method state and report.html are in {update.folder}."
    )
    update.result = _make_result(deployed, trained, history, options, run_provenance)
    contents: Files = {
        MODEL: new_content,
        METHOD: serialize_method(deployed.method),
        **_example_files(deployed, trained),
        **_report_files(update, deployed.weights.path.name),
    }
    stored_sets = [held_out for held_out in update.held_out_sets if _is_stored(held_out, update)]
    facts = {
        **_version_facts(deployed, trained.classes, stored_sets, history, run_provenance),
        "has_all_rows": deployed.has_all_rows and update.rules.keep > 0,
        "from": deployed.number,
        "learned": {**deployed.data_digests, trained.data_digest: update.number},
        "data": {
            "title": update.held_out_sets[-1].title,
            "digest": trained.data_digest,
            "examples": len(trained.pair[1]),
        },
        "accuracy": _accuracy_facts(update),
        "training": update.result.config["training"],
    }
    _deploy_version(folder, deployed, update, contents, facts)


def accept_forgetting(
    folder: StateFolder,
    deployed: DeployedModel,
    update: Update,
    row_counts: dict[int, RowCounts],
    data_digests: dict[str, int],
    request_digest: str,
) -> None:
    """Write a version without the forgotten rows, make it the current one, and replace the deployed file.

    Args:
        folder: the state folder.
        deployed: the model and the method, which have forgotten the rows.
        update: the outcome, with the remaining held-out sets.
        row_counts: for the number of each update, its remaining rows.
        data_digests: for the digest of each data set of which rows remain, the number of its update.
        request_digest: digest of the rows as they were given, so that a repeated call is recognized.
    """
    deployed.remove_unfinished(folder)
    metadata = {UPDATE: str(update.number), CLASSES: json.dumps(deployed.classes.names)}
    update.folder = folder.version_folder(update.number)
    update.notes.append(
        f"Deployed update {update.number}. Weights, method state and report.txt are in {update.folder}."
    )
    contents: Files = {
        MODEL: weights_file.serialize_weights(deployed.model, deployed.weights, metadata),
        METHOD: serialize_method(deployed.method),
        **{held_out_file(held_out.number): held_out.serialize() for held_out in update.held_out_sets},
        **{row_file(number): serialize_rows(counts) for number, counts in row_counts.items() if counts},
        **_report_files(update, deployed.weights.path.name),
    }
    history = {**deployed.history, update.number: update.after}
    facts = {
        **_version_facts(deployed, deployed.classes, update.held_out_sets, history, provenance()),
        "has_all_rows": deployed.has_all_rows,
        "from": deployed.number,
        "learned": data_digests,
        "forgotten": {"digest": request_digest, "rows": update.forgotten},
    }
    _deploy_version(folder, deployed, update, contents, facts)


def _deploy_version(
    folder: StateFolder, deployed: DeployedModel, update: Update, contents: Files, facts: Mapping[str, Any]
) -> None:
    """Write a version, make it the current one, and only then replace the deployed file."""
    version = folder.write_version(update.number, contents, facts)

    # The file may have been replaced by someone else during the training.
    try:
        deployed.check_unchanged()
    except ValueError:
        deployed.remove_unfinished(folder)
        raise

    # From here on the update is accepted, even if the process is killed before the file is replaced.
    folder.set_current(version, pending_digest=deployed.file_digest)
    replace_file(weights_file.parse_weights(deployed.weights.path, version.read(MODEL)))

    # The update is deployed; if the clean-up fails, the next update does it.
    with suppress(OSError):
        folder.set_current(version)
        folder.delete_old_versions(update.rules.versions, deployed.number)


def refuse(folder: StateFolder, deployed: DeployedModel, trained: TrainedUpdate, options: TrainingOptions) -> None:
    """Write the report of a refused update, and complete an earlier update that was interrupted."""
    update = trained.update
    update.folder = folder.folder / REFUSED
    update.notes.append(f"The report is in {update.folder}.")
    history = extend_history(deployed.history, update, deployed.number)
    update.result = _make_result(deployed, trained, history, options, provenance())
    for name, content in _report_files(update, deployed.weights.path.name).items():
        files.write(files.writable_folder(update.folder) / name, content)

    # Last, so that nothing is replaced if the report cannot be written.
    update.notes += deployed.finish_interrupted(folder)


def _write_initial_version(
    folder: StateFolder, deployed: DeployedModel, trained: TrainedUpdate, run_provenance: Mapping[str, Any]
) -> None:
    """Store the model of before the first update as version 0."""
    update = trained.update
    old_sets = [held_out for held_out in update.held_out_sets if held_out.number == 0 and _is_stored(held_out, update)]
    contents = {
        MODEL: deployed.weights.content,
        METHOD: trained.initial_method_state,
        **{held_out_file(0): held_out.serialize() for held_out in old_sets},
        **_old_digest_files(trained),
    }
    history = {0: {held_out.number: update.before[0] for held_out in old_sets}}
    facts = {
        **_version_facts(deployed, deployed.classes, old_sets, history, run_provenance),
        "has_all_rows": update.rules.keep > 0,
        "learned": {},
    }
    folder.write_version(0, contents, facts)


def _version_facts(
    deployed: DeployedModel,
    classes: Classes,
    held_out_sets: list[HeldOutSet],
    history: History,
    run_provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """Collect the facts that every version has."""
    return {
        "method": describe_method(deployed.method),
        "classes": list(classes.names),
        "reading": asdict(deployed.reading),
        "columns": list(deployed.columns),
        "held_out_sets": [
            {"number": held_out.number, "title": held_out.title, "examples": len(held_out)}
            for held_out in held_out_sets
        ],
        "history": history,
        "provenance": run_provenance,
    }


def _accuracy_facts(update: Update) -> dict[str, Any]:
    rules = update.rules
    return {
        "before": update.before,
        "after": update.after,
        "fall": update.fall,
        "interval": update.interval,
        "classes": [asdict(score) for score in update.classes],
        "tolerance": rules.tolerance,
        "per_set": rules.per_set,
        "holdout": rules.holdout,
        "keep": rules.keep,
        "versions": rules.versions,
    }


def _is_stored(held_out: HeldOutSet, update: Update) -> bool:
    """Return whether a held-out set is stored: earlier ones always, new ones unless ``keep`` is 0."""
    if held_out.number == NOT_STORED:
        return False
    is_new = held_out.number == update.number or (held_out.number == 0 and update.number == 1)
    return update.rules.keep > 0 or not is_new


def _example_files(deployed: DeployedModel, trained: TrainedUpdate) -> Files:
    """Collect held-out sets and digests of learned examples: new ones as bytes, earlier ones as paths to link to."""
    update = trained.update
    contents: Files = {}
    for held_out in update.held_out_sets:
        if held_out not in deployed.held_out_sets and _is_stored(held_out, update):
            contents[held_out_file(held_out.number)] = held_out.serialize()

    # With keep=0 not even digests of examples are stored.
    if trained.row_counts and update.rules.keep:
        contents[row_file(update.number)] = serialize_rows(trained.row_counts)
    elif trained.learned_digests and update.rules.keep:
        contents[learned_digest_file(update.number)] = serialize_digests(trained.learned_digests)

    if deployed.version is None:
        contents.update(_old_digest_files(trained))
        return contents

    # Earlier files are hard links: a version is complete without the others.
    earlier_names = [held_out_file(held_out.number) for held_out in deployed.held_out_sets]
    earlier_names += learned_digest_files(deployed.version)
    earlier_names += [row_file(number) for number in deployed.row_counts]
    for name in earlier_names:
        contents[name] = deployed.version.folder / name
    return contents


def _old_digest_files(trained: TrainedUpdate) -> Files:
    """Serialize the digests of the old examples that the method was given; version 0 has them too."""
    if not trained.old_digests or not trained.update.rules.keep:
        return {}
    if trained.old_row_counts:
        return {row_file(0): serialize_rows(trained.old_row_counts)}
    return {learned_digest_file(0): serialize_digests(trained.old_digests)}


def _report_files(update: Update, weights_name: str) -> dict[str, bytes]:
    contents = {"report.txt": f"{update}\n".encode()}
    if update.result is not None:
        contents["result.json"] = update.result.to_json()
        contents["report.html"] = html([update.result], f"Updates of {weights_name}").encode()
    return contents


def _make_result(
    deployed: DeployedModel,
    trained: TrainedUpdate,
    history: History,
    options: TrainingOptions,
    run_provenance: dict[str, Any],
) -> Result:
    """Combine all updates so far into one result."""
    update = trained.update
    model = deployed.model
    method = deployed.method

    # Equal classes in all updates are the domain-incremental scenario, else class-incremental.
    label_sets = {frozenset(held_out.y.unique().tolist()) for held_out in update.held_out_sets}
    stream = Stream(
        [Task(trained.pair, id=update.number)],
        "domain" if len(label_sets) == 1 else "class",
        f"updates of {deployed.weights.path.name}",
        [held_out.task for held_out in update.held_out_sets],
        settings={"update": update.number},
    )
    cost = {
        "seconds": trained.seconds,
        "parameters": [count_parameters(model, method)],
        "state_bytes": [state_bytes(method.state_dict())],
    }
    config = configuration(stream, method, model, options.training, options.optimizer, False, "test")
    return Result(accuracy_matrix(history, update), config, [], cost, run_provenance)
