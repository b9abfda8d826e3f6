import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import everlearn
from everlearn import L2, Gaussian, LwF, Method, Task, evaluate, nets, run, streams, train

X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def linear():
    torch.manual_seed(0)
    return nn.Linear(5, 2)


def equal_parameters(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_training_equals_manual_loop():
    a = linear()
    b = linear()
    trained = train(a, Method(), Task((X, Y), id=2), optimizer=adam, epochs=3, batch_size=10, seed=7)
    assert trained.steps == 21
    optimizer = adam(b.parameters())
    for batch in Task((X, Y), id=2).batches(10, epochs=3, seed=7):
        optimizer.zero_grad()
        nn.functional.cross_entropy(b(batch.x), batch.y).backward()
        optimizer.step()
    assert equal_parameters(a, b)


def test_accumulation_equals_step_of_joint_batch():
    a = linear().double()
    b = linear().double()
    for model, parts in ((a, 1), (b, 3)):
        method = L2(0.5)
        method.end_task(model, None)
        train(model, method, (X.double(), Y), epochs=2, batch_size=10, accumulate=parts)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_clipping_bounds_the_step():
    model = linear()
    weight_before = model.weight.detach().clone()
    train(
        model,
        Method(),
        (X * 1000, Y),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        iterations=1,
        clip=0.01,
    )
    assert 0 < (model.weight - weight_before).norm() <= 0.01 + 1e-6


def test_scheduler_steps_with_optimizer():
    rates = []

    class Records(Method):
        def after_step(self, model):
            rates.append(optimizer.param_groups[0]["lr"])

    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    planned = []

    def schedule(opt, steps):
        planned.append(steps)
        return torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, steps)

    train(model, Records(), (X, Y), optimizer=optimizer, epochs=2, batch_size=32, scheduler=schedule)
    assert planned == [4] and rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_bfloat16_trains_in_float32_weights():
    model = linear()
    train(model, Method(), (X, Y), optimizer=sgd, epochs=100, precision="bfloat16")
    assert model.weight.dtype == torch.float32
    assert evaluate(model, Method(), [Task(None, (X, Y))])[0] > 0.85


def test_kept_optimizer_receives_new_parameters():
    class Grows(Method):
        def begin_task(self, model, task):
            everlearn.surgery.heads.grow_output(model, model[0].out_features + 1)

    model = nn.Sequential(nn.Linear(5, 2))
    first = train(model, Grows(), (X, Y), optimizer=adam)
    second = train(model, Grows(), (X, Y), optimizer=first.optimizer)
    assert second.optimizer is first.optimizer
    optimized = {id(p) for group in second.optimizer.param_groups for p in group["params"]}
    assert all(id(p) in optimized for p in model.parameters())


def test_given_optimizer_trains_only_its_parameters():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    frozen_weight = model[0].weight.detach().clone()
    train(model, Method(), (X, Y), optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert torch.equal(frozen_weight, model[0].weight), "parameters outside the optimizer are not trained"


def test_gradients_outside_optimizer_do_not_accumulate():
    norms = []

    class Records(Method):
        def before_step(self, model):
            norms.append(model[0].weight.grad.norm().item())

    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    train(model, Records(), (X, Y), optimizer=lambda parameters: torch.optim.SGD(parameters[2:], lr=0.0), epochs=20)
    assert max(norms) < 2 * min(norms)


def test_scheduler_restarts_with_every_task(small_net, small_stream):
    rates = []

    def schedule(optimizer, steps):
        rates.append(optimizer.param_groups[0]["lr"])
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    run(small_net, Method(), small_stream(), scheduler=schedule, keep_optimizer=True)
    assert rates == [0.001] * 3
    with pytest.raises(ValueError, match="too short for a scheduler"):
        run(small_net, Method(), streams.online_digits(), scheduler=schedule)


def test_evaluation_uses_allowed_classes_of_tasks():
    stream = streams.digits("task")
    model = nets.mlp(64, 10)
    for task in stream:
        train(model, Method(), task, epochs=10, batch_size=32)
    assert np.mean(evaluate(model, Method(), stream.test_tasks)) > 0.9
    assert evaluate(model, Method(), stream.test_tasks) == evaluate(
        model, Method(), stream.test_tasks, allowed=stream[4].allowed
    )


def test_test_data_need_no_task():
    model = linear()
    expected = evaluate(model, Method(), [Task(test=(X, Y))])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=10)
    for data in ([(X, Y)], (X, Y), loader, [loader], Task(test=(X, Y))):
        assert evaluate(model, Method(), data) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": Method}, "method must be a method such as"),
        ({"stream": [1]}, "stream must be a Stream, got a list"),
        ({"optimizer": "adam"}, "optimizer must be a function"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"split": "tset"}, "split: got 'tset', allowed: 'train', 'valid', 'test'"),
        ({"make_model": lambda: None}, "must return a torch.nn.Module, it returned a NoneType"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    arguments = {"make_model": nets.mlp, "method": Method(), "stream": streams.digits(), **change}
    with pytest.raises((TypeError, ValueError), match=message):
        run(**arguments)


def test_stream_of_loaders_infers_input_shape():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=10)
    stream = streams.from_tasks([(loader, loader)], scenario="domain", outputs=2)
    assert stream.inputs == (5,)
    run(nets.mlp, Method(), stream)
    unknown = streams.from_tasks([((b for b in [(X, Y)]), (X, Y))], scenario="domain", outputs=2)
    with pytest.raises(ValueError, match="The shape of this stream's inputs is unknown"):
        run(nets.mlp, Method(), unknown)


