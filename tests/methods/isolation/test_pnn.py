import copy
import io

import pytest
import torch
from torch import nn

import everlearn
from everlearn import PNN, Method, nets
from everlearn.methods.isolation.lateral_columns import Lateral
from everlearn.surgery.hooks import Hook

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}
NETS = {
    "mlp": lambda s: nets.mlp(s.inputs, s.outputs, hidden=(12, 8)),
    "cnn": lambda s: nets.cnn(s.inputs, s.outputs, channels=(4, 6)),
    "transformer": lambda s: nets.transformer(s.inputs, s.outputs, width=8, depth=1, heads=2),
}


@pytest.fixture
def learned(small_stream):
    def learn(tasks=2, net="mlp", **options):
        torch.manual_seed(0)
        stream = small_stream()
        model = NETS[net](stream)
        method = PNN(**options)
        for task in stream.tasks[:tasks]:
            everlearn.train(model, method, task, batch_size=32, optimizer=OPTIMIZERS["adam"])
        return model, method, stream

    return learn


def hooks(model):
    all_hooks = [h for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for h in d.values()]
    return [h for h in all_hooks if isinstance(h, Hook)]


def reload(model, method, new_model, **options):
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model = new_model
    method = PNN(**options)
    model.load_state_dict(weights)
    method.load_state_dict(state)
    return model, method


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_earlier_tasks_never_change(net, optimizer, small_stream, check_isolation):
    check_isolation(PNN, net, OPTIMIZERS[optimizer], small_stream("task"))


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_earlier_tasks_never_change_with_shared_outputs_and_linear_laterals(scenario, small_stream, check_isolation):
    check_isolation(lambda: PNN(laterals="linear"), "cnn", OPTIMIZERS["adamw"], small_stream(scenario))


def test_the_first_column_is_the_plain_model(learned, small_stream):
    model, method, stream = learned(1)
    torch.manual_seed(0)
    alone = NETS["mlp"](stream)
    everlearn.train(alone, Method(), stream[0], batch_size=32, optimizer=OPTIMIZERS["adam"])
    x = next(stream[0].examples(20)).x
    assert torch.equal(alone(x), model(x)) and torch.equal(alone(x), method.predict_as(model, x, 0))
    assert method.parameters() == [] and method.layers == ["3", "5"]


@pytest.mark.parametrize("laterals", ["adapter", "linear"])
def test_columns_follow_the_formula(laterals, learned):
    """The formula for three columns; earlier columns run with their own laterals."""
    model, method, stream = learned(3, laterals=laterals)
    x = next(stream[0].examples(20)).x

    def compute_lateral(link, earlier_inputs):
        if laterals == "linear":
            return sum(h @ link[f"U.{j}.weight"].T for j, h in enumerate(earlier_inputs))
        scaled = torch.cat([a * h for a, h in zip(link["alpha"], earlier_inputs, strict=True)], 1)
        return (scaled @ link["V.weight"].T).relu() @ link["U.0.weight"].T

    earlier_columns = []
    for k, (w, links) in enumerate(zip(method.task_params, method.lateral_params, strict=True)):
        h = (x.flatten(1) @ w["1.weight"].T + w["1.bias"]).relu()
        layer_inputs = {"3": h}
        for name in ("3", "5"):
            outputs = layer_inputs[name] @ w[f"{name}.weight"].T + w[f"{name}.bias"]
            if k:
                outputs = outputs + compute_lateral(links[name], [column[name] for column in earlier_columns])
            if name == "3":
                layer_inputs["5"] = outputs.relu()
        earlier_columns.append(layer_inputs)
        torch.testing.assert_close(method.predict_as(model, x, k), outputs)
    torch.testing.assert_close(model(x), outputs)
    assert set(method.lateral_params[2]) == {"3", "5"}, "the first layer takes no laterals"


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_with_alpha_zero_a_column_is_a_plain_model(net, learned):
    model, method, stream = learned(1, net)
    method.begin_task(model, stream[1])
    with torch.no_grad():
        for link in method._current_laterals.values():
            link.alpha.zero_()
    alone = copy.deepcopy(model)
    PNN().detach(alone)
    x = next(stream[1].examples(20)).x
    assert not hooks(alone) and hooks(model)
    for mode in (True, False):
        assert torch.equal(model.train(mode)(x), alone.train(mode)(x))


