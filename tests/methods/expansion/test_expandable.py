import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everlearn
from everlearn import ER, EWC, Batch, ExpandableRepresentation, Gaussian, Task, nets
from everlearn.core.method import count_parameters
from everlearn.memory import herding_order
from everlearn.surgery.hooks import Hook

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}
NETS = {
    "mlp": lambda s: nets.mlp(s.inputs, s.outputs, hidden=(12, 8)),
    "cnn": lambda s: nn.Sequential(nn.Dropout(0.1), nets.cnn(s.inputs, s.outputs, channels=(4, 6))),
    "resnet": lambda s: nets.resnet(s.inputs, s.outputs, width=4, blocks=(1, 1)),
    "transformer": lambda s: nets.transformer(s.inputs, s.outputs, width=16, depth=1, heads=2),
}


@pytest.fixture
def learned(small_stream):
    """Train on the first tasks of the small class-incremental stream."""

    def learn(tasks, net="mlp", optimizer="adamw", scenario="class", model=None, passes=1, **fields):
        torch.manual_seed(0)
        stream = small_stream(scenario)
        model = NETS[net](stream) if model is None else model
        method = ExpandableRepresentation(30, **{"tune_epochs": 3, **fields})
        for task in stream.tasks[:tasks]:
            everlearn.train(model, method, task, optimizer=OPTIMIZERS[optimizer], batch_size=32, epochs=passes)
        return model, method, stream

    return learn


def reloaded(model, method, new_model):
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    new_method = copy.deepcopy(ExpandableRepresentation(method.capacity, tune_epochs=method.tune_epochs))
    new_model.load_state_dict(weights)
    new_method.load_state_dict(state)
    return new_model, new_method


def hooks(model):
    all_hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [h for h in all_hooks if isinstance(h, Hook)]


def phi(method, model, x):
    return method._bank.all_features(model, x)


@pytest.mark.parametrize(("net", "optimizer"), [*((net, "adamw") for net in NETS), ("cnn", "momentum")])
def test_old_features_stay_bit_for_bit(net, optimizer, small_stream):
    torch.manual_seed(0)
    stream = small_stream("class")
    x = torch.cat([next(task.examples(12, "test")).x for task in stream])
    model = NETS[net](stream)
    method = ExpandableRepresentation(30, tune_epochs=2)
    task_features = []
    for task in stream:
        everlearn.train(model, method, task, optimizer=OPTIMIZERS[optimizer], batch_size=32)
        features = phi(method, model, x)
        width = features.shape[1] // (len(task_features) + 1)
        assert method.diagnostics()["feature width"] == features.shape[1] == width * (len(task_features) + 1)
        task_features.append(features[:, -width:])
        assert torch.equal(features, torch.cat(task_features, 1))
    assert not torch.equal(task_features[0], task_features[1])
    outputs = method.predict(model.eval(), x)
    loaded_model, loaded_method = reloaded(model, method, NETS[net](stream))
    assert torch.equal(loaded_method.predict(loaded_model.eval(), x), outputs)
    assert torch.equal(phi(loaded_method, loaded_model, x), torch.cat(task_features, 1))
    trained_method = ExpandableRepresentation(30, tune_epochs=2)
    trained_model = NETS[net](stream)
    for task in stream.tasks[:2]:
        everlearn.train(trained_model, trained_method, task, batch_size=64)
    trained_model.load_state_dict(model.state_dict())
    trained_method.load_state_dict(method.state_dict())
    assert torch.equal(trained_method.predict(trained_model.eval(), x), outputs), "loading replaces trained state"


def test_parameter_counts(learned):
    for tasks in (1, 2, 3):
        model, method, _ = learned(tasks)
        extractor = 64 * 12 + 12 + 12 * 8 + 8
        assert method.diagnostics() == {"extractors": tasks, "feature width": 8 * tasks}
        assert count_parameters(model, method) == tasks * extractor + (tasks * 8 + 1) * 6
        assert count_parameters(model, method) == sum(p.numel() for p in method.export(model).parameters())
        assert sum(v.numel() for e in method.extractors for v in e.values()) == (tasks - 1) * extractor
        assert sum(p.numel() for p in method.parameters()) == (tasks > 1) * (8 * 6 * (tasks - 1) + 9 * 3)


