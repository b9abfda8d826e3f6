"""Deployed models, data and state folders for the tests of updates."""

import json
import shutil
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from everlearn import ER, nets, streams
from everlearn.runtime import files
from everlearn.sources import Data
from everlearn.surgery.heads import output_layer
from everlearn.trainer import Training
from everlearn.updating import load, update

FAST = Training(epochs=4, batch_size=32)
QUICK = Training(iterations=2, batch_size=8)
NAMES = ["zero", "one", "two", "three", "four", "five"]
SHUFFLED = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()


class Killed(BaseException):
    """Simulate the end of the process."""


def make_model(outputs=4):
    torch.manual_seed(7)  # so that every call returns the same weights
    return nets.mlp((1, 8, 8), outputs, hidden=(64,))


def digits(*classes, shift=0):
    """Return training and test data of the given digits, shifted sideways by some pixels."""
    pairs = []
    for x, y in streams.digits_data():
        is_chosen = torch.isin(y, torch.tensor(classes))
        pairs.append((x[is_chosen].roll(shift, 3)[:160], y[is_chosen][:160]))
    return Data(*pairs)


def with_class_names(data, named):
    return Data(*data, names=NAMES[: 1 + max(int(y.max()) for _, y in data)]) if named else data


def write_npz(path, data):
    (x, y), (x_test, y_test) = data
    np.savez(path, x=x.numpy(), y=y.numpy(), x_test=x_test.numpy(), y_test=y_test.numpy())
    return path


def write_csv(path, data, names=None, order=None):
    """Write pixels as columns and labels as class names, if there are names."""
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    columns = [f"p{i}" for i in (order or range(64))]
    lines = [",".join(["kind", *columns])]
    for row, label in zip(x.flatten(1), y.tolist(), strict=True):
        cells = [f"{row[i]:.4f}" for i in (order or range(64))]
        lines.append(",".join([names[label] if names else str(label), *cells]))
    path.write_text("\n".join(lines))
    return path


def run_update(data, method=None, **options):
    return update(
        options.pop("factory", make_model),
        "model.safetensors",
        options.pop("state", "state"),
        data,
        ER(200) if method is None else method,
        training=options.pop("training", FAST),
        **{"tolerance": 100.0, **options},
    )


def read_files(folder, excluded=("refused", ".lock")):
    """Return the content of every file."""
    paths = [
        path
        for path in Path(folder).rglob("*")
        if path.is_file() and not set(excluded) & set(path.relative_to(folder).parts)
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def current_version(state="state"):
    return json.loads((Path(state) / "current.json").read_text())["version"]


def weights_equal(a, b):
    a, b = (safetensors.torch.load_file(p) for p in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def overwrite(name, content):
    return lambda: Path(name).write_bytes(content)


def kill_at_write(monkeypatch, index):
    """Raise Killed before write number `index`, counted from 0; return the names of written files."""
    written = []
    write = files.write

    def write_or_die(path, *content, mode=0o644):
        if len(written) == index:
            raise Killed
        write(path, *content, mode=mode)
        written.append(path.name)

    monkeypatch.setattr(files, "write", write_or_die)
    return written


def grow_and_roll_back(method, named, **options):
    """Update twice, the second time with a new class, and restore the file of update 1."""
    class_options = {"classes": NAMES[:4]} if named else {}
    new_class_data = with_class_names(digits(0, 1, 2, 3, 4, shift=2), named)
    old, first_data = (with_class_names(digits(0, 1, 2, 3, shift=shift), named) for shift in (0, 1))
    first = run_update(first_data, method, old=old, training=QUICK, **class_options, **options)
    shutil.copy("model.safetensors", "of-update-1.safetensors")
    run_update(new_class_data, method, training=QUICK, **options)
    assert output_layer(load(make_model, "model.safetensors"))[1].out_features == 5
    shutil.copy("of-update-1.safetensors", "model.safetensors")
    return first, new_class_data
