"""The eight-task sequence of memory aware synapses (Aljundi et al., 2018): objects, scenes, actions, letters, digits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from everlearn.sources import Data
from everlearn.sources.files import begun, given_root
from everlearn.sources.folders import raw_folder
from everlearn.sources.published import SOURCES, raw
from everlearn.stream import Scenario, Stream
from everlearn.streams.parts import Fitted
from everlearn.streams.sets import a_task_per_set, first_of, name_of, present

SETS = ("flowers", "scenes", "birds", "cars", "aircraft", "actions", "letters", "svhn")
PUBLISHED = {"flowers": "flowers", "letters": "chars74k", "svhn": "svhn"}


def mas_sequence(
    scenario: Scenario = "task",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 64,
) -> Stream:
    """Flowers, Scenes, Birds, Cars, Aircraft, Actions, Letters and SVHN, those that are here, at 3 × 64 × 64.

    A set is a folder of its name under ``root``, with a sub-folder of images per class (see ``sources.image_folder``).
    Flowers, Letters (Chars74K) and SVHN are also read as they were published. The paper has images of 224 × 224 pixels.

    Args:
        scenario: "task" or "class"; the sets have different numbers of classes.
        tasks: only the first so many of those that are here.
        seed: of the validation share.
        valid: share of each task's training examples held back for choosing hyper-parameters.
        root: the folder of data sets; by default EVERLEARN_DATA.
        size: the side of the images, in pixels.
    """
    found = present({name: partial(_read, name, root, size) for name in SETS}, "mas-sequence")
    sets = {name: found[name] for name in first_of(list(found), tasks, "mas-sequence")}
    name = name_of("mas-sequence", SETS, list(sets))
    stream = a_task_per_set(sets, Fitted(3, size), scenario=scenario, seed=seed, valid=valid, name=name)
    stream.settings["size"] = size
    return stream


def _read(name: str, root: str | Path | None, size: int) -> Data:
    """A set as it was published; from a folder of images if nothing of what was published is there."""
    given, known = given_root(root), PUBLISHED.get(name)
    if known and (given is None or begun(SOURCES[known], given) or not (given / name).is_dir()):
        return raw(known, root, size=size)
    if given is None:
        raise FileNotFoundError(f"Where is {name}? Give root=… or EVERLEARN_DATA.")
    return raw_folder(given / name, size=size)
