"""What all growing networks share: errors for incomplete training loops, and equal outputs of copies and states."""

import copy
import gc
import io
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from everlearn import DEN, ER, EWC, PNN, ExpandableRepresentation, ExpandNet, Method, Task, nets
from everlearn.surgery.resize import widen
from everlearn.surgery.tracing import links
from tests.helpers import train_tasks

GROWING = [lambda: ExpandNet(units=4, threshold=0.0), lambda: DEN(units=4, threshold=0.0)]
growing = pytest.mark.parametrize("make", GROWING, ids=["expandnet", "den"])


def run_loop(
    method,
    stream,
    tasks=2,
    epochs=2,
    plan=1.0,
    calls_begin_task=True,
    optimizes_method=True,
    calls_after_step=True,
    grow=None,
):
    """Train with the guide's loop, of which parts can be left out."""
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    for task in stream.tasks[:tasks]:
        task.steps = None
        if plan is not None:
            task.steps = int(plan * task.planned_steps(32, epochs))
        if calls_begin_task:
            method.begin_task(model, task)
        parameters = list(model.parameters())
        if optimizes_method:
            parameters += method.parameters()
        optimizer = torch.optim.Adam(parameters, fused=True)

        for step, batch in enumerate(task.batches(32, epochs)):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            method.before_step(model)
            optimizer.step()
            if calls_after_step:
                method.after_step(model)
            if grow and task.id and step in (0, 1, 2):
                grow(method, model)
        method.end_task(model, task)
    return model


@growing
def test_a_complete_loop_grows(make, small_stream):
    method = make()
    run_loop(method, small_stream())
    assert method.diagnostics()["units added so far"] > 0


@growing
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calls_begin_task": False}, r"has no task: call begin_task\(model, task\) before the first step"),
        ({"optimizes_method": False}, r"does not train the parameters of \w+: create it after begin_task"),
        ({"calls_after_step": False}, "after_step was not called"),
        ({"plan": None}, "has never decided whether to grow.* set task.steps"),
    ],
)
def test_an_incomplete_loop_raises(make, options, message, small_stream):
    with pytest.raises(ValueError, match=message):
        run_loop(make(), small_stream(), **options)


@growing
@pytest.mark.parametrize("plan", [3.0, 0.3])
def test_another_length_than_planned_warns(make, plan, small_stream):
    with pytest.warns(UserWarning, match=r"was trained for \d+ steps, but task.steps gave \w+ \d+: the network has"):
        run_loop(make(), small_stream(), plan=plan)


def test_without_a_plan_the_loop_decides_when_to_grow(small_stream):
    method = GROWING[0]()
    run_loop(method, small_stream(), plan=None, grow=lambda m, model: m.look_now(model))
    assert method.diagnostics()["units added so far"] > 0
    method = GROWING[1]()
    run_loop(method, small_stream(), plan=None, grow=lambda m, model: m.next_phase(model))
    assert method.diagnostics()["units added so far"] > 0


def test_an_incomplete_loop_with_the_expandable_representation_raises(small_stream):
    with pytest.raises(ValueError, match="has no task: call begin_task"):
        run_loop(ExpandableRepresentation(50), small_stream(), calls_begin_task=False)
    with pytest.raises(ValueError, match="does not train the parameters of ExpandableRepresentation"):
        run_loop(ExpandableRepresentation(50), small_stream(), optimizes_method=False)
    run_loop(ExpandableRepresentation(50), small_stream())


