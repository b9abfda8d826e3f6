import copy
import io

import pytest
import torch
from torch import nn

import everlearn
from everlearn import PackNet, nets

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def learned(tasks=2, scenario="task", small_stream=None, **options):
    torch.manual_seed(0)
    stream = small_stream(scenario)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(32, 16))
    method = PackNet(**options)
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, epochs=3, batch_size=32)
    return model, method, stream


def test_owners_divide_the_weights_in_the_given_shares(small_stream):
    _, method, _ = learned(2, small_stream=small_stream)
    for owner in method.owner.values():
        n = owner.numel()
        counts = [int((owner == k).sum()) for k in range(3)]
        assert sum(counts) == n
        assert counts == [n * 3 // 8, n // 2, n // 8]  # n is divisible by 8 in this net
    assert all(share == pytest.approx(0.625) for share in method.capacity().values())


def test_the_smallest_weights_are_pruned_and_stay_zero(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model = nets.mlp(task.train.x.shape[1:], 6, hidden=(32,))
    method = PackNet(first=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    method.begin_task(model, task)
    for i, batch in enumerate(task.batches(16, epochs=2)):
        optimizer.zero_grad()
        method.loss(model, batch).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
        if i == 3:
            weight = model[1].weight
            weight_before = weight.detach().clone()
            method.prune_now(model)
            is_pruned = weight == 0
            assert int(is_pruned.sum()) == round(0.3 * weight.numel())
            assert weight_before[~is_pruned].abs().min() >= weight_before[is_pruned].abs().max()
        if i >= 3:
            assert (weight[is_pruned] == 0).all() and (method.owner["1.weight"][is_pruned] == 0).all()
    method.end_task(model, task)
    assert torch.equal(weight == 0, is_pruned)


@pytest.mark.parametrize("ties", [1.0, -1.0])
def test_weights_of_equal_magnitude_are_pruned_together(ties):
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    method = PackNet(first=0.5)
    method.begin_task(model, everlearn.Task((torch.zeros(4, 4), torch.zeros(4, dtype=torch.long))))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 1, 1, 1], [4.0, ties, ties, 2.0]]))
    method.prune_now(model)
    assert model[0].weight.tolist() == [[3.0, 0, 0, 0], [4.0, 0, 0, 2.0]]


@pytest.mark.parametrize("rest", ["frozen", "own"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_earlier_tasks_never_change(net, optimizer, rest, small_stream, check_isolation):
    check_isolation(lambda: PackNet(rest=rest), net, OPTIMIZERS[optimizer], small_stream("task"))


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_earlier_tasks_never_change_with_shared_outputs(scenario, small_stream, check_isolation):
    check_isolation(PackNet, "cnn", OPTIMIZERS["adamw"], small_stream(scenario))


def test_biases_and_norms_stay_after_the_first_task(small_stream):
    torch.manual_seed(0)
    stream = small_stream()
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))
    method = PackNet()
    everlearn.train(model, method, stream[0], batch_size=16)
    shared = set(method.owner)
    expected = {n: v.clone() for n, v in model.state_dict().items() if n not in shared and not n.startswith("4.")}
    assert any("running_mean" in n for n in expected)
    decay = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)
    everlearn.train(model, method, stream[1], batch_size=16, optimizer=decay)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in expected.items())
    method.detach(model)
    everlearn.train(model, everlearn.Method(), stream[1], batch_size=16)
    assert not any(torch.equal(v, model.state_dict()[n]) for n, v in expected.items() if "running" in n)


def test_a_full_network_raises_before_training(small_stream):
    model, method, stream = learned(1, small_stream=small_stream, first=0.0)
    state = copy.deepcopy(method.state_dict())
    with pytest.raises(ValueError, match=r"no free weights left for .*wider"):
        method.begin_task(model, stream[1])
    assert repr(state) == repr(method.state_dict())


