"""Oxford 102 flowers: 8,189 photographs (Nilsback & Zisserman, 2008)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from everlearn.sources.data import Data, Pair
from everlearn.sources.files import File, Layout, Published
from everlearn.sources.folders import read_image
from everlearn.sources.svhn import read_mat

URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"


def _read(folder: Path, size: int) -> Data:
    """The published parts: 1,020 images to train on and 6,149 for tests; the 1,020 for validation are left aside."""
    labels = read_mat(folder / "imagelabels.mat", ("labels",))["labels"].ravel()
    parts = read_mat(folder / "setid.mat", ("trnid", "tstid"))

    def pair(ids: np.ndarray) -> Pair:
        paths = [folder / "jpg" / f"image_{i:05d}.jpg" for i in ids]
        if lost := [path.name for path in paths if not path.exists()]:
            raise FileNotFoundError(f"{folder / 'jpg'} lacks {len(lost)} images, {lost[0]} among them; unpack it anew.")
        y = torch.from_numpy(labels[ids - 1].astype(np.int64) - 1)  # published from 1 on
        return torch.stack([read_image(path, size=size) for path in paths]), y

    return Data(pair(parts["trnid"].ravel()), pair(parts["tstid"].ravel()))


FLOWERS = Published(
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
            sized=True,
        ),
    ),
    "www.robots.ox.ac.uk/~vgg/data/flowers/102",
)  # fmt: skip
