"""A method carried by optimizer hooks does in any loop what the README's loop does with it."""

import contextlib
import copy

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


@pytest.mark.parametrize("name", ["er", "derpp", "lwf"])
def test_a_batch_that_made_no_step_is_forgotten(name, tasks):
    """As after a gradient that overflowed: what was not stepped on is not subtracted either."""

    def unsure(attached, model, optimizer, x, y, epoch):
        if epoch:  # in the first epoch the batch would enter the memory twice
            attached.see(Batch(x.flip(0) * 3, y, epoch=epoch))
            F.cross_entropy(model(x.flip(0) * 3), y).backward()
            optimizer.zero_grad()
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
        lambda out, y: F.cross_entropy(out, y, reduction="sum"),
        lambda out, y: F.cross_entropy(out, y) / 3,
    ],
    ids=["smoothed", "summed", "a third"],
)
def test_replay_refuses_a_loss_that_is_not_what_it_subtracts(loss, tasks):
    model, (x, y) = net(), (tasks[0][0][0][:25], tasks[0][0][1][:25])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ER(20).attach(model, optimizer) as attached, pytest.raises(ValueError, match="loop's loss is"):
        attached.see(x, y)
        loss(model(x), y).backward()
        optimizer.step()


def test_several_labels_with_another_mean_are_refused(tasks):
    model, x, y = torch.nn.Linear(5, 8), torch.randn(10, 5), torch.randint(2, (10, 8)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ER(20).attach(model, optimizer, Bernoulli()) as attached, pytest.raises(ValueError, match=r"0\.125 of that"):
        attached.see(x, y)
        F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("make", [EWC, SI, L2], ids=str)
def test_who_looks_at_parameters_alone_keeps_no_batches(make, tasks):
    model, (x, y) = net(), tasks[0][0]
    with make().attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as attached:
        attached.see(x, y)
        model(x)
        assert not attached._seen


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
            before = torch.get_rng_state(), model[1].running_mean.clone(), model[1].num_batches_tracked.clone()
            optimizer.step()
            after = torch.get_rng_state(), model[1].running_mean, model[1].num_batches_tracked
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
        assert not attached._seen


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
    assert not attached._seen
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
