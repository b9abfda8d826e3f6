"""MNIST and the sets in its format: Fashion-MNIST and notMNIST, 28 × 28 grey pixels, ten classes, idx files.

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

from everlearn.sources.data import Data, hold_back
from everlearn.sources.files import File, Layout, Published
from everlearn.sources.folders import read_folder
from everlearn.sources.limits import check_fits

KINDS = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")  # fmt: skip
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def read_idx(path: Path) -> Tensor:
    """The array in an idx file, gzipped or not: a magic number (kind, dimensions), the sizes, then the numbers."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            kind, dimensions = np.dtype(KINDS[magic[2]]), magic[3]
            shape = np.frombuffer(file.read(4 * dimensions), ">u4", dimensions).tolist()
            size = kind.itemsize * math.prod(shape)
            check_fits(size, path)
            raw = file.read(size + 1)  # a small gzip file may unpack to more than any memory holds
        values = np.frombuffer(raw, kind).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not an idx file, or is damaged: {error}.") from None
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))


def _read(names: tuple[str, ...], folder: Path) -> Data:
    x, y, x_test, y_test = (read_idx(folder / name) for name in FILES)
    return Data((x.unsqueeze(1), y.long()), (x_test.unsqueeze(1), y_test.long()), names=names)


def _digits(folder: Path) -> Data:
    return _read(tuple("0123456789"), folder)


def _clothes(folder: Path) -> Data:
    return _read(CLOTHES, folder)


def _letters(folder: Path) -> Data:
    return _read(tuple("ABCDEFGHIJ"), folder)


def _few_letters(folder: Path) -> Data:
    """Only the test half of a copy in MNIST's format: every fifth image of each letter is for tests."""
    x, y = (read_idx(folder / name) for name in FILES[2:])
    return hold_back(x.unsqueeze(1), y.long(), names="ABCDEFGHIJ")


def _letter_images(folder: Path) -> Data:
    """The published folders; two of their images are known to be unreadable and are left out."""
    x, y, names = read_folder(folder, size=28, grey=True, skip_damaged=True)
    return hold_back(x, y, names=names)


def _files(url: str, sums: tuple[str, ...]) -> tuple[File, ...]:
    return tuple(File(name, md5, url=url + name) for name, md5 in zip(FILES, sums, strict=True))


MNIST = Published(
    "mnist",
    (
        Layout(
            _files(
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432", "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
            ),
            _digits,
        ),
    ),
    "yann.lecun.com/exdb/mnist or its mirrors",
)  # fmt: skip

FASHION_MNIST = Published(
    "fashion_mnist",
    (
        Layout(
            _files(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe", "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
            ),
            _clothes,
        ),
    ),
    "github.com/zalandoresearch/fashion-mnist",
)  # fmt: skip

_FEW = (File(FILES[2], "2c87c839a4ef9b238846600eec8c35b7"), File(FILES[3], "7ea9118cbafd0f6e3ee2ad771d782a01"))
_SMALL = "notMNIST_small.tar.gz"
NOTMNIST = Published(
    "notmnist",
    (
        Layout((File(FILES[0]), File(FILES[1]), *_FEW), _letters, ("notmnist_10k",)),
        Layout(_FEW, _few_letters, ("notmnist_10k",)),
        Layout(
            tuple(File(letter) for letter in "ABCDEFGHIJ"),
            _letter_images,
            ("notMNIST_small",),
            (File(_SMALL, size=8_458_043, url=f"https://commondatastorage.googleapis.com/books1000/{_SMALL}", unpacks="notMNIST_small"),),
        ),
    ),
    "yaroslavvb.com/upload/notMNIST (notMNIST_small), or as idx files github.com/davidflanagan/notMNIST-to-MNIST",
)  # fmt: skip