def test_a_loop_without_before_step_raises(small_stream):
    model, method, stream = learned(1, small_stream=small_stream)
    method.begin_task(model, stream[1])
    batch = next(stream[1].batches(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.loss(model, batch).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"before_step\(model\)"):
        method.end_task(model, stream[1])


def test_gradients_of_locked_weights_do_not_count_when_clipping(small_stream):
    model, method, stream = learned(1, small_stream=small_stream)
    method.begin_task(model, stream[1])
    method.loss(model, next(stream[1].batches(32))).backward()
    method.before_step(model)
    weight = model[1].weight
    assert (weight.grad[method.owner["1.weight"] == 1] == 0).all() and weight.grad.any()
    assert model[1].bias.grad is None


def test_without_planned_steps_end_task_prunes(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model = nets.mlp(64, 6, hidden=(16,))
    method = PackNet()
    method.begin_task(model, everlearn.Task((task.train.x, task.train.y)))
    method.end_task(model, task)
    assert float((model[1].weight == 0).float().mean()) == 0.5


def test_a_task_in_parts_prunes_only_its_weights(small_stream):
    torch.manual_seed(0)
    stream = everlearn.streams.online(small_stream(), chunk=40)
    model = nets.mlp(64, 6, hidden=(32,))
    method = PackNet()
    result = everlearn.run(lambda: model, method, stream, batch_size=10)
    assert result.forgetting == 0.0


def test_mixed_and_unknown_tasks(small_stream):
    model, method, stream = learned(3, small_stream=small_stream)
    x = torch.cat([next(t.examples(5, "test")).x for t in stream])
    t = torch.tensor([2] * 5 + [0] * 5 + [1] * 5)
    mixed = method.predict(model, x, t)
    for k in range(3):
        torch.testing.assert_close(mixed[t == k], method.predict_as(model, x[t == k], k), rtol=1e-4, atol=1e-6)
    guessed = method.predict(model, x)
    outputs = torch.stack([method.predict_as(model, x, k) for k in range(3)])
    allowed = torch.stack(method.allowed_outputs)
    choice = outputs.masked_fill(~allowed[:, None], -torch.inf).softmax(-1).amax(-1).argmax(0)
    for i, k in enumerate(choice.tolist()):
        assert (
            torch.equal(guessed[i][allowed[k]], outputs[k, i][allowed[k]]) and guessed[i][~allowed[k]].isneginf().all()
        )
    with pytest.raises(ValueError, match="must know the task"):
        strict = PackNet(unknown="raise")
        strict.load_state_dict(method.state_dict())
        strict.predict(model, x)


def test_export_is_a_plain_module_with_the_same_outputs(small_stream, check_export):
    model, method, stream = learned(3, small_stream=small_stream)
    check_export(model, method, stream)


def test_state_survives_saving(small_stream):
    model, method, stream = learned(2, small_stream=small_stream)
    x = next(stream[0].examples(20, "test")).x
    expected = [method.predict_as(model, x, k) for k in range(2)]
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    new_model = nets.mlp(stream.inputs, stream.outputs, hidden=(32, 16))
    reloaded = PackNet()
    new_model.load_state_dict(weights)
    reloaded.load_state_dict(state)
    new_model.eval()
    assert all(torch.equal(reloaded.predict_as(new_model, x, k), expected[k]) for k in range(2))


def test_remaining_weights_train_after_pruning(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    history = []

    class Watched(PackNet):
        def after_step(self, model):
            super().after_step(model)
            history.append((self.pruned, model[1].weight.detach().clone()))

    model = nets.mlp(64, 6, hidden=(16,))
    method = Watched(retrain=0.5)
    everlearn.train(model, method, task, epochs=2, batch_size=10)
    pruned = [has_pruned for has_pruned, _ in history]
    assert pruned == sorted(pruned) and pruned.count(True) == round(len(pruned) / 2) + 1 - len(pruned) % 2
    first = history[pruned.index(True)][1]
    last = history[-1][1]
    assert torch.equal(first == 0, last == 0) and not torch.equal(first, last)


def test_prune_now_works_once_per_task(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model = nets.mlp(64, 6, hidden=(16,))
    method = PackNet()
    with pytest.raises(ValueError, match="no task is being learned"):
        method.prune_now(model)
    with pytest.raises(ValueError, match="before any begin_task"):
        method.end_task(model, task)

    class Early(PackNet):
        def after_step(self, model):
            if self.steps == 1:
                self.prune_now(model)
            super().after_step(model)

    method = Early()
    everlearn.train(model, method, task, batch_size=10)
    assert method.capacity() == {"1.weight": 0.5}
    with pytest.raises(ValueError, match="nothing to prune"):
        method.prune_now(model)


def test_pruning_raises_if_locked_weights_moved(small_stream):
    model, method, stream = learned(1, small_stream=small_stream)
    method.begin_task(model, stream[1])
    method.loss(model, next(stream[1].batches(32))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"before_step\(model\)"):
        method.prune_now(model)


def test_a_frozen_body_is_not_pruned(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model = nets.mlp(64, 6, hidden=(16, 8))
    method = PackNet()
    model[1].requires_grad_(False)
    expected = model[1].weight.clone()
    everlearn.train(model, method, task, batch_size=16)
    assert list(method.owner) == ["3.weight"] and torch.equal(model[1].weight, expected)


def test_running_out_of_weights_raises():
    # Weights of an input that is always zero would stay free for ever.
    data = (torch.randn(20, 64), torch.randint(6, (20,)))
    model = nets.mlp(64, 6, hidden=(2,))
    method = PackNet(first=0.3, prune=0.75)
    with pytest.raises(ValueError, match=r"no free weights left"):
        for k in range(200):
            everlearn.train(model, method, everlearn.Task(data, id=k), batch_size=20)
    counts = [int((method.owner["1.weight"] == k + 1).sum()) for k in range(len(method.tasks))]
    assert sum(counts) == 128 and len(counts) > 5


def test_scales_embeddings_and_positions_are_not_weights():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.positions = nn.Parameter(torch.randn(1, 5, 4))
            self.token = nn.Parameter(torch.randn(1, 1, 4))
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 9)
            self.head.weight = self.words.weight

        def forward(self, x):
            h = self.a(self.words(x) + self.positions + self.token)
            return self.head(self.attention(h, h, h)[0].mean(1))

    model = Words()
    method = PackNet()
    for k in range(2):
        everlearn.train(model, method, everlearn.Task((torch.randint(9, (16, 5)), torch.randint(9, (16,))), id=k))
    assert set(method.owner) == {
        "a.parametrizations.weight.original1",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert "words.weight" in method.task_params[0], "each task has its own output layer, here tied to the embedding"
    assert not torch.equal(method.task_params[0]["words.weight"], method.task_params[1]["words.weight"])


def test_an_unfrozen_layer_stays_locked_with_one_warning(small_stream):
    torch.manual_seed(0)
    stream = small_stream()
    model = nets.mlp(64, 6, hidden=(16, 8))
    method = PackNet()
    model[1].requires_grad_(False)
    everlearn.train(model, method, stream[0], batch_size=16)
    model[1].requires_grad_(True)
    expected = model[1].weight.clone()
    with pytest.warns(UserWarning, match=r"PackNet keeps 1.weight locked: frozen while earlier tasks"):
        everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    everlearn.train(model, method, stream[2], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    assert torch.equal(model[1].weight, expected) and list(method.owner) == ["3.weight"]


def test_weights_of_an_added_layer_are_free(small_stream):
    """For earlier tasks its weights are zero, so the added branch contributes nothing."""

    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(64, 16)
            self.head = nn.Linear(16, 6)
            self.branch = None

        def forward(self, x):
            h = self.body(x.flatten(1))
            return self.head(torch.relu(h if self.branch is None else h + self.branch(x.flatten(1))))

    torch.manual_seed(0)
    stream = small_stream()
    model = Branched()
    method = PackNet(output="head")
    x = next(stream[0].examples(20, "test")).x
    everlearn.train(model, method, stream[0], batch_size=16)
    expected = method.predict(model, x, 0)
    model.branch = nn.Linear(64, 16, bias=False)
    everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    assert torch.equal(method.predict(model, x, 0), expected)
    assert (method.owner["branch.weight"] == 2).any()


def old_weight_norm(layer, dim=0):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, old_weight_norm])
def test_normalized_slices_keep_an_entry(norm, dim, small_stream):
    """The direction of a slice of zeros is 0/0."""
    torch.manual_seed(0)
    stream = small_stream()
    model = nn.Sequential(nn.Flatten(), norm(nn.Linear(64, 16), dim=dim), nn.ReLU(), nn.Linear(16, 6))
    method = PackNet()
    name = next(n for n, p in model.named_parameters() if p.dim() == 2 and n.endswith(("original1", "weight_v")))
    v = dict(model.named_parameters())[name]
    small = v.detach()[3] if dim == 0 else v.detach()[:, 3]
    with torch.no_grad():
        small.mul_(1e-6)
    largest = int(small.abs().argmax())
    x = next(stream[0].examples(20, "test")).x
    method.begin_task(model, stream[0])
    method.prune_now(model)
    assert model(x).isfinite().all()
    remaining = small.nonzero().flatten().tolist()
    assert remaining == ([] if dim is None else [largest])
    share = (v == 0).sum() / v.numel()
    assert share == pytest.approx(0.5, abs=2 / v.numel())
    method.end_task(model, stream[0])
    expected = method.predict(model, x, 0)
    everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    assert torch.equal(method.predict(model, x, 0), expected) and expected.isfinite().all()


def test_a_frozen_backbone_raises(small_stream):
    stream = small_stream("task")
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    names = [name for name, _ in model.named_parameters()]
    for p in list(model.parameters())[:-2]:
        p.requires_grad_(False)
    with pytest.raises(ValueError, match=rf"all are frozen \({names[0]} .*requires_grad=False"):
        PackNet().begin_task(model, stream[0])
    with pytest.raises(ValueError, match="use a deeper model"):
        PackNet().begin_task(nn.Linear(4, 3), stream[0])
