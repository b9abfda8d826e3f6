"""Files of users: image folders, npz, CSV, Parquet, and Hugging Face data sets in memory."""

import sys

import numpy as np
import pytest
import torch

from everlearn import streams
from everlearn.sources import hugging_face, image_folder, npz, table
from everlearn.sources.labeled_data import hold_back, select_test_examples
from tests.layouts import write_images


def test_share_of_each_class_is_held_out():
    y = torch.tensor([0] * 10 + [1] * 5 + [2] * 3)
    assert select_test_examples(y).nonzero().flatten().tolist() == [4, 9, 14, 17], "one example of class 2"
    assert not select_test_examples(torch.tensor([3])).any(), "a single example is for training"
    assert select_test_examples(y, 0.5)[:10].sum() == 5 and select_test_examples(torch.rand(10), 0.3).sum() == 3
    data = hold_back(list("abcdefghij"), torch.zeros(10, dtype=torch.long))
    assert data[1][0] == ["e", "j"] and len(data[0][0]) == 8
    for share in (0, 1, -0.1):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            select_test_examples(y, share)


def test_identical_images_are_in_one_split():
    images = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8)
    x, y = images[torch.arange(200) * 7 % 40], torch.arange(200) // 50  # every image five times, with several labels
    (train_images, y_train), (test_images, y_test) = hold_back(x, y)
    splits = [{image.numpy().tobytes() for image in split} for split in (train_images, test_images)]
    assert not splits[0] & splits[1] and len(splits[1]) == 8 and len(test_images) == 40
    assert set(y_train.tolist()) == set(y_test.tolist()) == {0, 1, 2, 3}
    (_, y), (_, y_test) = hold_back(images[[0, 1, 2, 3, 4, 4]], torch.tensor([0, 0, 0, 0, 0, 1]))
    assert y.tolist() == [0, 0, 0, 0, 0, 1] and not len(y_test), "no class is only in the test"
    assert len(hold_back(images[:0], torch.zeros(0, dtype=torch.long))[0][0]) == 0
    assert len(hold_back(images, torch.rand(40, 2))[1][0]) == 8


