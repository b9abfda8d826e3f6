"""What EWC, MAS, SI and L2 have in common, on any model and in any loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from everlearn import AGEM, ER, EWC, GEM, L2, MAS, SI, Batch, Freeze, LwF, Method, Task, evaluate, nets, streams, train
from everlearn.core.chain import label
from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import Diagonal, fisher
from everlearn.surgery import heads, resize, tracing

ANCHORED = [L2, EWC, MAS, SI]


def body_and_head():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def data(n=32):
    x = torch.randn(n, 4)
    return x, x[:, :3].argmax(1)


def learned(kind, model=None, **settings):
    model, method = model or body_and_head(), kind(**settings)
    train(model, method, data(), epochs=2, batch_size=8)
    return model, method


def shift(model, amount=0.1):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(amount * torch.randn_like(p))


def pulled(method, model):
    """The gradient of the penalty alone."""
    model.zero_grad()
    penalty = method.penalty(model)
    if penalty.requires_grad:
        penalty.backward()
    else:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        method.before_step(model)
    return {n: p.grad for n, p in trainable_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize("kind", ANCHORED)
def test_value_and_gradient_are_those_of_the_quadratic(kind, double):
    model, method = learned(kind)
    assert method.penalty(model) == 0
    assert all((g == 0).all() for g in pulled(method, model).values())
    anchor, importance = snapshot(model), method.quadratic.form.values
    shift(model)
    moved = {n: p.detach() - anchor[n] for n, p in trainable_parameters(model).items()}
    truth = sum((importance[n] * moved[n] ** 2).sum() for n in moved) / 2
    torch.testing.assert_close(torch.as_tensor(method.penalty(model)).detach(), truth)
    for n, g in pulled(method, model).items():
        torch.testing.assert_close(g, importance[n] * moved[n])


STRUCTURES = [{}, {"mode": "online", "decay": 0.5}, {"structure": "kronecker"}, {"structure": "full"}, {"half": True}]


@pytest.mark.parametrize(("kind", "settings"), [(L2, {}), (MAS, {}), *((EWC, s) for s in STRUCTURES)])
def test_the_closed_form_gradient_is_that_of_the_value(kind, settings, double):
    model, method = learned(kind, **settings)
    shift(model)
    train(model, method, data(), iterations=2, batch_size=8)  # another anchor: forms that are not diagonal have a slope
    shift(model)
    heads.grow_output(model, 5)
    model.zero_grad()
    method.penalty(model).backward()
    for name, p in trainable_parameters(model).items():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        direction = torch.randn_like(p)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                p.add_(step * direction)
                values.append(float(method.penalty(model)))
                p.sub_(step * direction)
        difference = (values[0] - values[1]) / 2e-5
        assert difference == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize("kind", ANCHORED)
def test_the_facts_are_quantiles_of_the_importances(kind):
    assert kind().diagnostics() == {}
    _, method = learned(kind)
    every = torch.cat([v.flatten() for v in method.quadratic.form.values.values()])
    facts = method.diagnostics()
    assert list(facts) == ["importance 50 %", "importance 90 %", "importance 99 %", "importance 100 %"]
    assert facts["importance 100 %"] == every.max() and (every <= facts["importance 90 %"]).float().mean() > 0.88


class Ramped(EWC):
    """A user's method that changes the penalty alone."""

    def penalty(self, model, batch=None, out=None):
        return 10 * super().penalty(model, batch, out)


class Both(Method):
    """A user's method with a penalty on the parameters."""

    def penalty(self, model, batch=None, out=None):
        return sum(p.square().sum() for p in model.parameters())


class Halved(Both):
    def penalty(self, model, batch=None, out=None):
        return 0.5 * super().penalty(model, batch, out)


def learn_by_hand(model, method, tasks):
    for task in tasks:
        method.begin_task(model, task)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for batch in task.batches(8, 2):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        method.end_task(model, task)


CHAINS = [
    lambda: Ramped(3.0), Both, Halved, lambda: SI() + EWC(3.0), lambda: EWC(3.0) + SI(), lambda: SI() + L2(), lambda: AGEM(20) + SI(),
    lambda: SI() + GEM(20), lambda: GEM(20) + SI(), lambda: ER(20) + EWC(3.0), lambda: LwF() + EWC(3.0) + MAS(),
]  # fmt: skip


