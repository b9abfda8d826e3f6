import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import HAT, Task, nets

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def learned(stream, tasks=2, net=None, **options):
    torch.manual_seed(0)
    model = net or nets.mlp(stream.inputs, stream.outputs, hidden=(32, 16))
    method = HAT(**options)
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, optimizer=OPTIMIZERS["adam"], epochs=3, batch_size=32)
    return model, method


def begin_small_task(tasks=1, **options):
    """A small network at the beginning of its last task, with gates of earlier tasks."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    method = HAT(**options)
    data = torch.randn(8, 3), torch.arange(8) % 2
    for k in range(tasks - 1):
        method.begin_task(model, Task(data, id=k))
        method.end_task(model, Task(data, id=k))
    task = Task(data, id=tasks - 1)
    method.begin_task(model, task)
    return model, method, task


@pytest.mark.parametrize("rest", ["frozen", "own"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_earlier_tasks_never_change(net, optimizer, rest, small_stream, check_isolation):
    check_isolation(lambda: HAT(rest=rest), net, OPTIMIZERS[optimizer], small_stream("task"))


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_earlier_tasks_never_change_with_shared_outputs(scenario, small_stream, check_isolation):
    check_isolation(HAT, "cnn", OPTIMIZERS["adamw"], small_stream(scenario))


@pytest.mark.parametrize("smax", [10.0, 25.0, 400.0])
def test_earlier_tasks_never_change_at_any_slope(smax, small_stream, check_isolation):
    check_isolation(lambda: HAT(smax=smax), "mlp", OPTIMIZERS["momentum"], small_stream())


def test_soft_gates_drift_if_smax_is_small(small_stream):
    stream = small_stream()
    x = next(stream[0].examples(50, "test")).x
    drift = {}
    for smax in (3.0, 400.0):
        model, method = learned(stream, 1, soft=True, smax=smax)
        expected = method.predict_as(model, x, 0)
        everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["sgd"], epochs=3, batch_size=32)
        drift[smax] = float((method.predict_as(model, x, 0) - expected).detach().abs().max())
    assert drift[400.0] < 1e-4 < drift[3.0]


def test_annealing_covers_its_range_in_every_epoch(small_stream):
    stream = small_stream()
    scales = []

    class Watched(HAT):
        def before_step(self, model):
            scales.append(self._scale())
            super().before_step(model)

    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    everlearn.train(model, Watched(smax=50.0), stream[0], epochs=2, batch_size=10)
    batches = stream[0].steps_per_epoch(10)
    assert scales[:batches] == scales[batches:]
    assert scales[0] == pytest.approx(1 / 50) and scales[batches - 1] == pytest.approx(50)
    step = (50 - 1 / 50) / (batches - 1)
    assert all(b - a == pytest.approx(step) for a, b in pairwise(scales[:batches]))
    scales.clear()
    everlearn.train(model, Watched(smax=50.0, anneal="task"), stream[0], epochs=2, batch_size=10)
    assert scales == sorted(scales) and scales[-1] == pytest.approx(50) and len(scales) == 2 * batches


def test_micro_batches_do_not_change_the_number_of_batches(small_stream):
    stream = small_stream()
    counts = []
    for accumulate in (1, 4):
        method = HAT()
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
        everlearn.train(model, method, stream[0], batch_size=20, accumulate=accumulate)
        counts.append(method.batches)
    assert counts == [stream[0].steps_per_epoch(20)] * 2


@pytest.mark.parametrize("batch", [0, 3, 6])
def test_compensated_gradients_do_not_depend_on_the_slope(batch):
    """The gradient of e equals that of gates σ(e) times s_max, within double precision."""
    torch.set_default_dtype(torch.double)
    try:
        model, method, _ = begin_small_task(strength=0.0, smax=20.0)
        method.batches = 21
        method.batch = batch
        (e,) = method.parameters()
        with torch.no_grad():
            e.copy_(torch.tensor([-1.5, -0.2, 0.3, 2.0]))
        weights = torch.tensor([1.0, -2.0, 3.0, 0.5])
        (method.gate("0", training=True) * weights).sum().backward()
        method.before_step(model)
        truth = weights * 20.0 * e.detach().sigmoid() * (1 - e.detach().sigmoid())
        torch.testing.assert_close(e.grad, truth)
    finally:
        torch.set_default_dtype(torch.float)


def test_embeddings_are_clamped():
    model, method, _ = begin_small_task()
    with torch.no_grad():
        method.parameters()[0].fill_(9.0)
    method._first_step_examples = 8
    method.after_step(model)
    assert method.parameters()[0].max() == 6


def test_penalty_counts_only_units_that_are_free():
    model, method, _ = begin_small_task(tasks=2, strength=2.0)
    method.masks[0] = {"0": torch.tensor([1.0, 1.0, 0.0, 0.0])}
    method._lock(model)
    method.batches = 2
    method.batch = 1  # steepest
    (e,) = method.parameters()

    def cost(*values):
        with torch.no_grad():
            e.copy_(torch.tensor(values))
        return float(torch.as_tensor(method.penalty(model)).detach())

    assert cost(6.0, 6.0, -6.0, -6.0) == 0.0, "only used units"
    assert cost(-6.0, -6.0, 6.0, 6.0) == 2.0, "all free units"
    assert cost(6.0, -6.0, 6.0, -6.0) == 1.0
    method.masks[0] = {"0": torch.ones(4)}
    method._lock(model)
    assert cost(6.0, 6.0, 6.0, 6.0) == 0.0, "a full network"
    model, method, _ = begin_small_task(strength=2.0)
    method.batches = 2
    method.batch = 1
    (e,) = method.parameters()
    assert cost(6.0, 6.0, 6.0, -6.0) == 1.5, "in the first task the mean gate"


def test_weights_between_used_units_are_locked():
    model, method, _ = begin_small_task(tasks=2, rest="frozen")
    method.masks[0] = {"0": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    method._lock(model)
    assert method._locks.masks["0.weight"].tolist() == [[True] * 3, [False] * 3, [True] * 3, [False] * 3]
    assert method._locks.masks["0.bias"].tolist() == [True, False, True, False]
    assert not {"2.weight", "2.bias"} & set(method._locks.masks), "each task has an output layer of its own"
    deep = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    method = HAT()
    data = torch.randn(8, 3), torch.arange(8) % 2
    for k in range(2):
        method.begin_task(deep, Task(data, id=k))
        if not k:
            with torch.no_grad():
                method.embedding["0"].copy_(torch.tensor([1.0, -1.0]))
                method.embedding["2"].copy_(torch.tensor([-1.0, 1.0]))
            method.end_task(deep, Task(data, id=k))
            assert [gates.tolist() for gates in method.masks[0].values()] == [[1.0, 0.0], [0.0, 1.0]]
    assert method._locks.masks["2.weight"].tolist() == [[False, False], [True, False]]


def test_weights_of_unused_units_do_not_matter(small_stream):
    stream = small_stream()
    model, method = learned(stream, 3)
    x = next(stream[0].examples(20, "test")).x
    expected = [method.predict_as(model, x, k) for k in range(3)]
    used = {n: torch.stack([m[n] for m in method.masks]).amax(0) for n in method.masks[0]}
    assert all(method.capacity()[n] == float(u.mean()) for n, u in used.items())
    with torch.no_grad():
        for name, rows in used.items():
            layer = model.get_submodule(name)
            layer.weight[rows == 0] = torch.randn_like(layer.weight[rows == 0])
        for link in method._links:
            layer = model.get_submodule(link.consumer)
            if link.consumer in used:
                layer.weight[:, used[link.producer] == 0] = 7.0
    assert (used["1"] == 0).any(), "some units are free"
    assert all(torch.equal(method.predict_as(model, x, k), expected[k]) for k in range(3))


def test_a_larger_strength_uses_fewer_units(small_stream):
    stream = small_stream()
    shares = []
    for strength in (0.0, 0.75, 5.0):
        torch.manual_seed(0)
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(32,))
        method = HAT(strength)
        everlearn.train(model, method, stream[0], optimizer=OPTIMIZERS["sgd"], epochs=20, batch_size=16)
        shares.append(method.capacity()["1"])
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_export_removes_unused_units(net, small_stream, check_export):
    from tests.conftest import SMALL_NETS

    stream = small_stream()
    model, method = learned(stream, 3, SMALL_NETS[net](stream))
    check_export(model, method, stream, tolerance=1e-4)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in method.export(model, 0).parameters()) < 0.8 * num_parameters
    everlearn.train(model, method, Task(stream[2].train, id=7), batch_size=32)  # the gates are still registered


def test_export_of_soft_gates_and_of_a_layer_without_used_units(small_stream, check_export):
    stream = small_stream()
    model, method = learned(stream, 3, soft=True, smax=5.0)
    method.masks[1]["1"].zero_()
    check_export(model, method, stream, tolerance=1e-4)
    assert method.export(model, 1)[1].out_features == 1


def test_named_groups_for_a_model_with_a_branch(small_stream):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 16)
            self.b = nn.Linear(16, 6)

        def forward(self, x):
            return self.b(torch.relu(self.a(x.flatten(1)))) if x.sum() > -1e9 else x

    stream = small_stream()
    for groups in (None, {"a": "b"}):
        _, method = learned(stream, 2, Branching(), groups=groups)
        assert 0 < method.capacity()["a"] < 1


def test_a_model_without_units_to_gate_raises():
    with pytest.raises(ValueError, match="no units to gate"):
        HAT().begin_task(nn.Linear(3, 2), Task((torch.randn(4, 3), torch.arange(4) % 2)))


def test_a_loop_without_before_step_raises(small_stream):
    stream = small_stream()
    model, method = learned(stream, 1)
    method.begin_task(model, stream[1])
    method.loss(model, next(stream[1].batches(32))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"HAT.before_step\(model\)"):
        method.end_task(model, stream[1])


def test_detach_leaves_a_plain_model(small_stream):
    stream = small_stream()
    model, method = learned(stream, 2)
    method.detach(model)
    assert not any(m._forward_pre_hooks for m in model.modules())
    x = next(stream[0].examples(5, "test")).x
    assert model(x).isfinite().all()


def test_free_weights_move_and_locked_ones_do_not(small_stream):
    stream = small_stream()
    model, method = learned(stream, 1)
    method.begin_task(model, stream[1])
    locked = dict(method._locks.masks)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    method.end_task(model, stream[1])
    model, method = learned(stream, 2)
    for name in ("1.weight", "3.weight"):
        moved = dict(model.named_parameters())[name] != expected[name]
        assert (
            not moved[locked[name]].any() and moved[~locked[name]].float().mean() > 0.2
        )  # except for dead units and black pixels


def test_soft_gates_scale_gradients():
    model, method, _ = begin_small_task(tasks=2, soft=True, rest="frozen")
    method.masks[0] = {"0": torch.tensor([1.0, 0.75, 0.5, 0.0])}
    method._lock(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    method.before_step(model)
    assert model[0].weight.grad[:, 0].tolist() == [0.0, 0.25, 0.5, 1.0]
    assert model[0].bias.grad.tolist() == [0.0, 0.25, 0.5, 1.0]


def test_gates_are_binary_outside_training():
    model, method, task = begin_small_task()
    x = next(task.examples(4)).x
    model.eval()
    hidden = model[0](x).relu() * (method.parameters()[0] > 0)
    assert torch.equal(model(x), nn.functional.linear(hidden, model[2].weight, model[2].bias))
    model.train()
    soft = model[0](x).relu() * (method.parameters()[0] * method._scale()).sigmoid()
    torch.testing.assert_close(model(x), nn.functional.linear(soft, model[2].weight, model[2].bias))


def test_gates_depend_on_the_seed_and_persist_across_parts():
    first = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        _, method, task = begin_small_task()
        first.append(method.parameters()[0].detach().clone())
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    model, method, task = begin_small_task()
    gates = method.parameters()[0].detach().clone()
    method.end_task(model, task)
    method.begin_task(model, task)
    assert torch.equal(method.parameters()[0], gates)


def test_gates_are_at_least_single_precision():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).half()
    method = HAT()
    method.begin_task(model, Task((torch.randn(8, 3).half(), torch.arange(8) % 2)))
    assert method.parameters()[0].dtype == torch.float32


def test_missing_steps_raise_before_any_change():
    model, method, _ = begin_small_task(tasks=1)
    method = HAT(anneal="task")
    state = repr(method.state_dict())
    with pytest.raises(ValueError, match=r"set task.steps"):
        method.begin_task(model, Task((torch.randn(8, 3), torch.arange(8) % 2), id=0))
    assert repr(method.state_dict()) == state
    with pytest.raises(ValueError, match=r"how many batches an epoch has"):
        HAT().begin_task(model, Task(iter([(torch.randn(8, 3), torch.arange(8) % 2)])))


def test_export_with_a_fixed_number_of_inputs_zeroes_units(small_stream, check_export):
    from tests.methods.isolation.test_base import LeNet

    stream = small_stream()
    model, method = learned(stream, 3, LeNet(stream))
    assert any((m["a"] == 0).any() for m in method.masks)
    check_export(model, method, stream, tolerance=1e-4)
    assert method.export(model, 0).a.out_channels == 4 and method.export(model, 0).b.out_features < 12


# Links whose units are not separate.


class Mixing(nn.Module):
    """Mixes the units of the first layer in a hook, which tracing does not see."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 3)
        self.a.register_forward_hook(lambda module, args, outputs: outputs + outputs.mean(1, keepdim=True))

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def labeled_data(n=64):
    x = torch.randn(n, 8)
    return x, x[:, :3].argmax(1)


