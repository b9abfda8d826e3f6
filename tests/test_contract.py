"""The contract of every method, checked for each entry of METHODS."""

import copy
import io
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import everlearn
from everlearn import AGEM, GEM, METHODS, PNN, ExpandableRepresentation, GenerativeReplay, Method, nets
from everlearn.core.traits import traits_of
from everlearn.surgery.feature_head import restore_feature_head
from tests.helpers import TRAINED, make_method, state_vector, train_tasks

NAMES = list(METHODS)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def train_in_readme_loop(model, method, stream, epochs=2, batch_size=16):
    """Train in the loop of the README."""
    for task in stream:
        task.steps = task.planned_steps(batch_size, epochs)
        method.begin_task(model, task)
        if not method.trains:
            method.end_task(model, task)
            continue
        optimizer = sgd([p for p in [*model.parameters(), *method.parameters()] if p.requires_grad])
        model.train()
        for batch in task.batches(batch_size, epochs):
            loss = method.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        method.end_task(model, task)


def train_in_trainer(model, method, tasks):
    train_tasks(model, method, tasks, optimizer=sgd, epochs=2, batch_size=16)


@pytest.fixture(params=["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def make_model_and_stream(request, small_net, small_stream):
    """Create a plain net, or one with BatchNorm and dropout, and a stream."""

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
def test_readme_loop_equals_trainer_bit_for_bit(name, scenario, make_model_and_stream):
    loop_model, stream = make_model_and_stream(scenario)
    trainer_model, same_stream = make_model_and_stream(scenario)
    torch.manual_seed(2)
    train_in_readme_loop(loop_model, make_method(name), stream)
    torch.manual_seed(2)
    train_in_trainer(trainer_model, make_method(name), same_stream)
    assert torch.equal(state_vector(loop_model), state_vector(trainer_model))


@pytest.mark.parametrize("name", TRAINED)
def test_adding_fine_tuning_changes_nothing(name, make_model_and_stream):
    plain_model, stream = make_model_and_stream()
    chain_model, same_stream = make_model_and_stream()
    torch.manual_seed(2)
    train_in_trainer(plain_model, make_method(name), stream)
    torch.manual_seed(2)
    train_in_trainer(chain_model, Method() + make_method(name), same_stream)
    assert torch.equal(state_vector(plain_model), state_vector(chain_model))


@pytest.mark.parametrize("name", NAMES)
def test_resuming_equals_uninterrupted_training(name, make_model_and_stream):
    model, stream = make_model_and_stream()
    method = make_method(name)
    train_in_trainer(model, method, stream.tasks[:2])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "method": method.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model, _ = make_model_and_stream()
    restore_feature_head(resumed_model, saved["model"])
    resumed_model.load_state_dict(saved["model"])
    resumed_method = make_method(name)
    resumed_method.load_state_dict(saved["method"])
    for continued_model, continued_method in ((model, method), (resumed_model, resumed_method)):
        torch.manual_seed(3)
        train_in_trainer(continued_model, continued_method, stream.tasks[2:])
    assert torch.equal(state_vector(model), state_vector(resumed_model))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "finetune"])
def test_every_method_differs_from_fine_tuning_from_the_second_task_on(name, make_model_and_stream):
    final_weights = {}
    for tasks in (1, 2):
        for method in (Method(), make_method(name)):
            model, stream = make_model_and_stream()
            torch.manual_seed(2)
            train_in_trainer(model, method, stream.tasks[:tasks])
            final_weights[tasks, type(method) is Method] = state_vector(model)

    # Methods of other families may act in the first task: they replay within it, or reserve capacity.
    method_class = METHODS[name]
    is_penalty = traits_of(method_class).family in ("baselines", "regularization")
    if is_penalty or method_class in (AGEM, GEM, GenerativeReplay, PNN, ExpandableRepresentation):
        assert torch.equal(final_weights[1, True], final_weights[1, False]), "the first task has nothing to protect"
    assert not torch.equal(final_weights[2, True], final_weights[2, False])


@pytest.mark.filterwarnings("ignore:.* has seen no example since:UserWarning")  # the task ends twice
@pytest.mark.parametrize("name", TRAINED)
def test_end_task_does_not_change_the_model(name, make_model_and_stream):
    model, stream = make_model_and_stream()
    method = make_method(name)
    train_in_trainer(model, method, stream.tasks[:1])
    initial_state = copy.deepcopy(model.state_dict())
    initial_modes = [m.training for m in model.modules()]
    method.end_task(model, stream[0])
    assert all(torch.equal(v, initial_state[k]) for k, v in model.state_dict().items())
    assert initial_modes == [m.training for m in model.modules()]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, {f.name: value})
        for name, method_class in METHODS.items()
        for f in fields(method_class)
        if get_origin(hint := get_type_hints(method_class)[f.name]) is Literal
        for value in get_args(hint)
    ],
)
def test_every_value_of_every_option_runs(name, option, make_model_and_stream):
    model, stream = make_model_and_stream()
    sgd_with_small_steps = lambda parameters: torch.optim.SGD(
        parameters, lr=0.005
    )  # a full Fisher information can be steep
    method = make_method(name, **option)
    for task in stream.tasks[:2]:
        everlearn.train(model, method, task, optimizer=sgd_with_small_steps, epochs=2, batch_size=16)
    assert state_vector(model).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_results(name, small_net, small_stream):
    runs = [
        everlearn.run(small_net, make_method(name), small_stream(), epochs=1, batch_size=16, seed=4) for _ in range(2)
    ]
    assert (runs[0].accuracy == runs[1].accuracy).all()


@pytest.mark.parametrize("name", NAMES)
def test_run_does_not_change_the_given_method_and_random_state(name, small_net, small_stream):
    method = make_method(name)
    rng_state = torch.get_rng_state()
    everlearn.run(small_net, method, small_stream(), epochs=1)
    assert torch.equal(rng_state, torch.get_rng_state())
    fresh_state = make_method(name).state_dict()
    assert repr(method.state_dict()) == repr(fresh_state)


@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters_are_stored_unchanged_and_documented(name):
    method_class = METHODS[name]
    method = method_class()
    for f in fields(method_class):
        assert getattr(method, f.name) == f.default, "a field needs a default that is stored unchanged"
        docs = "\n".join(base.__doc__ for base in method_class.__mro__)
        assert f"\n        {f.name}: " in docs, f"{name}.{f.name} is not documented"


@pytest.mark.parametrize("name", NAMES)
def test_a_loader_can_be_a_task(name, small_net):
    data = torch.utils.data.TensorDataset(torch.rand(40, 5), torch.arange(40) % 2)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = small_net(5, 2)
    method = make_method(name)
    for _ in range(2):
        everlearn.train(model, method, loader, epochs=2)
    assert state_vector(model).isfinite().all()
