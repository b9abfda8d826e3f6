"""What growing networks promise together: loops of one's own are told what they forget, copies and checkpoints answer alike."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import everlearn
from everlearn import DEN, ER, EWC, PNN, ExpandableRepresentation, ExpandNet, Method, Task, nets
from everlearn.surgery.resize import widen
from everlearn.surgery.tracing import links

GROWING = [lambda: ExpandNet(units=4, threshold=0.0), lambda: DEN(units=4, threshold=0.0)]
ids = pytest.mark.parametrize("make", GROWING, ids=["expandnet", "den"])


def loop(method, stream, tasks=2, epochs=2, plan=1.0, begin=True, own=True, after=True, by_hand=None):
    """The guide's loop, with what people forget."""
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    for task in stream.tasks[:tasks]:
        task.steps = None if plan is None else int(plan * task.planned_steps(32, epochs))
        if begin:
            method.begin_task(model, task)
        optimizer = torch.optim.Adam([*model.parameters(), *(method.parameters() if own else ())], fused=True)
        for step, batch in enumerate(task.batches(32, epochs)):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            method.before_step(model)
            optimizer.step()
            if after:
                method.after_step(model)
            if by_hand and task.id and step in (0, 1, 2):
                by_hand(method, model)
        method.end_task(model, task)
    return model


@ids
def test_a_whole_loop_grows(make, small_stream):
    method = make()
    loop(method, small_stream())
    assert method.diagnostics()["units added so far"] > 0


@ids
@pytest.mark.parametrize(
    ("forgotten", "told"),
    [
        ({"begin": False}, r"knows of no task: call begin_task\(model, task\) before the first step"),
        ({"own": False}, r"does not move \w+'s own parameters: make it after begin_task"),
        ({"after": False}, "after_step was not called"),
        ({"plan": None}, "has not looked whether to grow.* set task.steps"),
    ],
)
def test_what_a_loop_forgets_is_told(make, forgotten, told, small_stream):
    with pytest.raises(ValueError, match=told):
        loop(make(), small_stream(), **forgotten)


@ids
@pytest.mark.parametrize("plan", [3.0, 0.3])
def test_another_length_than_planned_is_told(make, plan, small_stream):
    with pytest.warns(UserWarning, match=r"was learned for \d+ steps, but \w+ had been told \d+ \(task.steps\)"):
        loop(make(), small_stream(), plan=plan)


def test_without_a_plan_one_looks_oneself(small_stream):
    method = GROWING[0]()
    loop(method, small_stream(), plan=None, by_hand=lambda m, model: m.look_now(model))
    assert method.diagnostics()["units added so far"] > 0
    method = GROWING[1]()
    loop(method, small_stream(), plan=None, by_hand=lambda m, model: m.turn(model))
    assert method.diagnostics()["units added so far"] > 0


def test_the_expandable_representation_tells_too(small_stream):
    with pytest.raises(ValueError, match="knows of no task: call begin_task"):
        loop(ExpandableRepresentation(50), small_stream(), begin=False)
    with pytest.raises(ValueError, match="does not move ExpandableRepresentation's own parameters"):
        loop(ExpandableRepresentation(50), small_stream(), own=False)
    loop(ExpandableRepresentation(50), small_stream())


def test_its_export_is_a_plain_module(small_stream):
    stream = small_stream()
    method = ExpandableRepresentation(50)
    model = loop(method, stream, tasks=3)
    alone, x = method.export(model), stream[0].test.x
    torch.testing.assert_close(alone(x), method.predict(model, x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in alone.modules())
    torch.testing.assert_close(torch.export.export(alone, (x,)).module()(x), alone(x))
    before = {n: v.clone() for n, v in alone.state_dict().items()}
    for p in model.parameters():
        nn.init.zeros_(p)
    assert all(torch.equal(v, before[n]) for n, v in alone.state_dict().items())  # a copy, of its own


@ids
def test_parameters_are_counted_and_statistics_are_not(make, small_stream):
    stream, method = small_stream(), make()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, stream.outputs))
    task = stream[0]
    task.steps = 1
    method.begin_task(model, task)
    method.end_task(model, task)
    assert method.extra_parameters(model) == 0


@pytest.mark.parametrize(
    "method", [Method(), ER(10), EWC(), ExpandableRepresentation(10)], ids=lambda m: type(m).__name__
)
def test_predict_is_a_test_whatever_the_mode(method):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(8, 4)
    model[1].train()
    model[0].eval()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    said = method.predict(model, x)
    assert model[1].training and not model[0].training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(said, model.eval()(x))


def test_a_norm_of_another_width_is_refused():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3)
    )
    assert links(net, {"0": ["1", "2"]})[0].norms == ("1",)
    with pytest.raises(ValueError, match="'3' is for 6 units, '0' has 4"):
        links(net, {"0": ["3", "2"]})


def test_widen_wants_a_link():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"takes a link, as everlearn\.surgery\.tracing\.links\(model\) finds it"):
        widen(net, "0", 5)
    with pytest.raises(TypeError, match=r"got .* and 2\.5"):
        widen(net, links(net)[0], 2.5)


