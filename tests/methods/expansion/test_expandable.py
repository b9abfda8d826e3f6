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
    """Some tasks of the small class-incremental stream."""

    def learn(tasks, net="mlp", optimizer="adamw", scenario="class", model=None, passes=1, **fields):
        torch.manual_seed(0)
        stream = small_stream(scenario)
        model = NETS[net](stream) if model is None else model
        method = ExpandableRepresentation(30, **{"tune_epochs": 3, **fields})
        for task in stream.tasks[:tasks]:
            everlearn.train(model, method, task, optimizer=OPTIMIZERS[optimizer], batch_size=32, epochs=passes)
        return model, method, stream

    return learn


def reloaded(model, method, fresh):
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = copy.deepcopy(ExpandableRepresentation(method.capacity, tune_epochs=method.tune_epochs))
    fresh.load_state_dict(weights)
    again.load_state_dict(state)
    return fresh, again


def hooks(model):
    every = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [h for h in every if isinstance(h, Hook)]


def phi(method, model, x):
    return method._live.all_features(model, x)


@pytest.mark.parametrize(("net", "optimizer"), [*((net, "adamw") for net in NETS), ("cnn", "momentum")])
def test_old_features_stay_bit_for_bit(net, optimizer, small_stream):
    torch.manual_seed(0)
    stream = small_stream("class")
    x = torch.cat([next(task.examples(12, "test")).x for task in stream])
    model, method, seen = NETS[net](stream), ExpandableRepresentation(30, tune_epochs=2), []
    for task in stream:
        everlearn.train(model, method, task, optimizer=OPTIMIZERS[optimizer], batch_size=32)
        now = phi(method, model, x)
        width = now.shape[1] // (len(seen) + 1)
        assert method.diagnostics()["feature width"] == now.shape[1] == width * (len(seen) + 1)
        seen.append(now[:, -width:])
        assert torch.equal(now, torch.cat(seen, 1))
    assert not torch.equal(seen[0], seen[1])
    said = method.predict(model.eval(), x)
    other, again = reloaded(model, method, NETS[net](stream))
    assert torch.equal(again.predict(other.eval(), x), said)
    assert torch.equal(phi(again, other, x), torch.cat(seen, 1))
    used, once = ExpandableRepresentation(30, tune_epochs=2), NETS[net](stream)
    for task in stream.tasks[:2]:
        everlearn.train(once, used, task, batch_size=64)
    once.load_state_dict(model.state_dict())
    used.load_state_dict(method.state_dict())
    assert torch.equal(used.predict(once.eval(), x), said), "also into one that had learned something else"


def test_the_facts_are_what_answers_need(learned):
    for tasks in (1, 2, 3):
        model, method, _ = learned(tasks)
        extractor = 64 * 12 + 12 + 12 * 8 + 8
        assert method.diagnostics() == {"extractors": tasks, "feature width": 8 * tasks}
        assert count_parameters(model, method) == tasks * extractor + (tasks * 8 + 1) * 6
        assert count_parameters(model, method) == sum(p.numel() for p in method.export(model).parameters())
        assert sum(v.numel() for e in method.extractors for v in e.values()) == (tasks - 1) * extractor
        assert sum(p.numel() for p in method.parameters()) == (tasks > 1) * (8 * 6 * (tasks - 1) + 9 * 3)


def test_growth(learned):
    model, method, stream = learned(2)
    before, blocks = copy.deepcopy(model.state_dict()), [b.clone() for b in method.state_dict()["blocks"]]
    method.begin_task(model, stream[2])
    after = model.state_dict()
    assert [n for n in after if not torch.equal(after[n], before[n])] == ["5.weight"], "only W's newest columns are new"
    assert after["5.weight"].abs().max() <= 8**-0.5, "drawn as torch draws"
    assert [torch.equal(a, b) for a, b in zip(method._live.blocks, [*blocks, before["5.weight"]], strict=True)] == [
        True
    ] * 2
    x = next(stream[2].examples(20)).x
    old, new = phi(method, model, x).split([16, 8], 1)
    assert torch.equal(old[:, 8:], new), "the new extractor starts as the last one"
    assert method._live.auxiliary.weight.shape == (3, 8) and method.new == [4, 5]


