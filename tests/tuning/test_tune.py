"""Trials equal direct runs; scores, pruning and arguments."""

import pytest
import torch

import everlearn
from everlearn import DER, EWC, L2, LwF, nets, streams
from everlearn.trainer.settings import Training
from everlearn.tuning import tune
from everlearn.tuning.search_space import with_values
from tests.tuning.studies import TRAINING, Harmful, digits, make_net


@pytest.mark.parametrize(("method", "field", "values"), [(EWC(), "strength", (1, 1e6)), (DER(50), "alpha", (0.1, 2))])
def test_trial_equals_direct_run(method, field, values, tmp_path):
    study = tune(
        make_net, method, digits(), fields={field: values}, trials=3, prune=False, training=TRAINING, out=tmp_path
    )
    results = {result.config["fields"]: result for result in everlearn.results.load(tmp_path / "trials")}
    for trial in study.trials:
        trial_method = with_values(method, study.dimensions, list(trial.values.values()))
        direct_run = everlearn.run(make_net, trial_method, digits(), epochs=2, batch_size=32, split="valid")
        result = results[repr(trial_method)]
        assert (direct_run.accuracy == result.accuracy).all()
        assert direct_run.config == result.config
        assert trial.score == direct_run.average_accuracy
    assert study.best.score == max(trial.score for trial in study.trials)
    assert getattr(study.method, field) == study.best.values[field]


def test_hopeless_trials_are_pruned(tmp_path):
    settings = {"trials": 12, "training": Training(epochs=5, batch_size=32), "fields": {"harm": (0, 0.4)}}
    study = tune(make_net, Harmful(), digits(), **settings, out=tmp_path)
    pruned_trials = [trial for trial in study.trials if trial.score is None]
    assert study.best.values["harm"] < 0.05
    assert pruned_trials
    assert all("pruned after task" in trial.failure and trial.values["harm"] > 0.05 for trial in pruned_trials)
    assert not [*tmp_path.rglob("*.checkpoints")]


def test_diverged_trial_does_not_end_study(tmp_path):
    study = tune(
        make_net, LwF(), digits(), fields={"strength": (1e-3, 1e30)}, trials=3, training=TRAINING, out=tmp_path,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    assert study.best.score is not None
    assert any("loss is nan" in trial.failure for trial in study.trials)


def test_finite_choices_are_all_tried(tmp_path):
    study = tune(
        make_net, EWC(), digits(), fields={"mode": None}, trials=5, training=TRAINING, out=tmp_path / "options"
    )
    assert [trial.values["mode"] for trial in study.trials] == ["separate", "online"]
    study = tune(
        make_net,
        DER(),
        digits(),
        fields={"capacity": (10, 12)},
        trials=5,
        training=TRAINING,
        out=tmp_path / "numbers",
    )
    assert sorted(trial.values["capacity"] for trial in study.trials) == [10, 11, 12]


def test_incompatible_fields_fail_only_their_trial(tmp_path):
    fields = {"mode": None, "decay": None}
    study = tune(make_net, EWC(), digits(), fields=fields, trials=6, training=TRAINING, out=tmp_path)
    assert study.best.score is not None
    assert any("use mode='online'" in trial.failure for trial in study.trials)
    with pytest.raises(ValueError, match="online"):
        tune(make_net, EWC(mode="separate"), digits(), fields={"decay": (0.5, 0.9)}, trials=2, out=tmp_path / "none")
    assert not (tmp_path / "none" / "study.db").exists()


def test_extended_study_tries_new_values(tmp_path):
    settings = {"fields": {"strength": None, "prior": (0.0001, 0.1)}, "training": TRAINING, "out": tmp_path}
    tune(make_net, EWC(), digits(), trials=3, **settings)
    study = tune(make_net, EWC(), digits(), trials=6, **settings)
    assert len({str(sorted(trial.values.items())) for trial in study.trials}) == 6


def test_online_stream_gives_no_warning(tmp_path):
    (x, y), test = streams.digits_data()
    stream = streams.online(streams.split((x, y), test, tasks=5, scenario="domain", valid=0.2), chunk=50)
    study = tune(make_net, L2(), stream.first(2), trials=5, training=Training(batch_size=10), out=tmp_path)
    assert len(study.trials) == 5


def test_scores_are_averaged_over_seeds(tmp_path):
    seeds = []

    def stream(seed):
        seeds.append(seed)
        return digits()

    training = Training(epochs=2, batch_size=32, seed=5)
    study = tune(make_net, EWC(), stream, trials=1, seeds=2, training=training, out=tmp_path)
    results = everlearn.results.load(tmp_path / "trials")
    assert seeds == [5, 6] and sorted(result.config["seed"] for result in results) == [5, 6]
    assert study.best.score == pytest.approx(sum(result.average_accuracy for result in results) / 2)


@pytest.mark.parametrize(
    ("method", "stream", "message"),
    [
        (EWC, digits, "A method such as"),
        (EWC(), lambda: [1], "must be a Stream"),
        (EWC(), lambda: digits().first(1), "at least two tasks"),
    ],
)
def test_invalid_arguments_are_refused(method, stream, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        tune(make_net, method, stream(), out=tmp_path)


def test_trained_method_is_refused(tmp_path):
    method = LwF()
    everlearn.train(make_net((64,), 2), method, digits()[0])
    with pytest.raises(ValueError, match="has learned already"):
        tune(make_net, method, digits(), out=tmp_path)


def test_stream_without_validation_data_is_refused(small_stream, tmp_path):
    with pytest.raises(ValueError, match=r"make the stream with valid=0.1"):
        tune(nets.mlp, EWC(), small_stream(), out=tmp_path)


def test_torchrun_is_refused_with_alternatives(tmp_path, run_two_processes):
    def tune_with_torchrun():
        with pytest.raises(ValueError, match=r"2 processes of torchrun: .*--workers.*--cluster"):
            tune(make_net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path / "study")

    run_two_processes(tune_with_torchrun)
    assert not (tmp_path / "study").exists()
