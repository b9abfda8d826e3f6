"""Every Python example in README, docs/ and examples/ runs, and the README's commands are the real ones."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


LONG = {"quickstart_researcher.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.name in LONG)) for p in PAGES if blocks(p, "python")],
    ids=lambda p: p.name,
)
def test_python_examples_run_from_top_to_bottom(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if page.name == "integrations.md":
        for host in ("lightning", "transformers"):
            pytest.importorskip(host)
        request.getfixturevalue("socket_enabled")  # Lightning looks for a free port
        warnings.simplefilter("ignore")  # their own
    namespace = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)  # noqa: S102 - our own pages


SMALL = {
    "intents": ["class", "er", "2", "32"],
    "perplexity": ["2", "300"],
}  # examples that want real text, and their smallest size


def numbers(shown):
    """Of each line, by its first word."""
    found = {line.split()[0].rstrip(":"): re.findall(r"\d+\.\d*", line) for line in shown.splitlines() if line.strip()}
    return {word.split("(")[0]: [float(n) for n in row] for word, row in found.items()}


def keeps(name, shown):
    """Whether an example shows what it is there for: less is lost than by fine-tuning."""
    rows = numbers(shown)
    if name == "sensor_drift":  # the last is the oldest sensor's error
        return max(rows["EWC"][-1], rows["ER"][-1]) < rows["finetune"][-1] / 2
    if name == "two_digits":
        return rows["ER"][-3] + rows["ER"][-2] > rows["finetune"][-3] + rows["finetune"][-2] + 5
    if name == "perplexity":
        return rows["ER"][-2] < 0.9 * rows["Method"][-2]
    return bool(shown.strip())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_examples_on_real_text_run_small(name, shared_data, tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    monkeypatch.setattr("sys.argv", [str(path), *SMALL[name]])
    monkeypatch.setenv("EVERLEARN_DATA", str(shared_data))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert keeps(name, capsys.readouterr().out)


@pytest.mark.parametrize(
    "example", [p for p in sorted((ROOT / "examples").glob("*.py")) if p.stem not in SMALL], ids=lambda p: p.stem
)
def test_examples_run_and_are_short(example, capsys):
    assert len(example.read_text().splitlines()) <= 40
    runpy.run_path(str(example), run_name="__main__")
    assert keeps(example.stem, capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    [
        line
        for p in PAGES
        for b in blocks(p, "sh")
        for line in b.splitlines()
        if re.match("everlearn (run|reproduce)", line)
    ],
)
def test_commands_are_understood(line):
    pytest.importorskip("cyclopts")
    from everlearn.cli.app import start

    assert start([*line.split()[1:], "--dry-run"]) == 0


@pytest.mark.slow
def test_figures_can_be_drawn_again(tmp_path):
    runpy.run_path(str(ROOT / "docs/figures/draw.py"))["main"](tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in (ROOT / "docs/figures").glob("*.svg")}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
