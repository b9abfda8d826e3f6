"""Tuning: trials are runs, share what is identical, and a study goes on where it was stopped."""

import gc
import multiprocessing
import os
import signal
import time
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import pytest
import torch
import yaml

import everlearn
from everlearn import DER, ER, EWC, L2, METHODS, SI, LwF, Method, nets, streams
from everlearn.cli.app import start
from everlearn.core.hyperparameters import Range
from everlearn.runtime import files
from everlearn.runtime.randomness import get_random_states, restore_random_states
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.settings import Training, adam
from everlearn.trainer.stream_training import StreamTraining
from everlearn.trainer.trackers import Trackers
from everlearn.tuning import Search, WorkerLost, tune
from everlearn.tuning.search_space import find_dimensions, with_values
from everlearn.tuning.shared_start import SharedStart
from everlearn.tuning.trials import StudyRunner

pytest.importorskip("optuna")
TRAINING = Training(epochs=2, batch_size=32)


def digits(scenario="domain"):
    (x, y), (x_test, y_test) = streams.digits_data()
    train, test = (x[:600], y[:600]), (x_test[:200], y_test[:200])
    return streams.split(train, test, tasks=3, scenario=scenario, class_order=range(6), valid=0.2)


def net(inputs, outputs):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.Dropout(0.3), torch.nn.Linear(20, outputs)
    )


@dataclass(eq=False)
class Harmful(Method):
    """Spoils the weights after every task."""

    harm: Annotated[float, Range(0), Search(0, 1, log=False, late=True)] = 0.0

    def end_task(self, model, task):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(self.harm * torch.randn_like(p))


@pytest.mark.parametrize(("method", "field", "values"), [(EWC(), "strength", (1, 1e6)), (DER(50), "alpha", (0.1, 2))])
def test_a_trial_is_the_run_it_stands_for(method, field, values, tmp_path):
    found = tune(net, method, digits(), fields={field: values}, trials=3, prune=False, training=TRAINING, out=tmp_path)
    kept = {r.config["fields"]: r for r in everlearn.results.load(tmp_path / "trials")}
    for trial in found.trials:
        again = with_values(method, found.dimensions, list(trial.values.values()))
        alone = everlearn.run(net, again, digits(), epochs=2, batch_size=32, split="valid")
        result = kept[repr(again)]
        assert (alone.accuracy == result.accuracy).all()
        assert alone.config == result.config
        assert trial.score == alone.average_accuracy
    assert found.best.score == max(t.score for t in found.trials)
    assert getattr(found.method, field) == found.best.values[field]


@pytest.mark.parametrize(("method", "times"), [(EWC(), 1), (DER(50), 3)])
def test_the_first_task_is_trained_once_where_nothing_acts_on_it(method, times, tmp_path, monkeypatch):
    begun = []
    begin = type(method).begin_task
    monkeypatch.setattr(
        type(method), "begin_task", lambda m, model, task: (begun.append(task.id), begin(m, model, task))
    )
    tune(net, method, digits(), trials=3, prune=False, training=TRAINING, out=tmp_path)
    assert begun.count(0) == times and begun.count(1) == begun.count(2) == 3


LATE = [
    (name, f.name, extra)
    for name, kind in METHODS.items()
    for f in fields(kind)
    for extra in get_args(get_type_hints(kind, include_extras=True)[f.name])
    if isinstance(extra, Search) and extra.late
]


def test_a_boundary_of_ones_own_is_no_longer_late(tmp_path):
    (d,) = find_dimensions(SI(consolidate_every=3))
    assert not d.search.late and find_dimensions(SI())[0].search.late
    found = tune(net, SI(consolidate_every=3), digits(), trials=2, prune=False, training=TRAINING, out=tmp_path)
    for trial in found.trials:
        alone = everlearn.run(
            net, SI(trial.values["strength"], consolidate_every=3), digits(), epochs=2, batch_size=32, split="valid"
        )
        assert trial.score == alone.average_accuracy


class Hooked(torch.nn.Sequential):
    """A gain that a hook applies, by a closure that a copy goes on sharing."""

    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        self.gain = torch.nn.Parameter(torch.ones(1))
        self[1].register_forward_hook(lambda m, i, o: o * self.gain)