def test_a_new_task_adds_an_extractor(learned):
    model, method, stream = learned(2)
    before = copy.deepcopy(model.state_dict())
    blocks = [b.clone() for b in method.state_dict()["classifier_blocks"]]
    method.begin_task(model, stream[2])
    after = model.state_dict()
    assert [n for n in after if not torch.equal(after[n], before[n])] == ["5.weight"], "only W's newest columns change"
    assert after["5.weight"].abs().max() <= 8**-0.5, "initialized as torch does"
    assert len(method._bank.blocks) == 2
    for block, expected in zip(method._bank.blocks, [*blocks, before["5.weight"]], strict=True):
        assert torch.equal(block, expected)
    x = next(stream[2].examples(20)).x
    old_features, new_features = phi(method, model, x).split([16, 8], 1)
    assert torch.equal(old_features[:, 8:], new_features), "the new extractor starts as a copy of the last one"
    assert method._bank.auxiliary.weight.shape == (3, 8) and method.new_classes == [4, 5]


def test_auxiliary_targets(learned):
    _, method, _ = learned(0)
    method.new_classes = [7, 3, 5]
    y = torch.randint(9, (200,))
    is_old = torch.rand(200) < 0.3
    expected = [
        0 if old or c not in method.new_classes else 1 + method.new_classes.index(c)
        for c, old in zip(y.tolist(), is_old.tolist(), strict=True)
    ]
    assert method.auxiliary_targets(y, is_old).tolist() == expected
    ignored = torch.tensor([-100, 7, -100])
    assert method.auxiliary_targets(ignored, torch.tensor([False, False, True])).tolist() == [-100, 1, -100]


@pytest.mark.parametrize(
    ("scenario", "new"), [("class", [[0, 1], [2, 3]]), ("task", [[0, 1], [2, 3]]), ("domain", [[0, 1]] * 2)]
)
def test_which_classes_are_new(scenario, new, small_stream):
    stream = small_stream(scenario)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = ExpandableRepresentation(30)
    for k in range(2):
        everlearn.train(model, method, stream[k])
        assert method.new_classes == new[k]


@pytest.mark.parametrize("auxiliary", [0.0, 0.7])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_the_loss_matches_the_formula(scenario, auxiliary, learned):
    model, method, stream = learned(1, scenario=scenario, auxiliary=auxiliary)
    method.begin_task(model, stream[1])
    batch = next(stream[1].batches(16))
    method_copy = copy.deepcopy(method)
    loss = method.loss(model.eval(), batch)
    rows = method_copy.memory.sample(16)
    x = torch.cat([batch.x, rows["x"]])
    y = torch.cat([batch.y, rows["y"]])
    out = model(x)
    allowed = torch.ones(32, 6, dtype=torch.bool)
    allowed[:, 4:] = False
    if scenario == "task":
        allowed[:16, :2] = False
        allowed[16:, 2:] = False
    expected = F.cross_entropy(out.masked_fill(~allowed, -torch.inf), y)
    if auxiliary:
        head = method._bank.auxiliary
        target = torch.tensor([c - 1 if c in (2, 3) else 0 for c in y.tolist()])
        auxiliary_logits = phi(method, model, x)[:, 8:] @ head.weight.T + head.bias
        expected = expected + auxiliary * F.cross_entropy(auxiliary_logits, target)
    else:
        assert method._bank.auxiliary is None
    torch.testing.assert_close(loss, expected)


def test_the_first_task_is_fine_tuning(learned):
    model, method, stream = learned(0)
    method.begin_task(model, stream[0])
    assert method.parameters() == [] and not hooks(model)
    batch = next(stream[0].batches(16))
    assert torch.equal(method.loss(model, batch), batch.loss(model(batch.x))) and not len(method.memory)
    before = copy.deepcopy(model.state_dict())
    method.end_task(model, stream[0])
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items()), "there is nothing to balance yet"
    assert len(method.memory) == 30


def test_fine_tuning_changes_only_the_classifier(learned):
    model, method, stream = learned(1)
    method.begin_task(model, stream[1])
    x = next(stream[1].examples(20)).x
    before = copy.deepcopy(model.state_dict())
    features = phi(method, model, x)
    rng_state = torch.get_rng_state()
    method.end_task(model, stream[1])
    moved = [n for n, v in model.state_dict().items() if not torch.equal(v, before[n])]
    assert moved == ["5.weight", "5.bias"]
    assert torch.equal(phi(method, model, x), features) and torch.equal(torch.get_rng_state(), rng_state)
    assert all(m.training for m in model.modules()), "training mode is restored"
    first_end = copy.deepcopy([model.state_dict(), method.state_dict()])
    method.end_task(model, stream[1])
    assert repr([model.state_dict(), method.state_dict()]) == repr(first_end), "a second end_task does nothing"


