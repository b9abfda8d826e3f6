"""Invalid input raises one sentence that says what to do."""

import pytest
import torch
from torch import nn

from everlearn import EWC, L2, MAS, Gaussian, LwF, Method, Task, evaluate, nets, run, streams, train

X, Y = torch.rand(8, 4), torch.arange(8) % 2


def with_nan():
    x = X.clone()
    x[3, 1] = float("nan")
    return x


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ((X[:0], Y[:0]), {}, "the task has no examples to train on"),
        (
            (X, Y),
            {"epochs": 0},
            "epochs must be a whole number of at least 1, got 0; to test a model without training it use evaluate",
        ),
        ((X, Y), {"iterations": 0}, "iterations must be a whole number of at least 1"),
        ((X, Y), {"batch_size": 0}, "batch_size must be a whole number"),
        ((X, Y), {"accumulate": 0}, "accumulate must be a whole number"),
        ((X, Y), {"precision": "float16"}, "precision: got 'float16', allowed: 'float32', 'bfloat16'"),
        ((X, Y), {"epochs": 1.5}, "epochs must be a whole number of at least 0, got 1.5"),
        ((X, Y), {"clip": -1.0}, "clip must be above 0"),
        ((X, Y), {"clip": float("inf")}, "clip must be above 0 and finite, got inf; None for no clipping"),
        ((X, Y[:, None]), {}, r"outputs of shape \(8, 2\) for labels of shape \(8, 1\): use y.squeeze"),
        ((X[:, :3], Y), {}, r"cannot take the inputs of the task \(float32 of shape \(8, 3\)\)"),
        (((X * 255).to(torch.uint8), Y), {}, r"uint8 of shape \(8, 4\)\): convert them, x.float\(\) / 255"),
        ([(X, Y, Y)], {}, r"must be a pair \(x, y\) or a dict with labels, got 3 parts"),
        ([(X[0], Y[0])], {}, "one example at a time, not in batches"),
        ((X, Y + 2), {}, "Labels run from 2 to 3 but the model has only 2 outputs"),
        ((X, Y - 1), {}, "has the label -1: classes are numbered from 0"),
        ([], {}, "no examples to train on"),
        ((X, Y.float()), {}, "must be integers"),
        ((X.double(), Y), {}, r"gives float64 inputs but the model's weights are float32: convert the inputs with"),
    ],
)
def test_invalid_data_and_settings_are_refused(data, settings, message):
    model = nn.Linear(4, 2)
    weight_before = model.weight.detach().clone()
    with pytest.raises((ValueError, TypeError), match=message):
        train(model, Method(), data, **settings)
    assert torch.equal(model.weight, weight_before)


def test_scheduler_needs_known_length():
    with pytest.raises(ValueError, match="give iterations"):
        train(nn.Linear(4, 2), Method(), (batch for batch in [(X, Y)]), scheduler=lambda optimizer, steps: None)


def test_labels_that_scenario_does_not_allow():
    stream = streams.from_tasks([((X, Y), (X, Y))], scenario="class", classes=[[0, 2]])
    with pytest.raises(
        ValueError, match=r"has labels \[1\] that its scenario does not allow: the table allows it \[0, 2\]"
    ):
        train(nn.Linear(4, 3), Method(), stream[0])


def test_model_with_too_few_outputs():
    with pytest.raises(ValueError, match=r"gives 5 outputs but the stream has 10 classes: build it with outputs=10"):
        run(lambda: nets.mlp(64, 5), Method(), streams.digits("class"))


def test_infinite_loss_names_task_epoch_and_step_and_keeps_weights():
    model = nn.Linear(4, 2)

    class Explodes(Method):
        steps = 0

        def penalty(self, model, batch=None, outputs=None):
            self.steps += 1
            return torch.tensor(float("inf") if self.steps == 4 else 0.0)

        def after_step(self, model):
            self.kept = model.weight.detach().clone()

    method = Explodes()
    with pytest.raises(FloatingPointError, match="The loss is inf in task 5, epoch 2, step 4: lower the learning rate"):
        train(model, method, Task((X, Y), id=5), epochs=3, batch_size=3)
    assert torch.equal(model.weight, method.kept)


def test_nan_inputs_are_reported_and_counted():
    with pytest.raises(FloatingPointError, match="the batch has NaN or infinite inputs: clean the data"):
        train(nn.Linear(4, 2), Method(), [(with_nan(), Y)])
    with pytest.raises(FloatingPointError, match=r"1 of 8 examples \(first: example 3\) has NaN or infinite inputs"):
        train(nn.Linear(4, 2), Method(), (with_nan(), Y))


def test_other_causes_of_infinite_loss():
    targets = torch.full((8, 1), float("nan"))
    with pytest.raises(FloatingPointError, match="NaN or infinite targets"):
        train(nn.Linear(4, 1), Method(), Task((X, targets), likelihood=Gaussian()))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    stream = streams.from_tasks([(loader, loader)], scenario="class", classes=[[0, 2]])
    with pytest.raises(FloatingPointError, match="labels that the task's table of allowed classes does not name"):
        train(nn.Linear(4, 3), Method(), stream[0])

    class Breaks(Method):
        def after_step(self, model):
            with torch.no_grad():
                model.weight.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="no longer finite since the step before"):
        train(nn.Linear(4, 2), Breaks(), (X, Y), epochs=2)


def test_invalid_data_are_not_evaluated():
    model = nn.Linear(4, 2)
    for test, message in (
        ((with_nan(), Y), "its inputs contain NaN"),
        ((X, Y + 2), "tested on class 3 but the model has only 2"),
    ):
        with pytest.raises((FloatingPointError, ValueError), match=message):
            evaluate(model, Method(), [Task(None, test)])
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="weights are no longer finite"):
        evaluate(model, Method(), [Task(None, (X, Y))])


def test_frozen_model_and_optimizer_with_closure_are_refused():
    with pytest.raises(ValueError, match="nothing to train: every parameter of the model is frozen"):
        train(nn.Linear(4, 2).requires_grad_(False), Method(), (X, Y))
    with pytest.raises(TypeError, match="LBFGS evaluates the model several times per step"):
        train(nn.Linear(4, 2), Method(), (X, Y), optimizer=lambda parameters: torch.optim.LBFGS(parameters))


def test_exhausted_generator_is_reported_with_epoch_from_1():
    with pytest.raises(ValueError, match="no examples to train on in epoch 2; a generator"):
        train(nn.Linear(4, 2), Method(), iter([(X, Y)]), epochs=2)


@pytest.mark.parametrize("method_class", [EWC, MAS, L2, LwF])
def test_model_on_meta_device_is_refused(method_class):
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    for call in (
        lambda: method_class().end_task(model, (X, Y)),
        lambda: train(model, method_class(), (X, Y), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        lambda: evaluate(model, method_class(), [(X, Y)]),
        lambda: method_class().attach(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(ValueError, match=r"on the meta device, where parameters have shapes but no values"):
            call()
