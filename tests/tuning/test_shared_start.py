"""Trials share the first task, where their fields do not affect it."""

import gc
import weakref
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
import torch

import everlearn
from everlearn import DER, EWC, METHODS
from everlearn.runtime.randomness import get_random_states, restore_random_states
from everlearn.trainer.settings import Training, adam
from everlearn.trainer.stream_training import StreamTraining
from everlearn.trainer.trackers import Trackers
from everlearn.tuning import Search, tune
from tests.tuning.studies import (
    TRAINING,
    digits,
    make_net,
)


@pytest.mark.parametrize(("method", "times"), [(EWC(), 1), (DER(50), 3)])
def test_first_task_is_trained_once_if_fields_do_not_affect_it(method, times, tmp_path, monkeypatch):
    begun_tasks = []
    begin_task = type(method).begin_task
    monkeypatch.setattr(
        type(method),
        "begin_task",
        lambda self, model, task: (begun_tasks.append(task.id), begin_task(self, model, task)),
    )
    tune(make_net, method, digits(), trials=3, prune=False, training=TRAINING, out=tmp_path)
    assert begun_tasks.count(0) == times and begun_tasks.count(1) == begun_tasks.count(2) == 3


LATE_FIELDS = [
    (name, f.name, extra)
    for name, kind in METHODS.items()
    for f in fields(kind)
    for extra in get_args(get_type_hints(kind, include_extras=True)[f.name])
    if isinstance(extra, Search) and extra.late
]


def nested_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nested_equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(nested_equal, a, b))
    return a == b


def train_first_task(method, scenario="task"):
    stream = digits(scenario)
    model = make_net(stream.inputs, stream.outputs)
    training = StreamTraining(model, method, stream, TRAINING, adam, True, "valid", Trackers())
    training.train()
    return training


@pytest.mark.parametrize(("name", "field", "search"), LATE_FIELDS, ids=[f"{n}.{f}" for n, f, _ in LATE_FIELDS])
def test_late_fields_do_not_affect_first_task(name, field, search):
    end_states = []
    for value in (search.low, search.high):
        options = {"mode": "online"} if (name, field) == ("ewc", "decay") else {}
        method = METHODS[name](**options, **{field: value})
        with everlearn.runtime.randomness.seeded(0):
            training = train_first_task(method)
        end_states.append((training.model.state_dict(), method.state_dict()))
    assert nested_equal(*end_states)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_fork_trains_as_original(name):
    with everlearn.runtime.randomness.seeded(0):
        training = train_first_task(METHODS[name]())
        random_states = get_random_states()
        fork = training.fork()
        for branch in (training, fork):
            restore_random_states(random_states)
            branch.close()
            branch.train()
            branch.close()
    assert training.rows == fork.rows
    assert nested_equal(training.model.state_dict(), fork.model.state_dict())
    assert nested_equal(training.method.state_dict(), fork.method.state_dict())
    assert fork.stream is training.stream


class Hooked(torch.nn.Sequential):
    """A forward hook whose closure a deep copy would share with the original."""

    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        self.gain = torch.nn.Parameter(torch.ones(1))
        self[1].register_forward_hook(lambda module, inputs, outputs: outputs * self.gain)


def test_model_that_cannot_be_copied_is_not_forked(tmp_path):
    with pytest.warns(UserWarning, match="still refers to the original"):
        study = tune(Hooked, EWC(), digits(), trials=2, prune=False, training=TRAINING, out=tmp_path)
    for trial in study.trials:
        direct_run = everlearn.run(
            Hooked, EWC(trial.values["strength"]), digits(), epochs=2, batch_size=32, split="valid"
        )
        assert trial.score == direct_run.average_accuracy


def test_shared_module_is_refused(tmp_path):
    model = make_net((64,), 2)
    with pytest.raises(ValueError, match="same module at every call"):
        tune(lambda: model, DER(20), digits(), trials=2, training=TRAINING, out=tmp_path)


@pytest.mark.slow
def test_models_of_finished_trials_are_released(tmp_path):
    references = []
    num_alive = []

    def make_model(inputs, outputs):
        gc.collect()
        num_alive.append(sum(model() is not None for model in references))
        model = make_net(inputs, outputs)
        references.append(weakref.ref(model))
        return model

    tune(make_model, DER(20), digits(), trials=5, prune=False, training=Training(batch_size=64), out=tmp_path)
    assert len(references) == 6
    assert max(num_alive) <= 2, "the model with the initial weights, and that of the last trial"
