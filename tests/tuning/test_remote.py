"""Trials that run on other machines."""

import pytest

import everlearn
from everlearn import EWC
from everlearn.tuning import WorkerLost, tune
from tests.tuning.studies import TRAINING, digits, make_net


def run_all(folder, runs):
    """Yield the outcome of every run, as an executor of a cluster does."""
    for i, (method, seed) in enumerate(runs):
        if method.strength != "auto" and method.strength > 1e5:
            yield i, FloatingPointError("the loss is nan")
        else:
            settings = {"epochs": 2, "batch_size": 32, "seed": seed, "split": "valid"}
            yield i, everlearn.run(make_net, method, digits(), out=folder, **settings)


@pytest.mark.slow
def test_remote_trials_equal_local_trials(tmp_path):
    settings = {"training": TRAINING, "prune": False, "fields": {"strength": (1, 1e6)}, "seeds": 2, "trials": 4}
    local = tune(make_net, EWC(), digits(), out=tmp_path / "local", **settings)
    num_requested = []

    def run_remotely(runs):
        num_requested.append(len(runs))
        return run_all(tmp_path / "remote" / "trials", runs)

    remote = tune(make_net, EWC(), digits(), out=tmp_path / "remote", workers=3, run_remotely=run_remotely, **settings)
    assert num_requested == [6, 2]
    local_trials = {trial.values["strength"]: trial for trial in local.trials}
    assert {trial.failure for trial in remote.trials if trial.values["strength"] > 1e5} == {"the loss is nan"}
    for trial in remote.trials:
        if trial.score is not None and trial.values["strength"] in local_trials:
            assert trial == local_trials[trial.values["strength"]]
    assert sum(trial.score is not None for trial in remote.trials) >= 2


@pytest.mark.slow
def test_lost_remote_runs_are_repeated(tmp_path):
    settings = {"training": TRAINING, "prune": False, "fields": {"strength": (1, 1e4)}, "seeds": 2, "trials": 4}
    reference = tune(make_net, EWC(), digits(), out=tmp_path / "reference", **settings)
    num_requested = []

    def run_remotely(runs, lost_runs=()):
        num_requested.append(len(runs))
        for i, outcome in run_all(tmp_path / "lost" / "trials", runs):
            yield i, WorkerLost("its node is gone") if i in lost_runs else outcome

    def run_study(**failures):
        options = {"out": tmp_path / "lost", "workers": 2, "run_remotely": lambda runs: run_remotely(runs, **failures)}
        return tune(make_net, EWC(), digits(), **options, **settings)

    with pytest.raises(
        WorkerLost, match=r"The processes of 2 of 4 trials were lost .its node is gone.: repeat the command"
    ):
        run_study(lost_runs=(0, 4))  # one seed of a trial in each round
    assert num_requested == [4, 4]
    study = run_study()
    assert num_requested == [4, 4, 4], "only lost runs are repeated"
    assert {trial.values["strength"] for trial in study.trials} >= {
        trial.values["strength"] for trial in reference.trials[:3]
    }
    assert len(study.trials) == 4 and all(trial in study.trials for trial in reference.trials[:3])


def test_study_without_finished_remote_runs_fails(tmp_path):
    settings = {"training": TRAINING, "trials": 6, "workers": 2, "out": tmp_path}
    with pytest.raises(WorkerLost, match="3 of 6 trials"):
        tune(
            make_net,
            EWC(),
            digits(),
            run_remotely=lambda runs: [(i, WorkerLost("gone")) for i in range(len(runs))],
            **settings,
        )
    outcomes = [FloatingPointError("the loss is nan"), WorkerLost("gone")]
    with pytest.raises(ValueError, match=r"Every trial has failed.*nan"):
        tune(
            make_net, EWC(), digits(), seeds=2, run_remotely=lambda runs: enumerate(outcomes * (len(runs) // 2)),
            **settings | {"out": tmp_path / "mixed"},
        )  # fmt: skip


def test_round_without_valid_values_starts_no_runs(tmp_path):
    def run_remotely(runs):
        assert runs
        return run_all(tmp_path / "trials", runs)

    method = EWC(decay=0.5, mode="online")
    settings = {"fields": {"mode": None}, "workers": 1, "training": TRAINING}
    study = tune(make_net, method, digits(), out=tmp_path, trials=2, run_remotely=run_remotely, **settings)
    assert [trial.score is None for trial in study.trials] == [True, False]


def test_remote_errors_are_raised_and_incompatible_fields_recorded(tmp_path):
    settings = {"training": TRAINING, "trials": 2, "workers": 2}

    for error in (TypeError, RuntimeError):
        with pytest.raises(error, match="not supported"):
            tune(
                make_net,
                EWC(),
                digits(),
                out=tmp_path,
                run_remotely=lambda runs, error=error: [(0, error("not supported"))],
                **settings,
            )
    study = tune(
        make_net, EWC(decay=0.5, mode="online"), digits(), out=tmp_path / "options", fields={"mode": None}, **settings,
        run_remotely=lambda runs: run_all(tmp_path / "options" / "trials", runs),
    )  # fmt: skip
    assert {trial.values["mode"]: trial.score is None for trial in study.trials} == {"separate": True, "online": False}
