import copy
import io

import pytest
import torch
from torch import nn

import everlearn
from everlearn import DEN, nets
from everlearn.methods.expansion.den_units import UnitDuplicator, outside
from everlearn.surgery.resize import reachable_units
from everlearn.surgery.tracing import links
from tests.conftest import SMALL_NETS

ADAM = lambda p: torch.optim.Adam(p, lr=1e-2)
MOMENTUM = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3)


def learned(stream, tasks=3, net="mlp", epochs=3, optimizer=ADAM, seed=0, **options):
    torch.manual_seed(seed)
    model, method = SMALL_NETS[net](stream), DEN(**{"units": 4, "splits": 3, **options})
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, optimizer=optimizer, epochs=epochs, batch_size=32)
    return model, method


def numbered(x, task):
    return torch.full((len(x),), task)


def steps(model, method, task, count, optimizer=ADAM):
    """Some steps of a loop without planned steps: phases turn when they are told. Gives the optimizer, which may go on."""
    live = optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        live = optimizer([p for p in [*model.parameters(), *method.parameters()] if p.requires_grad])
    model.train()
    for batch in task.batches(16, iterations=count):
        live.zero_grad()
        method.loss(model, batch).backward()
        method.before_step(model)
        live.step()
        method.after_step(model)
    return live


def to_phase(method, model, task, phase, count=4):
    """Begin a task and learn up to the beginning of a phase."""
    task.steps = None
    method.begin_task(model, task)
    while method.phase != phase:
        steps(model, method, task, count)
        method.turn(model)


def values(model, method):
    return {n: v.detach().clone() for n, v in method._weights(model).items()}


