"""The eight-task sequence of Memory Aware Synapses (Aljundi et al., 2018): objects, actions, letters, digits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.sources import Data
from everlearn.sources.checksums import has_any_file, resolve_root
from everlearn.sources.folders import load_raw_folder
from everlearn.sources.registry import SOURCES, load_raw
from everlearn.streams.dataset_sequence import load_available, stream_name, stream_of_datasets, take_first
from everlearn.streams.subset import ImageResizer

DATASETS = ("flowers", "scenes", "birds", "cars", "aircraft", "actions", "letters", "svhn")
PUBLISHED_NAMES = {"flowers": "flowers", "letters": "chars74k", "svhn": "svhn"}


def mas_sequence(
    scenario: Scenario = "task",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 64,
) -> Stream:
    """Load Flowers, Scenes, Birds, Cars, Aircraft, Actions, Letters and SVHN, as far as available, one task each.

    A data set is a folder of its name under ``root``, with one subfolder of images per class (see
    ``sources.image_folder``). Flowers, Letters (Chars74K) and SVHN are also read in their published form. The paper
    uses images of 224 × 224 pixels.

    Args:
        scenario: "task" or "class"; the data sets have different numbers of classes.
        tasks: number of available data sets to use, from the first; by default all.
        seed: seed of the validation split.
        valid: share of each task's training examples to use for validation.
        root: folder of the data sets; by default EVERLEARN_DATA.
        size: side of the images in pixels.
    """
    available = load_available({name: partial(_load, name, root, size) for name in DATASETS}, "mas-sequence")
    dataset_names = take_first(list(available), tasks, "mas-sequence")
    datasets = {name: available[name] for name in dataset_names}
    stream = stream_of_datasets(
        datasets,
        ImageResizer(3, size),
        scenario=scenario,
        seed=seed,
        valid=valid,
        name=stream_name("mas-sequence", DATASETS, dataset_names),
    )
    stream.settings["size"] = size
    return stream


def _load(name: str, root: str | Path | None, size: int) -> Data:
    """Load a data set in its published form, or from a folder of images if no published file exists."""
    folder = resolve_root(root)
    published_name = PUBLISHED_NAMES.get(name)
    if published_name is not None:
        has_image_folder = folder is not None and (folder / name).is_dir()
        has_published_files = folder is not None and has_any_file(SOURCES[published_name], folder)
        if has_published_files or not has_image_folder:
            return load_raw(published_name, root, size=size)

    if folder is None:
        raise FileNotFoundError(f"Where is {name}? Give root=… or EVERLEARN_DATA.")
    return load_raw_folder(folder / name, size=size)
