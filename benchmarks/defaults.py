"""Revisit the defaults of all methods but the penalties of parameters, on streams that are not in the README.

    nice -n 10 python benchmarks/defaults.py --data DATA [--methods er,hat] [--seeds 3] [--count]

One field of a method at a time takes another value, while all others keep the value that PLANS lists as their start,
which was the default when the experiment was designed. Every run is evaluated on validation data: half or more of each
task's training examples; no test example is used. Results are written to runs/defaults as they are finished, so that
the command can be stopped and repeated; with all seeds of all methods it writes docs/results/defaults.json, from which
``make tables`` writes the table of docs/defaults.md.

The rule was fixed before the first run. A field keeps its default unless another value

    gains at least 1 point, as a mean over streams of the mean over seeds,
    gains at least two standard errors over streams,
    and loses more than 1 point on none of them.

It must also keep what the method promises. A ring keeps the most recent examples of each task, and without task
boundaries only the most recent of all: it is measured, but cannot be the default of methods that need no boundaries
(``Plan.excluded``; this clause was added when the first seed of DER had been seen).

If several values pass, the largest mean gain decides. If several fields of a method pass, only the one with the
largest gain changes, because the fields were not varied together. Streams differ in data, scenario, optimizer and
number of classes; there is no choice by stream or scenario.

Fields that buy accuracy with memory or time are not revisited (capacity, dimension, hidden, units, epochs), nor are
switches whose values are different methods (Freeze.what, RanPAC.recursive, HAT.soft).
"""

import argparse
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

import everlearn
from everlearn import nets, streams
from everlearn.methods import METHODS
from everlearn.runtime.files import write
from everlearn.sources import load
from everlearn.streams.pretrained import encode_sentences

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "results" / "defaults.json"
COMMAND = "nice -n 10 python benchmarks/defaults.py --data DATA"

# The rule, in points of accuracy.
MIN_GAIN = 1.0
MIN_STANDARD_ERRORS = 2.0
MAX_LOSS = 1.0

BATCH_SIZE = 32
HIDDEN = (100, 100)
FEATURE_SIZE = 96

PUBLISHED_NAMES = {"fashion": "fashion_mnist", "letters": "chars74k"}

# Examples that a run draws of each class, and the share of them that is for validation; 300 and 2/3 of other sets.
EXAMPLES_PER_CLASS = {
    "letters": (90, 2 / 3),
    "clinc150": (45, 2 / 3),
    "rotated-usps": (40, 1 / 2),
    "clinc150-minilm": (60, 1 / 2),
    "fashion-mobilenet": (200, 1 / 2),
    "letters-mobilenet": (60, 1 / 2),
    "notmnist-mobilenet": (200, 1 / 2),
    "omniglot-mobilenet": (20, 1 / 2),
}


@dataclass(frozen=True)
class Plan:
    """What is varied in a method.

    Args:
        streams: names in STREAMS.
        candidates: other values of each field than its start.
        start: value of each field at the time of the experiment.
        settings: values of further fields, in all runs.
        excluded: candidates that are measured but cannot be the default.
    """

    streams: tuple[str, ...]
    candidates: Mapping[str, tuple[Any, ...]]
    start: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    excluded: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


REPLAY = ("fashion/class", "letters/class", "clinc150/class", "rotated-digits/domain", "gas-drift/domain")
PROJECTION = ("rotated-digits/domain", "rotated-usps/domain", "gas-drift/domain", "letters/task")
GENERATION = ("fashion/class", "letters/class", "usps/class", "rotated-digits/domain")
TASK = ("fashion/task", "letters/task", "clinc150/task", "gas-drift/task")
DISTILLATION = ("fashion/task", "letters/task", "usps/task", "clinc150/task")
EXPANDABLE = ("fashion/class", "letters/class", "usps/class", "clinc150/class")
FEATURES = ("clinc150-minilm", "fashion-mobilenet", "letters-mobilenet", "notmnist-mobilenet", "omniglot-mobilenet")
PRETRAINED = ("fashion-pretrained", "letters-pretrained", "usps-pretrained", "notmnist-pretrained")

