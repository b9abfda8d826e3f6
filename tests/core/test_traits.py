"""The documented traits of methods agree with measurements."""

import copy
from functools import cache
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

import everlearn
from everlearn import METHODS, Batch, Method, Task, Traits, nets, streams
from everlearn.core.traits import traits_of
from everlearn.trainer.cost import state_bytes
from tests.helpers import QUICK_FIELDS, make_method

TRAITS = {name: traits_of(kind) for name, kind in METHODS.items()}


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.01, momentum=0.9, weight_decay=1e-3)


def make_data(task):
    """Return examples of the two classes of a task."""
    x = torch.randn(64, 784, generator=torch.Generator().manual_seed(task))
    return x, 2 * task + (x[:, 0] > 0).long()


@cache
def train_and_measure(name):
    """Train on three tasks; measure the state after each, and predict the inputs of the first task."""
    torch.manual_seed(0)
    model = nets.mlp(784, 10)
    method = make_method(name)
    num_parameters = sum(p.numel() for p in model.parameters())
    copies = []
    predictions = []
    for task_id in range(3):
        allowed = everlearn.allowed_classes("task", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], current_task=task_id)
        task = Task(make_data(task_id), id=task_id, allowed=allowed)
        everlearn.train(model, method, task, optimizer=sgd, iterations=24, batch_size=16)
        state = method.state_dict()
        memory_bytes = state_bytes(state.get("memory", {}))
        copies.append((state_bytes(state) - memory_bytes) / (4 * num_parameters))
        predictions.append([method.predict(model, make_data(0)[0], torch.full((64,), t)) for t in range(task_id + 1)])
        if not task_id:
            first_parameters = sum(p.numel() for p in model.parameters())
    added_parameters = sum(p.numel() for p in model.parameters()) - first_parameters
    return SimpleNamespace(state=state, copies=copies, predictions=predictions, added_parameters=added_parameters)


def test_every_method_has_traits():
    assert all(isinstance(t, Traits) and t.pro and t.con for t in TRAITS.values())


@pytest.mark.parametrize("name", [n for n in METHODS if n != "finetune"])
def test_a_family_is_a_folder(name):
    assert METHODS[name].__module__.split(".")[:-1] == ["everlearn", "methods", TRAITS[name].family]


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match=r"Traits.family: got 'growth', allowed: 'baselines', .*, 'expansion'"):
        Traits(family="growth", pro="", con="")


def test_costs_may_be_left_unmeasured():
    traits = Traits(family="heads", pro="", con="", step_growth=1.0)
    assert traits.memory == "not measured"
    assert traits.copies_after(tasks=5) is None and traits.step_of(tasks=5) is None


def test_a_custom_method_needs_no_traits(small_net, small_stream):
    class CustomEWC(everlearn.EWC):
        pass

    assert traits_of(CustomEWC) is None
    everlearn.run(small_net, CustomEWC(), small_stream(), epochs=1)


@pytest.mark.parametrize("name", METHODS)
def test_keeps_examples_agrees_with_the_state(name):
    examples = {tuple(row.tolist()) for k in range(3) for row in make_data(k)[0]}
    candidates = [
        v for v in tree_leaves(train_and_measure(name).state) if isinstance(v, torch.Tensor) and v.numel() % 784 == 0
    ]
    stored_examples = {tuple(row.tolist()) for v in candidates for row in v.reshape(-1, 784)} & examples
    assert bool(stored_examples) == TRAITS[name].keeps_examples


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if t.copies is not None and n not in QUICK_FIELDS])
def test_copies_of_the_model_agree_with_the_state(name):
    for tasks, copies in enumerate(train_and_measure(name).copies, 1):
        if tasks > 1:  # teachers and added units exist from the second task on
            assert copies == pytest.approx(TRAITS[name].copies_after(tasks), rel=0.15, abs=0.1)


@pytest.mark.parametrize("name", QUICK_FIELDS)
def test_copies_of_random_features_agree_with_the_default_dimension(name):
    quick_dimension = QUICK_FIELDS[name]["dimension"]
    default_dimension = METHODS[name]().dimension
    num_bytes = 0
    for statistic in train_and_measure(name).state["statistics"].values():
        shape = [default_dimension if size == quick_dimension else size for size in statistic.shape]
        num_bytes += statistic.element_size() * prod(shape)
    model_bytes = sum(p.numel() * p.element_size() for p in nets.mlp(784, 10).parameters())
    assert num_bytes / model_bytes == pytest.approx(TRAITS[name].copies_after(tasks=3), rel=0.02)


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if not t.copies_scale])
@pytest.mark.filterwarnings("ignore:.* has no examples of:UserWarning")
def test_statistics_do_not_scale_with_the_model(name):
    sizes = []
    for hidden in ((20,), (400, 20)):
        torch.manual_seed(0)
        model = nets.mlp(784, 10, hidden=hidden)
        method = make_method(name)
        everlearn.train(model, method, Task(make_data(0)), optimizer=sgd, iterations=2, batch_size=16)
        sizes.append(state_bytes(method.state_dict()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if t.step is not None])
