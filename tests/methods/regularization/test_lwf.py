import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import Batch, Bernoulli, Gaussian, LwF, Method, Task, nets, streams, train
from everlearn.core.task import allowed_classes
from everlearn.surgery import heads

double = pytest.mark.usefixtures("double")


def shift(model, amount=0.3):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(amount * torch.randn_like(p))


def taught(method, outputs=4, task=None):
    """A model that has moved on, its teacher's outputs and its own."""
    model, x = nn.Linear(3, outputs), torch.randn(6, 3)
    method.end_task(model, task)
    target = model(x).detach()
    shift(model)
    return model, x, target


def end(method, scenario):
    """The weights after two tasks of a few steps."""
    torch.manual_seed(0)
    stream = streams.digits(scenario)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    for task in stream.tasks[:2]:
        train(model, method, task, iterations=3)
    return torch.cat([p.flatten() for p in model.parameters()])


@double
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_value_and_gradient(temperature):
    method = LwF(3.0, temperature)
    model, x, target = taught(method)
    out = model(x)
    out.retain_grad()
    penalty = method.penalty(model, Batch(x), out)
    p, log_q = (target / temperature).softmax(-1), (out / temperature).log_softmax(-1)
    torch.testing.assert_close(penalty, 3 * F.kl_div(log_q, p, reduction="batchmean"))
    penalty.backward()
    torch.testing.assert_close(out.grad, 3 * (log_q.exp() - p).detach() / (temperature * len(x)))
    cross_entropy = -(p * (model(x) / temperature).log_softmax(-1)).sum(-1).mean()
    g = torch.autograd.grad(3 * cross_entropy, model.weight)[0]
    torch.testing.assert_close(model.weight.grad, g)  # the paper's form differs by the teacher's entropy alone


@double
def test_zero_where_the_models_agree():
    method = LwF()
    model, x = nn.Linear(3, 4), torch.randn(6, 3)
    method.end_task(model, None)
    penalty = method.penalty(model, x)
    penalty.backward()
    assert penalty.abs() < 1e-15 and model.weight.grad.abs().max() < 1e-16


@double
def test_high_temperatures_match_centred_outputs():
    temperature = 1e3
    method = LwF(temperature**2, temperature)
    model, x, target = taught(method)
    out = model(x)
    out.retain_grad()
    method.penalty(model, x, out).backward()
    centred = [v - v.mean(1, keepdim=True) for v in (out.detach(), target)]
    torch.testing.assert_close(out.grad, (centred[0] - centred[1]) / (4 * len(x)), rtol=1e-2, atol=1e-5)


@double
def test_a_constant_added_to_all_outputs_changes_nothing():
    method = LwF()
    model, x, _ = taught(method)
    out = model(x)
    torch.testing.assert_close(method.penalty(model, x, out), method.penalty(model, x, out + torch.randn(6, 1)))


@double
def test_old_heads_are_asked_one_by_one():
    classes = [[0, 1], [2, 3], [4, 5]]
    method, model, x = LwF(), nn.Linear(3, 6), torch.randn(5, 3)
    for t in range(2):
        method.end_task(model, Task(id=t, allowed=allowed_classes("task", classes, t)))
    target = model(x).detach()
    method.begin_task(model, Task(id=2, allowed=allowed_classes("task", classes, 2)))
    shift(model)
    out = model(x)
    truth = sum(
        F.kl_div((out[:, c] / 2).log_softmax(-1), (target[:, c] / 2).softmax(-1), reduction="batchmean")
        for c in classes[:2]
    )
    torch.testing.assert_close(method.penalty(model, Batch(x), out), truth)


