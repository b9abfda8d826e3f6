"""The environment for contributors: all test requirements are pinned and work with a CPU build of torch."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def normalize_name(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def required_packages(requirement):
    """Collect the names of all direct and indirect requirements, from the metadata of installed packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    visited = set()
    queue = [Requirement(requirement)]
    while queue:
        requirement = queue.pop()
        name = normalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in visited:
            continue
        visited.add(key)
        if name == project["name"]:
            extra_requirements = [
                line for extra in requirement.extras for line in project["optional-dependencies"][extra]
            ]
            queue += [Requirement(line) for line in [*project["dependencies"], *extra_requirements]]
            continue
        for line in distribution(name).requires or ():
            dependency = Requirement(line)
            extras = requirement.extras or {""}
            if dependency.marker is None or any(dependency.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(dependency)
    return {name for name, _ in visited} - {project["name"]}


def test_constraints_pin_all_test_requirements():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normalize_name(line.split("==")[0]) for line in lines if "==" in line}
    required = required_packages("everlearn[test]")
    assert {"torch", "transformers", "lightning"} <= required <= pinned
    assert not {"torchvision", "curvlinops-for-pytorch"} & (required | pinned)