POLICIES = ("balanced", "ring")
NEEDS_BOUNDARIES = {"policy": ("ring",)}
MEMORY = {"capacity": 150}  # a tenth of the training examples, or a little more

# The values of ``start`` stay as they are when a default changes: they are those of the recorded runs.
PLANS = {
    "er": Plan(
        REPLAY,
        {"policy": POLICIES, "balance": ("tasks",)},
        {"policy": "reservoir", "balance": "examples"},
        MEMORY,
        NEEDS_BOUNDARIES,
    ),
    "er-ace": Plan(REPLAY, {"policy": POLICIES}, {"policy": "reservoir"}, MEMORY, NEEDS_BOUNDARIES),
    "der": Plan(
        REPLAY,
        {"policy": POLICIES, "alpha": (0.2, 1.0)},
        {"policy": "reservoir", "alpha": 0.5},
        MEMORY,
        NEEDS_BOUNDARIES,
    ),
    "derpp": Plan(
        REPLAY,
        {"policy": POLICIES, "alpha": (0.2, 1.0), "beta": (0.2, 1.0)},
        {"policy": "reservoir", "alpha": 0.5, "beta": 0.5},
        MEMORY,
        NEEDS_BOUNDARIES,
    ),
    "agem": Plan(
        PROJECTION,
        {"policy": ("balanced",), "size": (64, 128)},
        {"policy": "ring", "size": 256},
        MEMORY,
    ),
    "gem": Plan(
        PROJECTION,
        {"policy": ("balanced",), "margin": (0.0, 0.25, 1.0)},
        {"policy": "ring", "margin": 0.5},
        MEMORY,
    ),
    "generative": Plan(
        GENERATION, {"targets": ("soft",)}, {"targets": "hard", "temperature": 2.0}, {"hidden": 100, "latent": 20}
    ),
    "lwf": Plan(DISTILLATION, {"temperature": (1.0, 4.0, 8.0)}, {"temperature": 2.0}),
    "packnet": Plan(
        TASK,
        {"prune": (0.5, 0.9), "first": (0.25, 0.75), "retrain": (0.2, 0.5), "rest": ("own",)},
        {"prune": 0.75, "first": 0.5, "retrain": 1 / 3, "rest": "frozen"},
    ),
    "pnn": Plan(TASK, {"laterals": ("linear", "none")}, {"laterals": "adapter"}),
    "hat": Plan(
        TASK,
        {
            "strength": (0.25, 1.5),
            "smax": (50.0, 200.0, 800.0),
            "anneal": ("task",),
            "rest": ("frozen",),
        },
        {"strength": 0.75, "smax": 400.0, "anneal": "epoch", "rest": "own"},
    ),
    "den": Plan(
        TASK,
        {
            "threshold": (0.1, 0.3),
            "drift": (0.2, 0.5),
            "strength": (0.05, 5.0),
            "l1": (0.0, 1e-4),
            "lasso": (1e-2,),
            "fit": (0.2,),
            "retrain": (0.15,),
            "expand": (0.15,),
        },
        {
            "threshold": 0.01,
            "drift": 0.05,
            "strength": 0.5,
            "l1": 1e-5,
            "lasso": 1e-3,
            "fit": 0.1,
            "retrain": 0.3,
            "expand": 0.3,
        },
    ),
    "expandnet": Plan(
        TASK,
        {
            "threshold": (0.01, 0.2),
            "rounds": (1,),
            "sparsity": (0.0, 1.0),
        },
        {"threshold": 0.05, "rounds": 3, "sparsity": 0.5},
    ),
    "expandable": Plan(
        EXPANDABLE,
        {
            "policy": ("balanced",),
            "auxiliary": (0.0, 2.0),
            "tune_from": ("anew",),
            "tune_lr": (0.01, 0.1),
            "temperature": (1.0, 2.0),
        },
        {"policy": "herding", "auxiliary": 1.0, "tune_from": "learned", "tune_lr": 0.05, "temperature": 5.0},
        MEMORY,
    ),
    "ranpac": Plan(
        FEATURES,
        {"ridge": (1.0, 100.0, 1e4), "normalize": (False,)},
        {"ridge": "gcv", "normalize": True},
        {"dimension": 1000},
    ),
    "klda": Plan(
        FEATURES,
        {"sigma": (0.01, 0.03, 0.3, 1.0), "shrinkage": (1e-4, 1e-2)},
        {"sigma": 0.1, "shrinkage": 1e-6},
        {"dimension": 1000},
    ),
    "fecam": Plan(
        FEATURES,
        {"power": (0.3, 0.75, 1.0), "alpha1": (0.1, 10.0), "alpha2": (0.0, 0.1), "normalize": (False,)},
        {"power": 0.5, "alpha1": 1.0, "alpha2": 1.0, "normalize": True},
    ),
    "streaming-lda": Plan(
        FEATURES,
        {"shrinkage": (1e-5, 1e-3, 1e-2, 1e-1), "normalize": (False,)},
        {"shrinkage": 1e-4, "normalize": True},
    ),
    "nearest-mean": Plan(FEATURES, {"normalize": (False,)}, {"normalize": True}),
    "slca": Plan(
        PRETRAINED,
        {
            "share": (1e-3, 0.1, 1.0),
            "lr": (1e-3, 0.1),
            "temperature": (0.5, 1.0),
            "shrinkage": (0.0,),
            "variance": (1e-2,),
        },
        {"share": 0.01, "lr": 0.01, "temperature": 0.1, "shrinkage": 0.1, "variance": 1e-4},
    ),
}