@double
@pytest.mark.parametrize(("scenario", "asked"), [("class", 4), ("domain", 6)])
def test_shared_outputs_are_asked_once_for_every_old_task(scenario, asked):
    classes = [[0, 1], [2, 3], [4, 5]] if scenario == "class" else [[0, 1, 2, 3, 4, 5]] * 3
    method, model, x = LwF(), nn.Linear(3, 6), torch.randn(5, 3)
    for t in range(2):
        method.end_task(model, Task(id=t, allowed=allowed_classes(scenario, classes, t)))
    target = model(x).detach()
    method.begin_task(model, Task(id=2, allowed=allowed_classes(scenario, classes, 2)))
    shift(model)
    out = model(x)
    one = F.kl_div((out[:, :asked] / 2).log_softmax(-1), (target[:, :asked] / 2).softmax(-1), reduction="batchmean")
    torch.testing.assert_close(method.penalty(model, Batch(x), out), 2 * one)


@double
def test_new_classes_may_be_refused():
    """van de Ven & Tolias: a softmax over all classes so far, targets zero for the new ones."""
    classes = [[0, 1], [2, 3], [4, 5]]
    method, model, x = LwF(refuse_new=True), nn.Linear(3, 6), torch.randn(5, 3)
    for t in range(2):
        method.end_task(model, Task(id=t, allowed=allowed_classes("class", classes, t)))
    target = model(x).detach()
    task = Task((x, torch.zeros(5, dtype=torch.long)), id=2, allowed=allowed_classes("class", classes, 2))
    method.begin_task(model, task)
    shift(model)
    out = model(x)
    p = (target[:, :4] / 2).softmax(-1)
    log_q = (out / 2).log_softmax(-1)[:, :4]
    found = method.penalty(model, next(task.examples(5)), out)
    torch.testing.assert_close(found, 2 * F.kl_div(log_q, p, reduction="batchmean"))


def test_the_teacher_stays_as_it_was():
    """Bit for bit, without gradients, in evaluation mode, whatever the student does."""
    stream = streams.digits("class")
    model = nn.Sequential(nets.cnn(stream.inputs, stream.outputs, channels=(4,)), nn.Dropout(0.5))
    method = LwF()
    train(model, method, stream[0], epochs=1)
    teacher = {n: v.clone() for n, v in method.latest["state"].items()}
    train(model, method, stream[1], epochs=1)
    assert all(torch.equal(v, teacher[n]) and not v.requires_grad for n, v in method.teacher["state"].items())
    model.train()
    x = torch.rand(4, *stream.inputs)
    before = {n: b.clone() for n, b in model.named_buffers()}
    out = model(x)
    moved = {n: b.clone() for n, b in model.named_buffers()}
    first, second = (method.penalty(model, Batch(x), out) for _ in range(2))
    assert torch.equal(first, second), "no dropout in the teacher"
    assert all(torch.equal(b, moved[n]) for n, b in model.named_buffers()) and any(
        not torch.equal(before[n], moved[n]) for n in before
    )
    assert all(m.training for m in model.modules())


@double
def test_a_head_that_grew_is_asked_its_old_outputs():
    method = LwF()
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.randn(5, 3)
    method.end_task(model, x)
    target = model(x).detach()
    heads.grow_output(model, 4)
    shift(model)
    out = model(x)
    truth = F.kl_div((out[:, :2] / 2).log_softmax(-1), (target / 2).softmax(-1), reduction="batchmean")
    torch.testing.assert_close(method.penalty(model, x), truth)


@double
@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
def test_outputs_that_are_not_classes(likelihood):
    method = LwF(temperature=1.0)
    model, x, target = taught(method)
    out = model(x)
    found = method.penalty(model, Batch(x, likelihood=likelihood), out)
    if isinstance(likelihood, Gaussian):
        truth = (out - target).square().sum(1).mean() / 2
    else:
        p = target.sigmoid()
        truth = (
            (
                F.binary_cross_entropy_with_logits(out, p, reduction="none")
                - F.binary_cross_entropy_with_logits(target, p, reduction="none")
            )
            .sum(1)
            .mean()
        )
    torch.testing.assert_close(found, truth)


@double
def test_a_temperature_does_not_shrink_outputs_that_are_no_probabilities():
    """The penalty is half the squared error over the variance, in the units of the task loss, whatever T."""
    penalties = []
    for temperature in (1.0, 2.0, 10.0):
        torch.manual_seed(0)
        method = LwF(temperature=temperature)
        model, x, target = taught(method)
        penalties.append(method.penalty(model, Batch(x, likelihood=Gaussian(0.5))))
        torch.testing.assert_close(penalties[-1], Gaussian(0.5).loss(model(x), target))
    assert penalties[0] == penalties[1] == penalties[2]


