"""Advice on methods: which fit, the recorded numbers that are quoted, and the command `everlearn advise`."""

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
# The methods that the tests below know: further ones may fit, too.
LISTED = REPLAY | ISOLATION | {"generative", "expandable", "ewc", "si", "mas", "lwf", "l2", "finetune", "freeze"}
LISTED_METHODS = {name: METHODS[name] for name in METHODS if name in LISTED}


def fitting_methods(**needs):
    return [entry.name for entry in advise(Needs(**needs), methods=LISTED_METHODS) if entry.fits]


def objections_to(name, **needs):
    return next(entry for entry in advise(Needs(**needs)) if entry.name == name).objections


def make_cell(method, accuracy, scenario="task", table="T", finetune=50.0, joint=100.0, **comparable):
    return Measured(method, scenario, table, "A table", f"{method}/x", (accuracy,), {}, finetune, joint, **comparable)


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({"scenario": "class"}, REPLAY | {"generative", "expandable"}),
        ({"scenario": "class", "keep_data": False}, {"generative"}),
        ({"scenario": "class", "keep_data": False, "time": 5}, set()),
        ({"scenario": "class", "boundaries": False}, {"er", "er-ace", "der", "derpp"}),
        ({"scenario": "domain", "boundaries": False, "keep_data": False}, {"si"}),
        ({"scenario": "domain", "labels": False}, {"ewc", "mas", "l2"}),
        ({"scenario": "task", "labels": False, "grow": False}, {"ewc", "mas", "lwf"}),
        ({"scenario": "task", "memory": "0.5x", "keep_data": False, "tasks": 5}, {"packnet", "hat", "den"}),
        ({}, LISTED - {"finetune", "freeze"}),
    ],
)
def test_methods_fit_needs(needs, expected):
    assert set(fitting_methods(**needs)) == expected


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
        ("ranpac", {"scenario": "class", "pretrained": False}, "large first task (adapt_first=True)"),
        ("slca", {"scenario": "class", "pretrained": False}, "learns features slowly"),
    ],
)
def test_objections_to_method(name, needs, reason):
    (objection,) = objections_to(name, **needs)
    assert reason in objection


def test_every_method_fits_or_has_objection():
    for scenario in ("task", "domain", "class", None):
        for needs in ({}, {"keep_data": False}, {"grow": False, "labels": False}, {"time": 1.5, "memory": "1x"}):
            advice = advise(Needs(scenario=scenario, **needs))
            assert sorted(entry.name for entry in advice) == sorted(METHODS)
            assert all(entry.fits or all(entry.objections) for entry in advice)
            assert [entry.fits for entry in advice] == sorted((entry.fits for entry in advice), reverse=True)


def test_measured_methods_are_ranked_first_by_closed_gap():
    results = [make_cell("ewc", 90.0), make_cell("lwf", 95.0), make_cell("si", 80.0, "domain")]
    advice = advise(Needs(scenario="task"), results, LISTED_METHODS)
    names = [entry.name for entry in advice if entry.fits]
    assert names[:2] == ["lwf", "ewc"] and [entry.closed_gap for entry in advice[:2]] == [0.9, 0.8]
    assert set(names[2:6]) == ISOLATION - {"den"}, "methods that forget nothing come first"
    assert fitting_methods(scenario="domain")[-1] == "l2", "baselines come last"


def test_tables_are_weighted_by_gap_of_finetuning():
    easy = make_cell("ewc", 98.0, table="easy", finetune=99.0, joint=100.0)
    (first, *_) = advise(Needs(scenario="task"), [make_cell("ewc", 90.0), easy])
    assert first.name == "ewc" and first.closed_gap == pytest.approx(39 / 51)


def test_best_cell_of_table_counts_if_baselines_are_measured():
    advice = advise(
        Needs(scenario="task"), [make_cell("er", 70.0), make_cell("er", 90.0), make_cell("ewc", 99.0, joint=None)]
    )
    er, ewc = (next(entry for entry in advice if entry.name == name) for name in ("er", "ewc"))
    assert [measured.mean for measured in er.measured] == [90.0]
    assert ewc.closed_gap is None and [measured.mean for measured in ewc.measured] == [99.0]


HEADS = {name for name in METHODS if traits_of(METHODS[name]).family == "heads"}


def test_new_classes_of_a_pretrained_model_are_for_heads():
    needs = {"scenario": "class", "keep_data": False, "pretrained": True}
    names = [entry.name for entry in advise(Needs(**needs), load_recorded()) if entry.fits]
    assert names[0] == "ranpac" and set(names[: len(HEADS)]) == HEADS
    names = [entry.name for entry in advise(Needs(**needs, boundaries=False)) if entry.fits]
    assert set(names) == HEADS - {"slca"}
    assert all(entry.settings == {"online": True} for entry in advise(Needs(**needs, boundaries=False)) if entry.fits)


