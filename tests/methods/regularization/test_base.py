"""Common behavior of EWC, MAS, SI and L2, on any model and in any loop."""

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
from tests.helpers import train_tasks

ANCHORED_METHODS = [L2, EWC, MAS, SI]

# Penalties of a known strength: "auto" waits for a gradient (test_relative_strength.py).
STRENGTHS = {L2: 0.1, EWC: 100.0, MAS: 0.1, SI: 10.0, LwF: 1.0}


def body_and_head():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def make_data(n=32):
    x = torch.randn(n, 4)
    return x, x[:, :3].argmax(1)


def train_method(kind, model=None, **settings):
    model = model or body_and_head()
    method = kind(**{"strength": STRENGTHS[kind]} | settings)
    train(model, method, make_data(), epochs=2, batch_size=8)
    return model, method


def shift(model, amount=0.1):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(amount * torch.randn_like(p))


def penalty_of(method, model):
    """Value of the penalty, which SI does not add to the loss."""
    if isinstance(method, SI):
        return method.penalty_value(model)
    return method.penalty(model)


def penalty_gradient(method, model):
    """Compute the gradient of the penalty without the task loss."""
    model.zero_grad()
    penalty = method.penalty(model)
    if isinstance(penalty, torch.Tensor) and penalty.requires_grad:
        penalty.backward()
    else:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        method.before_step(model)
    return {n: p.grad for n, p in trainable_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_value_and_gradient_are_those_of_the_quadratic(kind, double):
    model, method = train_method(kind)
    assert penalty_of(method, model) == 0
    assert all((g == 0).all() for g in penalty_gradient(method, model).values())
    anchor = snapshot(model)
    importance = method.quadratic.form.values
    shift(model)
    delta = {n: p.detach() - anchor[n] for n, p in trainable_parameters(model).items()}
    expected = sum((importance[n] * delta[n] ** 2).sum() for n in delta) / 2
    torch.testing.assert_close(torch.as_tensor(penalty_of(method, model)).detach(), expected)
    for n, g in penalty_gradient(method, model).items():
        torch.testing.assert_close(g, importance[n] * delta[n])


STRUCTURES = [{}, {"mode": "online", "decay": 0.5}, {"structure": "kronecker"}, {"structure": "full"}, {"half": True}]


@pytest.mark.parametrize(("kind", "settings"), [(L2, {}), (MAS, {}), *((EWC, s) for s in STRUCTURES)])
def test_the_closed_form_gradient_is_that_of_the_value(kind, settings, double):
    model, method = train_method(kind, **settings)
    shift(model)
    train(
        model, method, make_data(), iterations=2, batch_size=8
    )  # a second anchor gives forms that are not diagonal a linear term
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


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_diagnostics_are_quantiles_of_the_importances(kind):
    assert kind(STRENGTHS[kind]).diagnostics() == {}
    _, method = train_method(kind)
    importances = torch.cat([v.flatten() for v in method.quadratic.form.values.values()])
    diagnostics = method.diagnostics()
    assert list(diagnostics) == ["importance 50 %", "importance 90 %", "importance 99 %", "importance 100 %"]
    assert (
        diagnostics["importance 100 %"] == importances.max()
        and (importances <= diagnostics["importance 90 %"]).float().mean() > 0.88
    )


class ScaledEWC(EWC):
    """A custom method that overrides only the penalty."""

    def penalty(self, model, batch=None, outputs=None):
        return 10 * super().penalty(model, batch, outputs)


class SquaredNorm(Method):
    """A custom method with a penalty on the parameters."""

    def penalty(self, model, batch=None, outputs=None):
        return sum(p.square().sum() for p in model.parameters())


class HalvedNorm(SquaredNorm):
    def penalty(self, model, batch=None, outputs=None):
        return 0.5 * super().penalty(model, batch, outputs)


def train_in_custom_loop(model, method, tasks):
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
    lambda: ScaledEWC(3.0),
    SquaredNorm,
    HalvedNorm,
    lambda: SI(10.0) + EWC(3.0),
    lambda: EWC(3.0) + SI(10.0),
    lambda: SI(10.0) + L2(0.1),
    lambda: AGEM(20) + SI(10.0),
    lambda: SI(10.0) + GEM(20),
    lambda: GEM(20) + SI(10.0),
    lambda: ER(20) + EWC(3.0),
    lambda: LwF(1.0) + EWC(3.0) + MAS(0.1),
]


