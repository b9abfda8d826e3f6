"""Bad input gets one sentence that says what to do."""

import pytest
import torch
from torch import nn

from everlearn import Method, Task, nets, run, streams, train

X, Y = torch.rand(8, 4), torch.arange(8) % 2


def with_nan():
    x = X.clone()
    x[3, 1] = float("nan")
    return x


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ((X[:0], Y[:0]), {}, "the task has no examples to train on"),
        ((X, Y), {"epochs": 0}, "epochs must be at least 1, got 0; to test a model without training it use evaluate"),
        ((X, Y), {"iterations": 0}, "iterations must be at least 1"),
        ((X, Y), {"batch_size": 0}, "batch_size must be at least 1"),
        ((X, Y), {"accumulate": 0}, "accumulate must be at least 1"),
        ((X, Y), {"precision": "float16"}, "precision: got 'float16', allowed: 'float32', 'bfloat16'"),
        ((with_nan(), Y), {}, r"NaN or infinite inputs in 1 of 8 examples \(first: example 3\): drop or fill"),
        ((X, Y + 2), {}, "Labels run from 2 to 3 but the model has only 2 outputs"),
        ((X, Y - 1), {}, "has the label -1: classes are numbered from 0"),
        ([], {}, "no examples to train on"),
        ((X, Y.float()), {}, "must be integers"),
        ((X.double(), Y), {}, r"gives float64 inputs but the model's weights are float32: convert the inputs with"),
    ],
)
def test_one_sentence(data, settings, message):
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    with pytest.raises((ValueError, TypeError), match=message):
        train(model, Method(), data, **settings)
    assert torch.equal(model.weight, before)


def test_a_scheduler_needs_a_known_length():
    with pytest.raises(ValueError, match="give iterations"):
        train(nn.Linear(4, 2), Method(), (b for b in [(X, Y)]), scheduler=lambda optimizer, steps: None)


def test_labels_the_table_does_not_allow():
    stream = streams.from_tasks([((X, Y), (X, Y))], scenario="class", classes=[[0, 2]])
    with pytest.raises(
        ValueError, match=r"has labels \[1\] that its scenario does not allow: the table allows it \[0, 2\]"
    ):
        train(nn.Linear(4, 3), Method(), stream[0])


def test_a_model_too_narrow_for_the_stream():
    with pytest.raises(ValueError, match=r"gives 5 outputs but the stream has 10 classes: build it with outputs=10"):
        run(lambda: nets.mlp(64, 5), Method(), streams.digits("class"))


def test_a_loss_that_is_no_number_names_task_epoch_and_step_and_saves_the_weights():
    model = nn.Linear(4, 2)

    class Explodes(Method):
        steps = 0

        def penalty(self, model, batch=None, out=None):
            self.steps += 1
            return torch.tensor(float("inf") if self.steps == 4 else 0.0)

        def after_step(self, model):
            self.kept = model.weight.detach().clone()

    method = Explodes()
    with pytest.raises(FloatingPointError, match="The loss is inf in task 5, epoch 1, step 4: lower the learning rate"):
        train(model, method, Task((X, Y), id=5), epochs=3, batch_size=3)
    assert torch.equal(model.weight, method.kept)


def test_nan_inputs_from_a_loader_are_blamed():
    with pytest.raises(FloatingPointError, match="the batch has NaN or infinite inputs: clean the data"):
        train(nn.Linear(4, 2), Method(), [(with_nan(), Y)])