GROW = {
    "expandnet": lambda: ExpandNet(units=4, threshold=0.0, rounds=2, look=0.2),
    "den": lambda: DEN(units=4, splits=3, threshold=0.0, drift=0.01, strength=0.01),
    "pnn": PNN,
    "expandable": lambda: ExpandableRepresentation(30, tune_epochs=2),
}
every = pytest.mark.parametrize("make", GROW.values(), ids=list(GROW))
units = pytest.mark.parametrize("make", [GROW["expandnet"], GROW["den"]], ids=["expandnet", "den"])
isolating = pytest.mark.parametrize("make", list(GROW.values())[:3], ids=list(GROW)[:3])
X = torch.linspace(0, 1, 5 * 64).reshape(5, 1, 8, 8)


def net(stream):
    torch.manual_seed(0)
    return nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def learn(model, method, tasks, epochs=3):
    for task in tasks:
        everlearn.train(model, method, task, optimizer=adam, epochs=epochs, batch_size=32)


def learning(model, method, task, steps=36, planned=40, take=None):
    """In the middle of a task; ``take`` is how a loop takes its loss."""
    task.steps = planned
    method.begin_task(model, task)
    optimizer = adam([*model.parameters(), *method.parameters()])
    model.train()
    for batch in task.batches(16, iterations=steps):
        optimizer.zero_grad()
        (method.loss(model, batch) if take is None else take(batch)).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)


def hooks(model):
    return [h for m in model.modules() for h in [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]]


@units
def test_a_loss_that_nobody_hears_is_told(make, small_stream):
    stream = small_stream()
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:1])
    with pytest.raises(
        ValueError, match=r"has heard no training loss .* method\.loss\(model, batch\), or give the task valid"
    ):
        learning(model, method, stream[1], take=lambda batch: batch.loss(model(batch.x)))
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:1])
    stream[1].valid = stream[1].test
    learning(model, method, stream[1], take=lambda batch: batch.loss(model(batch.x)))
    assert set(method.awake.values()) != {0}


@units
def test_an_empty_validation_set_is_none(make, small_stream):
    stream, nothing = small_stream(), (torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
    model, method = net(stream), make()
    for task in stream.tasks[:2]:
        learn(model, method, [Task(task.train, valid=nothing, id=task.id, allowed=task.allowed)])
    assert method.diagnostics()["units added so far"] > 0
    task = Task(stream[2].train, valid=(batch for batch in ()), id=2)  # nobody knows how many
    with pytest.raises(ValueError, match="validation data of task 2 hold no examples: give some, or valid=None"):
        learn(model, method, [task])


@every
def test_a_checkpoint_of_a_task_that_is_being_learned_answers_for_it(make, small_stream):
    stream = small_stream()
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:1])
    learning(model, method, stream[1])
    other, again = nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10)), make()
    other.load_state_dict(model.state_dict())
    again.load_state_dict(method.state_dict())
    for asked in (torch.ones(5), torch.tensor([1, 0, 1, 0, 7]), None):
        assert torch.equal(again.predict(other, X, asked), method.predict(model, X, asked))


@isolating
def test_two_methods_on_one_model_do_not_disturb_each_other(make, small_stream):
    stream = small_stream()
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:2])
    early = [method.predict(model, X, k) for k in (0, 1)]
    other = copy.deepcopy(method)
    method.begin_task(model, stream[2])
    learning(model, method, stream[2])
    said = [method.predict(model, X, k) for k in (0, 1, 2)]
    now = model.eval()(X)
    for k in (0, 1):
        if not isinstance(method, DEN):  # whose old tasks drift
            assert torch.equal(other.predict(model, X, k), early[k]) and torch.equal(said[k], early[k])
    other.predict(model, X, 2)
    other.export(model, 1)
    assert torch.equal(model(X), now), "the one that learns goes on learning"
    assert all(torch.equal(method.predict(model, X, k), said[k]) for k in (0, 1, 2))
    learn(model, other, [Task(stream[2].train, id=3)])  # and now the other learns
    if not isinstance(method, DEN):
        assert all(torch.equal(other.predict(model, X, k), early[k]) for k in (0, 1))
        assert all(torch.equal(method.predict(model, X, k), early[k]) for k in (0, 1))


@every
def test_nothing_holds_the_data_of_a_task_that_has_ended(make):
    torch.manual_seed(0)
    model, method = nets.mlp((1, 8, 8), 6, hidden=(12, 10)), make()
    tasks = [Task((torch.rand(4000, 1, 8, 8), torch.arange(4000) % 6), id=k) for k in range(2)]
    learn(model, method, tasks, epochs=1)
    method.begin_task(model, third := Task((torch.rand(4000, 1, 8, 8), torch.arange(4000) % 6), id=2))
    torch.save(model, middle := io.BytesIO())
    method.end_task(model, third)
    torch.save(model, file := io.BytesIO())
    data, size = [weakref.ref(task.train.x) for task in [*tasks, third]], 4 * sum(p.numel() for p in model.parameters())
    tasks.clear()
    del third
    gc.collect()
    assert not any(ref() is not None for ref in data)
    assert max(middle.tell(), file.tell()) < 10 * size + 100_000 < 4000 * 64 * 4
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).eval()(X), model.eval()(X))