sgd = partial(torch.optim.SGD, lr=0.1)
fast_adam = partial(torch.optim.Adam, lr=3e-3, fused=True)
OPTIMIZERS = {"fashion": sgd, "notmnist": sgd, "rotated-usps": sgd}  # of the others: fast_adam


# The rule.


def stream_gains(
    default: Mapping[str, list[float | None]], candidate: Mapping[str, list[float | None]]
) -> dict[str, float]:
    """Return the gain of a value over the default on each stream, as a mean over seeds.

    Args:
        default: accuracies by seed of each stream, in points, with the default; None if the method refused it.
        candidate: the same with the other value.
    """
    if {s: len(a) for s, a in default.items()} != {s: len(a) for s, a in candidate.items()}:
        raise ValueError("The default and the other value need the same streams and seeds.")
    return {stream: mean_accuracy(candidate[stream]) - mean_accuracy(default[stream]) for stream in default}


def mean_accuracy(accuracies: list[float | None]) -> float:
    """Return the mean over seeds; NaN if the method refused a value in one of them."""
    return math.nan if None in accuracies else fmean(a for a in accuracies if a is not None)


def passes(gains: Mapping[str, float]) -> bool:
    """Return whether gains on streams suffice to replace a default."""
    values = list(gains.values())
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return False
    mean = fmean(values)
    return mean >= MIN_GAIN and mean >= MIN_STANDARD_ERRORS * standard_error(values) and min(values) >= -MAX_LOSS


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(values) / math.sqrt(len(values))


def decide(start: Mapping[str, Any], gains: Mapping[str, Mapping[Any, Mapping[str, float]]]) -> dict[str, Any]:
    """Return the values of a method's fields after the experiment: at most one differs from the start.

    Args:
        start: the default of each field.
        gains: gains by stream of each other value of each field.
    """
    passed = [
        (fmean(by_stream.values()), name, value)
        for name, by_value in gains.items()
        for value, by_stream in by_value.items()
        if passes(by_stream)
    ]
    if not passed:
        return dict(start)
    _, name, value = max(passed, key=lambda gain_name_value: gain_name_value[0])
    return {**start, name: value}


# The streams.


def select_per_class(x, y, count, seed):
    """Draw examples of each class."""
    random = torch.Generator().manual_seed(seed)
    indices = []
    for label in y.unique():
        rows = (y == label).nonzero().flatten()
        indices.append(rows[torch.randperm(len(rows), generator=random)[:count]])
    index = torch.cat(indices)
    return x[index], y[index]


