"""Split the data of an update into training and held-out examples, disjoint from those of earlier updates."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from everlearn.runtime.fingerprint import fingerprint
from everlearn.sources.labeled_data import Data, first_few
from everlearn.trainer.evaluate import outputs_of
from everlearn.updating import read_data
from everlearn.updating.classes import Classes
from everlearn.updating.deployed import DeployedModel
from everlearn.updating.held_out_sets import (
    NOT_STORED,
    HeldOutSet,
    example_digests,
    exclude_duplicates,
    exclude_examples,
    exclude_held_out,
)
from everlearn.updating.learned_rows import RowCounts, can_forget, count_rows
from everlearn.updating.learning import Pair
from everlearn.updating.verdict import Rules


@dataclass(eq=False)
class UpdateData:
    """The new data of an update, and the old data given with it, with indices of outputs as labels.

    Args:
        title: name of the new data in reports.
        classes: names of the outputs, with the new ones.
        pair: inputs and labels to train on.
        held_out: the held-out part of the new data.
        outputs: the number of outputs of the model.
        known_outputs: the number of outputs in the state, if that is larger.
        required_outputs: the number of outputs that the data require.
        digest: of the new data as they were given.
        old_pair: old data for the method, used in a first update.
        old_held_out: the held-out part of the old data.
        learned_digests: digests of the examples to train on.
        old_digests: digests of the old examples that the method is given.
        row_counts: how often each row of the new data is learned; empty if the method cannot forget rows.
        old_row_counts: the same of the old data.
        notes: sentences for the report.
    """

    title: str
    classes: Classes
    pair: Pair
    held_out: HeldOutSet
    outputs: int
    known_outputs: int
    required_outputs: int
    digest: str
    old_pair: Pair | None = None
    old_held_out: HeldOutSet | None = None
    learned_digests: set[bytes] = field(default_factory=set)
    old_digests: set[bytes] = field(default_factory=set)
    row_counts: RowCounts = field(default_factory=dict)
    old_row_counts: RowCounts = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def has_new_classes(self) -> bool:
        """Whether some labels have no output yet, neither in the model nor in the state."""
        return self.required_outputs > self.known_outputs

    @property
    def unlearned_outputs(self) -> list[int]:
        """Outputs of the model without an example to learn, neither in the new data nor in the old data."""
        labels = set(self.pair[1].tolist())
        if self.old_pair is not None:
            labels |= set(self.old_pair[1].tolist())
        return sorted(set(range(self.outputs)) - labels)

    def name_output(self, index: int) -> str:
        """Return the class of an output, or its index."""
        return self.classes.names[index] if index < len(self.classes.names) else str(index)

    def separate(self, deployed: DeployedModel, keep: int) -> None:
        """Keep training and held-out examples disjoint across updates.

        Args:
            deployed: what earlier updates have learned and held out.
            keep: how many examples of a held-out set are stored; 0 means that all are used and none is stored.
        """
        # The old data that were given: without examples that were trained on, and without those in stored sets.
        old_sets = list(deployed.held_out_sets)
        if self.old_held_out is not None:
            unlearned = self._exclude_learned(self.old_held_out, deployed.learned_digests)
            self.old_held_out = self._exclude_duplicates(unlearned, deployed.held_out_sets, keep)
            if self.old_held_out is not None:
                old_sets.append(self.old_held_out)

        # No training on old held-out examples.
        given_examples = len(self.pair[1])
        self.pair = exclude_held_out(self.pair, old_sets)
        num_excluded = given_examples - len(self.pair[1])
        if num_excluded == given_examples:
            raise ValueError(
                f"All {given_examples} examples of {self.title} are in held-out sets of old skills: there is nothing "
                "to train on."
            )
        if num_excluded:
            self.notes.append(
                f"{num_excluded} examples of {self.title} are in held-out sets of old skills, and were not trained on."
            )

        # No evaluation on examples that were trained on, in this update or before.
        self.learned_digests = set(example_digests(self.pair[0]))
        unlearned = self._exclude_learned(self.held_out, deployed.learned_digests | self.learned_digests)

        # A duplicate of an earlier set is evaluated in this update; later updates drop it when they load the sets.
        unique = self._exclude_duplicates(unlearned, old_sets, keep)
        self.held_out = unique or unlearned.sample(keep or len(unlearned))

        # The method must not store held-out examples in its memory either.
        if self.old_pair is not None and deployed.is_first:
            self.old_pair = exclude_held_out(self.old_pair, [*old_sets, self.held_out])
            self.old_digests = set(example_digests(self.old_pair[0]))

    def describe_changes(self, classes: Classes) -> list[str]:
        """Describe new classes, new outputs and excluded examples for the report.

        Args:
            classes: of the model before the update.
        """
        # Without names, classes are called by the index of their output.
        new_names = self.classes.names[len(classes.names) :]
        if not new_names:
            new_names = tuple(map(str, range(self.known_outputs, self.required_outputs)))

        sentences = []
        if self.known_outputs > self.outputs:
            sentences.append(
                f"The weights have {self.outputs} outputs, those of the last update had {self.known_outputs}: the "
                "others are newly initialized."
            )
        if new_names:
            sentences.append(f"New classes: {first_few(new_names, limit=20)}.")
        if self.required_outputs > self.outputs:
            sentences.append(
                f"The output layer grew from {self.outputs} to {self.required_outputs} outputs: load the weights with "
                "everlearn.updating.load, or make the model as wide."
            )

        if not sentences:
            return self.notes
        return [" ".join(sentences), *self.notes]

    def _exclude_learned(self, held_out: HeldOutSet, learned_digests: set[bytes]) -> HeldOutSet:
        """Drop examples that were trained on; if these are all, keep all and say so."""
        remaining = exclude_examples(held_out, learned_digests)
        if not len(remaining):
            self.notes.append(
                f"All {len(held_out)} held-out examples of {held_out.title} were trained on, in this update or "
                "before: their accuracy is training accuracy."
            )
            return held_out

        num_excluded = len(held_out) - len(remaining)
        if num_excluded:
            self.notes.append(
                f"{num_excluded} examples of {held_out.title} were trained on, in this update or before, and are not "
                "in its held-out set."
            )
        return remaining

    def _exclude_duplicates(self, held_out: HeldOutSet, earlier: list[HeldOutSet], keep: int) -> HeldOutSet | None:
        """Drop examples of earlier held-out sets, and sample at most ``keep``; None if too few remain."""
        remaining = exclude_duplicates(held_out, earlier)
        if remaining is None:
            self.notes.append(
                f"Most held-out examples of {held_out.title} are in earlier held-out sets, and count only there."
            )
            return None

        num_excluded = len(held_out) - len(remaining)
        if num_excluded:
            self.notes.append(
                f"{num_excluded} held-out examples of {held_out.title} are in earlier held-out sets, and count only "
                "there."
            )
        return remaining.sample(keep or len(remaining))


def read_update_data(deployed: DeployedModel, data: Any, old: Any, rules: Rules) -> UpdateData:
    """Read the new data and the old data of an update, and separate training from held-out examples.

    Args:
        deployed: the deployed model; its columns are set if they were not known.
        data: the new data.
        old: data of the old skills; None for none.
        rules: the share to hold out, and how many examples to keep.
    """
    title = _make_title(data, "the new data")
    raw = _read_checked(deployed, data, title, rules)
    old_title = _make_title(old, "the old data")
    old_raw = None
    if old is not None:
        old_raw = _read_checked(deployed, old, old_title, rules)
        read_data.check_same_columns(raw, title, old_raw, old_title)

    # Later tables may have another order: their columns are found by these names.
    if not deployed.columns:
        old_features = [] if old_raw is None else old_raw.features
        deployed.columns = tuple(raw.features) or tuple(old_features)

    # New classes get the next outputs; those that exist keep theirs.
    known_classes = deployed.classes
    classes = known_classes.extended_by(raw, title)
    pair, held_out_pair = classes.relabel(raw, title)
    outputs = outputs_of(deployed.model, pair[0], title)
    known_outputs = max(outputs, deployed.known_outputs)
    if len(known_classes.names) > known_outputs:
        raise ValueError(
            f"classes: {len(known_classes.names)} are named, but the model has {outputs} outputs; name these."
        )

    labels = torch.cat([pair[1], held_out_pair[1]])
    update_data = UpdateData(
        title=title,
        classes=classes,
        pair=pair,
        held_out=HeldOutSet(deployed.next_number, title, *held_out_pair),
        outputs=outputs,
        known_outputs=known_outputs,
        required_outputs=classes.count_required_outputs(labels, known_outputs, title),
        digest=str(fingerprint([pair, held_out_pair])),
    )
    if old_raw is not None:
        update_data.old_pair, old_held_out_pair = known_classes.relabel(old_raw, old_title)

        # Only the first update stores the held-out part of the old data.
        old_number = 0 if deployed.is_first else NOT_STORED
        update_data.old_held_out = HeldOutSet(old_number, old_title, *old_held_out_pair)

    # All rows that were given: held-out ones that are not stored are known, too.
    given = [update_data.pair, held_out_pair]
    old_given = []
    if update_data.old_pair is not None:
        old_given = [update_data.old_pair, old_held_out_pair]

    update_data.separate(deployed, rules.keep)
    if can_forget(deployed.method):
        update_data.row_counts = count_rows(update_data.pair, given)
        if update_data.old_pair is not None and deployed.is_first:
            update_data.old_row_counts = count_rows(update_data.old_pair, old_given)
    return update_data


def _read_checked(deployed: DeployedModel, data: Any, title: str, rules: Rules) -> Data:
    labeled_data = read_data.read(data, deployed.reading, rules.holdout, deployed.columns)
    read_data.check_examples(labeled_data, title)
    return labeled_data


def _make_title(data: Any, default: str) -> str:
    if isinstance(data, (str, os.PathLike)):
        return Path(data).name
    return default
