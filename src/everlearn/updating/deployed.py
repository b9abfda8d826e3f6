"""The deployed model, with its history from the state folder: where an update starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.runtime import files
from everlearn.runtime.randomness import derive, seeded
from everlearn.sources.labeled_data import first_few
from everlearn.trainer.settings import device_of
from everlearn.updating import weights_file
from everlearn.updating.classes import Classes, parse_classes
from everlearn.updating.held_out_sets import (
    HeldOutSet,
    deserialize_digests,
    deserialize_held_out_set,
    make_disjoint,
)
from everlearn.updating.learned_rows import RowCounts, deserialize_rows, learned_digests
from everlearn.updating.learning import check_deployed
from everlearn.updating.read_data import Reading
from everlearn.updating.state_folder import StateFolder, Version
from everlearn.updating.stored_method import ACCEPT, restore_method
from everlearn.updating.verdict import Scores
from everlearn.updating.weights_file import UPDATE, Weights

MODEL = "model.safetensors"


@dataclass(eq=False)
class DeployedModel:
    """The deployed model before an update, with what the state folder has stored.

    Args:
        path: the deployed file, as the user gave it.
        file_digest: the digest of what was in that file.
        weights: the content of the deployed file; if the file ``is_behind``, the content that it should have.
        model: the model with these weights.
        method: the method with its state.
        classes: names of the outputs.
        version: the version that this update is trained from; None in a first update.
        latest: the current version of the state folder: the same, or a later one if an older file was put back.
        known_outputs: the number of outputs in the state, if the file may have fewer.
        held_out_sets: those of earlier updates.
        learned_digests: digests of all examples that were trained on.
        row_counts: for the number of each update, how often its rows were learned, if the method can forget rows.
        has_all_rows: whether these are all rows that were learned: updates with ``keep=0`` record none.
        history: the accuracies after each update.
        data_digests: for the digest of each data set that was learned, the number of its update.
        reading: how data files were read.
        columns: the input columns in the model's order; empty if no table was read yet.
        notes: sentences for the report.
    """

    path: Path
    file_digest: str
    weights: Weights
    model: nn.Module
    method: Method
    classes: Classes
    version: Version | None = None
    latest: Version | None = None
    known_outputs: int = 0
    held_out_sets: list[HeldOutSet] = field(default_factory=list)
    learned_digests: set[bytes] = field(default_factory=set)
    row_counts: dict[int, RowCounts] = field(default_factory=dict)
    has_all_rows: bool = True
    history: dict[int, Scores] = field(default_factory=dict)
    data_digests: dict[str, int] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    columns: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this is the first update, so that nothing is stored yet."""
        return self.version is None

    @property
    def number(self) -> int:
        """The number of the version; 0 before the first update."""
        return 0 if self.version is None else self.version.number

    @property
    def next_number(self) -> int:
        """The number of this update, which no stored version has."""
        return 1 if self.latest is None else self.latest.number + 1

    @property
    def is_behind(self) -> bool:
        """Whether the latest update was interrupted before it replaced the deployed file."""
        return self.file_digest != self.weights.digest

    def check_unchanged(self) -> None:
        """Raise if the deployed file was changed since it was read."""
        if not self.path.exists() or weights_file.compute_digest(self.path.read_bytes()) != self.file_digest:
            raise ValueError(
                f"{self.path} was changed during this update, so it stays as it is and the update is discarded: "
                f"check the file, and if it is right, update again from it, {ACCEPT}."
            )

    def remove_unfinished(self, folder: StateFolder) -> None:
        """Delete what an interrupted update has left."""
        folder.remove_unfinished(self.latest)
        for partial_file in files.unfinished_files(self.weights.path):
            partial_file.unlink(missing_ok=True)

    def finish_interrupted(self, folder: StateFolder) -> list[str]:
        """Complete an interrupted update.

        Returns:
            Sentences for the report.
        """
        self.remove_unfinished(folder)
        if self.latest is None or self.latest.pending_digest is None:
            return []

        notes = []
        if self.is_behind:
            self.check_unchanged()
            replace_file(self.weights)
            notes.append(f"Completed the interrupted update {self.number}: {self.path.name} is now replaced.")

        # The file is right; if only the pointer cannot be written, the next call writes it.
        with suppress(OSError):
            folder.set_current(self.latest)
        return notes


def replace_file(weights: Weights) -> None:
    """Replace the deployed file atomically, with its permissions."""
    files.write(weights.path, weights.content, mode=weights.path.stat().st_mode & 0o777)


