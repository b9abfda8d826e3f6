"""Which method? Answers and the methods that fit them, the numbers that are quoted, the questions."""

import builtins
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import fmean

import pytest

import everlearn
from everlearn import METHODS
from everlearn.experiments.advice import Measured, Needs, advise, example_capacity

pytest.importorskip("cyclopts")
from everlearn.cli.advise import QUESTIONS, AdviseOptions
from everlearn.cli.app import start
from everlearn.core.traits import traits_of
from everlearn.experiments.recorded import load_recorded

ROOT = Path(__file__).parents[2]
REPLAY = {"er", "er-ace", "der", "derpp", "agem", "gem"}
ISOLATION = {"packnet", "hat", "pnn", "expandnet", "den"}


def fitting(**needs):
    return [a.name for a in advise(Needs(**needs)) if a.fits]


def reasons(name, **needs):
    return next(a for a in advise(Needs(**needs)) if a.name == name).objections


def cell(method, accuracy, scenario="task", table="T", finetune=50.0, joint=100.0):
    return Measured(method, scenario, table, "A table", f"{method}/x", (accuracy,), {}, finetune, joint)


@pytest.mark.parametrize(
    ("needs", "fit"),
    [
        ({"scenario": "class"}, REPLAY | {"generative", "expandable"}),
        ({"scenario": "class", "keep_data": False}, {"generative"}),
        ({"scenario": "class", "keep_data": False, "time": 5}, set()),
        ({"scenario": "class", "boundaries": False}, {"er", "er-ace", "der", "derpp"}),
        ({"scenario": "domain", "boundaries": False, "keep_data": False}, {"si"}),
        ({"scenario": "domain", "labels": False}, {"ewc", "mas", "l2"}),
        ({"scenario": "task", "labels": False, "grow": False}, {"ewc", "mas", "lwf"}),
        ({"scenario": "task", "memory": "0.5x", "keep_data": False, "tasks": 5}, {"packnet", "hat", "den"}),
        ({}, set(METHODS) - {"finetune", "freeze"}),
    ],
)
def test_answers_and_the_methods_that_fit_them(needs, fit):
    assert set(fitting(**needs)) == fit


@pytest.mark.parametrize(
    ("name", "needs", "reason"),
    [
        ("ewc", {"scenario": "class"}, "outputs of old classes"),
        ("finetune", {}, "lower bound"),
        ("finetune", {"scenario": "task"}, "lower bound"),
        ("packnet", {"scenario": "domain"}, "needs the task of each example"),
        ("er", {"keep_data": False}, "stores examples"),
        ("pnn", {"grow": False}, "grows"),
        ("er", {"labels": False}, "needs labels"),
        ("lwf", {"boundaries": False}, "needs task boundaries"),
        ("pnn", {"memory": "2x", "tasks": 10}, "43 copies of the model with 10 tasks, more than 2"),
        ("ewc", {"memory": "1MB", "parameters": 500_000}, "2 copies of the model with 5 tasks, more than 0.5"),
        ("pnn", {"time": 2.0, "tasks": 5}, "baseline steps, more than 2"),
    ],
)
def test_what_speaks_against_a_method(name, needs, reason):
    (only,) = reasons(name, **needs)
    assert reason in only


def test_every_method_fits_or_has_a_reason():
    for scenario in ("task", "domain", "class", None):
        for needs in ({}, {"keep_data": False}, {"grow": False, "labels": False}, {"time": 1.5, "memory": "1x"}):
            found = advise(Needs(scenario=scenario, **needs))
            assert sorted(a.name for a in found) == sorted(METHODS)
            assert all(a.fits or all(a.objections) for a in found)
            assert [a.fits for a in found] == sorted((a.fits for a in found), reverse=True)


def test_measured_before_not_measured_and_the_best_first():
    found = advise(Needs(scenario="task"), [cell("ewc", 90.0), cell("lwf", 95.0), cell("si", 80.0, "domain")])
    names = [a.name for a in found if a.fits]
    assert names[:2] == ["lwf", "ewc"] and [a.closed_gap for a in found[:2]] == [0.9, 0.8]
    assert set(names[2:6]) == ISOLATION - {"den"}, "who forgets nothing comes before who may"
    assert fitting(scenario="domain")[-1] == "l2", "reference points come last"


def test_a_table_weighs_as_much_as_fine_tuning_loses_in_it():
    easy = cell("ewc", 98.0, table="easy", finetune=99.0, joint=100.0)
    (first, *_) = advise(Needs(scenario="task"), [cell("ewc", 90.0), easy])
    assert first.name == "ewc" and first.closed_gap == pytest.approx(39 / 51)