@pytest.mark.parametrize("tune_from", ["learned", "anew"])
def test_where_fine_tuning_starts(tune_from, learned):
    """With learning rate 0, the tuned classifier is its start, divided by the temperature."""
    model, method, stream = learned(1, tune_from=tune_from, tune_lr=0.0, temperature=4.0)
    method.begin_task(model, stream[1])
    x = next(stream[1].examples(20)).x
    before = method.predict(model.eval(), x)
    method.end_task(model, stream[1])
    after = method.predict(model, x)
    if tune_from == "learned":
        torch.testing.assert_close(after, before)
    else:
        weights = torch.cat([*method._bank.blocks, model[5].weight], 1)
        assert 0.9 < weights.abs().max() * 4 * 16**0.5 <= 1, "initialized as torch does for all features"
        assert not torch.allclose(after, before)
    assert all(p.grad is None for p in method.parameters()), "no optimizer moves them any more"


def test_initial_weights_follow_the_seed(small_stream):
    stream = small_stream("class")
    initial_weights = []
    state = nets.mlp(64, 6, hidden=(8,)).state_dict()
    for seed in (1, 1, 2):
        model = nets.mlp(64, 6, hidden=(8,))
        method = ExpandableRepresentation(30, tune_epochs=0)
        model.load_state_dict(state)
        torch.manual_seed(seed)
        everlearn.train(model, method, stream[0])
        method.begin_task(model, stream[1])
        initial_weights.append(torch.cat([model[3].weight, method._bank.auxiliary.weight]))
    assert torch.equal(initial_weights[0], initial_weights[1])
    assert not torch.isclose(initial_weights[0], initial_weights[2]).any()


def test_without_fine_tuning_the_model_does_not_change(learned):
    model, method, stream = learned(1, tune_epochs=0)
    method.begin_task(model, stream[1])
    before = copy.deepcopy(model.state_dict())
    method.end_task(model, stream[1])
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_fine_tuning_compensates_for_few_old_examples(learned):
    """Without it the classifier prefers the new classes."""
    new_class_share = {}
    for epochs in (0, 30):
        model, method, stream = learned(3, tune_epochs=epochs, size=4, passes=5)
        x = torch.cat([next(task.examples(100, "test")).x for task in stream])
        new_class_share[epochs] = float((method.predict(model.eval(), x).argmax(1) >= 4).float().mean())
    assert new_class_share[30] < 0.5 and new_class_share[0] > 0.8, "a third of the examples belong to new classes"


def test_herding_follows_the_features(learned):
    model, method, stream = learned(2)
    y = method.memory["y"]
    assert y.bincount().max() - y.bincount().min() <= 1 and len(y) == 30
    x = stream[1].train.x
    labels = stream[1].train.y
    for c in (2, 3):
        class_inputs = x[labels == c]
        herded = class_inputs[herding_order(F.normalize(phi(method, model, class_inputs), dim=1), 7)]
        stored = method.memory["x"][y == c]
        assert {tuple(v.flatten().tolist()) for v in herded} <= {tuple(v.flatten().tolist()) for v in stored}


def test_inputs_are_stored_untransformed_and_tuned_with_eval_transforms():
    torch.manual_seed(0)
    x = torch.rand(40, 5)
    y = torch.arange(40) % 2
    input_minima = []

    def eval_transform(v):
        input_minima.append(v.min())
        return v + 100

    tasks = [Task((x, y + 2 * k), id=k, transform=lambda v: v + 200, eval_transform=eval_transform) for k in range(2)]
    model = nets.mlp(5, 4, hidden=(6,))
    method = ExpandableRepresentation(10, tune_epochs=1)
    for task in tasks:
        everlearn.train(model, method, task, batch_size=20)
    assert method.memory["x"].max() <= 1 and input_minima and max(input_minima) <= 1, "transforms get raw inputs"
    assert len(input_minima) == 3, "task 0, task 1 and the memory"
    method.begin_task(model, Task((x, y), id=2, transform=lambda v: v - 300))
    replayed, _ = method.draw(Batch(x, y, torch.full((40,), 2), transform=lambda v: v - 300))
    assert replayed.x.min() >= 200, "remembered examples get the augmentation of their task"


def test_resuming_inside_a_task(learned):
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
    loaded_model, loaded_method = reloaded(model, method, NETS["mlp"](stream))
    x = next(stream[1].examples(20)).x
    outputs = []
    for net, learner in ((model, method), (loaded_model, loaded_method)):
        learn(net, learner, steps[4:])
        learner.end_task(net, stream[1])
        outputs.append(net.eval()(x))
    assert torch.equal(*outputs) and len(method.extractors) == len(loaded_method.extractors) == 1