@pytest.mark.parametrize("laterals", ["adapter", "linear"])
@pytest.mark.parametrize("net", list(NETS))
def test_only_parameters_of_the_new_column_get_gradients(net, laterals, learned):
    model, method, stream = learned(2, net, laterals=laterals)
    method.begin_task(model, stream[2])
    method.loss(model, next(stream[2].batches(64))).backward()
    assert method.parameters()
    assert all(p.grad.any() for p in method.parameters())
    trained = {id(p) for p in [*model.parameters(), *method.parameters()]}
    old = list(method._stack.parameters())
    assert old and not any(p.requires_grad or p.grad is not None or id(p) in trained for p in old)


def test_parameters_are_counted(learned):
    model, method, _ = learned(3)
    plain = sum(p.numel() for p in model.parameters())
    expected = {"column 0": plain, "laterals 0": 0, "column 1": plain, "column 2": plain}
    for k in (1, 2):  # α, V, U of the layers 12 → 8 and 8 → 6
        expected[f"laterals {k}"] = sum(k + k * n * n + n * m for n, m in ((12, 8), (8, 6)))
    assert method.growth() == expected
    _, method, _ = learned(3, "cnn")
    assert method.growth()["laterals 2"] == (2 + 8 * 4 + 4 * 6 * 9) + (2 + 12 * 6 + 6 * 6)
    _, method, _ = learned(3, laterals="linear")
    assert method.growth()["laterals 2"] == 2 * (12 * 8 + 8 * 6)


def test_earlier_columns_stay_in_evaluation_mode(small_stream):
    torch.manual_seed(0)
    stream = small_stream()
    body = nets.cnn(stream.inputs, stream.outputs, channels=(4, 6))
    model = nn.Sequential(body[0], nn.Dropout(0.5), *body[1:])
    method = PNN()
    everlearn.train(model, method, stream[0], batch_size=32)
    method.begin_task(model, stream[1])
    model.train()
    x = next(stream[1].examples(20)).x
    state_before = copy.deepcopy(method._stack.state_dict())
    passes = [method._stack.run(1, x)[1][0] for _ in range(2)]
    random = torch.get_rng_state()
    method._stack.run(1, x)
    assert torch.equal(random, torch.get_rng_state())
    model(x)
    assert all(torch.equal(a, b) for n in passes[0] for a, b in zip(passes[0][n], passes[1][n], strict=True))
    assert all(torch.equal(v, state_before[n]) for n, v in method._stack.state_dict().items())
    assert not any(m.training for m in method._stack.columns.modules())


def test_a_new_column_is_reinitialized_in_place(small_stream, learned):
    model, method, stream = learned(1, "transformer")
    state_before = copy.deepcopy(model.state_dict())
    objects = list(model.parameters())
    random = torch.get_rng_state()
    method.begin_task(model, stream[1])
    assert torch.equal(random, torch.get_rng_state())
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    torch.manual_seed(0)
    born = NETS["transformer"](stream).state_dict()
    for name, v in model.state_dict().items():
        assert not torch.equal(v, state_before[name]), name
        constant = born[name].flatten()[0] == born[name].flatten()[-1]  # norms, and biases in attention
        assert torch.equal(v, born[name]) == bool(constant or name == "positions"), "a bare parameter is restored"
    torch.testing.assert_close(model.head.weight.std(), state_before["head.weight"].std(), rtol=0.5, atol=0)


