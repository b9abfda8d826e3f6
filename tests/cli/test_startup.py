"""Help and lists are shown without importing torch."""

import inspect
import subprocess
import sys

import pytest

pytest.importorskip("cyclopts")
from everlearn import METHODS, Stream
from everlearn.cli.app import start
from everlearn.nets import NETS
from everlearn.streams import STREAMS

HEAVY = ["torch", "numpy", "transformers", "matplotlib", "safetensors"]
COMMANDS = ["compare", "advise", "run", "reproduce", "tune", "update", "report", "watch", "list", "show"]

# Runs a command in a process in which the import of a heavy package fails.
GUARDED_COMMAND = f"""
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in {HEAVY}, f"{{name}} is imported"

sys.meta_path.insert(0, Guard())
from everlearn.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["list"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_and_lists_do_not_import_torch(arguments):
    command = [sys.executable, "-c", GUARDED_COMMAND, *arguments]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() and not process.stderr


def test_the_guard_notices_a_command_that_imports_them():
    command = [sys.executable, "-c", GUARDED_COMMAND, "show", "ewc"]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode and " is imported" in process.stderr


def test_the_lists_show_the_docstrings_of_what_would_be_imported(capsys):
    assert start(["list"]) == 0
    text = capsys.readouterr().out
    sections = [section.splitlines()[1:] for section in text.split("\n\n")[:3]]
    registries = [{**METHODS, "joint": Stream.joint}, STREAMS, NETS]
    for lines, registry in zip(sections, registries, strict=True):
        expected = [f"  {name:19s} {inspect.getdoc(entry).splitlines()[0]}" for name, entry in registry.items()]
        assert lines == expected
