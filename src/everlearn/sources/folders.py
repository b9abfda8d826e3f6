"""Images in folders, one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from everlearn.extras import needs
from everlearn.sources.data import Data, hold_back, renumbered

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def image_folder(root: str | Path, *, size: int, grey: bool = False, test: float = 0.2) -> Data:
    """The images under a folder, a sub-folder per class, all brought to one size and into memory.

    Where there are folders ``train`` and ``test`` (or ``val``), each with the classes inside, they are taken as such;
    otherwise a share of each class is held back for tests. Images too many for the memory are better given to a stream
    as a Dataset, for example torchvision's ``ImageFolder``.

    Args:
        root: the folder.
        size: the side of the square that an image is scaled to after its longer side has been cropped, in pixels.
        grey: one channel instead of three.
        test: the share of images for tests, where they do not have a folder of their own.
    """
    return raw_folder(root, size=size, grey=grey, test=test).copy()


def raw_folder(root: str | Path, *, size: int, grey: bool = False, test: float = 0.2) -> Data:
    """The same, with the images left in bytes."""
    folder = Path(root)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size is the side of the images in pixels, a whole number from 1, got {size!r}.")
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: give one with a sub-folder of images per class.")
    other = next((folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()), None)
    if other is None or not (folder / "train").is_dir():
        x, y, names = read_folder(folder, size=size, grey=grey)
        return hold_back(x, y, test, names=names)
    x, y, names = read_folder(folder / "train", size=size, grey=grey)
    x_test, y_test, own = read_folder(other, size=size, grey=grey)
    if unknown := sorted(set(own) - set(names)):
        raise ValueError(f"{other} has classes that {folder / 'train'} has not: {', '.join(unknown)}.")
    return Data((x, y), (x_test, renumbered(y_test, own, names)), names=names)


def read_folder(
    folder: Path, *, size: int, grey: bool = False, skip_damaged: bool = False
) -> tuple[Tensor, Tensor, list[str]]:
    """Images in bytes, labels and names of the classes, in the order of the names."""
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    x, y = [], []
    for label, path in enumerate(classes):
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
        if not files:
            raise ValueError(f"{path} has no images ({', '.join(sorted(ENDINGS))}): take it out of {folder}.")
        for file in files:
            try:
                x.append(read_image(file, size=size, grey=grey))
            except ValueError:
                if not skip_damaged:
                    raise
                continue
            y.append(label)
    if not classes:
        raise ValueError(f"{folder} has no sub-folders: an image's class is the name of the folder it is in.")
    return torch.stack(x), torch.tensor(y), [path.name for path in classes]


def read_image(file: Path | IO[bytes], *, size: int | None = None, grey: bool = False) -> Tensor:
    """One image in bytes, (channels, height, width), cropped to a square and scaled if a size is given."""
    needs("PIL", "data", "Reading images")
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image: Any = opened.convert("L" if grey else "RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{getattr(file, 'name', file)} cannot be read as an image: {error}.") from None
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if grey else pixels.permute(2, 0, 1).contiguous()
