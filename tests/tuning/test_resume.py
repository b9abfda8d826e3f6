"""Interrupted studies are resumed."""

import multiprocessing
import signal
from dataclasses import dataclass

import pytest

import everlearn
from everlearn import EWC
from everlearn.trainer.settings import Training
from everlearn.tuning import tune
from everlearn.tuning.trials import TrialRun
from tests.tuning.studies import CHECKPOINTS, NEEDS_FORK, TRAINING, Harmful, digits, make_net, run_study, use_one_step

SLOW = pytest.mark.slow


def test_interrupted_study_is_resumed(tmp_path):
    settings = {"training": TRAINING, "prune": False}
    reference = tune(make_net, EWC(), digits(), trials=4, out=tmp_path / "reference", **settings)

    class Stopped(KeyboardInterrupt):
        pass

    calls = []

    def interrupt(self, model, task):
        calls.append(task.id)
        if len(calls) == 5:  # second trial
            raise Stopped
        return end_task(self, model, task)

    end_task = EWC.end_task
    EWC.end_task = interrupt
    try:
        with pytest.raises(Stopped):
            tune(make_net, EWC(), digits(), trials=4, out=tmp_path / "interrupted", **settings)
    finally:
        EWC.end_task = end_task
    resumed = tune(make_net, EWC(), digits(), trials=4, out=tmp_path / "interrupted", **settings)
    assert {str(trial) for trial in resumed.trials} == {str(trial) for trial in reference.trials}


# Killed in the first task, which all trials share, in the first trial, and in the second.
@NEEDS_FORK
@pytest.mark.parametrize("steps", [pytest.param(5, marks=SLOW), 25, pytest.param(40, marks=SLOW)])
def test_killed_study_is_resumed_within_trial(steps, tmp_path):
    (tmp_path / "allowed").write_bytes(b"." * steps)
    allowed = str(tmp_path / "allowed")
    child = multiprocessing.get_context("fork").Process(target=run_study, args=(tmp_path / "killed", allowed))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [*(tmp_path / "killed").rglob("*.checkpoint")]
    (tmp_path / "allowed").write_bytes(b"." * 1000)
    resumed = run_study(tmp_path / "killed", allowed)
    num_resumed_steps = 1000 - len((tmp_path / "allowed").read_bytes())
    (tmp_path / "allowed").write_bytes(b"." * 1000)
    reference = run_study(tmp_path / "reference", allowed)
    num_reference_steps = 1000 - len((tmp_path / "allowed").read_bytes())
    assert {str(trial) for trial in resumed.trials} == {str(trial) for trial in reference.trials}
    assert num_reference_steps - steps <= num_resumed_steps <= num_reference_steps - steps + 2 + 8 * (steps > 8), (
        "finished steps are not repeated"
    )
    assert not [*(tmp_path / "killed").rglob("*.checkpoint*")]
    accuracies = [
        {
            result.config["fields"]: result.accuracy.tolist()
            for result in everlearn.results.load(tmp_path / name / "trials")
        }
        for name in ("killed", "reference")
    ]
    assert accuracies[0] == accuracies[1]


@dataclass(eq=False)
class KilledHarmful(Harmful):
    """Kills its process after as many steps as a file has bytes."""

    allowed: str = ""

    def after_step(self, model):
        use_one_step(self.allowed)


def run_pruned_study(folder, allowed):
    settings = {"trials": 10, "training": Training(epochs=3, batch_size=32), "fields": {"harm": (0, 0.4)}}
    return tune(make_net, KilledHarmful(allowed=allowed), digits(), checkpoint=CHECKPOINTS, out=folder, **settings)


@pytest.mark.slow
@NEEDS_FORK
@pytest.mark.parametrize("steps", [pytest.param(50, marks=SLOW), 95, pytest.param(115, marks=SLOW)])
def test_pruning_after_kill_equals_uninterrupted_study(steps, tmp_path):
    (tmp_path / "allowed").write_bytes(b"")
    reference = run_pruned_study(tmp_path / "reference", str(tmp_path / "allowed"))
    assert any("pruned" in trial.failure for trial in reference.trials)
    (tmp_path / "allowed").write_bytes(b"." * steps)
    child = multiprocessing.get_context("fork").Process(
        target=run_pruned_study, args=(tmp_path / "killed", str(tmp_path / "allowed"))
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (tmp_path / "allowed").write_bytes(b"")
    resumed = run_pruned_study(tmp_path / "killed", str(tmp_path / "allowed"))
    assert [str(trial) for trial in resumed.trials] == [str(trial) for trial in reference.trials]


def test_trial_killed_while_pruned_is_pruned(tmp_path, monkeypatch):
    def interrupt(self, trial, outcome):
        raise KeyboardInterrupt

    settings = {"trials": 2, "training": TRAINING, "fields": {"harm": (0, 0.4)}, "out": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr("everlearn.tuning.trials._is_hopeless", lambda study, number, score, step: step == 2)
        patch.setattr("everlearn.tuning.trials.StudyRunner._record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(make_net, Harmful(), digits(), **settings)
    study = tune(make_net, Harmful(), digits(), **settings)
    assert [trial.failure for trial in study.trials] == ["pruned after task 2", ""]


class Killed(BaseException):
    """Simulate the end of the process."""


def kill_at_write(monkeypatch, index):
    """Raise Killed before write number `index` to a study, counted from 0; return the writes."""
    optuna = pytest.importorskip("optuna")
    writes = []

    def write_or_die(name):
        original = getattr(optuna.Study, name)

        def write(self, *args, **kwargs):
            if len(writes) == index:
                raise Killed
            writes.append(name)
            return original(self, *args, **kwargs)

        return write

    for name in ("set_user_attr", "add_trial"):
        monkeypatch.setattr(optuna.Study, name, write_or_die(name))
    return writes


def test_first_values_are_complete_after_kill(tmp_path, monkeypatch):
    # Only the values that are tried matter.
    monkeypatch.setattr(TrialRun, "run", lambda *_: {"old": 0.5, "new": 0.5, "score": 0.5})
    stream = digits()

    def run_named_study(name, trials):
        return tune(make_net, EWC(), stream, trials=trials, training=TRAINING, out=tmp_path / name)

    num_trials = 3
    with monkeypatch.context() as patch:
        writes = kill_at_write(patch, -1)
        reference_values = {str(trial.values) for trial in run_named_study("reference", num_trials).trials}
    assert writes.count("add_trial") == num_trials == len(reference_values)
    for index in range(len(writes)):
        with monkeypatch.context() as patch:
            kill_at_write(patch, index)
            with pytest.raises(Killed):
                run_named_study(f"killed-{index}", num_trials)
        resumed = run_named_study(f"killed-{index}", num_trials)
        assert {str(trial.values) for trial in resumed.trials} == reference_values, (
            f"killed before write {index}: {writes[index]}"
        )
