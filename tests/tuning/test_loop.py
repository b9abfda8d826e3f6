"""Tuning in a training loop of the user."""

import multiprocessing
import signal
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import DER, EWC, GEM, L2, MAS, SI, SLCA, LwF, Method, streams, tune
from everlearn.trainer import Training
from everlearn.trainer.checkpoints import Checkpoints
from everlearn.tuning import Search
from everlearn.tuning.search_space import with_values
from tests.tuning.studies import NEEDS_FORK, Harmful, digits, make_net, use_one_step

STRENGTHS = {"fields": {"strength": (1, 1e6)}, "prune": False}


@pytest.fixture(autouse=True)
def keep_study_in_memory(request, monkeypatch):
    """Create no database, which takes longer than these trials, except for tests that read a study again."""
    if "resumed" not in request.node.name and "belongs" not in request.node.name:
        monkeypatch.setattr("everlearn.tuning.storage._storage", lambda optuna, _: optuna.storages.InMemoryStorage())


def make_model():
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )


def make_tasks(generator=None, num_tasks=3):
    """Pairs of loaders: odd against even digits, each task with its own permutation of the pixels."""
    (x, y), _ = streams.digits_data()
    x = x.flatten(1)
    tasks = []
    for seed in range(num_tasks):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        data = TensorDataset(x[:, order], y % 2)
        train = DataLoader(torch.utils.data.Subset(data, range(160)), 32, shuffle=True, generator=generator)
        tasks.append((train, DataLoader(torch.utils.data.Subset(data, range(160, 400)), 256)))
    return tasks


def train(model, method, task):
    """A loop that calls the hooks."""
    loader, _ = task
    model.train()
    method.begin_task(model, loader)
    optimizer = torch.optim.Adam([*model.parameters(), *method.parameters()], lr=0.01)
    for x, y in loader:
        loss = method.loss(model, everlearn.Batch(x, y))
        optimizer.zero_grad()
        loss.backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    method.end_task(model, loader)


