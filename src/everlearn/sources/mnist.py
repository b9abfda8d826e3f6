"""MNIST and data sets in its format: Fashion-MNIST and notMNIST, 28 × 28 grayscale, ten classes, idx files.

LeCun, Cortes & Burges (1998); Xiao, Rasul & Vollgraf (2017); Bulatov (2011).
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.folders import read_class_folders
from everlearn.sources.labeled_data import Data, hold_back
from everlearn.sources.limits import check_fits

IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
LETTERS = "ABCDEFGHIJ"


def read_idx(path: Path) -> Tensor:
    """Read an idx file, gzipped or not: a magic number (dtype, number of axes), the shape, then the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            dtype = np.dtype(IDX_DTYPES[magic[2]])
            num_axes = magic[3]
            shape = np.frombuffer(file.read(4 * num_axes), ">u4", num_axes).tolist()

            # A small gzip file may unpack to more than the memory: read only as many bytes as the shape has.
            size = dtype.itemsize * math.prod(shape)
            check_fits(size, path)
            content = file.read(size + 1)
        values = np.frombuffer(content, dtype).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not an idx file, or is damaged: {error}.") from None
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))


def _read_idx_files(names: tuple[str, ...], folder: Path) -> Data:
    x, y, x_test, y_test = (read_idx(folder / name) for name in FILES)
    return Data((x.unsqueeze(1), y.long()), (x_test.unsqueeze(1), y_test.long()), names=names)


def _read_mnist(folder: Path) -> Data:
    return _read_idx_files(tuple("0123456789"), folder)


def _read_fashion_mnist(folder: Path) -> Data:
    return _read_idx_files(FASHION_CLASSES, folder)


def _read_notmnist(folder: Path) -> Data:
    return _read_idx_files(tuple(LETTERS), folder)


def _read_notmnist_test_files(folder: Path) -> Data:
    """Read a copy with the test files only, and split it: every fifth image of each letter is for testing."""
    x, y = (read_idx(folder / name) for name in FILES[2:])
    return hold_back(x.unsqueeze(1), y.long(), names=LETTERS)


def _read_notmnist_folders(folder: Path) -> Data:
    """Read the published folders; two of their images are known to be unreadable and are left out."""
    x, y, names = read_class_folders(folder, size=28, grayscale=True, skip_damaged=True)
    return hold_back(x, y, names=names)


def _describe_files(url: str, checksums: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(File(name, md5, url=url + name) for name, md5 in zip(FILES, checksums, strict=True))


MNIST = PublishedDataset(
    "mnist",
    (
        Layout(
            _describe_files(
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ),
            ),
            _read_mnist,
        ),
    ),
    "yann.lecun.com/exdb/mnist or its mirrors",
)

FASHION_MNIST = PublishedDataset(
    "fashion_mnist",
    (
        Layout(
            _describe_files(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ),
            ),
            _read_fashion_mnist,
        ),
    ),
    "github.com/zalandoresearch/fashion-mnist",
)

_NOTMNIST_TEST_FILES = (
    File(FILES[2], "2c87c839a4ef9b238846600eec8c35b7"),
    File(FILES[3], "7ea9118cbafd0f6e3ee2ad771d782a01"),
)
_NOTMNIST_ARCHIVE = File(
    "notMNIST_small.tar.gz",
    size=8_458_043,
    url="https://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
    unpacks="notMNIST_small",
)
NOTMNIST = PublishedDataset(
    "notmnist",
    (
        Layout((File(FILES[0]), File(FILES[1]), *_NOTMNIST_TEST_FILES), _read_notmnist, ("notmnist_10k",)),
        Layout(_NOTMNIST_TEST_FILES, _read_notmnist_test_files, ("notmnist_10k",)),
        Layout(
            tuple(File(letter) for letter in LETTERS),
            _read_notmnist_folders,
            ("notMNIST_small",),
            (_NOTMNIST_ARCHIVE,),
        ),
    ),
    "yaroslavvb.com/upload/notMNIST (notMNIST_small), or as idx files github.com/davidflanagan/notMNIST-to-MNIST",
)