def test_auxiliary_targets(learned):
    _, method, _ = learned(0)
    method.new = [7, 3, 5]
    y, old = torch.randint(9, (200,)), torch.rand(200) < 0.3
    truth = [
        0 if o or c not in method.new else 1 + method.new.index(c)
        for c, o in zip(y.tolist(), old.tolist(), strict=True)
    ]
    assert method.targets(y, old).tolist() == truth
    ignored = torch.tensor([-100, 7, -100])
    assert method.targets(ignored, torch.tensor([False, False, True])).tolist() == [-100, 1, -100]


@pytest.mark.parametrize(
    ("scenario", "new"), [("class", [[0, 1], [2, 3]]), ("task", [[0, 1], [2, 3]]), ("domain", [[0, 1]] * 2)]
)
def test_which_classes_are_new(scenario, new, small_stream):
    stream = small_stream(scenario)
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(8,)), ExpandableRepresentation(30)
    for k in range(2):
        everlearn.train(model, method, stream[k])
        assert method.new == new[k]


@pytest.mark.parametrize("auxiliary", [0.0, 0.7])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_the_loss_by_hand(scenario, auxiliary, learned):
    model, method, stream = learned(1, scenario=scenario, auxiliary=auxiliary)
    method.begin_task(model, stream[1])
    batch = next(stream[1].batches(16))
    again = copy.deepcopy(method)
    loss = method.loss(model.eval(), batch)
    rows = again.memory.sample(16)
    x, y = torch.cat([batch.x, rows["x"]]), torch.cat([batch.y, rows["y"]])
    out = model(x)
    allowed = torch.ones(32, 6, dtype=torch.bool)
    allowed[:, 4:] = False
    if scenario == "task":
        allowed[:16, :2], allowed[16:, 2:] = False, False
    truth = F.cross_entropy(out.masked_fill(~allowed, -torch.inf), y)
    if auxiliary:
        head = method._live.auxiliary
        target = torch.tensor([c - 1 if c in (2, 3) else 0 for c in y.tolist()])
        truth = truth + auxiliary * F.cross_entropy(phi(method, model, x)[:, 8:] @ head.weight.T + head.bias, target)
    else:
        assert method._live.auxiliary is None
    torch.testing.assert_close(loss, truth)


def test_the_first_task_is_plain_learning(learned):
    model, method, stream = learned(0)
    method.begin_task(model, stream[0])
    assert method.parameters() == [] and not hooks(model)
    batch = next(stream[0].batches(16))
    assert torch.equal(method.loss(model, batch), batch.loss(model(batch.x))) and not len(method.memory)
    before = copy.deepcopy(model.state_dict())
    method.end_task(model, stream[0])
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items()), "nothing to balance yet"
    assert len(method.memory) == 30


def test_fine_tuning_moves_the_classifier_alone(learned):
    model, method, stream = learned(1)
    method.begin_task(model, stream[1])
    x = next(stream[1].examples(20)).x
    before, seen, noise = copy.deepcopy(model.state_dict()), phi(method, model, x), torch.get_rng_state()
    method.end_task(model, stream[1])
    moved = [n for n, v in model.state_dict().items() if not torch.equal(v, before[n])]
    assert moved == ["5.weight", "5.bias"]
    assert torch.equal(phi(method, model, x), seen) and torch.equal(torch.get_rng_state(), noise)
    assert all(m.training for m in model.modules()), "modes stay"
    once = copy.deepcopy([model.state_dict(), method.state_dict()])
    method.end_task(model, stream[1])
    assert repr([model.state_dict(), method.state_dict()]) == repr(once), "a task ends once"


