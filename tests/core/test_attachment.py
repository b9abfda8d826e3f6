"""A method carried by optimizer hooks does in any loop what the README's loop does with it."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F

from everlearn import (
    AGEM,
    DER,
    ER,
    ERACE,
    EWC,
    GEM,
    HAT,
    L2,
    MAS,
    SI,
    Batch,
    Bernoulli,
    DERpp,
    Gaussian,
    LwF,
    Method,
    PackNet,
    streams,
)

METHODS = {
    "finetune": Method,
    "ewc": lambda: EWC(50.0),
    "online": lambda: EWC(50.0, mode="online", decay=0.9),
    "mas": lambda: MAS(0.5),
    "si": lambda: SI(20.0),
    "l2": lambda: L2(1.0),
    "lwf": lambda: LwF(2.0),
    "er": lambda: ER(60),
    "er by tasks": lambda: ER(60, balance="tasks"),
    "er-ace": lambda: ERACE(60),
    "der": lambda: DER(60),
    "derpp": lambda: DERpp(60),
    "agem": lambda: AGEM(60),
    "gem": lambda: GEM(60),
    "packnet": PackNet,
    "hat": HAT,
    "chain": lambda: EWC(50.0) + LwF(2.0) + ER(60),
}  # fmt: skip


@pytest.fixture
def tasks(double):
    (x, y), _ = streams.digits_data()
    x = x.double()
    return [
        [(x[y < 2][i : i + 32], y[y < 2][i : i + 32]) for i in (0, 32, 64)],
        [(x[(y > 1) & (y < 4)][i : i + 32], y[(y > 1) & (y < 4)][i : i + 32] - 2) for i in (0, 32, 64)],
    ]


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2))


def optimizer_of(model, method):
    return torch.optim.AdamW([*model.parameters(), *method.parameters()], lr=0.01, weight_decay=0.01)


def whole(task):
    return [(torch.cat([x for x, _ in task]), torch.cat([y for _, y in task]))]


def learn_ours(make, tasks):
    """The README's loop."""
    method, model = make(), net()
    for task in tasks:
        method.begin_task(model, whole(task))
        optimizer = optimizer_of(model, method)
        for epoch in range(3):
            for x, y in task:
                loss = method.loss(model, Batch(x, y, epoch=epoch))
                optimizer.zero_grad()
                loss.backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
        method.end_task(model, whole(task))
    return weights(model)


def learn_theirs(make, tasks, step):
    """A loop that knows nothing of the method but its tasks."""
    method, model = make(), net()
    for task in tasks:
        method.begin_task(model, whole(task))
        optimizer = optimizer_of(model, method)
        with method.attach(model, optimizer) as attached:
            for epoch in range(3):
                for x, y in task:
                    step(attached, model, optimizer, x, y, epoch)
        method.end_task(model, whole(task))
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plainly(attached, model, optimizer, x, y, epoch):
    attached.see(Batch(x, y, epoch=epoch))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def closure_of(attached, model, optimizer, x, y, epoch):
    def closure():
        attached.see(Batch(x, y, epoch=epoch))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def by_closure(attached, model, optimizer, x, y, epoch):
    optimizer.step(closure_of(attached, model, optimizer, x, y, epoch))


def by_named_closure(attached, model, optimizer, x, y, epoch):
    optimizer.step(closure=closure_of(attached, model, optimizer, x, y, epoch))


def scaled(attached, model, optimizer, x, y, epoch):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    attached.see(Batch(x, y, epoch=epoch))
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("step", [plainly, by_closure, by_named_closure, scaled])
@pytest.mark.parametrize("name", METHODS)
def test_hooks_do_what_the_loop_of_the_readme_does(name, step, tasks):
    torch.testing.assert_close(
        learn_theirs(METHODS[name], tasks, step), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("name", ["ewc", "mas", "si", "l2", "lwf", "packnet"])
def test_what_needs_no_labels_needs_not_be_told_of_batches(name, tasks):
    def untold(attached, model, optimizer, x, y, epoch):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    torch.testing.assert_close(
        learn_theirs(METHODS[name], tasks, untold), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "hat"])
