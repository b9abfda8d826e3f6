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


def learned(stream, tasks=3, net=None, epochs=3, optimizer=OPTIMIZERS["adamw"], **options):
    torch.manual_seed(0)
    model = net(stream) if net else nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10))
    method = ExpandNet(**{**GROW, **options})
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, optimizer=optimizer, epochs=epochs, batch_size=32)
    return model, method


def tanh(stream):
    """Units that always say something, so that each is read; one behind a ReLU may never speak, and is removed."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, stream.outputs)
    )


def numbered(x, task):
    return torch.full((len(x),), task)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_nothing_is_forgotten_bit_for_bit(net, optimizer, isolated, small_stream):
    isolated(lambda: ExpandNet(**GROW, sparsity=1.5), net, OPTIMIZERS[optimizer], small_stream())


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_an_export_is_a_plain_wider_module(net, exported, small_stream):
    from tests.conftest import SMALL_NETS

    stream = small_stream()
    model, method = learned(stream, net=SMALL_NETS[net], epochs=1)
    exported(model, method, stream, tolerance=1e-5)
    wide = {link.producer: link.width for link in links(method.export(model, 2))}
    for link in links(model):
        assert wide[link.producer] == link.width + sum(b[link.producer]["weight"].shape[0] for b in method.blocks)


def test_the_weights_of_an_export_are_block_triangular(small_stream):
    stream = small_stream()
    model, method = learned(stream, net=tanh)
    alone, (first, second) = method.export(model, 2), links(model)
    assert method.growth() == {
        0: {},
        1: {first.producer: 8, second.producer: 8},
        2: {first.producer: 8, second.producer: 8},
    }
    ends = [(link.width, link.width + 8, link.width + 16) for link in (first, second)]
    whole = alone.get_submodule(second.producer).weight
    for (_, wide), (_, tall) in zip(
        zip(ends[0], ends[0][1:], strict=False), zip(ends[1], ends[1][1:], strict=False), strict=True
    ):
        assert not whole[: tall - 8, wide - 8 :].any(), "older units read no newer ones"
        assert whole[tall - 8 : tall, :wide].any(1).all(), "newer units read older ones and themselves"
    assert torch.equal(whole[: ends[1][0], : ends[0][0]], model.get_submodule(second.producer).weight)


def test_parameters_added_are_those_of_the_formula(small_stream):
    stream = small_stream()
    model, method = learned(stream, net=tanh)
    inputs, outputs = 64, 6
    one = lambda before: 8 * (inputs + 1) + 8 * (12 + before + 8 + 1)  # two layers of new units
    heads = 3 * (outputs * 10 + outputs) + outputs * (8 + 16)
    want = (inputs * 12 + 12) + (12 * 10 + 10) + heads + one(0) + one(8)
    assert method.diagnostics() == {"units added so far": 32} and count_parameters(model, method) == want


def test_growing_changes_nothing_at_its_moment(small_stream, double):
    stream, x = small_stream(), torch.rand(7, 1, 8, 8)
    for task in stream:
        task.train.x = task.train.x.double()
    for net in (
        lambda s: nets.mlp(s.inputs, s.outputs, hidden=(12, 10)),
        lambda s: nets.cnn(s.inputs, s.outputs, channels=(4, 5)),
        lambda s: nets.resnet(s.inputs, s.outputs, width=4, blocks=(1, 1)),
    ):
        model, method = learned(stream, tasks=2, net=net, epochs=1)
        model.eval()
        method.begin_task(model, stream[2])
        before = model(x)
        for wake in (4, 8):
            method._wake(model)
            assert set(method.awake.values()) == {wake}
            torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)


def test_it_grows_if_and_only_if_the_loss_is_above_the_threshold(small_stream, monkeypatch):
    heard = {}

    def note(self, model):
        loss = loss_of(self, model)
        heard.setdefault(len(self.tasks), []).append(loss)
        return loss

    loss_of = ExpandNet._loss
    monkeypatch.setattr(ExpandNet, "_loss", note)
    for threshold in (0.0, 0.1, 0.3, 100.0):
        heard.clear()
        _, method = learned(small_stream(), net=tanh, threshold=threshold, sparsity=0.0)
        for k, losses in heard.items():
            high = sum(loss > threshold for loss in losses)
            assert len(losses) == 2
            assert set(method.growth()[k - 1].values()) == ({4 * high} if high else set())


@pytest.mark.parametrize("valid", [True, False])
def test_the_loss_is_that_of_the_validation_data_or_of_the_last_steps(valid, small_stream, monkeypatch):
    asked, loss_of = [], ExpandNet._loss
    monkeypatch.setattr(ExpandNet, "_loss", lambda self, model: asked.append(loss_of(self, model)) or asked[-1])
    stream = small_stream()
    model, method = learned(stream, tasks=1, look=0.5, rounds=1)
    task, seen = stream[1], []
    task.valid, task.steps = task.test if valid else None, 8
    method.begin_task(model, task)
    optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.01)
    for batch in task.batches(16, iterations=8):
        optimizer.zero_grad()
        loss = method.loss(model, batch)
        seen.append(loss.item())
        loss.backward()
        method.before_step(model)
        optimizer.step()
        if len(seen) == 4:
            (test,) = task.examples(1000, "test")
            truth = test.loss(model(test.x)).item()
        method.after_step(model)
    assert asked == [pytest.approx(truth if valid else (seen[2] + seen[3]) / 2, rel=1e-5)]


def test_a_second_identical_task_adds_no_units(small_stream):
    stream = small_stream("domain")
    torch.manual_seed(0)
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(24,)), ExpandNet(units=8)
    for number, source in enumerate([0, 1, 1]):
        task = everlearn.Task(stream[source].train, id=number)
        everlearn.train(model, method, task, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2), epochs=40, batch_size=16)
    first, second = list(method.growth().values())[1:]
    assert sum(first.values()) > 0
    assert second == {}


def test_the_budget_of_units_is_kept(small_stream):
    _, method = learned(small_stream(), net=tanh, max_units=10, sparsity=0.0)
    assert method.diagnostics()["units added so far"] == 20
    assert [set(added.values()) for added in method.growth().values()] == [set(), {8}, {2}]
    _, method = learned(small_stream(), max_units=0)
    assert method.diagnostics()["units added so far"] == 0 and method.parameters() == []


def test_dead_units_go_without_a_trace(small_stream):
    stream, x = small_stream(), torch.rand(9, 1, 8, 8)
    nets_ = {
        "relu": lambda s: nets.mlp(s.inputs, s.outputs, hidden=(12, 10)),
        "sigmoid": lambda s: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10), nn.Sigmoid(), nn.Linear(10, s.outputs)
        ),
        "batchnorm": lambda s: nets.cnn(s.inputs, s.outputs, channels=(4, 5)),
    }
    for net in nets_.values():
        model, method = learned(stream, tasks=1, net=net)
        task = stream[1]
        task.steps = 30
        method.sparsity = 2.0
        method.begin_task(model, task)
        optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=1e-3)
        model.train()
        for batch in task.batches(16, iterations=30):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        model.eval()
        before, awake = model(x), sum(method.awake.values())
        method.end_task(model, task)
        left = method.diagnostics()["units added so far"]
        assert 0 <= left < awake == 16
        torch.testing.assert_close(method.predict(model, x, numbered(x, 1)), before, rtol=1e-5, atol=1e-5)
        for block in method.blocks:
            for tensors in block.values():
                assert tensors["weight"].flatten(1).any(1).all()


def test_units_that_nobody_reads_go_without_a_trace(small_stream):
    stream, x = small_stream(), torch.rand(9, 1, 8, 8)
    model, method = learned(stream, tasks=1, net=tanh)
    method.begin_task(model, stream[1])
    optimizer = OPTIMIZERS["momentum"]([*model.parameters(), *method.parameters()])
    for wake in (True, False):
        if wake:
            method._wake(model)
        for batch in stream[1].batches(16, iterations=3):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
    first, second = (link.producer for link in links(model))
    with torch.no_grad():
        method.read["weight"][:, 1] = 0  # nobody reads unit 1 of the second layer
        method.live[second]["inner"][0, 2] = method.live[second]["inner"][2:, 2] = (
            0  # unit 2 of the first: it alone does
        )
    model.eval()
    said = model(x)
    method.look_now(model)  # and these wake too late to be read by anybody
    assert method.awake[first] == 8
    method.end_task(model, stream[1])
    assert method.growth()[1] == {first: 3, second: 3}
    torch.testing.assert_close(method.predict(model, x, numbered(x, 1)), said, rtol=1e-5, atol=1e-6)


def test_it_does_not_look_after_the_last_step(small_stream, monkeypatch):
    asked, loss_of = [], ExpandNet._loss
    monkeypatch.setattr(
        ExpandNet, "_loss", lambda self, model: asked.append((len(self.tasks), self.steps)) or loss_of(self, model)
    )
    stream = small_stream()
    learned(stream, tasks=2, look=0.5, rounds=2, epochs=4)
    assert asked == [(2, stream[1].steps // 2)]
    with pytest.warns(UserWarning, match=r"ExpandNet never came to look whether to grow .* or have it look earlier"):
        learned(stream, tasks=2, look=1.0, rounds=1, epochs=1)


def test_sleeping_units_stay_zero_and_head_learns_alone(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1)
    task = stream[1]
    before = copy.deepcopy(model.state_dict())
    method.begin_task(model, task)  # no planned steps: nothing grows
    optimizer = OPTIMIZERS["adamw"]([*model.parameters(), *method.parameters()])
    for batch in task.batches(16, epochs=2):
        optimizer.zero_grad()
        method.loss(model, batch).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    assert not any(v.any() for t in method.live.values() for n, v in t.items())
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {list(before)[-2], list(before)[-1]}
    assert method.look_now(model) and set(method.awake.values()) == {4}


@pytest.mark.parametrize("when", ["between tasks", "inside a task"])
def test_resuming_keeps_added_units(when, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2)
    if when == "inside a task":
        method.begin_task(model, stream[2])
        method._wake(model)
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, again = nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10)), ExpandNet(**GROW)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for m, k in ((model, method), (other, again)):
        torch.manual_seed(1)
        everlearn.train(m, k, stream[2], optimizer=OPTIMIZERS["momentum"], epochs=2, batch_size=32)
    assert repr(method.state_dict()) == repr(again.state_dict())
    x = torch.rand(5, 1, 8, 8)
    for task in range(3):
        assert torch.equal(method.predict(model, x, numbered(x, task)), again.predict(other, x, numbered(x, task)))


def test_a_grown_output_layer_is_read_too(small_stream):
    stream, x = small_stream(), torch.rand(5, 1, 8, 8)
    torch.manual_seed(0)
    model, method = nets.mlp(stream.inputs, 4, hidden=(12, 10)), ExpandNet(**GROW)
    tasks = [everlearn.Task(task.train, id=task.id) for task in stream]
    for task in tasks[:2]:
        everlearn.train(model, method, task, batch_size=32)
    before = method.predict(model, x, numbered(x, 1))
    everlearn.surgery.heads.grow_output(model, 6)
    everlearn.train(model, method, tasks[2], batch_size=32)
    assert torch.equal(method.predict(model, x, numbered(x, 1)), before)
    assert method.predict(model, x, numbered(x, 2)).shape == (5, 6)


def test_a_task_in_parts_grows_in_each(small_stream):
    stream = everlearn.streams.online(small_stream(), chunk=40)
    torch.manual_seed(0)
    model, method, seen = nets.mlp(stream.inputs, stream.outputs, hidden=(12,)), ExpandNet(**GROW, sparsity=0.0), []
    for task in stream:
        everlearn.train(model, method, task, batch_size=8)
        seen.append(method.diagnostics()["units added so far"])
    assert seen == sorted(seen) and method.stamps == sorted(method.stamps) and set(method.stamps) == {1, 2}


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match="must not exceed 1"):
        ExpandNet(look=0.6, rounds=2)
    method = ExpandNet()
    with pytest.raises(ValueError, match="no layer to widen in Linear"):
        method.begin_task(nn.Linear(3, 2), everlearn.Task((torch.rand(4, 3), torch.zeros(4, dtype=torch.long)), id=0))

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 6)

        def forward(self, x):
            return self.out(self.conv(x).relu().view(-1, 144))

    model, method = Fixed(), ExpandNet(threshold=0.0)
    tasks = [everlearn.Task((torch.rand(16, 1, 8, 8), torch.arange(16) % 6), id=k) for k in (0, 1)]
    with pytest.raises(ValueError, match=r"write x.flatten\(1\)"):
        everlearn.train(model, method, tasks[0])
    method = ExpandNet(threshold=0.0, groups={"conv": "out"})  # named by hand, it shows when it grows
    everlearn.train(model, method, tasks[0])
    with pytest.raises(ValueError, match=r"as x.view\(-1, 64\)"):
        everlearn.train(model, method, tasks[1], epochs=10)


def test_detach_leaves_a_plain_model(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2)
    x = torch.rand(3, 1, 8, 8)
    method.detach(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    fresh = nets.mlp(stream.inputs, stream.outputs, hidden=(12, 10))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x))
