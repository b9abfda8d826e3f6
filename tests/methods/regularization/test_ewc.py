import math

import pytest
import torch
from torch import nn

from everlearn import ER, EWC, Gaussian, Task
from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import Diagonal, fisher


def make_data(seed, n=40):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=rng)
    return x, torch.randint(3, (n,), generator=rng)


def run_sequence(method, tasks=3):
    """Move a model before each task; return it with the Fisher information and parameters of each task."""
    model = nn.Linear(4, 3)
    forms_and_anchors = []
    for k in range(tasks):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        method.end_task(model, make_data(k))
        forms_and_anchors.append((fisher(model, make_data(k)), snapshot(model)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model, forms_and_anchors


def quad(form, model, anchor):
    return form.quad({n: p.detach() - anchor[n] for n, p in trainable_parameters(model).items()})


@pytest.mark.usefixtures("double")
class TestFormulas:
    def test_a_penalty_of_one_task_is_half_lambda_fisher(self):
        model = nn.Linear(4, 3)
        method = EWC(strength=7.0, labels="exact")
        method.end_task(model, make_data(0))
        f = fisher(model, make_data(0)).values["weight"][1, 2]
        with torch.no_grad():
            model.weight[1, 2] += 0.5
        torch.testing.assert_close(method.penalty(model).detach(), 7.0 / 2 * f * 0.25)

    def test_separate_is_a_sum_over_tasks(self):
        method = EWC(strength=2.0, labels="exact")
        model, forms_and_anchors = run_sequence(method)
        torch.testing.assert_close(
            method.penalty(model).detach(), sum(quad(f, model, anchor) for f, anchor in forms_and_anchors)
        )

    def test_each_task_may_have_a_separate_strength(self):
        method = EWC(strength=(1.0, 10.0, 0.5), labels="exact")
        model, forms_and_anchors = run_sequence(method)
        expected = sum(
            s / 2 * quad(f, model, anchor) for s, (f, anchor) in zip(method.strength, forms_and_anchors, strict=True)
        )
        torch.testing.assert_close(method.penalty(model).detach(), expected)
        with pytest.raises(ValueError, match=r"EWC.strength has 3 values, this is task 4"):
            method.end_task(model, make_data(3))

    @pytest.mark.parametrize("decay", [1.0, 0.5])
    def test_online_mode_decays_and_anchors_at_the_latest_optimum(self, decay):
        """γ acts when the past is accumulated and when it is applied, as in Progress & Compress."""
        method = EWC(strength=2.0, mode="online", decay=decay, labels="exact")
        model, forms_and_anchors = run_sequence(method)
        total = sum((f * decay ** (2 - k) for k, (f, _) in enumerate(forms_and_anchors)), start=Diagonal())
        for name, value in method.quadratic.form.values.items():
            torch.testing.assert_close(value, 2 * total.values[name])
        torch.testing.assert_close(method.penalty(model).detach(), decay * quad(total, model, forms_and_anchors[-1][1]))

    @pytest.mark.parametrize("decay", [1.0, 0.5])
    def test_the_average_is_the_decayed_sum_over_the_sum_of_weights(self, decay):
        method = EWC(strength=2.0, mode="online", decay=decay, average=True, labels="exact")
        model, forms_and_anchors = run_sequence(method)
        weights = [decay ** (2 - k) for k in range(3)]
        mean = sum(
            (f * (w / sum(weights)) for w, (f, _) in zip(weights, forms_and_anchors, strict=True)), start=Diagonal()
        )
        torch.testing.assert_close(method.penalty(model).detach(), decay * quad(mean, model, forms_and_anchors[-1][1]))

    def test_the_cap_comes_after_the_average(self):
        cap = 0.05
        method = EWC(strength=2.0, mode="online", average=True, cap=cap, labels="exact")
        model, forms_and_anchors = run_sequence(method)
        mean = sum((f * (2 / 3) for f, _ in forms_and_anchors), start=Diagonal())
        capped = Diagonal({n: v.clamp(max=cap) for n, v in mean.values.items()})
        assert any((v > cap).any() for v in mean.values.values())
        torch.testing.assert_close(method.penalty(model).detach(), quad(capped, model, forms_and_anchors[-1][1]) / 2)

    @pytest.mark.parametrize("mode", ["separate", "online"])
    @pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
    def test_the_prior_is_counted_once(self, mode, structure):
        """Huszár (2018): Σ λ F + λ_prior, the prior once whatever the number of tasks."""
        torch.manual_seed(1)
        without_prior = EWC(strength=2.0, mode=mode, structure=structure)
        run_sequence(without_prior)
        torch.manual_seed(1)
        method = EWC(strength=2.0, mode=mode, structure=structure, prior=0.3)
        model, forms_and_anchors = run_sequence(method)
        anchor = forms_and_anchors[0 if mode == "separate" else -1][1]
        squared_distance = sum(((p.detach() - anchor[n]) ** 2).sum() for n, p in trainable_parameters(model).items())
        torch.testing.assert_close(
            method.penalty(model).detach(), without_prior.penalty(model).detach() + 0.15 * squared_distance
        )

    def test_quadratic_tasks_equal_joint_training(self):
        """With mean losses over equally many examples λ = 1 and a full Fisher information, Bayes' rule is exact."""
        tasks = [(torch.randn(30, 3), torch.randn(30, 1)) for _ in range(3)]
        model = nn.Linear(3, 1)
        method = EWC(1.0, mode="online", structure="full")
        for k, (x, y) in enumerate(tasks):
            newton(model, lambda x=x, y=y: ((model(x) - y) ** 2).mean() / 2 + method.penalty(model))
            method.end_task(model, Task((x, y), id=k, likelihood=Gaussian()))
        x, y = (torch.cat(part) for part in zip(*tasks, strict=True))
        joint_model = nn.Linear(3, 1)
        newton(joint_model, lambda: ((joint_model(x) - y) ** 2).mean())
        torch.testing.assert_close(model.weight, joint_model.weight)
        torch.testing.assert_close(model.bias, joint_model.bias)

    @pytest.mark.parametrize("mode", ["separate", "online"])
    def test_kronecker_pairs_are_limited(self, mode):
        method = EWC(1.0, structure="kronecker", mode=mode, max_kronecker_terms=2, labels="exact")
        model, _ = run_sequence(method, tasks=4)
        assert len(method.quadratic.form.layers["weight"]) == 2
        exact = EWC(1.0, structure="kronecker", mode="online", labels="exact")
        for _ in range(5):
            exact.end_task(model, make_data(0))
        compacted = EWC(1.0, structure="kronecker", mode="online", max_kronecker_terms=1, labels="exact")
        for _ in range(5):
            compacted.end_task(model, make_data(0))
        form = fisher(model, make_data(0), structure="kronecker")
        with torch.no_grad():
            model.weight += torch.randn_like(model.weight)
        expected = 5 / 2 * quad(form, model, exact.quadratic.anchor)  # not 25 times
        torch.testing.assert_close(exact.penalty(model).detach(), expected)
        torch.testing.assert_close(compacted.penalty(model).detach(), expected)

    def test_compacting_keeps_the_trace(self):
        model = nn.Linear(4, 3)
        forms = [fisher(model, make_data(k), structure="kronecker") for k in range(4)]
        total = forms[0] + forms[1] + forms[2] + forms[3]
        for max_pairs in (1, 2, 3, 4):
            assert math.isclose(total.compact(max_pairs).trace(), total.trace(), rel_tol=1e-12)

    def test_the_kronecker_penalty_does_not_depend_on_the_basis_of_the_inputs(self):
        rotation = torch.linalg.qr(torch.randn(4, 4))[0]
        penalties = []
        for basis in (torch.eye(4), rotation):
            torch.manual_seed(3)
            model = nn.Linear(4, 3, bias=False)
            method = EWC(1.0, structure="kronecker")
            x, y = make_data(0)
            model.weight.data = model.weight.data @ basis.t()
            method.end_task(model, (x @ basis.t(), y))
            model.weight.data = model.weight.data + torch.ones(3, 4) @ basis.t()
            penalties.append(method.penalty(model).detach())
        torch.testing.assert_close(*penalties)


def newton(model, loss):
    """Take one exact step to the minimum of a quadratic loss."""
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
    gradient = torch.cat([v.flatten() for v in gradients])
    hessian_rows = [
        torch.cat([v.flatten() for v in torch.autograd.grad(entry, parameters, retain_graph=True)])
        for entry in gradient
    ]
    step = torch.linalg.solve(torch.stack(hessian_rows), gradient.detach())
    with torch.no_grad():
        for p, part in zip(parameters, step.split(sizes), strict=True):
            p.sub_(part.view_as(p))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 0.5}, "use mode='online'"),
        ({"average": True}, "use mode='online'"),
        ({"cap": 1.0, "structure": "full"}, "are for structure='diagonal'"),
        ({"half": True, "structure": "kronecker"}, "are for structure='diagonal'"),
        ({"strength": (1.0, -1.0)}, "allowed: 0 or more for each task"),
        ({"strength": -1.0}, "EWC.strength: got -1.0, allowed: 0 or more"),
        ({"examples": 0}, "EWC.examples: got 0, allowed: 1 or more"),
        ({"mode": "online", "decay": 0.0}, "removes the whole penalty"),
        ({"strength": float("inf")}, "EWC.strength: got inf"),
        ({"mode": "onlin"}, "EWC.mode: got 'onlin', allowed: 'separate', 'online'"),
    ],
)
def test_incompatible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EWC(**settings)