@pytest.mark.parametrize("make_method", CHAINS, ids=lambda make_method: label(make_method()))
def test_chains_and_custom_methods_train_equally_in_trainer_and_custom_loop(make_method, double):
    torch.manual_seed(0)
    tasks = [Task(make_data(), id=k) for k in range(3)]
    initial_model = body_and_head()
    custom_loop_model = copy.deepcopy(initial_model)
    trainer_model = copy.deepcopy(initial_model)
    train_in_custom_loop(custom_loop_model, make_method(), tasks)
    method = make_method()
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    train_tasks(trainer_model, method, tasks, optimizer=sgd, epochs=2, batch_size=8)
    for p, q in zip(custom_loop_model.parameters(), trainer_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_models_with_sparse_gradients(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 3))
    x = torch.randint(10, (32, 5))
    y = torch.randint(3, (32,))
    method = kind(only="1.*") if kind is EWC or kind is MAS else kind()
    for k in range(2):
        train(model, method, Task((x, y), id=k), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), batch_size=8)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_only_parameters_that_match_a_pattern_are_penalized(kind):
    model, method = train_method(kind, only="0.*")
    assert set(method.quadratic.anchor) == set(method.quadratic.form.values) == {"0.weight", "0.bias"}
    shift(model)
    assert {n for n, g in penalty_gradient(method, model).items() if g.any()} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_layers_can_be_weighted(kind, double):
    torch.manual_seed(0)
    _, weighted = train_method(kind, only={"*": 1.0, "2.*": 10.0, "0.bias": 0.0})
    torch.manual_seed(0)
    _, unweighted = train_method(kind)
    for name, value in weighted.quadratic.form.values.items():
        weight = 10.0 if name.startswith("2") else 1.0
        torch.testing.assert_close(value, unweighted.quadratic.form.values[name] * weight)
    assert "0.bias" not in weighted.quadratic.form.values


@pytest.mark.parametrize("structure", ["kronecker", "full"])
def test_layers_can_be_weighted_in_every_structure(structure, double):
    weights = {"0.weight": 1.0, "0.bias": 0.25, "2.weight": 4.0}
    model, unweighted = train_method(EWC, structure=structure)
    weighted = EWC(100.0, structure=structure, only=weights)
    xy = make_data()
    weighted.end_task(model, xy)
    unweighted = EWC(100.0, structure=structure)
    unweighted.end_task(model, xy)
    delta = {n: torch.randn_like(p) for n, p in trainable_parameters(model).items()}
    scaled = {n: step * weights.get(n, 0.0) ** 0.5 for n, step in delta.items()}
    torch.testing.assert_close(weighted.quadratic.form.quad(delta), unweighted.quadratic.form.quad(scaled))


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_a_pattern_that_matches_nothing_is_refused(kind):
    with pytest.raises(ValueError, match=r"'backbone.\*' matches no parameter; there are: 0.weight, 0.bias"):
        train_method(kind, only="backbone.*")


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_importances_in_half_precision(kind):
    _, method = train_method(kind, half=True)
    assert all(v.dtype == torch.bfloat16 for v in method.quadratic.form.values.values())
    assert all(v.dtype == torch.float32 for v in method.quadratic.anchor.values())
    torch.manual_seed(0)
    full_model, full_method = train_method(kind)
    torch.manual_seed(0)
    model, method = train_method(kind, half=True)
    shift(model)
    full_model.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        torch.as_tensor(penalty_of(method, model)),
        torch.as_tensor(penalty_of(full_method, full_model)),
        rtol=1e-2,
        atol=0,
    )
    result = train(model, method, make_data(), epochs=1, batch_size=8)
    assert result.loss < 100


@pytest.mark.parametrize("online", [False, True])
def test_sums_of_bfloat16_importances_are_unbiased(online):
    settings = {"mode": "online", "decay": 0.999} if online else {}
    model = nn.Linear(100, 20)
    method = EWC(1.0, half=True, **settings)
    importance = {n: torch.rand_like(p) + 0.5 for n, p in trainable_parameters(model).items()}
    for _ in range(1000):  # with rounding to nearest, a sum of ones stops at 256
        method.consolidate(model, importance)
    expected = sum(0.999**k for k in range(1000)) if online else 1000.0
    ratio = method.quadratic.form.values["weight"].float() / importance["weight"]
    assert ratio.mean() == pytest.approx(expected, rel=0.005)  # the mean of 2000 entries with a deviation of 4 % each
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=0.3, atol=0)


