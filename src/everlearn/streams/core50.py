"""CORe50: fifty objects in the hand, filmed in eleven sessions (Lomonaco & Maltoni, 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from everlearn.seeds import generator
from everlearn.sources.files import data_root
from everlearn.sources.folders import read_image
from everlearn.stream import Scenario, Stream
from everlearn.streams.own import from_tasks
from everlearn.streams.sets import first_of

SESSIONS, OBJECTS = range(1, 12), range(1, 51)
TESTS = (3, 7, 10)
FOLDER = "core50_128x128"
ORIGIN = "vlomonaco.github.io/core50 (core50_128x128.zip)"


class Frames(Dataset[tuple[Tensor, int]]):
    """Images read when they are asked for: all of CORe50 would not fit into memory."""

    def __init__(self, paths: Sequence[str], targets: Sequence[int], size: int) -> None:
        self.paths, self.targets, self.size = list(paths), list(targets), size

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
    """CORe50, new instances: all fifty objects in a new session per task; sessions 3, 7 and 10 are the test throughout.

    Args:
        scenario: "domain", which is what new instances of known classes are.
        tasks: only the first so many of the eight training sessions.
        seed: of the order of the sessions and of the validation share; seed 0 keeps the order of time.
        valid: share of each task's training examples held back for choosing hyper-parameters.
        root: the folder of ``core50_128x128``; by default EVERLEARN_DATA.
        size: the side of the images, in pixels.
        workers: processes that read images.
    """
    if scenario != "domain":
        raise ValueError(f"New instances of the same classes are domain-incremental, got {scenario!r}; see core50_nc.")
    folder = _folder(root)
    sessions = first_of(_shuffled([s for s in SESSIONS if s not in TESTS], seed), tasks, "core50-ni")
    classes = [o - 1 for o in OBJECTS]
    test = _frames(folder, TESTS, classes, size)
    stream = from_tasks(
        [(_frames(folder, [session], classes, size), test) for session in sessions],
        scenario=scenario, names=[f"session {s}" for s in sessions], classes=[classes] * len(sessions), outputs=len(classes),
        seed=seed, valid=valid, workers=workers, name="core50-ni",
    )  # fmt: skip
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
    """CORe50, new classes: ten objects, then five more per task, filmed in eight sessions, tested in the other three.

    Arguments as for ``core50_ni``; the scenario is "class" or "task", and the seed is of the order of the objects.
    """
    if scenario == "domain":
        raise ValueError("New classes are class- or task-incremental, got 'domain'; see core50_ni.")
    folder, order = _folder(root), _shuffled([o - 1 for o in OBJECTS], seed)
    groups = first_of([order[:10], *(order[i : i + 5] for i in range(10, 50, 5))], tasks, "core50-nc")
    sessions = [s for s in SESSIONS if s not in TESTS]
    stream = from_tasks(
        [(_frames(folder, sessions, own, size), _frames(folder, TESTS, own, size)) for own in groups],
        scenario=scenario, classes=groups, outputs=len(OBJECTS), seed=seed, valid=valid, workers=workers, name="core50-nc",
    )  # fmt: skip
    return replace(stream, settings={**stream.settings, "class_order": order, "size": size})


def _shuffled(things: list[int], seed: int) -> list[int]:
    if seed == 0:
        return things
    return [things[i] for i in torch.randperm(len(things), generator=generator(seed, "stream")).tolist()]


def _folder(root: str | Path | None) -> Path:
    wanted = [f"s{s}/o{o}" for s in SESSIONS for o in OBJECTS]
    given = data_root("core50", f"{FOLDER}/s1/o1/*.png to {FOLDER}/s11/o50/*.png", ORIGIN, root)
    folders = [given / "core50" / FOLDER, given / FOLDER, given / "core50", given]
    folder = next((f for f in folders if (f / "s1").is_dir()), given / FOLDER)
    if lacking := [name for name in wanted if not (folder / name).is_dir()]:
        raise FileNotFoundError(
            f"core50 is not whole in {folder}: {len(lacking)} of {len(wanted)} folders are missing, {lacking[0]} among "
            f"them; get it from {ORIGIN}."
        )
    return folder


def _frames(folder: Path, sessions: Sequence[int], classes: Sequence[int], size: int) -> Frames:
    found = [
        (str(path), c)
        for s in sessions
        for c in classes
        for path in sorted((folder / f"s{s}" / f"o{c + 1}").glob("*.png"))
    ]
    if not found:
        raise FileNotFoundError(f"{folder} has no images in its folders: unpack it anew, from {ORIGIN}.")
    return Frames([path for path, _ in found], [c for _, c in found], size)
