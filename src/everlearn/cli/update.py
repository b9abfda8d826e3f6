"""``everlearn update``: teach a deployed model new data, or leave it as it is."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from everlearn.cli.names import UsageError, did_you_mean, make_method, parse_settings
from everlearn.cli.plan import Plan, optimizer
from everlearn.trainer.training import Training
from everlearn.updating import Reading, update
from everlearn.updating.standing import NO_METHOD
from everlearn.updating.state import POINTER
from everlearn.updating.weights import Factory

REFUSED = 3  # the exit code where old accuracy has fallen too far


class Updating(BaseModel):
    """The options of ``everlearn update``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(
        description="The function that makes the model, as package.module:function; the working folder counts."
    )
    weights: Path = Field(description="The deployed weights, a safetensors file; replaced when the update is accepted.")
    state: Path = Field(description="The state folder; for a first update a new or empty one.")
    data: Path = Field(description="What to learn: a .csv, .tsv, .parquet or .npz file, or a folder of images.")
    method: str = Field(
        "", description="What protects the old skills; 'er+ewc' chains two. By default that of the update before."
    )
    set: list[str] = Field([], description="A method's field, as in ewc.strength=30; may be repeated.")
    old: Path | None = Field(
        None, description="Data of the old skills: for the method in a first update, and as an exam."
    )
    classes: str = Field(
        "", description="In a first update: names of the outputs in their order, or a file with one per line."
    )
    x: str = Field(
        "",
        description="Columns to learn from, in the order that the model was trained on: separated by commas, or a file with one "
        "per line; by default all but the labels (npz: the array x). Later updates find them by name.",
    )
    y: str = Field("", description="The column, or array, of labels; y by default.")
    size: int | None = Field(None, ge=1, description="Side of the images, in pixels (folders of images only).")
    grey: bool | None = Field(None, description="Images with one channel.")
    tolerance: float = Field(2.0, ge=0, description="Points by which the mean accuracy in old exams may fall ...")
    each: bool = Field(False, description="... or the accuracy in any one of them.")
    exam: float = Field(0.2, gt=0, lt=1, description="Share of the data held back as their exam.")
    keep: int = Field(1000, ge=0, description="Examples of an exam that are kept at most; 0 keeps none.")
    versions: int = Field(5, ge=1, description="Versions kept in the state folder.")
    epochs: int = Field(10, ge=1, description="Passes over the new data.")
    iterations: int | None = Field(None, ge=1, description="Optimizer steps, instead of epochs.")
    batch_size: int = Field(32, ge=1, description="Examples per step.")
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] = Field("adam", description="The optimizer.")
    lr: float = Field(0.001, gt=0, allow_inf_nan=False, description="Its learning rate.")
    momentum: float = Field(0.0, ge=0, description="Its momentum (sgd and rmsprop).")
    weight_decay: float = Field(0.0, ge=0, description="Its weight decay.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient.")
    seed: int = Field(0, description="Of the order of examples and of new outputs.")
    balance: bool = Field(
        True, description="Share a replay memory equally among updates and their classes (said in the first update)."
    )
    output: str | None = Field(None, description="Name of the output layer; the last linear one by default.")
    device: str = Field("cpu", description="Where to train, as torch names it.")
    threads: int | None = Field(None, ge=1, description="Threads torch may use; small models are fastest with 1.")
    accept_weights: bool = Field(
        False,
        description="Go on from the weights file as it is: changed, an earlier version put back, or with its state elsewhere.",
    )
    again: bool = Field(False, description="Learn data once more that were learned before.")
    dry_run: bool = Field(False, description="Learn and measure, but write nothing.")


def give_update(o: Updating) -> int:
    """Do it; 0 where the update is accepted, 3 where it is refused because old accuracy has fallen too far."""
    plan = Plan(  # checks what belongs together
        optimizer=o.optimizer, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay, device=o.device
    )
    settings = parse_settings(o.set)
    if not o.method and not (o.state / POINTER).exists():
        raise UsageError(NO_METHOD)
    if not o.method and settings:
        raise UsageError(
            f"--set {', '.join(sorted(settings))}: name the method too, as in --method {next(iter(settings))}."
        )
    if unused := set(settings) - {name.strip().lower() for name in o.method.split("+")}:
        raise UsageError(f"--set {', '.join(sorted(unused))}: no such method is used here ({o.method}).")
    method = make_method(o.method, settings) if o.method else None
    make_model = factory(o.model)
    if o.threads is not None:
        torch.set_num_threads(o.threads)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Before this update the model")  # the report says it
            done = update(
                make_model, o.weights, o.state, o.data, method, old=o.old, classes=_names(o.classes) or None,
                read=Reading(tuple(dict.fromkeys(_names(o.x))), o.y, o.size, o.grey), tolerance=o.tolerance, each=o.each,
                exam=o.exam, keep=o.keep, versions=o.versions,
                training=Training(o.epochs, o.iterations, o.batch_size, o.seed, clip=o.clip), optimizer=optimizer(plan),
                output=o.output, balance=o.balance, device=o.device, accept_weights=o.accept_weights, again=o.again,
                dry_run=o.dry_run,
            )  # fmt: skip
    except (ArithmeticError, RuntimeError) as error:  # a loss that is no number, a full device
        raise ValueError(str(error)) from error
    except KeyboardInterrupt:
        print(
            "everlearn: Stopped. Model and state are those of before, or of after; the same command goes on.",
            file=sys.stderr,
        )
        return 130
    print(done)
    return 0 if done.accepted else REFUSED


def factory(text: str) -> Factory:
    """The function of that name; modules in the working folder are found too.

    >>> factory("everlearn.nets:mpl")
    Traceback (most recent call last):
    everlearn.cli.names.UsageError: everlearn.nets has no 'mpl'. Did you mean 'mlp'? ...
    """
    place, colon, name = text.partition(":")
    if not (place and colon and name):
        raise UsageError(f"--model reads package.module:function, as in shop.models:make_model; got {text!r}.")
    try:
        with _working_folder_on_path():
            module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # it is there, and needs something that is not
        raise UsageError(f"There is no module {place!r}, neither installed nor in the working folder.") from None
    except Exception as error:  # it is the user's code, and may fail in any way
        raise ImportError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        found: Any = reduce(getattr, name.split("."), module)
    except AttributeError:
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{place} has no {name!r}. {did_you_mean(name, known)}") from None
    if not callable(found) or isinstance(found, nn.Module):
        raise UsageError(f"--model names a function that makes a model; {text} is a {type(found).__name__}.")
    return _explained(found, text)


@contextmanager
def _working_folder_on_path() -> Iterator[None]:
    """Inside, modules in the working folder are found, after all others.

    Nowhere else: what lies beside the data, and has the name of a library that reads them, must not be run.
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


def _explained(make: Any, text: str) -> Factory:
    """The function, whose failures are told as its own."""

    def made() -> nn.Module:
        try:
            with _working_folder_on_path():
                return make()  # type: ignore[no-any-return]
        except Exception as error:
            raise ValueError(f"{text}() failed: {type(error).__name__}: {error}") from error

    return made


def _names(text: str) -> list[str]:
    """Names from a list, or from the lines of a file."""
    if text and Path(text).is_file():
        return [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [word.strip() for word in text.split(",") if word.strip()]
