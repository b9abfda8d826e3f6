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


def make_student(method, outputs=4, task=None):
    """Return a model changed after its task, inputs, and the outputs of its teacher."""
    model = nn.Linear(3, outputs)
    x = torch.randn(6, 3)
    method.end_task(model, task)
    target = model(x).detach()
    shift(model)
    return model, x, target


def train_two_tasks(method, scenario):
    """Return the weights after two tasks of a few steps."""
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
    model, x, target = make_student(method)
    outputs = model(x)
    outputs.retain_grad()
    penalty = method.penalty(model, Batch(x), outputs)
    p = (target / temperature).softmax(-1)
    log_q = (outputs / temperature).log_softmax(-1)
    torch.testing.assert_close(penalty, 3 * F.kl_div(log_q, p, reduction="batchmean"))
    penalty.backward()
    torch.testing.assert_close(outputs.grad, 3 * (log_q.exp() - p).detach() / (temperature * len(x)))
    cross_entropy = -(p * (model(x) / temperature).log_softmax(-1)).sum(-1).mean()
    expected_gradient = torch.autograd.grad(3 * cross_entropy, model.weight)[0]
    # The cross-entropy of the paper differs from the divergence by the teacher's entropy, a constant.
    torch.testing.assert_close(model.weight.grad, expected_gradient)


@double
def test_the_penalty_is_zero_when_student_equals_teacher():
    method = LwF(1.0)
    model = nn.Linear(3, 4)
    x = torch.randn(6, 3)
    method.end_task(model, None)
    penalty = method.penalty(model, x)
    penalty.backward()
    assert penalty.abs() < 1e-15 and model.weight.grad.abs().max() < 1e-16


@double
def test_high_temperatures_match_centered_outputs():
    temperature = 1e3
    method = LwF(temperature**2, temperature)
    model, x, target = make_student(method)
    outputs = model(x)
    outputs.retain_grad()
    method.penalty(model, x, outputs).backward()
    centered_outputs = outputs.detach() - outputs.detach().mean(1, keepdim=True)
    centered_target = target - target.mean(1, keepdim=True)
    torch.testing.assert_close(outputs.grad, (centered_outputs - centered_target) / (4 * len(x)), rtol=1e-2, atol=1e-5)


@double
def test_a_constant_added_to_all_outputs_changes_nothing():
    method = LwF(1.0)
    model, x, _ = make_student(method)
    outputs = model(x)
    torch.testing.assert_close(method.penalty(model, x, outputs), method.penalty(model, x, outputs + torch.randn(6, 1)))


@double
def test_old_heads_are_distilled_separately():
    classes = [[0, 1], [2, 3], [4, 5]]
    method = LwF(1.0)
    model = nn.Linear(3, 6)
    x = torch.randn(5, 3)
    for t in range(2):
        method.end_task(model, Task(id=t, allowed=allowed_classes("task", classes, t)))
    target = model(x).detach()
    method.begin_task(model, Task(id=2, allowed=allowed_classes("task", classes, 2)))
    shift(model)
    outputs = model(x)
    expected = sum(
        F.kl_div((outputs[:, c] / 2).log_softmax(-1), (target[:, c] / 2).softmax(-1), reduction="batchmean")
        for c in classes[:2]
    )
    torch.testing.assert_close(method.penalty(model, Batch(x), outputs), expected)


@double
@pytest.mark.parametrize(("scenario", "old_outputs"), [("class", 4), ("domain", 6)])
def test_shared_outputs_are_distilled_once_per_old_task(scenario, old_outputs):
    classes = [[0, 1], [2, 3], [4, 5]] if scenario == "class" else [[0, 1, 2, 3, 4, 5]] * 3
    method = LwF(1.0)
    model = nn.Linear(3, 6)
    x = torch.randn(5, 3)
    for t in range(2):
        method.end_task(model, Task(id=t, allowed=allowed_classes(scenario, classes, t)))
    target = model(x).detach()
    method.begin_task(model, Task(id=2, allowed=allowed_classes(scenario, classes, 2)))
    shift(model)
    outputs = model(x)
    divergence = F.kl_div(
        (outputs[:, :old_outputs] / 2).log_softmax(-1), (target[:, :old_outputs] / 2).softmax(-1), reduction="batchmean"
    )
    torch.testing.assert_close(method.penalty(model, Batch(x), outputs), 2 * divergence)


