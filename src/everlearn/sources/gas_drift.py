"""Gas sensor array drift: 13,910 measurements of six gases over 36 months, in ten batches (Vergara et al., 2012)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.sources.data import Data, held_back
from everlearn.sources.files import File, Layout, Published
from everlearn.sources.sparse import read_sparse

GASES = ("Ethanol", "Ethylene", "Ammonia", "Acetaldehyde", "Acetone", "Toluene")
SIZES = {1: 445, 2: 1244, 3: 1586, 4: 161, 5: 197, 6: 2300, 7: 3613, 8: 294, 9: 470, 10: 3600}
FEATURES = 128


def _stored(folder: Path) -> Data:
    with np.load(folder / "gas_drift_8of10.npz", allow_pickle=False) as stored:
        return _data(stored["x"], stored["y"], stored["batch"])


def _batches(folder: Path) -> Data:
    """The published files, as many as are there; a line begins with the gas from 1, or with gas;concentration."""
    x, y, batch = [], [], []
    for number, size in SIZES.items():
        path = folder / f"batch{number}.dat"
        if not path.exists():
            continue
        labels, values = read_sparse(path.read_text(encoding="ascii"), FEATURES, path)
        if len(labels) != size:
            raise ValueError(f"{path} is damaged: it has {len(labels):,} measurements, not {size:,}; get it anew.")
        x.append(values)
        y += [int(label.split(";")[0]) - 1 for label in labels]
        batch += [number] * size
    return _data(np.concatenate(x), np.array(y), np.array(batch))


def _data(x: np.ndarray, y: np.ndarray, batch: np.ndarray) -> Data:
    """In the order of time; every fifth measurement of each gas in each batch is for tests."""
    features = torch.from_numpy(x.astype(np.float32))
    gas, time = torch.from_numpy(y.astype(np.int64)), torch.from_numpy(batch.astype(np.int64))
    test = held_back(time * len(GASES) + gas)
    pairs = ((features[rows], gas[rows]) for rows in (~test, test))
    return Data(*pairs, names=GASES, times=(time[~test], time[test]))


GAS_DRIFT = Published(
    "gas_drift",
    (
        Layout(tuple(File(f"batch{i}.dat") for i in SIZES), _batches, ("Dataset",)),
        Layout((File("gas_drift_8of10.npz", "08cf2250136af584acf183f72e2c3c4a"),), _stored),
        Layout(tuple(File(f"batch{i}.dat") for i in SIZES), _batches, ("Dataset",), some=True),
    ),
    "archive.ics.uci.edu/dataset/270 (or 224, without concentrations)",
)