class TestImageFolder:
    def test_one_folder_per_class(self, tmp_path):
        write_images(tmp_path, ["cat", "dog"], size=(10, 14))
        (tmp_path / "notes.txt").write_text("no image")
        data = image_folder(tmp_path, size=8)
        assert data[0][0].shape == (8, 3, 8, 8) and data[0][0].dtype == torch.float32 and data[0][0].max() <= 1
        assert data[0][1].tolist() == [0] * 4 + [1] * 4 and data[1][1].tolist() == [0, 1]
        assert data.names == ["cat", "dog"]
        assert image_folder(tmp_path, size=8, grey=True, test=0.4)[1][0].shape == (4, 1, 8, 8)

    def test_pixels_are_unchanged_if_size_matches(self, tmp_path):
        write_images(tmp_path, ["a"], images_per_class=5, size=(8, 8), seed=7)
        x = image_folder(tmp_path, size=8)[0][0]
        first = np.random.default_rng(7).integers(0, 256, (8, 8, 3), np.uint8)
        assert torch.equal((x[0] * 255).round().byte(), torch.from_numpy(first).permute(2, 0, 1))

    @pytest.mark.parametrize("test_folder", ["test", "val"])
    def test_folders_for_training_and_tests(self, test_folder, tmp_path):
        write_images(tmp_path / "train", ["a", "b", "c"])
        write_images(tmp_path / test_folder, ["a", "c"], images_per_class=2)
        (_, y), (_, y_test) = image_folder(tmp_path, size=8)
        assert y.bincount().tolist() == [5, 5, 5] and y_test.tolist() == [0, 0, 2, 2]
        write_images(tmp_path / test_folder, ["d"])
        with pytest.raises(ValueError, match=r"has classes that .*train does not have: d"):
            image_folder(tmp_path, size=8)

    def test_invalid_image_folders(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no folder"):
            image_folder(tmp_path / "nowhere", size=8)
        with pytest.raises(ValueError, match="whole number from 1, got 0"):
            image_folder(tmp_path, size=0)
        with pytest.raises(ValueError, match="has no subfolders"):
            image_folder(tmp_path, size=8)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="empty has no images"):
            image_folder(tmp_path, size=8)
        (tmp_path / "empty" / "a.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"a\.png cannot be read as an image"):
            image_folder(tmp_path, size=8)


class TestNpz:
    def test_arrays(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.random.rand(10, 3), y=np.arange(10) % 2)
        (x, y), (x_test, _) = npz(tmp_path / "a.npz")
        assert x.shape == (8, 3) and x.dtype == torch.float32 and len(x_test) == 2 and y.dtype == torch.int64

    @pytest.mark.parametrize("shape", [(20, 6, 6), (20, 6, 6, 3), (20, 3, 6, 6)])
    def test_bytes_are_images(self, shape, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        np.savez(tmp_path / "a.npz", x_train=pixels, y_train=["b", "a"] * 10, x_test=pixels[:4], y_test=["a", "b"] * 2)
        data = npz(tmp_path / "a.npz")
        (x, y), (x_test, y_test) = data
        assert x.shape == (20, 1 if len(shape) == 3 else 3, 6, 6) and x.min() >= 0 and 0.9 < x.max() <= 1
        assert data.names == ["a", "b"] and y[:2].tolist() == [1, 0] and y_test.tolist() == [0, 1] * 2
        assert len(x_test) == 4

    def test_test_set_may_lack_a_class(self, tmp_path):
        labels = {"y_train": ["a", "b", "c"] * 2, "y_test": ["c", "a"]}
        np.savez(tmp_path / "a.npz", x_train=np.zeros((6, 2)), x_test=np.zeros((2, 2)), **labels)
        data = npz(tmp_path / "a.npz")
        assert data.names == ["a", "b", "c"] and data[1][1].tolist() == [2, 0]
        np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=["a", "b"], x_test=np.zeros((1, 2)), y_test=[0])
        with pytest.raises(ValueError, match="are not classes of the training labels"):
            npz(tmp_path / "a.npz")

    @pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
    def test_labels_that_are_not_finite(self, value, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[0.0, value, 1.0])
        with pytest.raises(ValueError, match="1 of 3 labels are not finite numbers"):
            npz(tmp_path / "a.npz")

    def test_unused_arrays_are_not_decompressed(self, tmp_path, monkeypatch):
        x, y = np.random.rand(10, 3), np.arange(10) % 2
        np.savez_compressed(tmp_path / "a.npz", x=x, y=y, unused=np.zeros(2**24, np.uint8), objects=np.array([{}]))
        read = np.lib.format.read_array
        sizes = []

        def read_and_count(*arguments, **settings):
            sizes.append((array := read(*arguments, **settings)).nbytes)
            return array

        monkeypatch.setattr(np.lib.format, "read_array", read_and_count)
        assert len(npz(tmp_path / "a.npz")[0][0]) == 8
        assert sorted(sizes) == [80, 240]

    def test_file_larger_than_memory_is_refused(self, tmp_path, monkeypatch):
        np.savez_compressed(tmp_path / "a.npz", x=np.zeros((2**20, 8)), y=np.zeros(2**20, np.int64))
        assert (tmp_path / "a.npz").stat().st_size < 2**17
        monkeypatch.setattr("everlearn.sources.limits.machine_memory", lambda: 2**25)
        with pytest.raises(
            ValueError, match=r"unpacks to 75,\d+,\d+ bytes, but this machine has a memory of 33,554,432"
        ):
            npz(tmp_path / "a.npz")

    def test_invalid_npz_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="There is no file"):
            npz(tmp_path / "a.npz")
        (tmp_path / "a.npz").write_bytes(b"PK\3\4 no zip")
        with pytest.raises(ValueError, match="is not an npz file, or is damaged"):
            npz(tmp_path / "a.npz")
        np.savez(tmp_path / "b.npz", data=np.zeros(3), y=np.zeros(3))
        with pytest.raises(ValueError, match="has no array 'x'; it has data, y: name the arrays with x=…"):
            npz(tmp_path / "b.npz")
        assert len(npz(tmp_path / "b.npz", x="data", test=0.4)[1][0]) == 1
        np.savez(tmp_path / "e.npz", x=np.zeros(3), y=np.zeros(2))
        with pytest.raises(ValueError, match="There are 3 inputs but 2 labels"):
            npz(tmp_path / "e.npz")
        np.save(tmp_path / "f.npy", np.zeros(3))
        with pytest.raises(ValueError, match="is not an npz file"):
            npz(tmp_path / "f.npy")
        np.savez(tmp_path / "c.npz", x=np.array([{}, {}]), y=np.zeros(2))
        with pytest.raises(ValueError, match="holds Python objects, which are not read"):
            npz(tmp_path / "c.npz")
        np.savez(tmp_path / "d.npz", x=np.zeros(2), y=["a", "b"], x_test=np.zeros(1), y_test=["c"])
        with pytest.raises(ValueError, match="test labels are not classes of the training labels"):
            npz(tmp_path / "d.npz")