def test_accumulated_micro_batches_make_the_step_of_the_whole_batch(name, tasks):
    def accumulated(attached, model, optimizer, x, y, epoch):
        optimizer.zero_grad()
        for part in (slice(0, 8), slice(8, 32)):
            attached.see(Batch(x[part], y[part], epoch=epoch))
            (F.cross_entropy(model(x[part]), y[part]) * (len(y[part]) / len(y))).backward()
        optimizer.step()

    torch.testing.assert_close(
        learn_theirs(METHODS[name], tasks, accumulated), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", ["er", "derpp", "lwf"])
def test_a_batch_that_made_no_step_is_forgotten(name, to_none, tasks):
    """As after a gradient that overflowed: what was not stepped on is not subtracted either."""

    def unsure(attached, model, optimizer, x, y, epoch):
        attached.see(Batch(x.flip(0) * 3, y))
        F.cross_entropy(model(x.flip(0) * 3), y).backward()
        optimizer.zero_grad(set_to_none=to_none)
        plainly(attached, model, optimizer, x, y, epoch)

    torch.testing.assert_close(
        learn_theirs(METHODS[name], tasks, unsure), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9
    )


def test_a_penalty_counts_though_the_model_is_called_by_its_layers(tasks):
    class Own(Method):
        def penalty(self, model, batch=None, out=None):
            return 0.1 * sum(p.square().sum() for p in model.parameters())

    def by_layers(attached, model, optimizer, x, y, epoch):
        optimizer.zero_grad()
        for layer in model:
            x = layer(x)
        F.cross_entropy(x, y).backward()
        optimizer.step()

    torch.testing.assert_close(learn_theirs(Own, tasks, by_layers), learn_ours(Own, tasks), rtol=1e-7, atol=1e-9)


def test_inputs_are_those_that_pass(tasks):
    """A loop may normalise between the loader and the model."""

    def normalising(attached, model, optimizer, x, y, epoch):
        attached.see(Batch(x / 2, y, epoch=epoch))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for name in ("er", "der"):
        torch.testing.assert_close(
            learn_theirs(METHODS[name], tasks, normalising), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9
        )


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.3),
        lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 5.0])),
        lambda out, y: F.cross_entropy(out, y) + out.square().mean(),
    ],
    ids=["smoothed", "weighted", "more"],
)
def test_replay_refuses_a_loss_that_is_no_multiple_of_what_it_subtracts(loss, tasks):
    model, (x, y) = net(), tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ER(20).attach(model, optimizer) as attached, pytest.raises(ValueError, match="not a multiple of it"):
        for _ in range(50):  # two outputs that are nearly equal hide a smoothing at first
            attached.see(x, y)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def replaying(make=ER, likelihood=None, model=None, batch=None):
    """A method with a memory, ready for its second batch, and the gradient of its loss."""
    x, y = batch
    method, model = make(16), model or net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.3)
    method.observe(Batch(x.flip(0) / 2, y.flip(0), **({"likelihood": likelihood} if likelihood else {})), model(x))
    return method, model


@pytest.mark.parametrize(
    ("factor", "step"),
    [
        (32.0, lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum").backward()),
        (4.0, lambda model, x, y: [F.cross_entropy(model(x), y).backward() for _ in range(4)]),
        (0.125, lambda model, x, y: (F.cross_entropy(model(x), y) / 8).backward()),
    ],
    ids=["a sum", "accumulated, not averaged", "a window that is not full"],
)
@pytest.mark.parametrize("make", [ER, ERACE])
def test_replay_is_weighed_as_the_loop_weighs(make, factor, step, tasks):
    """A multiple of the loss is that multiple of the method's: also a power of two, which is no scaler's."""
    x, y = tasks[0][0]
    method, model = replaying(make, batch=(x, y))
    twin, other = copy.deepcopy((method, model))
    with method.attach(model, torch.optim.SGD(model.parameters(), lr=0.0)) as attached:
        attached._handles[0].remove()  # the step is made by hand, so that gradients are seen before it
        see = attached.see
        model.register_forward_pre_hook(lambda m, args: None if attached.busy else see(Batch(x, y, epoch=1)))
        step(model, x, y)
        attached._edit()
    losses = 4 if factor == 4.0 else 1  # a draw from the memory each
    for _ in range(losses):
        (twin.loss(other, Batch(x, y, epoch=1)) * factor / losses).backward()
    torch.testing.assert_close(gradient(model), gradient(other))


CLIPPED = ["ewc", "mas", "si", "l2", "lwf", "er", "derpp", "agem", "packnet", "chain"]


def learn_clipped(make, tasks, clip, attached, parts=1, scaler=None, watch=lambda norm, whole: None):
    """Two tasks in a loop that clips by norm, with the method's verbs in it or without."""
    method, model = make(), net()
    for task in tasks:
        method.begin_task(model, whole(task))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaler is not None)
        hooks = method.attach(model, optimizer) if attached else None
        for epoch in range(3):
            for x, y in task:
                optimizer.zero_grad()
                for batch in Batch(x, y, epoch=epoch).chunk(parts):
                    if hooks:
                        hooks.see(batch)
                    loss = F.cross_entropy(model(batch.x), batch.y) if hooks else method.loss(model, batch)
                    scaler.scale(loss / parts).backward()
                scaler.unscale_(optimizer)
                if not hooks:
                    method.before_step(model)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                watch(norm.item(), not hooks)
                scaler.step(optimizer)
                scaler.update()
                if not hooks:
                    method.after_step(model)
        if hooks:
            hooks.remove()
        method.end_task(model, whole(task))
    return weights(model)