@cache
def load_training_data(name, root):
    """Load the training examples of a set, with their classes."""
    if name in ("clinc150", "clinc150-minilm"):
        data = load("clinc150", root)
        (texts, y), _ = data
        x = streams.bag(texts, 512) if name == "clinc150" else encode_sentences(texts)[:, ::2]
        intents = torch.tensor([intent for domain in islice(data.groups, 5) for intent in data.groups[domain]])
        is_used = torch.isin(y, intents)
        return x[is_used], y[is_used]

    data_name, _, network = name.partition("-")
    (x, y), _ = load(PUBLISHED_NAMES.get(data_name, data_name), root)
    if data_name == "omniglot":
        x, y = x[y < 100], y[y < 100]
    if network == "mobilenet":
        return compute_features(*select_per_class(x, y, EXAMPLES_PER_CLASS[name][0], seed=0))
    return shrink_images(x), y


def shrink_images(x):
    """Resize images to 14 × 14 pixels, which halves the time of a run."""
    return F.interpolate(x, (14, 14), mode="bilinear", antialias=True)


def compute_features(x, y):
    """Compute a fifth of MobileNetV2's features of images, or read them from the cache of streams.features."""
    model = nets.mobilenet_v2((3, *x.shape[2:]), 10, weights="imagenet", size=FEATURE_SIZE)
    images = streams.from_tasks([((x.repeat(1, 3, 1, 1), y), (x[:1], y[:1]))], scenario="class")
    return streams.features(model, images, progress=False)[0].train.x[:, ::5], y


@cache
def make_stream(name, root, seed):
    """Build a stream by its name; its test data are a part of the training data, and no run evaluates them."""
    data_name, _, scenario = name.partition("/")
    if data_name == "gas-drift":
        return streams.gas_drift(scenario, seed=seed, valid=0.8, root=root)
    if data_name == "rotated-digits":
        return streams.rotated_digits(scenario, seed=seed, valid=0.85)

    x, y = load_training_data(data_name.removeprefix("rotated-").removesuffix("-pretrained"), root)
    count, valid = EXAMPLES_PER_CLASS.get(data_name.removesuffix("-pretrained"), (300, 2 / 3))
    pair = select_per_class(x, y, count, seed)
    options = {"scenario": scenario or "class", "seed": seed, "valid": valid, "name": name.replace("/", "-")}
    if data_name == "rotated-usps":
        return streams.rotated(pair, pair, tasks=5, **options)
    # The statistics of heads do not depend on the number of tasks.
    return streams.split(pair, pair, tasks=2 if name in FEATURES else 5, **options)


@cache
def pretrained_layers(root):
    """Train a network on MNIST, and return the parameters below its output layer."""
    (x, y), _ = load("mnist", root)
    x, y = shrink_images(x[:10000]), y[:10000]
    stream = streams.from_tasks([((x, y), (x[:1], y[:1]))], scenario="class")
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, 10, HIDDEN)
    everlearn.train(model, everlearn.Method(), stream[0], epochs=3, batch_size=BATCH_SIZE, progress=False)
    return {name: p for name, p in model.state_dict().items() if not name.startswith("5.")}


def make_model(name, root, inputs, outputs):
    """Create the network of a stream."""
    if name in FEATURES:
        return nets.mlp(inputs, outputs, hidden=())
    model = nets.mlp(inputs, outputs, HIDDEN)
    if name in PRETRAINED:
        model.load_state_dict(pretrained_layers(root), strict=False)
    return model


# The runs.


def run_once(method_name, settings, stream_name, seed, root, out):
    """Run a method with some settings on a stream, unless it is done; return the result."""
    method_class = METHODS[method_name]
    if method_name == "lwf":
        settings = {**settings, "strength": settings["temperature"] ** 2}
    data_name = stream_name.partition("/")[0].removesuffix("-pretrained")
    return everlearn.run(
        partial(make_model, stream_name, root),
        method_class(**settings),
        make_stream(stream_name, root, seed),
        optimizer=OPTIMIZERS.get(data_name, fast_adam),
        epochs=10,
        batch_size=BATCH_SIZE,
        seed=seed,
        split="valid",
        progress=False,
        out=out,
        checkpoint=None,
    )


