"""Options of the commands; importing them does not import torch, so that help is shown at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from everlearn.core.scenario import DataKind, Scenario
from everlearn.experiments.options import Grid, Workers
from everlearn.runtime.processes import count_cores

YesNo = Literal["yes", "no"]
ReportFormat = Literal["html", "md", "csv", "png", "text"]


class CompareOptions(BaseModel):
    """Options of ``everlearn compare``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    methods: str = Field("all", description="Methods, separated by commas, or 'all'.")
    scenario: str = Field("all", description="Any of task, domain, class, separated by commas, or 'all'.")
    seeds: int = Field(3, ge=1, description="Number of seeds, starting at 0; one gives no standard deviation.")
    epochs: int | None = Field(None, ge=1, description="Epochs per task; default: 4 or 10, depending on the problem.")
    workers: Workers = Field(
        default_factory=count_cores, description="Number of worker processes; 'auto', the default, for one per core."
    )
    threads: int = Field(1, ge=1, description="Number of torch threads; small models are fastest with 1.")
    out: Path = Field(Path("runs/compare"), description="Folder of the results; existing results are reused ...")
    force: bool = Field(False, description="... unless this is set.")


class AdviseOptions(BaseModel):
    """Options of ``everlearn advise``; None means no constraint."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    scenario: Scenario | None = Field(
        None,
        description="What is known about an example at test time. task: its task. domain: nothing; all tasks have the "
        "same classes. class: nothing; later tasks add classes.",
    )
    keep_data: YesNo | None = Field(None, description="Whether examples of old tasks may be stored.")
    grow: YesNo | None = Field(None, description="Whether the model may grow with the number of tasks.")
    labels: YesNo | None = Field(
        None,
        description="Whether the data to remember has labels; if not, there are only a trained model and inputs.",
    )
    boundaries: YesNo | None = Field(None, description="Whether task boundaries are known during training.")
    pretrained: Literal["yes", "no", "unknown"] | None = Field(
        None, description="Whether the model was pretrained on data like those to come."
    )
    data: DataKind | None = Field(None, description="Kind of data: results on the same kind count first.")
    tasks: int | None = Field(None, ge=1, description="Number of tasks.")
    time: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Maximum time of a step, in baseline steps."
    )
    memory: str | None = Field(
        None,
        description="Memory a method may use besides the model: copies of the model, as in 2x, or bytes, as in 20MB.",
    )
    parameters: int | None = Field(
        None, ge=1, description="Number of parameters of the model; needed if the memory is given in bytes."
    )
    inputs: int | None = Field(
        None, ge=1, description="Numbers per example (784 for 28 × 28), to compute how many examples fit the memory."
    )

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: str | None) -> str | None:
        from everlearn.experiments.advice import is_in_bytes

        # Raises if the amount cannot be parsed.
        is_in_bytes(value)
        return value


class ReproduceOptions(BaseModel):
    """Options of ``everlearn reproduce``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    cells: str = Field("*", description="Cells as ROW/COLUMN, separated by commas; ``SI/*`` selects a row.")
    seeds: int = Field(3, ge=1, description="Number of seeds, starting at 0.")
    force: bool = Field(False, description="Repeat runs whose results exist.")
    quick: bool = Field(False, description="Run a few steps with one seed, as a smoke test; not the protocol.")
    dry_run: bool = Field(False, description="Only print the command of each cell.")
    data: Path | None = Field(None, description="Folder of the data sets; default: EVERLEARN_DATA.")
    workers: Workers = Field(1, description="Number of worker processes; 'auto' for one per core.")
    threads: int = Field(1, ge=1, description="Number of torch threads; small models are fastest with 1.")
    out: Path = Field(Path("runs/reproduce"), description="Folder of the results; existing results are reused.")
    record: Path | None = Field(
        None, description="Folder to record the numbers in; a page of all recorded tables is written beside it."
    )


