"""Guarantees that PackNet and HAT share, on unusual models and in unusual loops."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everlearn
from everlearn import HAT, PNN, SI, ExpandNet, Gaussian, PackNet, Task
from everlearn.surgery import heads
from tests.helpers import train_tasks

KINDS = pytest.mark.parametrize("kind", [PackNet, HAT])
FROZEN = pytest.mark.parametrize("make", [PackNet, lambda: HAT(rest="frozen")], ids=["packnet", "hat"])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6))


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))


def learn(model, method, tasks, **options):
    train_tasks(model, method, tasks, optimizer=adamw, batch_size=32, **options)


def step(model, method, batch, optimizer):
    optimizer.zero_grad()
    method.loss(model, batch).backward()
    method.before_step(model)
    optimizer.step()
    method.after_step(model)


def inputs(stream):
    return next(stream[0].examples(20, "test")).x


class LeNet(nn.Module):
    """Flattens feature maps to a number of inputs that the code fixes."""

    def __init__(self, stream):
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.Linear(4 * 16, 12)
        self.c = nn.Linear(12, stream.outputs)

    def forward(self, x):
        return self.c(torch.relu(self.b(F.max_pool2d(torch.relu(self.a(x)), 2).view(-1, 64))))


class Tied(nn.Module):
    def __init__(self, stream):
        super().__init__()
        self.enter = nn.Linear(64, 8)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 8)
        self.head = nn.Linear(8, stream.outputs)
        self.c.weight = self.a.weight

    def forward(self, x):
        x = torch.relu(self.enter(x.flatten(1)))
        return self.head(torch.relu(self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))))


class Borrowed(Tied):
    """Reads a weight without calling its layer."""

    def __init__(self, stream):
        super().__init__(stream)
        self.c = nn.Linear(8, 8)

    def forward(self, x):
        return super().forward(x) + F.linear(
            F.linear(x.flatten(1), self.enter.weight), self.head.weight @ self.b.weight
        )


class Recurrent(nn.Module):
    def __init__(self, stream):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.positions = nn.Parameter(torch.randn(1, 8, 8))
        self.a = nn.Linear(8, 12)
        self.head = nn.Linear(12, stream.outputs)

    def forward(self, x):
        return self.head(torch.relu(self.a(self.lstm(x[:, 0] + self.positions)[0][:, -1])))


class Moving(nn.Module):
    """Updates a statistic by assigning a new tensor."""

    def __init__(self, stream):
        super().__init__()
        self.a = nn.Linear(64, 12)
        self.b = nn.Linear(12, 8)
        self.head = nn.Linear(8, stream.outputs)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.head(torch.relu(self.b(torch.relu(self.a(x - self.mean)))))


@pytest.mark.parametrize("net", [LeNet, Tied, Borrowed, Recurrent, Moving], ids=lambda n: n.__name__)
@KINDS
@pytest.mark.parametrize("rest", ["frozen", "own"])
def test_earlier_tasks_never_change_on_unusual_models(kind, rest, net, small_stream, check_isolation):
    check_isolation(lambda: kind(rest=rest), net, adamw, small_stream())


@KINDS
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_earlier_tasks_never_change_with_an_optimizer_kept_across_tasks(kind, name, small_stream, check_isolation):
    make = {"momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), "adam": lambda p: torch.optim.Adam(p, 1e-2)}
    check_isolation(kind, "cnn", make[name], small_stream(), reuse_optimizer=True)


@KINDS
def test_output_layer_may_grow_between_tasks(kind, small_stream):
    stream = small_stream()
    model = mlp()
    method = kind()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    heads.grow_output(model, 9)
    learn(model, method, stream.tasks[1:2])
    assert torch.equal(method.predict(model, x, 0), expected) and method.predict(model, x, 1).shape[1] == 9
    assert method.predict(model, x, torch.arange(20) % 2).shape[1] == 9


@KINDS
def test_copies_are_independent(kind, small_stream):
    stream = small_stream()
    model = normed()
    method = kind()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    method.begin_task(model, stream[1])
    optimizer = adamw([*model.parameters(), *method.parameters()])
    for batch in stream[1].batches(16):
        step(model, method, batch, optimizer)
        assert torch.equal(method.predict(copy.deepcopy(model), x, 0), expected)  # as in early stopping
    method.end_task(model, stream[1])
    assert torch.equal(method.predict(model, x, 0), expected)
    model_copy, method_copy = copy.deepcopy((model, method))
    assert torch.equal(method_copy.predict(model_copy, x, 0), expected) and torch.equal(
        method.predict(model_copy, x, 0), expected
    )
    learn(model_copy, method_copy, stream.tasks[2:])
    assert torch.equal(method_copy.predict(model_copy, x, 0), expected) and torch.equal(
        method.predict(model, x, 0), expected
    )
    method_copy.detach(model_copy)
    assert not any(m._forward_pre_hooks for m in model_copy.modules())


@FROZEN
def test_norms_stay_in_evaluation_mode_from_the_second_task_on(make, small_stream):
    stream = small_stream()
    model = normed()
    method = make()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    method.begin_task(model, stream[1])
    model.train()
    assert torch.allclose(model(x)[:5], model(x[:5]), atol=1e-6), (
        "outputs do not depend on the other examples of the batch"
    )


@FROZEN
def test_a_forward_pass_between_tasks_changes_nothing(make, small_stream):
    stream = small_stream()
    model = normed()
    method = make()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    model.train()
    model(x + 3)
    assert torch.equal(method.predict(model, x, 0), expected)


@KINDS
def test_export_within_a_task_keeps_the_locks(kind, small_stream):
    stream = small_stream()
    model = mlp()
    method = kind()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    method.begin_task(model, stream[1])
    optimizer = adamw([*model.parameters(), *method.parameters()])
    for batch in stream[1].batches(16):
        method.export(model, 0)
        step(model, method, batch, optimizer)
    method.end_task(model, stream[1])
    assert torch.equal(method.predict(model, x, 0), expected)


@KINDS
def test_a_task_in_parts(kind, small_stream):
    """All parts share a sub-network; until the task ends, the model itself computes its outputs."""
    stream = small_stream()
    model = mlp()
    method = kind()
    x = inputs(stream)
    rows = len(stream[1].train) // 2
    halves = [Task(stream[1].train.subset(i), id=1, part=n) for n, i in enumerate(torch.arange(2 * rows).split(rows))]
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    learn(model, method, halves[:1])
    method.begin_task(model, halves[1])
    with torch.no_grad():
        model[-1].weight.add_(1.0)
    model.eval()
    assert torch.equal(method.predict(model, x, 1), model(x))
    with torch.no_grad():
        model[-1].weight.sub_(1.0)
    method.end_task(model, halves[1])
    assert method.tasks == [0, 1] and torch.equal(method.predict(model, x, 0), expected)


@KINDS
def test_model_converted_to_double_precision(kind, small_stream):
    stream = small_stream()
    model = mlp()
    method = kind()
    x = inputs(stream)
    learn(model, method, stream.tasks[:2])
    expected = method.predict(model, x, 0)
    model.double()
    torch.testing.assert_close(method.predict(model, x.double(), 0), expected.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(method.export(model, 0)(x.double()), expected.double(), rtol=1e-5, atol=1e-6)


@KINDS
def test_predict_before_training_uses_evaluation_mode(kind, small_stream):
    model = normed().train()
    expected = copy.deepcopy(model.state_dict())
    kind().predict(model, inputs(small_stream()), 0)
    assert all(torch.equal(v, expected[n]) for n, v in model.state_dict().items()) and model.training


@KINDS
def test_regression_outputs_cannot_identify_the_task(kind):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    method = kind()
    for k in range(2):
        data = torch.randn(16, 3), torch.randn(16, 2)
        everlearn.train(model, method, Task(data, id=k, likelihood=Gaussian()), batch_size=8)
    assert method.predict(model, data[0], 1).shape == (16, 2)
    with pytest.raises(ValueError, match=r"must know the task of each example: predict\(model, x, task\)"):
        method.predict(model, data[0])


@KINDS
def test_chains_in_both_orders_with_a_method_that_edits_gradients(kind, small_stream):
    for chain in (lambda k: k + SI(1.0), lambda k: SI(1.0) + k):
        stream = small_stream()
        method = kind()
        model = mlp()
        x = inputs(stream)
        learn(model, chain(method), stream.tasks[:1])
        expected = method.predict(model, x, 0)
        chained = chain(method)
        chained.begin_task(model, stream[1])
        learn(model, chained, stream.tasks[1:2])
        assert torch.equal(method.predict(model, x, 0), expected)


@KINDS
def test_a_task_must_end_before_the_next_begins(kind, small_stream):
    stream = small_stream()
    model = mlp()
    method = kind()
    method.begin_task(model, stream[0])
    with pytest.raises(ValueError, match=r"Task 0 has not ended: call end_task"):
        method.begin_task(model, stream[1])
    with pytest.raises(ValueError, match="'zz'"):
        kind(output="zz").begin_task(model, stream[0])


@pytest.mark.slow
@KINDS
def test_compiled_models(kind, small_stream):
    stream = small_stream()
    model = normed()
    method = kind()
    x = inputs(stream)
    compiled = torch.compile(model, backend="eager")
    compiled(x)  # before any hook is registered
    learn(compiled, method, stream.tasks[:1])
    expected = method.predict(compiled, x, 0)
    assert all(e.grad is not None and e.grad.any() for e in method.parameters())
    learn(compiled, method, stream.tasks[1:])
    assert torch.equal(method.predict(compiled, x, 0), expected)


@KINDS
def test_tasks_without_ids_are_numbered_and_must_end(kind):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    method = kind()
    data = torch.randn(16, 3), torch.arange(16) % 2
    for _ in range(2):
        everlearn.train(model, method, data, batch_size=8)
    assert method.tasks == [0, 1]
    assert torch.equal(method.predict(model, data[0], 0), method.predict_as(model.eval(), data[0], 0))
    method.begin_task(model, data)
    with pytest.raises(ValueError, match="Task 2 has not ended"):
        method.begin_task(model, data)
    reloaded = kind()
    reloaded.load_state_dict(method.state_dict())
    reloaded.begin_task(model, data)  # a checkpoint of a task that is being learned
    assert reloaded.tasks == [0, 1, 2]


@KINDS
def test_predict_accepts_a_task_per_example(kind, small_stream):
    stream = small_stream()
    model = mlp()
    method = kind()
    x = inputs(stream)
    learn(model, method, stream.tasks[:2])
    assert torch.equal(method.predict(model, x, [1] * 20), method.predict(model, x, 1))
    assert method.predict(model, x[:0], torch.zeros(0)).shape == (0, 6)
    with pytest.raises(ValueError, match="tasks of 5 examples for 20"):
        method.predict(model, x, torch.zeros(5))


# Weights that change between the end of a task and the beginning of the next.


def expand_net():
    return ExpandNet(units=4, threshold=0.0, look=0.2)


LOCKING = pytest.mark.parametrize("make", [PackNet, HAT, expand_net], ids=["PackNet", "HAT", "ExpandNet"])


def late_step(model, stream):
    F.cross_entropy(model(inputs(stream)), torch.zeros(20, dtype=torch.long)).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()


def averaged(model, stream):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.999)


@LOCKING
@pytest.mark.parametrize("move_weights", [late_step, averaged])
@pytest.mark.parametrize("loaded", [False, True], ids=["", "from a file"])
def test_changes_between_tasks_raise(make, move_weights, loaded, small_stream):
    stream = small_stream()
    model = mlp()
    method = make()
    learn(model, method, stream.tasks[:2])
    start = copy.deepcopy(model.state_dict())
    move_weights(model, stream)
    if loaded:
        reloaded = make()
        reloaded.load_state_dict(method.state_dict())
        method.detach(model)
        method = reloaded
    state = repr(method.state_dict())
    with pytest.raises(
        ValueError, match=r"moved since task 1 ended, so that the outputs of \w+ for earlier tasks would change"
    ):
        method.begin_task(model, stream[2])
    assert repr(method.state_dict()) == state
    model.load_state_dict(start)
    learn(model, method, stream.tasks[2:])


@LOCKING
def test_averaged_weights_may_be_copied_in_before_the_task_ends(make, small_stream):
    stream = small_stream()
    model = mlp()
    method = make()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    stream[1].steps = stream[1].steps_per_epoch(16)
    method.begin_task(model, stream[1])
    optimizer = adamw([*model.parameters(), *method.parameters()])
    for batch in stream[1].batches(16):
        step(model, method, batch, optimizer)
    averaged(model, stream)
    method.restore_locked(model)
    method.end_task(model, stream[1])
    assert torch.equal(method.predict(model, x, 0), expected)
    learn(model, method, stream.tasks[2:])
    assert torch.equal(method.predict(model, x, 0), expected)


@LOCKING
def test_task_specific_parameters_may_change_between_tasks(make, small_stream):
    stream = small_stream()
    model = normed()
    method = make()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    with torch.no_grad():
        model[-1].weight.mul_(3)
    model.train()
    model(x + 3)
    learn(model, method, stream.tasks[1:2])
    assert torch.equal(method.predict(model, x, 0), expected)


@KINDS
def test_weights_of_a_task_may_change_between_its_parts(kind, small_stream):
    stream = small_stream()
    model = mlp()
    method = kind()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    parts = [Task(stream[1].train, id=1, part=n) for n in range(2)]
    learn(model, method, parts[:1])
    start = copy.deepcopy(model.state_dict())
    used = method.protected_entries(model, 1)["1.weight"]
    with torch.no_grad():
        model[1].weight[~used] *= 2
    learn(model, method, parts[1:])
    assert torch.equal(method.predict(model, x, 0), expected)
    model.load_state_dict(start)
    averaged(model, stream)
    with pytest.raises(ValueError, match="moved since task 0 ended"):
        method.begin_task(model, parts[1])


def test_columns_are_independent_copies(small_stream):
    stream = small_stream()
    model = mlp()
    method = PNN()
    x = inputs(stream)
    learn(model, method, stream.tasks[:1])
    expected = method.predict(model, x, 0)
    averaged(model, stream)
    learn(model, method, stream.tasks[1:2])
    assert torch.equal(method.predict(model, x, 0), expected)


# Layers that were frozen while an earlier task was learned.


@pytest.mark.filterwarnings("ignore:PackNet keeps 1.weight locked")
@pytest.mark.parametrize(
    "make",
    [PackNet, lambda: PackNet(rest="own"), HAT, lambda: HAT(rest="frozen"), expand_net, PNN],
    ids=["PackNet", "PackNet, own", "HAT", "HAT, frozen", "ExpandNet", "PNN"],
)
def test_an_unfrozen_layer_belongs_to_earlier_tasks(make, small_stream):
    stream = small_stream()
    model = mlp()
    method = make()
    x = inputs(stream)
    model[1].requires_grad_(False)
    learn(model, method, stream.tasks[:1], epochs=3)
    expected = method.predict(model, x, 0)
    model[1].requires_grad_(True)
    learn(model, method, stream.tasks[1:], epochs=3)
    assert torch.equal(method.predict(model, x, 0), expected)


@pytest.mark.parametrize("kind", [PackNet, HAT, PNN])
def test_inputs_may_be_lists_of_numbers(kind, small_stream):
    torch.manual_seed(0)
    model = mlp()
    method = kind()
    stream = small_stream()
    learn(model, method, stream)
    x = inputs(stream)[:4]
    for task in (None, 0, [0, 1, 0, 1]):
        assert torch.equal(method.predict(model, x.tolist(), task), method.predict(model, x, task))