def variants(plan):
    """Yield the settings to run: the start, then one other value of one field at a time."""
    base = {**plan.settings, **plan.start}
    yield base
    for name, values in plan.candidates.items():
        for value in values:
            yield {**base, name: value}


def all_runs(names, seeds):
    """Yield (method, settings, stream, seed): a seed of all methods after the other."""
    for seed in range(seeds):
        for name in names:
            for stream in PLANS[name].streams:
                for settings in variants(PLANS[name]):
                    yield name, settings, stream, seed


def record_method(name, seeds, accuracies):
    """Return what is recorded of a method: accuracies, gains and decisions.

    Args:
        name: the method.
        seeds: number of seeds.
        accuracies: a function of (settings, stream, seed).
    """
    plan = PLANS[name]

    def measure(changes):
        settings = {**plan.settings, **plan.start, **changes}
        return {stream: [accuracies(settings, stream, seed) for seed in range(seeds)] for stream in plan.streams}

    default_accuracies = measure({})
    rows = {
        field_name: {value: measure({field_name: value}) for value in values}
        for field_name, values in plan.candidates.items()
    }
    gains = {
        field_name: {value: stream_gains(default_accuracies, row) for value, row in by_value.items()}
        for field_name, by_value in rows.items()
    }
    eligible_gains = {
        field_name: {value: g for value, g in by_value.items() if value not in plan.excluded.get(field_name, ())}
        for field_name, by_value in gains.items()
    }
    decision = decide(plan.start, eligible_gains)

    fields = {}
    for field_name, by_value in rows.items():
        candidates = []
        for value, row in by_value.items():
            by_stream = list(gains[field_name][value].values())
            is_complete = not any(map(math.isnan, by_stream))
            candidates.append(
                {
                    "value": value,
                    "eligible": value in eligible_gains[field_name],
                    "gain": round(fmean(by_stream), 2) if is_complete else None,
                    "standard_error": round(standard_error(by_stream), 2) if is_complete else None,
                    "lowest_gain": round(min(by_stream), 2) if is_complete else None,
                    "accuracy": row,
                }
            )
        fields[field_name] = {
            "default": plan.start[field_name],
            "decision": decision[field_name],
            "accuracy": default_accuracies,
            "candidates": candidates,
        }
    return {"settings": dict(plan.settings), "streams": list(plan.streams), "fields": fields}


def main():
    """Do all runs, and record them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data sets")
    parser.add_argument("--out", default="runs/defaults", help="folder of the results")
    parser.add_argument("--methods", default=",".join(PLANS), help="some of the methods; then nothing is recorded")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--count", action="store_true", help="only count the runs")
    options = parser.parse_args()
    names = options.methods.split(",")
    runs = list(all_runs(names, options.seeds))
    if options.count:
        for name in names:
            print(f"{name:16} {sum(run[0] == name for run in runs):5} runs")
        print(f"{'':16} {len(runs):5}")
        return

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    accuracies = {}
    seconds = 0.0
    for name, settings, stream, seed in tqdm(runs, mininterval=10):
        try:
            result = run_once(name, settings, stream, seed, options.data, options.out)
        except ValueError as error:
            # A value that the method refuses, as FeCAM a matrix that it cannot invert, does not pass.
            tqdm.write(f"{name} {settings} on {stream}, seed {seed}: {error}")
            accuracies[name, json.dumps(settings), stream, seed] = None
            continue
        accuracies[name, json.dumps(settings), stream, seed] = round(100 * result.average_accuracy, 2)
        seconds += result.seconds
    if set(names) != set(PLANS):
        return

    methods = {}
    for name in names:
        lookup = lambda settings, stream, seed, name=name: accuracies[name, json.dumps(settings), stream, seed]
        methods[name] = record_method(name, options.seeds, lookup)
    record = {
        "command": COMMAND,
        "rule": {"min_gain": MIN_GAIN, "min_standard_errors": MIN_STANDARD_ERRORS, "max_loss": MAX_LOSS},
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "runs": len(runs),
        "seeds": options.seeds,
        "minutes": round(seconds / 60, 1),
        "methods": methods,
    }
    write(RECORD, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


if __name__ == "__main__":
    main()
