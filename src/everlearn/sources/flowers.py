"""Oxford 102 flowers: 8,189 photographs (Nilsback & Zisserman, 2008)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.folders import read_image
from everlearn.sources.labeled_data import Data, Pair
from everlearn.sources.svhn import read_mat

URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"


def _read(folder: Path, size: int) -> Data:
    """Read the published split: 1,020 training and 6,149 test images; the 1,020 validation images are not used."""
    labels = read_mat(folder / "imagelabels.mat", ("labels",))["labels"].ravel()
    split_ids = read_mat(folder / "setid.mat", ("trnid", "tstid"))
    train = _read_images(folder / "jpg", split_ids["trnid"].ravel(), labels, size)
    test = _read_images(folder / "jpg", split_ids["tstid"].ravel(), labels, size)
    return Data(train, test)


def _read_images(folder: Path, image_ids: np.ndarray, labels: np.ndarray, size: int) -> Pair:
    paths = [folder / f"image_{i:05d}.jpg" for i in image_ids]
    missing_names = [path.name for path in paths if not path.exists()]
    if missing_names:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing_names)} images, {missing_names[0]} among them; unpack it again."
        )

    # Images and labels are numbered from 1.
    y = torch.from_numpy(labels[image_ids - 1].astype(np.int64) - 1)
    return torch.stack([read_image(path, size=size) for path in paths]), y


FLOWERS = PublishedDataset(
    "flowers",
    (
        Layout(
            (
                File("jpg"),
                File("imagelabels.mat", "e0620be6f572b9609742df49c70aed4d", url=URL + "imagelabels.mat"),
                File("setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c", url=URL + "setid.mat"),
            ),
            _read,
            ("flowers-102",),
            (
                File("102flowers.tgz", "52808999861908f626f3c1f4e79d11fa", url=URL + "102flowers.tgz", unpacks="jpg"),
            ),
            takes_size=True,
        ),
    ),
    "www.robots.ox.ac.uk/~vgg/data/flowers/102",
)  # fmt: skip
