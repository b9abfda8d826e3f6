"""Load published data sets by name: find, verify and read their files, and download them on request."""

from __future__ import annotations

import difflib
from functools import lru_cache
from pathlib import Path

from everlearn.sources.archives import extract_folder
from everlearn.sources.chars74k import CHARS74K
from everlearn.sources.checksums import (
    DamagedFileError,
    File,
    Layout,
    PublishedDataset,
    candidate_folders,
    find_layout,
    is_intact,
    missing_files_error,
    require_root,
    verify_file,
)
from everlearn.sources.cifar import CIFAR10, CIFAR100
from everlearn.sources.clinc150 import CLINC150
from everlearn.sources.download import download_file
from everlearn.sources.flowers import FLOWERS
from everlearn.sources.gas_drift import GAS_DRIFT
from everlearn.sources.labeled_data import Data
from everlearn.sources.mnist import FASHION_MNIST, MNIST, NOTMNIST
from everlearn.sources.omniglot import OMNIGLOT
from everlearn.sources.svhn import SVHN
from everlearn.sources.usps import USPS

SOURCES: dict[str, PublishedDataset] = {
    "mnist": MNIST,
    "fashion_mnist": FASHION_MNIST,
    "notmnist": NOTMNIST,
    "usps": USPS,
    "svhn": SVHN,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "omniglot": OMNIGLOT,
    "flowers": FLOWERS,
    "chars74k": CHARS74K,
    "clinc150": CLINC150,
    "gas_drift": GAS_DRIFT,
}


def load(name: str, root: str | Path | None = None, *, download: bool = False, size: int = 64) -> Data:
    """Load a published data set as ((x, y), (x_test, y_test)): images in [0, 1], channels first, labels from 0.

    Data sets without a published test set (notmnist, chars74k, omniglot, gas_drift) are split: every fifth example of
    each class is for testing, and duplicate images stay together.

    Args:
        name: one of ``SOURCES``.
        root: folder of the files, or a folder with a subfolder named after the data set; by default the environment
            variable EVERLEARN_DATA.
        download: whether to download missing or damaged files into ``root`` and to unpack them.
        size: side of the images in pixels, for data sets whose photographs differ in size (flowers).

    >>> load("mnits")
    Traceback (most recent call last):
    ValueError: Unknown data set 'mnits'. Did you mean 'mnist'? Available: mnist, fashion_mnist, ...
    """
    return load_raw(name, root, download=download, size=size).copy()


def load_raw(name: str, root: str | Path | None = None, *, download: bool = False, size: int = 64) -> Data:
    """Load a published data set with its images in bytes; the result is cached and must not be modified.

    Arguments as for ``load``. Streams use it to convert images to floats one batch at a time.
    """
    dataset = _look_up(name)
    file_names = ", ".join(file.name for file in dataset.layouts[0].files)
    folder = require_root(name, file_names, dataset.origin, root)

    try:
        return _find_and_read(dataset, folder, size)
    except (FileNotFoundError, DamagedFileError):
        if not download:
            raise

    _download(dataset, folder)
    return _find_and_read(dataset, folder, size)


def _find_and_read(dataset: PublishedDataset, root: Path, size: int) -> Data:
    match = find_layout(dataset, root)
    if match is None:
        raise missing_files_error(dataset, root)
    layout, folder = match

    # Modification times and sizes are part of the cache key, so that changed files are read again.
    file_states = []
    for file in layout.files:
        path = folder / file.name
        if path.exists():
            file_states.append((file, path, path.stat().st_mtime_ns, path.stat().st_size))

    if not layout.takes_size:
        size = 0
    return _read(layout, folder, tuple(file_states), size, dataset.origin)


@lru_cache(maxsize=8)
def _read(
    layout: Layout, folder: Path, file_states: tuple[tuple[File, Path, int, int], ...], size: int, origin: str
) -> Data:
    """Verify and read the files of a layout, once per process and state of the files."""
    for file, path, _, _ in file_states:
        verify_file(path, file, origin)
    if layout.takes_size:
        return layout.read(folder, size)
    return layout.read(folder)


def _download(dataset: PublishedDataset, root: Path) -> None:
    """Download missing and damaged files into the candidate folder with the most intact files.

    Damaged files do not count: they may belong to another data set with the same file names, and must not be
    overwritten.
    """
    layout = next((layout for layout in dataset.layouts if layout.downloads), None)
    if layout is None:
        return
    files = layout.downloads

    def count_intact(folder: Path) -> int:
        return sum(is_intact(folder / (file.unpacks or file.name), file) for file in files)

    target = max(candidate_folders(dataset, layout, root), key=count_intact)
    for file in files:
        if file.unpacks and (target / file.unpacks).exists():
            continue

        # An archive may have been downloaded into the root before.
        path = target / file.name
        for folder in (target, root):
            if is_intact(folder / file.name, file):
                path = folder / file.name
                break
        else:
            download_file(file, path)

        if file.unpacks:
            target.mkdir(exist_ok=True)
            extract_folder(path, file.unpacks, target)


def _look_up(name: str) -> PublishedDataset:
    if name not in SOURCES:
        close_matches = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"Did you mean {close_matches[0]!r}? " if close_matches else ""
        raise ValueError(f"Unknown data set {name!r}. {hint}Available: {', '.join(SOURCES)}.")
    return SOURCES[name]
