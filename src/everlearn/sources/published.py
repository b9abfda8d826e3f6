"""Published data sets by name: found, verified, read; downloaded where that is asked for."""

from __future__ import annotations

import difflib
from functools import lru_cache
from pathlib import Path

from everlearn.sources.archives import extract
from everlearn.sources.chars74k import CHARS74K
from everlearn.sources.cifar import CIFAR10, CIFAR100
from everlearn.sources.clinc150 import CLINC150
from everlearn.sources.data import Data
from everlearn.sources.download import fetch
from everlearn.sources.files import (
    Damaged,
    File,
    Layout,
    Published,
    candidates,
    check,
    data_root,
    locate,
    missing,
    sound,
)
from everlearn.sources.flowers import FLOWERS
from everlearn.sources.gas_drift import GAS_DRIFT
from everlearn.sources.mnist import FASHION_MNIST, MNIST, NOTMNIST
from everlearn.sources.omniglot import OMNIGLOT
from everlearn.sources.svhn import SVHN
from everlearn.sources.usps import USPS

SOURCES: dict[str, Published] = {
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
    """A published data set as ((x, y), (x_test, y_test)): images in [0, 1] with channels first, labels from 0.

    What has no published test set (notmnist, chars74k, omniglot, gas_drift) gives every fifth example of each class;
    identical images count as one.

    Args:
        name: one of ``SOURCES``.
        root: the folder of the files, or one that has a folder of the data set's name; by default the environment
            variable EVERLEARN_DATA.
        download: get what is missing or damaged from the network into ``root``, and unpack it.
        size: side of the images of a set whose photographs have many sizes (flowers), in pixels.

    >>> load("mnits")
    Traceback (most recent call last):
    ValueError: Unknown data set 'mnits'. Did you mean 'mnist'? There are: mnist, fashion_mnist, ...
    """
    return raw(name, root, download=download, size=size).copy()


def raw(name: str, root: str | Path | None = None, *, download: bool = False, size: int = 64) -> Data:
    """The same as it is stored, images in bytes, for who makes numbers of them a batch at a time; not to be changed."""
    data = _look_up(name)
    files = ", ".join(file.name for file in data.layouts[0].files)
    folder = data_root(name, files, data.origin, root)
    try:
        return _open(data, folder, size)
    except (FileNotFoundError, Damaged):
        if not download:
            raise
    _download(data, folder)
    return _open(data, folder, size)


def _open(data: Published, root: Path, size: int) -> Data:
    found = locate(data, root)
    if found is None:
        raise missing(data, root)
    layout, place = found
    there = [(file, place / file.name) for file in layout.files if (place / file.name).exists()]
    state = tuple((file, path, path.stat().st_mtime_ns, path.stat().st_size) for file, path in there)
    return _read(layout, place, state, size if layout.sized else 0, data.origin)


@lru_cache(maxsize=8)
def _read(layout: Layout, folder: Path, state: tuple[tuple[File, Path, int, int], ...], size: int, origin: str) -> Data:
    """Read once a process, and anew when a file has changed."""
    for file, path, _, _ in state:
        check(path, file, origin)
    return layout.read(folder, size) if layout.sized else layout.read(folder)


def _download(data: Published, root: Path) -> None:
    """Get what is not there and sound, beside what is: into the folder that has the most of it, or one of the set's name.

    Only sound files count for that: those of another set may have the same names, and must not be written over.
    """
    layout = next((layout for layout in data.layouts if layout.downloads), None)
    if layout is None:
        return
    files = layout.downloads
    places = candidates(data, layout, root)
    into = max(places, key=lambda place: sum(sound(place / (file.unpacks or file.name), file) for file in files))
    for file in files:
        if file.unpacks and (into / file.unpacks).exists():
            continue
        path = next((p / file.name for p in (into, root) if sound(p / file.name, file)), into / file.name)
        if not sound(path, file):
            fetch(file, path)
        if file.unpacks:
            into.mkdir(exist_ok=True)
            extract(path, file.unpacks, into)


def _look_up(name: str) -> Published:
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"Unknown data set {name!r}. {hint}There are: {', '.join(SOURCES)}.")
    return SOURCES[name]