ROWS = [(0.5, 1, "no"), (1.5, 2, "yes"), (2.5, 3, "no"), (3.5, 4, "yes"), (4.5, 5, "no"), (5.5, 6, "yes")] * 5


def write_csv(path, separator=",", rows=ROWS):
    path.write_text(
        "\n".join([separator.join(["width", "height", "kind"]), *(separator.join(map(str, row)) for row in rows)])
    )
    return path


def write_parquet(path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ["width", "height", "kind"]
    parquet.write_table(arrow.table({n: [row[i] for row in ROWS] for i, n in enumerate(names)}), path)
    return path


class TestTable:
    @pytest.mark.parametrize("write", [write_csv, write_parquet])
    def test_numbers_and_classes(self, write, tmp_path):
        data = table(write(tmp_path / f"a.{write.__name__[6:]}"), target="kind")
        (x, y), (x_test, _) = data
        assert x.shape == (24, 2) and x_test.shape == (6, 2) and x.dtype == torch.float32
        assert data.names == ["no", "yes"] and y[:2].tolist() == [0, 1] and x[1].tolist() == [1.5, 2.0]
        stream = streams.split(*data, tasks=2)
        assert stream.inputs == (2,) and stream.outputs == 2

    @pytest.mark.parametrize(("separator", "name"), [(";", "a.csv"), ("\t", "a.tsv")])
    def test_separators(self, separator, name, tmp_path):
        (_, y), _ = table(write_csv(tmp_path / name, separator), target="height", features=["width"])
        assert y.dtype == torch.int64 and y[0] == 1, "whole numbers are classes as they are"
        (x, y), _ = table(tmp_path / name, target="width", features=["height"])
        assert y.dtype == torch.float32 and x.shape == (24, 1), "fractions are numbers to predict"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a,b\n1,2\n1\n", "row 3: 1 cells, but 2 columns"),
            ("a,b\n1,\n", "row 2: the cell 'b' is empty"),
            ("a,a\n1,2\n", "each once; got 'a' more than once"),
            ("", "must begin with a line of column names"),
            ("a,b\n", "has no training data: 1 feature columns, 0 rows"),
            ("b\n1\n", "has no column 'a'; it has b"),
            (
                ",".join([*(f"p{i}" for i in range(64)), "digit"]) + "\n",
                "has no column 'a'; it has p0, p1, p2, p3, p4, p5, p6, p7, …, p63, digit \\(65 in all\\)",
            ),
            ("a,b\n1,x\n", "'b' is not numeric \\('x' in row 1"),
            ("a,b\n1,nan\n", "'b' has cells that are not finite"),
            ("a,b\n1,1e300\n", "'b' has cells that are not finite"),
            ("a,b\n0,1\nnan,2\n1,3\n", "'a' has cells that are not finite"),
            ("a,b\n0,1\n-1e999,2\n", "'a' has cells that are not finite"),
        ],
    )
    def test_invalid_tables(self, text, message, tmp_path):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            table(tmp_path / "a.csv", target="a")

    def test_numbers_of_many_digits(self, tmp_path):
        (tmp_path / "a.csv").write_text("a,b\n0,99999999999999999999\n1,3\n")
        assert table(tmp_path / "a.csv", target="a")[0][0].max() == np.float32(1e20)

    def test_columns_by_name(self, tmp_path):
        (tmp_path / "t.csv").write_text("a,y,b\n1,0,3\n2,1,4\n5,0,6\n")
        data = table(tmp_path / "t.csv", target="y")
        assert data.features == ["a", "b"] == data.copy().features
        chosen = table(tmp_path / "t.csv", target="y", features=["b"])
        assert chosen.features == ["b"] and chosen[0][0].tolist() == [[3.0], [4.0]]

    def test_target_cannot_be_feature(self, tmp_path):
        with pytest.raises(ValueError, match="'kind' is the column to predict"):
            table(write_csv(tmp_path / "a.csv"), target="kind", features=["width", "kind"])

    def test_dictionaries_dates_and_booleans(self, tmp_path):
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = {"a": [True, False] * 5, "b": arrow.array(["x", "y"] * 5).dictionary_encode()}
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
        data = table(tmp_path / "a.parquet", target="b")
        assert data.names == ["x", "y"] and data[0][0][:2].tolist() == [[1.0], [0.0]]
        with pytest.raises(ValueError, match="'b' is not numeric"):
            table(tmp_path / "a.parquet", target="a")

    def test_other_files(self, tmp_path):
        (tmp_path / "b.csv").write_bytes(b"a,b\n\xff,1\n")
        with pytest.raises(ValueError, match="cannot be read as CSV in UTF-8"):
            table(tmp_path / "b.csv", target="a")
        with pytest.raises(FileNotFoundError, match="There is no file"):
            table(tmp_path / "a.csv", target="a")
        (tmp_path / "a.xls").touch()
        with pytest.raises(ValueError, match=r"A table ends in .csv, .tsv, .parquet, got 'a.xls'"):
            table(tmp_path / "a.xls", target="a")

    def test_damaged_parquet_and_empty_cells(self, tmp_path):
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        (tmp_path / "a.parquet").write_bytes(b"no")
        with pytest.raises(ValueError, match="is not a Parquet file, or is damaged"):
            table(tmp_path / "a.parquet", target="a")
        parquet.write_table(arrow.table({"a": [1, None]}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match="'a' has 1 empty cells"):
            table(tmp_path / "a.parquet", target="a")

    def test_without_pyarrow(self, tmp_path, monkeypatch):
        write_parquet(tmp_path / "a.parquet")
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(ImportError, match=r"Parquet files needs pyarrow.*pip install 'everlearn\[data\]'"):
            table(tmp_path / "a.parquet", target="kind")


class Feature:
    """A feature of ``datasets``."""

    def __init__(self, dtype=None, inner=None, names=None):
        if dtype:
            self.dtype = dtype
        if inner:
            self.feature = inner
        if names:
            self.names = names


class Columns:
    """The part of ``datasets.Dataset`` that is used; a format could change dtypes."""

    def __init__(self, columns, features=None, plain=False):
        self.columns = columns
        self.plain = plain
        self.column_names = list(columns)
        self.features = features or {name: Feature() for name in columns}

    def with_format(self, kind):
        assert kind is None
        return Columns(self.columns, self.features, plain=True)

    def __getitem__(self, name):
        assert self.plain, "a format may convert bytes to 64-bit numbers"
        return self.columns[name]


class TestHuggingFace:
    def test_images_numbers_and_texts(self):
        image = pytest.importorskip("PIL.Image")
        pictures = [image.fromarray(np.full((4, 6, 3), i, np.uint8)) for i in range(10)]
        bytes_ = [[[i, 255], [0, 1]] for i in range(10)]
        features = {
            "picture": Feature("PIL.Image.Image"),
            "bytes": Feature(inner=Feature(inner=Feature("uint8"))),
            "numbers": Feature(inner=Feature("float32")),
            "text": Feature("string"),
            "label": Feature("int64", names=["cat", "dog"]),
        }
        columns = {
            "picture": pictures,
            "bytes": bytes_,
            "numbers": [[i, 0.5] for i in range(10)],
            "text": list("abcdefghij"),
            "label": [0, 1] * 5,
        }
        dataset = Columns(columns, features)
        data = hugging_face(dataset, x="picture", y="label")
        assert data[0][0].shape == (8, 3, 4, 6) and data[0][0][1, 0, 0, 0] == pytest.approx(1 / 255)
        assert data.names == ["cat", "dog"]
        x = hugging_face(dataset, x="bytes", y="label")[0][0]
        assert x.shape == (8, 1, 2, 2) and x.max() == 1, "bytes in squares are images"
        assert hugging_face(dataset, x="numbers", y="label")[0][0].dtype == torch.float32
        assert hugging_face(dataset, x="text", y="label")[1][0] == ["i", "j"]
        columns["picture"][0] = image.fromarray(np.zeros((5, 5), np.uint8))
        with pytest.raises(ValueError, match="have 2 sizes: resize them to one"):
            hugging_face(dataset, x="picture", y="label")

    def test_splits(self):
        split = Columns({"x": [[0.0], [1.0]], "y": ["a", "b"]})
        data = hugging_face({"train": split, "validation": split}, x="x", y="y")
        assert data[1][0].tolist() == [[0.0], [1.0]] and data.names == ["a", "b"]
        with pytest.raises(ValueError, match=r"needs the splits train and test .* got train, other"):
            hugging_face({"train": split, "other": split}, x="x", y="y")
        data = hugging_face({"train": split, "test": Columns({"x": [[0.0]], "y": ["b"]})}, x="x", y="y")
        assert data[1][1].tolist() == [1] and data.names == ["a", "b"]
        with pytest.raises(ValueError, match="have different classes"):
            hugging_face({"train": split, "test": Columns({"x": [[0.0]], "y": ["c"]})}, x="x", y="y")

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"a": [1], "y": [0]}, "no column 'x'; there are a, y"),
            ({"x": [], "y": []}, "has no examples"),
            ({"x": [[1], [1, 2]], "y": [0, 1]}, "lists of different lengths"),
            ({"x": [{}, {}], "y": [0, 1]}, "must hold images, texts or numbers, got dict"),
            ({"x": [1, 2], "y": [0, None]}, "'y' has empty cells"),
        ],
    )
    def test_invalid_columns(self, columns, message):
        with pytest.raises((ValueError, TypeError), match=message):
            hugging_face(Columns(columns), x="x", y="y")
        with pytest.raises(TypeError, match="of Hugging Face's datasets, got a list"):
            hugging_face([1, 2], x="x", y="y")

    def test_datasets_library(self):
        datasets = pytest.importorskip("datasets")
        square = datasets.Array2D((2, 2), "uint8")
        label = datasets.ClassLabel(names=["cat", "dog"])
        columns = {"x": [[[i, 2], [3, 255]] for i in range(10)], "text": list("abcdefghij"), "y": [0, 1] * 5}
        features = datasets.Features({"x": square, "text": datasets.Value("string"), "y": label})
        dataset = datasets.Dataset.from_dict(columns, features).with_format("torch")
        data = hugging_face(dataset, x="x", y="y")
        assert data[0][0].shape == (8, 1, 2, 2) and data[0][0].max() == 1 and data.names == ["cat", "dog"]
        parts = datasets.DatasetDict({"train": dataset, "test": dataset})
        assert hugging_face(parts, x="text", y="y")[1][0] == list("abcdefghij")
