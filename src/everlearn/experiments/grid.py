"""Grids of runs: streams × scenarios × methods × seeds, from the options of ``everlearn run``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.core.scenario import SCENARIOS, Scenario
from everlearn.core.stream import Stream
from everlearn.experiments.console import make_trackers
from everlearn.experiments.options import Grid
from everlearn.experiments.parsing import UsageError, look_up, make_method, parse_settings, split_list
from everlearn.methods import METHODS
from everlearn.results.result import Result
from everlearn.streams import STREAMS
from everlearn.trainer import CheckpointEvery, run

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


@dataclass(frozen=True)
class GridRun:
    """One run of a grid.

    Args:
        grid: the grid, for its training settings.
        stream: name of the stream.
        scenario: scenario of the stream.
        method: a fresh method.
        joint: whether all tasks are learned at once.
        seed: seed of the run.
        num_first_tasks: number of tasks to learn, from the first on; by default all.
    """

    grid: Grid
    stream: str
    scenario: Scenario
    method: Method
    joint: bool
    seed: int
    num_first_tasks: int | None = None

    def __str__(self) -> str:
        method_name = "joint" if self.joint else label(self.method)
        return f"{self.stream}, {self.scenario}-incremental, {method_name}, seed {self.seed}"

    def run(self, force: bool) -> Result:
        """Run it, or read the result of an earlier run unless forced."""
        grid = self.grid
        stream = self.build_stream()
        # With several workers, the bar of the grid is the only one.
        show_bar = False if grid.workers > 1 or grid.cluster else None
        return run(
            grid.model_factory,
            self.method,
            stream.joint() if self.joint else stream,
            optimizer=optimizer(grid),
            epochs=grid.num_epochs(stream),
            iterations=grid.iterations,
            batch_size=grid.batch_size,
            seed=self.seed,
            clip=grid.clip,
            accumulate=grid.accumulate,
            precision=grid.precision,
            keep_optimizer=grid.keep_optimizer,
            split="valid" if grid.valid else "test",
            device=grid.device,
            out=grid.out,
            force=force,
            trackers=make_trackers(grid.track),
            progress=show_bar,
            checkpoint=CheckpointEvery(grid.checkpoint_steps, grid.checkpoint_minutes),
        )

    def build_stream(self) -> Stream:
        """Build the stream with the run's seed."""
        make_stream = STREAMS[self.stream]
        options: dict[str, Any] = {}
        if self.grid.tasks is not None:
            options["tasks"] = self.grid.tasks
        if "root" in inspect.signature(make_stream).parameters:
            options["root"] = self.grid.data

        stream: Stream = make_stream(scenario=self.scenario, seed=self.seed, valid=self.grid.valid, **options)
        if self.grid.all_classes:
            stream = stream.with_all_classes()
        if self.num_first_tasks is not None:
            stream = stream.first(self.num_first_tasks)
        return stream


def grid_runs(grid: Grid) -> Iterator[GridRun]:
    """All runs of a grid; every name is checked before the first run is returned."""
    scenario_names = split_list(grid.scenario)
    scenarios = SCENARIOS if "all" in scenario_names else scenario_names
    known_scenarios: dict[str, Scenario] = {scenario: scenario for scenario in SCENARIOS}
    streams = split_list(grid.stream)
    for stream in streams:
        look_up("stream", stream, STREAMS)

    settings = parse_settings(grid.set)
    expressions = split_list(grid.methods)
    methods = {seed: _make_methods(expressions, settings, seed) for seed in range(grid.seeds)}

    used_names = {name.strip().lower() for expression in expressions for name in expression.split("+")}
    unused_names = set(settings) - used_names
    if unused_names:
        raise UsageError(
            f"Fields of {', '.join(sorted(unused_names))} are set, which is not among the methods to run "
            f"({grid.methods}): name it too, or leave the setting out."
        )

    runs = [
        GridRun(grid, stream, look_up("scenario", scenario, known_scenarios), method, joint, seed)
        for stream in streams
        for scenario in scenarios
        for seed in range(grid.seeds)
        for method, joint in methods[seed]
    ]
    return iter(runs)


def _make_methods(
    expressions: list[str], settings: Mapping[str, Mapping[str, Any]], seed: int
) -> list[tuple[Method, bool]]:
    """Make the methods of a seed, and whether each learns all tasks at once; their own random numbers follow the seed.

    >>> methods = _make_methods(["l2", "joint"], {"l2": {"strength": "30"}}, seed=1)
    >>> [(label(method), is_joint) for method, is_joint in methods]
    [('L2(strength=30.0)', False), ('finetune', True)]
    """
    methods = []
    for expression in expressions:
        if expression == "joint":
            methods.append((Method(), True))
            continue

        # A method with random features has a field "seed", which may be set like any other.
        seeded_settings = dict(settings)
        for name in expression.lower().split("+"):
            method_class = METHODS.get(name.strip())
            if method_class is not None and "seed" in [field.name for field in fields(method_class)]:
                seeded_settings[name.strip()] = {"seed": seed, **settings.get(name.strip(), {})}
        methods.append((make_method(expression, seeded_settings), False))
    return methods


def optimizer(grid: Grid) -> Any:
    """Factory of the grid's optimizer, a function of the parameters."""
    settings: dict[str, float] = {"lr": grid.lr, "weight_decay": grid.weight_decay}
    if grid.optimizer in ("sgd", "rmsprop"):
        settings["momentum"] = grid.momentum
    if grid.optimizer in ("adam", "adamw"):
        settings["fused"] = True
    return partial(OPTIMIZERS[grid.optimizer], **settings)