class TuneOptions(BaseModel):
    """Options of ``everlearn tune`` beside those of ``everlearn run``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    fields: str = Field(
        "",
        description="Fields to tune, as in ewc.strength=1:1e9,ewc.decay; the default range is that of "
        "'everlearn show'. By default the first field that has a range.",
    )
    trials: int = Field(16, ge=1, description="Number of trials; a larger number later extends the same study.")
    first: int | None = Field(None, ge=2, description="Tune on this many first tasks only; default: on all.")
    prune: bool = Field(
        True, description="Stop a trial that is worse than three quarters of the earlier ones, after any task."
    )


class TuneGrid(Grid):
    """Options of ``everlearn run``, with the defaults of tuning."""

    methods: str = Field("ewc", description="Methods, separated by commas, a study each; 'ewc+lwf' chains two.")
    valid: float = Field(0.1, gt=0, lt=1, description="Fraction of the training examples held out for validation.")
    out: Path = Field(Path("runs/tune"), description="Folder of the studies.")


class Updating(BaseModel):
    """The options of ``everlearn update``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    model: str = Field(
        description="The function that makes the model, as package.module:function; the working folder is searched too."
    )
    weights: Path = Field(description="The deployed weights, a safetensors file; replaced if the update is accepted.")
    state: Path = Field(description="The state folder; for a first update a new or empty one.")
    data: Path | None = Field(
        None, description="The new data: a .csv, .tsv, .parquet or .npz file, or a folder of images."
    )
    forget: Path | None = Field(
        None,
        description="Instead of --data: learned rows to take out again, exactly (heads on frozen features only). "
        "--versions 1 also deletes earlier versions, which still contain them.",
    )
    method: str = Field(
        "",
        description="The method that protects the old skills; 'er+ewc' chains two. By default that of the last update.",
    )
    set: list[str] = Field([], description="A field of a method, as in ewc.strength=30; may be repeated.")
    old: Path | None = Field(
        None, description="Data of the old skills: for the method in a first update, and to measure old accuracy."
    )
    classes: str = Field(
        "", description="In a first update: names of the outputs in their order, or a file with one per line."
    )
    x: str = Field(
        "",
        description="Input columns in the order that the model was trained on: separated by commas, or a file with one "
        "per line; by default all but the labels (npz: the array x). Later updates find them by name.",
    )
    y: str = Field("", description="The column, or array, of labels; y by default.")
    size: int | None = Field(None, ge=1, description="Side of the images, in pixels (folders of images only).")
    grey: bool | None = Field(None, description="Images with one channel.")
    tolerance: float = Field(
        2.0, ge=0, description="Points by which the mean accuracy over old held-out sets may fall ..."
    )
    per_set: bool = Field(False, description="... or the accuracy on any one of them.")
    holdout: float = Field(0.2, gt=0, lt=1, description="Share of the data to hold out.")
    keep: int = Field(1000, ge=0, description="Examples of a held-out set to store at most; 0 stores none.")
    versions: int = Field(5, ge=1, description="Versions to store in the state folder at most.")
    epochs: int = Field(10, ge=1, description="Passes over the new data.")
    iterations: int | None = Field(None, ge=1, description="Optimizer steps, instead of epochs.")
    batch_size: int = Field(32, ge=1, description="Examples per step.")
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] = Field("adam", description="The optimizer.")
    lr: float = Field(0.001, gt=0, allow_inf_nan=False, description="Its learning rate.")
    momentum: float = Field(0.0, ge=0, description="Its momentum (sgd and rmsprop).")
    weight_decay: float = Field(0.0, ge=0, description="Its weight decay.")
    clip: float | None = Field(None, gt=0, description="Largest norm of the gradient.")
    seed: int = Field(0, description="Seed of the order of examples and of new outputs.")
    balance: bool = Field(
        True, description="Balance a replay memory over updates and their classes (used in the first update)."
    )
    output: str | None = Field(None, description="Name of the output layer; the last linear one by default.")
    device: str = Field("cpu", description="Device to train on, as torch names it.")
    threads: int | None = Field(None, ge=1, description="Threads torch may use; small models are fastest with 1.")
    accept_weights: bool = Field(
        False,
        description="Continue from the weights file even if the last update did not write it: it was changed, or an "
        "earlier version was put back, or its state is in another folder.",
    )
    repeat: bool = Field(False, description="Train again on data that were learned before.")
    dry_run: bool = Field(False, description="Train and measure, but write nothing.")