def test_heads_do_not_fit_a_model_from_scratch():
    advice = {entry.name: entry for entry in advise(Needs(scenario="class", pretrained=False))}
    assert not any(advice[name].fits for name in HEADS) and advice["er"].fits
    unknown = {entry.name: entry for entry in advise(Needs(scenario="class"))}
    assert all("features suit your data" in unknown[name].unchecked[0] for name in HEADS) and unknown["ranpac"].fits
    assert not unknown["er"].unchecked


def test_results_count_only_for_comparable_models_and_data():
    results = [
        make_cell("er", 90.0, "class"),
        make_cell("ranpac", 95.0, "class", table="P", pretrained=True, data="text"),
        make_cell("er", 60.0, "class", table="P", pretrained=True, data="text"),
        make_cell("klda", 80.0, "class", table="Q", pretrained=True),
    ]
    gaps = lambda **needs: {
        entry.name: entry.closed_gap
        for entry in advise(Needs(scenario="class", **needs), results)
        if entry.closed_gap is not None
    }
    assert gaps() == {"er": pytest.approx(0.5), "ranpac": 0.9, "klda": 0.6}
    assert gaps(pretrained=True) == {"ranpac": 0.9, "klda": 0.6, "er": pytest.approx(0.2)}
    assert gaps(pretrained=False) == {"er": 0.8}
    assert gaps(pretrained=True, data="text") == {"ranpac": 0.9, "er": pytest.approx(0.2)}
    assert gaps(pretrained=True, data="images") == {"klda": 0.6}
    assert gaps(pretrained=True, data="table").keys() == {"ranpac", "klda", "er"}, "no table has such data"


def test_statistics_are_not_compared_with_the_size_of_the_model():
    needs = Needs(scenario="class", memory="2x", pretrained=True)
    (ranpac,) = [entry for entry in advise(needs) if entry.name == "ranpac"]
    assert ranpac.fits and ranpac.unchecked == [
        "whether its state fits into 2x: its size depends on features and classes"
    ]


def test_user_defined_methods():
    class WithoutTraits(everlearn.Method):
        pass

    class WithTraits(everlearn.Method):
        traits = everlearn.Traits(family="replay", pro="ours", con="new", step=1.0)

    methods = {**METHODS, "without_traits": WithoutTraits, "with_traits": WithTraits}
    advice = {entry.name: entry for entry in advise(Needs(scenario="class"), methods=methods)}
    assert "no traits" in advice["without_traits"].objections[0] and advice["with_traits"].fits


class Unmeasured(everlearn.Method):
    traits = everlearn.Traits(family="replay", pro="new", con="untested", keeps_examples=True)


def test_costs_that_are_not_measured_are_neither_objections_nor_ranked():
    methods = {"unmeasured": Unmeasured, **LISTED_METHODS}
    needs = Needs(scenario="domain", time=100.0, memory="100x", parameters=100, inputs=10)
    advice = {entry.name: entry for entry in advise(needs, methods=methods) if entry.fits}
    names = list(advice)
    assert names.index("generative") < names.index("unmeasured") < names.index("l2"), "the slowest step comes before it"
    memory, time = advice["unmeasured"].unchecked
    assert "100x: its size is not measured" in memory
    assert "100 baseline steps: its time is not measured" in time
    assert not any(entry.unchecked for name, entry in advice.items() if name != "unmeasured")
    assert example_capacity(needs, Unmeasured.traits) is None
    assert not advise(Needs(scenario="domain"), methods={"unmeasured": Unmeasured})[0].unchecked, "without constraints"