@pytest.mark.parametrize("how", [{}, {"parts": 2}, {"scaler": True}], ids=["plain", "accumulated", "scaled"])
@pytest.mark.parametrize("name", CLIPPED)
def test_a_loop_that_clips_clips_the_whole_loss(name, how, tasks, recwarn):
    clip, norms = 0.02, []
    ours = learn_clipped(METHODS[name], tasks, clip, False, **how)
    theirs = learn_clipped(METHODS[name], tasks, clip, True, **how, watch=lambda norm, whole: norms.append(norm))
    assert min(norms) > clip, "clipping must act at every step"
    torch.testing.assert_close(theirs, ours, rtol=1e-8, atol=1e-10)
    assert not [w for w in recwarn if "shortens" in str(w.message)]


@pytest.mark.parametrize("name", ["l2", "lwf"])
def test_what_is_short_enough_alone_is_clipped_with_the_method_s_part(name, tasks):
    """Once a step has told the threshold."""
    (x, y), norms, found = tasks[1][0], {True: [], False: []}, []
    for attached in (True, False):
        model, method = net(), L2(5.0) if name == "l2" else LwF(50.0)
        method.end_task(model, whole(tasks[0]))
        with torch.no_grad():
            model[-1].weight.mul_(-3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with method.attach(model, optimizer) if attached else contextlib.nullcontext():
            for factor in (1.0, 0.1, 0.1, 0.1):
                optimizer.zero_grad()
                loss = factor * F.cross_entropy(model(x), y)
                if not attached and name == "l2":
                    loss = loss + method.penalty(model)
                elif not attached:
                    loss = factor * method.loss(model, Batch(x, y))
                loss.backward()
                norms[attached].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
                optimizer.step()
        found.append(weights(model))
    assert norms[True][0] > 0.3 > max(norms[True][1:]) and min(norms[False]) > 0.3, norms
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_a_loop_that_stops_clipping_is_left_alone(tasks):
    x, y = tasks[0][0]
    found = []
    for attached in (True, False):
        model, method = net(), L2(5.0)
        method.end_task(model, whole(tasks[0]))
        with torch.no_grad():
            model[1].weight.add_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with method.attach(model, optimizer) if attached else contextlib.nullcontext():
            for clip in (0.01, 1e9, 1e9):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss if attached else loss + method.penalty(model)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        found.append(weights(model))
    torch.testing.assert_close(*found)


def test_parameters_that_are_clipped_along_count_in_the_norm(tasks):
    """A head that is no part of the model, and is clipped with it or is not."""
    x, y = tasks[0][0]

    def learned(attached, along):
        torch.manual_seed(0)
        body, head, method = torch.nn.Linear(64, 5), torch.nn.Linear(5, 2), L2(5.0)
        method.end_task(body, whole(tasks[0]))
        with torch.no_grad():
            body.weight.add_(0.1)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        clipped = [*body.parameters(), *(head.parameters() if along else ())]
        with method.attach(body, optimizer) if attached else contextlib.nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                loss = F.cross_entropy(head(body(x.flatten(1))), y)
                (loss if attached else loss + method.penalty(body)).backward()
                torch.nn.utils.clip_grad_norm_(clipped, 0.05)
                optimizer.step()
        return torch.cat([weights(body), weights(head)])

    for along in (True, False):
        torch.testing.assert_close(learned(True, along), learned(False, along), rtol=1e-8, atol=1e-10)


class Threefold(Method):
    """So that gradients must be thrice the loop's, whatever that has done to them."""

    def task_loss(self, batch, out):
        return 3 * batch.loss(out)


def halved(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), gradient(model).norm().item() / 2)


def without_the_last(model):
    model[-1].bias.grad.zero_()