def test_models_and_batches_that_do_not_fit_are_explained():
    class Twice(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="must give a tensor of outputs, it gave a tuple"):
        train(nn.Sequential(nn.Linear(5, 2), Twice()), Method(), (X, Y))
    norm = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="batch of one example, which BatchNorm cannot learn from"):
        train(norm, Method(), (X, Y), batch_size=63)
    with pytest.raises(TypeError, match="float64 inputs but the model's weights are float32"):
        run(
            lambda: nn.Linear(5, 2),
            Method(),
            streams.from_tasks([((X.double(), Y), (X.double(), Y))], scenario="domain"),
        )


def test_token_micro_batches_count_tokens():
    x, y = torch.randn(6, 3, 5, dtype=torch.double), torch.randint(2, (6, 3))
    y[0] = -100
    y[1, 1:] = -100
    models = [linear().double() for _ in range(2)]
    for model, parts in zip(models, (1, 6), strict=True):
        train(model, Method(), (x, y), batch_size=6, accumulate=parts)
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keep", [False, True])
def test_optimizers_are_fresh_per_task_unless_kept(keep, small_net, small_stream):
    optimizers = []

    def factory(parameters):
        optimizers.append(len(parameters))
        return torch.optim.Adam(parameters, lr=0.01)

    run(small_net, Method(), small_stream(), optimizer=factory, keep_optimizer=keep)
    assert len(optimizers) - 1 == (1 if keep else 3), "one more is created for the configuration record"


def test_evaluation_restores_training_mode():
    model = nn.Sequential(nn.Linear(5, 2), nn.Dropout(), nn.BatchNorm1d(2))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    statistics = model[2].running_mean.clone()
    evaluate(model, Method(), [Task(None, (X, Y))])
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(statistics, model[2].running_mean)


def test_all_tasks_are_evaluated_after_each_task():
    stream = streams.digits("task")
    result = run(nets.mlp, Method(), stream, epochs=3, batch_size=32)
    assert result.accuracy.shape == (5, 5) and len(result.initial_accuracy) == 5
    assert (np.diagonal(result.accuracy) > 0.8).all()
    assert (result.accuracy[0, 1:] > 0).all()


def test_future_classes_have_zero_accuracy_in_class_incremental_learning():
    result = run(nets.mlp, Method(), streams.digits("class"), epochs=1)
    assert (result.accuracy[np.triu_indices(5, 1)] == 0).all()


def test_finetuning_forgets_and_joint_training_does_not():
    stream = streams.digits("class")
    finetuning = run(nets.mlp, Method(), stream, epochs=10, batch_size=32)
    joint = run(nets.mlp, Method(), stream.joint(), epochs=10, batch_size=32)
    assert 0.15 < finetuning.average_accuracy < 0.25 and finetuning.forgetting > 0.9
    assert joint.average_accuracy > 0.95 and joint.accuracy.shape == (1, 5)
    assert math.isnan(joint.forgetting) and finetuning.intransigence(joint) < 0.05


def test_chunks_of_task_share_optimizer_and_evaluation(small_net):
    optimizers = []

    def factory(parameters):
        optimizers.append(1)
        return torch.optim.SGD(parameters, lr=0.1)

    stream = streams.online_digits("class")
    result = run(small_net, Method(), stream, optimizer=factory)
    assert len({tuple(next(task.batches(10)).x.flatten().tolist()) for task in stream}) == len(stream)
    assert result.accuracy.shape == (5, 5) and len(optimizers) - 1 == 5


def test_model_and_batches_depend_on_seed_but_not_on_method(small_net, small_stream):
    records = {}
    for name, method, seed in (("a", Method(), 0), ("b", L2(), 0), ("c", Method(), 1)):
        initial_models = []

        def make_model(inputs, outputs, models=initial_models):
            model = small_net(inputs, outputs)
            models.append(copy.deepcopy(model))
            return model

        stream = small_stream()
        inputs_log = []
        for task in stream:
            task.transform = lambda x, inputs_log=inputs_log: inputs_log.append(x) or x
        run(make_model, method, stream, epochs=2, batch_size=32, seed=seed)
        records[name] = initial_models[0], torch.cat(inputs_log)
    assert equal_parameters(records["a"][0], records["b"][0]) and torch.equal(records["a"][1], records["b"][1])
    assert not equal_parameters(records["a"][0], records["c"][0]) and not torch.equal(records["a"][1], records["c"][1])


def test_module_is_copied_and_factory_without_arguments_is_called():
    stream = streams.digits("domain")
    model = nets.mlp(64, 2, hidden=(8,))
    original = copy.deepcopy(model)
    run(model, Method(), stream)
    assert equal_parameters(model, original)
    run(lambda: nets.mlp(64, 2, hidden=(8,)), Method(), stream)
    with pytest.raises(TypeError, match="needs inputs, outputs, channels: give a function of"):
        run(lambda inputs, outputs, channels: None, Method(), stream)


