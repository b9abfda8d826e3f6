import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch

from everlearn import streams
from everlearn.streams import cifar, mnist
from everlearn.streams.files import find, read_idx


def write_idx(path, array, kind):
    raw = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.mark.parametrize(("kind", "dtype"), [(8, "u1"), (9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")])
@pytest.mark.parametrize("name", ["a.idx", "a.gz"])
def test_idx_files_of_every_kind(kind, dtype, name, tmp_path):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    write_idx(tmp_path / name, array, kind)
    assert torch.equal(read_idx(tmp_path / name).double(), torch.arange(24.0).view(2, 3, 4).double())


@pytest.mark.parametrize("raw", [b"", b"\0\0\x08", b"\0\0\x07\1\0\0\0\1a", b"\0\0\x08\1\0\0\0\5ab", b"hello world"])
def test_damaged_idx_files(raw, tmp_path):
    (tmp_path / "a.idx").write_bytes(raw)
    (tmp_path / "a.gz").write_bytes(raw)
    for name in ("a.idx", "a.gz"):
        with pytest.raises(ValueError, match="is not an idx file, or is damaged"):
            read_idx(tmp_path / name)


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """The published layout with few images."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    sizes = {"train": 40, "t10k": 20}
    sums = {}
    for name in mnist.FILES:
        n = sizes[name.split("-")[0]]
        array = np.random.default_rng(0).integers(0, 256, (n, 28, 28)) if "images" in name else np.arange(n) % 10
        sums[name] = write_idx(folder / name, array.astype("u1"), 8)
    monkeypatch.setattr(mnist, "FILES", sums)
    return tmp_path


@pytest.mark.parametrize("name", ["split-mnist", "permuted-mnist", "rotated-mnist"])
def test_mnist_streams_from_files(name, tiny_mnist, monkeypatch):
    stream = streams.STREAMS[name](root=tiny_mnist, tasks=2)
    x, y, _ = stream[0].train.rows(slice(None))
    assert stream.inputs == (1, 28, 28) and x.dtype == torch.float32 and x.min() >= 0 and x.max() <= 1
    assert y.dtype == torch.int64 and stream.name == name
    assert len(streams.STREAMS[name](root=tiny_mnist / "mnist", tasks=2)) == 2
    monkeypatch.setenv("EVERLEARN_DATA", str(tiny_mnist))
    assert len(streams.STREAMS[name](tasks=2)) == 2


def test_missing_and_damaged_files_are_named(tiny_mnist, monkeypatch):
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"Where is mnist\? Give the folder .*--data.*EVERLEARN_DATA"):
        streams.split_mnist()
    file = tiny_mnist / "mnist" / "t10k-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte.gz is damaged: its md5 is"):
        streams.split_mnist(root=tiny_mnist)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"not whole in .*: missing t10k-images-idx3-ubyte.gz; get it from"):
        streams.split_mnist(root=tiny_mnist)
    assert find("x", {}, tiny_mnist, "nowhere") == []


def test_the_real_mnist(shared_data):
    (x, y), (x_test, y_test) = streams.mnist_data(shared_data)
    assert x.shape == (60_000, 1, 28, 28) and x_test.shape == (10_000, 1, 28, 28)
    assert y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert y_test.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_cifar100_from_its_binary_version(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "COUNTS", {"train.bin": 200, "test.bin": 100})
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for file, count in cifar.COUNTS.items():
        rows = np.random.default_rng(0).integers(0, 256, (count, cifar.RECORD), np.uint8)
        rows[:, 1] = np.arange(count) % 100
        rows[0, 2:] = np.arange(3072) % 256
        rows.tofile(folder / file)
    (x, y), (x_test, _) = streams.cifar100_data(tmp_path)
    assert x.shape == (200, 3, 32, 32) and len(x_test) == 100 and y[:3].tolist() == [0, 1, 2]
    assert x[0, 0, 0, :3].tolist() == pytest.approx([0, 1 / 255, 2 / 255]) and x[0, 1, 0, 0] == 0
    stream = streams.STREAMS["split-cifar100"](root=tmp_path, tasks=10)
    assert len(stream) == 10 and stream.outputs == 100 and stream.inputs == (3, 32, 32)
    (folder / "test.bin").write_bytes(b"short")
    cifar._read.cache_clear()
    with pytest.raises(ValueError, match="is damaged: it has 5 bytes"):
        streams.cifar100_data(tmp_path)


def test_fashion_mnist_has_checksums_of_its_own(tiny_mnist):
    (tiny_mnist / "mnist").rename(tiny_mnist / "fashion_mnist")
    with pytest.raises(ValueError, match="is damaged"):
        streams.split_fashion_mnist(root=tiny_mnist)


def test_the_real_fashion_mnist(shared_data):
    (x, y), (x_test, _) = streams.fashion_mnist_data(shared_data)
    assert x.shape == (60_000, 1, 28, 28) and len(x_test) == 10_000 and (y.bincount() == 6000).all()
