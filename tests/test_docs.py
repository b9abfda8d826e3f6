"""Test that every Python example in README, docs/ and examples/ runs, and that the documented commands exist."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT_PAGES = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.rst"))]
SLOW_PAGES = {"quickstart_researcher.md"}

# Examples that need real text, with the arguments of their smallest run.
SMALL_RUNS = {
    "intents": ["class", "er", "2", "32"],
    "new_intents": ["2"],
    "perplexity": ["2", "300"],
}


def code_blocks(page, language):
    """Return the fenced code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def shell_commands():
    """Return all documented `everlearn run` and `everlearn reproduce` commands, each on one line."""
    commands = []
    for page in PAGES:
        for block in code_blocks(page, "sh"):
            # A backslash at the end of a line continues the command.
            lines = block.replace("\\\n", " ").splitlines()
            commands += [line for line in lines if re.match("everlearn (run|reproduce)", line)]
    return commands


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.name in SLOW_PAGES)) for p in PAGES if code_blocks(p, "python")],
    ids=lambda p: p.name,
)
def test_python_examples_run_from_top_to_bottom(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if page.name == "integrations.md":
        for package in ("lightning", "transformers"):
            pytest.importorskip(package)
        # Lightning looks for a free port, and both packages raise warnings of their own.
        request.getfixturevalue("socket_enabled")
        warnings.simplefilter("ignore")

    namespace = {"__name__": "__main__"}
    for block in code_blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)  # noqa: S102 - our own pages


def numbers_by_row(printed):
    """Return the decimal numbers of each printed line, by the name at its start."""
    rows = {}
    for line in printed.splitlines():
        if line.strip():
            name = line.split()[0].rstrip(":").split("(")[0]
            rows[name] = [float(number) for number in re.findall(r"\d+\.\d*", line)]
    return rows


def forgets_less(name, printed):
    """Return whether an example shows what it is for: less forgetting than with fine-tuning."""
    rows = numbers_by_row(printed)
    if name == "sensor_drift":
        # The last number is the error of the oldest sensor.
        return max(rows["EWC"][-1], rows["ER"][-1]) < rows["finetune"][-1] / 2
    if name == "two_digits":
        return rows["ER"][-3] + rows["ER"][-2] > rows["finetune"][-3] + rows["finetune"][-2] + 5
    if name == "new_images":
        # The last row of each kind: accuracy on old digits, on new digits, and seconds.
        old_tuned, *_ = rows["then"]
        old, new, _ = rows["or"]
        return old_tuned < 5 and old > 95 and new > 90
    if name == "new_intents":
        *_, first, last = rows["30"]
        return first > 90 and last > 90
    if name == "perplexity":
        return rows["ER"][-2] < 0.9 * rows["Method"][-2]
    return bool(printed.strip())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_RUNS)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_examples_on_real_text_run_small(name, shared_data, tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    monkeypatch.setattr("sys.argv", [str(path), *SMALL_RUNS[name]])
    monkeypatch.setenv("EVERLEARN_DATA", str(shared_data))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert forgets_less(name, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [p for p in sorted((ROOT / "examples").glob("*.py")) if p.stem not in SMALL_RUNS], ids=lambda p: p.stem
)
def test_examples_run_and_are_short(example, capsys):
    assert len(example.read_text().splitlines()) <= 40
    runpy.run_path(str(example), run_name="__main__")
    assert forgets_less(example.stem, capsys.readouterr().out)


@pytest.mark.parametrize("command", shell_commands())
def test_commands_are_understood(command):
    pytest.importorskip("cyclopts")
    from everlearn.cli.app import start

    assert start([*command.split()[1:], "--dry-run"]) == 0


@pytest.mark.slow
def test_figures_can_be_drawn_again(tmp_path):
    runpy.run_path(str(ROOT / "docs/figures/draw.py"))["main"](tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in (ROOT / "docs/figures").glob("*.svg")}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_lines_end_at_120_characters():
    long_lines = []
    for page in TEXT_PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > 120:
                long_lines.append(f"{page.relative_to(ROOT)}:{number} has {len(line)} characters")
    assert not long_lines, "\n".join(long_lines)