def test_stochastic_rounding_is_unbiased_and_reproducible():
    value = torch.tensor([0.0, 1.0, 1.5, 2.0**-120, 1 + 2.0**-9])
    rounded = torch.stack([Diagonal({"w": value}).halved(seed).values["w"] for seed in range(400)])
    assert rounded.dtype == torch.bfloat16
    assert (rounded[:, :4].float() == value[:4]).all()
    assert set(rounded[:, 4].tolist()) == {1.0, 1 + 2.0**-7}
    assert rounded[:, 4].float().mean().item() == pytest.approx(1 + 2.0**-9, abs=7e-4)  # four standard deviations
    assert torch.equal(rounded[7], Diagonal({"w": value}).halved(7).values["w"])


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_importances_on_the_cpu(kind):
    model, method = train_method(kind, offload=True)
    assert all(
        v.device.type == "cpu" for v in [*method.quadratic.form.values.values(), *method.quadratic.anchor.values()]
    )
    train(model, method, make_data(), epochs=1, batch_size=8)


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_new_outputs_and_new_parameters_are_unpenalized(kind):
    model, method = train_method(kind)
    heads.grow_output(model, 5)
    model.append(nn.Linear(5, 5))
    with torch.no_grad():
        model[2].weight[3:] += 1
        model[3].weight += 1
    assert penalty_of(method, model) == 0
    train(model, method, make_data(), epochs=1, batch_size=8)
    assert method.quadratic.anchor["2.weight"].shape == method.quadratic.form.values["2.weight"].shape == (5, 6)
    assert "3.weight" in method.quadratic.anchor
    shift(model)
    assert penalty_of(method, model) > 0


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_another_model_is_refused(kind):
    _, method = train_method(kind)
    with pytest.raises(ValueError, match="None of the remembered parameters"):
        penalty_of(method, nn.Linear(4, 2))


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
        kind(STRENGTHS[kind]).consolidate(body_and_head(), importance)


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_custom_importances_can_be_passed(kind):
    model = body_and_head()
    method = kind(strength=3.0)
    method.consolidate(model, {"0.bias": torch.ones(6)})
    with torch.no_grad():
        model[0].bias += 2
        model[2].bias += 2
    torch.testing.assert_close(method.penalty(model).detach(), torch.tensor((1.5 if kind is EWC else 3.0) * 6 * 4))


# Custom training loops.


def contradicting_loaders():
    """Yield loaders of two tasks with contradicting labels."""
    for label_shift in range(2):
        x, y = make_data(96)
        yield DataLoader(TensorDataset(x, (y + label_shift) % 3), batch_size=8)


def drift_in_custom_loop(method, loop):
    """Train on two tasks in a custom loop, and return how far the second task moves the weights."""
    torch.manual_seed(0)
    model = body_and_head()
    wrapped = model
    if loop == "compile":
        wrapped = torch.compile(model, backend="eager")
    elif loop == "parallel":
        wrapped = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    if loop == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = []
    for loader in contradicting_loaders():
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=loop == "autocast"):
                outputs = wrapped(x)
                penalty = method.penalty(wrapped, x, outputs)
                loss = F.cross_entropy(outputs, y) + penalty
            loss.backward()
            if loop != "accumulate" or step % 2:
                method.before_step(wrapped)
                if loop == "clip":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                method.after_step(wrapped)
                optimizer.zero_grad()
        method.end_task(wrapped, loader)
        weights.append(snapshot(model))
    return sum((weights[1][n] - weights[0][n]).square().sum() for n in weights[0]).sqrt().item()


@pytest.mark.parametrize(("kind", "strength"), [(L2, 3.0), (EWC, 50.0), (MAS, 5.0), (SI, 3.0), (LwF, 10.0)])
@pytest.mark.parametrize("loop", ["plain", "compile", "parallel", "accumulate", "autocast", "clip", "adamw"])
def test_custom_loops_reduce_the_drift_of_weights(kind, strength, loop):
    method_drift = drift_in_custom_loop(kind(strength=strength), loop)
    finetuning_drift = drift_in_custom_loop(Method(), loop)
    assert method_drift < 0.97 * finetuning_drift