def test_the_export_of_the_expandable_representation_is_a_plain_module(small_stream):
    stream = small_stream()
    method = ExpandableRepresentation(50)
    model = run_loop(method, stream, tasks=3)
    plain_model = method.export(model)
    x = stream[0].test.x
    torch.testing.assert_close(plain_model(x), method.predict(model, x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain_model.modules())
    torch.testing.assert_close(torch.export.export(plain_model, (x,)).module()(x), plain_model(x))

    # It shares no tensors with the model.
    before = {n: v.clone() for n, v in plain_model.state_dict().items()}
    for p in model.parameters():
        nn.init.zeros_(p)
    assert all(torch.equal(v, before[n]) for n, v in plain_model.state_dict().items())


@growing
def test_parameters_are_counted_and_statistics_are_not(make, small_stream):
    stream = small_stream()
    method = make()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, stream.outputs))
    task = stream[0]
    task.steps = 1
    method.begin_task(model, task)
    method.end_task(model, task)
    assert method.extra_parameters(model) == 0


@pytest.mark.parametrize(
    "method", [Method(), ER(10), EWC(), ExpandableRepresentation(10)], ids=lambda m: type(m).__name__
)
def test_predict_evaluates_whatever_the_mode(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    x = torch.randn(8, 4)
    model[1].train()
    model[0].eval()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    outputs = method.predict(model, x)
    assert model[1].training and not model[0].training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(outputs, model.eval()(x))


def test_a_norm_of_another_width_is_refused():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3)
    )
    assert links(net, groups={"0": ["1", "2"]})[0].norms == ("1",)
    with pytest.raises(ValueError, match="'3' is for 6 units, '0' has 4"):
        links(net, groups={"0": ["3", "2"]})


def test_widen_needs_a_link():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"takes a link, as everlearn\.surgery\.tracing\.links\(model, x\) finds it"):
        widen(net, "0", 5)
    with pytest.raises(TypeError, match=r"got .* and 2\.5"):
        widen(net, links(net, torch.zeros(2, 4))[0], 2.5)


MAKERS = {
    "expandnet": lambda: ExpandNet(units=4, threshold=0.0, rounds=2, look=0.2),
    "den": lambda: DEN(units=4, splits=3, threshold=0.0, drift=0.01, strength=0.01),
    "pnn": PNN,
    "expandable": lambda: ExpandableRepresentation(30, tune_epochs=2),
}
all_methods = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
unit_methods = pytest.mark.parametrize("make", [MAKERS["expandnet"], MAKERS["den"]], ids=["expandnet", "den"])
isolation_methods = pytest.mark.parametrize("make", list(MAKERS.values())[:3], ids=list(MAKERS)[:3])
X = torch.linspace(0, 1, 5 * 64).reshape(5, 1, 8, 8)


def make_net(stream):
    torch.manual_seed(0)
    return nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def learn(model, method, tasks, epochs=3):
    train_tasks(model, method, tasks, optimizer=adam, epochs=epochs, batch_size=32)


def learn_part(model, method, task, steps=36, planned=40, compute_loss=None):
    """Begin a task and train for a part of it, by default with the method's loss."""
    task.steps = planned
    method.begin_task(model, task)
    optimizer = adam([*model.parameters(), *method.parameters()])
    model.train()
    for batch in task.batches(16, iterations=steps):
        optimizer.zero_grad()
        loss = method.loss(model, batch) if compute_loss is None else compute_loss(batch)
        loss.backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)


def list_hooks(model):
    return [h for m in model.modules() for h in [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]]


@unit_methods
def test_a_loop_with_its_own_loss_needs_validation_data(make, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:1])
    with pytest.raises(
        ValueError, match=r"has no training loss .* method\.loss\(model, batch\), or give the task valid"
    ):
        learn_part(model, method, stream[1], compute_loss=lambda batch: batch.loss(model(batch.x)))

    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:1])
    stream[1].valid = stream[1].test
    learn_part(model, method, stream[1], compute_loss=lambda batch: batch.loss(model(batch.x)))
    assert set(method.active_units.values()) != {0}