def test_units_reached_are_those_of_a_search_in_the_graph():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    with torch.no_grad():
        for p in model.parameters():
            p *= torch.rand_like(p) < 0.18
    for row in range(3):
        seen, front = set(), {("7", row)}
        reads = {"7": ("5", 1), "5": ("3", 1), "3": ("0", 4)}  # who reads whom, places per unit
        while front:
            layer, unit = front.pop()
            seen.add((layer, unit))
            if layer in reads:
                below, places = reads[layer]
                weight = model.get_submodule(layer).weight
                front |= {(below, j // places) for j in range(weight.shape[1]) if weight[unit, j] != 0} - seen
        found = reachable_units(model, links(model), {"7": torch.arange(3) == row})
        for name, chosen in found.items():
            assert {u for n, u in seen if n == name} == set(chosen.nonzero().flatten().tolist())
        assert not all(c.all() for c in found.values()), "the net is sparse enough to choose"


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM])
def test_retraining_moves_nothing_outside_the_chosen_part(optimizer, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    task = stream[2]
    to_phase(method, model, task, "fit")
    rows = task.allowed[task.id]
    with torch.no_grad():
        for p in [model[5].weight, method.read["weight"]]:
            p[:, ::2] = 0  # so that some units are not reached
        model[3].weight[:, ::3] = 0
    last = model[5].weight[rows].ne(0).any(0)  # own units of the second layer that the task's outputs read
    method.turn(model)
    assert method.phase == "retrain"
    before = values(model, method)
    steps(model, method, task, 6, optimizer)
    after = values(model, method)
    whole = method.locked
    assert (
        set(whole) == set(before) and any(v.any() for v in whole.values()) and not all(v.all() for v in whole.values())
    )
    moved = 0
    for name, locked in whole.items():
        assert torch.equal(after[name][locked], before[name][locked])
        moved += int((after[name] != before[name]).sum())
    assert moved > 0
    assert not whole["3.weight"][last].all() and whole["3.weight"][~last].all() and whole["3.bias"].equal(~last)


def test_outside_is_what_does_not_join_two_chosen_units(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=3, threshold=0.0, net="cnn", epochs=1)
    beside = method._attach(model)
    method.blocks = [
        {n: {k: v if "running" in k else nn.Parameter(v) for k, v in t.items()} for n, t in b.items()}
        for b in method.blocks
    ]
    whole = {
        n: link.width + sum(len(b[n]["weight"]) for b in method.blocks) for n, link in beside.links_by_producer.items()
    }
    chosen = {n: torch.rand(w) < 0.5 for n, w in whole.items()}
    weights = method._weights(model)
    locked = outside(beside, method.blocks, weights, chosen)
    (first, a), (second, _) = beside.links_by_producer.items()
    assert a.consumer == second
    own, mine = a.width, beside.links_by_producer[second].width
    at = own + len(method.blocks[0][first]["weight"])
    row = mine + len(method.blocks[0][second]["weight"])
    for i, j in [(i, j) for i in range(mine) for j in range(own)]:
        assert (~locked[f"{second}.weight"][i, j]).all() == (chosen[second][i] and chosen[first][j])
    for i in range(len(method.blocks[1][second]["weight"])):
        for j in range(method.blocks[1][second]["inner"].shape[1]):
            assert (~locked[f"1:{second}:inner"][i, j]).all() == (chosen[second][row + i] and chosen[first][own + j])
    for i in range(mine):
        for j in range(len(method.blocks[1][first]["weight"])):
            assert (~locked[f"1:{first}:out"][i, j]).all() == (chosen[second][i] and chosen[first][at + j])


def test_only_the_output_layer_is_fitted_first_and_only_new_units_expand(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    to_phase(method, model, stream[2], "fit")
    before = values(model, method)
    steps(model, method, stream[2], 4, MOMENTUM)
    assert all(torch.equal(v, before[n]) for n, v in values(model, method).items())
    assert not any(v.any() for t in method.live.values() for v in t.values())
    method.turn(model)
    steps(model, method, stream[2], 4)
    method.turn(model)
    assert method.phase == "expand" and method.grew
    before, new = values(model, method), copy.deepcopy(method.live)
    steps(model, method, stream[2], 4, MOMENTUM)
    assert all(torch.equal(v, before[n]) for n, v in values(model, method).items())
    assert all(not torch.equal(t["weight"], new[n]["weight"]) for n, t in method.live.items())


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet"])
def test_expansion_changes_no_output(net, small_stream, double):
    stream, x = small_stream(), torch.rand(6, 1, 8, 8)
    for task in stream:
        task.train.x = task.train.x.double()
    model, method = learned(stream, tasks=2, net=net, threshold=0.0, epochs=1)
    to_phase(method, model, stream[2], "retrain")
    model.eval()
    now, old = model(x), [method.predict(model, x, numbered(x, k)) for k in (0, 1)]
    method.heard, method.hearings = 1.0, 1
    assert method.turn(model) == "expand" and set(method.awake.values()) == {4}
    torch.testing.assert_close(model(x), now, rtol=0, atol=1e-12)
    for k in (0, 1):
        torch.testing.assert_close(method.predict(model, x, numbered(x, k)), old[k], rtol=0, atol=1e-12)


def test_it_expands_if_and_only_if_the_loss_is_above_the_threshold(small_stream, monkeypatch):
    heard, loss_of = [], DEN._loss
    monkeypatch.setattr(DEN, "_loss", lambda self, model: heard.append(loss_of(self, model)) or heard[-1])
    for threshold in (0.0, 0.05, 100.0):
        heard.clear()
        _, method = learned(small_stream(), threshold=threshold, splits=0)
        assert len(heard) == 2 and all(loss > 0 for loss in heard)
        for loss, added in zip(heard, list(method.growth().values())[1:], strict=True):
            assert set(added.values()) <= {0, 1, 2, 3, 4}
            assert bool(added) == (loss > threshold)


def test_dead_units_go_without_a_trace(small_stream):
    stream, x = small_stream(), torch.rand(9, 1, 8, 8)
    model, method = learned(stream, tasks=1, threshold=0.0, lasso=0.1, splits=0, strength=0.0)
    task = stream[1]
    to_phase(method, model, task, "settle", count=8)
    assert sum(map(len, method.dead.values())) > 0
    steps(model, method, task, 3, MOMENTUM)
    model.eval()
    said, awake, dead = model(x), sum(method.awake.values()), sum(map(len, method.dead.values()))
    method.end_task(model, task)
    assert method.diagnostics()["units added so far"] == awake - dead
    torch.testing.assert_close(method.predict(model, x, numbered(x, 1)), said, rtol=1e-5, atol=1e-6)
    for block in method.blocks:
        for tensors in block.values():
            read = torch.cat(
                [tensors[n].flatten(1) for n in ("weight", "inner", "bias") if n in tensors and tensors[n].dim() > 1], 1
            )
            assert read.any(1).all(), "every unit that is left reads something"


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_split_gives_the_old_unit_back_and_goes_on_with_the_copy(net, seed, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, net=net, threshold=0.0, strength=0.0, seed=seed)
    to_phase(method, model, stream[2], "settle", count=6)
    steps(model, method, stream[2], 4)
    beside, now, before = method._attach(model), values(model, method), method.anchor
    awake = dict(method.awake)
    for name in beside.links_by_producer:
        rho = (now[f"{name}.weight"] - before[f"{name}.weight"]).flatten(1).square().sum(1)
        up = beside.feeds.get(name)
        for b in range(len(method.blocks) if up else 0):
            out = f"{b}:{up.producer}:out"
            rho = rho + (now[out] - before[out]).flatten(1).square().sum(1)
        twins = UnitDuplicator(beside, method.blocks, method.live, method.awake, method.read["weight"])
        rho, far = rho.sqrt(), rho.sqrt().sort().values
        at = int(far.diff()[1:-1].argmax()) + 1
        for drift in (0.0, float(far[at] + far[at + 1]) / 2):  # between two neighbours: sums round in different orders
            got = twins.drifted(method._weights(model), before, name, drift)
            own = [i for i in got if i < beside.links_by_producer[name].width]
            assert set(own) == {i for i in range(len(rho)) if rho[i] > drift}
            assert (rho[own].diff() < 1e-6).all(), "the farthest first"
    copied = twins.split(method._weights(model), before, 0.05, 3)
    after = values(model, method)
    assert any(copied.values())
    for name, units in copied.items():
        assert method.awake[name] == awake[name] + len(units) and len(units) <= 3
        for slot, i in enumerate(units, awake[name]):
            if i < beside.links_by_producer[name].width:
                assert torch.equal(after[f"{name}.weight"][i], before[f"{name}.weight"][i])
                copy_ = method.live[name]["weight"][slot].detach().clone()
                if (up := beside.feeds.get(name)) is not None:
                    gone = [u for u in copied[up.producer] if u < up.width]
                    assert not copy_[gone].any(), "it reads the copies of those that were split"
                    kept = [u for u in range(up.width) if u not in gone]
                    assert torch.equal(copy_[kept], now[f"{name}.weight"][i][kept])
                else:
                    assert torch.equal(copy_, now[f"{name}.weight"][i])
        rest = [i for i in range(beside.links_by_producer[name].width) if i not in units]
        assert torch.equal(after[f"{name}.weight"][rest], now[f"{name}.weight"][rest])


@pytest.mark.parametrize(("net", "frozen"), [("mlp", False), ("mlp", True), ("cnn", False)])
def test_a_split_of_all_units_changes_nothing_for_the_task_and_all_for_the_others(net, frozen, small_stream, double):
    stream, x = small_stream(), torch.rand(6, 1, 8, 8)
    for task in stream:
        task.train.x = task.train.x.double()
    model, method = learned(stream, tasks=2, net=net, threshold=0.0, splits=99, drift=0.0, strength=0.0)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or "bias" not in name)  # a copy has what is frozen, too
    old = [method.predict(model, x, numbered(x, k)) for k in (0, 1)]
    to_phase(method, model, stream[2], "settle", count=6)
    steps(model, method, stream[2], 4)
    model.eval()
    now, drifted = model(x), [method.predict(model, x, numbered(x, k)) for k in (0, 1)]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(old, drifted, strict=True)), "old tasks have drifted"
    method.drift = -1.0  # also a unit that has not moved at all, which reads others that have
    assert method.turn(model) == "split"
    torch.testing.assert_close(model(x), now, rtol=0, atol=1e-10)
    for k in (0, 1):
        torch.testing.assert_close(method.predict(model, x, numbered(x, k)), old[k], rtol=0, atol=1e-10)


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_a_task_does_not_see_units_added_later(net, small_stream):
    stream, x = small_stream(), torch.rand(6, 1, 8, 8)
    model, method = learned(stream, net=net, threshold=0.0)
    assert method.stamps == sorted(method.stamps) and method.stamps[-1] == 2
    said = [method.predict(model, x, numbered(x, k)) for k in range(3)]
    with torch.no_grad():
        for stamp, block in zip(method.stamps, method.blocks, strict=True):
            for v in (v for tensors in block.values() for v in tensors.values()):
                v.add_(torch.rand_like(v) if stamp == 2 else 0)
    for k in (0, 1):
        assert torch.equal(method.predict(model, x, numbered(x, k)), said[k])
    assert not torch.equal(method.predict(model, x, numbered(x, 2)), said[2])