def train_attached(model, method, task):
    """A loop that the method is attached to."""
    loader, _ = task
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    attached = method.attach(model, optimizer)
    for x, y in loader:
        outputs = model(x)
        loss = attached.loss(F.cross_entropy(outputs, y), x, y, outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    method.end_task(model, loader)
    attached.remove()


def evaluate(model, method, task):
    _, loader = task
    torch.rand(1)  # evaluation must not influence training
    return float(np.mean([(method.predict(model, x).argmax(1) == y).float().mean() for x, y in loader]))


def train_alone(method, train=train, generator=None, make_model=make_model):
    """The scores of a naive loop over all tasks, and the trained model."""
    tasks = make_tasks(generator)
    torch.manual_seed(0)
    model = make_model()
    rows = []
    for i, task in enumerate(tasks):
        train(model, method, task)
        states = torch.get_rng_state()
        rows.append([evaluate(model, method, task) for task in tasks[: i + 1]])
        torch.set_rng_state(states)
    return rows, model


def check_scores(trial, rows):
    """Compare a trial with the scores of a naive loop; only the order of sums may differ."""
    assert trial.score == pytest.approx(np.mean(rows[-1]), abs=1e-12)
    assert trial.old == pytest.approx(np.mean(rows[-1][:-1]), abs=1e-12)
    assert trial.new == pytest.approx(np.mean([row[-1] for row in rows]), abs=1e-12)


@dataclass(eq=False)
class EarlyDecay(Method):
    """Weight decay that acts in the first task, too."""

    rate: Annotated[float, Search(1e-4, 1)] = 0.1

    def penalty(self, model, batch=None, outputs=None):
        return self.rate * sum(p.square().sum() for p in model.parameters())


CASES = [
    pytest.param(EWC(mode="online"), train_attached, "strength", 1, id="attached-EWC"),
    pytest.param(Harmful(), train, "harm", 1, id="random-end_task"),
    pytest.param(EarlyDecay(), train, "rate", 2, id="not-late"),
    pytest.param(SI(), train, "damping", 1, id="SI", marks=pytest.mark.slow),
    pytest.param(EWC(), train, "strength", 1, id="EWC", marks=pytest.mark.slow),
    pytest.param(L2(), train, "strength", 1, id="L2", marks=pytest.mark.slow),
    pytest.param(SLCA(), train, "temperature", 1, id="SLCA", marks=pytest.mark.slow),
    pytest.param(GEM(20), train, "margin", 1, id="GEM", marks=pytest.mark.slow),
    pytest.param(MAS() + LwF(), train_attached, "MAS.strength", 1, id="attached-chain", marks=pytest.mark.slow),
    pytest.param(DER(20), train, "alpha", 2, id="DER", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "loop", "name", "times"), CASES)
def test_trials_equal_naive_loop_bit_for_bit(method, loop, name, times, tmp_path):
    tasks = make_tasks()
    models = []
    trained = []

    def count_and_train(model, method, task):
        trained.append(tasks.index(task))
        loop(model, method, task)

    def keep_and_evaluate(model, method, task):
        if task is tasks[-1]:
            models.append(model)
        return evaluate(model, method, task)

    study = tune(
        make_model, method, tasks, train=count_and_train, evaluate=keep_and_evaluate, fields={name: None}, trials=2,
        prune=False, out=tmp_path,
    )  # fmt: skip
    assert [trained.count(i) for i in range(3)] == [times, 2, 2]
    assert len({str(trial.values) for trial in study.trials}) == len(models) == 2
    for trial, model in zip(study.trials, models, strict=True):
        rows, naive_model = train_alone(with_values(method, study.dimensions, [trial.values[name]]), loop)
        check_scores(trial, rows)
        for p, q in zip(model.parameters(), naive_model.parameters(), strict=True):
            assert torch.equal(p, q)
    assert study.best.score == max(trial.score for trial in study.trials)
    assert repr(study.method) == repr(with_values(method, study.dimensions, [study.best.values[name]]))


@pytest.mark.parametrize("method", [EWC(), EarlyDecay()], ids=["shared", "separate"])
def test_loaders_with_generators_start_every_trial_equally(method, tmp_path):
    generator = torch.Generator().manual_seed(7)
    tasks = make_tasks(generator)
    settings = {"train": train, "evaluate": evaluate, "trials": 2, "prune": False, "out": tmp_path}
    study = tune(make_model, method, tasks, on_trial=lambda *_: next(iter(tasks[0][0])), **settings)
    for trial in study.trials:
        rows, _ = train_alone(replace(method, **trial.values), generator=torch.Generator().manual_seed(7))
        check_scores(trial, rows)


def draw_after_end(model, method, task):
    train(model, method, task)
    torch.rand(3)


def consolidate_twice(model, method, task):
    train(model, method, task)
    method.end_task(model, task[0])


def consolidate(model, method, task):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in task[0]:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + method.penalty(model)).backward()
        optimizer.step()
    method.consolidate(model, importance={name: torch.ones_like(p) for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (draw_after_end, "after method.end_task"),
        pytest.param(consolidate_twice, "after method.end_task", marks=pytest.mark.slow),
        (consolidate, "does not call"),
    ],
)
def test_loop_that_cannot_be_cut_is_run_separately(loop, reason, tmp_path):
    tasks = make_tasks()
    with pytest.warns(UserWarning, match=f"do not share the first task: .*{reason}"):
        study = tune(make_model, EWC(), tasks, train=loop, evaluate=evaluate, trials=2, out=tmp_path, **STRENGTHS)
    for trial in study.trials:
        rows, _ = train_alone(EWC(**trial.values), loop)
        check_scores(trial, rows)


class Hooked(torch.nn.Sequential):
    """A forward hook whose closure a deep copy would share with the original."""

    def __init__(self):
        super().__init__(torch.nn.Linear(64, 2))
        self.gain = torch.nn.Parameter(torch.ones(1))
        self[0].register_forward_hook(lambda module, inputs, outputs: outputs * self.gain)