@pytest.mark.parametrize("make", CHAINS, ids=lambda make: label(make()))
def test_chains_and_methods_of_ones_own_learn_alike_in_trainer_and_own_loop(make, double):
    torch.manual_seed(0)
    tasks = [Task(data(), id=k) for k in range(3)]
    first = body_and_head()
    a, b = copy.deepcopy(first), copy.deepcopy(first)
    learn_by_hand(a, make(), tasks)
    method = make()
    for task in tasks:
        train(b, method, task, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), epochs=2, batch_size=8)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ANCHORED)
def test_sparse_gradients_are_pulled_too(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 3))
    x, y = torch.randint(10, (32, 5)), torch.randint(3, (32,))
    method = kind(only="1.*") if kind is EWC or kind is MAS else kind()
    for k in range(2):
        train(model, method, Task((x, y), id=k), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), batch_size=8)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ANCHORED)
def test_only_what_a_pattern_matches_is_held(kind):
    model, method = learned(kind, only="0.*")
    assert set(method.quadratic.anchor) == set(method.quadratic.form.values) == {"0.weight", "0.bias"}
    shift(model)
    assert {n for n, g in pulled(method, model).items() if g.any()} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("kind", ANCHORED)
def test_layers_can_be_weighted(kind, double):
    torch.manual_seed(0)
    _, weighted = learned(kind, only={"*": 1.0, "2.*": 10.0, "0.bias": 0.0})
    torch.manual_seed(0)
    _, plain = learned(kind)
    for name, value in weighted.quadratic.form.values.items():
        torch.testing.assert_close(value, plain.quadratic.form.values[name] * (10.0 if name.startswith("2") else 1.0))
    assert "0.bias" not in weighted.quadratic.form.values


@pytest.mark.parametrize("structure", ["kronecker", "full"])
def test_layers_can_be_weighted_in_every_structure(structure, double):
    weights = {"0.weight": 1.0, "0.bias": 0.25, "2.weight": 4.0}
    model, plain = learned(EWC, structure=structure)
    weighted = EWC(structure=structure, only=weights)
    weighted.end_task(model, xy := data())
    plain = EWC(structure=structure)
    plain.end_task(model, xy)
    delta = {n: torch.randn_like(p) for n, p in trainable_parameters(model).items()}
    scaled = {n: d * weights.get(n, 0.0) ** 0.5 for n, d in delta.items()}
    torch.testing.assert_close(weighted.quadratic.form.quad(delta), plain.quadratic.form.quad(scaled))


@pytest.mark.parametrize("kind", ANCHORED)
def test_a_pattern_that_matches_nothing_is_refused(kind):
    with pytest.raises(ValueError, match=r"'backbone.\*' matches no parameter; there are: 0.weight, 0.bias"):
        learned(kind, only="backbone.*")


@pytest.mark.parametrize("kind", ANCHORED)
def test_importances_in_half_precision(kind):
    _, method = learned(kind, half=True)
    assert all(v.dtype == torch.bfloat16 for v in method.quadratic.form.values.values())
    assert all(v.dtype == torch.float32 for v in method.quadratic.anchor.values())
    torch.manual_seed(0)
    same, full = learned(kind)
    torch.manual_seed(0)
    model, method = learned(kind, half=True)
    shift(model)
    same.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        torch.as_tensor(method.penalty(model)), torch.as_tensor(full.penalty(same)), rtol=1e-2, atol=0
    )
    learn_on = train(model, method, data(), epochs=1, batch_size=8)
    assert learn_on.loss < 100


@pytest.mark.parametrize("online", [False, True])
def test_sums_of_halved_importances_are_right_on_average(online):
    settings = {"mode": "online", "decay": 0.999} if online else {}
    model, method = nn.Linear(100, 20), EWC(1.0, half=True, **settings)
    new = {n: torch.rand_like(p) + 0.5 for n, p in trainable_parameters(model).items()}
    for _ in range(1000):  # to the nearest, a sum of ones ends at 256, and times 0.999 is nothing
        method.consolidate(model, new)
    exact = sum(0.999**k for k in range(1000)) if online else 1000.0
    found = method.quadratic.form.values["weight"].float() / new["weight"]
    assert found.mean() == pytest.approx(exact, rel=0.005)  # of 2000, each with a deviation of 4 %
    torch.testing.assert_close(found, torch.full_like(found, exact), rtol=0.3, atol=0)


