"""Write small data sets in the file layouts of the published ones."""

import bz2
import gzip
import io
import json
import struct
import zipfile

import numpy as np
import pytest

IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def idx(array, kind=8):
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, sizes=(40, 20), seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name in IDX:
        n = sizes[0] if name.startswith("train") else sizes[1]
        array = rng.integers(0, 256, (n, 28, 28)) if "images" in name else np.arange(n) % 10
        (folder / name).write_bytes(gzip.compress(idx(array.astype("u1")), mtime=0))


def write_notmnist(folder):
    write_mnist(folder, (40, 100), seed=3)
    for name in IDX[:2]:
        (folder / name).unlink()


def write_cifar10(folder, per_file=20):
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        rows = np.random.default_rng(0).integers(0, 256, (per_file, 3073), np.uint8)
        rows[:, 0] = np.arange(per_file) % 10
        rows.tofile(folder / f"{name}.bin")


def write_cifar100(folder, sizes=(200, 100)):
    folder.mkdir(parents=True)
    for name, count in zip(("train.bin", "test.bin"), sizes, strict=True):
        rows = np.random.default_rng(0).integers(0, 256, (count, 3074), np.uint8)
        rows[:, 1] = np.arange(count) % 100
        rows[:, 0] = rows[:, 1] // 5
        rows[0, 2:] = np.arange(3072) % 256
        rows.tofile(folder / name)


def write_usps(folder, sizes=(30, 20)):
    folder.mkdir(parents=True)
    for name, n in zip(("usps.bz2", "usps.t.bz2"), sizes, strict=True):
        pixels = np.random.default_rng(n).uniform(-1, 1, (n, 256)).round(3)
        lines = []
        for i, row in enumerate(pixels):
            lines.append(f"{i % 10 + 1} " + " ".join(f"{j + 1}:{v}" for j, v in enumerate(row)))
        (folder / name).write_bytes(bz2.compress("\n".join(lines).encode()))


def write_svhn(folder, sizes=(30, 20)):
    scipy_io = pytest.importorskip("scipy.io")
    folder.mkdir(parents=True)
    for name, n in zip(("train_32x32.mat", "test_32x32.mat"), sizes, strict=True):
        x = np.random.default_rng(n).integers(0, 256, (32, 32, 3, n), np.uint8)
        scipy_io.savemat(folder / name, {"X": x, "y": (np.arange(n) % 10 + 1).astype(np.uint8)[:, None]})


def png(array, **options):
    image = pytest.importorskip("PIL.Image").fromarray(array)
    file = io.BytesIO()
    image.save(file, "png", **options)
    return file.getvalue()


def write_images(folder, classes, images_per_class=5, size=(8, 8), seed=0):
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(images_per_class):
            (folder / name / f"{i:03d}.png").write_bytes(png(rng.integers(0, 256, (*size, 3), np.uint8)))


def drawing(i):
    return png(np.random.default_rng(i).integers(0, 2, (105, 105)).astype(np.uint8) * 255)


ALPHABETS = {"Greek": 3, "Latin": 2, "Korean": 4}


def write_omniglot(folder, alphabets=ALPHABETS, drawings=5):
    for alphabet, characters in alphabets.items():
        for c in range(1, characters + 1):
            (folder / alphabet / f"character{c:02d}").mkdir(parents=True)
            for d in range(1, drawings + 1):
                file = folder / alphabet / f"character{c:02d}" / f"{c:04d}_{d:02d}.png"
                file.write_bytes(drawing(100 * c + d))


def zip_folder(folder, target):
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder.parent).as_posix())


def write_clinc150(folder, domains=10, intents=15, examples_per_intent=4):
    folder.mkdir(parents=True)
    names = {f"domain{d}": [f"intent{d}_{i}" for i in range(intents)] for d in range(domains)}
    rows = []
    for domain_intents in names.values():
        for intent in domain_intents:
            rows += [(f"please do {intent} {k}", intent) for k in range(examples_per_intent)]
    content = {"train": rows, "val": rows[:1], "test": rows[::2], "oos_train": [("what", "oos")]}
    (folder / "data_full.json").write_text(json.dumps(content))
    (folder / "domains.json").write_text(json.dumps(names))


def write_gas(folder, sizes, concentrations=True):
    folder.mkdir(parents=True)
    for batch, n in sizes.items():
        values = np.random.default_rng(batch).normal(batch, 2.0, (n, 128))
        lines = []
        for i, row in enumerate(values):
            label = f"{i % 6 + 1};10.0" if concentrations else f"{i % 6 + 1}"
            lines.append(f"{label} " + " ".join(f"{j + 1}:{v:.4f}" for j, v in enumerate(row)))
        (folder / f"batch{batch}.dat").write_text("\n".join(lines) + "\n")
