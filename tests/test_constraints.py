"""The contributor's environment: what the tests bring is pinned, and nothing that does not fit a CPU build of torch."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(requirement):
    """The names of all that a requirement brings, by the metadata of what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names, queue = set(), [Requirement(requirement)]
    while queue:
        requirement = queue.pop()
        name = normalized(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in names:
            continue
        names.add(key)
        if name == project["name"]:
            found = [text for extra in requirement.extras for text in project["optional-dependencies"][extra]]
            queue += [Requirement(text) for text in [*project["dependencies"], *found]]
            continue
        for text in distribution(name).requires or ():
            inner = Requirement(text)
            chosen = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in chosen):
                queue.append(inner)
    return {name for name, _ in names} - {project["name"]}


def test_constraints_pin_what_the_tests_bring():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normalized(line.split("==")[0]) for line in lines if "==" in line}
    found = brought("everlearn[test]")
    assert {"torch", "transformers", "lightning"} <= found <= pinned
    assert not {"torchvision", "curvlinops-for-pytorch"} & (found | pinned)
