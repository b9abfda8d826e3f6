import copy

import pytest
import torch
from torch import nn

import everlearn
from everlearn import Batch, Gaussian, GenerativeReplay, Method, Task, nets, streams, train
from everlearn.core.task import allowed_classes
from everlearn.methods.regularization.teacher import teacher_outputs
from everlearn.nets.vae import VAE


def begin_third_task(classes, scenario, targets="hard"):
    """A model in its third task, with a teacher that has learned two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6))
    method = GenerativeReplay(targets=targets, hidden=8, latent=3)
    for t in range(3):
        x = torch.rand(6, 4)
        y = torch.tensor([classes[t][0], classes[t][1]] * 3)
        task = Task((x, y), id=t, allowed=allowed_classes(scenario, classes, t))
        method.begin_task(model, task)
        if t < 2:
            method.end_task(model, task)
    with torch.no_grad():
        model[1].weight += torch.randn(6, 4)
    return model, method, next(task.examples(6))


def test_minus_elbo_against_torch_distributions():
    torch.manual_seed(0)
    vae = VAE((4,), hidden=8, latent=3)
    x = torch.rand(5, 4).round()
    noise = torch.randn(5, 3)
    mean, log_variance = vae.posterior(vae.encoder(x)).chunk(2, 1)
    q = torch.distributions.Normal(mean, (log_variance / 2).exp())
    z = mean + (log_variance / 2).exp() * noise
    p = torch.distributions.Bernoulli(logits=vae.decoder(z))
    kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(vae.loss(x, noise), (-p.log_prob(x).sum() + kl) / x.numel())


@pytest.mark.parametrize("pixels", [True, False])
def test_a_generator_learns_its_inputs(pixels):
    torch.manual_seed(0)
    vae = VAE((8,), pixels, hidden=32, latent=2)
    pattern = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-2)
    for _ in range(200):
        x = (pattern + 0.05 * torch.randn(32, 8)).clamp(0, 1) if pixels else pattern + 0.05 * torch.randn(32, 8)
        optimizer.zero_grad()
        vae.loss(x, torch.randn(32, 2)).backward()
        optimizer.step()
    assert (vae.sample(torch.randn(50, 2)).mean(0) - pattern).abs().max() < 0.2


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_hard_targets_are_the_old_models_labels(scenario):
    classes = [[0, 1], [2, 3], [4, 5]]
    model, method, batch = begin_third_task(classes, scenario)
    x = torch.rand(7, 4)
    outputs = None
    outputs = model(x)
    target = torch.func.functional_call(model, method.teacher["state"], (x,))
    if scenario == "task":
        expected = sum(nn.functional.cross_entropy(outputs[:, c], target[:, c].argmax(1)) for c in classes[:2]) / 2
    else:
        expected = nn.functional.cross_entropy(outputs, target[:, :4].argmax(1))
    torch.testing.assert_close(
        method._replay_loss(batch, x, teacher_outputs(model, method.teacher, x), model(x)), expected
    )


def test_soft_targets_are_the_old_models_probabilities():
    model, method, batch = begin_third_task([[0, 1], [2, 3], [4, 5]], "class", "soft")
    x = torch.rand(7, 4)
    target = torch.func.functional_call(model, method.teacher["state"], (x,))
    log_q = (model(x) / 2).log_softmax(1)[:, :4]
    expected = 4 * nn.functional.kl_div(log_q, (target[:, :4] / 2).softmax(1), reduction="batchmean")
    torch.testing.assert_close(
        method._replay_loss(batch, x, teacher_outputs(model, method.teacher, x), model(x)), expected
    )


def test_weights_follow_the_number_of_tasks():
    model, method, batch = begin_third_task([[0, 1], [2, 3], [4, 5]], "class")
    rows = []
    model.register_forward_hook(lambda module, args, outputs: rows.append(len(outputs)) if module.training else None)
    twin = copy.deepcopy(method)
    loss, outputs = method.task_loss(model, batch)
    assert rows == [2 * len(batch)]
    torch.testing.assert_close(outputs, model(batch.x))

    # The generator draws x′ first, then noise for the new inputs, then for x′.
    x = twin._generate_inputs(batch)
    noise = twin._draw_noise(len(batch), batch.x)
    replay_noise = twin._draw_noise(len(x), x)
    replay_loss = twin._replay_loss(batch, x, teacher_outputs(model, twin.teacher, x), model(x))
    generator_loss = twin._generator.loss(batch.x, noise) / 3 + twin._generator.loss(x, replay_noise) * 2 / 3
    torch.testing.assert_close(loss, batch.loss(model(batch.x)) / 3 + replay_loss * 2 / 3 + generator_loss)


def test_the_old_generator_does_not_change():
    stream = streams.digits("class")
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = GenerativeReplay(hidden=16, latent=4)
    train(model, method, stream[0], iterations=3)
    old_weights = {n: v.clone() for n, v in method.next_teacher["generator"].items()}
    train(model, method, stream[1], iterations=3)
    assert all(torch.equal(v, method.teacher["generator"][n]) for n, v in old_weights.items())
    assert any(not torch.equal(v, method.generator_weights[n]) for n, v in old_weights.items()), (
        "the current generator is trained"
    )


@pytest.mark.slow
def test_old_digits_are_remembered_without_stored_examples():
    stream = streams.digits("class", tasks=2)
    accuracy = {}
    for method in (Method(), GenerativeReplay(hidden=200, latent=20)):
        result = everlearn.run(nets.mlp, method, stream, epochs=30, batch_size=32, seed=0)
        accuracy[type(method)] = result.average_accuracy
    assert accuracy[GenerativeReplay] > accuracy[Method] + 0.2


def test_vectors_are_accepted_and_regression_is_refused():
    x = torch.randn(40, 3)
    tasks = [Task((x + t, (x + t).sum(1, keepdim=True)), id=t, likelihood=Gaussian()) for t in range(2)]
    model = nn.Linear(3, 1)
    method = GenerativeReplay(hidden=16, latent=2, targets="hard")
    train(model, method, tasks[0], epochs=1)
    assert not method.pixels
    with pytest.raises(TypeError, match="needs classes"):
        train(model, method, tasks[1], epochs=1)


def test_inputs_outside_the_range_of_the_first_task_raise():
    method = GenerativeReplay(hidden=8, latent=2)
    model = nn.Linear(3, 2)
    y = torch.zeros(4, dtype=torch.long)
    method.begin_task(model, (torch.rand(4, 3), y))
    with pytest.raises(ValueError, match="was built for inputs in"):
        method.loss(model, Batch(5 * torch.rand(4, 3), y))


def test_a_mid_task_state_has_the_current_generator():
    method = GenerativeReplay(hidden=8, latent=2)
    model = nn.Linear(3, 2)
    data = torch.rand(4, 3), torch.zeros(4, dtype=torch.long)
    method.begin_task(model, data)
    with torch.no_grad():
        method.parameters()[0].add_(1.0)
    loaded = GenerativeReplay(hidden=8, latent=2)
    loaded.load_state_dict(method.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(method.parameters(), loaded.parameters(), strict=True))


def test_integer_inputs_raise():
    with pytest.raises(TypeError, match="tensors of floating-point numbers"):
        GenerativeReplay().begin_task(
            nn.Linear(2, 2), (torch.ones(4, 2, dtype=torch.long), torch.zeros(4, dtype=torch.long))
        )


def test_a_loop_without_begin_task_raises():
    with pytest.raises(ValueError, match=r"no generator yet: call begin_task\(model, task\)"):
        GenerativeReplay().end_task(nn.Linear(2, 2), None)


def test_nothing_is_replayed_in_the_first_task():
    method = GenerativeReplay(hidden=8, latent=2)
    model = nn.Linear(3, 2)
    batch = Batch(torch.rand(4, 3), torch.zeros(4, dtype=torch.long))
    method.begin_task(model, (batch.x, batch.y))
    (gradient,) = torch.autograd.grad(batch.loss(model(batch.x)), model.weight)
    method.loss(model, batch).backward()
    torch.testing.assert_close(model.weight.grad, gradient)
    assert all(p.grad is not None for p in method.parameters())