@double
def test_new_classes_may_have_zero_targets():
    """van de Ven & Tolias: a softmax over all classes so far, with zero targets for the new ones."""
    classes = [[0, 1], [2, 3], [4, 5]]
    method = LwF(1.0, refuse_new=True)
    model = nn.Linear(3, 6)
    x = torch.randn(5, 3)
    for t in range(2):
        method.end_task(model, Task(id=t, allowed=allowed_classes("class", classes, t)))
    target = model(x).detach()
    task = Task((x, torch.zeros(5, dtype=torch.long)), id=2, allowed=allowed_classes("class", classes, 2))
    method.begin_task(model, task)
    shift(model)
    outputs = model(x)
    p = (target[:, :4] / 2).softmax(-1)
    log_q = (outputs / 2).log_softmax(-1)[:, :4]
    actual = method.penalty(model, next(task.examples(5)), outputs)
    torch.testing.assert_close(actual, 2 * F.kl_div(log_q, p, reduction="batchmean"))


def test_the_teacher_is_constant():
    """The teacher is constant bit for bit, without gradients, and in evaluation mode."""
    stream = streams.digits("class")
    model = nn.Sequential(nets.cnn(stream.inputs, stream.outputs, channels=(4,)), nn.Dropout(0.5))
    method = LwF(1.0)
    train(model, method, stream[0], epochs=1)
    teacher = {n: v.clone() for n, v in method.next_teacher["state"].items()}
    train(model, method, stream[1], epochs=1)
    assert all(torch.equal(v, teacher[n]) and not v.requires_grad for n, v in method.teacher["state"].items())
    model.train()
    x = torch.rand(4, *stream.inputs)
    initial_buffers = {n: buffer.clone() for n, buffer in model.named_buffers()}
    outputs = model(x)
    updated_buffers = {n: buffer.clone() for n, buffer in model.named_buffers()}
    first, second = (method.penalty(model, Batch(x), outputs) for _ in range(2))
    assert torch.equal(first, second), "the teacher has no dropout"
    assert all(torch.equal(buffer, updated_buffers[n]) for n, buffer in model.named_buffers()) and any(
        not torch.equal(initial_buffers[n], updated_buffers[n]) for n in initial_buffers
    )
    assert all(m.training for m in model.modules())


@double
def test_a_grown_head_is_distilled_on_its_old_outputs():
    method = LwF(1.0)
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.randn(5, 3)
    method.end_task(model, x)
    target = model(x).detach()
    heads.grow_output(model, 4)
    shift(model)
    outputs = model(x)
    expected = F.kl_div((outputs[:, :2] / 2).log_softmax(-1), (target / 2).softmax(-1), reduction="batchmean")
    torch.testing.assert_close(method.penalty(model, x), expected)


@double
@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
def test_distillation_of_other_likelihoods(likelihood):
    method = LwF(1.0, temperature=1.0)
    model, x, target = make_student(method)
    outputs = model(x)
    actual = method.penalty(model, Batch(x, likelihood=likelihood), outputs)
    if isinstance(likelihood, Gaussian):
        expected = (outputs - target).square().sum(1).mean() / 2
    else:
        p = target.sigmoid()
        cross_entropy = F.binary_cross_entropy_with_logits(outputs, p, reduction="none")
        entropy = F.binary_cross_entropy_with_logits(target, p, reduction="none")
        expected = (cross_entropy - entropy).sum(1).mean()
    torch.testing.assert_close(actual, expected)


@double
def test_the_temperature_does_not_affect_a_gaussian_likelihood():
    """For any T, the penalty is half the squared error over the variance, in the units of the task loss."""
    penalties = []
    for temperature in (1.0, 2.0, 10.0):
        torch.manual_seed(0)
        method = LwF(1.0, temperature=temperature)
        model, x, target = make_student(method)
        penalties.append(method.penalty(model, Batch(x, likelihood=Gaussian(0.5))))
        torch.testing.assert_close(penalties[-1], Gaussian(0.5).loss(model(x), target))
    assert penalties[0] == penalties[1] == penalties[2]


