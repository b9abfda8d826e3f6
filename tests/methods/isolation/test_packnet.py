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
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(32, 16)), PackNet(**options)
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, epochs=3, batch_size=32)
    return model, method, stream


def test_owners_are_a_partition_with_the_shares_asked_for(small_stream):
    _, method, _ = learned(2, small_stream=small_stream)
    for owner in method.owner.values():
        n = owner.numel()
        counts = [int((owner == k).sum()) for k in range(3)]
        assert sum(counts) == n
        assert counts == [n * 3 // 8, n // 2, n // 8]  # n is divisible by 8 in this net
    assert all(share == pytest.approx(0.625) for share in method.capacity().values())


def test_pruned_are_the_smallest_and_stay_zero(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model, method = nets.mlp(task.train.x.shape[1:], 6, hidden=(32,)), PackNet(first=0.3)
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
            before = weight.detach().clone()
            method.prune_now(model)
            gone = weight == 0
            assert int(gone.sum()) == round(0.3 * weight.numel())
            assert before[~gone].abs().min() >= before[gone].abs().max()
        if i >= 3:
            assert (weight[gone] == 0).all() and (method.owner["1.weight"][gone] == 0).all()
    method.end_task(model, task)
    assert torch.equal(weight == 0, gone)


@pytest.mark.parametrize("ties", [1.0, -1.0])
def test_ties_go_too(ties):
    model, method = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2)), PackNet(first=0.5)
    method.begin_task(model, everlearn.Task((torch.zeros(4, 4), torch.zeros(4, dtype=torch.long))))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 1, 1, 1], [4.0, ties, ties, 2.0]]))
    method.prune_now(model)
    assert model[0].weight.tolist() == [[3.0, 0, 0, 0], [4.0, 0, 0, 2.0]]


@pytest.mark.parametrize("rest", ["frozen", "own"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_earlier_tasks_never_change(net, optimizer, rest, small_stream, isolated):
    isolated(lambda: PackNet(rest=rest), net, OPTIMIZERS[optimizer], small_stream("task"))


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_nor_where_outputs_are_shared(scenario, small_stream, isolated):
    isolated(PackNet, "cnn", OPTIMIZERS["adamw"], small_stream(scenario))


def test_biases_and_norms_stay_after_the_first_task(small_stream):
    torch.manual_seed(0)
    stream = small_stream()
    model, method = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8)), PackNet()
    everlearn.train(model, method, stream[0], batch_size=16)
    shared = set(method.owner)
    before = {n: v.clone() for n, v in model.state_dict().items() if n not in shared and not n.startswith("4.")}
    assert any("running_mean" in n for n in before)
    decay = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)
    everlearn.train(model, method, stream[1], batch_size=16, optimizer=decay)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in before.items())
    method.detach(model)
    everlearn.train(model, everlearn.Method(), stream[1], batch_size=16)
    assert not any(torch.equal(v, model.state_dict()[n]) for n, v in before.items() if "running" in n)


def test_a_full_network_is_refused_before_training(small_stream):
    model, method, stream = learned(1, small_stream=small_stream, first=0.0)
    state = copy.deepcopy(method.state_dict())
    with pytest.raises(ValueError, match=r"no free weights left for .*wider"):
        method.begin_task(model, stream[1])
    assert repr(state) == repr(method.state_dict())


def test_a_loop_that_forgets_to_lock_is_told(small_stream):
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