def test_the_command_says_what_is_not_measured(capsys, monkeypatch):
    monkeypatch.setattr(METHODS, "targets", {"unmeasured": f"{__name__}:Unmeasured", **METHODS.targets})
    assert start(["advise", "--scenario", "domain", "--time", "3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    costs = (
        "the time of a step is not measured; stores state whose size is not measured and as many examples as you allow"
    )
    assert costs in text and "those not measured last" in text
    assert "unknown whether a step takes at most 3 baseline steps: its time is not measured" in text


def test_number_of_examples_in_memory():
    needs = Needs(memory="2x", parameters=7840, inputs=784, tasks=2)
    assert example_capacity(needs, traits_of(METHODS["er"])) == 20
    assert example_capacity(needs, traits_of(METHODS["expandable"])) == 10, "an extractor takes one of the two copies"
    assert example_capacity(needs, traits_of(METHODS["ewc"])) is None
    assert example_capacity(Needs(), traits_of(METHODS["er"])) is None


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
def test_invalid_needs_are_refused(needs, message):
    with pytest.raises(ValueError, match=message):
        Needs(**needs)


# Recorded numbers.


def test_numbers_equal_recorded_results():
    measurements = load_recorded()
    assert {"T1", "T5"} <= {measurement.table for measurement in measurements}
    for measurement in measurements:
        table = json.loads((ROOT / "docs/results" / f"{measurement.table}.json").read_text(encoding="utf-8"))
        recorded = table[measurement.cell]
        assert measurement.accuracies == tuple(run["accuracy"] for run in recorded["runs"].values())
        assert recorded["options"]["scenario"] == measurement.scenario
        assert recorded["options"]["methods"] == measurement.method


def test_baselines_are_of_same_table_and_scenario():
    recorded = json.loads((ROOT / "docs/results/T1.json").read_text(encoding="utf-8"))
    mean_accuracy = lambda name: fmean(run["accuracy"] for run in recorded[name]["runs"].values())
    (measurement,) = [entry for entry in load_recorded() if (entry.table, entry.cell) == ("T1", "EWC/domain")]
    assert (measurement.finetune, measurement.joint) == (mean_accuracy("None/domain"), mean_accuracy("Offline/domain"))


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_weak_methods_close_less_than_a_quarter_of_the_gap(scenario):
    for entry in advise(Needs(scenario=scenario), load_recorded()):
        gaps = [
            (measurement.mean - measurement.finetune, measurement.joint - measurement.finetune)
            for measurement in entry.measured
            if None not in (measurement.finetune, measurement.joint)
        ]
        if shares := [gained / possible for gained, possible in gaps if possible > 2]:
            assert (max(shares) < 0.25) == (scenario in entry.traits.weak), f"{entry.name}: {shares}"


def test_installed_package_has_recorded_results(tmp_path):
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert config["wheel"]["force-include"] == {"docs/results": "everlearn/experiments/results"}
    assert "docs" in config["sdist"]["include"], "a wheel that is built from the sdist needs them"
    shutil.copytree(ROOT / "src/everlearn", tmp_path / "everlearn")
    shutil.copytree(ROOT / "docs/results", tmp_path / "everlearn/experiments/results")
    code = (
        "from everlearn.experiments.recorded import load_recorded, results_folder; "
        "print(results_folder(), len(load_recorded()))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [str(tmp_path / "everlearn/experiments/results"), str(len(load_recorded()))]


# The command line.


def test_advice_on_command_line(capsys):
    assert start(["advise", "--scenario", "domain", "--keep-data", "no"]) == 0
    text = capsys.readouterr().out
    assert "Domain-incremental: the task is not known at test time" in text
    assert "Not given, and not taken into account: --grow, --labels, --boundaries" in " ".join(text.split())
    best = next(entry for entry in advise(Needs(scenario="domain", keep_data=False), load_recorded()))
    assert f"1. {best.name} ({best.method_class.__name__}): {100 * best.closed_gap:.0f} % of the gap" in text
    assert f"{best.measured[0].mean:.1f}" in text and best.measured[0].table in text
    assert "- mas (MAS)" in text and "not in a table" in text
    _, misfit = text.split("These do not fit.")
    assert all(f"\n  {name} " in misfit for name in REPLAY | ISOLATION | {"expandable", "finetune"})


def test_objections_are_printed_with_numbers(capsys):
    assert start(["advise", "--scenario", "class"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    (ewc,) = [entry for entry in advise(Needs(scenario="class"), load_recorded()) if entry.name == "ewc"]
    number = ewc.measured[0]
    assert f"{number.mean:.1f} % in {number.table}, fine-tuning {number.finetune:.1f} %" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_lines_fit_terminal_width(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    start(["advise", "--scenario", "task"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  everlearn run")) <= min(width, 100)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scenario", "class"],
        ["--scenario", "domain", "--boundaries", "no"],
        ["--labels", "no"],
        ["--scenario", "task", "--keep-data", "no", "--memory", "0.5x"],
    ],
)
def test_proposed_commands_and_code_run(arguments, capsys):
    start(["advise", *arguments])
    lines = capsys.readouterr().out.splitlines()
    (command,) = [line for line in lines if line.startswith("  everlearn run")]
    assert start([*command.split()[1:], "--dry-run"]) == 0
    code = "\n".join(line[2:] for line in lines if line.startswith(("  from ", "  stream = ", "  print(")))
    exec(code.replace("epochs=10", "epochs=1"), {})  # noqa: S102 - generated by this package
    assert "average accuracy" in capsys.readouterr().out


def test_advice_for_a_pretrained_model(capsys):
    assert start(["advise", "--scenario", "class", "--keep-data", "no", "--pretrained", "yes", "--data", "text"]) == 0
    output = capsys.readouterr().out
    (command,) = [line for line in output.splitlines() if line.startswith("  everlearn run")]
    assert start([*command.split()[1:], "--dry-run"]) == 0
    text = " ".join(output.split())
    assert "those for pretrained features first" in text and "no training steps: one pass over the examples" in text
    assert "RanPAC().end_task(model, loader), then model(x)" in text and "--stream clinc150-minilm" in text
    assert start(["advise", "--scenario", "class", "--pretrained", "unknown"]) == 0
    assert "unknown whether the model's features suit your data" in " ".join(capsys.readouterr().out.split())


def test_memory_in_bytes_and_number_of_examples(capsys):
    size = ["--memory", "20MB", "--parameters", "478410", "--inputs", "784"]
    assert start(["advise", "--scenario", "class", *size]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"up to {20_000_000 // (4 * 784):,} examples" in text
    assert start(["advise", "--scenario", "task", *size]) == 0
    assert "stores about 2 copies of the model, 3.8 MB" in " ".join(capsys.readouterr().out.split())


def test_closest_methods_come_first_if_none_fits(capsys):
    assert start(["advise", "--scenario", "class", "--labels", "no"]) == 0
    text = capsys.readouterr().out
    assert "No method fits all constraints" in text and "everlearn run" not in text
    first = text.split("These do not fit.")[1].split("\n")[1]
    assert ";" not in first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "clas"], "scenario: got 'clas', allowed: 'task', 'domain' or 'class'"),
        (["--keep-data", "maybe"], "got 'maybe', allowed: 'yes' or 'no'"),
        (["--pretrained", "maybe"], "got 'maybe', allowed: 'yes', 'no' or 'unknown'"),
        (["--data", "audio"], "data: got 'audio', allowed: 'images', 'text' or 'table'"),
        (["--tasks", "0"], "tasks: got '0', allowed: greater than or equal to 1"),
        (["--time", "fast"], "time: got 'fast'"),
        (["--memory", "20"], "memory: got '20', allowed: copies of the model, as in 2x, or bytes"),
        (["--memory", "20MB"], "give its number of parameters. On the command line: --parameters."),
    ],
)
def test_invalid_arguments_exit_with_code_2(arguments, message, capsys):
    assert start(["advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("everlearn: ") and "Traceback" not in error


@pytest.fixture
def terminal(monkeypatch):
    """Simulate a user who types replies; returns the prompts."""

    def type_replies(*replies):
        prompts = []
        remaining = iter(replies)

        def read_reply(prompt):
            prompts.append(prompt)
            try:
                reply = next(remaining)
            except StopIteration:
                raise EOFError from None
            return reply

        monkeypatch.setattr(builtins, "input", read_reply)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        return prompts

    return type_replies


def test_missing_options_are_asked_on_terminal(terminal, capsys):
    prompts = terminal("class", "", "no", "", "no", "", "", "", "2x")
    assert start(["advise", "--keep-data", "no"]) == 0
    text = capsys.readouterr().out
    assert "known about an example at test time" in prompts[0] and "its task" in prompts[0]
    assert not any("examples of old tasks" in prompt for prompt in prompts), "given options are not asked"
    assert not any("numbers does an example have" in prompt for prompt in prompts), "the reply would not matter"
    assert "Class-incremental" in text and "memory 2x" in text and "No method fits" in text


def test_invalid_reply_is_asked_again(terminal, capsys):
    prompts = terminal("clas", "class", "perhaps", "YES")
    assert start(["advise"]) == 0
    text = capsys.readouterr().out
    assert "got 'clas', allowed: 'task', 'domain' or 'class'" in text and "allowed: 'yes' or 'no'" in text
    assert prompts[0] == prompts[1] and prompts[2] == prompts[3] and "keep data yes" in text


def test_model_size_is_asked_if_memory_is_in_bytes(terminal, capsys):
    options = ["--scenario", "task", "--keep-data", "yes", "--grow", "no", "--labels", "yes", "--boundaries", "yes"]
    options += ["--pretrained", "no", "--data", "images"]
    prompts = terminal("5", "3", "20MB", "1000000", "784")
    assert start(["advise", *options]) == 0
    assert [prompt.split("[")[0] for prompt in prompts[-2:]] == [
        QUESTIONS["parameters"].split("[")[0],
        QUESTIONS["inputs"].split("[")[0],
    ]
    assert "up to" in capsys.readouterr().out


def test_every_option_has_a_question():
    assert set(QUESTIONS) == set(AdviseOptions.model_fields) == set(Needs.__dataclass_fields__)