def build_deployed(
    deployed: DeployedModel, build_model: Callable[[Weights], nn.Module], x: Tensor, seed: int = 0
) -> tuple[nn.Module, list[str]]:
    """Build the model that will be deployed: with the new weights as they will be stored, and without hooks.

    Args:
        deployed: its model is rounded to the dtypes of the file.
        build_model: builds the model with some weights.
        x: inputs on which it must predict what the method predicts.
        seed: of the factory, if it is random.

    Returns:
        The model, and sentences for the report.
    """
    notes = []
    lossy_dtypes = weights_file.round_to_file_dtypes(deployed.model, deployed.weights)
    if lossy_dtypes:
        notes.append(
            f"The new weights are rounded to {' and '.join(lossy_dtypes)}, the dtype in {deployed.path.name}, before "
            "they are evaluated."
        )

    content = weights_file.serialize_weights(deployed.model, deployed.weights, {})
    new_weights = weights_file.parse_weights(deployed.weights.path, content)
    if not deployed.weights.tensors.keys() <= new_weights.tensors.keys():
        notes.append(
            f"{label(deployed.method)} has put a head on fixed features in the place of the output layer: load the "
            "weights with everlearn.updating.load."
        )
    with seeded(derive(seed, "deployed", deployed.next_number), device_of(deployed.model)):
        model = build_model(new_weights)
    check_deployed(deployed.model, deployed.method, model, x)
    return model, notes


def load_deployed(
    folder: StateFolder,
    path: Path,
    build_model: Callable[[Weights], nn.Module],
    method: Method,
    classes: Sequence[str] | None,
    accept_weights: bool,
    output: str | None,
) -> DeployedModel:
    """Load the deployed model and its state, and raise if they do not belong together.

    Args:
        folder: the state folder.
        path: the deployed file.
        build_model: builds the model with some weights.
        method: its stored state is loaded in place.
        classes: names of the outputs, if the user gave them.
        accept_weights: whether to continue from the file even if the latest update did not write it.
        output: name of the output layer.
    """
    latest = folder.current()
    if latest is None:
        weights = weights_file.read_weights(path)
        _check_first_weights(weights, folder, accept_weights)
        names = parse_classes(classes or weights.class_names or None)
        return DeployedModel(path, weights.digest, weights, build_model(weights), method, names)

    # The file may be that of the latest version, of an earlier one, or of none.
    start = _find_start(folder, path, latest, accept_weights)
    version = start.version
    facts = version.facts
    model = build_model(start.weights)
    restore_method(method, version, device_of(model))

    # Weights of other origin may have other outputs than the state.
    names = _stored_classes(facts["classes"], classes)
    known_outputs = 0
    if start.version_weights is not None:
        names = _merge_classes(names, start.weights, folder)
        known_outputs = weights_file.count_outputs(start.version_weights, model, output)

    row_counts = _read_row_counts(version)
    digests = _read_learned_digests(version)
    for counts in row_counts.values():
        digests |= learned_digests(counts)

    return DeployedModel(
        path=path,
        file_digest=start.file_digest,
        weights=start.weights,
        model=model,
        method=method,
        classes=names,
        version=version,
        latest=latest,
        known_outputs=known_outputs,
        held_out_sets=_read_held_out_sets(version),
        learned_digests=digests,
        row_counts=row_counts,
        has_all_rows=facts.get("has_all_rows", False),
        history=_parse_history(facts["history"]),
        data_digests=dict(facts["learned"]),
        reading=Reading.from_json(facts["reading"]),
        columns=tuple(facts.get("columns", ())),
        notes=start.notes,
    )


def held_out_file(number: int) -> str:
    """Name of the file of a held-out set."""
    return f"held-out-{number:04d}.safetensors"


def learned_digest_file(number: int) -> str:
    """Name of the file with the digests of the examples that an update was trained on."""
    return f"learned-{number:04d}.bin"


def learned_digest_files(version: Version) -> list[str]:
    """List the digest files of a version, its own and those of earlier updates."""
    return [name for name in version.facts["files"] if re.fullmatch(r"learned-\d+\.bin", name)]


def row_file(number: int) -> str:
    """Name of the file with the records of an update's rows, if its method can forget them."""
    return f"rows-{number:04d}.bin"


def _read_row_counts(version: Version) -> dict[int, RowCounts]:
    """Read the records of rows, by the number of their update."""
    row_counts = {}
    for name in version.facts["files"]:
        match = re.fullmatch(r"rows-(\d+)\.bin", name)
        if match:
            row_counts[int(match[1])] = deserialize_rows(version.read(name))
    return row_counts


def _read_held_out_sets(version: Version) -> list[HeldOutSet]:
    stored_sets = []
    for entry in version.facts["held_out_sets"]:
        content = version.read(held_out_file(entry["number"]))
        stored_sets.append(deserialize_held_out_set(entry["number"], entry["title"], content))
    return make_disjoint(stored_sets)