@unit_methods
def test_an_empty_validation_set_counts_as_none(make, small_stream):
    stream = small_stream()
    empty = (torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
    model = make_net(stream)
    method = make()
    for task in stream.tasks[:2]:
        learn(model, method, [Task(task.train, valid=empty, id=task.id, allowed=task.allowed)])
    assert method.diagnostics()["units added so far"] > 0

    # The length of a generator is unknown.
    task = Task(stream[2].train, valid=(batch for batch in ()), id=2)
    with pytest.raises(ValueError, match="validation data of task 2 hold no examples: give some, or valid=None"):
        learn(model, method, [task])


@all_methods
def test_a_checkpoint_inside_a_task_predicts_the_same(make, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:1])
    learn_part(model, method, stream[1])
    loaded_model = nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10))
    loaded_model.load_state_dict(model.state_dict())
    loaded_method = make()
    loaded_method.load_state_dict(method.state_dict())
    for task in (torch.ones(5), torch.tensor([1, 0, 1, 0, 7]), None):
        assert torch.equal(loaded_method.predict(loaded_model, X, task), method.predict(model, X, task))


@isolation_methods
def test_two_methods_on_one_model_do_not_disturb_each_other(make, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:2])
    early_outputs = [method.predict(model, X, k) for k in (0, 1)]
    second_method = copy.deepcopy(method)
    method.begin_task(model, stream[2])
    learn_part(model, method, stream[2])
    outputs = [method.predict(model, X, k) for k in (0, 1, 2)]
    model_outputs = model.eval()(X)
    for k in (0, 1):
        if not isinstance(method, DEN):  # whose outputs of old tasks drift
            assert torch.equal(second_method.predict(model, X, k), early_outputs[k])
            assert torch.equal(outputs[k], early_outputs[k])

    second_method.predict(model, X, 2)
    second_method.export(model, 1)
    assert torch.equal(model(X), model_outputs), "the first method still trains the model"
    assert all(torch.equal(method.predict(model, X, k), outputs[k]) for k in (0, 1, 2))

    # Now the second method trains the model.
    learn(model, second_method, [Task(stream[2].train, id=3)])
    if not isinstance(method, DEN):
        assert all(torch.equal(second_method.predict(model, X, k), early_outputs[k]) for k in (0, 1))
        assert all(torch.equal(method.predict(model, X, k), early_outputs[k]) for k in (0, 1))


@pytest.mark.slow
@all_methods
def test_the_data_of_an_ended_task_are_released(make):
    torch.manual_seed(0)
    model = nets.mlp((1, 8, 8), 6, hidden=(12, 10))
    method = make()
    tasks = [Task((torch.rand(4000, 1, 8, 8), torch.arange(4000) % 6), id=k) for k in range(2)]
    learn(model, method, tasks, epochs=1)
    third_task = Task((torch.rand(4000, 1, 8, 8), torch.arange(4000) % 6), id=2)
    method.begin_task(model, third_task)
    file_inside_task = io.BytesIO()
    torch.save(model, file_inside_task)
    method.end_task(model, third_task)
    file = io.BytesIO()
    torch.save(model, file)

    data = [weakref.ref(task.train.x) for task in [*tasks, third_task]]
    tasks.clear()
    del third_task
    gc.collect()
    assert not any(ref() is not None for ref in data)

    model_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert max(file_inside_task.tell(), file.tell()) < 10 * model_bytes + 100_000 < 4000 * 64 * 4
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).eval()(X), model.eval()(X))


@all_methods
def test_detach_leaves_a_plain_model_and_no_other(make, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:2])
    model_copy = copy.deepcopy(model)
    method.predict(model_copy, X, 0)
    outputs = method.predict(model, X, 1)
    method.detach(model_copy)
    assert not list_hooks(model_copy) and list_hooks(model)
    assert torch.equal(method.predict(model, X, 1), outputs)
    method.load_state_dict(method.state_dict())
    method.detach(model)
    assert not list_hooks(model)


