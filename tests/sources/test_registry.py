"""Every published data set, from a small copy in its layout and from the original files if available."""

import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from everlearn.sources import SOURCES, load
from everlearn.sources.gas_drift import BATCH_SIZES
from tests import layouts

pytestmark = pytest.mark.usefixtures("without_checksums")


def counts(y):
    return y.bincount().tolist()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_and_fashion(name, tmp_path):
    layouts.write_mnist(tmp_path / name)
    data = load(name, tmp_path)
    (x, y), (x_test, y_test) = data
    assert x.shape == (40, 1, 28, 28) and x.dtype == torch.float32 and x.min() == 0 and x.max() == 1
    assert x_test.shape == (20, 1, 28, 28) and counts(y) == [4] * 10 and counts(y_test) == [2] * 10
    assert y.dtype == torch.int64 and len(data.names) == 10


def test_notmnist_in_three_layouts(tmp_path):
    layouts.write_notmnist(tmp_path / "few" / "notmnist_10k")
    assert [counts(y) for _, y in load("notmnist", tmp_path / "few")] == [[8] * 10, [2] * 10]
    layouts.write_mnist(tmp_path / "all" / "notmnist")
    assert [len(y) for _, y in load("notmnist", tmp_path / "all")] == [40, 20]
    layouts.write_images(tmp_path / "png" / "notMNIST_small", "ABCDEFGHIJ", size=(28, 28))
    (tmp_path / "png" / "notMNIST_small" / "A" / "bad.png").write_bytes(b"")
    data = load("notmnist", tmp_path / "png")
    assert counts(data[0][1]) == [4] * 10 and counts(data[1][1]) == [1] * 10 and data.names == list("ABCDEFGHIJ")