def test_model_that_cannot_be_copied_is_trained_separately(tmp_path):
    with pytest.warns(UserWarning, match="hooks with closures"):
        study = tune(Hooked, EWC(), make_tasks(), train=train, evaluate=evaluate, trials=2, out=tmp_path, **STRENGTHS)
    for trial in study.trials:
        rows, _ = train_alone(EWC(**trial.values), make_model=Hooked)
        check_scores(trial, rows)


def widen_and_train(model, method, task):
    model[1] = torch.nn.Sequential(model[1], torch.nn.Linear(16, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in task[0]:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + method.penalty(model)).backward()
        optimizer.step()
    method.end_task(model=model, task=task[0])


@pytest.mark.slow
def test_changed_architecture_writes_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "write", lambda *_: pytest.fail("a new model could not load it"))
    method = MAS(only="4.*")
    settings = {"train": widen_and_train, "evaluate": evaluate, "trials": 2, "out": tmp_path, **STRENGTHS}
    study = tune(make_model, method, make_tasks(), **settings)
    for trial in study.trials:
        rows, _ = train_alone(replace(method, **trial.values), widen_and_train)
        check_scores(trial, rows)


def test_stream_is_scored_on_validation_data(tmp_path):
    stream = digits("class")

    def train_task(model, method, task):
        method.begin_task(model, task)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for batch in task.batches(32, seed=3):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            optimizer.step()
        method.end_task(model, task)

    study = tune(make_net, EWC(), stream, train=train_task, trials=2, out=tmp_path, seeds=2, **STRENGTHS)
    for trial in study.trials:
        scores = []
        for seed in range(2):
            torch.manual_seed(seed)
            model = make_net(stream.inputs, stream.outputs)
            method = EWC(**trial.values)
            for task in stream:
                train_task(model, method, task)
            scores.append(everlearn.evaluate(model, method, stream.test_tasks, split="valid"))
        assert trial.score == pytest.approx(np.mean(scores), abs=1e-12)
    results = everlearn.results.load(tmp_path / "trials")
    assert sorted(result.config["seed"] for result in results) == [0, 0, 1, 1]
    assert all(result.config["scenario"] == "class" for result in results)


@pytest.mark.slow
def test_parts_of_a_task_are_scored_together(tmp_path):
    stream = streams.online(digits(), chunk=40)
    trained = []

    def train_part(model, method, task):
        trained.append((task.id, task.part))
        loader = [(batch.x, batch.y) for batch in task.batches(20)]
        train(model, method, (loader, None))

    study = tune(make_net, EWC(), stream, train=train_part, trials=2, out=tmp_path, **STRENGTHS)
    (result, _) = everlearn.results.load(tmp_path / "trials")
    assert result.accuracy.shape == (3, 3) and len(stream) > 6
    assert len(trained) == 2 * len(stream) - 1
    assert all(trial.score is not None for trial in study.trials)


def run_killed_study(folder, allowed):
    """A study whose process is killed after as many calls of train as a file has bytes."""

    def train_or_die(model, method, task):
        use_one_step(allowed)
        train(model, method, task)

    settings = {"train": train_or_die, "evaluate": evaluate, "trials": 3, **STRENGTHS}
    return tune(make_model, EWC(), make_tasks(), out=folder, **settings)


