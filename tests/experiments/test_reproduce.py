"""Published tables: their data, the verdicts, runs that go on, the page."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cyclopts")
from everlearn import results, streams
from everlearn.cli.app import start
from everlearn.experiments import published_tables, reproduce
from everlearn.experiments.executors import outcomes
from everlearn.experiments.grid import GridRun, grid_runs
from everlearn.experiments.published_tables import Cell
from everlearn.tuning import WorkerLost

TINY = """
title = "Digits"
source = "Nobody (2026)"
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
class = {{ published = 99.9, known = "nobody reaches it" }}
[[rows]]
name = "Anchor"
run = {{ methods = "l2", set = {{ "l2.strength" = {strength} }} }}
cells = {{ task = {{ published = 1.0 }} }}
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A table of our own, small enough to be run."""
    folder = tmp_path / "published"
    folder.mkdir()
    monkeypatch.setattr(published_tables, "FOLDER", folder)

    def write(published=90.0, strength=0.1):
        (folder / "T0.toml").write_text(TINY.format(published=published, strength=strength))

    write()
    return write


@pytest.mark.parametrize("name", published_tables.table_names())
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_of_every_table_can_be_planned(name, quick):
    for cell in published_tables.select_cells(name, quick=quick):
        (run,) = grid_runs(cell.grid(1))
        assert run.joint or run.method is not None
        assert 0 < cell.published < 100 and cell.deviation >= 0
    assert len({c.name for c in published_tables.select_cells(name)}) == len(published_tables.select_cells(name))


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([90.0], "within"), ([88.5], "within"), ([88.4], "miss"), ([91.6], "above"), ([86.0, 94.0], "within")],
)
def test_the_verdict_is_of_the_mean(ours, verdict):
    assert Cell("T", "r", "c", 90.0, 0.5, {}, "").verdict(ours) == verdict


@pytest.mark.parametrize(
    ("name", "row", "steps"), [("T1", "Offline", 2000), ("T2", "Offline", 5000), ("T4", "Joint", 2000)]
)
def test_joint_rows_take_the_steps_of_all_tasks_as_published(name, row, steps):
    chosen = published_tables.select_cells(name, f"{row}/*")
    assert len(chosen) == 3 and all(c.options["iterations"] == steps for c in chosen)
    record = Path(__file__).parents[2] / "docs" / "results" / f"{name}.json"
    kept = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    assert all(len(reproduce.recorded_runs(c, kept)) == 3 for c in chosen) or not kept, "the record is of this protocol"


def test_a_dry_run_prints_commands_that_are_understood(tiny, tmp_path, capsys):
    assert start(["reproduce", "T0", "--dry-run", "--out", str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "x").exists() and [line.split(": ")[0] for line in lines] == [
        "None/task",
        "None/class",
        "Anchor/task",
    ]
    for line in lines:
        assert start([*line.split(": everlearn ")[1].split(), "--dry-run"]) == 0
    assert "L2, seed 2" in capsys.readouterr().out


def test_the_tolerance_is_two_deviations_of_single_runs(tiny):
    cell, *_ = published_tables.select_cells("T0")
    assert (cell.deviation, cell.tolerance) == (2.0, 4.0)  # a standard error of 1 over 4 runs
    assert published_tables.select_cells("T0")[-1].tolerance == 1.5


def test_cells_are_chosen_by_pattern(tiny):
    assert [c.name for c in published_tables.select_cells("t0", "none/*")] == ["None/task", "None/class"]
    assert [c.name for c in published_tables.select_cells("T0", "*/class, anchor/task")] == [
        "None/class",
        "Anchor/task",
    ]
    with pytest.raises(
        published_tables.UsageError, match=r"No cell of T0 is called 'ancor/task'\. Did you mean 'Anchor/task'"
    ):
        published_tables.select_cells("T0", "ancor/task")
    with pytest.raises(published_tables.UsageError, match="Unknown table 'T99'"):
        published_tables.select_cells("T99")


def test_both_numbers_stand_side_by_side(tiny, tmp_path, capsys):
    words = ["reproduce", "T0", "--seeds", "2", "--out", str(tmp_path / "runs"), "--record", str(tmp_path / "results")]
    assert start(words) == 0
    text = capsys.readouterr().out
    assert "T0: Digits (Nobody (2026))" in text
    lines = {line.split()[0]: line for line in text.splitlines() if "/" in line}
    assert lines["None/class"].endswith("miss") and lines["Anchor/task"].endswith("above")
    assert "1 above" in text and "0 not run; 3 with fewer than 3 seeds." in text
    found = results.load(tmp_path / "runs")
    assert len(found) == 6
    kept = json.loads((tmp_path / "results" / "T0.json").read_text())
    mine = [
        100 * r.average_accuracy for r in found if r.config["method"] == "finetune" and r.config["scenario"] == "task"
    ]
    assert sorted(run["accuracy"] for run in kept["None/task"]["runs"].values()) == sorted(mine)
    page = (tmp_path / "results.md").read_text()
    assert (
        "| None/class | 99.9 |" in page
        and "- **None/class**: nobody reaches it" in page
        and "6 runs, by commit" in page.replace("\n", " ")
    )
    times = {p: p.stat().st_mtime_ns for p in results.result_files(tmp_path / "runs")}
    assert start(words) == 0
    assert times == {p: p.stat().st_mtime_ns for p in results.result_files(tmp_path / "runs")}  # nothing done again


def test_what_another_protocol_gave_is_dropped_and_what_others_gave_is_kept(tiny, tmp_path, capsys):
    where = ["--out", str(tmp_path / "runs"), "--record", str(tmp_path / "results")]
    start(["reproduce", "T0", "--seeds", "2", *where])
    tiny(strength=5.0)
    start(["reproduce", "T0", "--cells", "anchor/*", "--seeds", "1", *where])
    kept = json.loads((tmp_path / "results" / "T0.json").read_text())
    assert list(kept["Anchor/task"]["runs"]) == ["0"] and kept["Anchor/task"]["options"]["set"]["l2.strength"] == 5.0
    assert list(kept["None/task"]["runs"]) == ["0", "1"]


def test_quick_is_not_the_protocol(tiny, tmp_path, capsys):
    assert start(["reproduce", "T0", "--quick", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "not the protocol" in text and "within" not in text
    assert start(["reproduce", "T0", "--quick", "--record", str(tmp_path / "r"), "--out", str(tmp_path)]) == 2
    assert "--quick is not the protocol" in capsys.readouterr().err


def test_a_run_that_fails_leaves_the_others(tiny, tmp_path, capsys, monkeypatch):
    run = GridRun.run

    def fail(cell, force):
        if cell.scenario == "class":
            raise FloatingPointError("the loss is nan")
        return run(cell, force)

    monkeypatch.setattr(GridRun, "run", fail)
    assert start(["reproduce", "T0", "--seeds", "1", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "None/class, seed 0 failed: the loss is nan" in err and "1 not run" in out


def test_the_page_leaves_out_what_another_protocol_gave(tiny, tmp_path, capsys):
    start(["reproduce", "T0", "--seeds", "1", "--out", str(tmp_path / "runs"), "--record", str(tmp_path / "results")])
    assert "| Anchor/task | 1.0 | – | 0 |" not in (tmp_path / "results.md").read_text()
    tiny(strength=5.0)
    assert "| Anchor/task | 1.0 | – | 0 |" in reproduce.page(tmp_path / "results").read_text()


def test_forced_runs_are_done_again(tiny, tmp_path, capsys):
    words = ["reproduce", "T0", "--cells", "none/task", "--seeds", "1", "--out", str(tmp_path)]
    start(words)
    (path,) = results.result_files(tmp_path)
    before = path.stat().st_mtime_ns
    start([*words, "--force"])
    assert path.stat().st_mtime_ns > before


def test_cells_of_all_tables_are_chosen_alike(tiny, capsys):
    assert start(["reproduce", "all", "--cells", "none/class", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    for nothing in ("", "no/such"):
        assert start(["reproduce", "all", "--cells", nothing, "--dry-run"]) == 2
    assert "No cell of any table" in capsys.readouterr().err


RECORD = """
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
def test_two_commands_at_once_keep_each_others_records(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", RECORD, str(tmp_path), row]) for row in ("A", "B")]
    assert [p.wait(120) for p in both] == [0, 0]
    kept = json.loads((tmp_path / "T0.json").read_text())
    assert {name: list(cell["runs"]) for name, cell in kept.items()} == {
        name: [str(s) for s in range(20)] for name in ("A/task", "B/task")
    }
    assert [p.name for p in tmp_path.iterdir()] == ["T0.json"]


@dataclass(frozen=True)
class Slow:
    """A run that takes a while, and leaves a file when it has ended."""

    name: str
    folder: Path
    dies: int = 0  # so many times

    def run(self, force):
        begun = self.folder / f"began {self.name}"
        times = len(begun.read_text()) if begun.exists() else 0
        begun.write_text("x" * (times + 1))
        if times < self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        (self.folder / f"ended {self.name}").touch()
        return self.name


@pytest.mark.slow
def test_who_stops_listening_stops_the_runs(tmp_path):
    for _ in outcomes([Slow(str(i), tmp_path) for i in range(8)], workers=2, threads=1):
        break
    time.sleep(1)
    assert len(list(tmp_path.glob("began *"))) <= 4  # the two that were going on, and at most two more


@dataclass(frozen=True)
class Endless:
    """A run that nobody waits for."""

    folder: Path

    def run(self, force):
        (self.folder / f"pid {os.getpid()}").touch()
        time.sleep(600)


def test_workers_end_with_their_command(tmp_path, orphans):
    code = (
        "from pathlib import Path; from tests.experiments.test_reproduce import Endless, outcomes; "
        f"list(outcomes([Endless(Path({str(tmp_path)!r}))] * 3, workers=2, threads=1))"
    )

    def command():  # in a process that has started none yet
        os.chdir(Path(__file__).parents[2])
        os.execv(sys.executable, [sys.executable, "-c", code])

    assert orphans(command)


def test_a_worker_that_dies_costs_its_own_run_alone(tmp_path):
    todo = [Slow("a", tmp_path, dies=9), Slow("b", tmp_path), Slow("c", tmp_path, dies=1), Slow("d", tmp_path)]
    ended = dict(outcomes(todo, workers=2, threads=1))
    lost = ended.pop(0)
    assert isinstance(lost, WorkerLost) and "died 3 times" in str(lost)
    assert ended == {1: "b", 2: "c", 3: "d"}
    assert (tmp_path / "began c").read_text() == "xx" and (tmp_path / "began b").read_text() == "x"


@pytest.mark.parametrize("cluster", [None, "ray", "slurm"])
def test_of_no_runs_nothing_comes(cluster):
    assert list(outcomes([], 2, 1, cluster=cluster)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray
@pytest.mark.enable_socket
def test_ray_tells_a_lost_machine_from_an_error_of_the_run():
    ray = pytest.importorskip("ray")

    class Run:  # in here it is sent whole, to processes that know no tests
        grid = SimpleNamespace(device="cpu")

        def __init__(self, dies):
            self.dies = dies

        def run(self, force):
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("head")

    try:
        ended = dict(outcomes([Run(True), Run(False)], 2, 1, cluster="ray"))
    finally:
        ray.shutdown()
    assert [type(ended[i]) for i in range(2)] == [WorkerLost, RuntimeError]
    assert all("its job has failed" in str(outcome) for outcome in ended.values()) and "head" in str(ended[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_slurm_tells_a_lost_machine_from_an_error_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr("everlearn.experiments.executors.shutil.which", lambda name: "srun")
    monkeypatch.setattr("submitit.slurm.slurm.SlurmExecutor.affinity", classmethod(lambda cls: -1))

    class Run:
        grid = SimpleNamespace(device="cpu", out=tmp_path, time_limit=1, partition=None)

        def __init__(self, dies):
            self.dies = dies

        def run(self, force):
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("head")

    ended = dict(outcomes([Run(True), Run(False)], 2, 1, cluster="slurm"))
    assert [type(ended[i]) for i in range(2)] == [WorkerLost, RuntimeError]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray
@pytest.mark.enable_socket
def test_a_ray_cluster_gives_what_one_process_gives(tmp_path):
    ray = pytest.importorskip("ray")
    words = ["--methods", "finetune,er", "--tasks", "2", "--epochs", "1", "--hidden", "16", "--threads", "1"]
    assert start(["run", *words, "--out", str(tmp_path / "here")]) == 0
    try:
        assert start(["run", *words, "--cluster", "ray", "--out", str(tmp_path / "there")]) == 0
    finally:
        ray.shutdown()
    one, two = (results.load(tmp_path / place) for place in ("here", "there"))
    assert [r.config for r in one] == [r.config for r in two]
    assert all((a.accuracy == b.accuracy).all() for a, b in zip(one, two, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_slurm_jobs_give_what_one_process_gives(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    words = ["run", "--methods", "finetune", "--tasks", "2", "--epochs", "1", "--hidden", "16", "--threads", "1"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert start([*words, "--cluster", "slurm", "--out", str(tmp_path)]) == 2
    assert "there is no Slurm here" in capsys.readouterr().err
    monkeypatch.setattr(
        "everlearn.experiments.executors.shutil.which", lambda name: "srun"
    )  # submitit itself then finds none, and starts a process
    monkeypatch.setattr("submitit.slurm.slurm.SlurmExecutor.affinity", classmethod(lambda cls: -1))
    assert start([*words, "--cluster", "slurm", "--out", str(tmp_path)]) == 0
    assert len(results.load(tmp_path)) == 1


def test_workers_give_what_one_process_gives(tmp_path):
    words = ["--methods", "finetune,er", "--tasks", "2", "--epochs", "1", "--hidden", "16", "--threads", "1"]
    for workers in ("1", "2"):
        assert start(["run", *words, "--workers", workers, "--out", str(tmp_path / workers)]) == 0
    one, two = (results.load(tmp_path / workers) for workers in "12")
    assert [r.config for r in one] == [r.config for r in two]
    assert all((a.accuracy == b.accuracy).all() for a, b in zip(one, two, strict=True))


def test_foreseen_classes_may_be_named_from_the_start():
    stream = streams.digits(scenario="class")
    foreseen = stream.with_all_classes()
    assert stream[0].allowed.sum(1).tolist() == [2] * 5 and stream.settings.get("all_classes") is None
    assert all(t.allowed.all() for t in foreseen) and foreseen.test_tasks is foreseen.tasks
    task = streams.digits(scenario="task")
    assert all((a.allowed == b.allowed).all() for a, b in zip(task, task.with_all_classes(), strict=True))
    assert streams.digits(scenario="domain").with_all_classes()[0].allowed is None