def test_halving_is_exact_where_it_can_be_and_the_same_again():
    value = torch.tensor([0.0, 1.0, 1.5, 2.0**-120, 1 + 2.0**-9])
    drawn = torch.stack([Diagonal({"w": value}).halved(seed).values["w"] for seed in range(400)])
    assert drawn.dtype == torch.bfloat16
    assert (drawn[:, :4].float() == value[:4]).all()
    assert set(drawn[:, 4].tolist()) == {1.0, 1 + 2.0**-7}
    assert drawn[:, 4].float().mean().item() == pytest.approx(1 + 2.0**-9, abs=7e-4)  # four deviations
    assert torch.equal(drawn[7], Diagonal({"w": value}).halved(7).values["w"])


@pytest.mark.parametrize("kind", ANCHORED)
def test_importances_on_the_cpu(kind):
    model, method = learned(kind, offload=True)
    assert all(
        v.device.type == "cpu" for v in [*method.quadratic.form.values.values(), *method.quadratic.anchor.values()]
    )
    train(model, method, data(), epochs=1, batch_size=8)


@pytest.mark.parametrize("kind", ANCHORED)
def test_new_outputs_and_new_parameters_are_free(kind):
    model, method = learned(kind)
    heads.grow_output(model, 5)
    model.append(nn.Linear(5, 5))
    with torch.no_grad():
        model[2].weight[3:] += 1
        model[3].weight += 1
    assert method.penalty(model) == 0
    train(model, method, data(), epochs=1, batch_size=8)
    assert method.quadratic.anchor["2.weight"].shape == method.quadratic.form.values["2.weight"].shape == (5, 6)
    assert "3.weight" in method.quadratic.anchor
    shift(model)
    assert method.penalty(model) > 0


@pytest.mark.parametrize("kind", ANCHORED)
def test_another_model_is_refused(kind):
    _, method = learned(kind)
    with pytest.raises(ValueError, match="None of the remembered parameters"):
        method.penalty(nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [EWC, MAS])
@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        ({"a": torch.ones(2)}, ValueError, "none of which is a trainable parameter"),
        ({"0.bias": torch.ones(2)}, ValueError, r"importance of 0.bias has shape \(2,\), the parameter \(6,\)"),
        ({"0.bias": -torch.ones(6)}, ValueError, "negative, infinite or NaN"),
        ({"0.bias": torch.full((6,), torch.nan)}, ValueError, "negative, infinite or NaN"),
        (torch.ones(6), TypeError, "An importance is a Diagonal, Kronecker or Full form or a dict"),
    ],
)
def test_wrong_importances_are_refused(kind, importance, error, message):
    with pytest.raises(error, match=message):
        kind().consolidate(body_and_head(), importance)


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_any_importance_can_be_handed_over(kind):
    model, method = body_and_head(), kind(strength=3.0)
    method.consolidate(model, {"0.bias": torch.ones(6)})
    with torch.no_grad():
        model[0].bias += 2
        model[2].bias += 2
    torch.testing.assert_close(method.penalty(model).detach(), torch.tensor((1.5 if kind is EWC else 3.0) * 6 * 4))


# The user's own loop.


def loaders():
    """Two tasks that contradict each other."""
    for turn in range(2):
        x, y = data(96)
        yield DataLoader(TensorDataset(x, (y + turn) % 3), batch_size=8)


def own_loop(method, manner):
    """Two tasks in a plain loop, and how far the second has moved the weights from where the first had left them."""
    torch.manual_seed(0)
    model = body_and_head()
    wrap = {"compile": lambda m: torch.compile(m, backend="eager"), "parallel": nn.DataParallel}.get(
        manner, lambda m: m
    )
    wrapped = wrap(model)
    make = torch.optim.AdamW if manner == "adamw" else torch.optim.SGD
    optimizer, ends = make(model.parameters(), lr=1e-2 if manner == "adamw" else 1e-1), []
    for loader in loaders():
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=manner == "autocast"):
                out = wrapped(x)
                penalty = method.penalty(wrapped, x, out)
                loss = F.cross_entropy(out, y) + penalty
            loss.backward()
            if manner != "accumulate" or step % 2:
                method.before_step(wrapped)
                if manner == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                method.after_step(wrapped)
                optimizer.zero_grad()
        method.end_task(wrapped, loader)
        ends.append(snapshot(model))
    return sum((ends[1][n] - ends[0][n]).square().sum() for n in ends[0]).sqrt().item()