@isolation_methods
@pytest.mark.parametrize("frozen", ["1", "3", "5", "bias"])
def test_parameters_frozen_by_the_user_stay_frozen(make, frozen, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    parameters = [model[1].bias, model[3].bias]
    if frozen != "bias":
        parameters = list(model.get_submodule(frozen).parameters())
    before = [p.requires_grad_(False).detach().clone() for p in parameters]
    task_ids = []
    for task in stream:
        learn(model, method, [task])
        method.predict(model, X, task.id)
        task_ids.append(task.id)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    for task_id in task_ids:
        torch.testing.assert_close(method.export(model, task_id)(X), method.predict(model, X, task_id))


@isolation_methods
def test_a_frozen_convolution_of_a_residual_network(make, small_stream):
    stream = small_stream()
    model = nets.resnet(stream.inputs, stream.outputs, width=4, blocks=(1, 1))
    method = make()
    model.get_submodule(links(model, X)[0].consumer).requires_grad_(False)
    learn(model, method, stream.tasks[:2], epochs=1)
    torch.testing.assert_close(method.export(model, 1)(X), method.predict(model, X, 1), rtol=1e-4, atol=1e-5)


@all_methods
def test_a_model_that_moves_takes_its_added_parts_along(make, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:2])
    before = [method.predict(model, X, k) for k in (0, 1)]
    model.double()
    for k in (0, 1):
        torch.testing.assert_close(method.predict(model, X.double(), k), before[k].double(), rtol=1e-5, atol=1e-6)

    # A task that was not learned uses the model as it is.
    for outputs in (method.predict(model, X.double(), 7), model.eval()(X.double())):
        torch.testing.assert_close(outputs, before[1].double(), rtol=1e-5, atol=1e-6)

    # ExpandableRepresentation remembers inputs in the precision they had.
    stream[2].train.x = stream[2].train.x.double()
    if not isinstance(method, ExpandableRepresentation):
        learn(model, method, stream.tasks[2:])
        assert method.predict(model, X.double(), 2).dtype == torch.double
    assert all(p.dtype == torch.double for p in method.parameters())
    model.to("meta")
    for k in (0, 1):
        assert method.predict(model, X.double().to("meta"), k).device.type == "meta"


@unit_methods
def test_hooks_do_not_accumulate(make, small_stream):
    stream = small_stream()
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 5))
    method = make()
    counts = []
    for task in [*stream, Task(stream[0].train, id=3)]:
        learn(model, method, [task], epochs=1)
        counts.append((len(list_hooks(model)), len(method._locks.buffers)))
    assert counts[1:] == [counts[1]] * 3


@isolation_methods
def test_the_global_random_state_does_not_change(make, small_stream):
    stream = small_stream()
    model = make_net(stream)
    method = make()
    learn(model, method, stream.tasks[:2])
    before = torch.get_rng_state()
    method.export(model, 1)
    method.predict(model, X)
    method.begin_task(model, Task(stream[2].train, id=2))
    if isinstance(method, DEN):
        assert method.next_phase(model) == "retrain"
    assert torch.equal(torch.get_rng_state(), before)


class ByName(nn.Module):
    """Calls its layers with their inputs by name."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 6)

    def forward(self, x):
        x = self.norm(input=self.a(input=x.flatten(1))).relu()
        return self.c(input=self.b(input=x).relu())


@unit_methods
def test_layers_called_by_name(make, small_stream):
    stream = small_stream()
    method = make()
    method.groups = {"a": ["norm", "b"], "b": "c"}
    model = ByName()
    learn(model, method, stream)
    assert method.diagnostics()["units added so far"] > 0
    torch.testing.assert_close(method.export(model, 2)(X), method.predict(model, X, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "off"), [(partial(ExpandNet, sparsity=0.5), {"sparsity": 0.0}), (DEN, {"l1": 0.0, "lasso": 0.0})]
)
def test_a_dtype_that_rounds_proximal_steps_to_zero_is_refused(make, off):
    tasks = [Task((torch.rand(64, 1, 8, 8).bfloat16(), torch.arange(64) % 6), id=k) for k in range(2)]
    model = nets.mlp((1, 8, 8), 6, hidden=(8,)).bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16 rounds to zero.* keep the model in float32"):
        learn(model, make(), tasks)
    learn(model, make(**off), tasks)