def _read_learned_digests(version: Version) -> set[bytes]:
    digests: set[bytes] = set()
    for name in learned_digest_files(version):
        digests |= deserialize_digests(version.read(name))
    return digests


def _parse_history(stored: dict[str, dict[str, float]]) -> dict[int, Scores]:
    """Convert the keys, which JSON has as text, to numbers."""
    return {int(update): {int(number): score for number, score in row.items()} for update, row in stored.items()}


def _check_first_weights(weights: Weights, folder: StateFolder, accept_weights: bool) -> None:
    """Raise if an update wrote the file, because its state is then in another folder."""
    if UPDATE in weights.metadata and not accept_weights:
        raise ValueError(
            f"{weights.path.name} was written by update {weights.metadata[UPDATE]}, whose state is not in "
            f"{folder.folder}: give the state folder of that update, or continue without the state of its method, "
            f"{ACCEPT}."
        )


@dataclass(frozen=True)
class _Start:
    """The weights that an update starts from, and the version they belong to.

    Args:
        weights: the deployed file, as it is or as it should be.
        file_digest: the digest of the deployed file as it is.
        version: the version whose state is used.
        version_weights: the weights of that version, if the deployed ones are not from it.
        notes: sentences for the report.
    """

    weights: Weights
    file_digest: str
    version: Version
    version_weights: Weights | None = None
    notes: list[str] = field(default_factory=list)


def _find_start(folder: StateFolder, path: Path, latest: Version, accept_weights: bool) -> _Start:
    if not path.exists():
        raise FileNotFoundError(
            f"There is no file {path}; update {latest.number} has written {latest.folder / MODEL}: copy it there."
        )

    content = path.read_bytes()
    resolved_path = path.resolve()
    file_digest = weights_file.compute_digest(content)
    if file_digest == latest.facts["files"][MODEL]:
        return _Start(weights_file.parse_weights(resolved_path, content), file_digest, latest)

    # Before the interrupted update is considered: the file may be an older version that was put back on purpose.
    if accept_weights:
        weights = weights_file.parse_weights(resolved_path, content)
        return _start_from_accepted(folder, path.name, latest, weights)

    if file_digest == latest.pending_digest:
        weights = weights_file.parse_weights(resolved_path, latest.read(MODEL))
        note = (
            f"Update {latest.number} was interrupted before it replaced {path.name}: this update continues from the "
            f"weights of update {latest.number}."
        )
        return _Start(weights, file_digest, latest, notes=[note])

    raise ValueError(
        f"{path} is not what update {latest.number} wrote, it was changed: replace it by {latest.folder / MODEL}, or "
        f"continue from it as it is, {ACCEPT}."
    )


def _start_from_accepted(folder: StateFolder, name: str, latest: Version, weights: Weights) -> _Start:
    """Resume from the version that matches the file, else from the latest.

    An old model does not fit the later state of a method: the output may have grown, and data that only the newer model
    was trained on would count as learned.
    """
    difference = f"{name} is not what update {latest.number} wrote"
    version = folder.find_version(MODEL, weights.digest, latest)
    if version is None:
        latest_weights = weights_file.parse_weights(latest.folder / MODEL, latest.read(MODEL))
        note = f"{difference}; as requested, this update continues from it."
        return _Start(weights, weights.digest, latest, latest_weights, [note])

    # Raises if the facts of the version do not list this file.
    version.read(MODEL)
    description = "" if version.number else ", the model before the first update"
    note = (
        f"{difference}, but that of update {version.number}{description}: as requested, this update continues from "
        f"update {version.number}, with the method state, the classes and the held-out sets of that update. Data of "
        "later updates do not count as learned."
    )
    return _Start(weights, weights.digest, version, notes=[note])


def _stored_classes(stored: list[str], given: Sequence[str] | None) -> Classes:
    """Return the stored names of the outputs, and raise if the user gave others."""
    if given is not None and list(given) != stored[: len(given)]:
        raise ValueError(
            f"classes: the outputs have names since the first update, {first_few(stored) or 'their numbers'}: leave "
            "it out."
        )
    return Classes(tuple(stored))


def _merge_classes(classes: Classes, weights: Weights, folder: StateFolder) -> Classes:
    """Merge the stored names with those of a file of other origin, which may name fewer or more outputs."""
    if not classes.names:
        return classes

    file_names = tuple(weights.class_names)
    if any(name != file_name for name, file_name in zip(classes.names, file_names, strict=False)):
        raise ValueError(
            f"{weights.path.name} names its outputs {first_few(file_names)}, but in {folder.folder} they are "
            f"{first_few(classes.names)}: give the state folder of this file, or start over with an empty one, "
            f"{ACCEPT}."
        )
    return Classes(max(classes.names, file_names, key=len))
