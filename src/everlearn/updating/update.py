"""Update a deployed model: load it, train it on new data, measure old and new accuracy, accept or refuse."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.methods.heads.base import FrozenHead
from everlearn.sources.labeled_data import first_few
from everlearn.trainer.cost import Clock
from everlearn.trainer.settings import OptimizerFactory, Training, adam
from everlearn.updating import weights_file
from everlearn.updating.commit import TrainedUpdate, accept, refuse
from everlearn.updating.deployed import DeployedModel, build_deployed, load_deployed
from everlearn.updating.held_out_sets import (
    NOT_STORED,
    HeldOutSet,
    compute_accuracies,
    evaluate_held_out,
    skill_above_chance,
)
from everlearn.updating.holdout import UpdateData, read_update_data
from everlearn.updating.intervals import count_pairs
from everlearn.updating.learning import (
    TrainingOptions,
    balance_memory,
    check_device,
    check_method,
    consolidate_old_data,
    train_update,
    use_output,
)
from everlearn.updating.read_data import Reading, check_known_columns, is_table
from everlearn.updating.state_folder import StateFolder
from everlearn.updating.stored_method import latest_method, serialize_method
from everlearn.updating.suggestions import suggest
from everlearn.updating.verdict import Rules, Update, score_classes
from everlearn.updating.weights_file import Factory, Weights

NEAR_CHANCE = 0.2  # as a share of the way from chance to perfect

ModelBuilder = Callable[[Weights], nn.Module]


def update(
    make_model: Factory,
    weights: str | os.PathLike[str],
    state: str | os.PathLike[str],
    data: Any,
    method: Method | None = None,
    *,
    old: Any = None,
    classes: Sequence[str] | None = None,
    read: Reading = Reading(),  # noqa: B008 - frozen
    tolerance: float = 2.0,
    per_set: bool = False,
    holdout: float = 0.2,
    keep: int = 1000,
    versions: int = 5,
    training: Training = Training(epochs=10, batch_size=32),  # noqa: B008
    optimizer: OptimizerFactory = adam,
    output: str | None = None,
    balance: bool = True,
    device: str | torch.device | None = None,
    accept_weights: bool = False,
    repeat: bool = False,
    dry_run: bool = False,
) -> Update:
    """Train a deployed model on new data, and replace it only if old accuracy has not fallen by more than allowed.

    The state folder has a version per accepted update: the weights, the state of the method, and held-out examples,
    which measure the old accuracy in all later updates. A process that is killed leaves the model and the state of
    before or of after the update, never a mixture; repeat the call to continue. The method that you pass and your
    random state do not change.

    Args:
        make_model: a function without arguments that returns the model.
        weights: the deployed weights, a safetensors file: read in the first update, replaced by each accepted one.
        state: the state folder; for a first update a new or empty one.
        data: the new data: a CSV, Parquet or npz file, a folder of images, ``sources.Data`` or a pair (x, y) of arrays.
        method: the method that protects the old skills, of the same kind in all updates. Later ones may leave it out.
        old: data of the old skills, of the same kinds as ``data``. In a first update the method uses them as its first
            task, and a share is held out; in later updates accuracy is measured on that share, and the rest is not
            used.
        classes: in a first update, the names of the outputs in their order; not needed if labels are indices of
            outputs.
        read: which columns are inputs and labels, which size images are resized to. The order of a table's columns is
            that of the first update; later tables may have another, because columns are found by name.
        tolerance: by how many points old accuracy, the mean over the old held-out sets, may fall.
        per_set: whether the tolerance applies to each old held-out set, instead of to their mean.
        holdout: the share of the data to hold out, if they have no test set.
        keep: how many examples of a held-out set are stored at most. 0 stores none, and old accuracy is then measured
            on ``old`` alone.
        versions: how many versions are stored at most.
        training: epochs, batch size, seed and the like.
        optimizer: a function that takes the parameters and returns an optimizer.
        output: name of the output layer, which grows with new classes; by default the last ``nn.Linear``.
        balance: in a first update, whether to balance the memory of a replay method over updates and their classes, if
            its policy is the default; a reservoir would fill with rows of the largest update.
        device: the device to train on.
        accept_weights: whether to continue from the weights file even if the latest update did not write it. If it is
            the file of a stored version, that version is resumed: method state, classes, held-out sets, learned data.
        repeat: whether to train again on data that were learned before.
        dry_run: whether to train and measure, but write nothing.

    Returns:
        The verdict, the accuracies and the report.
    """
    # Wrong arguments are reported before the state folder is created.
    if method is not None:
        check_method(method)
    check_device(device)
    rules = Rules(tolerance, per_set, holdout, keep, versions)
    options = TrainingOptions(training, optimizer, output)
    folder = StateFolder(state)

    def build_model(model_weights: Weights) -> nn.Module:
        return weights_file.build_model(make_model, model_weights, output).to(device)

    with nullcontext() if dry_run else folder.lock():
        # The caller's method does not change.
        method = latest_method(folder) if method is None else copy.deepcopy(method)
        check_method(method)
        use_output(method, output)

        # The model as it is deployed, with the state of the method.
        deployed = load_deployed(folder, Path(weights), build_model, method, classes, accept_weights, output)
        if deployed.is_first and balance:
            balance_memory(method)

        # New data, read as in earlier updates unless the caller says otherwise.
        check_known_columns(deployed.columns, read.x if is_table(data) else ())
        deployed.reading = read.with_defaults(deployed.reading)
        update_data = read_update_data(deployed, data, old, rules)

        learned_in = deployed.data_digests.get(update_data.digest)
        if learned_in is not None and not repeat:
            return _report_known_data(folder, deployed, update_data, learned_in, dry_run)

        trained = _train_and_measure(deployed, update_data, rules, options, build_model)
        if dry_run:
            trained.update.notes.append("Dry run: nothing is written.")
        elif trained.update.accepted:
            accept(folder, deployed, trained, options)
        else:
            refuse(folder, deployed, trained, options)
        return trained.update


def _report_known_data(
    folder: StateFolder, deployed: DeployedModel, update_data: UpdateData, number: int, dry_run: bool
) -> Update:
    """Report that an earlier update has learned these data, and complete it if it was interrupted."""
    notes = list(deployed.notes)
    if not dry_run:
        notes += deployed.finish_interrupted(folder)
    notes.append(
        f"{update_data.title} was learned in update {number}: there is nothing to do. To train on it again, pass "
        "repeat=True (--repeat on the command line)."
    )
    return Update(number, label(deployed.method), new=False, notes=notes)


def _train_and_measure(
    deployed: DeployedModel,
    update_data: UpdateData,
    rules: Rules,
    options: TrainingOptions,
    build_model: ModelBuilder,
) -> TrainedUpdate:
    """Train the deployed model in place, and measure its accuracy before and after."""
    clock = Clock()
    method = deployed.method
    notes = list(deployed.notes)

    held_out_sets = [*deployed.held_out_sets, update_data.held_out]
    if update_data.old_held_out is not None:
        held_out_sets.insert(0, update_data.old_held_out)

    # Accuracies before the training; the model is trained in place afterwards.
    with clock("evaluate"):
        correct_before = evaluate_held_out(deployed.model, held_out_sets)
    for warning in _warn_near_chance(deployed, held_out_sets, correct_before):
        warnings.warn(warning, stacklevel=3)
        notes.append(f"Warning: {warning}")

    # The method has not seen the data that the model was trained on before its first update.
    if deployed.is_first:
        notes += _check_unlearned_outputs(method, update_data)
        if update_data.old_pair is None:
            notes.append(_describe_missing_old_data(method))
        else:
            with clock("consolidate"):
                consolidate_old_data(deployed.model, method, update_data.old_pair, options)

    # Version 0 stores this state, so that it is possible to return to the model before the first update.
    initial_method_state = serialize_method(method) if deployed.is_first else b""

    # New outputs are added only if the data require them.
    new_outputs = None
    if update_data.required_outputs > update_data.outputs:
        new_outputs = update_data.required_outputs
    train_result = train_update(deployed.model, method, update_data.pair, deployed.next_number, new_outputs, options)
    clock.add(train_result.seconds)
    notes += update_data.describe_changes(deployed.classes)

    # Accuracy after the training is that of the weights as they will be stored.
    with clock("evaluate"):
        new_model, deployment_notes = build_deployed(
            deployed, build_model, update_data.held_out.x, options.training.seed
        )
        notes += deployment_notes
        correct_after = evaluate_held_out(new_model, held_out_sets)

    outcome = _judge(deployed, update_data, rules, held_out_sets, correct_before, correct_after)
    outcome.notes = [*notes, *outcome.caveats()]
    return TrainedUpdate(
        update=outcome,
        initial_method_state=initial_method_state,
        classes=update_data.classes,
        pair=update_data.pair,
        data_digest=update_data.digest,
        learned_digests=update_data.learned_digests - deployed.learned_digests - update_data.old_digests,
        old_digests=update_data.old_digests,
        row_counts=update_data.row_counts,
        old_row_counts=update_data.old_row_counts,
        seconds=dict(clock.seconds),
    )


def _judge(
    deployed: DeployedModel,
    update_data: UpdateData,
    rules: Rules,
    held_out_sets: list[HeldOutSet],
    correct_before: dict[int, Tensor],
    correct_after: dict[int, Tensor],
) -> Update:
    """Compare the accuracies before and after, and decide whether the update is accepted."""
    outcome = Update(
        number=deployed.next_number,
        method=label(deployed.method),
        held_out_sets=held_out_sets,
        learned={number: row[number] for number, row in deployed.history.items() if number in row},
        before=compute_accuracies(correct_before),
        after=compute_accuracies(correct_after),
        rules=rules,
    )
    outcome.fall = rules.fall(outcome.before, outcome.after, outcome.old)
    outcome.accepted = outcome.fall is None or outcome.fall <= rules.tolerance

    # The same examples before and after: only those that changed carry information.
    paired_counts = [count_pairs(correct_before[number], correct_after[number]) for number in outcome.old]
    outcome.interval = rules.interval(paired_counts)
    outcome.classes = score_classes(outcome.old_held_out_sets, correct_before, correct_after, update_data.classes.names)
    if not outcome.accepted:
        outcome.suggestions = suggest(
            deployed.method,
            is_first=deployed.is_first,
            has_new_classes=update_data.has_new_classes,
            is_certain=outcome.is_certain,
        )
    return outcome


def _warn_near_chance(
    deployed: DeployedModel, held_out_sets: list[HeldOutSet], correct: dict[int, Tensor]
) -> list[str]:
    """Warn of old data that the user gave and on which the deployed model is hardly above chance.

    Stored held-out sets have the columns and labels that the model was trained on, and low accuracy on new data is no
    mistake: neither is checked.
    """
    messages = []
    for held_out in held_out_sets:
        is_given = held_out.number in (0, NOT_STORED) and held_out not in deployed.held_out_sets
        if is_given and skill_above_chance(held_out, correct[held_out.number]) < NEAR_CHANCE:
            accuracy = 100 * float(correct[held_out.number].double().mean())
            messages.append(
                f"Before this update the model classifies only {accuracy:.1f} % of {held_out} correctly, hardly more "
                "than by chance: the columns (their order, --x; their scale) or the labels (--classes) are probably "
                "not those that it was trained on."
            )
    return messages


def _check_unlearned_outputs(method: Method, update_data: UpdateData) -> list[str]:
    """Raise or warn if a first update would lose classes: a head knows only those whose examples it was given.

    Returns:
        Sentences for the report.
    """
    if not isinstance(method, FrozenHead) or not update_data.unlearned_outputs:
        return []

    names = first_few([update_data.name_output(index) for index in update_data.unlearned_outputs])
    if update_data.old_pair is None:
        raise ValueError(
            f"{label(method)} computes the output layer from the examples that it is given, and this first update has "
            f"none of {names}, for which the model has outputs: these classes would be lost. Give examples of all old "
            "classes, old=… (--old on the command line); later updates need none."
        )
    message = (
        f"Neither the old nor the new data have examples of {names} to learn from: {label(method)} computes the "
        "output layer from examples, and the new model will never predict these classes."
    )
    warnings.warn(message, stacklevel=4)
    return [f"Warning: {message}"]


def _describe_missing_old_data(method: Method) -> str:
    if isinstance(method, FrozenHead):
        return (
            f"This is the first update: {label(method)} has computed a new output layer from these data alone. To "
            "measure old accuracy too, give data of the old skills, old=… (--old on the command line)."
        )
    return (
        f"This is the first update: {label(method)} does not know the old skills of the model and cannot protect "
        "them, and they cannot be measured. Give data of these skills, old=… (--old on the command line); without "
        "them, protection and measurement begin with the next update."
    )
