"""The command ``everlearn update``: train a deployed model on new data, or forget rows, or leave it as it is."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everlearn.cli.options import Updating
from everlearn.core.method import Method
from everlearn.experiments.grid import optimizer
from everlearn.experiments.options import Grid
from everlearn.experiments.parsing import UsageError, did_you_mean, make_method, parse_settings
from everlearn.trainer.settings import OptimizerFactory, Training
from everlearn.updating import Reading, Update, forget, update
from everlearn.updating.state_folder import POINTER
from everlearn.updating.stored_method import NO_METHOD
from everlearn.updating.weights_file import Factory

USED_TO_FORGET = ["model", "weights", "state", "forget", "method", "set", "x", "y", "size", "grey", "versions"]
USED_TO_FORGET += ["output", "device", "threads", "accept_weights", "dry_run"]
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130


def give_update(options: Updating) -> int:
    """Run the command.

    Returns:
        The exit code: 0 if the update is accepted, 3 if it is refused because old accuracy has fallen too far.
    """
    _check_task(options)

    # Raises if the options of the optimizer do not fit together.
    plan = Grid(
        optimizer=options.optimizer,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        device=options.device,
    )
    method = _parse_method(options)
    make_model = factory(options.model)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    try:
        with warnings.catch_warnings():
            # The report has this warning too.
            warnings.filterwarnings("ignore", "Before this update the model")
            warnings.filterwarnings("ignore", "Neither the old nor the new data")
            if options.forget is None:
                outcome = _learn(options, optimizer(plan), make_model, method)
            else:
                outcome = _forget(options, make_model, method)
    except (ArithmeticError, RuntimeError) as error:
        # A loss that is not finite, or a device without memory: an error of the user's data, without a traceback.
        raise ValueError(str(error)) from error
    except KeyboardInterrupt:
        print(
            "everlearn: Interrupted. Model and state are those of before or of after the update; repeat the command to "
            "continue.",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED

    print(outcome)
    if not outcome.accepted:
        return EXIT_REFUSED
    return 0


def _check_task(options: Updating) -> None:
    """Raise unless there is either new data or rows to forget, and no option that forgetting does not use."""
    if (options.data is None) == (options.forget is None):
        raise UsageError("Give either new data to learn, --data FILE, or learned rows to forget, --forget FILE.")
    if options.forget is None:
        return

    unused = []
    for name, field in Updating.model_fields.items():
        if name not in USED_TO_FORGET and getattr(options, name) != field.default:
            unused.append(f"--{name.replace('_', '-')}")
    if unused:
        raise UsageError(f"{', '.join(unused)}: not used with --forget, leave it out.")


def _learn(options: Updating, make_optimizer: OptimizerFactory, make_model: Factory, method: Method | None) -> Update:
    """Learn new data."""
    return update(
        make_model,
        options.weights,
        options.state,
        options.data,
        method,
        old=options.old,
        classes=_parse_names(options.classes) or None,
        read=_parse_reading(options),
        tolerance=options.tolerance,
        per_set=options.per_set,
        holdout=options.holdout,
        keep=options.keep,
        versions=options.versions,
        training=Training(options.epochs, options.iterations, options.batch_size, options.seed, clip=options.clip),
        optimizer=make_optimizer,
        output=options.output,
        balance=options.balance,
        device=options.device,
        accept_weights=options.accept_weights,
        repeat=options.repeat,
        dry_run=options.dry_run,
    )


def _forget(options: Updating, make_model: Factory, method: Method | None) -> Update:
    """Forget learned rows."""
    return forget(
        make_model,
        options.weights,
        options.state,
        options.forget,
        method,
        read=_parse_reading(options),
        versions=options.versions,
        output=options.output,
        device=options.device,
        accept_weights=options.accept_weights,
        dry_run=options.dry_run,
    )


def _parse_reading(options: Updating) -> Reading:
    columns = tuple(dict.fromkeys(_parse_names(options.x)))
    return Reading(columns, options.y, options.size, options.grey)


def _parse_method(options: Updating) -> Method | None:
    """Create the method of the options; None if they name none, so that the state's is used."""
    settings = parse_settings(options.set)
    if not options.method:
        if options.forget is None and not (options.state / POINTER).exists():
            raise UsageError(NO_METHOD)
        if settings:
            raise UsageError(
                f"--set {', '.join(sorted(settings))}: name the method too, as in --method {next(iter(settings))}."
            )
        return None

    method_names = {name.strip().lower() for name in options.method.split("+")}
    unused = set(settings) - method_names
    if unused:
        raise UsageError(f"--set {', '.join(sorted(unused))}: no such method is used here ({options.method}).")
    return make_method(options.method, settings)


def factory(text: str) -> Factory:
    """Import the function of that name, also from modules in the working folder.

    >>> factory("everlearn.nets:mpl")
    Traceback (most recent call last):
    everlearn.experiments.parsing.UsageError: everlearn.nets has no 'mpl'. Did you mean 'mlp'? ...
    """
    module_name, colon, function_name = text.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"--model must be package.module:function, as in shop.models:make_model; got {text!r}.")

    try:
        with _working_folder_on_path():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module exists, but imports another that does not.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"There is no module {module_name!r}, neither installed nor in the working folder.") from None
    except Exception as error:
        # The module is the user's code, and may raise anything.
        raise ImportError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error

    try:
        function: Any = reduce(getattr, function_name.split("."), module)
    except AttributeError:
        candidates = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UsageError(f"{module_name} has no {function_name!r}. {did_you_mean(function_name, candidates)}") from None
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(f"--model must name a function that makes a model; {text} is a {type(function).__name__}.")
    return _with_named_errors(function, text)


@contextmanager
def _working_folder_on_path() -> Iterator[None]:
    """Append the working folder to the module search path.

    Only while the factory is imported and called: a file beside the data that has the name of a library must not be
    imported in place of that library.
    """
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return

    sys.path.append(folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def _with_named_errors(function: Any, text: str) -> Factory:
    """Wrap the factory so that its errors name it."""

    def make_model() -> nn.Module:
        try:
            with _working_folder_on_path():
                return function()  # type: ignore[no-any-return]
        except Exception as error:
            raise ValueError(f"{text}() failed: {type(error).__name__}: {error}") from error

    return make_model


def _parse_names(text: str) -> list[str]:
    """Parse names that are separated by commas, or read them from the lines of a file."""
    names = text.split(",")
    if text and Path(text).is_file():
        names = Path(text).read_text(encoding="utf-8").splitlines()
    return [name.strip() for name in names if name.strip()]
