import math

import pytest
import torch
from torch import nn

from everlearn import ER, EWC, Gaussian, Task
from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import Diagonal, fisher


def problem(seed, n=40):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=random)
    return x, torch.randint(3, (n,), generator=random)


def sequence(method, tasks=3):
    """A model that is somewhere else after each task; returns it with the Fisher informations and optima."""
    model, seen = nn.Linear(4, 3), []
    for k in range(tasks):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        method.end_task(model, problem(k))
        seen.append((fisher(model, problem(k)), snapshot(model)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model, seen


def quad(form, model, at):
    return form.quad({n: p.detach() - at[n] for n, p in trainable_parameters(model).items()})


@pytest.mark.usefixtures("double")
class TestFormulas:
    def test_a_penalty_of_one_task_is_half_lambda_fisher(self):
        model, method = nn.Linear(4, 3), EWC(strength=7.0, labels="exact")
        method.end_task(model, problem(0))
        f = fisher(model, problem(0)).values["weight"][1, 2]
        with torch.no_grad():
            model.weight[1, 2] += 0.5
        torch.testing.assert_close(method.penalty(model).detach(), 7.0 / 2 * f * 0.25)

    def test_separate_is_a_sum_over_tasks(self):
        model, seen = sequence(method := EWC(strength=2.0, labels="exact"))
        torch.testing.assert_close(method.penalty(model).detach(), sum(quad(f, model, at) for f, at in seen))

    def test_every_task_may_have_its_own_strength(self):
        method = EWC(strength=(1.0, 10.0, 0.5), labels="exact")
        model, seen = sequence(method)
        truth = sum(s / 2 * quad(f, model, at) for s, (f, at) in zip(method.strength, seen, strict=True))
        torch.testing.assert_close(method.penalty(model).detach(), truth)
        with pytest.raises(ValueError, match=r"EWC.strength has 3 values, this is task 4"):
            method.end_task(model, problem(3))

    @pytest.mark.parametrize("decay", [1.0, 0.5])
    def test_online_decays_and_holds_the_latest_optimum(self, decay):
        """γ acts when the past is accumulated and when it is applied, as in Progress & Compress."""
        model, seen = sequence(method := EWC(strength=2.0, mode="online", decay=decay, labels="exact"))
        total = sum((f * decay ** (2 - k) for k, (f, _) in enumerate(seen)), start=Diagonal())
        for name, value in method.quadratic.form.values.items():
            torch.testing.assert_close(value, 2 * total.values[name])
        torch.testing.assert_close(method.penalty(model).detach(), decay * quad(total, model, seen[-1][1]))

    @pytest.mark.parametrize("decay", [1.0, 0.5])
    def test_the_average_is_the_decayed_sum_over_its_weight(self, decay):
        model, seen = sequence(method := EWC(strength=2.0, mode="online", decay=decay, average=True, labels="exact"))
        weights = [decay ** (2 - k) for k in range(3)]
        mean = sum((f * (w / sum(weights)) for w, (f, _) in zip(weights, seen, strict=True)), start=Diagonal())
        torch.testing.assert_close(method.penalty(model).detach(), decay * quad(mean, model, seen[-1][1]))

    def test_the_cap_comes_after_the_average(self):
        cap = 0.05
        model, seen = sequence(method := EWC(strength=2.0, mode="online", average=True, cap=cap, labels="exact"))
        mean = sum((f * (2 / 3) for f, _ in seen), start=Diagonal())
        capped = Diagonal({n: v.clamp(max=cap) for n, v in mean.values.items()})
        assert any((v > cap).any() for v in mean.values.values())
        torch.testing.assert_close(method.penalty(model).detach(), quad(capped, model, seen[-1][1]) / 2)

    @pytest.mark.parametrize("mode", ["separate", "online"])
    @pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
    def test_the_prior_is_counted_once(self, mode, structure):
        """Huszár (2018): Σ λ F + λ_prior, the prior once whatever the number of tasks."""
        torch.manual_seed(1)
        sequence(bare := EWC(strength=2.0, mode=mode, structure=structure))
        torch.manual_seed(1)
        method = EWC(strength=2.0, mode=mode, structure=structure, prior=0.3)
        model, seen = sequence(method)
        at = seen[0 if mode == "separate" else -1][1]
        extra = sum(((p.detach() - at[n]) ** 2).sum() for n, p in trainable_parameters(model).items())
        torch.testing.assert_close(method.penalty(model).detach(), bare.penalty(model).detach() + 0.15 * extra)

    def test_quadratic_tasks_are_learned_as_if_jointly(self):
        """With mean losses over equally many examples λ = 1 and a full Fisher information, Bayes' rule is exact."""
        tasks = [(torch.randn(30, 3), torch.randn(30, 1)) for _ in range(3)]
        model, method = nn.Linear(3, 1), EWC(1.0, mode="online", structure="full")
        for k, (x, y) in enumerate(tasks):
            newton(model, lambda x=x, y=y: ((model(x) - y) ** 2).mean() / 2 + method.penalty(model))
            method.end_task(model, Task((x, y), id=k, likelihood=Gaussian()))
        x, y = (torch.cat(part) for part in zip(*tasks, strict=True))
        joint = nn.Linear(3, 1)
        newton(joint, lambda: ((joint(x) - y) ** 2).mean())
        torch.testing.assert_close(model.weight, joint.weight)
        torch.testing.assert_close(model.bias, joint.bias)

    @pytest.mark.parametrize("mode", ["separate", "online"])
    def test_kronecker_pairs_are_kept_up_to_a_cap(self, mode):
        method = EWC(1.0, structure="kronecker", mode=mode, max_kronecker_terms=2, labels="exact")
        model, _ = sequence(method, tasks=4)
        assert len(method.quadratic.form.layers["weight"]) == 2
        exact = EWC(1.0, structure="kronecker", mode="online", labels="exact")
        for _ in range(5):
            exact.end_task(model, problem(0))
        few = EWC(1.0, structure="kronecker", mode="online", max_kronecker_terms=1, labels="exact")
        for _ in range(5):
            few.end_task(model, problem(0))
        one = fisher(model, problem(0), structure="kronecker")
        with torch.no_grad():
            model.weight += torch.randn_like(model.weight)
        truth = 5 / 2 * quad(one, model, exact.quadratic.anchor)  # five equal tasks weigh five times one, not 25 times
        torch.testing.assert_close(exact.penalty(model).detach(), truth)
        torch.testing.assert_close(few.penalty(model).detach(), truth)

    def test_compacting_keeps_the_trace(self):
        model = nn.Linear(4, 3)
        forms = [fisher(model, problem(k), structure="kronecker") for k in range(4)]
        total = forms[0] + forms[1] + forms[2] + forms[3]
        for most in (1, 2, 3, 4):
            assert math.isclose(total.compact(most).trace(), total.trace(), rel_tol=1e-12)

    def test_the_kronecker_penalty_does_not_depend_on_the_basis_of_the_inputs(self):
        turn = torch.linalg.qr(torch.randn(4, 4))[0]
        heights = []
        for basis in (torch.eye(4), turn):
            torch.manual_seed(3)
            model, method = nn.Linear(4, 3, bias=False), EWC(1.0, structure="kronecker")
            x, y = problem(0)
            model.weight.data = model.weight.data @ basis.t()
            method.end_task(model, (x @ basis.t(), y))
            model.weight.data = model.weight.data + torch.ones(3, 4) @ basis.t()
            heights.append(method.penalty(model).detach())
        torch.testing.assert_close(*heights)


def newton(model, loss):
    """One exact step to the minimum of a quadratic."""
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    g = torch.autograd.grad(loss(), parameters, create_graph=True)
    flat = torch.cat([v.flatten() for v in g])
    rows = [torch.cat([v.flatten() for v in torch.autograd.grad(e, parameters, retain_graph=True)]) for e in flat]
    step = torch.linalg.solve(torch.stack(rows), flat.detach())
    with torch.no_grad():
        for p, s in zip(parameters, step.split(sizes), strict=True):
            p.sub_(s.view_as(p))


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
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        EWC(**settings)


def test_a_sample_of_the_examples():
    model, (x, y) = nn.Linear(4, 3), problem(0)
    few, many = EWC(1.0, examples=10, labels="exact"), EWC(1.0, examples=1000, labels="exact")
    few.end_task(model, (x, y))
    many.end_task(model, (x, y))
    whole = fisher(model, (x, y)).values["weight"]
    torch.testing.assert_close(many.quadratic.form.values["weight"], whole)
    assert not torch.allclose(few.quadratic.form.values["weight"], whole)


def test_the_cap_survives_saving():
    method = EWC(1.0, cap=0.01)
    model, _ = sequence(method)
    before = method.penalty(model)
    again = EWC(1.0, cap=0.01)
    again.load_state_dict(method.state_dict())
    assert torch.equal(before, again.penalty(model))


def test_the_state_of_another_method_is_refused_by_a_sentence():
    other = ER(5)
    other.tasks = 1
    with pytest.raises(ValueError, match="does not match EWC"):
        EWC().load_state_dict(other.state_dict())


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_a_layer_that_is_frozen_at_first_and_thawed_later(structure, double):
    """The sum of both tasks' forms around their places, each over the parameters it was taken of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    method, tasks = EWC(2.0, structure=structure), []
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p) * p.requires_grad)
        x = torch.randn(20, 3)
        tasks.append((fisher(model, x, structure=structure), snapshot(model)))
        method.end_task(model, x)
    moved = {n: 0.5 * torch.randn_like(p) for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(moved[n])
    now = dict(model.named_parameters())
    right = sum(form.quad({n: now[n] - at[n] for n in at}) for form, at in tasks)  # ½ · strength 2
    torch.testing.assert_close(method.penalty(model), right)


def test_a_model_that_ends_in_a_softmax_is_told():
    """Of a sure model the Fisher information is far too small; after a LogSoftmax it is that of the logits."""
    torch.manual_seed(0)
    logits = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        logits[2].weight.mul_(20)
    x = torch.randn(50, 4, dtype=torch.double)
    truth = fisher(logits, x)
    same = fisher(nn.Sequential(*logits, nn.LogSoftmax(-1)), x)
    for name, value in truth.values.items():
        torch.testing.assert_close(same.values[name], value)
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        EWC().end_task(nn.Sequential(*logits, nn.Softmax(-1)), x)


@pytest.mark.parametrize("labels", ["exact", "true"])
def test_labels_without_an_output_are_refused_with_advice(labels):
    y = torch.tensor([0, 7, -100, 1])
    with pytest.raises(ValueError, match=r"from 0 to 7 but the model has only 3 outputs .* build it with more outputs"):
        EWC(labels=labels).end_task(nn.Linear(4, 3), (torch.randn(4, 4), y))