def test_columns_depend_on_the_seed(small_stream):
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = nets.mlp(64, 6, hidden=(8,))
        method = PNN()
        everlearn.train(model, method, small_stream()[0])
        method.begin_task(model, small_stream()[1])
        weights.append(torch.cat([p.flatten() for p in [*model.parameters(), *method.parameters()]]))
    assert torch.equal(weights[0], weights[1]) and not (weights[0] == weights[2]).any()


def test_frozen_parameters_keep_their_values(small_stream):
    stream = small_stream()
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 6))
    method = PNN()
    model[0].requires_grad_(False)
    kept = copy.deepcopy(model[0].state_dict())
    everlearn.train(model, method, stream[0])
    method.begin_task(model, stream[1])
    assert all(torch.equal(v, kept[n]) for n, v in model[0].state_dict().items())
    assert not torch.equal(model[1][0].weight, method.task_params[0]["1.0.weight"])


def test_a_factory_creates_columns(small_stream):
    stream = small_stream()
    factory = lambda: nets.mlp(stream.inputs, stream.outputs, hidden=(16,), init="xavier")
    model = factory()
    method = PNN(factory=factory)
    everlearn.train(model, method, stream[0])
    method.begin_task(model, stream[1])
    assert not model[1].bias.any() and model[1].weight.abs().max() <= (6 / 80) ** 0.5
    method.end_task(model, stream[1])
    method.factory = lambda: nets.mlp(stream.inputs, stream.outputs, hidden=(15,))
    state_before = copy.deepcopy([model.state_dict(), method.state_dict()])
    with pytest.raises(ValueError, match=r"factory .*1.weight has shape \(15, 64\), it should have \(16, 64\)"):
        method.begin_task(model, stream[2])
    method.factory = lambda: nn.Linear(64, 6)
    with pytest.raises(ValueError, match=r"1.weight is missing"):
        method.begin_task(model, stream[2])
    assert repr(state_before) == repr([model.state_dict(), method.state_dict()])


@pytest.mark.slow
@pytest.mark.parametrize(("net", "laterals"), [*((net, "adapter") for net in NETS), ("cnn", "linear")])
def test_export_is_an_independent_module_with_the_same_outputs(net, laterals, learned, check_export):
    model, method, stream = learned(3, net, laterals=laterals)
    check_export(model, method, stream)
    alone = method.export(model, 1)
    assert sum(p.numel() for p in alone.parameters()) == sum(n for k, n in method.growth().items() if k[-1] != "2")
    file = io.BytesIO()
    x = next(stream[0].examples(9)).x
    torch.save(alone, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), alone(x))


def test_resuming_within_a_task(learned):
    model, method, stream = learned(1)
    steps = list(stream[1].batches(32, epochs=2))

    def learn(model, method, batches):
        method.begin_task(model, stream[1])
        optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            optimizer.step()

    learn(model, method, steps[:4])
    model_copy, method_copy = reload(model, method, NETS["mlp"](stream))
    for m, k in ((model, method), (model_copy, method_copy)):
        learn(m, k, steps[4:])
        k.end_task(m, stream[1])
    x = next(stream[1].examples(20)).x
    assert torch.equal(model(x), model_copy(x))
    assert torch.equal(method.predict_as(model, x, 1), method_copy.predict_as(model_copy, x, 1))
    assert torch.equal(method.predict_as(model, x, 1), model(x)) and len(method.task_params) == 2


def test_a_task_in_parts_has_one_column(small_stream):
    torch.manual_seed(0)
    stream = everlearn.streams.online(small_stream(), chunk=40)
    model = nets.mlp(64, 6, hidden=(32,))
    method = PNN()
    optimizer = None
    for task in stream:
        new = method.is_new(task)
        trained = everlearn.train(
            model, method, task, batch_size=10, optimizer=OPTIMIZERS["adam"] if new else optimizer
        )
        optimizer = trained.optimizer
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in [*model.parameters(), *method.parameters()]
        }
    assert len(method.task_params) == len(method.lateral_params) == 3 < len(stream)
    assert everlearn.run(lambda: nets.mlp(64, 6, hidden=(32,)), PNN(), stream, batch_size=10).forgetting == 0.0


