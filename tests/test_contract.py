"""What every method promises, checked for every row of METHODS."""

import copy
import io
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import everlearn
from everlearn import AGEM, GEM, METHODS, PNN, ExpandableRepresentation, Isolation, Method, Replay, nets

NAMES = list(METHODS)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def weights(model):
    return torch.cat([p.detach().flatten().float() for p in model.state_dict().values()])


def own_loop(model, method, stream, epochs=2, size=16):
    """The loop of the README, written out."""
    for task in stream:
        task.steps = task.planned_steps(size, epochs)
        method.begin_task(model, task)
        optimizer = sgd([p for p in [*model.parameters(), *method.parameters()] if p.requires_grad])
        model.train()
        for batch in task.batches(size, epochs):
            loss = method.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        method.end_task(model, task)


def learn(model, method, tasks):
    for task in tasks:
        everlearn.train(model, method, task, optimizer=sgd, epochs=2, batch_size=16)


@pytest.fixture(params=["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def fresh(request, small_net, small_stream):
    """A plain net, and one with everything that has a mode, statistics or random numbers."""

    def make(scenario="task"):
        torch.manual_seed(1)
        stream = small_stream(scenario)
        if request.param == "mlp":
            return small_net(stream.inputs, stream.outputs), stream
        body = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))
        return torch.nn.Sequential(body[0], torch.nn.Dropout(0.2), *body[1:]), stream

    return make


@pytest.mark.parametrize("scenario", ["task", pytest.param("domain", marks=pytest.mark.slow), "class"])
@pytest.mark.parametrize("name", NAMES)
def test_own_loop_equals_trainer_bit_for_bit(name, scenario, fresh):
    (a, stream), (b, again) = fresh(scenario), fresh(scenario)
    torch.manual_seed(2)
    own_loop(a, METHODS[name](), stream)
    torch.manual_seed(2)
    learn(b, METHODS[name](), again)
    assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("name", NAMES)
def test_adding_fine_tuning_changes_nothing(name, fresh):
    (a, stream), (b, again) = fresh(), fresh()
    torch.manual_seed(2)
    learn(a, METHODS[name](), stream)
    torch.manual_seed(2)
    learn(b, Method() + METHODS[name](), again)
    assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize("name", NAMES)
def test_resuming_equals_never_having_stopped(name, fresh):
    model, stream = fresh()
    method = METHODS[name]()
    learn(model, method, stream.tasks[:2])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "method": method.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, _ = fresh()
    other.load_state_dict(saved["model"])
    resumed = METHODS[name]()
    resumed.load_state_dict(saved["method"])
    for m, k in ((model, method), (other, resumed)):
        torch.manual_seed(3)
        learn(m, k, stream.tasks[2:])
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "finetune"])
def test_differs_from_fine_tuning_from_the_second_task_on(name, fresh):
    ends = {}
    for tasks in (1, 2):
        for kind in (Method, METHODS[name]):
            model, stream = fresh()
            torch.manual_seed(2)
            learn(model, kind(), stream.tasks[:tasks])
            ends[tasks, kind is Method] = weights(model)
    if not issubclass(METHODS[name], (Replay, Isolation)) or METHODS[name] in (
        AGEM,
        GEM,
        PNN,
        ExpandableRepresentation,
    ):
        # other replay replays a task already in itself, and other isolation makes room in it
        assert torch.equal(ends[1, True], ends[1, False]), "the first task has nothing to protect"
    assert not torch.equal(ends[2, True], ends[2, False])


@pytest.mark.filterwarnings("ignore:.* has seen no example since:UserWarning")  # the task ends twice
@pytest.mark.parametrize("name", NAMES)
def test_end_of_task_leaves_the_model_as_it_was(name, fresh):
    model, stream = fresh()
    method = METHODS[name]()
    learn(model, method, stream.tasks[:1])
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    method.end_task(model, stream[0])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, {f.name: value})
        for name, kind in METHODS.items()
        for f in fields(kind)
        if get_origin(hint := get_type_hints(kind)[f.name]) is Literal
        for value in get_args(hint)
    ],
)
def test_every_value_of_every_option_runs(name, option, fresh):
    model, stream = fresh()
    gentle = lambda parameters: torch.optim.SGD(parameters, lr=0.005)  # a full Fisher information can be steep
    method = METHODS[name](**option)
    for task in stream.tasks[:2]:
        everlearn.train(model, method, task, optimizer=gentle, epochs=2, batch_size=16)
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_one_result(name, small_net, small_stream):
    runs = [
        everlearn.run(small_net, METHODS[name](), small_stream(), epochs=1, batch_size=16, seed=4) for _ in range(2)
    ]
    assert (runs[0].accuracy == runs[1].accuracy).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_callers_method_and_random_state_stay(name, small_net, small_stream):
    method = METHODS[name]()
    before = torch.get_rng_state()
    everlearn.run(small_net, method, small_stream(), epochs=1)
    assert torch.equal(before, torch.get_rng_state())
    fresh_state = METHODS[name]().state_dict()
    assert repr(method.state_dict()) == repr(fresh_state)


@pytest.mark.parametrize("name", NAMES)
def test_hyper_parameters_are_stored_unchanged_and_documented(name):
    kind = METHODS[name]
    method = kind()
    for f in fields(kind):
        assert getattr(method, f.name) == f.default, "a field needs a default, stored as it is"
        docs = "\n".join(base.__doc__ for base in kind.__mro__)
        assert f"\n        {f.name}: " in docs, f"{name}.{f.name} is not documented"


@pytest.mark.parametrize("name", NAMES)
def test_a_loader_serves_as_a_task(name, small_net):
    data = torch.utils.data.TensorDataset(torch.rand(40, 5), torch.arange(40) % 2)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, method = small_net(5, 2), METHODS[name]()
    for _ in range(2):
        everlearn.train(model, method, loader, epochs=2)
    assert weights(model).isfinite().all()