def test_with_a_huge_strength_nothing_drifts_and_nothing_is_split(small_stream):
    stream, x = small_stream(), torch.rand(6, 1, 8, 8)
    far = {}
    for strength in (0.0, 1e4):
        model, method = learned(
            stream, tasks=1, strength=strength, threshold=100.0, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)
        )
        before, said = values(model, method), method.predict(model, x, numbered(x, 0))
        everlearn.train(model, method, stream[1], epochs=40, batch_size=32)
        far[strength] = max(float((v - before[n]).abs().max()) for n, v in values(model, method).items() if n in before)
        if strength:
            assert method.diagnostics()["units added so far"] == 0
            torch.testing.assert_close(method.predict(model, x, numbered(x, 0)), said, rtol=0.05, atol=0.05)
        else:
            assert method.diagnostics()["units added so far"] > 0
    assert far[1e4] < 0.05 * far[0.0]


@pytest.mark.parametrize(
    ("phase", "grows", "strength", "l2"),
    [
        ("fit", True, 0.0, 0.0),
        ("retrain", True, 0.3, 0.02),
        ("expand", True, 0.0, 0.0),
        ("expand", False, 0.3, 0.02),
        ("settle", True, 0.3, 0.0),
        ("split", True, 0.3, 0.0),
    ],
)
def test_the_penalty_of_every_phase(phase, grows, strength, l2, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0, strength=0.3, l2=0.02)
    start = {n: v.detach().clone() for n, v in model.named_parameters() if not n.startswith("5.")}
    start |= {f"0:{n}:{leaf}": v.detach().clone() for n, t in method.blocks[0].items() for leaf, v in t.items()}
    method.threshold = 0.0 if grows else 100.0
    to_phase(method, model, stream[2], "fit")
    with torch.no_grad():
        model[5].weight[:, ::2] = 0  # some units are not reached
        method.read["weight"].zero_()
    while method.phase != phase:
        if method.phase != "fit":
            steps(model, method, stream[2], 3)
        method.turn(model)
    steps(model, method, stream[2], 3)
    weights, want, gradients = method._weights(model), 0.0, {}
    assert set(weights) == set(start)
    for n, p in weights.items():
        free = ~method.locked[n] if n in method.locked else torch.ones_like(p, dtype=torch.bool)
        want = want + strength * ((p - start[n]) ** 2).sum() + l2 * (p[free] ** 2).sum()
        gradients[n] = 2 * strength * (p - start[n]) + 2 * l2 * p * free
    (batch,) = stream[2].batches(8, iterations=1)
    got, model = method.penalty(model), model.eval()
    torch.testing.assert_close(
        method.loss(model, batch) - batch.loss(model(batch.x)), torch.as_tensor(want), rtol=1e-4, atol=1e-5
    )
    if not strength:
        assert got == 0.0
        return
    assert want > 1e-4
    torch.testing.assert_close(got, want)
    found = torch.autograd.grad(got, [p for p in weights.values() if p.numel()])
    for g, truth in zip(found, [gradients[n] for n, p in weights.items() if p.numel()], strict=True):
        torch.testing.assert_close(g, truth)


