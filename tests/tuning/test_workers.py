"""Trials in parallel processes."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import everlearn
from everlearn import EWC
from everlearn.trainer.settings import Training
from everlearn.tuning import WorkerLost, tune
from everlearn.tuning.shared_start import SharedStart
from tests.tuning.studies import NEEDS_FORK, TRAINING, Harmful, digits, make_net, run_study


@NEEDS_FORK
def test_parallel_trials_equal_direct_runs(tmp_path):
    settings = {"training": TRAINING, "prune": False}
    study = tune(make_net, EWC(), digits(), trials=6, workers=2, out=tmp_path / "pair", **settings)
    assert len({trial.values["strength"] for trial in study.trials}) == 6
    for trial in study.trials:
        direct_run = everlearn.run(make_net, EWC(**trial.values), digits(), epochs=2, batch_size=32, split="valid")
        assert trial.score == direct_run.average_accuracy
    extended = tune(make_net, EWC(), digits(), trials=8, workers=2, out=tmp_path / "pair", **settings)
    assert {str(trial) for trial in study.trials} <= {str(trial) for trial in extended.trials}
    assert len(extended.trials) == 8


@pytest.mark.slow
@NEEDS_FORK
def test_parallel_trials_are_pruned_and_dead_processes_restarted(tmp_path, monkeypatch):
    settings = {"trials": 20, "training": Training(epochs=3, batch_size=32), "fields": {"harm": (0, 0.4)}}
    train_trial = SharedStart.train_trial

    def die_once(self, values, on_rows):
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_trial(self, values, on_rows)

    monkeypatch.setattr(SharedStart, "train_trial", die_once)
    study = tune(make_net, Harmful(), digits(), **settings, out=tmp_path, workers=2)
    assert (tmp_path / "died").exists() and len(study.trials) == 20
    assert study.best.values["harm"] < 0.05
    assert any("pruned after task" in trial.failure for trial in study.trials)


@dataclass(eq=False)
class KilledIfStrong(EWC):
    """Kills its process if its strength is large, until a file exists."""

    allowed: str = ""

    def after_step(self, model):
        super().after_step(model)
        self._steps = getattr(self, "_steps", 0) + 1
        if self.strength != "auto" and self.strength > 1e5 and self._steps > 3 and not Path(self.allowed).exists():
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@NEEDS_FORK
def test_trial_whose_process_keeps_dying_is_postponed(tmp_path):
    folder = tmp_path / "study"
    with pytest.raises(WorkerLost, match=r"1 of 3 trials were lost .its process has died 3 times.*repeat the command"):
        run_study(folder, str(tmp_path / "allowed"), workers=2, method=KilledIfStrong)
    assert [*(folder / "trials").rglob("*.checkpoint")]
    (tmp_path / "allowed").touch()
    resumed = run_study(folder, str(tmp_path / "allowed"), workers=2, method=KilledIfStrong)
    reference = run_study(tmp_path / "reference", str(tmp_path / "allowed"), method=KilledIfStrong)
    assert {str(trial) for trial in resumed.trials} == {str(trial) for trial in reference.trials}
    assert len(resumed.trials) == 3
    assert not [*folder.rglob("*.checkpoint*")]


def test_worker_processes_end_with_parent(tmp_path, monkeypatch, check_workers_end):
    def sleep(self, values, on_rows):
        (tmp_path / f"pid {os.getpid()}").touch()
        time.sleep(600)

    monkeypatch.setattr(SharedStart, "train_trial", sleep)
    assert check_workers_end(
        lambda: tune(make_net, EWC(), digits(), trials=4, training=TRAINING, out=tmp_path / "study", workers=2)
    )
    assert (tmp_path / "study" / "study.lock").exists()
    monkeypatch.undo()
    assert len(tune(make_net, EWC(), digits(), trials=2, training=TRAINING, out=tmp_path / "study").trials) >= 2


def test_error_in_worker_is_raised_in_parent(tmp_path):
    class Wrong(Harmful):
        def end_task(self, model, task):
            raise TypeError("not supported")

    with pytest.raises(TypeError, match="not supported"):
        tune(make_net, Wrong(), digits(), trials=4, training=TRAINING, out=tmp_path, workers=2)