@double
def test_tokens_are_weighed_as_the_task_loss_weighs_them():
    """A mean over tokens, without those that are ignored: the penalty of 16 tokens is no 16 times that of one."""
    method = LwF(3.0, 2.0)
    model, _, _ = taught(method)
    x = torch.randn(5, 16, 3)
    y = torch.randint(4, (5, 16))
    y[0, 3:] = -100
    y[2] = -100
    counted = y != -100
    target = method.latest["state"]
    z = F.linear(x[counted], target["weight"], target["bias"])
    p, log_q = (z / 2).softmax(-1), (model(x[counted]) / 2).log_softmax(-1)
    truth = 3 * F.kl_div(log_q, p, reduction="batchmean")
    torch.testing.assert_close(method.penalty(model, Batch(x, y)), truth)
    flat = method.penalty(model, Batch(x.flatten(0, 1), y.flatten()))
    torch.testing.assert_close(flat, truth)  # tokens as examples of their own
    every = method.penalty(model, x)  # without labels every token counts
    torch.testing.assert_close(every, method.penalty(model, x.flatten(0, 1)))
    assert method.penalty(model, Batch(x, torch.full_like(y, -100))) == 0


@double
@pytest.mark.parametrize("likelihood", [None, Bernoulli()])
def test_outputs_of_minus_infinity_do_not_spread(likelihood):
    """A model that rules out a class says so by minus infinity, as teacher and as student."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x):
            out = self.inner(x)
            return out.masked_fill(torch.tensor([False, True, False, False]), -torch.inf)

    method, model, x = LwF(), Masked(), torch.randn(6, 3)
    plain = LwF()
    kept = [0, 2, 3]
    reduced = nn.Linear(3, 3)
    reduced.load_state_dict({n: p[kept] for n, p in model.inner.state_dict().items()})
    found = []
    fields = {"likelihood": likelihood} if likelihood else {}
    for one, net in ((method, model), (plain, reduced)):
        one.end_task(net, None)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)
        penalty = one.penalty(net, Batch(x, **fields))
        penalty.backward()
        found.append(penalty)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(model.inner.weight.grad[kept], reduced.weight.grad)
    assert (model.inner.weight.grad[1] == 0).all()


def test_a_teacher_that_rules_out_everything_is_refused():
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda m, args, out: torch.full_like(out, -torch.inf) + 0 * out)
    method = LwF()
    method.end_task(model, None)
    with pytest.raises(ValueError, match="minus infinity for every output of task -1"):
        method.penalty(model, torch.randn(4, 3))


def test_chunks_of_a_task_share_a_teacher():
    stream = streams.online(streams.digits("class"), chunk=40)
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(8,)), LwF()
    teachers = {}
    for task in [t for t in stream if t.id < 3 and t.part < 3]:
        method.begin_task(model, task)
        if method.teacher:
            teachers.setdefault(task.id, []).append(id(method.teacher["state"]["1.weight"]))
        train(model, method, task)
    assert set(teachers) == {1, 2} and all(len(set(seen)) == 1 for seen in teachers.values())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_only_new_outputs_move_during_the_warm_up(optimizer, scenario):
    stream = streams.digits(scenario)
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4,))
    method = LwF(warmup=5)
    first = train(model, method, stream[0], optimizer=optimizer, epochs=1)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    *_, head = [n for n in before if n.endswith("weight")]
    head = head.removesuffix(".weight")
    train(model, method, stream[1], optimizer=first.optimizer, iterations=5)
    for name, value in model.state_dict().items():
        if name.startswith(head):
            old = torch.tensor([c not in (2, 3) for c in range(10)])
            assert torch.equal(value[old], before[name][old]) and not torch.equal(value[2:4], before[name][2:4])
        else:
            assert torch.equal(value, before[name]), name
    train(model, method, Task(stream[1].train, id=1, allowed=stream[1].allowed), optimizer=optimizer, iterations=1)


def test_everything_moves_after_the_warm_up():
    stream = streams.digits("task")
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(8,)), LwF(warmup=3)
    train(model, method, stream[0], epochs=1)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    train(model, method, stream[1], iterations=4)
    assert all(not torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_without_new_outputs_there_is_no_warm_up():
    assert torch.equal(end(LwF(), "domain"), end(LwF(warmup=5), "domain"))


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(self.inner(x))

    model, method, x = Tied(), LwF(), torch.randn(4, 3)
    method.end_task(model, x)
    shift(model)
    assert method.penalty(model, x) > 0


def test_layers_that_the_teacher_has_not_are_refused():
    model, method = nn.Sequential(nn.Linear(3, 3)), LwF()
    method.end_task(model, None)
    model.append(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"1.weight, 1.bias did not exist when the last task ended"):
        method.penalty(model, torch.randn(2, 3))


def test_the_likelihood_of_the_last_task_is_remembered():
    method, x = LwF(temperature=1.0), torch.randn(6, 3)
    model = nn.Linear(3, 1)
    method.end_task(model, Task((x, torch.randn(6, 1)), likelihood=Gaussian()))
    target = model(x).detach()
    shift(model)
    torch.testing.assert_close(method.penalty(model, x), (model(x) - target).square().mean() / 2)
    fresh = LwF()
    fresh.load_state_dict(method.state_dict())
    with pytest.raises(ValueError, match="One output cannot separate classes"):
        fresh.penalty(model, x)


def test_labels_in_the_place_of_answers_are_refused():
    method = LwF()
    model, x, _ = taught(method)
    for wrong in (torch.zeros(6, dtype=torch.long), model(x).detach()):
        with pytest.raises(ValueError, match="outputs must be the model"):
            method.penalty(model, x, wrong)


def test_a_loop_that_begins_no_tasks_has_the_last_end_as_teacher():
    """Also after tasks that the trainer began."""
    stream = streams.digits("class")
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(8,)), LwF()
    for task in stream.tasks[:2]:
        train(model, method, task, iterations=2)
    assert method.penalty(model, torch.rand(3, *stream.inputs)).abs() < 1e-6


def test_the_warm_up_lasts_over_chunks():
    stream = streams.online(streams.digits("task"), chunk=20)
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(8,)), LwF(warmup=3)
    chunks = [t for t in stream if t.id < 2]
    for task in [t for t in chunks if t.id == 0][:2]:
        train(model, method, task, batch_size=10)
    before = model[1].weight.detach().clone()
    moved = []
    for task in [t for t in chunks if t.id == 1][:3]:
        train(model, method, task, batch_size=10)
        moved.append(not torch.equal(before, model[1].weight))
    assert moved == [False, True, True], "two steps a chunk, three of them warm"


def test_it_needs_inputs():
    method = LwF()
    model, *_ = taught(method)
    with pytest.raises(ValueError, match=r"give the inputs, penalty\(model, batch\)"):
        method.penalty(model)


def test_strength_zero_is_fine_tuning():
    assert torch.equal(end(Method(), "task"), end(LwF(0.0), "task"))


def test_probabilities_are_told_of_in_a_loop_of_ones_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)), torch.randn(6, 3)
    method = LwF()
    method.end_task(model, x)
    with pytest.warns(UserWarning, match="probabilities"):
        method.penalty(model, x, model(x))


def test_a_hugging_face_output_is_read_by_its_logits():
    transformers = pytest.importorskip("transformers")
    method = LwF(3.0)
    model, x, _ = taught(method)
    out = transformers.modeling_outputs.SequenceClassifierOutput(logits=model(x))
    expected = method.penalty(model, x, model(x))
    assert expected > 0
    torch.testing.assert_close(method.penalty(model, x, out), expected)
    torch.testing.assert_close((method + Method()).penalty(model, x, out), expected)
    with pytest.raises(TypeError, match=r"must give a tensor of outputs, it gave a tuple"):
        method.penalty(model, x, (model(x),))