@pytest.mark.parametrize("tune_from", ["learned", "anew"])
def test_where_fine_tuning_starts(tune_from, learned):
    """With steps of length zero it ends there, outputs divided by the temperature."""
    model, method, stream = learned(1, tune_from=tune_from, tune_lr=0.0, temperature=4.0)
    method.begin_task(model, stream[1])
    x = next(stream[1].examples(20)).x
    before = method.predict(model.eval(), x)
    method.end_task(model, stream[1])
    after = method.predict(model, x)
    if tune_from == "learned":
        torch.testing.assert_close(after, before)
    else:
        weights = torch.cat([*method._live.blocks, model[5].weight], 1)
        assert 0.9 < weights.abs().max() * 4 * 16**0.5 <= 1, "drawn as torch draws for all features together"
        assert not torch.allclose(after, before)
    assert all(p.grad is None for p in method.parameters()), "no optimizer goes on with them"


def test_what_is_drawn_follows_the_seed(small_stream):
    stream, drawn = small_stream("class"), []
    state = nets.mlp(64, 6, hidden=(8,)).state_dict()
    for seed in (1, 1, 2):
        model, method = nets.mlp(64, 6, hidden=(8,)), ExpandableRepresentation(30, tune_epochs=0)
        model.load_state_dict(state)
        torch.manual_seed(seed)
        everlearn.train(model, method, stream[0])
        method.begin_task(model, stream[1])
        drawn.append(torch.cat([model[3].weight, method._live.auxiliary.weight]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.isclose(drawn[0], drawn[2]).any()


def test_without_fine_tuning_the_model_stays(learned):
    model, method, stream = learned(1, tune_epochs=0)
    method.begin_task(model, stream[1])
    before = copy.deepcopy(model.state_dict())
    method.end_task(model, stream[1])
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_fine_tuning_makes_up_for_few_old_examples(learned):
    """Before it the classifier prefers the new classes; after it not."""
    share = {}
    for epochs in (0, 30):
        model, method, stream = learned(3, tune_epochs=epochs, size=4, passes=5)
        x = torch.cat([next(task.examples(100, "test")).x for task in stream])
        share[epochs] = float((method.predict(model.eval(), x).argmax(1) >= 4).float().mean())
    assert share[30] < 0.5 and share[0] > 0.8, "a third of them are new"


def test_herding_follows_the_features(learned):
    model, method, stream = learned(2)
    y = method.memory["y"]
    assert y.bincount().max() - y.bincount().min() <= 1 and len(y) == 30
    x, labels = stream[1].train.x, stream[1].train.y
    for c in (2, 3):
        own = x[labels == c]
        chosen = own[herding_order(F.normalize(phi(method, model, own), dim=1), 7)]
        kept = method.memory["x"][y == c]
        assert {tuple(v.flatten().tolist()) for v in chosen} <= {tuple(v.flatten().tolist()) for v in kept}


def test_inputs_are_kept_as_they_were_and_seen_as_in_tests():
    torch.manual_seed(0)
    x, y = torch.rand(40, 5), torch.arange(40) % 2
    asked = []

    def look(v):
        asked.append(v.min())
        return v + 100

    tasks = [
        Task((x, y + 2 * k), id=k, transform=lambda v: v + 200, eval_transform=look) for k in range(2)
    ]  # one view each
    model, method = nets.mlp(5, 4, hidden=(6,)), ExpandableRepresentation(10, tune_epochs=1)
    for task in tasks:
        everlearn.train(model, method, task, batch_size=20)
    assert method.memory["x"].max() <= 1 and asked and max(asked) <= 1, "views are of what the task gave"
    assert len(asked) == 3, "task 0, task 1 and the memory"
    method.begin_task(model, Task((x, y), id=2, transform=lambda v: v - 300))
    replayed = method.join(Batch(x, y, torch.full((40,), 2), transform=lambda v: v - 300))[40:]
    assert replayed.x.min() >= 200, "remembered ones are augmented as their own task augments"


def test_a_half_learned_task_goes_on(learned):
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
    other, again = reloaded(model, method, NETS["mlp"](stream))
    x, said = next(stream[1].examples(20)).x, []
    for m, k in ((model, method), (other, again)):
        learn(m, k, steps[4:])
        k.end_task(m, stream[1])
        said.append(m.eval()(x))
    assert torch.equal(*said) and len(method.extractors) == len(again.extractors) == 1


def test_a_task_in_parts_has_one_extractor(small_stream):
    stream = everlearn.streams.online(small_stream("class"), chunk=40)
    model, method, optimizer = (
        nets.mlp(64, 6, hidden=(16,)),
        ExpandableRepresentation(40, tune_epochs=2),
        OPTIMIZERS["adamw"],
    )
    x = next(stream[0].examples(20)).x
    for task in stream:
        new = task.id != method.current
        optimizer = everlearn.train(
            model, method, task, batch_size=10, optimizer=OPTIMIZERS["adamw"] if new else optimizer
        ).optimizer
        learning = {id(p) for p in [*model.parameters(), *method.parameters()]}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == learning
        if task.id == 0:
            first = phi(method, model, x)
    assert method.diagnostics()["extractors"] == 3 < len(stream)
    assert torch.equal(phi(method, model, x)[:, :16], first)


def test_an_optimizer_that_lives_on_moves_no_old_extractor(learned):
    model, method, stream = learned(1)
    x = next(stream[0].examples(20)).x
    seen = phi(method, model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    for task in stream.tasks[1:]:
        everlearn.train(model, method, task, optimizer=optimizer)
    assert torch.equal(phi(method, model, x)[:, :8], seen)


def test_a_growing_head(small_stream):
    torch.manual_seed(0)
    stream = small_stream("class")
    model, method = nets.mlp(64, 2, hidden=(12,)), ExpandableRepresentation(30, tune_epochs=2)
    for k in range(3):
        everlearn.surgery.heads.grow_output(model, 2 * k + 2)
        x = next(stream[0].examples(20)).x
        assert method.predict(model, x).shape == (20, 2 * k + 2), "also between tasks"
        everlearn.train(model, method, Task((stream[k].train.x, stream[k].train.y), id=k))
        assert method.new == [2 * k, 2 * k + 1]
    assert [len(b) for b in method._live.blocks] == [6, 6]


def test_plain_data_without_numbers_or_tables():
    torch.manual_seed(0)
    model, method = nets.mlp(5, 4, hidden=(6,)), ExpandableRepresentation(8, tune_epochs=2)
    x, y = torch.rand(40, 5), torch.arange(40) % 2
    for k in range(2):
        everlearn.train(model, method, (x, y + 2 * k), batch_size=20)
    assert method.memory["t"].unique().tolist() == [-2, -1] and method.memory["y"].bincount().tolist() == [2] * 4
    method.begin_task(model, (x, y))  # classes that were there before
    whole = method.join(Batch(x[:4], y[:4]))
    assert method.targets(whole.y, method._old).tolist() == [*(1 + y[:4]).tolist(), 0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"no examples of the task to remember; a generator can be read once only"):
        method.end_task(model, iter([]))


def test_classes_that_come_back_are_old():
    allowed = torch.ones(2, 3, dtype=torch.bool)
    data = torch.rand(30, 5), torch.arange(30) % 2
    model, method = nets.mlp(5, 3, hidden=(6,)), ExpandableRepresentation(8, tune_epochs=1)
    first = allowed.clone()
    first[:, 2] = False
    everlearn.train(model, method, Task(data, id=0, allowed=first))
    method.begin_task(model, Task((data[0], data[1] + 1), id=1, allowed=allowed))
    assert method.new == [2] and method._live.auxiliary.out_features == 2
    assert method.targets(torch.tensor([1, 2]), torch.tensor([False, False])).tolist() == [0, 1]


def test_copies_and_taking_it_off(learned):
    model, method, stream = learned(2)
    x = next(stream[1].examples(20)).x
    double, before = copy.deepcopy(model), model(x)
    assert torch.equal(double(x), before)
    with torch.no_grad():
        for p in [*model.parameters(), *method.parameters()]:
            p.add_(0.1)
    assert torch.equal(double(x), before) and not torch.equal(model(x), before)
    method.detach(model)
    assert not hooks(model)
    own = model(x)
    torch.testing.assert_close(own, model[5](phi(method, model, x)[:, 8:]))
    assert not torch.allclose(method.predict(model, x), own), "asked again, all take part"


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["parallel", "compile"]
)
def test_wrapped_models(wrap, learned, small_stream):
    plain, truth, stream = learned(2)
    torch.manual_seed(0)
    model, method, _ = learned(2, model=wrap(NETS["mlp"](stream)))
    x = next(stream[0].examples(20)).x
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(method.predict(model, x), truth.predict(plain, x), rtol=1e-4, atol=1e-5)


def test_with_other_methods_and_half_precision(small_stream):
    stream = small_stream("class")
    model, method = nets.mlp(64, 6, hidden=(12,)), ExpandableRepresentation(30, tune_epochs=1) + EWC(1.0)
    for task in stream:
        everlearn.train(model, method, task, precision="bfloat16", accumulate=2)
    assert method.predict(model, next(stream[0].examples(5)).x).isfinite().all()
    with pytest.raises(ValueError, match="ExpandableRepresentation and ER both define join"):
        ExpandableRepresentation() + ER()


def test_what_cannot_be_is_said(learned, small_stream):
    stream, kind = small_stream("class"), ExpandableRepresentation
    with pytest.raises(ValueError, match=r"no feature extractor in Sequential.* deeper model"):
        kind().begin_task(nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), stream[0])
    with pytest.raises(ValueError, match="before any begin_task"):
        kind().end_task(nets.mlp(64, 6), stream[0])
    model, method = nets.mlp(64, 6, hidden=(8,)), kind()
    method.begin_task(model, stream[0])
    with pytest.raises(ValueError, match="Task 0 has not ended"):
        method.begin_task(model, stream[1])
    batch = Batch(torch.randn(4, 64), torch.randn(4, 6), likelihood=Gaussian())
    with pytest.raises(TypeError, match=r"one class per example, not Gaussian.* use ER"):
        method.loss(model, batch)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"'2' shares its weights with 0.weight"):
        kind().begin_task(tied, stream[0])
    with pytest.raises(ValueError, match=r"no nn.Linear layer named 'top'"):
        kind(output="top").begin_task(model, stream[0])
    with pytest.raises(ValueError, match=r"ExpandableRepresentation.policy: got 'all', allowed: 'herding'"):
        kind(policy="all")
    model, method, stream = learned(2)
    with torch.no_grad():
        method.parameters()[0].fill_(torch.nan)
    method.begin_task(model, stream[2])
    with pytest.raises(FloatingPointError):
        method.end_task(model, stream[2])