# Killed in the first trial, and in the second; the first task takes one call, each trial two more.
@NEEDS_FORK
@pytest.mark.parametrize("calls", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_killed_study_is_resumed_after_last_task(calls, tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_bytes(b"." * calls)
    child = multiprocessing.get_context("fork").Process(target=run_killed_study, args=(tmp_path / "killed", allowed))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [*(tmp_path / "killed").rglob("*.checkpoint")]
    allowed.write_bytes(b"." * 100)
    resumed = run_killed_study(tmp_path / "killed", allowed)
    num_calls = 100 - len(allowed.read_bytes())
    allowed.write_bytes(b"")
    reference = run_killed_study(tmp_path / "reference", allowed)
    assert [str(trial) for trial in resumed.trials] == [str(trial) for trial in reference.trials]
    # The first task, and the tasks that were not completed: a trial that stopped before its last task repeats none.
    assert num_calls == 1 + 3 * 2 - (calls - 2)
    assert not [*(tmp_path / "killed").rglob("*.checkpoint*")]


@NEEDS_FORK
def test_parallel_trials_equal_naive_loop(tmp_path):
    settings = {"train": train, "evaluate": evaluate, **STRENGTHS}
    study = tune(make_model, EWC(), make_tasks(), trials=3, workers=2, out=tmp_path, **settings)
    for trial in study.trials:
        rows, _ = train_alone(EWC(**trial.values))
        check_scores(trial, rows)


def test_trial_without_finite_score_fails_alone(tmp_path):
    def evaluate_or_fail(model, method, task):
        return float("nan") if method.strength > 1e5 else torch.tensor(0.5)

    tasks = make_tasks()
    study = tune(make_model, EWC(), tasks, train=train, evaluate=evaluate_or_fail, trials=3, out=tmp_path, **STRENGTHS)
    failures = [trial.failure for trial in study.trials if trial.score is None]
    assert len(failures) == 1 and "evaluate has returned nan for task 1 after task 1" in failures[0]
    assert study.best.score == 0.5


def test_hopeless_trials_are_pruned(tmp_path):
    harms = []

    def score_later_trials_worse(model, method, task):
        if method.harm not in harms:
            harms.append(method.harm)
        return -harms.index(method.harm)

    settings = {"train": train, "evaluate": score_later_trials_worse, "trials": 5, "out": tmp_path}
    study = tune(make_model, Harmful(), make_tasks(), **settings)
    assert [trial.failure for trial in study.trials] == ["", "", "", "", "pruned after task 1"]


def train_without_end(model, method, task):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in task[0]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def train_other_model():
    """A loop that keeps the optimizer of the first model."""
    optimizers = []

    def train_first(model, method, task):
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in task[0]:
            optimizers[0].zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizers[0].step()
        method.end_task(model, task[0])

    return train_first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": train_without_end}, "returned from task 1 without a call of method.end_task"),
        ({"train": train_other_model()}, "has not changed the model that it got for task 2"),
        ({"train": 3}, "train must be a function"),
        (
            {"evaluate": lambda model, method, task: None},
            "must return a number, higher is better; it has returned None",
        ),
        ({"evaluate": None}, "needs validation data, and task 1 has none"),
        ({"training": Training(epochs=2)}, "settings of Everlearn's trainer"),
        ({"optimizer": torch.optim.SGD}, "settings of Everlearn's trainer"),
        ({"run_remotely": list}, "run on this machine"),
        ({"train": None}, "give train="),
        ({"stream": make_tasks(num_tasks=1)}, "at least two tasks"),
        ({"stream": [iter([]), iter([])]}, "generator can be read once"),
        ({"stream": 3}, "Give a Stream, or a list of the tasks"),
        ({"stream": digits().joint()}, "not joint"),
        ({"make_model": make_net}, "give a function without arguments or a module"),
    ],
)
def test_misuse_is_explained(changes, message, tmp_path):
    arguments = {"make_model": make_model, "method": EWC(), "stream": make_tasks()}
    arguments |= {"train": train, "evaluate": evaluate, "trials": 2, "out": tmp_path, **STRENGTHS, **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        tune(**arguments)


def test_study_belongs_to_its_loop(tmp_path):
    tasks = make_tasks(torch.Generator().manual_seed(7))
    settings = {"evaluate": evaluate, "out": tmp_path, **STRENGTHS}
    tune(make_model, EWC(), tasks, train=train, trials=1, **settings)
    # The generator is as before, so that the study is found.
    assert len(tune(make_model, EWC(), tasks, train=train, trials=2, **settings).trials) == 2
    with pytest.raises(ValueError, match="other data, settings or fields"):
        tune(make_model, EWC(), tasks, train=draw_after_end, trials=1, **settings)
