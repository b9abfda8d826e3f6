"""Executors: in one process, in worker processes, on Ray and Slurm."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cyclopts")
from everlearn import results
from everlearn.cli.app import start
from everlearn.experiments.executors import WorkerLost, local_outcomes, outcomes

NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@dataclass
class Sum:
    """A run that reports its steps, and stops when it is told to."""

    name: str
    report: Any

    def run(self, force):
        steps = 0
        while steps < 5 and not self.report(self.name, steps, os.getpid()):
            steps += 1
        return self.name, steps


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=NEEDS_FORK)])
def test_runs_report_to_the_process_that_started_them(workers):
    reports = []

    def report(name, step, pid):  # a closure, which cannot be pickled
        reports.append((name, step))
        assert (pid == os.getpid()) == (workers == 1)
        return name == "b" and step == 2

    run_outcomes = dict(local_outcomes([Sum(name, report) for name in "abcd"], workers, fork=True))
    assert run_outcomes == {0: ("a", 5), 1: ("b", 2), 2: ("c", 5), 3: ("d", 5)}
    assert sorted(reports) == [(name, step) for name in "abcd" for step in range(3 if name == "b" else 5)]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=NEEDS_FORK)])
def test_next_run_is_taken_when_a_worker_is_free(workers):
    received = []
    num_received = []

    def make_runs():
        for index in range(6):
            num_received.append(len(received))
            yield SimpleNamespace(run=lambda force, index=index: index**2)

    for index, outcome in local_outcomes(make_runs(), workers, fork=True):
        assert outcome == index**2
        received.append(index)
    assert sorted(received) == list(range(6))
    assert all(index - count < workers for index, count in enumerate(num_received))


class OddError(RuntimeError):
    """An error that cannot be unpickled."""

    def __init__(self, name, number):
        super().__init__(f"{name} {number}")


@dataclass(frozen=True)
class FailingRun:
    """A run that raises an error."""

    error: str

    def run(self, force):
        if self.error == "odd":
            raise OddError("too large:", 3)
        if self.error == "bug":
            raise KeyError("head")
        raise ValueError("wrong value")


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_runs_are_outcomes_and_others_are_raised(workers):
    run_outcomes = dict(local_outcomes([FailingRun("value"), FailingRun("odd")], workers))
    wrong = run_outcomes[0]
    odd = run_outcomes[1]
    assert type(wrong) is ValueError and str(wrong) == "wrong value"
    assert isinstance(odd, RuntimeError) and "too large: 3" in str(odd)
    if workers == 2:
        assert 'raise ValueError("wrong value")' in wrong.__notes__[0], "where it was raised"
    with pytest.raises(KeyError, match="head"):
        list(local_outcomes([FailingRun("bug")] * 2, workers))


@dataclass(frozen=True)
class TensorRun:
    """A run that takes and returns tensors, which multiprocessing would put into shared memory."""

    values: torch.Tensor

    def run(self, force):
        return self.values * 2, os.getpid()


def test_tensors_outlive_their_process():
    runs = [TensorRun(torch.arange(float(size))) for size in (0, 1, 1000, 7)]
    run_outcomes = dict(local_outcomes(runs, 2))
    assert all(torch.equal(run_outcomes[i][0], run.values * 2) for i, run in enumerate(runs))
    pids = {pid for _, pid in run_outcomes.values()}
    assert len(pids) <= 2 and os.getpid() not in pids, "a process is used for several runs"


@dataclass(frozen=True)
class SlowRun:
    """A run that takes a while, writes a file at its start and end, and may kill its process."""

    name: str
    folder: Path
    num_deaths: int = 0  # how often its process is killed

    def run(self, force):
        begin_file = self.folder / f"began {self.name}"
        num_begun = len(begin_file.read_text()) if begin_file.exists() else 0
        begin_file.write_text("x" * (num_begun + 1))
        if num_begun < self.num_deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        (self.folder / f"ended {self.name}").touch()
        return self.name


@pytest.mark.slow
def test_closing_iterator_stops_runs(tmp_path):
    for _ in outcomes([SlowRun(str(i), tmp_path) for i in range(8)], workers=2, threads=1):
        break
    time.sleep(1)
    assert len(list(tmp_path.glob("began *"))) <= 4  # two that were running, and at most two more


@dataclass(frozen=True)
class EndlessRun:
    """A run that does not end."""

    folder: Path

    def run(self, force):
        (self.folder / f"pid {os.getpid()}").touch()
        time.sleep(600)


@pytest.mark.slow
def test_worker_processes_end_with_parent(tmp_path, check_workers_end):
    code = (
        "from pathlib import Path; from tests.experiments.test_executors import EndlessRun, outcomes; "
        f"list(outcomes([EndlessRun(Path({str(tmp_path)!r}))] * 3, workers=2, threads=1))"
    )

    def command():  # a new process that has not started workers
        os.chdir(Path(__file__).parents[2])
        os.execv(sys.executable, [sys.executable, "-c", code])

    assert check_workers_end(command)


def test_dead_worker_loses_only_its_run(tmp_path):
    runs = [
        SlowRun("a", tmp_path, num_deaths=9),
        SlowRun("b", tmp_path),
        SlowRun("c", tmp_path, num_deaths=1),
        SlowRun("d", tmp_path),
    ]
    run_outcomes = dict(outcomes(runs, workers=2, threads=1))
    lost = run_outcomes.pop(0)
    assert isinstance(lost, WorkerLost) and "died 3 times" in str(lost)
    assert run_outcomes == {1: "b", 2: "c", 3: "d"}
    assert (tmp_path / "began c").read_text() == "xx" and (tmp_path / "began b").read_text() == "x"


@pytest.mark.parametrize("cluster", [None, "ray", "slurm"])
def test_no_runs_give_no_outcomes(cluster):
    assert list(outcomes([], 2, 1, cluster=cluster)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray
@pytest.mark.enable_socket
def test_ray_distinguishes_lost_worker_from_error():
    ray = pytest.importorskip("ray")

    class Run:  # pickled by value, as worker processes cannot import tests
        grid = SimpleNamespace(device="cpu")

        def __init__(self, is_killed):
            self.is_killed = is_killed

        def run(self, force):
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("head")

    try:
        run_outcomes = dict(outcomes([Run(True), Run(False)], 2, 1, cluster="ray"))
    finally:
        ray.shutdown()
    assert [type(run_outcomes[i]) for i in range(2)] == [WorkerLost, RuntimeError]
    assert all("its job has failed" in str(outcome) for outcome in run_outcomes.values())
    assert "head" in str(run_outcomes[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_slurm_distinguishes_lost_worker_from_error(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr("everlearn.experiments.executors.shutil.which", lambda name: "srun")
    monkeypatch.setattr("submitit.slurm.slurm.SlurmExecutor.affinity", classmethod(lambda cls: -1))

    class Run:
        grid = SimpleNamespace(device="cpu", out=tmp_path, time_limit=1, partition=None)

        def __init__(self, is_killed):
            self.is_killed = is_killed

        def run(self, force):
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("head")

    run_outcomes = dict(outcomes([Run(True), Run(False)], 2, 1, cluster="slurm"))
    assert [type(run_outcomes[i]) for i in range(2)] == [WorkerLost, RuntimeError]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray
@pytest.mark.enable_socket
def test_ray_cluster_equals_one_process(tmp_path):
    ray = pytest.importorskip("ray")
    arguments = ["--methods", "finetune,er", "--tasks", "2", "--epochs", "1", "--hidden", "16", "--threads", "1"]
    assert start(["run", *arguments, "--out", str(tmp_path / "local")]) == 0
    try:
        assert start(["run", *arguments, "--cluster", "ray", "--out", str(tmp_path / "remote")]) == 0
    finally:
        ray.shutdown()
    local, remote = (results.load(tmp_path / name) for name in ("local", "remote"))
    assert [result.config for result in local] == [result.config for result in remote]
    assert all((a.accuracy == b.accuracy).all() for a, b in zip(local, remote, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_slurm_jobs_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    arguments = ["run", "--methods", "finetune", "--tasks", "2", "--epochs", "1", "--hidden", "16", "--threads", "1"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert start([*arguments, "--cluster", "slurm", "--out", str(tmp_path)]) == 2
    assert "there is no Slurm here" in capsys.readouterr().err
    # Submitit itself then finds no Slurm, and starts a local process.
    monkeypatch.setattr("everlearn.experiments.executors.shutil.which", lambda name: "srun")
    monkeypatch.setattr("submitit.slurm.slurm.SlurmExecutor.affinity", classmethod(lambda cls: -1))
    assert start([*arguments, "--cluster", "slurm", "--out", str(tmp_path)]) == 0
    assert len(results.load(tmp_path)) == 1


def test_workers_equal_one_process(tmp_path):
    arguments = ["--methods", "finetune,er", "--tasks", "2", "--epochs", "1", "--hidden", "16", "--threads", "1"]
    for workers in ("1", "2"):
        assert start(["run", *arguments, "--workers", workers, "--out", str(tmp_path / workers)]) == 0
    local, parallel = (results.load(tmp_path / workers) for workers in "12")
    assert [result.config for result in local] == [result.config for result in parallel]
    assert all((a.accuracy == b.accuracy).all() for a, b in zip(local, parallel, strict=True))