def loader():
    return DataLoader(TensorDataset(*labeled_data()), batch_size=16)


def batches():
    return [tuple(part) for part in zip(*(v.split(16) for v in labeled_data()), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("make", [labeled_data, loader, batches], ids=["arrays", "loader", "list of batches"])
def test_links_are_tested_with_any_kind_of_data(make, compiled):
    torch.manual_seed(0)
    model = Mixing()
    method = HAT()
    x = labeled_data()[0]
    net = torch.compile(model, backend="eager") if compiled else model
    everlearn.train(net, method, Task(make(), id=0), optimizer=OPTIMIZERS["adamw"], epochs=20, batch_size=16)
    assert list(method.embedding) == list(method.masks[0]) == ["b"]
    expected = method.predict(net, x, 0)
    everlearn.train(net, method, Task(make(), id=1), optimizer=OPTIMIZERS["adamw"], epochs=20, batch_size=16)
    assert torch.equal(method.predict(net, x, 0), expected)
    reloaded = HAT()
    model_copy = copy.deepcopy(model)
    reloaded.load_state_dict(method.state_dict())  # which contains the links
    assert torch.equal(reloaded.predict(model_copy, x, 0), expected)


def test_an_iterator_is_not_consumed_by_the_test_of_links():
    torch.manual_seed(0)
    model = Mixing()
    method = HAT()
    task = Task(iter(batches()), id=0, steps=4)
    num_batches = 0
    method.begin_task(model, task)
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), *method.parameters()])
    for batch in task.batches(16):
        num_batches += 1
        step(model, method, batch, optimizer)
    assert num_batches == 4 and list(method.embedding) == ["b"]
    assert not model._forward_pre_hooks, "the test is over"