def test_what_a_copy_would_share_is_not_forked(tmp_path):
    with pytest.warns(UserWarning, match="still refers to the original"):
        found = tune(Hooked, EWC(), digits(), trials=2, prune=False, training=TRAINING, out=tmp_path)
    for trial in found.trials:
        alone = everlearn.run(Hooked, EWC(trial.values["strength"]), digits(), epochs=2, batch_size=32, split="valid")
        assert trial.score == alone.average_accuracy


def test_one_module_for_all_trials_is_refused(tmp_path):
    one = net((64,), 2)
    with pytest.raises(ValueError, match="same module at every call"):
        tune(lambda: one, DER(20), digits(), trials=2, training=TRAINING, out=tmp_path)


@pytest.mark.slow
def test_models_of_trials_that_are_over_are_let_go(tmp_path):
    made, most = [], []

    def make(inputs, outputs):
        gc.collect()
        most.append(sum(model() is not None for model in made))
        model = net(inputs, outputs)
        made.append(weakref.ref(model))
        return model

    tune(make, DER(20), digits(), trials=5, prune=False, training=Training(batch_size=64), out=tmp_path)
    assert len(made) == 6 and max(most) <= 2, "the one with the first weights, and the last trial's"


@pytest.mark.parametrize(("name", "field", "search"), LATE, ids=[f"{n}.{f}" for n, f, _ in LATE])
def test_what_is_said_to_act_late_does_nothing_before_the_first_task_has_ended(name, field, search):
    ends = []
    for value in (search.low, search.high):
        given = {"mode": "online"} if (name, field) == ("ewc", "decay") else {}
        method = METHODS[name](**given, **{field: value})
        with everlearn.runtime.randomness.seeded(0):
            course = begun(method)
        ends.append((course.model.state_dict(), method.state_dict()))
    assert same(*ends)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def begun(method, scenario="task"):
    stream = digits(scenario)
    model = net(stream.inputs, stream.outputs)
    course = StreamTraining(model, method, stream, TRAINING, adam, True, "valid", Trackers())
    course.train()
    return course


@pytest.mark.parametrize("name", METHODS)
def test_a_fork_goes_where_its_original_goes(name):
    with everlearn.runtime.randomness.seeded(0):
        course = begun(METHODS[name]())
        random, other = get_random_states(), course.fork()
        for one in (course, other):
            restore_random_states(random)
            one.close()
            one.train()
            one.close()
    assert course.rows == other.rows
    assert same(course.model.state_dict(), other.model.state_dict())
    assert same(course.method.state_dict(), other.method.state_dict())
    assert other.stream is course.stream


def test_a_study_goes_on_where_it_was_stopped(tmp_path):
    settings = {"training": TRAINING, "prune": False}
    whole = tune(net, EWC(), digits(), trials=4, out=tmp_path / "whole", **settings)

    class Stopped(KeyboardInterrupt):
        pass

    calls = []

    def broken(self, model, task):
        calls.append(task.id)
        if len(calls) == 5:  # in the second trial
            raise Stopped
        return end(self, model, task)

    end = EWC.end_task
    EWC.end_task = broken
    try:
        with pytest.raises(Stopped):
            tune(net, EWC(), digits(), trials=4, out=tmp_path / "half", **settings)
    finally:
        EWC.end_task = end
    again = tune(net, EWC(), digits(), trials=4, out=tmp_path / "half", **settings)
    assert {str(t) for t in again.trials} == {str(t) for t in whole.trials}


@dataclass(eq=False)
class Mortal(EWC):
    """Ends its process in a task, once the steps are used up that a file allows."""

    allowed: str = ""

    def after_step(self, model):
        super().after_step(model)
        use_up(self.allowed)