@pytest.mark.parametrize("change", [halved, without_the_last], ids=lambda f: f.__name__)
def test_what_a_loop_does_to_gradients_it_does_to_the_method_s(change, tasks):
    model, (x, y) = net(), tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Threefold().attach(model, optimizer) as attached:
        for part in (slice(0, 8), slice(8, 32)):  # clipped after each micro-batch
            attached.see(x[part], y[part])
            F.cross_entropy(model(x[part]), y[part]).backward()
            change(model)
        before = gradient(model)
        optimizer.step()
    own = slice(None) if change is halved else slice(-2)
    torch.testing.assert_close(gradient(model)[own], 3 * before[own])


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.add_(p.detach()),
        lambda p: p.grad.clamp_(-1e-3, 1e-3),
        lambda p: p.grad.neg_(),
    ],
    ids=["decayed", "clipped one by one", "turned"],
)
def test_replay_refuses_gradients_that_are_no_multiple_of_what_came(change, tasks):
    model, (x, y) = net(), tasks[0][0]
    for method, refused in ((Threefold(), True), (LwF(), False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with method.attach(model, optimizer) as attached:
            attached.see(x, y)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                change(p)
            with pytest.raises(ValueError, match="common factor") if refused else contextlib.nullcontext():
                optimizer.step()


def test_a_batch_that_was_told_of_and_never_passed_does_not_count(tasks):
    (x, y), (other, labels), _ = tasks[0]
    model, method = net(), ER(200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer) as attached:
        attached.see(other, labels)  # and then the model has no memory for it
        attached.see(x, y)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(method.memory) == len(x)


def test_a_model_in_a_file_has_no_method(tasks):
    model, (x, y) = net(), tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ER(20).attach(model, optimizer):
        plainly_sized = pickle.dumps(net())
        stored = pickle.dumps(model)
    assert len(stored) < len(plainly_sized) + 1000
    loaded = pickle.loads(stored)
    F.cross_entropy(loaded(x), y).backward()
    ER(20).attach(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1))


def test_an_optimizer_of_two_steps_is_met_where_it_moves(tasks):
    class Twice(torch.optim.Optimizer):
        """As sharpness-aware minimisation is written."""

        def __init__(self, parameters):
            self.base_optimizer = torch.optim.SGD(parameters, lr=0.1)
            super().__init__(parameters, {})

        def second_step(self):
            self.base_optimizer.step()

    ends = []
    for strength in (0.0, 1e3):
        method, model = EWC(strength), net()
        method.end_task(model, whole(tasks[0]))
        optimizer = Twice([*model.parameters()])
        with method.attach(model, optimizer):
            for x, y in tasks[1]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.second_step()
        ends.append(weights(model))
    assert not torch.allclose(*ends)


def test_passes_without_a_step_do_not_pile_up_and_odd_outputs_pass(tasks):
    model, (x, y) = net(), tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ER(20).attach(model, optimizer) as attached:
        for _ in range(100):
            model(x)
        assert len(attached._micro_batches) < 70
        F.cross_entropy(model(x[:0]), y[:0], reduction="sum").backward()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("likelihood", "loss", "target"),
    [
        (Gaussian(), F.mse_loss, lambda y: y[:, None].double()),
        (Bernoulli(), F.binary_cross_entropy_with_logits, lambda y: F.one_hot(y, 8).double()),
    ],
    ids=["mean squares", "several labels"],
)
def test_other_means_are_multiples(likelihood, loss, target, tasks):
    x, y = tasks[0][0]
    y = target(y)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, y.shape[1]))
    method, model = replaying(ER, likelihood, model, (x, y))
    twin, other = copy.deepcopy((method, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = Batch(x, y, likelihood=likelihood, epoch=1)
    with method.attach(model, optimizer, likelihood) as attached:
        attached.see(x, y)
        loss(model(x), y).backward()
        optimizer.step()
    factor = loss(other(x), y) / batch.loss(other(x))
    (twin.loss(other, batch) * factor.detach()).backward()
    torch.testing.assert_close(gradient(model), gradient(other))


@pytest.mark.parametrize("name", ["ewc", "lwf", "er", "er-ace", "der", "derpp"])
def test_running_statistics_are_those_of_the_readme_s_loop(name, tasks, monkeypatch):
    """Replayed examples are normalised together with new ones, and the loop's own pass does not count twice."""

    def normed():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, 20),
            torch.nn.BatchNorm1d(20),
            torch.nn.ReLU(),
            torch.nn.Linear(20, 2),
        )

    made = []
    monkeypatch.setitem(globals(), "net", lambda: (made.append(normed()), made[-1])[1])
    theirs, ours = learn_theirs(METHODS[name], tasks, plainly), learn_ours(METHODS[name], tasks)
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-8)
    for a, b in zip(*(m.buffers() for m in made), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["lwf", "der", "er"])
