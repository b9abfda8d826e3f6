"""Options of ``everlearn run``, and the YAML file that holds them; importing them does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from everlearn.experiments.parsing import (
    MAX_YAML_CHARACTERS,
    UsageError,
    did_you_mean,
    explain,
    parse_yaml,
    split_list,
)
from everlearn.runtime.optional_imports import imports_of_extra
from everlearn.runtime.processes import count_cores

with imports_of_extra("cli", "A grid of runs"):
    import yaml
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        ValidationError,
        field_validator,
        model_validator,
    )

if TYPE_CHECKING:
    from torch import nn

    from everlearn.core.stream import Stream

GridT = TypeVar("GridT", bound="Grid")


def _parse_workers(value: Any) -> Any:
    if value == "auto":
        return count_cores()
    return value


Workers = Annotated[int, BeforeValidator(_parse_workers), Field(ge=1)]


class Grid(BaseModel):
    """Streams × scenarios × methods × seeds, and the training settings of all runs.

    The fields are both the options of ``everlearn run`` and the keys of its YAML file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    stream: str = Field("digits", description="Streams, separated by commas; 'everlearn list' names them.")
    scenario: str = Field("class", description="Any of task, domain, class, separated by commas, or 'all'.")
    methods: str = Field(
        "finetune,joint",
        description="Methods, separated by commas; 'l2+freeze' chains two; 'joint' learns all tasks at once.",
    )
    set: list[str] = Field([], description="Field of a method, as in l2.strength=30; may be repeated.")
    tasks: int | None = Field(None, ge=1, description="Number of tasks; default: that of the stream.")
    all_classes: bool = Field(False, description="Class-incremental: predict among all classes from the first task on.")
    seeds: int = Field(1, ge=1, description="Number of seeds, starting at 0.")
    net: Literal["mlp", "cnn", "resnet", "mobilenet_v2", "transformer"] = Field("mlp", description="Model.")
    hidden: str = Field("400,400", description="Widths of the hidden layers, or 'none' (mlp only).")
    init: Literal["torch", "xavier"] = Field("torch", description="Weight initialization (mlp only).")
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] = Field("adam", description="Optimizer.")
    lr: float = Field(0.001, gt=0, description="Learning rate.")
    momentum: float = Field(0.0, ge=0, description="Momentum (sgd and rmsprop).")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    keep_optimizer: bool = Field(False, description="Keep the optimizer's state between tasks.")
    epochs: int | None = Field(None, ge=1, description="Epochs per task; default: 10, or 1 for online streams.")
    iterations: int | None = Field(
        None, ge=1, description="Optimizer steps per task, instead of epochs; joint takes as many in total."
    )
    batch_size: int = Field(32, ge=1, description="Examples per step.")
    clip: float | None = Field(None, gt=0, description="Maximum norm of the gradient.")
    accumulate: int = Field(1, ge=1, description="Micro-batches per step.")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the forward pass.")
    valid: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of the training examples to hold out and evaluate on instead of test data.",
    )
    data: Path | None = Field(None, description="Folder of the data sets; default: EVERLEARN_DATA.")
    device: str = Field("cpu", description="Device to train on, as torch names it.")
    threads: int | None = Field(None, ge=1, description="Number of torch threads; small models are fastest with 1.")
    track: str = Field("", description="Trackers to log to: any of tensorboard, mlflow, wandb, separated by commas.")
    workers: Workers = Field(1, description="Number of worker processes; 'auto' for one per core.")
    cluster: Literal["ray", "slurm"] | None = Field(
        None,
        description="Cluster to run on: ray (RAY_ADDRESS, or this machine) or slurm; paths must be shared.",
    )
    time_limit: int = Field(1440, ge=1, description="Minutes a Slurm job may take before it is queued again.")
    partition: str | None = Field(None, description="Slurm partition.")
    checkpoint_minutes: float | None = Field(
        5.0, ge=0, description="Minutes between two checkpoints, from which a killed run resumes ..."
    )
    checkpoint_steps: int | None = Field(
        None, ge=1, description="... or steps between them; every task ends with a checkpoint, too."
    )
    out: Path = Field(Path("runs"), description="Folder of the results.")

    @property
    def widths(self) -> list[int]:
        """Widths of the hidden layers; none for a linear model."""
        if self.hidden == "none":
            return []
        return [int(width) for width in self.hidden.split(",")]

    @property
    def model_factory(self) -> Callable[..., nn.Module]:
        """Function that makes the model."""
        from everlearn.nets import NETS

        if self.net == "mlp":
            return partial(NETS["mlp"], hidden=self.widths, init=self.init)
        return NETS[self.net]

    def num_epochs(self, stream: Stream) -> int:
        """Number of epochs per task."""
        if self.epochs is not None:
            return self.epochs
        return 1 if stream.single_pass else 10

    @field_validator("stream", "scenario", "methods", "hidden", mode="before")
    @classmethod
    def _join_list(cls, value: Any) -> Any:
        """Accept a list, or a single number, from a YAML file."""
        if isinstance(value, list):
            return ",".join(map(str, value))
        return str(value) if isinstance(value, int) else value

    @field_validator("set", mode="before")
    @classmethod
    def _flatten_settings(cls, value: Any) -> Any:
        """Accept a mapping from a YAML file, flat (l2.strength: 30) or nested (l2: {strength: 30})."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, dict):
            return value

        # Flat settings come first, so that nested ones win.
        settings = {key: entry for key, entry in value.items() if not isinstance(entry, dict)}
        for method, method_fields in value.items():
            if isinstance(method_fields, dict):
                settings |= {f"{method}.{field}": field_value for field, field_value in method_fields.items()}
        return [f"{path}={_setting_text(field_value)}" for path, field_value in settings.items()]

    @model_validator(mode="after")
    def _check_options(self) -> Grid:
        if self.momentum and self.optimizer not in ("sgd", "rmsprop"):
            raise ValueError(f"momentum: {self.optimizer} has none to set; use sgd or rmsprop")
        has_widths = all(width.strip().isdigit() and int(width) > 0 for width in self.hidden.split(","))
        if not has_widths and self.hidden != "none":
            raise ValueError(
                f"hidden: got {self.hidden!r}, allowed: widths separated by commas, as in 400,400, or none"
            )
        for name in ("stream", "scenario", "methods"):
            if not split_list(getattr(self, name)):
                raise ValueError(f"{name}: got nothing, name at least one")
        return self

    @model_validator(mode="after")
    def _check_device(self) -> Grid:
        # A device of a cluster cannot be tried on this machine, and the CPU need not be.
        if self.cluster is not None or self.device == "cpu":
            return self

        import torch

        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {self.device!r} cannot be used here ({str(error).splitlines()[0]})") from None
        return self


def _setting_text(value: Any) -> str:
    """Text of a value as ``parse_settings`` reads it."""
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return str(value)


def read_grid(file: Path, given: GridT) -> GridT:
    """Read a grid from a YAML file; options that were set in ``given`` win.

    Args:
        file: YAML file with the fields of ``Grid`` as keys.
        given: grid of the command line, whose class the result has.
    """
    try:
        with file.open(encoding="utf-8") as opened_file:
            # One character more than allowed is enough to refuse a huge file.
            content = parse_yaml(opened_file.read(MAX_YAML_CHARACTERS + 1))
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"Cannot read {file}: {' '.join(str(error).split())}.") from None

    if not isinstance(content, dict):
        raise UsageError(f"{file} must hold 'key: value' lines, with the option names of 'everlearn run' as keys.")
    options = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in options:
        if key not in Grid.model_fields:
            raise UsageError(f"{file}: unknown key {key!r}. {did_you_mean(key, Grid.model_fields)}")

    given_options = {name: getattr(given, name) for name in given.model_fields_set}
    try:
        return type(given)(**{**options, **given_options})
    except ValidationError as error:
        raise UsageError(f"{file}: {explain(error)}") from None