@double
def test_tokens_are_weighted_as_in_the_task_loss():
    """The penalty is a mean over tokens that are not ignored, so it does not grow with the sequence length."""
    method = LwF(3.0, 2.0)
    model, _, _ = make_student(method)
    x = torch.randn(5, 16, 3)
    y = torch.randint(4, (5, 16))
    y[0, 3:] = -100
    y[2] = -100
    is_counted = y != -100
    teacher_state = method.next_teacher["state"]
    z = F.linear(x[is_counted], teacher_state["weight"], teacher_state["bias"])
    p = (z / 2).softmax(-1)
    log_q = (model(x[is_counted]) / 2).log_softmax(-1)
    expected = 3 * F.kl_div(log_q, p, reduction="batchmean")
    torch.testing.assert_close(method.penalty(model, Batch(x, y)), expected)
    tokens_as_examples = method.penalty(model, Batch(x.flatten(0, 1), y.flatten()))
    torch.testing.assert_close(tokens_as_examples, expected)
    without_labels = method.penalty(model, x)  # every token counts
    torch.testing.assert_close(without_labels, method.penalty(model, x.flatten(0, 1)))
    assert method.penalty(model, Batch(x, torch.full_like(y, -100))) == 0


@double
@pytest.mark.parametrize("likelihood", [None, Bernoulli()])
def test_outputs_of_minus_infinity_are_excluded(likelihood):
    """Outputs of minus infinity exclude a class, for the teacher and the student."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 4)

        def forward(self, x):
            outputs = self.inner(x)
            return outputs.masked_fill(torch.tensor([False, True, False, False]), -torch.inf)

    method = LwF(1.0)
    model = Masked()
    x = torch.randn(6, 3)
    reduced_method = LwF(1.0)
    finite_outputs = [0, 2, 3]
    reduced_model = nn.Linear(3, 3)
    reduced_model.load_state_dict({n: p[finite_outputs] for n, p in model.inner.state_dict().items()})
    penalties = []
    fields = {"likelihood": likelihood} if likelihood else {}
    for current_method, current_model in ((method, model), (reduced_method, reduced_model)):
        current_method.end_task(current_model, None)
        with torch.no_grad():
            for p in current_model.parameters():
                p.mul_(1.5)
        penalty = current_method.penalty(current_model, Batch(x, **fields))
        penalty.backward()
        penalties.append(penalty)
    torch.testing.assert_close(penalties[0], penalties[1])
    torch.testing.assert_close(model.inner.weight.grad[finite_outputs], reduced_model.weight.grad)
    assert (model.inner.weight.grad[1] == 0).all()


def test_a_teacher_with_only_infinite_outputs_is_refused():
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda m, args, outputs: torch.full_like(outputs, -torch.inf) + 0 * outputs)
    method = LwF(1.0)
    method.end_task(model, None)
    with pytest.raises(ValueError, match="minus infinity for every output of task -1"):
        method.penalty(model, torch.randn(4, 3))


def test_chunks_of_a_task_share_a_teacher():
    stream = streams.online(streams.digits("class"), chunk=40)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = LwF(1.0)
    teachers = {}
    for task in [t for t in stream if t.id < 3 and t.part < 3]:
        method.begin_task(model, task)
        if method.teacher:
            teachers.setdefault(task.id, []).append(id(method.teacher["state"]["1.weight"]))
        train(model, method, task)
    assert set(teachers) == {1, 2} and all(len(set(teacher_ids)) == 1 for teacher_ids in teachers.values())


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
    method = LwF(1.0, warmup=5)
    first_result = train(model, method, stream[0], optimizer=optimizer, epochs=1)
    initial_state = {n: v.clone() for n, v in model.state_dict().items()}
    weight_names = [n for n in initial_state if n.endswith("weight")]
    head = weight_names[-1].removesuffix(".weight")
    train(model, method, stream[1], optimizer=first_result.optimizer, iterations=5)
    for name, value in model.state_dict().items():
        if name.startswith(head):
            is_old = torch.tensor([c not in (2, 3) for c in range(10)])
            assert torch.equal(value[is_old], initial_state[name][is_old]) and not torch.equal(
                value[2:4], initial_state[name][2:4]
            )
        else:
            assert torch.equal(value, initial_state[name]), name
    train(model, method, Task(stream[1].train, id=1, allowed=stream[1].allowed), optimizer=optimizer, iterations=1)


class Scale(nn.Module):
    """Multiply by a trainable scalar without dimensions."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.factor * x


def test_a_scalar_parameter_is_locked_during_the_warm_up():
    stream = streams.digits("task")
    model = nn.Sequential(nn.Flatten(), Scale(), nn.Linear(64, stream.outputs))
    method = LwF(1.0, warmup=5)
    train(model, method, stream[0], iterations=2)
    factor = model[1].factor.item()
    train(model, method, stream[1], iterations=5)
    assert model[1].factor.item() == factor != 2.0