def test_importances_from_a_sample_of_the_examples():
    model = nn.Linear(4, 3)
    x, y = make_data(0)
    sampled = EWC(1.0, examples=10, labels="exact")
    complete = EWC(1.0, examples=1000, labels="exact")
    sampled.end_task(model, (x, y))
    complete.end_task(model, (x, y))
    expected = fisher(model, (x, y)).values["weight"]
    torch.testing.assert_close(complete.quadratic.form.values["weight"], expected)
    assert not torch.allclose(sampled.quadratic.form.values["weight"], expected)


def test_the_cap_survives_saving():
    method = EWC(1.0, cap=0.01)
    model, _ = run_sequence(method)
    expected = method.penalty(model)
    restored = EWC(1.0, cap=0.01)
    restored.load_state_dict(method.state_dict())
    assert torch.equal(expected, restored.penalty(model))


def test_the_state_of_another_method_is_refused():
    replay = ER(5)
    replay.tasks = 1
    with pytest.raises(ValueError, match="does not match EWC"):
        EWC(100.0).load_state_dict(replay.state_dict())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_a_layer_frozen_in_the_first_task_and_thawed_later(structure, double):
    """The penalty sums the forms of both tasks, each over the parameters that were trainable in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    method = EWC(2.0, structure=structure)
    tasks = []
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p) * p.requires_grad)
        x = torch.randn(20, 3)
        tasks.append((fisher(model, x, structure=structure), snapshot(model)))
        method.end_task(model, x)
    displacement = {n: 0.5 * torch.randn_like(p) for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(displacement[n])
    theta = dict(model.named_parameters())
    expected = sum(form.quad({n: theta[n] - anchor[n] for n in anchor}) for form, anchor in tasks)  # ½ · strength 2
    torch.testing.assert_close(method.penalty(model), expected)


def test_a_model_that_ends_in_a_softmax_raises_a_warning():
    """After a Softmax, the Fisher information is far too small; after a LogSoftmax, it is that of the logits."""
    torch.manual_seed(0)
    logits = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        logits[2].weight.mul_(20)
    x = torch.randn(50, 4, dtype=torch.double)
    expected = fisher(logits, x)
    after_log_softmax = fisher(nn.Sequential(*logits, nn.LogSoftmax(-1)), x)
    for name, value in expected.values.items():
        torch.testing.assert_close(after_log_softmax.values[name], value)
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        EWC(100.0).end_task(nn.Sequential(*logits, nn.Softmax(-1)), x)


@pytest.mark.parametrize("labels", ["exact", "true"])
def test_labels_without_an_output_are_refused(labels):
    y = torch.tensor([0, 7, -100, 1])
    with pytest.raises(ValueError, match=r"from 0 to 7 but the model has only 3 outputs .* build it with more outputs"):
        EWC(100.0, labels=labels).end_task(nn.Linear(4, 3), (torch.randn(4, 4), y))