def test_an_optimizer_kept_across_tasks_moves_no_old_column(learned):
    model, method, stream = learned(1)
    x = next(stream[0].examples(20)).x
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    expected = [method.predict_as(model, x, 0)]
    for task in stream.tasks[1:]:
        everlearn.train(model, method, task, optimizer=optimizer)
        expected.append(method.predict_as(model, x, len(expected)))
    assert all(torch.equal(method.predict_as(model, x, k), outputs) for k, outputs in enumerate(expected))


def test_copies_are_independent(learned):
    model, method, stream = learned(1)
    method.begin_task(model, stream[1])
    x = next(stream[1].examples(20)).x
    model_copy = copy.deepcopy(model)
    expected = model(x)
    assert torch.equal(model_copy(x), expected)
    with torch.no_grad():
        for p in [*model.parameters(), *method.parameters()]:
            p.add_(0.1)
    assert torch.equal(model_copy(x), expected) and not torch.equal(model(x), expected)
    method.begin_task(model_copy, stream[1])  # continues with the copy, with one set of laterals
    assert len(hooks(model_copy)) == len(hooks(model))
    method.detach(model_copy)
    assert not hooks(model_copy) and type(model_copy) is type(model)
    assert [n for n, _ in model_copy.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_layers_called_several_times_or_never():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 6)
            self.recurrent = nn.Linear(6, 6)
            self.spare = nn.Linear(6, 6)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            h = self.words(x).mean(1)
            for _ in range(3):
                h = self.recurrent(input=h).tanh()
            return self.head(h)

    torch.manual_seed(0)
    model = Net()
    method = PNN()
    data = torch.randint(9, (40, 5)), torch.randint(2, (40,))
    for _ in range(3):
        everlearn.train(model, method, data, epochs=2, batch_size=10)
    assert method.layers == ["recurrent", "head"], (
        "a layer behind an embedding has laterals, one that is never called has none"
    )
    column = method.task_params[1]
    link = method.lateral_params[1]
    earlier_inputs = method._load_columns(model, 1).run(1, data[0])[1][0]
    h = column["words.weight"][data[0]].mean(1)
    calls = [("recurrent", call) for call in earlier_inputs["recurrent"]]
    for name, earlier_input in [*calls, ("head", earlier_inputs["head"][0])]:
        outputs = h @ column[f"{name}.weight"].T + column[f"{name}.bias"]
        V, U, alpha = (link[name][part] for part in ("V.weight", "U.0.weight", "alpha"))
        outputs = outputs + ((alpha * earlier_input) @ V.T).relu() @ U.T
        h = outputs.tanh()
    torch.testing.assert_close(method.predict_as(model, data[0], 1), outputs)
    assert torch.equal(model.eval()(data[0]), method.predict_as(model, data[0], 2))
    with pytest.raises(RuntimeError, match="call the model as a whole, not its part head"):
        model.head(torch.zeros(1, 6))


def test_other_kinds_of_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding="same"), nn.ReLU(inplace=True),
        nn.Conv1d(4, 8, 3, stride=2, groups=2, dilation=2, padding=2, padding_mode="circular"), nn.ReLU(inplace=True),
        nn.Unflatten(1, (4, 2)), nn.Conv2d(4, 6, (1, 3)), nn.Unflatten(2, (1, 2)), nn.Conv3d(6, 4, (1, 2, 1)),
        nn.Flatten(), nn.LazyLinear(2),
    )  # fmt: skip
    x = torch.randn(6, 2, 12)
    model(x)
    method = PNN()
    for _ in range(3):
        everlearn.train(model, method, (x, torch.arange(6) % 2))
    assert method.layers == ["2", "5", "7", "9"]
    assert torch.equal(model.eval()(x), method.predict_as(model, x, 2))