def test_what_is_retrained_is_reached_from_the_tasks_own_outputs(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1)
    to_phase(method, model, stream[1], "fit")
    mine = stream[1].allowed[1]
    assert mine.sum() == 2
    with torch.no_grad():
        for p in (model[5].weight, model[3].weight):
            p.fill_(1.0)
        model[5].weight[mine, 8:] = model[5].weight[~mine, :8] = (
            0  # its outputs read the first half, the others the second
        )
        model[3].weight[:8, 12:] = model[3].weight[8:, :12] = 0
    assert method.turn(model) == "retrain"
    for name, free in {"3.weight": (8, 12), "3.bias": (8,), "1.weight": (12, 64), "1.bias": (12,)}.items():
        inside = torch.zeros_like(model.get_parameter(name), dtype=torch.bool)
        inside[tuple(slice(n) for n in free)] = True
        assert torch.equal(method.locked[name], ~inside)


@pytest.mark.parametrize("phase", ["fit", "expand"])
def test_l1_in_fitting_and_expanding(phase, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    to_phase(method, model, stream[2], phase)
    method.l1, method.lasso = 0.05, 0.0
    if phase == "fit":
        method.read["weight"].data.uniform_(-0.1, 0.1)
        shorter = [model[5].weight, method.read["weight"]]
        same = [model[5].bias, model[3].weight]
    else:
        shorter = [t[leaf] for t in method.live.values() for leaf in ("weight", "inner") if leaf in t]
        same = [*(t["bias"] for t in method.live.values()), model[5].weight]
    old = [[v.detach().clone() for v in some] for some in (shorter, same)]
    steps(model, method, stream[2], 1, lambda p: torch.optim.SGD(p, lr=0.0))
    for new, w in zip(shorter, old[0], strict=True):
        torch.testing.assert_close(new.detach(), w.sign() * (w.abs() - 0.05).clamp(min=0), rtol=0, atol=1e-7)
    assert any((v == 0).any() and v.any() for v in shorter)
    assert all(torch.equal(v, w) for v, w in zip(same, old[1], strict=True))


def test_dead_units_stay_dead_under_momentum(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, threshold=0.0, lasso=0.1, splits=0, strength=0.0)
    task = stream[1]
    to_phase(method, model, task, "expand", count=2)
    optimizer = steps(model, method, task, 8, MOMENTUM)
    method.turn(model)
    dead = {n: at for n, at in method.dead.items() if len(at)}
    assert method.phase == "settle" and dead
    steps(model, method, task, 5, optimizer)
    for name, at in dead.items():
        for leaf, v in method.live[name].items():
            assert not (v[:, at] if leaf == "out" else v[at]).any(), "it reads nothing, and nobody reads it"


def test_only_the_second_half_of_retraining_is_heard(small_stream, monkeypatch):
    stream, heard, hear = small_stream(), [], DEN._hear
    monkeypatch.setattr(DEN, "_hear", lambda self, *a: heard.append(self.steps) or hear(self, *a))
    model, method = learned(stream, tasks=1)
    task = stream[1]
    task.steps = 20
    method.begin_task(model, task)
    assert method._due == [2, 8, 14, 17]
    steps(model, method, task, 20)
    assert heard == [5, 6, 7]


@pytest.mark.parametrize("planned", [2, 3, 4])
def test_few_steps_are_enough_to_hear_and_grow(planned, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, threshold=0.0)
    task = stream[1]
    task.steps = planned
    method.begin_task(model, task)
    steps(model, method, task, planned)
    assert method.grew


def test_without_retraining_validation_data_must_tell(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, threshold=0.0, retrain=0.0)
    with pytest.raises(ValueError, match=r"DEN\(retrain=0\) hears no training loss .*: give the task validation data"):
        everlearn.train(model, method, stream[1], batch_size=32)
    stream[1].valid = stream[1].test
    everlearn.train(model, method, stream[1], batch_size=32)
    assert method.growth()[1]


def test_statistics_are_those_of_the_first_task(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, net="cnn", threshold=0.0)
    before = {n: v.clone() for n, v in model.named_buffers()}
    assert any("running_var" in n for n in before)
    everlearn.train(model, method, stream[1], optimizer=ADAM, epochs=2, batch_size=32)
    assert all(torch.equal(v, before[n]) for n, v in model.named_buffers())
    own = [v for t in method.blocks[0].values() for n, v in t.items() if "running_mean" in n]
    assert own and all(v.any() for v in own), "new units have their own"


def test_a_second_identical_task_adds_no_units(small_stream):
    stream = small_stream("domain")
    torch.manual_seed(0)
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(24,)), DEN(units=8)
    for number, source in enumerate([0, 1, 1]):
        task = everlearn.Task(stream[source].train, id=number)
        everlearn.train(model, method, task, optimizer=ADAM, epochs=40, batch_size=16)
    first, second = list(method.growth().values())[1:]
    assert sum(first.values()) > 0
    assert second == {}


