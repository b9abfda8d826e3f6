"""Published tables: cells, verdicts, recorded runs, and the page of results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cyclopts")
from everlearn import results, streams
from everlearn.cli.app import start
from everlearn.experiments import published_tables, reproduce
from everlearn.experiments.grid import GridRun, grid_runs
from everlearn.experiments.options import Grid
from everlearn.experiments.published_tables import Cell

TINY_TABLE = """
title = "Digits"
source = "Author (2026)"
protocol = "Two tasks."
spread = "sem"
runs = 4
[run]
stream = "digits"
tasks = 2
hidden = "16"
epochs = 1
[quick]
iterations = 1
[columns]
task = {{ scenario = "task" }}
class = {{ scenario = "class" }}
[[rows]]
name = "None"
run = {{ methods = "finetune" }}
[rows.cells]
task = {{ published = {published}, spread = 1.0 }}
class = {{ published = 99.9, known = "cannot be reached" }}
[[rows]]
name = "Anchor"
run = {{ methods = "l2", set = {{ "l2.strength" = {strength} }} }}
cells = {{ task = {{ published = 1.0 }} }}
"""


@pytest.fixture
def write_tiny_table(tmp_path, monkeypatch):
    """Write a table that is small enough to be run."""
    folder = tmp_path / "published"
    folder.mkdir()
    monkeypatch.setattr(published_tables, "FOLDER", folder)

    def write(published=90.0, strength=0.1):
        (folder / "T0.toml").write_text(TINY_TABLE.format(published=published, strength=strength))

    write()
    return write


@pytest.mark.parametrize("name", published_tables.table_names())
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_of_every_table_is_one_run(name, quick):
    for cell in published_tables.select_cells(name, quick=quick):
        (run,) = grid_runs(cell.grid(1))
        assert run.joint or run.method is not None
        assert 0 < cell.published < 100 and cell.deviation >= 0
    assert len({cell.name for cell in published_tables.select_cells(name)}) == len(published_tables.select_cells(name))


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [([90.0], "within"), ([88.5], "within"), ([88.4], "miss"), ([91.6], "above"), ([86.0, 94.0], "within")],
)
def test_verdict_is_of_mean_accuracy(accuracies, verdict):
    assert Cell("T", "r", "c", 90.0, 0.5, {}, "").verdict(accuracies) == verdict


@pytest.mark.parametrize(
    ("name", "row", "steps"), [("T1", "Offline", 2000), ("T2", "Offline", 5000), ("T4", "Joint", 2000)]
)
def test_joint_rows_take_published_number_of_steps(name, row, steps):
    cells = published_tables.select_cells(name, f"{row}/*")
    assert len(cells) == 3 and all(cell.options["iterations"] == steps for cell in cells)
    record = Path(__file__).parents[2] / "docs" / "results" / f"{name}.json"
    recorded = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    assert all(len(reproduce.recorded_runs(cell, recorded)) == 3 for cell in cells) or not recorded, (
        "recorded runs are of this protocol"
    )


def test_dry_run_prints_valid_commands(write_tiny_table, tmp_path, capsys):
    assert start(["reproduce", "T0", "--dry-run", "--out", str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "x").exists()
    assert [line.split(": ")[0] for line in lines] == [
        "None/task",
        "None/class",
        "Anchor/task",
    ]
    for line in lines:
        assert start([*line.split(": everlearn ")[1].split(), "--dry-run"]) == 0
    assert "L2(strength=0.1), seed 2" in capsys.readouterr().out


def test_tolerance_is_two_standard_deviations_of_runs(write_tiny_table):
    cell, *_ = published_tables.select_cells("T0")
    assert (cell.deviation, cell.tolerance) == (2.0, 4.0)  # a standard error of 1 over 4 runs
    assert published_tables.select_cells("T0")[-1].tolerance == 1.5


def test_a_table_may_set_its_own_least_tolerance(write_tiny_table):
    path = published_tables.FOLDER / "T0.toml"
    path.write_text(path.read_text().replace("runs = 4", "runs = 4\ntolerance = 0.7"))
    cells = published_tables.select_cells("T0")
    assert [cell.tolerance for cell in cells] == [4.0, 0.7, 0.7]
    assert cells[-1].verdict([1.71]) == "above" and cells[-1].verdict([1.6]) == "within"


def test_random_features_follow_the_seed_of_the_run_unless_set():
    grid = Grid(methods="ranpac,klda", set=["klda.seed=7"], seeds=3)
    seeds = {(type(run.method).__name__, run.seed): run.method.seed for run in grid_runs(grid)}
    assert [seeds["RanPAC", seed] for seed in range(3)] == [0, 1, 2]
    assert [seeds["KLDA", seed] for seed in range(3)] == [7, 7, 7]


def test_a_linear_model_has_no_hidden_layers():
    model = Grid(hidden="none").model_factory((5,), 3)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(3, 5), (3,)]


def test_cells_are_selected_by_pattern(write_tiny_table):
    assert [cell.name for cell in published_tables.select_cells("t0", "none/*")] == ["None/task", "None/class"]
    assert [cell.name for cell in published_tables.select_cells("T0", "*/class, anchor/task")] == [
        "None/class",
        "Anchor/task",
    ]
    with pytest.raises(
        published_tables.UsageError, match=r"No cell of T0 is called 'ancor/task'\. Did you mean 'Anchor/task'"
    ):
        published_tables.select_cells("T0", "ancor/task")
    with pytest.raises(published_tables.UsageError, match="Unknown table 'T99'"):
        published_tables.select_cells("T99")


def test_results_are_compared_and_recorded(write_tiny_table, tmp_path, capsys):
    folders = ["--out", str(tmp_path / "runs"), "--record", str(tmp_path / "results")]
    arguments = ["reproduce", "T0", "--seeds", "2", *folders]
    assert start(arguments) == 0
    text = capsys.readouterr().out
    assert "T0: Digits (Author (2026))" in text
    lines = {line.split()[0]: line for line in text.splitlines() if "/" in line}
    assert lines["None/class"].endswith("miss") and lines["Anchor/task"].endswith("above")
    assert "1 above" in text and "0 not run; 3 with fewer than 3 seeds." in text
    loaded_results = results.load(tmp_path / "runs")
    assert len(loaded_results) == 6
    recorded = json.loads((tmp_path / "results" / "T0.json").read_text())
    accuracies = [
        100 * result.average_accuracy
        for result in loaded_results
        if result.config["method"] == "finetune" and result.config["scenario"] == "task"
    ]
    assert sorted(run["accuracy"] for run in recorded["None/task"]["runs"].values()) == sorted(accuracies)
    page = (tmp_path / "results.md").read_text()
    assert "| None/class | 99.9 |" in page
    assert "- **None/class**: cannot be reached" in page
    assert "6 runs, by commit" in page.replace("\n", " ")
    times = {path: path.stat().st_mtime_ns for path in results.result_files(tmp_path / "runs")}
    assert start(arguments) == 0
    # Finished runs are skipped.
    assert times == {path: path.stat().st_mtime_ns for path in results.result_files(tmp_path / "runs")}


def test_recorded_runs_of_other_protocol_are_dropped(write_tiny_table, tmp_path, capsys):
    folders = ["--out", str(tmp_path / "runs"), "--record", str(tmp_path / "results")]
    start(["reproduce", "T0", "--seeds", "2", *folders])
    write_tiny_table(strength=5.0)
    start(["reproduce", "T0", "--cells", "anchor/*", "--seeds", "1", *folders])
    recorded = json.loads((tmp_path / "results" / "T0.json").read_text())
    assert list(recorded["Anchor/task"]["runs"]) == ["0"]
    assert recorded["Anchor/task"]["options"]["set"]["l2.strength"] == 5.0
    assert list(recorded["None/task"]["runs"]) == ["0", "1"]


def test_quick_runs_are_not_compared(write_tiny_table, tmp_path, capsys):
    assert start(["reproduce", "T0", "--quick", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "not the protocol" in text and "within" not in text
    assert start(["reproduce", "T0", "--quick", "--record", str(tmp_path / "r"), "--out", str(tmp_path)]) == 2
    assert "--quick is not the protocol" in capsys.readouterr().err


def test_failed_run_does_not_stop_others(write_tiny_table, tmp_path, capsys, monkeypatch):
    run = GridRun.run

    def fail(grid_run, force):
        if grid_run.scenario == "class":
            raise FloatingPointError("the loss is nan")
        return run(grid_run, force)

    monkeypatch.setattr(GridRun, "run", fail)
    assert start(["reproduce", "T0", "--seeds", "1", "--out", str(tmp_path)]) == 1
    output, error = capsys.readouterr()
    assert "None/class, seed 0 failed: the loss is nan" in error and "1 not run" in output


def test_page_omits_runs_of_other_protocol(write_tiny_table, tmp_path, capsys):
    start(["reproduce", "T0", "--seeds", "1", "--out", str(tmp_path / "runs"), "--record", str(tmp_path / "results")])
    assert "| Anchor/task | 1.0 | – | 0 |" not in (tmp_path / "results.md").read_text()
    write_tiny_table(strength=5.0)
    assert "| Anchor/task | 1.0 | – | 0 |" in reproduce.page(tmp_path / "results").read_text()


def test_force_repeats_runs(write_tiny_table, tmp_path, capsys):
    arguments = ["reproduce", "T0", "--cells", "none/task", "--seeds", "1", "--out", str(tmp_path)]
    start(arguments)
    (path,) = results.result_files(tmp_path)
    time_before = path.stat().st_mtime_ns
    start([*arguments, "--force"])
    assert path.stat().st_mtime_ns > time_before


def test_cells_of_all_tables_are_selected_by_pattern(write_tiny_table, capsys):
    assert start(["reproduce", "all", "--cells", "none/class", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    for pattern in ("", "no/such"):
        assert start(["reproduce", "all", "--cells", pattern, "--dry-run"]) == 2
    assert "No cell of any table" in capsys.readouterr().err


RECORD_SCRIPT = """
import sys
from pathlib import Path
from everlearn.experiments import reproduce
from everlearn.experiments.published_tables import Cell
for seed in range(20):
    cell = Cell("T0", sys.argv[2], "task", 90.0, 0.0, {}, "")
    run = {"accuracy": 1.0, "seconds": 1.0, "time": "", "commit": "", "torch": "", "threads": 1}
    reproduce.record(Path(sys.argv[1]), "T0", [(cell, {str(seed): run})])
"""


@pytest.mark.slow
def test_concurrent_commands_keep_all_records(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", RECORD_SCRIPT, str(tmp_path), row]) for row in ("A", "B")]
    assert [process.wait(120) for process in processes] == [0, 0]
    recorded = json.loads((tmp_path / "T0.json").read_text())
    assert {name: list(cell["runs"]) for name, cell in recorded.items()} == {
        name: [str(seed) for seed in range(20)] for name in ("A/task", "B/task")
    }
    assert [path.name for path in tmp_path.iterdir()] == ["T0.json"]


def test_all_classes_are_allowed_from_first_task():
    stream = streams.digits(scenario="class")
    with_all_classes = stream.with_all_classes()
    assert stream[0].allowed.sum(1).tolist() == [2] * 5 and stream.settings.get("all_classes") is None
    assert all(task.allowed.all() for task in with_all_classes)
    assert with_all_classes.test_tasks is with_all_classes.tasks
    task_stream = streams.digits(scenario="task")
    assert all((a.allowed == b.allowed).all() for a, b in zip(task_stream, task_stream.with_all_classes(), strict=True))
    assert streams.digits(scenario="domain").with_all_classes()[0].allowed is None