def test_of_a_table_the_best_cell_counts_and_without_both_ends_none_does():
    found = advise(Needs(scenario="task"), [cell("er", 70.0), cell("er", 90.0), cell("ewc", 99.0, joint=None)])
    er, ewc = (next(a for a in found if a.name == name) for name in ("er", "ewc"))
    assert [m.mean for m in er.measured] == [90.0]
    assert ewc.closed_gap is None and [m.mean for m in ewc.measured] == [99.0]


def test_a_method_of_ones_own():
    class Mine(everlearn.Method):
        pass

    class Told(everlearn.Method):
        traits = everlearn.Traits(family="replay", pro="ours", con="new", step=1.0)

    found = {a.name: a for a in advise(Needs(scenario="class"), methods={**METHODS, "mine": Mine, "told": Told})}
    assert "no traits" in found["mine"].objections[0] and found["told"].fits


def test_how_many_examples_the_memory_holds():
    needs = Needs(memory="2x", parameters=7840, inputs=784, tasks=2)
    assert example_capacity(needs, traits_of(METHODS["er"])) == 20
    assert example_capacity(needs, traits_of(METHODS["expandable"])) == 10, "an extractor takes one of the two copies"
    assert (
        example_capacity(needs, traits_of(METHODS["ewc"])) is None
        and example_capacity(Needs(), traits_of(METHODS["er"])) is None
    )


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"scenario": "clas"}, "scenario: got 'clas', allowed: 'task', 'domain', 'class'"),
        ({"time": -1.0}, "time: got -1.0, allowed: 0 or more"),
        ({"tasks": 0}, "tasks: got 0, allowed: 1 or more"),
        ({"memory": "20"}, "memory: got '20', allowed: copies of the model, as in 2x"),
        ({"memory": "20MB"}, "number of parameters"),
    ],
)
def test_wrong_needs_are_refused(needs, message):
    with pytest.raises(ValueError, match=message):
        Needs(**needs)


# The numbers


def test_numbers_are_those_of_the_recorded_results():
    found = load_recorded()
    assert {"T1", "T5"} <= {m.table for m in found}
    for m in found:
        kept = json.loads((ROOT / "docs/results" / f"{m.table}.json").read_text(encoding="utf-8"))[m.cell]
        assert m.accuracies == tuple(run["accuracy"] for run in kept["runs"].values())
        assert kept["options"]["scenario"] == m.scenario and kept["options"]["methods"] == m.method


def test_both_ends_are_of_the_same_table_and_scenario():
    kept = json.loads((ROOT / "docs/results/T1.json").read_text(encoding="utf-8"))
    mean = lambda name: fmean(run["accuracy"] for run in kept[name]["runs"].values())
    (m,) = [m for m in load_recorded() if (m.table, m.cell) == ("T1", "EWC/domain")]
    assert (m.finetune, m.joint) == (mean("None/domain"), mean("Offline/domain"))


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_weak_is_who_closes_less_than_a_quarter_of_the_gap_in_every_table(scenario):
    for a in advise(Needs(scenario=scenario), load_recorded()):
        gaps = [(m.mean - m.finetune, m.joint - m.finetune) for m in a.measured if None not in (m.finetune, m.joint)]
        if shares := [gained / possible for gained, possible in gaps if possible > 2]:
            assert (max(shares) < 0.25) == (scenario in a.traits.weak), f"{a.name}: {shares}"


def test_an_installed_package_has_the_numbers(tmp_path):
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert config["wheel"]["force-include"] == {"docs/results": "everlearn/experiments/results"}
    assert "docs" in config["sdist"]["include"], "or a wheel made of it would lack them"
    shutil.copytree(ROOT / "src/everlearn", tmp_path / "everlearn")
    shutil.copytree(ROOT / "docs/results", tmp_path / "everlearn/experiments/results")
    code = "from everlearn.experiments.recorded import load_recorded, results_folder; print(results_folder(), len(load_recorded()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "everlearn/experiments/results"), str(len(load_recorded()))]


# The command


def test_advice_on_the_command_line(capsys):
    assert start(["advise", "--scenario", "domain", "--keep-data", "no"]) == 0
    text = capsys.readouterr().out
    assert "Domain-incremental: the task is not known at test time" in text
    assert "Not given, and not taken into account: --grow, --labels, --boundaries" in " ".join(text.split())
    best = next(a for a in advise(Needs(scenario="domain", keep_data=False), load_recorded()))
    assert f"1. {best.name} ({best.method_class.__name__}): {100 * best.closed_gap:.0f} % of the gap" in text
    assert f"{best.measured[0].mean:.1f}" in text and best.measured[0].table in text
    assert "- mas (MAS)" in text and "not in a table" in text
    _, misfit = text.split("These do not fit.")
    assert all(f"\n  {name} " in misfit for name in REPLAY | ISOLATION | {"expandable", "finetune"})