@every
def test_detach_leaves_this_model_plain(make, small_stream):
    stream = small_stream()
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:2])
    other = copy.deepcopy(model)
    method.predict(other, X, 0)
    said = method.predict(model, X, 1)
    method.detach(other)
    assert not hooks(other) and hooks(model)
    assert torch.equal(method.predict(model, X, 1), said)
    method.load_state_dict(method.state_dict())
    method.detach(model)
    assert not hooks(model)


@isolating
@pytest.mark.parametrize("frozen", ["1", "3", "5", "bias"])
def test_parts_that_the_user_has_frozen(make, frozen, small_stream):
    stream, said = small_stream(), {}
    model, method = net(stream), make()
    parts = [model[1].bias, model[3].bias] if frozen == "bias" else list(model.get_submodule(frozen).parameters())
    before = [p.requires_grad_(False).detach().clone() for p in parts]
    for task in stream:
        learn(model, method, [task])
        said[task.id] = method.predict(model, X, task.id)
    assert all(torch.equal(p, b) for p, b in zip(parts, before, strict=True))
    for number in said:
        torch.testing.assert_close(method.export(model, number)(X), method.predict(model, X, number))


@isolating
def test_a_frozen_convolution_of_a_residual_network(make, small_stream):
    stream = small_stream()
    model, method = nets.resnet(stream.inputs, stream.outputs, width=4, blocks=(1, 1)), make()
    model.get_submodule(links(model)[0].consumer).requires_grad_(False)
    learn(model, method, stream.tasks[:2], epochs=1)
    torch.testing.assert_close(method.export(model, 1)(X), method.predict(model, X, 1), rtol=1e-4, atol=1e-5)


@every
def test_a_model_that_moves_takes_the_added_parts_with_it(make, small_stream):
    stream = small_stream()
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:2])
    before = [method.predict(model, X, k) for k in (0, 1)]
    model.double()
    for k in (0, 1):
        torch.testing.assert_close(method.predict(model, X.double(), k), before[k].double(), rtol=1e-5, atol=1e-6)
    for said in (method.predict(model, X.double(), 7), model.eval()(X.double())):  # as it is
        torch.testing.assert_close(said, before[1].double(), rtol=1e-5, atol=1e-6)
    stream[2].train.x = stream[2].train.x.double()
    if not isinstance(method, ExpandableRepresentation):  # which remembers inputs in the precision they had
        learn(model, method, stream.tasks[2:])
        assert method.predict(model, X.double(), 2).dtype == torch.double
    assert all(p.dtype == torch.double for p in method.parameters())
    model.to("meta")
    for k in (0, 1):
        assert method.predict(model, X.double().to("meta"), k).device.type == "meta"


@units
def test_hooks_do_not_pile_up(make, small_stream):
    stream, count = small_stream(), []
    model, method = nets.cnn(stream.inputs, stream.outputs, channels=(4, 5)), make()
    for task in [*stream, Task(stream[0].train, id=3)]:
        learn(model, method, [task], epochs=1)
        count.append((len(hooks(model)), len(method._locks.buffers)))
    assert count[1:] == [count[1]] * 3


@isolating
def test_nobodys_random_numbers_shift(make, small_stream):
    stream = small_stream()
    model, method = net(stream), make()
    learn(model, method, stream.tasks[:2])
    before = torch.get_rng_state()
    method.export(model, 1)
    method.predict(model, X)
    method.begin_task(model, Task(stream[2].train, id=2))
    if isinstance(method, DEN):
        assert method.turn(model) == "retrain"
    assert torch.equal(torch.get_rng_state(), before)


class ByName(nn.Module):
    """Calls its layers with their inputs by name."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x):
        x = self.norm(input=self.a(input=x.flatten(1))).relu()
        return self.c(input=self.b(input=x).relu())


@units
def test_layers_called_by_name(make, small_stream):
    stream = small_stream()
    method = make()
    method.groups = {"a": ["norm", "b"], "b": "c"}
    learn(model := ByName(), method, stream)
    assert method.diagnostics()["units added so far"] > 0
    torch.testing.assert_close(method.export(model, 2)(X), method.predict(model, X, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [ExpandNet, DEN])
def test_a_precision_that_cannot_tell_its_steps_is_refused(make):
    tasks = [Task((torch.rand(64, 1, 8, 8).bfloat16(), torch.arange(64) % 6), id=k) for k in range(2)]
    model = nets.mlp((1, 8, 8), 6, hidden=(8,)).bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16 rounds to zero.* keep the model in float32"):
        learn(model, make(), tasks)
    off = {"sparsity": 0.0} if make is ExpandNet else {"l1": 0.0, "lasso": 0.0}
    learn(model, make(**off), tasks)
