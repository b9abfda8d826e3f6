import copy
import io

import pytest
import torch
from torch import nn

import everlearn
from everlearn import ExpandNet, nets
from everlearn.core.method import count_parameters
from everlearn.surgery.tracing import links

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}
GROW = {"units": 4, "threshold": 0.0, "rounds": 2, "look": 0.2}


def make_mlp(stream):
    return nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10))


def make_tanh_net(stream):
    """Create a network whose units are always active, so that each gets outgoing weights; a ReLU may stay at zero."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, stream.outputs)
    )


def learn(stream, tasks=3, net=make_mlp, epochs=3, optimizer=OPTIMIZERS["adamw"], **options):
    torch.manual_seed(0)
    model = net(stream)
    method = ExpandNet(**{**GROW, **options})
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, optimizer=optimizer, epochs=epochs, batch_size=32)
    return model, method


def train_steps(model, method, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        method.loss(model, batch).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)


def task_ids(x, task):
    return torch.full((len(x),), task)


def record_calls(monkeypatch, record):
    """Call ``record(method, loss)`` whenever the loss is compared with the threshold."""
    compute_loss = ExpandNet._compute_loss

    def compute_and_record(self, model):
        loss = compute_loss(self, model)
        record(self, loss)
        return loss

    monkeypatch.setattr(ExpandNet, "_compute_loss", compute_and_record)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_nothing_is_forgotten_bit_for_bit(net, optimizer, check_isolation, small_stream):
    check_isolation(lambda: ExpandNet(**GROW, sparsity=1.5), net, OPTIMIZERS[optimizer], small_stream())


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_an_export_is_a_plain_wider_module(net, check_export, small_stream):
    from tests.conftest import SMALL_NETS

    stream = small_stream()
    model, method = learn(stream, net=SMALL_NETS[net], epochs=1)
    check_export(model, method, stream, tolerance=1e-5)
    x = next(stream[0].examples(9, "test")).x
    widths = {link.producer: link.width for link in links(method.export(model, 2), x)}
    for link in links(model, x):
        num_added = sum(block[link.producer]["weight"].shape[0] for block in method.blocks)
        assert widths[link.producer] == link.width + num_added


def test_the_weights_of_an_export_are_block_triangular(small_stream):
    stream = small_stream()
    model, method = learn(stream, net=make_tanh_net)
    plain_model = method.export(model, 2)
    first, second = links(model, next(stream[0].examples(9, "test")).x)
    assert method.growth() == {
        0: {},
        1: {first.producer: 8, second.producer: 8},
        2: {first.producer: 8, second.producer: 8},
    }

    weight = plain_model.get_submodule(second.producer).weight
    for num_added in (8, 16):
        num_columns = first.width + num_added
        num_rows = second.width + num_added
        assert not weight[: num_rows - 8, num_columns - 8 :].any(), "older units receive nothing from newer ones"
        assert weight[num_rows - 8 : num_rows, :num_columns].any(1).all(), "newer units receive from all so far"
    assert torch.equal(weight[: second.width, : first.width], model.get_submodule(second.producer).weight)


def test_the_number_of_added_parameters_follows_the_formula(small_stream):
    stream = small_stream()
    model, method = learn(stream, net=make_tanh_net)
    inputs = 64
    outputs = 6

    def count_block(num_earlier):
        first_layer = 8 * (inputs + 1)
        second_layer = 8 * (12 + num_earlier + 8 + 1)
        return first_layer + second_layer

    heads = 3 * (outputs * 10 + outputs) + outputs * (8 + 16)
    expected = (inputs * 12 + 12) + (12 * 10 + 10) + heads + count_block(0) + count_block(8)
    assert method.diagnostics() == {"units added so far": 32}
    assert count_parameters(model, method) == expected


def test_outputs_do_not_change_when_units_are_activated(small_stream, double):
    stream = small_stream()
    x = torch.rand(7, 1, 8, 8)
    for task in stream:
        task.train.x = task.train.x.double()
    for net in (
        make_mlp,
        lambda s: nets.cnn(s.inputs, s.outputs, channels=(4, 5)),
        lambda s: nets.resnet(s.inputs, s.outputs, width=4, blocks=(1, 1)),
    ):
        model, method = learn(stream, tasks=2, net=net, epochs=1)
        model.eval()
        method.begin_task(model, stream[2])
        before = model(x)
        for num_active in (4, 8):
            method._activate_units(model)
            assert set(method.active_units.values()) == {num_active}
            torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)


def test_it_grows_if_and_only_if_the_loss_is_above_the_threshold(small_stream, monkeypatch):
    losses_by_task = {}
    record_calls(monkeypatch, lambda method, loss: losses_by_task.setdefault(len(method.tasks), []).append(loss))
    for threshold in (0.0, 0.1, 0.3, 100.0):
        losses_by_task.clear()
        _, method = learn(small_stream(), net=make_tanh_net, threshold=threshold, sparsity=0.0)
        for k, losses in losses_by_task.items():
            num_above = sum(loss > threshold for loss in losses)
            assert len(losses) == 2
            assert set(method.growth()[k - 1].values()) == ({4 * num_above} if num_above else set())


@pytest.mark.parametrize("valid", [True, False])
def test_the_loss_is_that_of_the_validation_data_or_of_the_last_steps(valid, small_stream, monkeypatch):
    compared = []
    record_calls(monkeypatch, lambda method, loss: compared.append(loss))
    stream = small_stream()
    model, method = learn(stream, tasks=1, look=0.5, rounds=1)
    task = stream[1]
    task.valid = task.test if valid else None
    task.steps = 8
    method.begin_task(model, task)
    optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.01)
    training_losses = []
    for batch in task.batches(16, iterations=8):
        optimizer.zero_grad()
        loss = method.loss(model, batch)
        training_losses.append(loss.item())
        loss.backward()
        method.before_step(model)
        optimizer.step()
        if len(training_losses) == 4:
            (test,) = task.examples(1000, "test")
            test_loss = test.loss(model(test.x)).item()
        method.after_step(model)
    expected = test_loss if valid else (training_losses[2] + training_losses[3]) / 2
    assert compared == [pytest.approx(expected, rel=1e-5)]


def test_a_second_identical_task_adds_no_units(small_stream):
    stream = small_stream("domain")
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(24,))
    method = ExpandNet(units=8)
    for task_id, index in enumerate([0, 1, 1]):
        task = everlearn.Task(stream[index].train, id=task_id)
        everlearn.train(model, method, task, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2), epochs=40, batch_size=16)
    first, second = list(method.growth().values())[1:]
    assert sum(first.values()) > 0
    assert second == {}


def test_max_units_limits_the_units_of_all_tasks(small_stream):
    _, method = learn(small_stream(), net=make_tanh_net, max_units=10, sparsity=0.0)
    assert method.diagnostics()["units added so far"] == 20
    assert [set(added.values()) for added in method.growth().values()] == [set(), {8}, {2}]
    _, method = learn(small_stream(), max_units=0)
    assert method.diagnostics()["units added so far"] == 0
    assert method.parameters() == []


def test_removing_units_without_incoming_weights_keeps_the_outputs(small_stream):
    stream = small_stream()
    x = torch.rand(9, 1, 8, 8)
    for net in (
        make_mlp,
        lambda s: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10), nn.Sigmoid(), nn.Linear(10, s.outputs)
        ),
        lambda s: nets.cnn(s.inputs, s.outputs, channels=(4, 5)),  # with BatchNorm
    ):
        model, method = learn(stream, tasks=1, net=net)
        task = stream[1]
        task.steps = 30
        method.sparsity = 2.0
        method.begin_task(model, task)
        optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=1e-3)
        model.train()
        train_steps(model, method, optimizer, task.batches(16, iterations=30))
        model.eval()
        before = model(x)
        num_active = sum(method.active_units.values())

        method.end_task(model, task)
        assert 0 <= method.diagnostics()["units added so far"] < num_active == 16
        torch.testing.assert_close(method.predict(model, x, task_ids(x, 1)), before, rtol=1e-5, atol=1e-5)
        for block in method.blocks:
            for tensors in block.values():
                assert tensors["weight"].flatten(1).any(1).all()


def test_removing_units_without_outgoing_weights_keeps_the_outputs(small_stream):
    stream = small_stream()
    x = torch.rand(9, 1, 8, 8)
    model, method = learn(stream, tasks=1, net=make_tanh_net)
    method.begin_task(model, stream[1])
    optimizer = OPTIMIZERS["momentum"]([*model.parameters(), *method.parameters()])
    method._activate_units(model)
    train_steps(model, method, optimizer, stream[1].batches(16, iterations=3))
    train_steps(model, method, optimizer, stream[1].batches(16, iterations=3))

    # Unit 1 of the second layer leads into nothing, and unit 2 of the first layer into that unit alone.
    first, second = (fields["producer"] for fields in method.link_fields)
    with torch.no_grad():
        method.current_head["weight"][:, 1] = 0
        method.current_block[second]["inner"][0, 2] = 0
        method.current_block[second]["inner"][2:, 2] = 0
    model.eval()
    outputs = model(x)

    # Units activated now get no outgoing weights.
    method.look_now(model)
    assert method.active_units[first] == 8
    method.end_task(model, stream[1])
    assert method.growth()[1] == {first: 3, second: 3}
    torch.testing.assert_close(method.predict(model, x, task_ids(x, 1)), outputs, rtol=1e-5, atol=1e-6)


def test_it_does_not_look_after_the_last_step(small_stream, monkeypatch):
    looks = []
    record_calls(monkeypatch, lambda method, loss: looks.append((len(method.tasks), method.steps)))
    stream = small_stream()
    learn(stream, tasks=2, look=0.5, rounds=2, epochs=4)
    assert looks == [(2, stream[1].steps // 2)]
    with pytest.warns(UserWarning, match=r"ExpandNet has never decided whether to grow .* or let it decide earlier"):
        learn(stream, tasks=2, look=1.0, rounds=1, epochs=1)


def test_inactive_units_stay_zero_and_the_head_learns_alone(small_stream):
    stream = small_stream()
    model, method = learn(stream, tasks=1)
    task = stream[1]
    before = copy.deepcopy(model.state_dict())
    method.begin_task(model, task)  # without planned steps, nothing grows
    optimizer = OPTIMIZERS["adamw"]([*model.parameters(), *method.parameters()])
    train_steps(model, method, optimizer, task.batches(16, epochs=2))
    for tensors in method.current_block.values():
        assert not any(v.any() for v in tensors.values())
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert changed == {list(before)[-2], list(before)[-1]}
    assert method.look_now(model)
    assert set(method.active_units.values()) == {4}


@pytest.mark.parametrize("moment", ["between tasks", "inside a task"])
def test_resuming_keeps_added_units(moment, small_stream):
    stream = small_stream()
    model, method = learn(stream, tasks=2)
    if moment == "inside a task":
        method.begin_task(model, stream[2])
        method._activate_units(model)
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)

    loaded_model = make_mlp(stream)
    loaded_model.load_state_dict(weights)
    loaded_method = ExpandNet(**GROW)
    loaded_method.load_state_dict(state)
    for trained_model, trained_method in ((model, method), (loaded_model, loaded_method)):
        torch.manual_seed(1)
        everlearn.train(
            trained_model, trained_method, stream[2], optimizer=OPTIMIZERS["momentum"], epochs=2, batch_size=32
        )
    assert repr(method.state_dict()) == repr(loaded_method.state_dict())
    x = torch.rand(5, 1, 8, 8)
    for task in range(3):
        loaded_outputs = loaded_method.predict(loaded_model, x, task_ids(x, task))
        assert torch.equal(method.predict(model, x, task_ids(x, task)), loaded_outputs)


def test_the_output_layer_may_grow_between_tasks(small_stream):
    stream = small_stream()
    x = torch.rand(5, 1, 8, 8)
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, 4, hidden=(12, 10))
    method = ExpandNet(**GROW)
    tasks = [everlearn.Task(task.train, id=task.id) for task in stream]
    for task in tasks[:2]:
        everlearn.train(model, method, task, batch_size=32)
    before = method.predict(model, x, task_ids(x, 1))
    everlearn.surgery.heads.grow_output(model, 6)
    everlearn.train(model, method, tasks[2], batch_size=32)
    assert torch.equal(method.predict(model, x, task_ids(x, 1)), before)
    assert method.predict(model, x, task_ids(x, 2)).shape == (5, 6)


def test_a_task_in_parts_grows_in_each(small_stream):
    stream = everlearn.streams.online(small_stream(), chunk=40)
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(12,))
    method = ExpandNet(**GROW, sparsity=0.0)
    counts = []
    for task in stream:
        everlearn.train(model, method, task, batch_size=8)
        counts.append(method.diagnostics()["units added so far"])
    assert counts == sorted(counts)
    assert method.block_task == sorted(method.block_task)
    assert set(method.block_task) == {1, 2}


class FixedWidth(nn.Module):
    """A model whose code fixes the number of features."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 36, 6)

    def forward(self, x):
        return self.out(self.conv(x).relu().view(-1, 144))