@pytest.mark.parametrize(("kind", "strength"), [(L2, 3.0), (EWC, 50.0), (MAS, 5.0), (SI, 3.0), (LwF, 10.0)])
@pytest.mark.parametrize("manner", ["plain", "compile", "parallel", "accumulate", "autocast", "clip", "adamw"])
def test_a_loop_of_ones_own_in_every_manner(kind, strength, manner):
    held, free = own_loop(kind(strength=strength), manner), own_loop(Method(), manner)
    assert held < 0.97 * free


def test_accumulated_gradients_are_those_of_the_whole_batch(double):
    x, y = data()
    model, method = learned(EWC, strength=5.0)
    shift(model)
    model.zero_grad()
    (F.cross_entropy(model(x), y) + method.penalty(model)).backward()
    whole = {n: p.grad.clone() for n, p in trainable_parameters(model).items()}
    model.zero_grad()
    for a, b in zip(x.split(8), y.split(8), strict=True):
        ((F.cross_entropy(model(a), b) + method.penalty(model)) / 4).backward()
    for n, p in trainable_parameters(model).items():
        torch.testing.assert_close(p.grad, whole[n])


@pytest.mark.parametrize("kind", [L2, EWC, MAS, LwF])
def test_penalties_add_up_in_a_chain(kind):
    model, first, second = body_and_head(), kind(), EWC(2.0)
    x, y = data()
    for method in (first, second):
        method.end_task(model, (x, y))
    shift(model)
    batch = Batch(x, y)
    both = (first + second).penalty(model, batch)
    assert first.penalty(model, batch) > 0 and second.penalty(model, batch) > 0
    torch.testing.assert_close(both, first.penalty(model, batch) + second.penalty(model, batch))


# Parts of a model that are frozen for a while.


@pytest.mark.parametrize(
    "method",
    [L2(), EWC(), EWC(mode="online"), EWC(structure="kronecker"), EWC(structure="full"), MAS(), SI()],
    ids=label,
)
def test_what_was_frozen_for_one_task_is_held_when_it_learns_again(method):
    method = copy.deepcopy(method)
    model = body_and_head()
    train(model, method, data(), epochs=1, batch_size=8)
    model[0].requires_grad_(False)
    train(model, method, data(), epochs=1, batch_size=8)
    assert torch.as_tensor(method.penalty(model)).isfinite()
    model[0].requires_grad_(True)
    with torch.no_grad():
        model[0].weight += 1
    assert method.penalty(model) > 1e-6
    assert pulled(method, model)["0.weight"].abs().sum() > 0


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("frozen", ["0", "0.bias", "2.weight"])
def test_separate_anchors_of_a_model_frozen_in_parts(structure, frozen, double):
    """Against the sum written out, with the parameters of each task alone."""
    model, method, tasks = body_and_head(), EWC(2.0, labels="exact", structure=structure), []
    for k in range(3):
        for name, p in model.named_parameters():
            p.requires_grad_(k != 1 or not name.startswith(frozen))
        shift(model)
        xy = data()
        method.end_task(model, xy)
        tasks.append((fisher(model, xy, structure=structure), snapshot(model)))
    model.requires_grad_(True)
    shift(model)
    theta = {n: p.detach() for n, p in model.named_parameters()}
    truth = sum(form.quad({n: theta[n] - at[n] for n in at}) for form, at in tasks)
    torch.testing.assert_close(method.penalty(model).detach(), truth)


def test_everything_held_is_frozen():
    model = body_and_head()
    chain = Freeze() + EWC(only="0.*")
    for _ in range(3):
        train(model, chain, data(), epochs=1, batch_size=8)
    assert chain.methods[1].penalty(model) == 0


# Precision.


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(structure, dtype):
    model, x = body_and_head().to(dtype), data()[0].to(dtype)
    method = EWC(1e4, structure=structure)
    for _ in range(3):
        method.end_task(model, x)
        shift(model, 0.05)
    height = method.penalty(model)
    height.backward()
    assert height.isfinite() and height > 0 and all(p.grad.dtype == dtype for p in model.parameters())
    assert all(v.isfinite().all() for v in method.quadratic.anchor.values())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_the_penalty_is_not_rounded_under_autocast(structure):
    model, method = learned(EWC, structure=structure, strength=1e6)
    shift(model)
    exact = method.penalty(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.penalty(model), exact)