def test_numbers_stand_beside_the_reason_too(capsys):
    assert start(["advise", "--scenario", "class"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    (ewc,) = [a for a in advise(Needs(scenario="class"), load_recorded()) if a.name == "ewc"]
    number = ewc.measured[0]
    assert f"{number.mean:.1f} % in {number.table}, fine-tuning {number.finetune:.1f} %" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_lines_are_as_wide_as_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    start(["advise", "--scenario", "task"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  everlearn run")) <= min(width, 100)


@pytest.mark.parametrize(
    "words",
    [
        ["--scenario", "class"],
        ["--scenario", "domain", "--boundaries", "no"],
        ["--labels", "no"],
        ["--scenario", "task", "--keep-data", "no", "--memory", "0.5x"],
    ],
)
def test_what_is_proposed_runs(words, capsys):
    start(["advise", *words])
    lines = capsys.readouterr().out.splitlines()
    (command,) = [line for line in lines if line.startswith("  everlearn run")]
    assert start([*command.split()[1:], "--dry-run"]) == 0
    code = "\n".join(line[2:] for line in lines if line.startswith(("  from ", "  stream = ", "  print(")))
    exec(code.replace("epochs=10", "epochs=1"), {})  # noqa: S102 - our own lines
    assert "average accuracy" in capsys.readouterr().out


def test_sizes_in_bytes_and_room_for_examples(capsys):
    size = ["--memory", "20MB", "--parameters", "478410", "--inputs", "784"]
    assert start(["advise", "--scenario", "class", *size]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"up to {20_000_000 // (4 * 784):,} examples" in text
    assert start(["advise", "--scenario", "task", *size]) == 0
    assert "stores about 2 copies of the model, 3.8 MB" in " ".join(capsys.readouterr().out.split())


def test_where_nothing_fits_the_nearest_come_first(capsys):
    assert start(["advise", "--scenario", "class", "--keep-data", "no", "--time", "2"]) == 0
    text = capsys.readouterr().out
    assert "No method fits all constraints" in text and "everlearn run" not in text
    first = text.split("These do not fit.")[1].split("\n")[1]
    assert ";" not in first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scenario", "clas"], "scenario: got 'clas', allowed: 'task', 'domain' or 'class'"),
        (["--keep-data", "maybe"], "got 'maybe', allowed: 'yes' or 'no'"),
        (["--tasks", "0"], "tasks: got '0', allowed: greater than or equal to 1"),
        (["--time", "fast"], "time: got 'fast'"),
        (["--memory", "20"], "memory: got '20', allowed: copies of the model, as in 2x, or bytes"),
        (["--memory", "20MB"], "give its number of parameters. On the command line: --parameters."),
    ],
)
def test_wrong_words_are_answered_with_exit_code_2(words, message, capsys):
    assert start(["advise", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("everlearn: ") and "Traceback" not in error


@pytest.fixture
def terminal(monkeypatch):
    """Somebody who answers; what was asked is noted."""

    def answering(*answers):
        asked, left = [], iter(answers)

        def answer(prompt):
            asked.append(prompt)
            try:
                said = next(left)
            except StopIteration:
                raise EOFError from None
            return said

        monkeypatch.setattr(builtins, "input", answer)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        return asked

    return answering


def test_on_a_terminal_the_open_questions_are_asked(terminal, capsys):
    asked = terminal("class", "", "", "", "", "", "2x")
    assert start(["advise", "--keep-data", "no"]) == 0
    text = capsys.readouterr().out
    assert "known about an example at test time" in asked[0] and "its task" in asked[0]
    assert not any("examples of old tasks" in q for q in asked), "what is given is not asked"
    assert not any("numbers does an example have" in q for q in asked), "it would change nothing"
    assert "Class-incremental" in text and "memory 2x" in text and "No method fits" in text


def test_a_wrong_answer_is_asked_for_again(terminal, capsys):
    asked = terminal("clas", "class", "perhaps", "YES")
    assert start(["advise"]) == 0
    text = capsys.readouterr().out
    assert "got 'clas', allowed: 'task', 'domain' or 'class'" in text and "allowed: 'yes' or 'no'" in text
    assert asked[0] == asked[1] and asked[2] == asked[3] and "keep data yes" in text


def test_the_size_of_the_model_is_asked_for_where_it_counts(terminal, capsys):
    given = ["--scenario", "task", "--keep-data", "yes", "--grow", "no", "--labels", "yes", "--boundaries", "yes"]
    asked = terminal("5", "3", "20MB", "1000000", "784")
    assert start(["advise", *given]) == 0
    assert [q.split("[")[0] for q in asked[-2:]] == [
        QUESTIONS["parameters"].split("[")[0],
        QUESTIONS["inputs"].split("[")[0],
    ]
    assert "up to" in capsys.readouterr().out


def test_every_option_has_a_question():
    assert set(QUESTIONS) == set(AdviseOptions.model_fields) == set(Needs.__dataclass_fields__)