def test_cifar10(tmp_path):
    layouts.write_cifar10(tmp_path / "cifar-10-batches-bin")
    data = load("cifar10", tmp_path)
    (x, y), (x_test, y_test) = data
    assert x.shape == (100, 3, 32, 32) and counts(y) == [10] * 10 and counts(y_test) == [2] * 10
    assert data.names[3] == "cat" and len(x_test) == 20
    rows = np.fromfile(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin", np.uint8)
    assert x[0, 2, 31, 31].item() == pytest.approx(rows[3072] / 255)
    rows[0] = 9
    rows.tofile(tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin")
    with pytest.raises(ValueError, match="its classes differ in size"):
        load("cifar10", tmp_path)


def test_cifar100(tmp_path):
    layouts.write_cifar100(tmp_path / "cifar100" / "cifar-100-binary")
    data = load("cifar100", tmp_path)
    (x, y), (x_test, _) = data
    assert x.shape == (200, 3, 32, 32) and len(x_test) == 100 and y[:3].tolist() == [0, 1, 2]
    assert x[0, 0, 0, :3].tolist() == pytest.approx([0, 1 / 255, 2 / 255]) and x[0, 1, 0, 0] == 0
    assert data.groups["coarse 0"] == [0, 1, 2, 3, 4] and len(data.groups) == 20
    (tmp_path / "cifar100" / "cifar-100-binary" / "fine_label_names.txt").write_text("apple\nbear\n\n")
    (tmp_path / "cifar100" / "cifar-100-binary" / "test.bin").touch()
    assert load("cifar100", tmp_path).names == ["apple", "bear"]


def test_usps(tmp_path):
    layouts.write_usps(tmp_path / "usps")
    (x, y), (x_test, y_test) = load("usps", tmp_path)
    assert x.shape == (30, 1, 16, 16) and counts(y) == [3] * 10 and counts(y_test) == [2] * 10
    assert 0 <= x.min() < 0.01 and 0.99 < x.max() <= 1
    with np.load(_usps_npz(tmp_path / "npz", x, y, x_test, y_test)):
        pass
    (x2, y2), _ = load("usps", tmp_path / "npz")
    torch.testing.assert_close(x2, x, atol=1e-6, rtol=0)
    assert torch.equal(y2, y)
    (tmp_path / "usps" / "usps.bz2").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"usps.bz2 cannot be read"):
        load("usps", tmp_path)


def _usps_npz(folder, x, y, x_test, y_test):
    folder.mkdir()
    grey = [(2000 * v.double() - 1000).round().to(torch.int16).view(-1, 16, 16).numpy() for v in (x, x_test)]
    np.savez(folder / "usps.npz", x_train=grey[0], y_train=y.numpy(), x_test=grey[1], y_test=y_test.numpy())
    return folder / "usps.npz"


@pytest.mark.parametrize("line", ["1 5", "1 1:x", "1 257:0.5", "1 0:0.5"])
def test_damaged_lines_are_named(line, tmp_path):
    import bz2

    layouts.write_usps(tmp_path / "usps")
    (tmp_path / "usps" / "usps.bz2").write_bytes(bz2.compress(f"1 1:0.5\n{line}".encode()))
    with pytest.raises(ValueError, match=r"usps.bz2, line 2: cannot be read"):
        load("usps", tmp_path)


def test_svhn(tmp_path):
    layouts.write_svhn(tmp_path / "svhn")
    (x, y), (x_test, _) = load("svhn", tmp_path)
    assert x.shape == (30, 3, 32, 32) and len(x_test) == 20
    assert y[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0], "the label 10 is the digit 0"
    stored = np.random.default_rng(30).integers(0, 256, (32, 32, 3, 30), np.uint8)
    assert x[7, 2, 5, 6].item() == pytest.approx(stored[5, 6, 2, 7] / 255)
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a Matlab file with X, y, or is damaged"):
        load("svhn", tmp_path)


def test_omniglot_in_folders_and_archives(tmp_path):
    layouts.write_omniglot(tmp_path / "a" / "omniglot" / "images_background")
    data = load("omniglot", tmp_path / "a")
    (x, y), (_, y_test) = data
    assert x.shape == (36, 1, 105, 105) and counts(y) == [4] * 9 and counts(y_test) == [1] * 9
    assert data.groups == {"Greek": [0, 1, 2], "Korean": [3, 4, 5, 6], "Latin": [7, 8]}
    assert data.names[3] == "Korean/character01"
    small = tmp_path / "b" / "omniglot_small"
    for number, alphabets in ((1, {"Greek": 3, "Latin": 2}), (2, {"Greek": 3, "Korean": 4})):
        folder = tmp_path / f"images_background_small{number}"
        layouts.write_omniglot(folder, alphabets)
        small.mkdir(parents=True, exist_ok=True)
        layouts.zip_folder(folder, small / f"{folder.name}.zip")
    small_data = load("omniglot", tmp_path / "b")
    assert torch.equal(small_data[0][0], x)
    assert small_data.groups == data.groups, "characters in both small sets are loaded once"
    layouts.write_omniglot(tmp_path / "a" / "omniglot" / "images_evaluation", {"Tengwar": 2})
    assert list(load("omniglot", tmp_path / "a").groups) == ["Greek", "Korean", "Latin", "Tengwar"]
    (small / "images_background_small2.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        load("omniglot", tmp_path / "b")


def test_flowers(tmp_path):
    io = pytest.importorskip("scipy.io")
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "flowers" / "jpg").mkdir(parents=True)
    for i in range(1, 7):
        photo = np.full((40 + i, 60, 3), 20 * i, np.uint8)
        image.fromarray(photo).save(tmp_path / "flowers" / "jpg" / f"image_{i:05d}.jpg", quality=100)
    io.savemat(tmp_path / "flowers" / "imagelabels.mat", {"labels": np.array([[1, 1, 2, 2, 102, 102]])})
    parts = {"trnid": np.array([[1, 3, 5]]), "valid": np.array([[2]]), "tstid": np.array([[4, 6]])}
    io.savemat(tmp_path / "flowers" / "setid.mat", parts)
    (x, y), (_, y_test) = load("flowers", tmp_path)
    assert x.shape == (3, 3, 64, 64) and y.tolist() == [0, 1, 101] and y_test.tolist() == [1, 101]
    assert x[2].mean().item() == pytest.approx(100 / 255, abs=0.01)
    assert load("flowers", tmp_path, size=20)[1][0].shape == (2, 3, 20, 20)
    (tmp_path / "flowers" / "jpg" / "image_00005.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 1 images, image_00005.jpg among them"):
        load("flowers", tmp_path, size=21)


def test_chars74k_in_folders_and_npz(tmp_path):
    folder = tmp_path / "a" / "English" / "Fnt"
    layouts.write_images(folder, [f"Sample{i:03d}" for i in range(1, 63)], size=(12, 12))
    data = load("chars74k", tmp_path / "a")
    assert data[0][0].shape == (248, 1, 28, 28) and counts(data[1][1]) == [1] * 62
    assert (data.names[9], data.names[10], data.names[61]) == ("9", "A", "z")
    (folder / "Sample063").mkdir()
    layouts.write_images(folder / "Sample063", ["x"])
    (folder / "Sample001" / "000.png").touch()
    (tmp_path / "b").mkdir()
    x = np.random.default_rng(0).integers(0, 256, (15, 28, 28), np.uint8)
    np.savez(tmp_path / "b" / "chars74k_fnt_28.npz", x=x, y=np.repeat([0, 2, 3], 5), names=np.array(list("HIJK")))
    data = load("chars74k", tmp_path / "b")
    assert data.names == ["H", "J", "K"] and counts(data[0][1]) == [4, 4, 4], "no class without examples"


def test_clinc150(tmp_path):
    layouts.write_clinc150(tmp_path / "clinc150")
    data = load("clinc150", tmp_path)
    (texts, y), (_, y_test) = data
    assert texts[0] == "please do intent0_0 0" and counts(y) == [4] * 150 and counts(y_test) == [2] * 150
    assert data.groups["domain3"] == list(range(45, 60)) and data.names[45] == "intent3_0"
    (tmp_path / "clinc150" / "domains.json").write_text('{"domain0": ["other"]}')
    with pytest.raises(ValueError, match="does not have CLINC150 as it was published"):
        load("clinc150", tmp_path)
    (tmp_path / "clinc150" / "data_full.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON, or is damaged"):
        load("clinc150", tmp_path)


@pytest.mark.parametrize("concentrations", [True, False])
def test_gas_drift(concentrations, tmp_path):
    layouts.write_gas(tmp_path / "gas_drift" / "Dataset", {b: BATCH_SIZES[b] for b in (4, 5)}, concentrations)
    data = load("gas_drift", tmp_path)
    (x, y), (x_test, _) = data
    assert len(x) + len(x_test) == 161 + 197 and x.shape[1] == 128
    assert data.times[0].unique().tolist() == data.times[1].unique().tolist() == [4, 5]
    assert y[0] == 0 and y.max() == 5 and data.names[0] == "Ethanol"


@pytest.mark.parametrize(
    ("module", "name", "write", "message"),
    [
        ("PIL", "omniglot", lambda p: layouts.write_omniglot(p / "images_background"), "Reading images needs Pillow"),
        ("scipy.io", "svhn", layouts.write_svhn, "Reading Matlab files (.mat) needs scipy"),
    ],
)
def test_missing_package_is_reported_with_its_extra(module, name, write, message, tmp_path, monkeypatch):
    write(tmp_path / name)
    importlib.import_module(module)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as raised:
        load(name, tmp_path)
    assert str(raised.value).startswith(message) and "pip install 'everlearn[data]'" in str(raised.value)


def shared_images(data):
    train_images, test_images = ({image.tobytes() for image in x.numpy()} for x, _ in data)
    return train_images & test_images


class TestOriginalFiles:
    """Published statistics of the data sets (see each SOURCE.md)."""

    @pytest.fixture(autouse=True)
    def _verified(self, without_checksums, monkeypatch):
        monkeypatch.undo()  # restores checksums
        assert SOURCES["mnist"].layouts[0].files[0].md5

    def test_mnist(self, shared_data):
        (x, y), (x_test, y_test) = load("mnist", shared_data)
        assert x.shape == (60_000, 1, 28, 28) and x_test.shape == (10_000, 1, 28, 28)
        assert x.mean().item() == pytest.approx(0.1307, abs=1e-4) and x.std().item() == pytest.approx(0.3081, abs=1e-4)
        assert counts(y) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert counts(y_test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]

    def test_fashion_mnist(self, shared_data):
        (x, y), (x_test, _) = load("fashion_mnist", shared_data)
        assert x.shape == (60_000, 1, 28, 28) and len(x_test) == 10_000 and set(counts(y)) == {6000}
        assert x.mean().item() == pytest.approx(0.2860, abs=1e-4)

    def test_notmnist(self, shared_data):
        data = load("notmnist", shared_data)
        assert counts(torch.cat([y for _, y in data])) == [1000] * 10 and len(data[1][1]) == 1969
        assert not shared_images(data)

    def test_usps(self, shared_data):
        (x, y), (_, y_test) = load("usps", shared_data)
        assert counts(y) == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644] and x.shape[1:] == (1, 16, 16)
        assert counts(y_test) == [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]

    def test_chars74k(self, shared_data):
        data = load("chars74k", shared_data)
        assert len(data.names) == 34 and not set(data.names) & set("IO")
        assert sum(len(y) for _, y in data) == 34_544 and data[0][0].mean() > 0.5, "black on white"
        assert not shared_images(data), "duplicates of many fonts are in one split"

    def test_omniglot(self, shared_data):
        data = load("omniglot", shared_data)
        assert len(data.groups) == 8 and len(data.names) == 242 and counts(data[0][1]) == [16] * 242
        sizes = {name: len(classes) for name, classes in data.groups.items()}
        assert sizes["Greek"] == 24 and sizes["Latin"] == 26 and sizes["Korean"] == 40 and sizes["Sanskrit"] == 42

    def test_clinc150(self, shared_data):
        data = load("clinc150", shared_data)
        (texts, y), (_, y_test) = data
        assert counts(y) == [100] * 150 and counts(y_test) == [30] * 150 and len(data.groups) == 10
        assert data.names[y[0]] == "translate" and texts[0].startswith("what expression would i use")
        assert all(len(classes) == 15 for classes in data.groups.values())

    def test_gas_drift(self, shared_data):
        data = load("gas_drift", shared_data)
        times = torch.cat(data.times).bincount()
        assert {b: n for b, n in enumerate(times.tolist()) if n} == {
            b: n for b, n in BATCH_SIZES.items() if b not in (7, 10)
        }

    @pytest.mark.slow
    def test_cifar100(self, shared_data, tmp_path):
        """Extracted from lossless sheets into the published layout by the script in the same folder."""
        script = shared_data / "expand_cifar100.py"
        if not script.exists():
            pytest.skip("no CIFAR-100 here")
        subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
        data = load("cifar100", tmp_path)
        x = (data[0][0] * 255).round().double()
        assert x.mean().item() == pytest.approx(121.936059453125, abs=1e-6) and counts(data[1][1]) == [100] * 100
        assert x.std(correction=0).item() == pytest.approx(68.388957, abs=1e-5)
        assert len(data.names) == 100 and {len(classes) for classes in data.groups.values()} == {5}

    def test_other_data_sets_are_reported_as_incomplete(self, shared_data):
        for name in SOURCES:
            if not any((shared_data / f).exists() for f in (name, f"{name}_10k", f"{name}_small")):
                with pytest.raises(FileNotFoundError, match=f"{name} is incomplete"):
                    load(name, shared_data)
