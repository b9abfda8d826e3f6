"""What a result was produced by: versions, commit, time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch

from everlearn.runtime.distributed import world_size


def provenance() -> dict[str, Any]:
    """Versions and the commit of the working folder, to do a run again as it was."""
    packages = ("everlearn", "torch", "numpy")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{p: version(p) for p in packages}},
        "threads": torch.get_num_threads(),
        "processes": world_size(),
        "platform": platform.platform(),
        "commit": _commit(os.getcwd()),
    }


def version(package: str = "everlearn") -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # used from its source folder, without being installed


@cache
def _commit(folder: str) -> str | None:
    """The commit of a folder, which may be anybody's repository: what its settings would have git run is switched off."""
    settings = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    quiet = {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ALLOW_PROTOCOL": "",
        "GIT_TERMINAL_PROMPT": "0",
    }  # nothing written, nothing fetched

    def git(*arguments: str) -> str:
        given = {f"GIT_CONFIG_KEY_{i}": name for i, name in enumerate(settings)}
        given |= {f"GIT_CONFIG_VALUE_{i}": value for i, value in enumerate(settings.values())}
        environment = {**os.environ, **quiet, **given, "GIT_CONFIG_COUNT": str(len(settings))}
        command = ["git", "-C", folder, *arguments]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=10, env=environment
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        for name in git("config", "--list", "--name-only", "-z").split("\0"):
            if name.startswith("filter.") and name.endswith((".clean", ".process")):
                settings[name] = ""
                settings[f"{name.rpartition('.')[0]}.required"] = "false"
        changed = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
        return commit + (" (changed)" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not a repository: a result without a commit is still a result
