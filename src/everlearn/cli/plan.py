"""What a command shall run: one model that is both the options of ``everlearn run`` and the keys of its YAML file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import nn

from everlearn.cli.live import listeners
from everlearn.cli.names import (
    MOST_CHARACTERS,
    UsageError,
    did_you_mean,
    explain,
    look_up,
    make_method,
    parse_settings,
    parse_yaml,
    words,
)
from everlearn.method import Method, label
from everlearn.nets import NETS
from everlearn.results import Result
from everlearn.stream import SCENARIOS, Scenario, Stream
from everlearn.streams import STREAMS
from everlearn.trainer import Every, run

P = TypeVar("P", bound="Plan")
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


class Plan(BaseModel):
    """Streams × scenarios × methods × seeds, and how each is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    stream: str = Field("digits", description="Streams, separated by commas; 'everlearn list' names them.")
    scenario: str = Field("class", description="Any of task, domain, class, separated by commas, or 'all'.")
    methods: str = Field(
        "finetune,joint",
        description="Methods, separated by commas; 'l2+freeze' chains two; 'joint' learns all tasks at once.",
    )
    set: list[str] = Field([], description="A method's field, as in l2.strength=30; may be repeated.")
    tasks: int | None = Field(None, ge=1, description="Tasks in a stream, instead of the stream's own number.")
    foreseen: bool = Field(False, description="Class-incremental: all classes may be named from the start.")
    seeds: int = Field(1, ge=1, description="How many seeds, counted from 0.")
    net: Literal["mlp", "cnn", "resnet", "transformer"] = Field("mlp", description="The model.")
    hidden: str = Field("400,400", description="Widths of the hidden layers (mlp only).")
    init: Literal["torch", "xavier"] = Field("torch", description="First weights (mlp only).")
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] = Field("adam", description="The optimizer.")
    lr: float = Field(0.001, gt=0, description="Its learning rate.")
    momentum: float = Field(0.0, ge=0, description="Its momentum (sgd and rmsprop).")
    weight_decay: float = Field(0.0, ge=0, description="Its weight decay.")
    keep_optimizer: bool = Field(False, description="Keep the optimizer between tasks instead of making a fresh one.")
    epochs: int | None = Field(None, ge=1, description="Passes over each task's data; 10, or 1 for online streams.")
    iterations: int | None = Field(
        None, ge=1, description="Optimizer steps per task, instead of epochs; joint takes as many in all."
    )
    batch_size: int = Field(32, ge=1, description="Examples per step.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient.")
    accumulate: int = Field(1, ge=1, description="Micro-batches per step.")
    precision: Literal["float32", "bfloat16"] = Field("float32", description="Of the forward pass.")
    valid: float = Field(0.0, ge=0, lt=1, description="Share of training examples held back and tested on instead.")
    data: Path | None = Field(None, description="Folder of data sets in files; by default EVERLEARN_DATA.")
    device: str = Field("cpu", description="Where to train, as torch names it.")
    threads: int | None = Field(None, ge=1, description="Threads torch may use; small models are fastest with 1.")
    track: str = Field("", description="Who else is told: any of tensorboard, mlflow, wandb, separated by commas.")
    workers: int = Field(1, ge=1, description="Runs side by side, each in a process of its own.")
    cluster: Literal["ray", "slurm"] | None = Field(
        None,
        description="Where to run instead: a Ray cluster (RAY_ADDRESS, or this machine) or Slurm; paths must be shared.",
    )
    time_limit: int = Field(1440, ge=1, description="Minutes a Slurm job may take before it is queued again.")
    partition: str | None = Field(None, description="Of Slurm.")
    checkpoint_minutes: float | None = Field(
        5.0, ge=0, description="A killed run goes on where it was: minutes from one checkpoint to the next ..."
    )
    checkpoint_steps: int | None = Field(None, ge=1, description="... or steps; one is written after every task too.")
    out: Path = Field(Path("runs"), description="Folder of the results.")

    @property
    def widths(self) -> list[int]:
        """Of the hidden layers."""
        return [int(w) for w in self.hidden.split(",")]

    @property
    def net_maker(self) -> Callable[..., nn.Module]:
        """What makes the model."""
        return partial(NETS["mlp"], hidden=self.widths, init=self.init) if self.net == "mlp" else NETS[self.net]

    def passes(self, stream: Stream) -> int:
        """Over each task's data."""
        return self.epochs or (1 if stream.once else 10)

    @field_validator("stream", "scenario", "methods", "hidden", mode="before")
    @classmethod
    def _list_as_text(cls, value: Any) -> Any:
        """A YAML file may write a list, or a single number."""
        if isinstance(value, list):
            return ",".join(map(str, value))
        return str(value) if isinstance(value, int) else value

    @field_validator("set", mode="before")
    @classmethod
    def _settings_as_text(cls, value: Any) -> Any:
        """A YAML file may write a mapping, flat (l2.strength: 30) or nested (l2: {strength: 30})."""
        if not isinstance(value, dict):
            return [value] if isinstance(value, str) else value
        nested = {k: v for k, v in value.items() if isinstance(v, dict)}
        flat = {k: v for k, v in value.items() if k not in nested}
        flat |= {f"{name}.{field}": v for name, own in nested.items() for field, v in own.items()}
        return [f"{path}={json.dumps(v) if isinstance(v, (dict, list)) else v}" for path, v in flat.items()]

    @model_validator(mode="after")
    def _options_go_together(self) -> Plan:
        if self.momentum and self.optimizer not in ("sgd", "rmsprop"):
            raise ValueError(f"momentum: {self.optimizer} has none to set; use sgd or rmsprop")
        if not all(w.strip().isdigit() and int(w) > 0 for w in self.hidden.split(",")):
            raise ValueError(f"hidden: got {self.hidden!r}, allowed: widths separated by commas, as in 400,400")
        for name in ("stream", "scenario", "methods"):
            if not words(getattr(self, name)):
                raise ValueError(f"{name}: got nothing, name at least one")
        return self

    @model_validator(mode="after")
    def _device_exists(self) -> Plan:
        if self.cluster is not None:
            return self  # it is of other machines
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {self.device!r} cannot be used here ({str(error).splitlines()[0]})") from None
        return self