@pytest.mark.parametrize("only", [{}, {"*": 0.0}, {"*": -1.0}, {"*": float("nan")}, {"*": "1"}])
def test_weights_that_hold_nothing_or_push_away_are_refused(only):
    with pytest.raises(ValueError, match=r"leaves no parameter to hold|must be a number, 0 or more"):
        EWC(only=only).end_task(body_and_head(), data())


@pytest.mark.parametrize("kind", [L2, EWC, MAS, SI, LwF])
def test_weights_that_are_no_numbers_are_not_held(kind):
    model, method = body_and_head(), kind()
    train(model, method, data(), epochs=1, batch_size=8)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="finite"):
        method.end_task(model, data())


@pytest.fixture(scope="module")
def first_task_kept():
    """Accuracy on the first of three tasks of real images after all three, fine-tuning as the one to beat."""
    stream = streams.permuted_digits(tasks=3)

    def learn(method):
        torch.manual_seed(0)
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(64,))
        for task in stream:
            train(model, method, task, epochs=10, batch_size=32)
        return evaluate(model, method, stream.test_tasks[:1])[0]

    learn.fine_tuning = learn(Method())
    return learn


@pytest.mark.parametrize(
    "method",
    [
        EWC(100.0),
        EWC(100.0, labels="signs"),
        EWC(100.0, mode="online"),
        EWC(100.0, structure="kronecker"),
        MAS(0.1),
        SI(10.0),
        SI(10.0, consolidate_every=100),
        LwF(1.0),
        L2(0.1),
    ],
    ids=label,
)
def test_old_digits_are_kept(method, first_task_kept):
    assert first_task_kept(method) > first_task_kept.fine_tuning + 0.1


# Parameters that the loss does not touch.


