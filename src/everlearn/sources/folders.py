"""Read images from folders, one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from everlearn.runtime.optional_imports import imports_of_extra
from everlearn.sources.labeled_data import Data, align_labels, hold_back

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
TEST_FOLDERS = ("test", "val", "valid")


def image_folder(root: str | Path, *, size: int, grey: bool = False, test: float = 0.2) -> Data:
    """Read the images of a folder with one subfolder per class into memory, all resized to one size.

    If there are folders ``train`` and ``test`` (or ``val``, ``valid``) with the classes inside, they are the training
    and the test set; otherwise a share of each class is for testing. For more images than fit into memory, give a
    stream a Dataset, for example torchvision's ``ImageFolder``.

    Args:
        root: the folder.
        size: side of the images in pixels; an image is cropped to a square and scaled.
        grey: whether to read one channel (grayscale) instead of three.
        test: share of images for testing, if there is no test folder.
    """
    return load_raw_folder(root, size=size, grayscale=grey, test=test).copy()


def load_raw_folder(root: str | Path, *, size: int, grayscale: bool = False, test: float = 0.2) -> Data:
    """Read the same data as ``image_folder``, with the images in bytes."""
    folder = Path(root)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size is the side of the images in pixels, a whole number from 1, got {size!r}.")
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: give one with a subfolder of images per class.")

    train_folder = folder / "train"
    test_folder = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    if test_folder is None or not train_folder.is_dir():
        x, y, names = read_class_folders(folder, size=size, grayscale=grayscale)
        return hold_back(x, y, test, names=names)

    x, y, names = read_class_folders(train_folder, size=size, grayscale=grayscale)
    x_test, y_test, test_names = read_class_folders(test_folder, size=size, grayscale=grayscale)
    unknown_names = sorted(set(test_names) - set(names))
    if unknown_names:
        raise ValueError(f"{test_folder} has classes that {train_folder} does not have: {', '.join(unknown_names)}.")
    return Data((x, y), (x_test, align_labels(y_test, test_names, names)), names=names)


def read_class_folders(
    folder: Path, *, size: int, grayscale: bool = False, skip_damaged: bool = False
) -> tuple[Tensor, Tensor, list[str]]:
    """Read the images of all class folders.

    Args:
        folder: the folder of the class folders.
        size: side of the images in pixels.
        grayscale: whether to read one channel instead of three.
        skip_damaged: whether to leave out unreadable images instead of raising.

    Returns:
        Images in bytes, labels, and class names in sorted order.
    """
    class_folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    images = []
    labels = []
    for label, class_folder in enumerate(class_folders):
        image_paths = [path for path in sorted(class_folder.rglob("*")) if _is_image(path)]
        if not image_paths:
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
            raise ValueError(f"{class_folder} has no images ({suffixes}): take it out of {folder}.")

        for path in image_paths:
            try:
                images.append(read_image(path, size=size, grayscale=grayscale))
            except ValueError:
                if not skip_damaged:
                    raise
                continue
            labels.append(label)

    if not class_folders:
        raise ValueError(f"{folder} has no subfolders: an image's class is the name of the folder it is in.")
    return torch.stack(images), torch.tensor(labels), [path.name for path in class_folders]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def read_image(file: Path | IO[bytes], *, size: int | None = None, grayscale: bool = False) -> Tensor:
    """Read an image as bytes (channels, height, width), cropped to a square and scaled if a size is given."""
    with imports_of_extra("data", "Reading images"):
        from PIL import Image, ImageOps

    mode = "L" if grayscale else "RGB"
    try:
        with Image.open(file) as opened:
            image: Any = opened.convert(mode)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{getattr(file, 'name', file)} cannot be read as an image: {error}.") from None

    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    if grayscale:
        return pixels.unsqueeze(0)
    return pixels.permute(2, 0, 1).contiguous()