def test_two_passes_before_one_backward_pass(name, tasks):
    def halves(attached, model, optimizer, x, y, epoch):
        optimizer.zero_grad()
        losses = []
        for part in (slice(0, 16), slice(16, 32)):
            attached.see(Batch(x[part], y[part], epoch=epoch))
            losses.append(F.cross_entropy(model(x[part]), y[part]) / 2)
        sum(losses).backward()
        optimizer.step()

    def one_by_one(attached, model, optimizer, x, y, epoch):
        optimizer.zero_grad()
        for part in (slice(0, 16), slice(16, 32)):
            attached.see(Batch(x[part], y[part], epoch=epoch))
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        optimizer.step()

    torch.testing.assert_close(
        learn_theirs(METHODS[name], tasks, halves), learn_theirs(METHODS[name], tasks, one_by_one), rtol=1e-7, atol=1e-9
    )
    if name == "lwf":
        torch.testing.assert_close(
            learn_theirs(METHODS[name], tasks, halves), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9
        )


def test_float16_does_not_lose_small_gradients(tasks):
    """What the method adds goes through float16 at the scaler's scale."""
    x, y = tasks[0][0][0].float(), tasks[0][0][1]
    method, model = replaying(batch=(x, y), model=net().float())
    with torch.no_grad():
        model[-1].weight.mul_(1e-4)
    twin, other = copy.deepcopy((method, model))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    batch = Batch(x, y, epoch=1)
    with method.attach(model, optimizer) as attached:
        attached.see(batch)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    twin.loss(other, batch).backward()
    a, b = model[1].weight.grad, other[1].weight.grad
    assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize("make", [EWC, SI, L2], ids=str)
def test_who_looks_at_parameters_alone_keeps_no_batches(make, tasks):
    model, (x, y) = net(), tasks[0][0]
    with make().attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as attached:
        attached.see(x, y)
        model(x)
        assert not attached._micro_batches


def test_the_loop_s_own_loss_stays(tasks):
    """Label smoothing is the loop's business; EWC adds its penalty all the same."""

    def smooth(attached, model, optimizer, x, y, epoch):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.2).backward()
        optimizer.step()

    method, model = EWC(50.0), net()
    for task in tasks:
        optimizer = optimizer_of(model, method)
        for _ in range(3):
            for x, y in task:
                loss = F.cross_entropy(model(x), y, label_smoothing=0.2) + method.penalty(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        method.end_task(model, whole(task))
    torch.testing.assert_close(learn_theirs(METHODS["ewc"], tasks, smooth), weights(model), rtol=1e-7, atol=1e-9)


def test_the_loop_s_random_numbers_and_statistics_stay(tasks):
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 2)
    )
    method, optimizer, ((x, y), *_) = ER(20), torch.optim.SGD(model.parameters(), lr=0.1), tasks[0]
    with method.attach(model, optimizer) as attached:
        for _ in range(2):
            attached.see(x, y)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            before = torch.get_rng_state(), model[1].num_batches_tracked.clone()
            optimizer.step()
            after = torch.get_rng_state(), model[1].num_batches_tracked
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(method.memory) == 20


def test_autocast_is_entered_again(tasks):
    class Cast(LwF):
        def penalty(self, model, batch=None, out=None):
            kinds.append(model[1](batch.x.flatten(1)).dtype)
            return 0.0

    kinds, model = [], net().float()
    x, y = tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Cast().attach(model, optimizer):
        for precision in (torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
            with precision:
                loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            optimizer.step()
    assert kinds == [torch.bfloat16, torch.float32]


def test_evaluation_is_not_seen(tasks):
    model, (x, _) = net(), tasks[0][0]
    with ER(20).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as attached:
        model.eval()(x)
        with torch.no_grad():
            model.train()(x)
        assert not attached._micro_batches


def test_removed_it_is_gone(tasks):
    model, method = net(), EWC(1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.end_task(model, whole(tasks[0]))
    attached = method.attach(model, optimizer)
    attached.remove()
    plain = net()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for m, o in ((model, optimizer), (plain, other)):
        for x, y in tasks[1]:
            o.zero_grad()
            F.cross_entropy(m(x), y).backward()
            o.step()
    assert torch.equal(weights(model), weights(plain))


def test_replay_without_labels_says_what_to_do(tasks):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = tasks[0][0]
    with ER(20).attach(model, optimizer), pytest.raises(ValueError, match=r"attachment\.see\(x, y\)"):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_what_hooks_cannot_serve_is_refused():
    model = net()
    with pytest.raises(TypeError, match="LBFGS"):
        EWC().attach(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="torch optimizer"):
        EWC().attach(model, object())
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: each[p].step()) for p in model.parameters()]
    with pytest.raises(TypeError, match="inside backward"):
        EWC().attach(model, next(iter(each.values())))
    for handle in handles:
        handle.remove()


