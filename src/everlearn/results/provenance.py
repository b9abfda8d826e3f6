"""Provenance of a result: versions, commit, time."""

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

PACKAGES = ("everlearn", "torch", "numpy")


def provenance() -> dict[str, Any]:
    """Record versions and the commit of the working folder, to repeat a run."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "threads": torch.get_num_threads(),
        "processes": world_size(),
        "platform": platform.platform(),
        "commit": _commit(os.getcwd()),
    }


def version(package: str = "everlearn") -> str | None:
    """Return the installed version of a package; None if it is used from its source folder."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _commit(folder: str) -> str | None:
    """Return the commit of a folder; None without git or outside a repository.

    The repository may be untrusted, so programs that its settings would have git run are switched off.
    """
    settings = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}

    def git(*arguments: str) -> str:
        environment = {**os.environ, **_git_environment(settings)}
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
        changes = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    except (OSError, subprocess.SubprocessError):
        return None
    if changes:
        return f"{commit} (changed)"
    return commit


def _git_environment(settings: dict[str, str]) -> dict[str, str]:
    """Return environment variables with these git settings, under which git writes and fetches nothing."""
    environment = {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ALLOW_PROTOCOL": "",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    for i, (name, value) in enumerate(settings.items()):
        environment[f"GIT_CONFIG_KEY_{i}"] = name
        environment[f"GIT_CONFIG_VALUE_{i}"] = value
    return environment