def test_a_task_in_parts_has_one_extractor(small_stream):
    stream = everlearn.streams.online(small_stream("class"), chunk=40)
    model = nets.mlp(64, 6, hidden=(16,))
    method = ExpandableRepresentation(40, tune_epochs=2)
    optimizer = OPTIMIZERS["adamw"]
    x = next(stream[0].examples(20)).x
    for task in stream:
        if task.id != method.current_task:
            optimizer = OPTIMIZERS["adamw"]
        optimizer = everlearn.train(model, method, task, batch_size=10, optimizer=optimizer).optimizer
        trained_ids = {id(p) for p in [*model.parameters(), *method.parameters()]}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == trained_ids
        if task.id == 0:
            first_features = phi(method, model, x)
    assert method.diagnostics()["extractors"] == 3 < len(stream)
    assert torch.equal(phi(method, model, x)[:, :16], first_features)


def test_an_optimizer_kept_over_tasks_moves_no_old_extractor(learned):
    model, method, stream = learned(1)
    x = next(stream[0].examples(20)).x
    features = phi(method, model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    for task in stream.tasks[1:]:
        everlearn.train(model, method, task, optimizer=optimizer)
    assert torch.equal(phi(method, model, x)[:, :8], features)


def test_a_growing_head(small_stream):
    torch.manual_seed(0)
    stream = small_stream("class")
    model = nets.mlp(64, 2, hidden=(12,))
    method = ExpandableRepresentation(30, tune_epochs=2)
    for k in range(3):
        everlearn.surgery.heads.grow_output(model, 2 * k + 2)
        x = next(stream[0].examples(20)).x
        assert method.predict(model, x).shape == (20, 2 * k + 2), "also between tasks"
        everlearn.train(model, method, Task((stream[k].train.x, stream[k].train.y), id=k))
        assert method.new_classes == [2 * k, 2 * k + 1]
    assert [len(b) for b in method._bank.blocks] == [6, 6]


def test_plain_data_without_task_ids_or_masks():
    torch.manual_seed(0)
    model = nets.mlp(5, 4, hidden=(6,))
    method = ExpandableRepresentation(8, tune_epochs=2)
    x = torch.rand(40, 5)
    y = torch.arange(40) % 2
    for k in range(2):
        everlearn.train(model, method, (x, y + 2 * k), batch_size=20)
    assert method.memory["t"].unique().tolist() == [-2, -1] and method.memory["y"].bincount().tolist() == [2] * 4
    method.begin_task(model, (x, y))  # its classes are known
    targets = []
    auxiliary_targets = method.auxiliary_targets
    method.auxiliary_targets = lambda y, is_old: targets.append(auxiliary_targets(y, is_old)) or targets[-1]
    method.loss(model, Batch(x[:4], y[:4]))
    assert targets[0].tolist() == [*(1 + y[:4]).tolist(), 0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"no examples of the task to remember; a generator can be read only once"):
        method.end_task(model, iter([]))


def test_repeated_classes_are_not_new():
    allowed = torch.ones(2, 3, dtype=torch.bool)
    x = torch.rand(30, 5)
    y = torch.arange(30) % 2
    model = nets.mlp(5, 3, hidden=(6,))
    method = ExpandableRepresentation(8, tune_epochs=1)
    first_allowed = allowed.clone()
    first_allowed[:, 2] = False
    everlearn.train(model, method, Task((x, y), id=0, allowed=first_allowed))
    method.begin_task(model, Task((x, y + 1), id=1, allowed=allowed))
    assert method.new_classes == [2] and method._bank.auxiliary.out_features == 2
    assert method.auxiliary_targets(torch.tensor([1, 2]), torch.tensor([False, False])).tolist() == [0, 1]


def test_copying_and_detaching(learned):
    model, method, stream = learned(2)
    x = next(stream[1].examples(20)).x
    model_copy = copy.deepcopy(model)
    before = model(x)
    assert torch.equal(model_copy(x), before)
    with torch.no_grad():
        for p in [*model.parameters(), *method.parameters()]:
            p.add_(0.1)
    assert torch.equal(model_copy(x), before) and not torch.equal(model(x), before)
    method.detach(model)
    assert not hooks(model)
    detached_outputs = model(x)
    torch.testing.assert_close(detached_outputs, model[5](phi(method, model, x)[:, 8:]))
    assert not torch.allclose(method.predict(model, x), detached_outputs), "predict connects all extractors again"


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["parallel", "compile"]
)
def test_wrapped_models(wrap, learned, small_stream):
    plain_model, plain_method, stream = learned(2)
    torch.manual_seed(0)
    model, method, _ = learned(2, model=wrap(NETS["mlp"](stream)))
    x = next(stream[0].examples(20)).x
    torch.testing.assert_close(model(x), plain_model(x), rtol=1e-4, atol=1e-5)
    expected = plain_method.predict(plain_model, x)
    torch.testing.assert_close(method.predict(model, x), expected, rtol=1e-4, atol=1e-5)