class ReusedWeight(nn.Module):
    """Reads the second layer's weight a second time, without its gates."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 3)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))) + nn.functional.linear(x, self.b.weight)))


class Permuted(nn.Module):
    """Flattens a convolution with positions before channels, so that units are not where a group expects them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(2, 4, 1)
        self.b = nn.Linear(16, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x.view(-1, 2, 4))).transpose(1, 2).flatten(1))


@pytest.mark.parametrize("make", [labeled_data, loader], ids=["arrays", "loader"])
@pytest.mark.parametrize("net", [Mixing, ReusedWeight, Permuted])
def test_groups_with_mixed_units_raise(net, make):
    task = Task(make(), id=0)
    with pytest.raises(ValueError, match="groups: the units of 'a' do not go to 'b' alone, or are mixed"):
        everlearn.train(net(), HAT(groups={"a": "b"}), task, batch_size=16)


def test_groups_of_tied_layers_raise():
    net = ReusedWeight()
    net.b.weight = net.a.weight
    with pytest.raises(ValueError, match="groups: 'a', 'b' shares a weight with another layer"):
        HAT(groups={"a": "b"}).begin_task(net, Task(labeled_data(), id=0))


# Loops in which gates do not learn.


def step(model, method, batch, optimizer):
    optimizer.zero_grad()
    method.loss(model, batch).backward()
    method.before_step(model)
    optimizer.step()
    method.after_step(model)