def test_output_layer_may_grow_between_tasks(small_stream):
    torch.manual_seed(0)
    stream = small_stream("class")
    x = next(stream[0].examples(20)).x
    model = nets.mlp(64, 2, hidden=(12,))
    method = PNN()
    expected = []
    for k in range(3):
        everlearn.surgery.heads.grow_output(model, 2 * k + 2)
        everlearn.train(model, method, everlearn.Task((stream[k].train.x, stream[k].train.y), id=k))
        expected.append(method.predict_as(model, x, k))
        assert all(torch.equal(method.predict_as(model, x, j), outputs) for j, outputs in enumerate(expected))
    assert [outputs.shape[1] for outputs in expected] == [2, 4, 6]
    assert method.predict(model, x, torch.arange(20) % 3).shape == (20, 6)


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["parallel", "compile"]
)
def test_wrapped_models(wrap, learned):
    plain, truth, stream = learned(2)
    torch.manual_seed(0)
    inner = NETS["mlp"](stream)
    method = PNN()
    model = wrap(inner)
    for task in stream.tasks[:2]:
        everlearn.train(model, method, task, batch_size=32, optimizer=OPTIMIZERS["adam"])
    x = next(stream[0].examples(20)).x
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(method.predict_as(model, x, 1), truth.predict_as(plain, x, 1), rtol=1e-4, atol=1e-5)


def test_mixed_and_unknown_tasks(learned):
    model, method, stream = learned(3)
    x = torch.cat([next(t.examples(5, "test")).x for t in stream])
    t = torch.tensor([2] * 5 + [0] * 5 + [1] * 5)
    mixed = method.predict(model, x, t)
    for k in range(3):
        assert torch.equal(mixed[t == k], method.predict_as(model, x[t == k], k))
    assert method.predict(model, x).shape == mixed.shape
    with pytest.raises(ValueError, match="must know the task"):
        method.unknown = "raise"
        method.predict(model, x)


def test_errors(small_stream, learned):
    stream = small_stream()
    with pytest.raises(ValueError, match=r"no layer of Sequential.* behind the first layer\."):
        PNN().begin_task(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), stream[0])
    model = nets.mlp(64, 6, hidden=(8,))
    method = PNN()
    method.begin_task(model, stream[0])
    with pytest.raises(ValueError, match="Task 0 has not ended"):
        method.begin_task(model, stream[1])
    method.end_task(model, stream[0])
    with pytest.raises(ValueError, match="called in the first task"):
        method.begin_task(model, stream[1])
    with pytest.raises(ValueError, match="before any begin_task"):
        PNN().end_task(model, stream[0])
    with pytest.raises(TypeError, match=r"PNN.factory: got 3, allowed: Callable, None"):
        PNN(factory=3)
    model, method, stream = learned(2)
    with pytest.raises(ValueError, match="Task 5 has not been learned"):
        method.export(model, 5)
    with torch.no_grad():
        method.parameters()[0].fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        method.end_task(model, stream[1])


def test_without_laterals_they_are_separate_networks(small_stream, check_isolation):
    check_isolation(lambda: PNN(laterals="none"), "cnn", torch.optim.Adam, small_stream())
    stream = small_stream()
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = PNN(laterals="none")
    for task in stream:
        everlearn.train(model, method, task, batch_size=32)
        assert method.parameters() == []
    alone = method.export(model, 1)
    x = next(stream[0].examples(5, "test")).x
    assert torch.equal(alone(x), method.predict(model, x, torch.ones(5, dtype=torch.long)))
    column_size = sum(p.numel() for p in model.parameters())
    assert (
        method.extra_parameters(model) == 2 * column_size and sum(p.numel() for p in alone.parameters()) == column_size
    )


def test_alpha_starts_small_and_random():
    alpha = Lateral(nn.Linear(3, 2), [1] * 4000, adapter=True).alpha.detach()
    assert abs(alpha.mean()) < 0.01 and abs(alpha.std() - 0.1) < 0.01
    assert abs((alpha.abs() < 0.1).float().mean() - 0.683) < 0.03, "normal"
