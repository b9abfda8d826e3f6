import copy
import io

import pytest
import torch
from torch import nn

import everlearn
from everlearn import DEN, nets
from everlearn.methods.expansion.den_units import UnitDuplicator, mask_outside
from everlearn.surgery.resize import reachable_units
from everlearn.surgery.tracing import links
from tests.conftest import SMALL_NETS

ADAM = lambda p: torch.optim.Adam(p, lr=1e-2)
MOMENTUM = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3)


def learned(stream, tasks=3, net="mlp", epochs=3, optimizer=ADAM, seed=0, **options):
    torch.manual_seed(seed)
    model = SMALL_NETS[net](stream)
    method = DEN(**{"units": 4, "splits": 3, **options})
    for task in stream.tasks[:tasks]:
        everlearn.train(model, method, task, optimizer=optimizer, epochs=epochs, batch_size=32)
    return model, method


def task_ids(x, task):
    return torch.full((len(x),), task)


def steps(model, method, task, count, optimizer=ADAM):
    """Train for some steps in a loop that starts phases itself. Returns the optimizer, for further steps."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in [*model.parameters(), *method.parameters()] if p.requires_grad])
    model.train()
    for batch in task.batches(16, iterations=count):
        optimizer.zero_grad()
        method.loss(model, batch).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    return optimizer


def to_phase(method, model, task, phase, count=4):
    """Begin a task and train it up to the beginning of a phase."""
    task.steps = None
    method.begin_task(model, task)
    while method.phase != phase:
        steps(model, method, task, count)
        method.next_phase(model)


def values(model, method):
    return {n: v.detach().clone() for n, v in method._shared_weights(model).items()}


def test_reachable_units_match_a_graph_search():
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
        visited = set()
        frontier = {("7", row)}
        producers = {"7": ("5", 1), "5": ("3", 1), "3": ("0", 4)}  # layer: its producer, columns per unit
        while frontier:
            layer, unit = frontier.pop()
            visited.add((layer, unit))
            if layer in producers:
                producer, repeat = producers[layer]
                weight = model.get_submodule(layer).weight
                inputs = {(producer, j // repeat) for j in range(weight.shape[1]) if weight[unit, j] != 0}
                frontier |= inputs - visited
        reachable = reachable_units(model, links(model, torch.rand(2, 1, 4, 4)), {"7": torch.arange(3) == row})
        for name, selected in reachable.items():
            assert {u for n, u in visited if n == name} == set(selected.nonzero().flatten().tolist())
        assert not all(selected.all() for selected in reachable.values()), "the net is sparse enough"


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM])
def test_retraining_moves_nothing_outside_the_selected_units(optimizer, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    task = stream[2]
    to_phase(method, model, task, "fit")
    rows = task.allowed[task.id]
    with torch.no_grad():
        for p in [model[5].weight, method.current_head["weight"]]:
            p[:, ::2] = 0  # so that some units are not reachable
        model[3].weight[:, ::3] = 0
    is_reachable = model[5].weight[rows].ne(0).any(0)  # model units of the second layer
    method.next_phase(model)
    assert method.phase == "retrain"
    before = values(model, method)
    steps(model, method, task, 6, optimizer)
    after = values(model, method)
    masks = method.lock_masks
    assert set(masks) == set(before)
    assert any(v.any() for v in masks.values()) and not all(v.all() for v in masks.values())
    num_moved = 0
    for name, locked in masks.items():
        assert torch.equal(after[name][locked], before[name][locked])
        num_moved += int((after[name] != before[name]).sum())
    assert num_moved > 0
    assert not masks["3.weight"][is_reachable].all() and masks["3.weight"][~is_reachable].all()
    assert masks["3.bias"].equal(~is_reachable)


def test_weights_outside_do_not_connect_two_selected_units(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=3, threshold=0.0, net="cnn", epochs=1)
    added_units = method._attach_units(model)
    method.blocks = [
        {n: {k: v if "running" in k else nn.Parameter(v) for k, v in t.items()} for n, t in b.items()}
        for b in method.blocks
    ]
    widths = {
        n: link.width + sum(len(b[n]["weight"]) for b in method.blocks)
        for n, link in added_units.links_by_producer.items()
    }
    selected = {n: torch.rand(w) < 0.5 for n, w in widths.items()}
    weights = method._shared_weights(model)
    locked = mask_outside(added_units, method.blocks, weights, selected)
    (first, first_link), (second, second_link) = added_units.links_by_producer.items()
    assert first_link.consumer == second
    first_width = first_link.width
    second_width = second_link.width

    # The first unit of the second block in each layer.
    first_start = first_width + len(method.blocks[0][first]["weight"])
    second_start = second_width + len(method.blocks[0][second]["weight"])
    for i in range(second_width):
        for j in range(first_width):
            assert (~locked[f"{second}.weight"][i, j]).all() == (selected[second][i] and selected[first][j])
    for i in range(len(method.blocks[1][second]["weight"])):
        for j in range(method.blocks[1][second]["inner"].shape[1]):
            is_inside = selected[second][second_start + i] and selected[first][first_width + j]
            assert (~locked[f"1:{second}:inner"][i, j]).all() == is_inside
    for i in range(second_width):
        for j in range(len(method.blocks[1][first]["weight"])):
            is_inside = selected[second][i] and selected[first][first_start + j]
            assert (~locked[f"1:{first}:out"][i, j]).all() == is_inside


def test_fit_trains_only_the_output_layer_and_expand_only_new_units(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    to_phase(method, model, stream[2], "fit")
    before = values(model, method)
    steps(model, method, stream[2], 4, MOMENTUM)
    assert all(torch.equal(v, before[n]) for n, v in values(model, method).items())
    assert not any(v.any() for t in method.current_block.values() for v in t.values())
    method.next_phase(model)
    steps(model, method, stream[2], 4)
    method.next_phase(model)
    assert method.phase == "expand" and method.has_grown
    before = values(model, method)
    new_units = copy.deepcopy(method.current_block)
    steps(model, method, stream[2], 4, MOMENTUM)
    assert all(torch.equal(v, before[n]) for n, v in values(model, method).items())
    assert all(not torch.equal(t["weight"], new_units[n]["weight"]) for n, t in method.current_block.items())


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet"])
def test_expansion_changes_no_output(net, small_stream, double):
    stream = small_stream()
    x = torch.rand(6, 1, 8, 8)
    for task in stream:
        task.train.x = task.train.x.double()
    model, method = learned(stream, tasks=2, net=net, threshold=0.0, epochs=1)
    to_phase(method, model, stream[2], "retrain")
    model.eval()
    outputs = model(x)
    old_outputs = [method.predict(model, x, task_ids(x, k)) for k in (0, 1)]
    method.loss_sum = 1.0
    method.loss_count = 1
    assert method.next_phase(model) == "expand" and set(method.active_units.values()) == {4}
    torch.testing.assert_close(model(x), outputs, rtol=0, atol=1e-12)
    for k in (0, 1):
        torch.testing.assert_close(method.predict(model, x, task_ids(x, k)), old_outputs[k], rtol=0, atol=1e-12)


def test_it_expands_if_and_only_if_the_loss_is_above_the_threshold(small_stream, monkeypatch):
    losses = []
    compute_loss = DEN._compute_loss
    monkeypatch.setattr(
        DEN, "_compute_loss", lambda self, model: losses.append(compute_loss(self, model)) or losses[-1]
    )
    for threshold in (0.0, 0.05, 100.0):
        losses.clear()
        _, method = learned(small_stream(), threshold=threshold, splits=0)
        assert len(losses) == 2 and all(loss > 0 for loss in losses)
        for loss, added in zip(losses, list(method.growth().values())[1:], strict=True):
            assert set(added.values()) <= {0, 1, 2, 3, 4}
            assert bool(added) == (loss > threshold)


def test_removing_units_without_incoming_weights_keeps_the_outputs(small_stream):
    stream = small_stream()
    x = torch.rand(9, 1, 8, 8)
    model, method = learned(stream, tasks=1, threshold=0.0, lasso=0.1, splits=0, strength=0.0)
    task = stream[1]
    to_phase(method, model, task, "settle", count=8)
    assert sum(int(mask.sum()) for mask in method.removed_units.values()) > 0
    steps(model, method, task, 3, MOMENTUM)
    model.eval()
    outputs = model(x)
    num_active = sum(method.active_units.values())
    num_removed = sum(int(mask.sum()) for mask in method.removed_units.values())
    method.end_task(model, task)
    assert method.diagnostics()["units added so far"] == num_active - num_removed
    torch.testing.assert_close(method.predict(model, x, task_ids(x, 1)), outputs, rtol=1e-5, atol=1e-6)
    for block in method.blocks:
        for tensors in block.values():
            incoming = [
                tensors[n].flatten(1) for n in ("weight", "inner", "bias") if n in tensors and tensors[n].dim() > 1
            ]
            assert torch.cat(incoming, 1).any(1).all(), "every remaining unit has an incoming weight"


@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_split_restores_the_old_unit_and_keeps_its_weights_in_the_copy(net, seed, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, net=net, threshold=0.0, strength=0.0, seed=seed)
    to_phase(method, model, stream[2], "settle", count=6)
    steps(model, method, stream[2], 4)
    added_units = method._attach_units(model)
    weights = values(model, method)
    anchor = method.anchor
    num_active = dict(method.active_units)
    for name in added_units.links_by_producer:
        rho_squared = (weights[f"{name}.weight"] - anchor[f"{name}.weight"]).flatten(1).square().sum(1)
        input_link = added_units.links_by_consumer.get(name)
        for b in range(len(method.blocks) if input_link else 0):
            out = f"{b}:{input_link.producer}:out"
            rho_squared = rho_squared + (weights[out] - anchor[out]).flatten(1).square().sum(1)
        duplicator = UnitDuplicator(
            added_units, method.blocks, method.current_block, method.active_units, method.current_head["weight"]
        )
        rho = rho_squared.sqrt()
        sorted_rho = rho.sort().values
        # The second bound lies in the widest gap, since the sums round in different orders.
        gap = int(sorted_rho.diff()[1:-1].argmax()) + 1
        for drift in (0.0, float(sorted_rho[gap] + sorted_rho[gap + 1]) / 2):
            drifted = duplicator.find_drifted(method._shared_weights(model), anchor, name, drift)
            model_units = [i for i in drifted if i < added_units.links_by_producer[name].width]
            assert set(model_units) == {i for i in range(len(rho)) if rho[i] > drift}
            assert (rho[model_units].diff() < 1e-6).all(), "the largest drift first"
    copied = duplicator.split(method._shared_weights(model), anchor, 0.05, 3)
    after = values(model, method)
    assert any(copied.values())
    for name, units in copied.items():
        assert method.active_units[name] == num_active[name] + len(units) and len(units) <= 3
        for slot, i in enumerate(units, num_active[name]):
            if i < added_units.links_by_producer[name].width:
                assert torch.equal(after[f"{name}.weight"][i], anchor[f"{name}.weight"][i])
                copy_weight = method.current_block[name]["weight"][slot].detach().clone()
                input_link = added_units.links_by_consumer.get(name)
                if input_link is not None:
                    split_inputs = [u for u in copied[input_link.producer] if u < input_link.width]
                    assert not copy_weight[split_inputs].any(), "it receives from the copies of split units"
                    other_inputs = [u for u in range(input_link.width) if u not in split_inputs]
                    assert torch.equal(copy_weight[other_inputs], weights[f"{name}.weight"][i][other_inputs])
                else:
                    assert torch.equal(copy_weight, weights[f"{name}.weight"][i])
        other_units = [i for i in range(added_units.links_by_producer[name].width) if i not in units]
        assert torch.equal(after[f"{name}.weight"][other_units], weights[f"{name}.weight"][other_units])


@pytest.mark.parametrize(("net", "frozen"), [("mlp", False), ("mlp", True), ("cnn", False)])
def test_a_split_of_all_units_keeps_the_task_and_restores_earlier_tasks(net, frozen, small_stream, double):
    stream = small_stream()
    x = torch.rand(6, 1, 8, 8)
    for task in stream:
        task.train.x = task.train.x.double()
    model, method = learned(stream, tasks=2, net=net, threshold=0.0, splits=99, drift=0.0, strength=0.0)
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or "bias" not in name)  # frozen parameters are copied, too
    old_outputs = [method.predict(model, x, task_ids(x, k)) for k in (0, 1)]
    to_phase(method, model, stream[2], "settle", count=6)
    steps(model, method, stream[2], 4)
    model.eval()
    outputs = model(x)
    drifted_outputs = [method.predict(model, x, task_ids(x, k)) for k in (0, 1)]
    for old, drifted in zip(old_outputs, drifted_outputs, strict=True):
        assert (old - drifted).abs().max() > 1e-3, "earlier tasks have drifted"
    method.drift = -1.0  # copies all units: one that has not moved may receive from others that have
    assert method.next_phase(model) == "split"
    torch.testing.assert_close(model(x), outputs, rtol=0, atol=1e-10)
    for k in (0, 1):
        torch.testing.assert_close(method.predict(model, x, task_ids(x, k)), old_outputs[k], rtol=0, atol=1e-10)


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_a_task_does_not_use_units_added_later(net, small_stream):
    stream = small_stream()
    x = torch.rand(6, 1, 8, 8)
    model, method = learned(stream, net=net, threshold=0.0)
    assert method.block_task == sorted(method.block_task) and method.block_task[-1] == 2
    outputs = [method.predict(model, x, task_ids(x, k)) for k in range(3)]
    with torch.no_grad():
        for k, block in zip(method.block_task, method.blocks, strict=True):
            for v in (v for tensors in block.values() for v in tensors.values()):
                v.add_(torch.rand_like(v) if k == 2 else 0)
    for k in (0, 1):
        assert torch.equal(method.predict(model, x, task_ids(x, k)), outputs[k])
    assert not torch.equal(method.predict(model, x, task_ids(x, 2)), outputs[2])


def test_with_a_huge_strength_nothing_drifts_and_nothing_is_split(small_stream):
    stream = small_stream()
    x = torch.rand(6, 1, 8, 8)
    largest_drift = {}
    for strength in (0.0, 1e4):
        model, method = learned(
            stream, tasks=1, strength=strength, threshold=100.0, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3)
        )
        before = values(model, method)
        outputs = method.predict(model, x, task_ids(x, 0))
        everlearn.train(model, method, stream[1], epochs=40, batch_size=32)
        after = values(model, method)
        largest_drift[strength] = max(float((after[n] - v).abs().max()) for n, v in before.items())
        if strength:
            assert method.diagnostics()["units added so far"] == 0
            torch.testing.assert_close(method.predict(model, x, task_ids(x, 0)), outputs, rtol=0.05, atol=0.05)
        else:
            assert method.diagnostics()["units added so far"] > 0
    assert largest_drift[1e4] < 0.05 * largest_drift[0.0]


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
        model[5].weight[:, ::2] = 0  # so that some units are not reachable
        method.current_head["weight"].zero_()
    while method.phase != phase:
        if method.phase != "fit":
            steps(model, method, stream[2], 3)
        method.next_phase(model)
    steps(model, method, stream[2], 3)
    weights = method._shared_weights(model)
    expected = 0.0
    gradients = {}
    assert set(weights) == set(start)
    for n, p in weights.items():
        free = ~method.lock_masks[n] if n in method.lock_masks else torch.ones_like(p, dtype=torch.bool)
        expected = expected + strength * ((p - start[n]) ** 2).sum() + l2 * (p[free] ** 2).sum()
        gradients[n] = 2 * strength * (p - start[n]) + 2 * l2 * p * free
    (batch,) = stream[2].batches(8, iterations=1)
    penalty = method.penalty(model)
    model.eval()
    loss_difference = method.loss(model, batch) - batch.loss(model(batch.x))
    torch.testing.assert_close(loss_difference, torch.as_tensor(expected), rtol=1e-4, atol=1e-5)
    if not strength:
        assert penalty == 0.0
        return
    assert expected > 1e-4
    torch.testing.assert_close(penalty, expected)
    penalty_gradients = torch.autograd.grad(penalty, [p for p in weights.values() if p.numel()])
    expected_gradients = [gradients[n] for n, p in weights.items() if p.numel()]
    for g, expected_gradient in zip(penalty_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(g, expected_gradient)


def test_retraining_selects_units_that_lead_to_the_outputs_of_the_task(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1)
    to_phase(method, model, stream[1], "fit")
    task_outputs = stream[1].allowed[1]
    assert task_outputs.sum() == 2
    with torch.no_grad():
        for p in (model[5].weight, model[3].weight):
            p.fill_(1.0)
        # Outputs of the task receive from the first half of each layer, the others from the second.
        model[5].weight[task_outputs, 8:] = 0
        model[5].weight[~task_outputs, :8] = 0
        model[3].weight[:8, 12:] = 0
        model[3].weight[8:, :12] = 0
    assert method.next_phase(model) == "retrain"
    for name, free in {"3.weight": (8, 12), "3.bias": (8,), "1.weight": (12, 64), "1.bias": (12,)}.items():
        inside = torch.zeros_like(model.get_parameter(name), dtype=torch.bool)
        inside[tuple(slice(n) for n in free)] = True
        assert torch.equal(method.lock_masks[name], ~inside)


@pytest.mark.parametrize("phase", ["fit", "expand"])
def test_l1_in_fitting_and_expanding(phase, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, threshold=0.0)
    to_phase(method, model, stream[2], phase)
    method.l1 = 0.05
    method.lasso = 0.0
    if phase == "fit":
        method.current_head["weight"].data.uniform_(-0.1, 0.1)
        shrunk = [model[5].weight, method.current_head["weight"]]
        unchanged = [model[5].bias, model[3].weight]
    else:
        shrunk = [t[leaf] for t in method.current_block.values() for leaf in ("weight", "inner") if leaf in t]
        unchanged = [*(t["bias"] for t in method.current_block.values()), model[5].weight]
    old_shrunk = [v.detach().clone() for v in shrunk]
    old_unchanged = [v.detach().clone() for v in unchanged]
    steps(model, method, stream[2], 1, lambda p: torch.optim.SGD(p, lr=0.0))
    for new, w in zip(shrunk, old_shrunk, strict=True):
        torch.testing.assert_close(new.detach(), w.sign() * (w.abs() - 0.05).clamp(min=0), rtol=0, atol=1e-7)
    assert any((v == 0).any() and v.any() for v in shrunk)
    assert all(torch.equal(v, w) for v, w in zip(unchanged, old_unchanged, strict=True))


def test_removed_units_stay_zero_under_momentum(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, threshold=0.0, lasso=0.1, splits=0, strength=0.0)
    task = stream[1]
    to_phase(method, model, task, "expand", count=2)
    optimizer = steps(model, method, task, 8, MOMENTUM)
    method.next_phase(model)
    removed = {n: mask.nonzero().flatten() for n, mask in method.removed_units.items() if mask.any()}
    assert method.phase == "settle" and removed
    steps(model, method, task, 5, optimizer)
    for name, units in removed.items():
        for leaf, v in method.current_block[name].items():
            unit_weights = v[:, units] if leaf == "out" else v[units]
            assert not unit_weights.any(), "incoming and outgoing weights are zero"


def test_only_losses_of_the_second_half_of_retraining_are_recorded(small_stream, monkeypatch):
    stream = small_stream()
    recorded_steps = []
    record_loss = DEN._record_loss
    monkeypatch.setattr(
        DEN, "_record_loss", lambda self, *args: recorded_steps.append(self.steps) or record_loss(self, *args)
    )
    model, method = learned(stream, tasks=1, retrain=0.3)
    task = stream[1]
    task.steps = 20
    method.begin_task(model, task)
    assert method._phase_ends == {"fit": 2, "retrain": 8, "expand": 14, "settle": 17}
    steps(model, method, task, 20)
    assert recorded_steps == [5, 6, 7]


@pytest.mark.parametrize("planned", [2, 3, 4])
def test_a_few_steps_suffice_to_grow(planned, small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, threshold=0.0)
    task = stream[1]
    task.steps = planned
    method.begin_task(model, task)
    steps(model, method, task, planned)
    assert method.has_grown


def test_without_retraining_validation_data_are_required(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, threshold=0.0, retrain=0.0)
    with pytest.raises(ValueError, match=r"DEN\(retrain=0\) has no training loss .*: give the task validation data"):
        everlearn.train(model, method, stream[1], batch_size=32)
    stream[1].valid = stream[1].test
    everlearn.train(model, method, stream[1], batch_size=32)
    assert method.growth()[1]


def test_running_statistics_stay_those_of_the_first_task(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=1, net="cnn", threshold=0.0)
    before = {n: v.clone() for n, v in model.named_buffers()}
    assert any("running_var" in n for n in before)
    everlearn.train(model, method, stream[1], optimizer=ADAM, epochs=2, batch_size=32)
    assert all(torch.equal(v, before[n]) for n, v in model.named_buffers())
    block_means = [v for t in method.blocks[0].values() for n, v in t.items() if "running_mean" in n]
    assert block_means and all(v.any() for v in block_means), "new units have separate statistics"


def test_a_second_identical_task_adds_no_units(small_stream):
    stream = small_stream("domain")
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(24,))
    method = DEN(units=8)
    for number, source in enumerate([0, 1, 1]):
        task = everlearn.Task(stream[source].train, id=number)
        everlearn.train(model, method, task, optimizer=ADAM, epochs=40, batch_size=16)
    first, second = list(method.growth().values())[1:]
    assert sum(first.values()) > 0
    assert second == {}


def test_l1_makes_the_first_task_sparse(small_stream):
    model, _ = learned(small_stream(), tasks=1, l1=1e-3, epochs=20)
    sparsity = [float((p == 0).float().mean()) for p in model.parameters() if p.dim() > 1]
    assert min(sparsity) > 0.2
    model, _ = learned(small_stream(), tasks=1, l1=0.0)
    assert all((p != 0).all() for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet", "transformer"])
def test_an_export_has_the_outputs_of_the_method(net, check_export, small_stream):
    stream = small_stream()
    model, method = learned(stream, net=net, threshold=0.0, epochs=1)
    check_export(model, method, stream, tolerance=1e-5)


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
    loaded_model = SMALL_NETS["mlp"](stream)
    loaded_method = DEN(units=4, splits=3, threshold=0.0)
    loaded_model.load_state_dict(weights)
    loaded_method.load_state_dict(state)
    for net, learner in ((model, method), (loaded_model, loaded_method)):
        torch.manual_seed(1)
        everlearn.train(net, learner, stream[2], optimizer=MOMENTUM, epochs=2, batch_size=32)
    x = torch.rand(5, 1, 8, 8)
    for task in range(3):
        outputs = method.predict(model, x, task_ids(x, task))
        assert torch.equal(outputs, loaded_method.predict(loaded_model, x, task_ids(x, task)))
    assert method.diagnostics() == loaded_method.diagnostics()


def test_it_forgets_less_than_fine_tuning(small_stream):
    (x, y), (x_test, y_test) = everlearn.streams.digits_data()
    stream = everlearn.streams.permuted((x[:600], y[:600]), (x_test, y_test), tasks=3, scenario="task")
    results = {
        name: everlearn.run(lambda i, o: nets.mlp(i, o, hidden=(64,)), method, stream, epochs=15, batch_size=32)
        for name, method in {"finetune": everlearn.Method(), "den": DEN()}.items()
    }
    assert results["den"].average_accuracy > results["finetune"].average_accuracy + 0.03
    diagnostics = results["den"].cost["diagnostics"]
    added_units = [d["units added so far"] for d in diagnostics]
    assert added_units == sorted(added_units) and added_units[0] == 0


def test_shares_over_one_are_refused():
    with pytest.raises(ValueError, match=r"their sum 1\.05 is over 1"):
        DEN(fit=0.6)


def test_averaged_weights_leave_locked_entries_if_they_are_restored(small_stream):
    stream = small_stream()
    model, method = learned(stream, tasks=2, net="cnn", threshold=0.0)
    method.begin_task(model, stream[2])
    weights = method._shared_weights(model)
    expected = {name: w.detach().clone() for name, w in weights.items()}
    assert any(":" in name for name in expected), "units of earlier tasks are locked, too"
    buffers = {name: v.clone() for name, v in model.named_buffers()}
    with torch.no_grad():
        for v in [*weights.values(), *model.buffers()]:
            v.add_(1)
    method.restore_locked(model)
    assert all(torch.equal(w, expected[name]) for name, w in method._shared_weights(model).items())
    assert all(torch.equal(v, buffers[name]) for name, v in model.named_buffers())