def test_all_parameters_move_after_the_warm_up():
    stream = streams.digits("task")
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = LwF(1.0, warmup=3)
    train(model, method, stream[0], epochs=1)
    initial_state = {n: v.clone() for n, v in model.state_dict().items()}
    train(model, method, stream[1], iterations=4)
    assert all(not torch.equal(v, initial_state[n]) for n, v in model.state_dict().items())


def test_without_new_outputs_there_is_no_warm_up():
    assert torch.equal(train_two_tasks(LwF(1.0), "domain"), train_two_tasks(LwF(1.0, warmup=5), "domain"))


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.outer = nn.Linear(3, 3)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(self.inner(x))

    model = Tied()
    method = LwF(1.0)
    x = torch.randn(4, 3)
    method.end_task(model, x)
    shift(model)
    assert method.penalty(model, x) > 0


def test_layers_added_after_the_teacher_are_refused():
    model = nn.Sequential(nn.Linear(3, 3))
    method = LwF(1.0)
    method.end_task(model, None)
    model.append(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"1.weight, 1.bias did not exist when the last task ended"):
        method.penalty(model, torch.randn(2, 3))


def test_the_likelihood_of_the_last_task_is_remembered():
    method = LwF(1.0, temperature=1.0)
    x = torch.randn(6, 3)
    model = nn.Linear(3, 1)
    method.end_task(model, Task((x, torch.randn(6, 1)), likelihood=Gaussian()))
    target = model(x).detach()
    shift(model)
    torch.testing.assert_close(method.penalty(model, x), (model(x) - target).square().mean() / 2)
    restored = LwF(1.0)
    restored.load_state_dict(method.state_dict())
    with pytest.raises(ValueError, match="One output cannot separate classes"):
        restored.penalty(model, x)


def test_outputs_that_are_not_the_student_outputs_are_refused():
    method = LwF(1.0)
    model, x, _ = make_student(method)
    for wrong_outputs in (torch.zeros(6, dtype=torch.long), model(x).detach()):
        with pytest.raises(ValueError, match="outputs must be the model"):
            method.penalty(model, x, wrong_outputs)


def test_a_loop_without_begin_task_uses_the_latest_teacher():
    """This also holds after tasks begun by the trainer."""
    stream = streams.digits("class")
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = LwF(1.0)
    for task in stream.tasks[:2]:
        train(model, method, task, iterations=2)
    assert method.penalty(model, torch.rand(3, *stream.inputs)).abs() < 1e-6


def test_the_warm_up_continues_across_chunks():
    stream = streams.online(streams.digits("task"), chunk=20)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = LwF(1.0, warmup=3)
    chunks = [t for t in stream if t.id < 2]
    for task in [t for t in chunks if t.id == 0][:2]:
        train(model, method, task, batch_size=10)
    initial_weight = model[1].weight.detach().clone()
    has_changed = []
    for task in [t for t in chunks if t.id == 1][:3]:
        train(model, method, task, batch_size=10)
        has_changed.append(not torch.equal(initial_weight, model[1].weight))
    assert has_changed == [False, True, True], "the warm-up of three steps ends in the second chunk of two steps"


def test_the_penalty_requires_inputs():
    method = LwF(1.0)
    model, *_ = make_student(method)
    with pytest.raises(ValueError, match=r"give the inputs, penalty\(model, batch\)"):
        method.penalty(model)


def test_strength_zero_is_fine_tuning():
    assert torch.equal(train_two_tasks(Method(), "task"), train_two_tasks(LwF(0.0), "task"))


def test_probabilities_raise_a_warning_in_a_custom_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    x = torch.randn(6, 3)
    method = LwF(1.0)
    method.end_task(model, x)
    with pytest.warns(UserWarning, match="probabilities"):
        method.penalty(model, x, model(x))


def test_the_logits_of_a_hugging_face_output_are_used():
    transformers = pytest.importorskip("transformers")
    method = LwF(3.0)
    model, x, _ = make_student(method)
    outputs = transformers.modeling_outputs.SequenceClassifierOutput(logits=model(x))
    expected = method.penalty(model, x, model(x))
    assert expected > 0
    torch.testing.assert_close(method.penalty(model, x, outputs), expected)
    torch.testing.assert_close((method + Method()).penalty(model, x, outputs), expected)
    with pytest.raises(TypeError, match=r"must give a tensor of outputs, it gave a tuple"):
        method.penalty(model, x, (model(x),))