def test_accumulated_gradients_equal_those_of_the_full_batch(double):
    x, y = make_data()
    model, method = train_method(EWC, strength=5.0)
    shift(model)
    model.zero_grad()
    (F.cross_entropy(model(x), y) + method.penalty(model)).backward()
    full_batch_gradients = {n: p.grad.clone() for n, p in trainable_parameters(model).items()}
    model.zero_grad()
    for x_part, y_part in zip(x.split(8), y.split(8), strict=True):
        ((F.cross_entropy(model(x_part), y_part) + method.penalty(model)) / 4).backward()
    for n, p in trainable_parameters(model).items():
        torch.testing.assert_close(p.grad, full_batch_gradients[n])


@pytest.mark.parametrize("kind", [L2, EWC, MAS, LwF])
def test_penalties_add_up_in_a_chain(kind):
    model = body_and_head()
    first = kind(STRENGTHS[kind])
    second = EWC(2.0)
    x, y = make_data()
    for method in (first, second):
        method.end_task(model, (x, y))
    shift(model)
    batch = Batch(x, y)
    chain_penalty = (first + second).penalty(model, batch)
    assert first.penalty(model, batch) > 0 and second.penalty(model, batch) > 0
    torch.testing.assert_close(chain_penalty, first.penalty(model, batch) + second.penalty(model, batch))


# Parts of a model that are frozen for a while.


@pytest.mark.parametrize(
    "method",
    [
        L2(0.1),
        EWC(100.0),
        EWC(100.0, mode="online"),
        EWC(100.0, structure="kronecker"),
        EWC(100.0, structure="full"),
        MAS(0.1),
        SI(10.0),
    ],
    ids=label,
)
def test_a_layer_frozen_for_one_task_is_penalized_after_thawing(method):
    method = copy.deepcopy(method)
    model = body_and_head()
    train(model, method, make_data(), epochs=1, batch_size=8)
    model[0].requires_grad_(False)
    train(model, method, make_data(), epochs=1, batch_size=8)
    assert torch.as_tensor(penalty_of(method, model)).isfinite()
    model[0].requires_grad_(True)
    with torch.no_grad():
        model[0].weight += 1
    assert penalty_of(method, model) > 1e-6
    assert penalty_gradient(method, model)["0.weight"].abs().sum() > 0


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("frozen", ["0", "0.bias", "2.weight"])
def test_separate_anchors_of_a_model_frozen_in_parts(structure, frozen, double):
    """Compare with the sum over tasks, each over the parameters that were trainable in it."""
    model = body_and_head()
    method = EWC(2.0, labels="exact", structure=structure)
    tasks = []
    for k in range(3):
        for name, p in model.named_parameters():
            p.requires_grad_(k != 1 or not name.startswith(frozen))
        shift(model)
        xy = make_data()
        method.end_task(model, xy)
        tasks.append((fisher(model, xy, structure=structure), snapshot(model)))
    model.requires_grad_(True)
    shift(model)
    theta = {n: p.detach() for n, p in model.named_parameters()}
    expected = sum(form.quad({n: theta[n] - anchor[n] for n in anchor}) for form, anchor in tasks)
    torch.testing.assert_close(method.penalty(model).detach(), expected)


def test_penalties_of_frozen_parameters_stay_zero():
    model = body_and_head()
    chain = Freeze() + EWC(100.0, only="0.*")
    for _ in range(3):
        train(model, chain, make_data(), epochs=1, batch_size=8)
    assert chain.methods[1].penalty(model) == 0


# Precision.


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(structure, dtype):
    model = body_and_head().to(dtype)
    x = make_data()[0].to(dtype)
    method = EWC(1e4, structure=structure)
    for _ in range(3):
        method.end_task(model, x)
        shift(model, 0.05)
    penalty = method.penalty(model)
    penalty.backward()
    assert penalty.isfinite() and penalty > 0 and all(p.grad.dtype == dtype for p in model.parameters())
    assert all(v.isfinite().all() for v in method.quadratic.anchor.values())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_the_penalty_is_not_rounded_under_autocast(structure):
    model, method = train_method(EWC, structure=structure, strength=1e6)
    shift(model)
    exact = method.penalty(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.penalty(model), exact)