def read(file: Path, given: P) -> P:
    """The plan of a YAML file, with what was given on the command line put over it."""
    try:
        with file.open(encoding="utf-8") as opened:
            content = parse_yaml(opened.read(MOST_CHARACTERS + 1))  # whatever its size
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"Cannot read {file}: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} must hold 'key: value' lines, with the option names of 'everlearn run' as keys.")
    content = {str(k).replace("-", "_"): v for k, v in content.items()}
    for key in content:
        if key not in Plan.model_fields:
            raise UsageError(f"{file}: unknown key {key!r}. {did_you_mean(key, Plan.model_fields)}")
    try:
        return type(given)(**{**content, **{name: getattr(given, name) for name in given.model_fields_set}})
    except ValidationError as error:
        raise UsageError(f"{file}: {explain(error)}") from None


@dataclass(frozen=True)
class Cell:
    """One run of a plan."""

    plan: Plan
    stream: str
    scenario: Scenario
    method: Method
    joint: bool
    seed: int
    first: int | None = None  # so many tasks alone

    def __str__(self) -> str:
        what = "joint" if self.joint else label(self.method)
        return f"{self.stream}, {self.scenario}-incremental, {what}, seed {self.seed}"

    def run(self, force: bool) -> Result:
        """Do it, or read it where it is done already."""
        p, stream = self.plan, self.made()
        return run(
            p.net_maker, self.method, stream.joint() if self.joint else stream,
            optimizer=optimizer(p), epochs=p.passes(stream), iterations=p.iterations, batch_size=p.batch_size, seed=self.seed,
            clip=p.clip, accumulate=p.accumulate, precision=p.precision, keep_optimizer=p.keep_optimizer,
            split="valid" if p.valid else "test", device=p.device, out=p.out, force=force,
            trackers=listeners(p.track), progress=False if p.workers > 1 or p.cluster else None,
            checkpoint=Every(p.checkpoint_steps, p.checkpoint_minutes),
        )  # fmt: skip

    def made(self) -> Stream:
        """The stream."""
        p, make = self.plan, STREAMS[self.stream]
        given: dict[str, Any] = {} if p.tasks is None else {"tasks": p.tasks}
        if "root" in inspect.signature(make).parameters:
            given["root"] = p.data
        stream: Stream = make(scenario=self.scenario, seed=self.seed, valid=p.valid, **given)
        stream = stream.foreseen() if p.foreseen else stream
        return stream if self.first is None else stream.first(self.first)


def cells(plan: Plan) -> Iterator[Cell]:
    """Every run of the plan; all names are looked up before the first is done."""
    scenarios = SCENARIOS if "all" in words(plan.scenario) else words(plan.scenario)
    known: dict[str, Scenario] = {s: s for s in SCENARIOS}
    settings = parse_settings(plan.set)
    streams = words(plan.stream)
    for stream in streams:
        look_up("stream", stream, STREAMS)
    methods = [(Method() if e == "joint" else make_method(e, settings), e == "joint") for e in words(plan.methods)]
    if unused := set(settings) - {name.strip().lower() for e in words(plan.methods) for name in e.split("+")}:
        raise UsageError(
            f"Fields of {', '.join(sorted(unused))} are set, which is not among the methods to run ({plan.methods}): name it "
            "too, or leave the setting out."
        )
    todo = [
        Cell(plan, stream, look_up("scenario", scenario, known), method, joint, seed)
        for stream in streams
        for scenario in scenarios
        for seed in range(plan.seeds)
        for method, joint in methods
    ]
    return iter(todo)


def optimizer(plan: Plan) -> Any:
    """The optimizer's factory."""
    settings: dict[str, float] = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    if plan.optimizer in ("sgd", "rmsprop"):
        settings["momentum"] = plan.momentum
    if plan.optimizer in ("adam", "adamw"):
        settings["fused"] = True
    return partial(OPTIMIZERS[plan.optimizer], **settings)