class Heads(nn.Module):
    """A body and an output layer for every task, of which only that of the current task is called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.current = 0

    def forward(self, x):
        return self.heads[self.current](torch.tanh(self.body(x)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def learn_in(manner, model, method, task):
    if manner == "trainer":
        train(model, method, task, optimizer=adamw, epochs=3, batch_size=8)
        return
    method.begin_task(model, task)
    optimizer = adamw(model.parameters())
    attachment = method.attach(model, optimizer) if manner == "attached" else None
    for batch in task.batches(8, 3):
        optimizer.zero_grad()
        (F.cross_entropy(model(batch.x), batch.y) if attachment else method.loss(model, batch)).backward()
        if attachment is None:
            method.before_step(model)
        optimizer.step()
        if attachment is None:
            method.after_step(model)
    if attachment is not None:
        attachment.remove()
    method.end_task(model, task)


UNTOUCHED = [Method(), L2(), EWC(), EWC(mode="online"), EWC(structure="kronecker"), MAS(), SI(), EWC(half=True)]


@pytest.mark.parametrize("manner", ["trainer", "own loop", "attached"])
@pytest.mark.parametrize("method", UNTOUCHED, ids=label)
def test_weight_decay_moves_no_more_than_in_fine_tuning(method, manner):
    """Output layers of other tasks, learned before or never yet: their gradient stays None."""
    model, method = Heads(), copy.deepcopy(method)
    for k in range(3):  # by the third task the second one's head has an anchor of two tasks
        model.current = k
        before = copy.deepcopy(model.heads)
        learn_in(manner, model, method, Task(data(), id=k))
        for other in {0, 1, 2} - {k}:
            assert torch.equal(model.heads[other].weight, before[other].weight)
            assert torch.equal(model.heads[other].bias, before[other].bias)
    assert not torch.equal(model.heads[2].weight, before[2].weight)


def test_a_full_form_penalizes_parameters_when_others_have_moved():
    """A full form: its gradient in one parameter is of all; in one that nothing depends on it is zero, and stays None."""
    model, method = Heads(), EWC(structure="full")
    learn_in("own loop", model, method, Task(data(), id=0))
    with torch.no_grad():
        model.body.weight += 0.1
    model.zero_grad()
    method.penalty(model).backward()
    assert model.heads[0].weight.grad.any() and model.heads[2].weight.grad is None


@pytest.mark.parametrize("kind", ANCHORED)
def test_what_has_left_its_place_is_pulled_although_the_loss_does_not_touch_it(kind):
    model, method = Heads(), kind()
    learn_in("own loop", model, method, Task(data(), id=0))
    with torch.no_grad():
        model.heads[0].weight += 0.5
    model.zero_grad()
    model.current = 1
    method.begin_task(model, Task(data(), id=1))
    method.loss(model, Batch(*data(8))).backward()
    method.before_step(model)
    name = "heads.0.weight"
    moved = model.heads[0].weight.detach() - method.quadratic.anchor[name]
    torch.testing.assert_close(model.heads[0].weight.grad, method.quadratic.form.values[name] * moved)
    assert model.heads[2].weight.grad is None


@pytest.mark.parametrize("kind", [L2, EWC, MAS])
def test_where_the_gradient_is_zero_the_second_derivative_is_the_importance(kind, double):
    model, method = learned(kind)
    parameters = trainable_parameters(model)
    gradients = torch.autograd.grad(method.penalty(model), list(parameters.values()), create_graph=True)
    v = [torch.randn_like(p) for p in parameters.values()]
    product = torch.autograd.grad(sum((g * w).sum() for g, w in zip(gradients, v, strict=True)), parameters.values())
    for name, found, w in zip(parameters, product, v, strict=True):
        torch.testing.assert_close(found, method.quadratic.form.values[name] * w)


# Layers that were frozen when a task ended.


def learned_with_a_frozen_body(kind, **settings):
    model, method = body_and_head(), kind(**settings)
    model[0].requires_grad_(False)
    train(model, method, Task(data(), id=0), epochs=2, batch_size=8)
    assert not any(name.startswith("0.") for name in method.quadratic.anchor), "what is frozen costs no memory"
    return model, method


@pytest.mark.parametrize("manner", ["trainer", "own loop", "attached"])
@pytest.mark.parametrize("kind", [EWC, MAS, SI])
def test_a_layer_that_thaws_without_an_importance_is_told_once(kind, manner):
    model, method = learned_with_a_frozen_body(kind)
    model[0].requires_grad_(True)
    with pytest.warns(
        UserWarning, match=f"{kind.__name__} does not penalize changes of 0.weight, 0.bias: frozen when"
    ) as told:
        learn_in(manner, model, method, Task(data(), id=1))
    assert len(told) == 1
    learn_in(manner, model, method, Task(data(), id=2))  # now it has one
    assert method.quadratic.form.values["0.weight"].any()


def test_si_tells_of_a_thawed_layer_in_a_loop_that_begins_no_tasks():
    """The layer learned, was frozen only when the task ended, and is known to SI by its path."""
    model, method = body_and_head(), SI()
    x, y = data()

    def step():
        F.cross_entropy(model(x), y).backward()
        method.before_step(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
        method.after_step(model)
        model.zero_grad()

    step()
    model[0].requires_grad_(False)
    method.end_task(model, (x, y))
    model[0].requires_grad_(True)
    with pytest.warns(UserWarning, match="SI does not penalize changes of 0.weight, 0.bias"):
        step()


def test_si_does_not_take_a_layer_that_was_thawed_only_to_end_the_task_for_a_measured_one():
    model, method = body_and_head(), SI()
    x, y = data()
    model[0].requires_grad_(False)
    F.cross_entropy(model(x), y).backward()
    method.before_step(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    method.after_step(model)
    model.zero_grad()
    model[0].requires_grad_(True)
    method.end_task(model, (x, y))
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(
        UserWarning,
        match="SI does not penalize changes of 0.weight, 0.bias.*SI measures importances while parameters learn",
    ):
        method.before_step(model)


def test_complex_parameters_are_held_by_l2_and_refused_by_si():
    """|θ - θ*|², by its definition; SI's path integral is of real parameters."""
    model, method = nn.Module(), L2(3.0)
    model.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    method.end_task(model, None)
    with torch.no_grad():
        model.weight += torch.tensor([1j, 2 + 0j])
    torch.testing.assert_close(method.penalty(model).detach(), torch.tensor(1.5 * (1 + 4)))
    with pytest.raises(TypeError, match="weight is complex: use EWC or MAS"):
        SI().begin_task(model, None)


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_a_layer_that_is_trainable_when_the_task_ends_is_held(kind):
    model, method = body_and_head(), kind()
    model[0].requires_grad_(False)
    train(model, Method(), data(), epochs=2, batch_size=8)
    model[0].requires_grad_(True)
    method.end_task(model, data())
    with torch.no_grad():
        model[0].weight += 1
    assert method.penalty(model) > 0