def test_an_optimizer_that_does_not_have_all_is_refused(tasks):
    model, method = net(), HAT()
    method.begin_task(model, whole(tasks[0]))
    with pytest.raises(ValueError, match="parameters of its own"):
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"does not move 3\.weight, 3\.bias"):
        EWC().attach(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


def test_one_attachment_at_a_time_and_none_for_a_copy(tasks):
    model, (x, _) = net(), tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = ER(20).attach(model, optimizer)
    for other in (optimizer, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(ValueError, match="attached here already"):
            EWC().attach(model, other)
    twin = copy.deepcopy(model)
    twin(x)
    assert not attached._micro_batches
    EWC().attach(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    attached.remove()
    EWC().attach(model, optimizer)


def test_outputs_that_are_no_tensor_and_batches_without_a_label(tasks):
    class Odd(torch.nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    model, x = Odd(5, 2), torch.randn(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ER(20).attach(model, optimizer) as attached, pytest.raises(TypeError, match="it gave a dict"):
        attached.see(x, torch.zeros(4, dtype=torch.long))
        model(x)["logits"].sum().backward()
        optimizer.step()
    words = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    with ER(20).attach(words, optimizer) as attached:
        attached.see(torch.randn(2, 4, 5), torch.full((2, 4), -100))
        words(torch.randn(2, 4, 5)).sum().backward()
        optimizer.step()


def test_a_fused_optimizer_under_a_scaler_is_told_to_unscale(tasks):
    model, (x, y) = net(), tasks[0][0]
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with EWC().attach(model, optimizer):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        with pytest.raises(ValueError, match=r"scaler\.unscale_"):
            scaler.step(optimizer)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with EWC().attach(model, optimizer):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)


def distilling(tasks, strength=3.0):
    """LwF after its first task, the model moved on since, and the gradient of the whole loss of a batch of the second."""
    model, method = net(), LwF(strength)
    method.end_task(model, whole(tasks[0]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.3)
    x, y = tasks[1][0]
    twin = copy.deepcopy(model)
    method.loss(twin, Batch(x, y)).backward()
    return method, model, gradient(twin), (x, y)


def scaled_up(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)


def in_parts(model, optimizer, x, y):
    for part in (slice(0, 8), slice(8, 32)):
        (F.cross_entropy(model(x[part]), y[part]) * (len(y[part]) / len(y))).backward()


@pytest.mark.parametrize(
    ("factor", "step"),
    [
        (1.0, lambda model, optimizer, x, y: F.cross_entropy(model(x), y).backward()),
        (32.0, lambda model, optimizer, x, y: F.cross_entropy(model(x), y, reduction="sum").backward()),
        (0.125, lambda model, optimizer, x, y: (F.cross_entropy(model(x), y) / 8).backward()),
        (1.0, scaled_up),
        (1.0, in_parts),
    ],
    ids=["a mean", "a sum", "a share", "scaled", "accumulated"],
)
def test_distillation_is_weighed_as_the_loop_weighs_though_labels_are_not_told(factor, step, tasks):
    method, model, right, (x, y) = distilling(tasks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer):
        step(model, optimizer, x, y)
        optimizer.step()
    torch.testing.assert_close(gradient(model), factor * right, rtol=1e-6, atol=1e-8)


def test_distillation_learns_in_a_loop_that_clips(double):
    """It was added unclipped: the second task had 0.6 % where the verbs have 90."""
    (x, y), (x_test, y_test) = streams.digits_data()
    x, x_test = x.double(), x_test.double()
    scores = {}
    for attached in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)
        )
        method = LwF(1.0)
        for first in (0, 5):
            own = (y >= first) & (y < first + 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            method.begin_task(model, (x[own], y[own]))
            with method.attach(model, optimizer) if attached else contextlib.nullcontext():
                for _ in range(10):
                    for a, b in zip(x[own].split(32), y[own].split(32), strict=True):
                        optimizer.zero_grad()
                        loss = F.cross_entropy(model(a), b) if attached else method.loss(model, Batch(a, b))
                        loss.backward()
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
            method.end_task(model, (x[own], y[own]))
        hits = model(x_test).argmax(1) == y_test
        scores[attached] = [hits[(y_test < 5) == old].double().mean().item() for old in (True, False)]
    assert scores[True] == pytest.approx(scores[False], abs=0.01) and min(scores[True]) > 0.75


def test_what_nobody_can_weigh_is_refused(tasks):
    def outcome(change=lambda p: None, loss=F.cross_entropy, steps=1):
        method, model, _, (x, y) = distilling(tasks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with method.attach(model, optimizer):
            for _ in range(steps):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                for p in model.parameters():
                    change(p)
                optimizer.step()

    with pytest.raises(ValueError, match="more than a common factor"):
        outcome(lambda p: p.grad.clamp_(-1e-3, 1e-3))
    smoothed = functools.partial(F.cross_entropy, label_smoothing=0.5)
    outcome(loss=smoothed)  # a mean, as all say
    outcome(lambda p: p.grad.mul_(0.3), smoothed)  # as if clipped: what is taken back leaves a mean
    factors = iter([0.3] * 4 + [0.2] * 4)
    with pytest.raises(ValueError, match="no multiple of the one that likelihood means"):
        outcome(lambda p: p.grad.mul_(next(factors)), smoothed, steps=2)


def test_targets_are_asked_for_where_the_gradient_does_not_give_them_away(tasks):
    x = tasks[0][0][0].flatten(1)
    model, method, y = torch.nn.Linear(64, 3), LwF(), torch.randn(len(x), 3)
    method.end_task(model, [(x, y.argmax(1))])
    with torch.no_grad():
        model.weight.add_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer, Gaussian()) as attached:
        F.mse_loss(model(x), y).backward()
        with pytest.raises(ValueError, match=r"call attachment\.see\(x, y\)"):
            optimizer.step()
        optimizer.zero_grad()
        attached.see(x, y)
        F.mse_loss(model(x), y, reduction="sum").div(2).backward()
        optimizer.step()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    (len(x) * method.loss(twin, Batch(x, y, likelihood=Gaussian()))).backward()
    torch.testing.assert_close(gradient(model), gradient(twin))


@pytest.mark.parametrize("name", ["ewc", "mas", "l2", "lwf", "own", "chain"])
def test_a_penalty_that_the_loop_adds_too_is_told_of(name, tasks):
    class Own(Method):
        def penalty(self, model, batch=None, out=None):
            return 0.1 * sum(p.square().sum() for p in model.parameters())

    method = {"own": Own, "chain": lambda: LwF(2.0) + EWC(50.0)}.get(name, METHODS.get(name))()
    model, (x, y) = net(), tasks[1][0]
    method.end_task(model, whole(tasks[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(own_loss):
        optimizer.zero_grad()
        loss = method.loss(model, Batch(x, y)) if own_loss else F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    def twice():
        step(own_loss=True)
        step(own_loss=True)

    with method.attach(model, optimizer):
        step(own_loss=False)
        method.penalty(model, Batch(x, y), model(x)).item()  # may be looked at
        step(own_loss=False)
        with pytest.warns(UserWarning, match="counts twice") as told:
            twice()
        assert len(told) == 1
    step(own_loss=True)


@pytest.mark.parametrize("penalized", [EWC, LwF])
def test_a_penalty_alone_that_the_loop_adds_is_told_of(penalized, tasks):
    method, model, (x, y) = penalized(), net(), tasks[1][0]
    method.end_task(model, whole(tasks[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (method + Method()).attach(model, optimizer):
        out = model(x)
        (F.cross_entropy(out, y) + method.penalty(model, x, out)).backward()
        with pytest.warns(UserWarning, match="counts twice"):
            optimizer.step()


def test_replay_that_the_loop_takes_too_is_refused(tasks):
    method, model, (x, y) = ER(20), net(), tasks[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with method.attach(model, optimizer):
        method.loss(model, Batch(x, y)).backward()
        with pytest.raises(ValueError, match="counts twice"):
            optimizer.step()


@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er"])
def test_steps_of_another_optimizer_are_told_of(name, tasks):
    """As where the last task's attachment was left and a new optimizer is in use."""
    method, model = METHODS[name](), net()
    x, y = tasks[0][0]
    first = torch.optim.SGD(model.parameters(), lr=0.01)
    attached = method.attach(model, first)
    plainly(attached, model, first, x, y, 0)
    other = net()
    stranger = torch.optim.SGD(other.parameters(), lr=0.01)
    F.cross_entropy(other(x), y).backward()
    stranger.step()  # of another model
    second = torch.optim.Adam(model.parameters(), lr=0.01)

    def steps():
        for _ in range(3):
            second.zero_grad()
            F.cross_entropy(model(x), y).backward()
            second.step()

    with pytest.warns(UserWarning, match="another optimizer than the Adam") as told:
        steps()
    assert len(told) == 1
    attached.remove()
    with method.attach(model, second) as attached:
        plainly(attached, model, second, x, y, 0)


def test_an_optimizer_around_the_known_one_is_no_other(tasks):
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            self.inner.step(closure)

    model, (x, y) = net(), tasks[0][0]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Around(inner)
    with EWC().attach(model, inner):
        F.cross_entropy(model(x), y).backward()
        outer.step()


@pytest.mark.parametrize("how", ["in evaluation mode", "called one by one"])
@pytest.mark.parametrize("name", ["lwf", "er", "derpp"])
def test_examples_that_pass_unseen_are_told_of(name, how, tasks):
    method, model = METHODS[name](), net()
    x, y = tasks[1][0]
    method.loss(model, Batch(*tasks[0][0]))
    method.end_task(model, whole(tasks[0]))
    if how == "in evaluation mode":
        model.eval()
        out = functools.partial(model)
    else:
        out = functools.partial(torch.nn.Sequential(*model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer), pytest.raises(ValueError, match=how):
        F.cross_entropy(out(x), y).backward()
        optimizer.step()


def test_a_model_in_evaluation_mode_is_seen_if_it_is_told_of(tasks):
    """As where BatchNorm's statistics are to stay: a sum, so that its factor must be seen."""
    method, model, right, (x, y) = distilling(tasks)
    optimizer = torch.optim.SGD(model.eval().parameters(), lr=0.0)
    with method.attach(model, optimizer) as attached:
        attached.see(x, y)
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    torch.testing.assert_close(gradient(model), len(y) * right)


class Tagger(torch.nn.Module):
    """A label for each token; token 0 is padding."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(9, 5), torch.nn.Linear(5, 4)

    def forward(self, x):
        return self.layer(self.words(x))


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_tokens_that_are_ignored_are_not_distilled(told, large, double, monkeypatch):
    """Also where the labels are read off the gradient, of all examples or of some: padding's embedding stays."""
    if large:
        monkeypatch.setattr("everlearn.core.loops.COMPARED", 60)
    torch.manual_seed(0)
    model, method = Tagger(), LwF(3.0)
    x = torch.randint(1, 9, (6, 7))
    x[:, 4:] = 0
    x[2] = 0
    y = torch.randint(4, x.shape).masked_fill(x == 0, -100)
    method.end_task(model, [(x, y)])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape))
    twin = copy.deepcopy(model)
    method.loss(twin, Batch(x, y)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer) as attachment:
        if told:
            attachment.see(x, y)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    assert not model.words.weight.grad[0].any()
    torch.testing.assert_close(gradient(model), gradient(twin), rtol=1e-6, atol=1e-9)


def test_a_label_that_may_be_ignored_or_be_sure_is_asked_for(double):
    """Outputs without a gradient whose label the model is sure of: nobody can tell whether they count."""
    model, method, x = torch.nn.Linear(3, 3, bias=False), LwF(), torch.eye(3)
    method.end_task(model, [(x, torch.arange(3))])
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2000.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer), pytest.raises(ValueError, match=r"attachment\.see"):
        F.cross_entropy(model(x), torch.arange(3)).backward()
        optimizer.step()


def to_a_tenth(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 * gradient(model).norm().item())


def one_by_one(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def the_last_alone(model):
    torch.nn.utils.clip_grad_norm_(model[-1].parameters(), 1e-3)


def decayed(model):
    for p in model.parameters():
        p.grad.add_(p.detach())


@pytest.mark.parametrize("change", [to_a_tenth, one_by_one, the_last_alone, decayed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["ewc", "si", "l2", "mas"])
def test_clipping_that_cannot_be_done_again_is_told_of_once(name, change, tasks, recwarn):
    model, method = net(), METHODS[name]()
    for batches in tasks:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method.begin_task(model, whole(batches))
        with method.attach(model, optimizer):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                change(model)
                optimizer.step()
        method.end_task(model, whole(batches))
        told = [w for w in recwarn if "before " + type(method).__name__ + " adds its part" in str(w.message)]
        second, shortens = batches is tasks[1], change is not decayed
        assert len(told) == (second and shortens), "in the first task there is no penalty"
        recwarn.clear()


class Optional(torch.nn.Module):
    """As transformers' models, with options among its named inputs."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 2)

    def forward(self, input_ids=None, mask=None, use_cache=True, return_dict=False):
        return self.layer(input_ids.flatten(1) * (1 if mask is None else mask))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["lwf", "er", "der", "derpp", "agem"])
def test_options_in_the_call_are_no_inputs(name, named, tasks):
    ends = []
    for options in ({}, {"return_dict": True, "use_cache": False}):
        torch.manual_seed(0)
        model, method = Optional(), METHODS[name]()
        for batches in tasks:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with method.attach(model, optimizer) as attachment:
                for x, y in batches:
                    optimizer.zero_grad()
                    attachment.see({"input_ids": x} if named else x, y)
                    F.cross_entropy(model(**options, input_ids=x, mask=2 * torch.ones(len(x), 1)), y).backward()
                    optimizer.step()
            method.end_task(model, [({"input_ids": x, "mask": 2 * torch.ones(len(x), 1)}, y) for x, y in batches])
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends)