def test_methods_without_training_steps_have_a_step_of_zero(name):
    assert (TRAITS[name].step == 0) == (not make_method(name).trains)


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if t.needs_pretrained])
@pytest.mark.filterwarnings("ignore:.* has no examples of:UserWarning")
def test_methods_that_need_features_hardly_learn_them(name):
    torch.manual_seed(0)
    model = nets.mlp(784, 10, hidden=(32,))
    before = model[1].weight.detach().clone()
    plain = copy.deepcopy(model)
    for learner, method in ((model, make_method(name)), (plain, Method())):
        everlearn.train(learner, method, Task(make_data(0)), optimizer=sgd, iterations=24, batch_size=16)
    change = lambda learner: (learner[1].weight - before).norm().item()
    assert change(model) < 0.1 * change(plain)


@pytest.mark.parametrize("name", METHODS)
def test_grows_agrees_with_the_state(name):
    measured = train_and_measure(name)
    assert measured.added_parameters == 0, "added parameters belong to the method, where they are counted"
    assert (measured.copies[2] - measured.copies[1] > 0.03) == TRAITS[name].grows


@pytest.mark.parametrize("name", METHODS)
def test_zero_forgetting_agrees_with_the_predictions(name):
    first, *later = [predictions[0] for predictions in train_and_measure(name).predictions]
    assert all(torch.equal(first, prediction) for prediction in later) == TRAITS[name].zero_forgetting


@pytest.mark.parametrize("name", METHODS)
def test_needs_task_agrees_with_the_predictions(name):
    first, second, _ = train_and_measure(name).predictions[-1]
    assert torch.equal(first, second) == (not TRAITS[name].needs_task)


def learn_online(model, method):
    """Show batches to a method that takes no gradient steps; return its outputs."""
    method.begin_task(model, None)
    model.eval()
    for x, y in (make_data(0), make_data(1)):
        for i in torch.arange(64).split(8):
            method.observe(Batch(x[i], y[i]), model(x[i]))
    return method.predict(model, make_data(0)[0])


@pytest.mark.parametrize("name", [n for n in METHODS if n != "finetune"])
def test_without_boundaries_agrees_with_training(name):
    def train_without_boundaries(method):
        torch.manual_seed(0)
        model = nets.mlp(784, 10, hidden=(16,))
        if not method.trains:
            return learn_online(model, method)
        optimizer = sgd([*model.parameters(), *method.parameters()])
        for x, y in (make_data(0), make_data(1)):
            for i in torch.arange(64).split(8):
                loss = method.loss(model, Batch(x[i], y[i]))
                optimizer.zero_grad()
                loss.backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
        return model[1].weight.detach()

    settings = TRAITS[name].without_boundaries
    if settings is None:
        try:
            assert torch.equal(train_without_boundaries(make_method(name)), train_without_boundaries(Method()))
        except ValueError as error:
            assert "begin_task" in str(error)
    else:
        # The run is shorter than the default interval.
        short_run_settings = {"consolidate_every": 3} if "consolidate_every" in settings else settings
        assert not torch.equal(
            train_without_boundaries(make_method(name, **short_run_settings)), train_without_boundaries(Method())
        )


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if n != "finetune" and not t.needs_labels])
def test_methods_without_labels_protect_a_trained_model_by_inputs(name):
    first, second = streams.split(*streams.digits_data(), tasks=2, scenario="task", class_order=range(4))
    x = first.train.x
    sgd_without_momentum = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(0)
    trained_model = nets.mlp((1, 8, 8), 4, hidden=(32,))
    everlearn.train(trained_model, Method(), first, optimizer=sgd_without_momentum, batch_size=16)

    def output_change(method):
        model = copy.deepcopy(trained_model)
        unlabelled = Task(x, id=0, allowed=first.allowed)
        initial_probabilities = model(x)[:, :2].softmax(1).detach()
        method.begin_task(model, unlabelled)
        method.end_task(model, unlabelled)
        everlearn.train(model, method, second, optimizer=sgd_without_momentum, epochs=3, batch_size=16)
        probabilities = method.predict(model, x, torch.zeros(len(x), dtype=torch.long))[:, :2].softmax(1).detach()
        return float((probabilities - initial_probabilities).norm())

    settings = {"l2": {"strength": 1.0}, "mas": {"strength": 1.0}, "ewc": {"strength": 100.0, "cap": 5.0}}
    assert output_change(make_method(name, **settings.get(name, {}))) < 0.8 * output_change(Method())
