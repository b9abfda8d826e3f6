"""CORe50: fifty hand-held objects, filmed in eleven sessions (Lomonaco & Maltoni, 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.sources.checksums import require_root
from everlearn.sources.folders import read_image
from everlearn.streams.dataset_sequence import take_first
from everlearn.streams.from_tasks import from_tasks

SESSIONS = range(1, 12)
TEST_SESSIONS = (3, 7, 10)
TRAIN_SESSIONS = tuple(session for session in SESSIONS if session not in TEST_SESSIONS)
OBJECTS = range(1, 51)
FOLDER = "core50_128x128"
ORIGIN = "vlomonaco.github.io/core50 (core50_128x128.zip)"


class Frames(Dataset[tuple[Tensor, int]]):
    """Dataset that reads images on access, because CORe50 does not fit into memory."""

    def __init__(self, paths: Sequence[str], targets: Sequence[int], size: int) -> None:
        self.paths = list(paths)
        self.targets = list(targets)
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(Path(self.paths[index]), size=self.size)
        return image.to(torch.float32) / 255, self.targets[index]


def core50_ni(
    scenario: Scenario = "domain",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 32,
    workers: int = 0,
) -> Stream:
    """Load CORe50 with new instances: all fifty objects in one new session per task, tested on sessions 3, 7, 10.

    Args:
        scenario: "domain", because the classes stay the same.
        tasks: number of training sessions to use, at most eight; by default all.
        seed: seed of the order of the sessions and of the validation split; seed 0 keeps the chronological order.
        valid: share of each task's training examples to use for validation.
        root: folder of ``core50_128x128``; by default EVERLEARN_DATA.
        size: side of the images in pixels.
        workers: number of processes that read images.
    """
    if scenario != "domain":
        raise ValueError(f"New instances of the same classes are domain-incremental, got {scenario!r}; see core50_nc.")
    folder = _find_folder(root)
    sessions = take_first(_shuffle(list(TRAIN_SESSIONS), seed), tasks, "core50-ni")

    classes = [number - 1 for number in OBJECTS]
    test = _list_frames(folder, TEST_SESSIONS, classes, size)
    stream = from_tasks(
        [(_list_frames(folder, [session], classes, size), test) for session in sessions],
        scenario=scenario,
        names=[f"session {session}" for session in sessions],
        classes=[classes] * len(sessions),
        outputs=len(classes),
        seed=seed,
        valid=valid,
        workers=workers,
        name="core50-ni",
    )
    return replace(stream, settings={**stream.settings, "sessions": sessions, "size": size})


def core50_nc(
    scenario: Scenario = "class",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 32,
    workers: int = 0,
) -> Stream:
    """Load CORe50 with new classes: ten objects, then five more per task, in eight training and three test sessions.

    Arguments as for ``core50_ni``, except that the scenario is "class" or "task", and the seed also sets the order of
    the objects.
    """
    if scenario == "domain":
        raise ValueError("New classes are class- or task-incremental, got 'domain'; see core50_ni.")
    folder = _find_folder(root)
    class_order = _shuffle([number - 1 for number in OBJECTS], seed)
    groups = [class_order[:10], *(class_order[i : i + 5] for i in range(10, 50, 5))]
    groups = take_first(groups, tasks, "core50-nc")

    pairs = []
    for classes in groups:
        train = _list_frames(folder, TRAIN_SESSIONS, classes, size)
        test = _list_frames(folder, TEST_SESSIONS, classes, size)
        pairs.append((train, test))

    stream = from_tasks(
        pairs,
        scenario=scenario,
        classes=groups,
        outputs=len(OBJECTS),
        seed=seed,
        valid=valid,
        workers=workers,
        name="core50-nc",
    )
    return replace(stream, settings={**stream.settings, "class_order": class_order, "size": size})


def _shuffle(numbers: list[int], seed: int) -> list[int]:
    if seed == 0:
        return numbers
    order = torch.randperm(len(numbers), generator=generator(seed, "stream"))
    return [numbers[i] for i in order.tolist()]


def _find_folder(root: str | Path | None) -> Path:
    """Return the folder of the sessions; raise if any of its object folders is missing."""
    data_folder = require_root("core50", f"{FOLDER}/s1/o1/*.png to {FOLDER}/s11/o50/*.png", ORIGIN, root)
    candidates = [data_folder / "core50" / FOLDER, data_folder / FOLDER, data_folder / "core50", data_folder]
    folder = next((path for path in candidates if (path / "s1").is_dir()), data_folder / FOLDER)

    required = [f"s{session}/o{number}" for session in SESSIONS for number in OBJECTS]
    missing = [name for name in required if not (folder / name).is_dir()]
    if missing:
        raise FileNotFoundError(
            f"core50 is incomplete in {folder}: {len(missing)} of {len(required)} folders are missing, {missing[0]} "
            f"among them; get it from {ORIGIN}."
        )
    return folder


def _list_frames(folder: Path, sessions: Sequence[int], classes: Sequence[int], size: int) -> Frames:
    paths = []
    targets = []
    for session in sessions:
        for label in classes:
            for path in sorted((folder / f"s{session}" / f"o{label + 1}").glob("*.png")):
                paths.append(str(path))
                targets.append(label)

    if not paths:
        raise FileNotFoundError(f"{folder} has no images in its folders: unpack it again, from {ORIGIN}.")
    return Frames(paths, targets, size)