@pytest.mark.parametrize("settings", [{}, {"only": {"*": 1.0, "0.*": 5.0}}, {"offload": True}], ids=str)
def test_l2_holds_a_thawed_layer_where_it_was(settings, double):
    model, method = learned_with_a_frozen_body(L2, strength=3.0, **settings)
    state = method.state_dict()
    method = L2(3.0, **settings)
    method.load_state_dict(state)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model[0].requires_grad_(True)
    assert method.penalty(model) == 0
    shift(model)
    weight = {n: 5.0 if "only" in settings and n.startswith("0.") else 1.0 for n in start}
    truth = sum(1.5 * weight[n] * (p.detach() - start[n]).square().sum() for n, p in model.named_parameters())
    torch.testing.assert_close(method.penalty(model).detach(), truth)


def test_layers_that_need_not_be_held_thaw_in_silence():
    model, method = body_and_head(), EWC(only="2.*")
    model[0].requires_grad_(False)
    train(model, method, Task(data(), id=0), epochs=1, batch_size=8)
    model[0].requires_grad_(True)
    model.append(nn.Linear(3, 3))  # nor does what is new
    train(model, method, Task(data(), id=1), epochs=1, batch_size=8)


# Models and settings that are not those of before.


@pytest.mark.parametrize("kind", ANCHORED)
@pytest.mark.parametrize(("inputs", "hidden"), [(4, 12), (6, 6)], ids=["hidden layer", "inputs"])
def test_a_layer_of_another_width_is_refused(kind, inputs, hidden):
    _, method = learned(kind)
    other = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    x, y = torch.randn(32, inputs), torch.randint(3, (32,))
    with pytest.raises(ValueError, match=r"has shape .* and was remembered with shape .* may get more outputs"):
        train(other, method, (x, y), epochs=1, batch_size=8)


@pytest.mark.parametrize(
    "method", [L2(), EWC(), EWC(structure="kronecker"), EWC(mode="online", decay=0.5), MAS(), SI()], ids=label
)
def test_a_layer_that_the_library_has_widened_goes_on_being_held(method):
    model, method = body_and_head(), copy.deepcopy(method)
    train(model, method, Task(data(), id=0), epochs=2, batch_size=8)
    resize.widen(model, tracing.links(model, data()[0])[0], 5)
    assert method.penalty(model) == 0
    learn_in("own loop", model, method, Task(data(), id=1))  # where the new inputs do not stay zero
    assert model[2].weight[:, 6:].all() and method.quadratic.anchor["2.weight"].shape == (3, 11)
    other = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))
    with pytest.raises(ValueError, match=r"2.weight has shape \(3, 20\) and was remembered with shape \(3, 11\)"):
        train(other, method, Task(data(), id=2), batch_size=8)


def test_what_was_widened_is_known_to_a_state_that_is_loaded_while_it_learns():
    model, method = body_and_head(), EWC()
    train(model, method, data(), epochs=2, batch_size=8)
    resize.widen(model, tracing.links(model, data()[0])[0], 5)
    method.penalty(model)
    shift(model)
    again = EWC()
    again.load_state_dict(method.state_dict())
    assert torch.equal(again.penalty(model), method.penalty(model)) and method.penalty(model) > 0


@pytest.mark.parametrize("kind", [EWC, MAS, L2])
def test_nor_is_it_taken_over_without_training(kind):
    _, method = learned(kind)
    with pytest.raises(ValueError, match=r"2.weight has shape \(3, 12\) and was remembered with shape \(3, 6\)"):
        method.end_task(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)), data())


@pytest.mark.parametrize("kind", ANCHORED)
def test_a_state_of_another_strength_is_told(kind):
    model, method = learned(kind, strength=1000.0)
    other, same = kind(strength=1.0), kind(strength=1000.0)
    with pytest.warns(UserWarning, match=rf"keep their strength 1000: {kind.__name__}\(strength=1\)"):
        other.load_state_dict(method.state_dict())
    same.load_state_dict(method.state_dict())
    kind(strength=1.0).load_state_dict(kind(strength=1000.0).state_dict())  # which holds nothing yet
    shift(model)
    assert torch.equal(torch.as_tensor(other.penalty(model)), torch.as_tensor(method.penalty(model)))


def test_strengths_of_each_task_are_compared_task_by_task():
    model, method = body_and_head(), EWC((10.0, 20.0))
    method.end_task(model, data())
    EWC((10.0, 5.0)).load_state_dict(method.state_dict())
    with pytest.warns(UserWarning, match=r"keep their strength 10: EWC\(strength=20\)"):
        EWC((20.0, 10.0)).load_state_dict(method.state_dict())
