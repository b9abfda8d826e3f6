"""Files of data sets are found and verified, and missing files are reported."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from everlearn import sources
from everlearn.sources import SOURCES, load
from everlearn.sources.checksums import md5
from everlearn.sources.mnist import read_idx
from everlearn.sources.registry import load_raw
from tests.layouts import IDX, idx, write_cifar100, write_gas, write_mnist


@pytest.mark.parametrize(("kind", "dtype"), [(8, "u1"), (9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")])
@pytest.mark.parametrize("name", ["a.idx", "a.gz"])
def test_idx_files_of_every_dtype(kind, dtype, name, tmp_path):
    import gzip

    content = idx(np.arange(24).reshape(2, 3, 4).astype(dtype), kind)
    (tmp_path / name).write_bytes(gzip.compress(content) if name == "a.gz" else content)
    assert torch.equal(read_idx(tmp_path / name).double(), torch.arange(24.0).view(2, 3, 4).double())


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", b"\0\0\x07\1\0\0\0\1a", b"\0\0\x08\1\0\0\0\5ab", b"hello world"])
def test_damaged_idx_files(content, tmp_path):
    for name in ("a.idx", "a.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="is not an idx file, or is damaged"):
            read_idx(tmp_path / name)


def test_gzip_file_is_not_decompressed_beyond_declared_size(tmp_path, monkeypatch):
    import gzip

    declared = idx(np.zeros(100, np.uint8), 8)
    (tmp_path / "a.gz").write_bytes(gzip.compress(declared + bytes(2**27)))
    read_sizes = []
    read = gzip.GzipFile.read

    def read_and_count(self, size=-1):
        content = read(self, size)
        read_sizes.append(len(content))
        return content

    monkeypatch.setattr(gzip.GzipFile, "read", read_and_count)
    with pytest.raises(ValueError, match="is not an idx file, or is damaged"):
        read_idx(tmp_path / "a.gz")
    assert sum(read_sizes) < 200
    (tmp_path / "b.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 2, *[255] * 8])))
    with pytest.raises(
        ValueError, match="unpacks to 18,446,744,065,119,617,025 bytes, but this machine has a memory of"
    ):
        read_idx(tmp_path / "b.gz")


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """Write a small MNIST whose checksums replace the published ones."""
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)
    write_mnist(tmp_path / "mnist")
    layout = SOURCES["mnist"].layouts[0]
    files = tuple(replace(file, md5=md5(tmp_path / "mnist" / file.name)) for file in layout.files)
    row = replace(SOURCES["mnist"], layouts=(replace(layout, files=files),))
    monkeypatch.setitem(SOURCES, "mnist", row)
    return tmp_path


def test_folder_as_argument_or_environment_variable(small_mnist, monkeypatch):
    x = load("mnist", small_mnist)[0][0]
    assert torch.equal(load("mnist", str(small_mnist / "mnist"))[0][0], x)
    monkeypatch.setenv("EVERLEARN_DATA", str(small_mnist))
    assert torch.equal(load("mnist")[0][0], x)
    monkeypatch.setenv("EVERLEARN_DATA", "")
    monkeypatch.chdir(small_mnist)
    with pytest.raises(FileNotFoundError, match=r"Where is mnist\?"):
        load("mnist")
    assert torch.equal(load("mnist", ".")[0][0], x), "the current folder only if it is given"


def test_missing_files_are_reported_with_their_origin(small_mnist):
    with pytest.raises(
        FileNotFoundError, match=r"Where is mnist\? Give the folder .*--data.*EVERLEARN_DATA.*train-images"
    ):
        load("mnist")
    (small_mnist / "mnist" / IDX[2]).unlink()
    message = r"incomplete in .*: missing t10k-images-idx3-ubyte.gz; get it from yann.lecun.com.*download=True"
    with pytest.raises(FileNotFoundError, match=message):
        load("mnist", small_mnist)
    with pytest.raises(FileNotFoundError, match="missing train-images"):
        load("mnist", small_mnist / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"missing data_batch_1.bin.*unpacked from cifar-10-binary.tar.gz"):
        load("cifar10", small_mnist)
    with pytest.raises(FileNotFoundError, match=r"missing batch1.dat.*get it from archive.ics.uci.edu"):
        load("gas_drift", small_mnist)


def test_damaged_file_is_named(small_mnist):
    file = small_mnist / "mnist" / IDX[2]
    load("mnist", small_mnist)
    file.write_bytes(file.read_bytes()[:-1])  # detected although the data set is cached
    with pytest.raises(
        ValueError, match=r"t10k-images-idx3-ubyte.gz is damaged: its md5 is \w+, not \w+; get it again"
    ):
        load("mnist", small_mnist)


def test_sizes_are_checked_without_checksum(tmp_path):
    write_cifar100(tmp_path / "cifar-100-binary")
    with pytest.raises(ValueError, match=r"train.bin is damaged: it has 614,800 bytes, not 153,700,000"):
        load("cifar100", tmp_path)
    write_gas(tmp_path / "gas_drift", {4: 100})
    with pytest.raises(ValueError, match=r"batch4.dat is damaged: it has 100 measurements, not 161"):
        load("gas_drift", tmp_path)


def test_fashion_mnist_has_different_checksums(small_mnist):
    (small_mnist / "mnist").rename(small_mnist / "fashion_mnist")
    with pytest.raises(ValueError, match="is damaged"):
        load("fashion_mnist", small_mnist)


def test_loaded_data_are_copies(small_mnist):
    first = load("mnist", small_mnist)
    original = first[0][0].clone()
    for part in (*first[0], *first[1]):
        part.zero_()
    assert torch.equal(load("mnist", small_mnist)[0][0], original)
    assert load_raw("mnist", small_mnist)[0][0].dtype == torch.uint8
    assert load_raw("mnist", small_mnist) is load_raw("mnist", small_mnist), "cached"


def test_data_are_a_pair_that_can_be_pickled(small_mnist):
    data = load("mnist", small_mnist)
    assert isinstance(data, tuple) and len(data) == 2
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[1][0], data[1][0]) and copy.names == data.names == list("0123456789")
    assert vars(copy).keys() == vars(data).keys() == {"names", "groups", "times", "features"}


def test_unknown_name_is_reported_with_closest_name():
    with pytest.raises(ValueError, match=r"Unknown data set 'cifar_10'. Did you mean 'cifar10'\? Available: mnist,"):
        load("cifar_10", ".")


def test_every_source_has_origin_and_verified_files():
    for name, data in SOURCES.items():
        assert data.name == name and data.origin
        for layout in data.layouts:
            assert layout.files
            for file in (*layout.files, *layout.archives):
                assert file.md5 is None or len(file.md5) == 32
                assert file.url == "" or (file.url.startswith("http") and (file.md5 or file.size)), (
                    "downloads are verified"
                )
                assert file.md5 or not file.url.startswith("http:"), "unencrypted downloads need a checksum"
    assert set(sources.__all__) <= set(vars(sources))


TORCHVISION = {  # the checksums in the source of torchvision 0.28.0, of files that both read
    "mnist": {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    "svhn": {
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
    "usps": {
        "usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197",
        "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118",
    },
    "omniglot": {
        "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
        "images_evaluation.zip": "6b91aef0f799c5bb55b94e3f2daec811",
    },
    "flowers": {
        "102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
        "imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
        "setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
    },
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_published_checksums_equal_torchvisions(name):
    files = [file for layout in SOURCES[name].layouts for file in (*layout.files, *layout.archives)]
    assert {file.name: file.md5 for file in files if file.url and file.md5} == TORCHVISION[name]