@pytest.mark.parametrize("only", [{}, {"*": 0.0}, {"*": -1.0}, {"*": float("nan")}, {"*": "1"}])
def test_layer_weights_that_are_zero_negative_or_invalid_are_refused(only):
    with pytest.raises(ValueError, match=r"leaves no parameter to hold|must be a number, 0 or more"):
        EWC(100.0, only=only).end_task(body_and_head(), make_data())


@pytest.mark.parametrize("kind", [L2, EWC, MAS, SI, LwF])
def test_non_finite_parameters_are_not_anchored(kind):
    model = body_and_head()
    method = kind(STRENGTHS[kind])
    train(model, method, make_data(), epochs=1, batch_size=8)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="finite"):
        method.end_task(model, make_data())


@pytest.fixture(scope="module")
def first_task_accuracy():
    """Measure the accuracy on the first of three tasks after training on all, also for fine-tuning."""
    stream = streams.permuted_digits(tasks=3)

    def measure_accuracy(method):
        torch.manual_seed(0)
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(64,))
        for task in stream:
            train(model, method, task, epochs=10, batch_size=32)
        return evaluate(model, method, stream.test_tasks[:1])[0]

    measure_accuracy.fine_tuning = measure_accuracy(Method())
    return measure_accuracy


@pytest.mark.slow
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
def test_the_first_task_is_remembered_better_than_in_fine_tuning(method, first_task_accuracy):
    assert first_task_accuracy(method) > first_task_accuracy.fine_tuning + 0.1


# Parameters that the loss does not depend on.