def test_impossible_settings_and_models_are_refused():
    with pytest.raises(ValueError, match="must not exceed 1"):
        ExpandNet(look=0.6, rounds=2)
    method = ExpandNet()
    with pytest.raises(ValueError, match="no layer to widen in Linear"):
        method.begin_task(nn.Linear(3, 2), everlearn.Task((torch.rand(4, 3), torch.zeros(4, dtype=torch.long)), id=0))

    model = FixedWidth()
    method = ExpandNet(threshold=0.0)
    tasks = [everlearn.Task((torch.rand(16, 1, 8, 8), torch.arange(16) % 6), id=k) for k in (0, 1)]
    with pytest.raises(ValueError, match=r"write x.flatten\(1\)"):
        everlearn.train(model, method, tasks[0])

    # Named by hand, the layers raise when they grow.
    method = ExpandNet(threshold=0.0, groups={"conv": "out"})
    everlearn.train(model, method, tasks[0])
    with pytest.raises(ValueError, match=r"as x.view\(-1, 64\)"):
        everlearn.train(model, method, tasks[1], epochs=10)


def test_detach_leaves_a_plain_model(small_stream):
    stream = small_stream()
    model, method = learn(stream, tasks=2)
    x = torch.rand(3, 1, 8, 8)
    method.detach(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    plain_model = make_mlp(stream)
    plain_model.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain_model(x))