def test_evaluation_on_validation_data(small_net):
    stream = streams.digits("class", valid=0.2)
    result = run(small_net, Method(), stream, split="valid")
    assert result.config["training"]["split"] == "valid"
    with pytest.raises(ValueError, match="task 0 has no valid data"):
        run(small_net, Method(), streams.digits("class"), split="valid")


def test_model_initialized_by_numpy_is_reproducible():
    def make_model():
        model = nn.Linear(64, 10)
        model.weight.data = torch.from_numpy(np.random.randn(10, 64)).float()
        return nn.Sequential(nn.Flatten(), model)

    numpy_state = np.random.get_state()[1].copy()
    runs = [run(make_model, Method(), streams.digits("class")).accuracy for _ in range(2)]
    assert (runs[0] == runs[1]).all() and (np.random.get_state()[1] == numpy_state).all()


def test_numpy_integer_as_seed(small_net, small_stream):
    runs = [run(small_net, Method(), small_stream(), seed=seed).accuracy for seed in (3, np.int64(3))]
    assert (runs[0] == runs[1]).all()


def test_regression_is_learned():
    x = torch.randn(200, 3)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.01 * torch.randn(200, 1)
    stream = streams.from_tasks([((x, y), (x, y))], scenario="domain", likelihood=Gaussian())
    result = run(lambda: nn.Linear(3, 1), Method(), stream, optimizer=sgd, epochs=20, batch_size=20)
    assert -1e-3 < result.average_accuracy <= 0 and "average minus squared error -" in str(result)


@pytest.mark.parametrize("chunk", [None, 40])
def test_joint_training_takes_steps_of_all_tasks(chunk, small_net, small_stream):
    class Steps(Method):
        num_steps = 0

        def after_step(self, model):
            Steps.num_steps += 1

    stream = small_stream("class") if chunk is None else streams.online(small_stream("class"), chunk=chunk)
    num_steps = []
    for training_stream in (stream, stream.joint()):
        Steps.num_steps = 0
        result = run(small_net, Steps(), training_stream, iterations=7)
        num_steps.append(Steps.num_steps)
    assert num_steps == [7 * len(stream)] * 2
    assert result.config["training"]["iterations"] == 7 * len(stream)
    assert result.config["stream"]["merged"] == len(stream)
    steps_before = Steps.num_steps
    train(small_net(64, 6), Steps(), stream.joint()[0], iterations=7)  # a single task takes the given number of steps
    assert Steps.num_steps - steps_before == 7


def test_costs_are_counted(small_net, small_stream):
    result = run(small_net, L2(), small_stream())
    assert set(result.cost["seconds"]) == {"train", "consolidate", "evaluate"} and result.seconds > 0
    parameters = sum(p.numel() for p in small_net(64, 6).parameters())
    assert result.cost["parameters"] == [parameters] * 3
    assert result.cost["state_bytes"] == [2 * 4 * parameters] * 3


def test_peak_memory_of_run():
    x, y = torch.rand(64, 10), torch.arange(64) % 2
    stream = streams.from_tasks([((x, y), (x, y))], scenario="domain")
    wide = run(lambda: nets.mlp(10, 2, hidden=(500_000,)), Method(), stream, optimizer=sgd)
    assert wide.cost["peak_memory"] > 4 * 5_000_000, "at least the gradient of all weights"


def test_progress_bars_show_loss_on_demand(capsys):
    train(linear(), Method(), Task((X, Y), id=0), iterations=40, progress=True)
    assert "task 0" in capsys.readouterr().err
    train(linear(), Method(), (X, Y), iterations=2)
    assert capsys.readouterr().err == "", "not on a terminal"


@pytest.mark.parametrize("method_class", [Method, LwF])
def test_accumulated_gradients_ignore_unlabeled_examples(method_class):
    """Micro-batches with unequal shares of ignored labels take the step of the joint batch."""
    x, y = torch.randn(16, 5).double(), torch.arange(16) % 2
    y[8:15] = -100
    models = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = nn.Linear(5, 2).double()
        method = method_class()
        train(model, method, Task([(x[:8], y[:8])], id=0), optimizer=sgd)
        train(model, method, Task([(x, y)], id=1), epochs=3, optimizer=sgd, accumulate=parts)
        models.append(model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_examples_whose_labels_are_ignored_are_not_scored():
    model = linear()
    expected = (model(X).argmax(1) == Y).float()
    y = torch.where(torch.arange(64) < 20, -100, Y)
    assert evaluate(model, Method(), Task(test=(X, y)), batch_size=7)[0] == pytest.approx(expected[20:].mean().item())


@pytest.mark.parametrize("parts", [1, 2])
def test_batch_without_labels_is_reported(parts):
    y = torch.full_like(Y, -100)
    with pytest.raises(FloatingPointError, match="all labels of the batch are -100"):
        train(linear(), Method(), [(X, y)], accumulate=parts)