def test_an_optimizer_created_before_the_task_raises():
    model = nets.mlp(8, 3, hidden=(16,))
    method = HAT()
    task = Task(labeled_data(), id=0)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    method.begin_task(model, task)
    with pytest.raises(ValueError, match=r"does not move HAT's gates.*make it after begin_task"):
        step(model, method, next(task.batches(16)), optimizer)


def test_steps_with_learning_rate_zero_do_not_raise():
    model = nets.mlp(8, 3, hidden=(16,))
    method = HAT()
    task = Task(labeled_data(), id=0)
    method.begin_task(model, task)
    optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.0)  # as in a warm-up
    for batch in task.batches(16):
        step(model, method, batch, optimizer)
        optimizer.param_groups[0]["lr"] = 0.1
    assert method._gates_moved


def test_training_in_evaluation_mode_raises():
    model = nets.mlp(8, 3, hidden=(16,))
    method = HAT()
    task = Task(labeled_data(), id=0)
    method.begin_task(model, task)
    optimizer = OPTIMIZERS["adam"]([*model.parameters(), *method.parameters()])
    model.eval()
    with pytest.raises(ValueError, match=r"gates learn in training mode only.*call model.train\(\)"):
        step(model, method, next(task.batches(16)), optimizer)
    model.train()
    step(model, method, next(task.batches(16)), optimizer)