def test_the_first_task_gets_sparse(small_stream):
    model, _ = learned(small_stream(), tasks=1, l1=1e-3, epochs=20)
    share = [float((p == 0).float().mean()) for p in model.parameters() if p.dim() > 1]
    assert min(share) > 0.2
    model, _ = learned(small_stream(), tasks=1, l1=0.0)
    assert all((p != 0).all() for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_an_export_answers_as_the_method(net, exported, small_stream):
    stream = small_stream()
    model, method = learned(stream, net=net, threshold=0.0, epochs=1)
    exported(model, method, stream, tolerance=1e-5)


@pytest.mark.parametrize("when", ["between tasks", "inside a task"])
def test_resuming_keeps_added_units(when, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    if when == "inside a task":
        to_phase(method, model, stream[2], "retrain")
    file = io.BytesIO()
    torch.save([model.state_dict(), method.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, again = SMALL_NETS["mlp"](stream), DEN(units=4, splits=3, threshold=0.0)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for m, k in ((model, method), (other, again)):
        torch.manual_seed(1)
        everlearn.train(m, k, stream[2], optimizer=MOMENTUM, epochs=2, batch_size=32)
    x = torch.rand(5, 1, 8, 8)
    for task in range(3):
        assert torch.equal(method.predict(model, x, numbered(x, task)), again.predict(other, x, numbered(x, task)))
    assert method.diagnostics() == again.diagnostics()


def test_it_forgets_less_than_fine_tuning(small_stream):
    (x, y), (x_test, y_test) = everlearn.streams.digits_data()
    stream = everlearn.streams.permuted((x[:600], y[:600]), (x_test, y_test), tasks=3, scenario="task")
    ends = {
        name: everlearn.run(lambda i, o: nets.mlp(i, o, hidden=(64,)), method, stream, epochs=15, batch_size=32)
        for name, method in {"finetune": everlearn.Method(), "den": DEN()}.items()
    }
    assert ends["den"].average_accuracy > ends["finetune"].average_accuracy + 0.03
    facts = ends["den"].cost["facts"]
    assert [f["units added so far"] for f in facts] == sorted(f["units added so far"] for f in facts) and facts[0][
        "units added so far"
    ] == 0


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match="over 1"):
        DEN(fit=0.6)
