"""Gas sensor array drift: 13,910 measurements of six gases over 36 months, in ten batches (Vergara et al., 2012)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.labeled_data import Data, select_test_examples
from everlearn.sources.libsvm import read_sparse

GASES = ("Ethanol", "Ethylene", "Ammonia", "Acetaldehyde", "Acetone", "Toluene")
BATCH_SIZES = {1: 445, 2: 1244, 3: 1586, 4: 161, 5: 197, 6: 2300, 7: 3613, 8: 294, 9: 470, 10: 3600}
NUM_FEATURES = 128


def _read_npz(folder: Path) -> Data:
    with np.load(folder / "gas_drift_8of10.npz", allow_pickle=False) as stored:
        return _split_in_batches(stored["x"], stored["y"], stored["batch"])


def _read_batches(folder: Path) -> Data:
    """Read the published files that exist; a line starts with the gas, numbered from 1, or gas;concentration."""
    features = []
    gases = []
    batches = []
    for batch, size in BATCH_SIZES.items():
        path = folder / f"batch{batch}.dat"
        if not path.exists():
            continue

        labels, values = read_sparse(path.read_text(encoding="ascii"), NUM_FEATURES, path)
        if len(labels) != size:
            raise ValueError(f"{path} is damaged: it has {len(labels):,} measurements, not {size:,}; get it again.")
        features.append(values)
        gases += [int(label.split(";")[0]) - 1 for label in labels]
        batches += [batch] * size
    return _split_in_batches(np.concatenate(features), np.array(gases), np.array(batches))


def _split_in_batches(features: np.ndarray, gases: np.ndarray, batches: np.ndarray) -> Data:
    """Split into training and test data: every fifth measurement of each gas in each batch is for testing."""
    x = torch.from_numpy(features.astype(np.float32))
    y = torch.from_numpy(gases.astype(np.int64))
    times = torch.from_numpy(batches.astype(np.int64))
    is_test = select_test_examples(times * len(GASES) + y)
    return Data(
        (x[~is_test], y[~is_test]),
        (x[is_test], y[is_test]),
        names=GASES,
        times=(times[~is_test], times[is_test]),
    )


GAS_DRIFT = PublishedDataset(
    "gas_drift",
    (
        Layout(tuple(File(f"batch{i}.dat") for i in BATCH_SIZES), _read_batches, ("Dataset",)),
        Layout((File("gas_drift_8of10.npz", "08cf2250136af584acf183f72e2c3c4a"),), _read_npz),
        Layout(tuple(File(f"batch{i}.dat") for i in BATCH_SIZES), _read_batches, ("Dataset",), any_file=True),
    ),
    "archive.ics.uci.edu/dataset/270 (or 224, without concentrations)",
)