def test_without_planned_steps_the_end_prunes(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model, method = nets.mlp(64, 6, hidden=(16,)), PackNet()
    method.begin_task(model, everlearn.Task((task.train.x, task.train.y)))
    method.end_task(model, task)
    assert float((model[1].weight == 0).float().mean()) == 0.5


def test_a_task_in_parts_prunes_its_own_weights_only(small_stream):
    torch.manual_seed(0)
    stream = everlearn.streams.online(small_stream(), chunk=40)
    model, method = nets.mlp(64, 6, hidden=(32,)), PackNet()
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
    said = torch.stack([method.predict_as(model, x, k) for k in range(3)])
    own = torch.stack(method.allowed_outputs)
    sure = said.masked_fill(~own[:, None], -torch.inf).softmax(-1).amax(-1).argmax(0)
    for i, k in enumerate(sure.tolist()):
        assert torch.equal(guessed[i][own[k]], said[k, i][own[k]]) and guessed[i][~own[k]].isneginf().all()
    with pytest.raises(ValueError, match="must know the task"):
        strict = PackNet(unknown="raise")
        strict.load_state_dict(method.state_dict())
        strict.predict(model, x)


def test_export_is_a_plain_module_with_the_same_answers(small_stream, exported):
    model, method, stream = learned(3, small_stream=small_stream)
    exported(model, method, stream)


def test_state_survives_saving(small_stream):
    model, method, stream = learned(2, small_stream=small_stream)
    x = next(stream[0].examples(20, "test")).x
    before = [method.predict_as(model, x, k) for k in range(2)]
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, again = nets.mlp(stream.inputs, stream.outputs, hidden=(32, 16)), PackNet()
    other.load_state_dict(weights)
    again.load_state_dict(state)
    other.eval()
    assert all(torch.equal(again.predict_as(other, x, k), before[k]) for k in range(2))


def test_what_is_left_learns_on_after_pruning(small_stream):
    torch.manual_seed(0)
    task, seen = small_stream()[0], []

    class Watched(PackNet):
        def after_step(self, model):
            super().after_step(model)
            seen.append((self.pruned, model[1].weight.detach().clone()))

    model, method = nets.mlp(64, 6, hidden=(16,)), Watched(retrain=0.5)
    everlearn.train(model, method, task, epochs=2, batch_size=10)
    pruned = [done for done, _ in seen]
    assert pruned == sorted(pruned) and pruned.count(True) == round(len(pruned) / 2) + 1 - len(pruned) % 2
    first, last = seen[pruned.index(True)][1], seen[-1][1]
    assert torch.equal(first == 0, last == 0) and not torch.equal(first, last)


def test_pruning_by_hand_happens_once(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model, method = nets.mlp(64, 6, hidden=(16,)), PackNet()
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


def test_pruning_does_not_hide_that_a_loop_forgot_to_lock(small_stream):
    model, method, stream = learned(1, small_stream=small_stream)
    method.begin_task(model, stream[1])
    method.loss(model, next(stream[1].batches(32))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match=r"before_step\(model\)"):
        method.prune_now(model)


def test_a_frozen_body_is_not_pruned(small_stream):
    torch.manual_seed(0)
    task = small_stream()[0]
    model, method = nets.mlp(64, 6, hidden=(16, 8)), PackNet()
    model[1].requires_grad_(False)
    before = model[1].weight.clone()
    everlearn.train(model, method, task, batch_size=16)
    assert list(method.owner) == ["3.weight"] and torch.equal(model[1].weight, before)


def test_it_runs_out_and_says_so():
    data = (
        torch.randn(20, 64),
        torch.randint(6, (20,)),
    )  # an input that is always zero would leave its weights free for ever
    model, method = nets.mlp(64, 6, hidden=(2,)), PackNet(first=0.3, prune=0.75)
    with pytest.raises(ValueError, match=r"no free weights left"):
        for k in range(200):
            everlearn.train(model, method, everlearn.Task(data, id=k), batch_size=20)
    counts = [int((method.owner["1.weight"] == k + 1).sum()) for k in range(len(method.tasks))]
    assert sum(counts) == 128 and len(counts) > 5


def test_scales_tables_and_places_are_not_weights():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.token = (
                nn.Embedding(9, 4),
                nn.Parameter(torch.randn(1, 5, 4)),
                nn.Parameter(torch.randn(1, 1, 4)),
            )
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 9)
            self.head.weight = self.words.weight

        def forward(self, x):
            h = self.a(self.words(x) + self.places + self.token)
            return self.head(self.attention(h, h, h)[0].mean(1))

    model, method = Words(), PackNet()
    for k in range(2):
        everlearn.train(model, method, everlearn.Task((torch.randint(9, (16, 5)), torch.randint(9, (16,))), id=k))
    assert set(method.owner) == {
        "a.parametrizations.weight.original1",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert "words.weight" in method.task_params[0], "an output layer that is also the table of words is each task's own"
    assert not torch.equal(method.task_params[0]["words.weight"], method.task_params[1]["words.weight"])


def test_a_layer_that_thaws_stays_locked_and_says_so_once(small_stream):
    torch.manual_seed(0)
    stream = small_stream()
    model, method = nets.mlp(64, 6, hidden=(16, 8)), PackNet()
    model[1].requires_grad_(False)
    everlearn.train(model, method, stream[0], batch_size=16)
    model[1].requires_grad_(True)
    before = model[1].weight.clone()
    with pytest.warns(UserWarning, match=r"PackNet keeps 1.weight locked: frozen while earlier tasks"):
        everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    everlearn.train(model, method, stream[2], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    assert torch.equal(model[1].weight, before) and list(method.owner) == ["3.weight"]


def test_a_layer_that_is_new_is_shared_out(small_stream):
    """For earlier tasks its weights are zero: a branch that is added says nothing to them."""

    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.branch = nn.Linear(64, 16), nn.Linear(16, 6), None

        def forward(self, x):
            h = self.body(x.flatten(1))
            return self.head(torch.relu(h if self.branch is None else h + self.branch(x.flatten(1))))

    torch.manual_seed(0)
    stream = small_stream()
    model, method = Branched(), PackNet(output="head")
    x = next(stream[0].examples(20, "test")).x
    everlearn.train(model, method, stream[0], batch_size=16)
    before = method.predict(model, x, 0)
    model.branch = nn.Linear(64, 16, bias=False)
    everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    assert torch.equal(method.predict(model, x, 0), before)
    assert (method.owner["branch.weight"] == 2).any()


def old_weight_norm(layer, dim=0):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, old_weight_norm])
def test_what_is_divided_by_its_norm_keeps_an_entry(norm, dim, small_stream):
    """Of a slice of zeros the direction is 0/0."""
    torch.manual_seed(0)
    stream = small_stream()
    model, method = (
        nn.Sequential(nn.Flatten(), norm(nn.Linear(64, 16), dim=dim), nn.ReLU(), nn.Linear(16, 6)),
        PackNet(),
    )
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
    left = small.nonzero().flatten().tolist()
    assert left == ([] if dim is None else [largest])
    share = (v == 0).sum() / v.numel()
    assert share == pytest.approx(0.5, abs=2 / v.numel())
    method.end_task(model, stream[0])
    before = method.predict(model, x, 0)
    everlearn.train(model, method, stream[1], optimizer=OPTIMIZERS["adamw"], batch_size=16)
    assert torch.equal(method.predict(model, x, 0), before) and before.isfinite().all()


def test_a_frozen_backbone_is_named_as_such(small_stream):
    stream = small_stream("task")
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    names = [name for name, _ in model.named_parameters()]
    for p in list(model.parameters())[:-2]:
        p.requires_grad_(False)
    with pytest.raises(ValueError, match=rf"all are frozen \({names[0]} .*requires_grad=False"):
        PackNet().begin_task(model, stream[0])
    with pytest.raises(ValueError, match="use a deeper model"):
        PackNet().begin_task(nn.Linear(4, 3), stream[0])