def test_it_beats_replay_with_the_same_memory():
    stream = everlearn.streams.digits(scenario="class")
    make = lambda i, o: nets.mlp(i, o, hidden=(32,))
    kinds = ER(100), ER(100, policy="balanced"), ExpandableRepresentation(100)
    *replay, own = (everlearn.run(make, m, stream, epochs=5, batch_size=32).average_accuracy for m in kinds)
    assert own > max(replay) + 0.1


class Shuffled:
    """A view of its own: pixels in another order."""

    def __init__(self, seed):
        self.order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))

    def __call__(self, x):
        return x.flatten(1)[:, self.order].reshape(x.shape)


@pytest.mark.parametrize("seen", [True, False])
def test_views_that_a_checkpoint_has_lost_are_told(seen, small_stream):
    stream = small_stream("domain")
    tasks = [
        everlearn.Task(task.train, id=task.id, eval_transform=Shuffled(task.id) if seen or task.id == 2 else None)
        for task in stream
    ]
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(12,)), ExpandableRepresentation(30, tune_epochs=2)
    for task in tasks[:2]:
        everlearn.train(model, method, task, batch_size=32)
    other, again = copy.deepcopy(model), ExpandableRepresentation(30, tune_epochs=2)
    again.load_state_dict(method.state_dict())
    torch.manual_seed(1)
    everlearn.train(model, method, tasks[2], batch_size=32)
    torch.manual_seed(1)
    if seen:
        with pytest.warns(
            UserWarning, match=r"task 0, 1, whose transforms it does not know: a checkpoint holds no functions"
        ):
            again.begin_task(other, tasks[2])
        return
    everlearn.train(other, again, tasks[2], batch_size=32)  # none is known to have been none
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(method.predict(model, x), again.predict(other, x))