def use_up(allowed):
    left = Path(allowed).read_bytes() if allowed else b""
    if left:
        Path(allowed).write_bytes(left[1:])
        if len(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


STEPS = CheckpointEvery(steps=2)


def study(folder, allowed, workers=1, method=Mortal):
    settings = {"trials": 3, "prune": False, "training": TRAINING, "fields": {"strength": (1, 1e6)}}
    return tune(net, method(allowed=allowed), digits(), workers=workers, checkpoint=STEPS, out=folder, **settings)


SLOW = pytest.mark.slow


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed")
@pytest.mark.parametrize(  # in the first task, which all trials share; in the first trial; in the second
    "steps", [pytest.param(5, marks=SLOW), 25, pytest.param(40, marks=SLOW)]
)
def test_a_killed_study_goes_on_within_its_trial(steps, tmp_path):
    (tmp_path / "allowed").write_bytes(b"." * steps)
    allowed = str(tmp_path / "allowed")
    child = multiprocessing.get_context("fork").Process(target=study, args=(tmp_path / "killed", allowed))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [*(tmp_path / "killed").rglob("*.checkpoint")]
    (tmp_path / "allowed").write_bytes(b"." * 1000)
    again = study(tmp_path / "killed", allowed)
    taken = 1000 - len((tmp_path / "allowed").read_bytes())
    (tmp_path / "allowed").write_bytes(b"." * 1000)
    whole = study(tmp_path / "whole", allowed)
    needed = 1000 - len((tmp_path / "allowed").read_bytes())
    assert {str(t) for t in again.trials} == {str(t) for t in whole.trials}
    assert needed - steps <= taken <= needed - steps + 2 + 8 * (steps > 8), "what was learned is not learned again"
    assert not [*(tmp_path / "killed").rglob("*.checkpoint*")]
    accuracies = [
        {r.config["fields"]: r.accuracy.tolist() for r in everlearn.results.load(tmp_path / name / "trials")}
        for name in ("killed", "whole")
    ]
    assert accuracies[0] == accuracies[1]


@dataclass(eq=False)
class MortalHarm(Harmful):
    """As mortal."""

    allowed: str = ""

    def after_step(self, model):
        use_up(self.allowed)


def pruned(folder, allowed):
    settings = {"trials": 10, "training": Training(epochs=3, batch_size=32), "fields": {"harm": (0, 0.4)}}
    return tune(net, MortalHarm(allowed=allowed), digits(), checkpoint=STEPS, out=folder, **settings)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed")
@pytest.mark.parametrize("steps", [pytest.param(50, marks=SLOW), 95, pytest.param(115, marks=SLOW)])
def test_a_killed_trial_meets_the_others_that_it_would_have_met(steps, tmp_path):
    (tmp_path / "allowed").write_bytes(b"")
    whole = pruned(tmp_path / "whole", str(tmp_path / "allowed"))
    assert any("pruned" in t.failure for t in whole.trials)
    (tmp_path / "allowed").write_bytes(b"." * steps)
    child = multiprocessing.get_context("fork").Process(
        target=pruned, args=(tmp_path / "killed", str(tmp_path / "allowed"))
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (tmp_path / "allowed").write_bytes(b"")
    again = pruned(tmp_path / "killed", str(tmp_path / "allowed"))
    assert [str(t) for t in again.trials] == [str(t) for t in whole.trials]


def test_a_trial_that_was_killed_when_it_was_given_up_is_given_up(tmp_path, monkeypatch):
    def stopped(self, trial, outcome):
        raise KeyboardInterrupt

    settings = {"trials": 2, "training": TRAINING, "fields": {"harm": (0, 0.4)}, "out": tmp_path}
    with monkeypatch.context() as patched:
        patched.setattr("everlearn.tuning.trials._is_hopeless", lambda study, number, score, step: step == 2)
        patched.setattr("everlearn.tuning.trials.StudyRunner._record", stopped)
        with pytest.raises(KeyboardInterrupt):
            tune(net, Harmful(), digits(), **settings)
    found = tune(net, Harmful(), digits(), **settings)
    assert [t.failure for t in found.trials] == ["pruned after task 2", ""]


class Killed(BaseException):
    """As a process that ends here."""


def kill_at_write(monkeypatch, at):
    """End everything before the n-th time that a study is written to, counted from 0; the writes so far."""
    optuna = pytest.importorskip("optuna")
    writes = []

    def dying(name):
        original = getattr(optuna.Study, name)

        def write(self, *args, **kwargs):
            if len(writes) == at:
                raise Killed
            writes.append(name)
            return original(self, *args, **kwargs)

        return write

    for name in ("set_user_attr", "add_trial"):
        monkeypatch.setattr(optuna.Study, name, dying(name))
    return writes


def test_killed_while_it_queues_its_first_values_nothing_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(
        StudyRunner, "_train", lambda *_: {"old": 0.5, "new": 0.5, "score": 0.5}
    )  # what is tried matters alone
    stream = digits()

    def study(name, trials):
        return tune(net, EWC(), stream, trials=trials, training=TRAINING, out=tmp_path / name)

    first = 3
    with monkeypatch.context() as patch:
        writes = kill_at_write(patch, -1)
        whole = {str(t.values) for t in study("whole", first).trials}
    assert writes.count("add_trial") == first == len(whole)
    for at in range(len(writes)):
        with monkeypatch.context() as patch:
            kill_at_write(patch, at)
            with pytest.raises(Killed):
                study(f"killed-{at}", first)
        again = study(f"killed-{at}", first)
        assert {str(t.values) for t in again.trials} == whole, f"killed before write {at}: {writes[at]}"


@pytest.mark.parametrize("name", ["a?b", "a%3Fb {c}#d"])
def test_a_study_lies_where_it_was_said_whatever_the_folder_is_called(name, tmp_path, monkeypatch):
    monkeypatch.setattr(StudyRunner, "_train", lambda *_: {"old": 0.5, "new": 0.5, "score": 0.5})
    for trials in (1, 2):
        found = tune(net, EWC(), digits(), trials=trials, training=TRAINING, out=tmp_path / name)
        assert len(found.trials) == trials
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "study.db").read_bytes().startswith(b"SQLite format 3")


def test_hopeless_trials_are_given_up_and_the_best_is_found(tmp_path):
    settings = {"trials": 12, "training": Training(epochs=5, batch_size=32), "fields": {"harm": (0, 0.4)}}
    found = tune(net, Harmful(), digits(), **settings, out=tmp_path)
    given_up = [t for t in found.trials if t.score is None]
    assert found.best.values["harm"] < 0.05
    assert given_up and all("pruned after task" in t.failure and t.values["harm"] > 0.05 for t in given_up)
    assert not [*tmp_path.rglob("*.checkpoints")]


def test_a_strength_that_is_too_much_for_the_optimizer_is_no_end(tmp_path):
    found = tune(
        net, L2(), digits(), fields={"strength": (1e-3, 1e30)}, trials=3, training=TRAINING, out=tmp_path,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    assert found.best.score is not None
    assert any("loss is nan" in t.failure for t in found.trials)


def test_words_and_few_whole_numbers_are_all_tried(tmp_path):
    found = tune(net, EWC(), digits(), fields={"mode": None}, trials=5, training=TRAINING, out=tmp_path / "words")
    assert [t.values["mode"] for t in found.trials] == ["separate", "online"]
    found = tune(
        net, DER(), digits(), fields={"capacity": (10, 12)}, trials=5, training=TRAINING, out=tmp_path / "whole"
    )
    assert sorted(t.values["capacity"] for t in found.trials) == [10, 11, 12]


def test_fields_that_do_not_go_together_are_given_up_and_the_others_go_on(tmp_path):
    fields = {"mode": None, "decay": None}
    found = tune(net, EWC(), digits(), fields=fields, trials=6, training=TRAINING, out=tmp_path)
    assert found.best.score is not None
    assert any("use mode='online'" in t.failure for t in found.trials)
    with pytest.raises(ValueError, match="online"):
        tune(net, EWC(mode="separate"), digits(), fields={"decay": (0.5, 0.9)}, trials=2, out=tmp_path / "none")
    assert not (tmp_path / "none" / "study.db").exists()


def test_a_study_of_two_fields_goes_on_with_new_values(tmp_path):
    settings = {"fields": {"strength": None, "prior": (0.0001, 0.1)}, "training": TRAINING, "out": tmp_path}
    tune(net, EWC(), digits(), trials=3, **settings)
    found = tune(net, EWC(), digits(), trials=6, **settings)
    assert len({str(sorted(t.values.items())) for t in found.trials}) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials side by side are forked")
def test_side_by_side_a_trial_is_what_it_is_alone(tmp_path):
    settings = {"training": TRAINING, "prune": False}
    pair = tune(net, EWC(), digits(), trials=6, workers=2, out=tmp_path / "pair", **settings)
    assert len({t.values["strength"] for t in pair.trials}) == 6
    for trial in pair.trials:
        alone = everlearn.run(net, EWC(**trial.values), digits(), epochs=2, batch_size=32, split="valid")
        assert trial.score == alone.average_accuracy
    more = tune(net, EWC(), digits(), trials=8, workers=2, out=tmp_path / "pair", **settings)
    assert {str(t) for t in pair.trials} <= {str(t) for t in more.trials} and len(more.trials) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials side by side are forked")
def test_side_by_side_hopeless_ones_are_given_up_and_a_dead_process_is_tried_again(tmp_path, monkeypatch):
    settings = {"trials": 20, "training": Training(epochs=3, batch_size=32), "fields": {"harm": (0, 0.4)}}
    train_trial = SharedStart.train_trial

    def dies(self, values, on_rows):
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_trial(self, values, on_rows)

    monkeypatch.setattr(SharedStart, "train_trial", dies)
    found = tune(net, Harmful(), digits(), **settings, out=tmp_path, workers=2)
    assert (tmp_path / "died").exists() and len(found.trials) == 20
    assert found.best.values["harm"] < 0.05
    assert any("pruned after task" in t.failure for t in found.trials)


@dataclass(eq=False)
class Fatal(EWC):
    """Ends its process where it is strong, until a file allows it."""

    allowed: str = ""

    def after_step(self, model):
        super().after_step(model)
        self._steps = getattr(self, "_steps", 0) + 1
        if self.strength > 1e5 and self._steps > 3 and not Path(self.allowed).exists():
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials side by side are forked")
def test_side_by_side_a_trial_that_dies_again_and_again_is_left_for_later(tmp_path):
    out = tmp_path / "study"
    with pytest.raises(WorkerLost, match=r"1 of 3 trials were lost .its process has died 3 times.*repeat the command"):
        study(out, str(tmp_path / "allowed"), workers=2, method=Fatal)
    assert [*(out / "trials").rglob("*.checkpoint")]
    (tmp_path / "allowed").touch()
    again = study(out, str(tmp_path / "allowed"), workers=2, method=Fatal)
    whole = study(tmp_path / "whole", str(tmp_path / "allowed"), method=Fatal)
    assert {str(t) for t in again.trials} == {str(t) for t in whole.trials} and len(again.trials) == 3
    assert not [*out.rglob("*.checkpoint*")]


def test_trials_side_by_side_end_with_their_command(tmp_path, monkeypatch, check_workers_end):
    def endless(self, values, on_rows):
        (tmp_path / f"pid {os.getpid()}").touch()
        time.sleep(600)

    monkeypatch.setattr(SharedStart, "train_trial", endless)
    assert check_workers_end(
        lambda: tune(net, EWC(), digits(), trials=4, training=TRAINING, out=tmp_path / "study", workers=2)
    )
    assert (tmp_path / "study" / "study.lock").exists()
    monkeypatch.undo()
    assert len(tune(net, EWC(), digits(), trials=2, training=TRAINING, out=tmp_path / "study").trials) >= 2


def test_side_by_side_an_error_is_raised_here(tmp_path):
    class Wrong(Harmful):
        def end_task(self, model, task):
            raise TypeError("not like this")

    with pytest.raises(TypeError, match="not like this"):
        tune(net, Wrong(), digits(), trials=4, training=TRAINING, out=tmp_path, workers=2)


def elsewhere(folder, runs):
    """As a cluster would: each a run of its own."""
    for i, (method, seed) in enumerate(runs):
        if method.strength > 1e5:
            yield i, FloatingPointError("the loss is nan")
        else:
            yield i, everlearn.run(net, method, digits(), epochs=2, batch_size=32, seed=seed, split="valid", out=folder)


def test_elsewhere_a_trial_is_what_it_is_here(tmp_path):
    settings = {"training": TRAINING, "prune": False, "fields": {"strength": (1, 1e6)}, "seeds": 2, "trials": 4}
    here = tune(net, EWC(), digits(), out=tmp_path / "here", **settings)
    asked = []

    def runs(some):
        asked.append(len(some))
        return elsewhere(tmp_path / "there" / "trials", some)

    there = tune(net, EWC(), digits(), out=tmp_path / "there", workers=3, run_remotely=runs, **settings)
    assert asked == [6, 2]
    known = {t.values["strength"]: t for t in here.trials}
    assert {t.failure for t in there.trials if t.values["strength"] > 1e5} == {"the loss is nan"}
    for trial in there.trials:
        if trial.score is not None and trial.values["strength"] in known:
            assert trial == known[trial.values["strength"]]
    assert sum(t.score is not None for t in there.trials) >= 2


def test_elsewhere_a_machine_that_fails_costs_what_it_had_not_done(tmp_path):
    settings = {"training": TRAINING, "prune": False, "fields": {"strength": (1, 1e4)}, "seeds": 2, "trials": 4}
    whole = tune(net, EWC(), digits(), out=tmp_path / "whole", **settings)
    asked = []

    def runs(some, down=()):
        asked.append(len(some))
        for i, outcome in elsewhere(tmp_path / "lost" / "trials", some):
            yield i, WorkerLost("its node is gone") if i in down else outcome

    def again(**how):
        there = {"out": tmp_path / "lost", "workers": 2, "run_remotely": lambda some: runs(some, **how)}
        return tune(net, EWC(), digits(), **there, **settings)

    with pytest.raises(
        WorkerLost, match=r"The processes of 2 of 4 trials were lost .its node is gone.: repeat the command"
    ):
        again(down=(0, 4))  # a seed of a trial of each round
    assert asked == [4, 4]
    found = again()
    assert asked == [4, 4, 4], "those that were lost, and nothing else"
    assert {t.values["strength"] for t in found.trials} >= {t.values["strength"] for t in whole.trials[:3]}
    assert len(found.trials) == 4 and all(t in found.trials for t in whole.trials[:3])


def test_elsewhere_without_any_machine_nothing_is_chosen_from_nothing(tmp_path):
    settings = {"training": TRAINING, "trials": 6, "workers": 2, "out": tmp_path}
    with pytest.raises(WorkerLost, match="3 of 6 trials"):
        tune(
            net,
            EWC(),
            digits(),
            run_remotely=lambda runs: [(i, WorkerLost("gone")) for i in range(len(runs))],
            **settings,
        )
    mixed = [FloatingPointError("the loss is nan"), WorkerLost("gone")]
    with pytest.raises(ValueError, match=r"Every trial has failed.*nan"):
        tune(
            net, EWC(), digits(), seeds=2, run_remotely=lambda runs: enumerate(mixed * (len(runs) // 2)),
            **settings | {"out": tmp_path / "mixed"},
        )  # fmt: skip


def test_elsewhere_a_round_without_values_that_fit_is_no_round(tmp_path):
    def runs(some):
        assert some
        return elsewhere(tmp_path / "trials", some)

    method, settings = EWC(decay=0.5, mode="online"), {"fields": {"mode": None}, "workers": 1, "training": TRAINING}
    found = tune(net, method, digits(), out=tmp_path, trials=2, run_remotely=runs, **settings)
    assert [t.score is None for t in found.trials] == [True, False]


def test_elsewhere_an_error_of_the_method_is_raised_and_fields_that_do_not_fit_are_noted(tmp_path):
    settings = {"training": TRAINING, "trials": 2, "workers": 2}

    for error in (TypeError, RuntimeError):
        with pytest.raises(error, match="not like this"):
            tune(
                net,
                EWC(),
                digits(),
                out=tmp_path,
                run_remotely=lambda runs, error=error: [(0, error("not like this"))],
                **settings,
            )
    found = tune(
        net, EWC(decay=0.5, mode="online"), digits(), out=tmp_path / "words", fields={"mode": None}, **settings,
        run_remotely=lambda runs: elsewhere(tmp_path / "words" / "trials", runs),
    )  # fmt: skip
    assert {t.values["mode"]: t.score is None for t in found.trials} == {"separate": True, "online": False}


@SLOW
@pytest.mark.filterwarnings("ignore")  # of ray
@pytest.mark.enable_socket
def test_a_ray_cluster_finds_what_one_process_finds(tmp_path, capsys):
    ray = pytest.importorskip("ray")
    words = "tune --methods ewc --scenario domain --first 2 --epochs 1 --hidden 16 --threads 1 --trials 3 --no-prune"
    assert start([*words.split(), "--out", str(tmp_path / "here")]) == 0
    try:
        assert start([*words.split(), "--cluster", "ray", "--workers", "3", "--out", str(tmp_path / "there")]) == 0
    finally:
        ray.shutdown()
    one, two = (
        everlearn.results.load(tmp_path / place / "digits-domain-ewc" / "trials") for place in ("here", "there")
    )
    assert [r.config for r in one] == [r.config for r in two] and len(one) == 3
    assert all((a.accuracy == b.accuracy).all() for a, b in zip(one, two, strict=True))


def test_one_process_at_a_time(tmp_path):
    with files.exclusive_lock(tmp_path / "study.lock"), pytest.raises(ValueError, match="Another process"):
        tune(net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path)


def test_an_online_stream_is_tuned_without_a_warning(tmp_path):
    (x, y), test = streams.digits_data()
    stream = streams.online(streams.split((x, y), test, tasks=5, scenario="domain", valid=0.2), chunk=50)
    found = tune(net, L2(), stream.first(2), trials=5, training=Training(batch_size=10), out=tmp_path)
    assert len(found.trials) == 5


def test_several_seeds_are_averaged(tmp_path):
    made = []

    def stream(seed):
        made.append(seed)
        return digits()

    training = Training(epochs=2, batch_size=32, seed=5)
    found = tune(net, EWC(), stream, trials=1, seeds=2, training=training, out=tmp_path)
    kept = everlearn.results.load(tmp_path / "trials")
    assert made == [5, 6] and sorted(r.config["seed"] for r in kept) == [5, 6]
    assert found.best.score == pytest.approx(sum(r.average_accuracy for r in kept) / 2)


def test_fields_of_chains_words_and_ranges_of_ones_own():
    both = EWC() + LwF()
    assert [d.name for d in find_dimensions(both)] == ["EWC.strength", "LwF.strength"]
    chosen = find_dimensions(both, {"mode": None, "LwF.strength": (1, 2)})
    assert chosen[0].options == ("separate", "online") and (chosen[1].search.low, chosen[1].search.high) == (1, 2)
    new = with_values(both, chosen, ["online", 1.5])
    assert (new.methods[0].mode, new.methods[1].strength) == ("online", 1.5)
    assert (both.methods[0].mode, both.methods[1].strength) == ("separate", 1.0)


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (EWC(), {"strenght": None}, "'strenght' is no field that can be tuned: there are strength"),
        (EWC() + LwF(), {"strength": None}, "several fields"),
        (EWC(), {"strength": (2, 1)}, "low < high"),
        (EWC(), {"strength": (0, 1)}, "begins above 0"),
        (EWC(), {"strength": 5}, r"needs a range \(low, high\)"),
        (EWC(), {"strength": (1, 2, 3)}, r"needs a range \(low, high\)"),
        (EWC(), {}, "No field is named"),
        (ER(), {"capacity": (0.2, 20.5)}, "integer ends"),
        (EWC(), {"mode": (0, 1)}, "a range has no meaning"),
        (EWC(), {"prior": None}, "needs a range"),
        (Method(), None, "no field with a default range"),
    ],
)
def test_wrong_fields_are_refused(method, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tune(net, method, digits(), fields=fields, out=tmp_path)


@pytest.mark.parametrize(
    ("method", "stream", "message"),
    [
        (EWC, digits, "A method such as"),
        (EWC(), lambda: [1], "must be a Stream"),
        (EWC(), lambda: digits().first(1), "at least two tasks"),
    ],
)
def test_wrong_arguments_are_refused(method, stream, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        tune(net, method, stream(), out=tmp_path)


def test_a_method_that_has_learned_is_refused(tmp_path):
    method = LwF()
    everlearn.train(net((64,), 2), method, digits()[0])
    with pytest.raises(ValueError, match="has learned already"):
        tune(net, method, digits(), out=tmp_path)


def test_a_stream_without_validation_data_is_refused(small_stream, tmp_path):
    with pytest.raises(ValueError, match=r"make the stream with valid=0.1"):
        tune(nets.mlp, EWC(), small_stream(), out=tmp_path)


def test_a_study_of_another_question_and_a_foreign_file_are_refused(tmp_path):
    tune(net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path)
    others = [
        {"training": Training(epochs=1)},
        {"training": TRAINING, "fields": {"strength": (5, 50)}},
        {"training": TRAINING, "fields": {"mode": None}},
    ]
    for other in others:
        with pytest.raises(ValueError, match="other data, settings or fields"):
            tune(net, EWC(), digits(), trials=1, out=tmp_path, **other)
    tune(net, EWC(strength=3.0), digits(), trials=1, training=TRAINING, out=tmp_path)  # where it starts is no matter
    with pytest.raises(ValueError, match="other data, settings or fields"):
        tune(net, EWC(prior=0.1), digits(), trials=1, training=TRAINING, out=tmp_path)
    (tmp_path / "study.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        tune(net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path)
    assert (tmp_path / "study.db").read_bytes().startswith(b"not a database"), "nothing is overwritten"
    optuna = pytest.importorskip("optuna")
    foreign = optuna.create_study(
        storage=f"sqlite:///{tmp_path}/foreign/study.db".replace("/foreign/", "/foreign-"), study_name="everlearn"
    )
    foreign.add_trial(optuna.create_trial(value=0.1))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign-study.db").rename(tmp_path / "foreign" / "study.db")
    with pytest.raises(ValueError, match="everlearn has not created"):
        tune(net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path / "foreign")


def test_a_study_that_is_damaged_meanwhile_is_told(tmp_path):
    def told(*facts):
        (tmp_path / "study.db").write_bytes(b"full" * 1000)

    with pytest.raises(ValueError, match=r"is damaged, or its disk is full \(.*: free disk space"):
        tune(net, EWC(), digits(), trials=2, training=TRAINING, out=tmp_path, on_trial=told)


def test_under_torchrun_it_is_told_what_else_there_is(tmp_path, run_two_processes):
    def refused():
        with pytest.raises(ValueError, match=r"2 processes of torchrun: .*--workers.*--cluster"):
            tune(net, EWC(), digits(), trials=1, training=TRAINING, out=tmp_path / "study")

    run_two_processes(refused)
    assert not (tmp_path / "study").exists()


def test_the_command_goes_on_with_other_studies_where_one_has_lost_a_machine(tmp_path, monkeypatch, capsys):
    def some(todo, *how, **settings):
        return [(i, WorkerLost("gone") if "EWC" in str(cell) else cell.run(False)) for i, cell in enumerate(todo)]

    monkeypatch.setattr("everlearn.cli.tune.outcomes", some)
    words = (
        "tune --methods ewc,l2 --scenario domain --first 2 --epochs 1 --hidden 8 --trials 1 --cluster ray --workers 2"
    )
    assert start([*words.split(), "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "digits, domain-incremental, L2: averages" in shown.out and "EWC" not in shown.out
    assert "digits, domain-incremental, EWC: The processes of 1 of 1 trials were lost (gone)" in shown.err


def test_the_command_leaves_a_file_that_runs(tmp_path, capsys):
    words = f"tune --methods ewc --fields ewc.strength=1:1e6 --scenario domain --first 2 --epochs 1 --hidden 20 --trials 2 --out {tmp_path}"
    assert start(words.split()) == 0
    folder = tmp_path / "digits-domain-ewc"
    shown = capsys.readouterr().out
    assert "average accuracy" in shown and "old tasks" in shown
    assert (folder / "trade-off.png").read_bytes().startswith(b"\x89PNG")
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert best["methods"] == "ewc" and 1 <= best["set"]["ewc"]["strength"] <= 1e6 and "valid" not in best
    assert start(["run", str(folder / "best.yaml"), "--out", str(tmp_path / "runs")]) == 0
    (result,) = everlearn.results.load(tmp_path / "runs")
    assert result.config["training"]["split"] == "test" and result.accuracy.shape == (5, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune --methods joint", "no strength to tune"),
        ("tune --fields ewc.strength=1-9", "LOW:HIGH"),
        ("tune --fields ewc.strenght", "no field 'strenght'"),
        ("tune --fields strength", "METHOD.FIELD"),
        ("tune --methods ewc --fields si.strength", "not among the methods"),
        ("tune --cluster ray", "number of trials"),
        ("tune --track wandb", "not tracked"),
    ],
)
def test_the_command_answers_wrong_words(words, message, capsys):
    assert start(words.split()) == 2
    assert message in capsys.readouterr().err