def test_with_other_methods_and_half_precision(small_stream):
    stream = small_stream("class")
    model = nets.mlp(64, 6, hidden=(12,))
    method = ExpandableRepresentation(30, tune_epochs=1) + EWC(1.0)
    for task in stream:
        everlearn.train(model, method, task, precision="bfloat16", accumulate=2)
    assert method.predict(model, next(stream[0].examples(5)).x).isfinite().all()
    with pytest.raises(ValueError, match="ExpandableRepresentation and ER both define task_loss"):
        ExpandableRepresentation() + ER()


def test_invalid_use_raises(learned, small_stream):
    stream = small_stream("class")
    with pytest.raises(ValueError, match=r"no feature extractor in Sequential.* deeper model"):
        ExpandableRepresentation().begin_task(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), stream[0])
    with pytest.raises(ValueError, match="before any begin_task"):
        ExpandableRepresentation().end_task(nets.mlp(64, 6), stream[0])
    model = nets.mlp(64, 6, hidden=(8,))
    method = ExpandableRepresentation()
    method.begin_task(model, stream[0])
    with pytest.raises(ValueError, match="Task 0 has not ended"):
        method.begin_task(model, stream[1])
    batch = Batch(torch.randn(4, 64), torch.randn(4, 6), likelihood=Gaussian())
    with pytest.raises(TypeError, match=r"one class per example, not Gaussian.* use ER"):
        method.loss(model, batch)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"'2' shares its weights with 0.weight"):
        ExpandableRepresentation().begin_task(tied, stream[0])
    with pytest.raises(ValueError, match=r"no nn.Linear layer named 'top'"):
        ExpandableRepresentation(output="top").begin_task(model, stream[0])
    with pytest.raises(ValueError, match=r"ExpandableRepresentation.policy: got 'all', allowed: 'herding'"):
        ExpandableRepresentation(policy="all")
    model, method, stream = learned(2)
    with torch.no_grad():
        method.parameters()[0].fill_(torch.nan)
    method.begin_task(model, stream[2])
    with pytest.raises(FloatingPointError):
        method.end_task(model, stream[2])


def test_accuracy_exceeds_replay_with_the_same_memory():
    stream = everlearn.streams.digits(scenario="class")
    make = lambda i, o: nets.mlp(i, o, hidden=(32,))
    methods = ER(100), ER(100, policy="balanced"), ExpandableRepresentation(100)
    *replay, expandable = (everlearn.run(make, m, stream, epochs=5, batch_size=32).average_accuracy for m in methods)
    assert expandable > max(replay) + 0.1


class Shuffled:
    """A transform that permutes pixels."""

    def __init__(self, seed):
        self.order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))

    def __call__(self, x):
        return x.flatten(1)[:, self.order].reshape(x.shape)


@pytest.mark.parametrize("had_transforms", [True, False])
def test_transforms_lost_in_a_checkpoint_raise_a_warning(had_transforms, small_stream):
    stream = small_stream("domain")
    tasks = [
        everlearn.Task(
            task.train, id=task.id, eval_transform=Shuffled(task.id) if had_transforms or task.id == 2 else None
        )
        for task in stream
    ]
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(12,))
    method = ExpandableRepresentation(30, tune_epochs=2)
    for task in tasks[:2]:
        everlearn.train(model, method, task, batch_size=32)
    loaded_model = copy.deepcopy(model)
    loaded_method = ExpandableRepresentation(30, tune_epochs=2)
    loaded_method.load_state_dict(method.state_dict())
    torch.manual_seed(1)
    everlearn.train(model, method, tasks[2], batch_size=32)
    torch.manual_seed(1)
    if had_transforms:
        with pytest.warns(
            UserWarning, match=r"task 0, 1, whose transforms it does not know: a checkpoint holds no functions"
        ):
            loaded_method.begin_task(loaded_model, tasks[2])
        return
    # Tasks without transforms are known as such after loading.
    everlearn.train(loaded_model, loaded_method, tasks[2], batch_size=32)
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(method.predict(model, x), loaded_method.predict(loaded_model, x))