class Heads(nn.Module):
    """A body and an output layer for each task, of which only the current one is called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.current = 0

    def forward(self, x):
        return self.heads[self.current](torch.tanh(self.body(x)))


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train_task(loop, model, method, task):
    if loop == "trainer":
        train(model, method, task, optimizer=make_adamw, epochs=3, batch_size=8)
        return
    method.begin_task(model, task)
    optimizer = make_adamw(model.parameters())
    attachment = method.attach(model, optimizer) if loop == "attached" else None
    for batch in task.batches(8, 3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y) if attachment else method.loss(model, batch)
        loss.backward()
        if attachment is None:
            method.before_step(model)
        optimizer.step()
        if attachment is None:
            method.after_step(model)
    if attachment is not None:
        attachment.remove()
    method.end_task(model, task)


METHODS_WITH_UNUSED_HEADS = [
    Method(),
    L2(),
    EWC(),
    EWC(100.0),
    EWC(mode="online"),
    EWC(structure="kronecker"),
    MAS(),
    SI(),
    EWC(half=True),
]


@pytest.mark.parametrize("loop", ["trainer", "custom loop", "attached"])
@pytest.mark.parametrize("method", METHODS_WITH_UNUSED_HEADS, ids=label)
def test_weight_decay_does_not_move_unused_heads(method, loop):
    """The gradients of output layers of earlier and later tasks stay None."""
    model = Heads()
    method = copy.deepcopy(method)
    for k in range(3):  # in the third task, the second head has an anchor of two tasks
        model.current = k
        initial_heads = copy.deepcopy(model.heads)
        train_task(loop, model, method, Task(make_data(), id=k))
        for unused in {0, 1, 2} - {k}:
            assert torch.equal(model.heads[unused].weight, initial_heads[unused].weight)
            assert torch.equal(model.heads[unused].bias, initial_heads[unused].bias)
    assert not torch.equal(model.heads[2].weight, initial_heads[2].weight)


def test_a_full_form_penalizes_parameters_when_others_have_moved():
    """The gradient of one parameter depends on all; that of a parameter without importance stays None."""
    model = Heads()
    method = EWC(100.0, structure="full")
    train_task("custom loop", model, method, Task(make_data(), id=0))
    with torch.no_grad():
        model.body.weight += 0.1
    model.zero_grad()
    method.penalty(model).backward()
    assert model.heads[0].weight.grad.any() and model.heads[2].weight.grad is None


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_a_parameter_off_its_anchor_is_penalized_without_a_task_gradient(kind):
    model = Heads()
    method = kind(STRENGTHS[kind])
    train_task("custom loop", model, method, Task(make_data(), id=0))
    with torch.no_grad():
        model.heads[0].weight += 0.5
    model.zero_grad()
    model.current = 1
    method.begin_task(model, Task(make_data(), id=1))
    method.loss(model, Batch(*make_data(8))).backward()
    method.before_step(model)
    name = "heads.0.weight"
    delta = model.heads[0].weight.detach() - method.quadratic.anchor[name]
    torch.testing.assert_close(model.heads[0].weight.grad, method.quadratic.form.values[name] * delta)
    assert model.heads[2].weight.grad is None


@pytest.mark.parametrize("kind", [L2, EWC, MAS])
def test_the_second_derivative_at_the_anchor_is_the_importance(kind, double):
    model, method = train_method(kind)
    parameters = trainable_parameters(model)
    gradients = torch.autograd.grad(method.penalty(model), list(parameters.values()), create_graph=True)
    direction = [torch.randn_like(p) for p in parameters.values()]
    hessian_vector_product = torch.autograd.grad(
        sum((g * d).sum() for g, d in zip(gradients, direction, strict=True)), parameters.values()
    )
    for name, actual, d in zip(parameters, hessian_vector_product, direction, strict=True):
        torch.testing.assert_close(actual, method.quadratic.form.values[name] * d)


# Layers that were frozen when a task ended.


def train_with_a_frozen_body(kind, **settings):
    model = body_and_head()
    method = kind(**settings)
    model[0].requires_grad_(False)
    train(model, method, Task(make_data(), id=0), epochs=2, batch_size=8)
    assert not any(name.startswith("0.") for name in method.quadratic.anchor), "frozen parameters need no memory"
    return model, method


@pytest.mark.parametrize("loop", ["trainer", "custom loop", "attached"])
@pytest.mark.parametrize("kind", [EWC, MAS, SI])
def test_a_thawed_layer_without_importance_raises_one_warning(kind, loop):
    model, method = train_with_a_frozen_body(kind)
    model[0].requires_grad_(True)
    with pytest.warns(
        UserWarning, match=f"{kind.__name__} does not penalize changes of 0.weight, 0.bias: frozen when"
    ) as caught_warnings:
        train_task(loop, model, method, Task(make_data(), id=1))
    assert len(caught_warnings) == 1
    train_task(loop, model, method, Task(make_data(), id=2))  # with an importance, no warning
    assert method.quadratic.form.values["0.weight"].any()


def test_si_warns_about_a_thawed_layer_in_a_loop_without_begin_task():
    """The layer was trained and frozen only when the task ended, so SI has a path of it."""
    model = body_and_head()
    method = SI(10.0)
    x, y = make_data()

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


def test_si_warns_about_a_layer_thawed_only_for_end_task():
    model = body_and_head()
    method = SI(10.0)
    x, y = make_data()
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


def test_complex_parameters_are_penalized_by_l2_and_refused_by_si():
    """Compare with |θ - θ*|²; the path integral of SI is defined for real parameters only."""
    model = nn.Module()
    method = L2(3.0)
    model.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    method.end_task(model, None)
    with torch.no_grad():
        model.weight += torch.tensor([1j, 2 + 0j])
    torch.testing.assert_close(method.penalty(model).detach(), torch.tensor(1.5 * (1 + 4)))
    with pytest.raises(TypeError, match="weight is complex: use EWC or MAS"):
        SI(10.0).begin_task(model, None)


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_a_layer_that_is_trainable_at_the_end_of_the_task_is_penalized(kind):
    model = body_and_head()
    method = kind(STRENGTHS[kind])
    model[0].requires_grad_(False)
    train(model, Method(), make_data(), epochs=2, batch_size=8)
    model[0].requires_grad_(True)
    method.end_task(model, make_data())
    with torch.no_grad():
        model[0].weight += 1
    assert penalty_of(method, model) > 0


@pytest.mark.parametrize("settings", [{}, {"only": {"*": 1.0, "0.*": 5.0}}, {"offload": True}], ids=str)
def test_l2_anchors_a_thawed_layer(settings, double):
    model, method = train_with_a_frozen_body(L2, strength=3.0, **settings)
    state = method.state_dict()
    method = L2(3.0, **settings)
    method.load_state_dict(state)
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
    model[0].requires_grad_(True)
    assert penalty_of(method, model) == 0
    shift(model)
    weight = {n: 5.0 if "only" in settings and n.startswith("0.") else 1.0 for n in anchor}
    expected = sum(1.5 * weight[n] * (p.detach() - anchor[n]).square().sum() for n, p in model.named_parameters())
    torch.testing.assert_close(method.penalty(model).detach(), expected)


def test_unselected_layers_thaw_without_a_warning():
    model = body_and_head()
    method = EWC(100.0, only="2.*")
    model[0].requires_grad_(False)
    train(model, method, Task(make_data(), id=0), epochs=1, batch_size=8)
    model[0].requires_grad_(True)
    model.append(nn.Linear(3, 3))  # a new layer raises no warning either
    train(model, method, Task(make_data(), id=1), epochs=1, batch_size=8)


# Models and settings that differ from those of earlier tasks.


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
@pytest.mark.parametrize(("inputs", "hidden"), [(4, 12), (6, 6)], ids=["hidden layer", "inputs"])
def test_a_layer_of_another_width_is_refused(kind, inputs, hidden):
    _, method = train_method(kind)
    other_model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    x = torch.randn(32, inputs)
    y = torch.randint(3, (32,))
    with pytest.raises(ValueError, match=r"has shape .* and was remembered with shape .* may get more outputs"):
        train(other_model, method, (x, y), epochs=1, batch_size=8)


@pytest.mark.parametrize(
    "method",
    [L2(0.1), EWC(100.0), EWC(100.0, structure="kronecker"), EWC(100.0, mode="online", decay=0.5), MAS(0.1), SI(10.0)],
    ids=label,
)
def test_a_layer_widened_by_resize_stays_penalized(method):
    model = body_and_head()
    method = copy.deepcopy(method)
    train(model, method, Task(make_data(), id=0), epochs=2, batch_size=8)
    resize.widen(model, tracing.links(model, make_data()[0])[0], 5)
    assert penalty_of(method, model) == 0
    train_task("custom loop", model, method, Task(make_data(), id=1))  # without zeroing the new inputs
    assert model[2].weight[:, 6:].all() and method.quadratic.anchor["2.weight"].shape == (3, 11)
    other_model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))
    with pytest.raises(ValueError, match=r"2.weight has shape \(3, 20\) and was remembered with shape \(3, 11\)"):
        train(other_model, method, Task(make_data(), id=2), batch_size=8)


def test_a_widened_layer_can_be_saved_and_loaded_mid_task():
    model = body_and_head()
    method = EWC(100.0)
    train(model, method, make_data(), epochs=2, batch_size=8)
    resize.widen(model, tracing.links(model, make_data()[0])[0], 5)
    method.penalty(model)
    shift(model)
    restored = EWC(100.0)
    restored.load_state_dict(method.state_dict())
    assert torch.equal(restored.penalty(model), method.penalty(model)) and method.penalty(model) > 0


@pytest.mark.parametrize("kind", [EWC, MAS, L2])
def test_a_layer_of_another_width_is_refused_without_training(kind):
    _, method = train_method(kind)
    with pytest.raises(ValueError, match=r"2.weight has shape \(3, 12\) and was remembered with shape \(3, 6\)"):
        method.end_task(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)), make_data())


@pytest.mark.parametrize("kind", ANCHORED_METHODS)
def test_loading_state_of_another_strength_raises_a_warning(kind):
    model, method = train_method(kind, strength=1000.0)
    weaker = kind(strength=1.0)
    equal_strength = kind(strength=1000.0)
    with pytest.warns(UserWarning, match=rf"keep their strength 1000: {kind.__name__}\(strength=1\)"):
        weaker.load_state_dict(method.state_dict())
    equal_strength.load_state_dict(method.state_dict())
    kind(strength=1.0).load_state_dict(kind(strength=1000.0).state_dict())  # nothing is anchored yet
    shift(model)
    assert torch.equal(torch.as_tensor(penalty_of(weaker, model)), torch.as_tensor(penalty_of(method, model)))


def test_strengths_of_each_task_are_compared_task_by_task():
    model = body_and_head()
    method = EWC((10.0, 20.0))
    method.end_task(model, make_data())
    EWC((10.0, 5.0)).load_state_dict(method.state_dict())
    with pytest.warns(UserWarning, match=r"keep their strength 10: EWC\(strength=20\)"):
        EWC((20.0, 10.0)).load_state_dict(method.state_dict())
