"""Checks of the deployed model and of methods that predict with more than its weights."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import everlearn
from everlearn import ER, EWC, METHODS, Chain, LwF, Method, Task
from everlearn.surgery.feature_head import restore_feature_head
from tests.helpers import make_method
from tests.updating.deployments import digits, make_model, read_files, run_update


def test_changed_weights_need_confirmation(deployment):
    run_update(digits(0, 1, shift=1))
    safetensors.torch.save_file(make_model().state_dict(), "model.safetensors")
    with pytest.raises(ValueError, match="accept_weights=True"):
        run_update(digits(2, 3))
    outcome = run_update(digits(2, 3), accept_weights=True)
    assert outcome.number == 2 and "as requested" in str(outcome)
    assert run_update(digits(2, 3, shift=1)).number == 3


def test_weights_of_another_state_folder_are_refused(deployment):
    run_update(digits(0, 1, shift=1))
    with pytest.raises(ValueError, match="written by update 1, whose state is not in other"):
        run_update(digits(2, 3), state="other")
    Path("state/current.json").unlink()  # state is lost, but the weights are of update 1
    with pytest.raises(ValueError, match="written by update 1"):
        run_update(digits(2, 3))
    assert run_update(digits(2, 3), state="other", accept_weights=True).number == 1


@pytest.mark.parametrize("name", [n for n, kind in METHODS.items() if not kind.deployable])
def test_methods_that_are_not_deployable_are_refused(name, deployment):
    with pytest.raises(ValueError, match="predicts with more than the model's weights"):
        run_update(digits(0, 1), make_method(name))


@pytest.mark.parametrize("name", METHODS)
def test_deployable_flag_is_correct(name):
    """Compare predictions of the method with those of a new model that loads only the weights."""
    model = make_model()
    method = make_method(name)
    for number, classes in enumerate([(0, 1), (2, 3)]):
        everlearn.train(model, method, Task(digits(*classes, shift=number)[0], id=number), epochs=2, batch_size=32)
    x = digits(0, 1, 2, 3)[1][0]
    plain_model = make_model()
    restore_feature_head(plain_model, model.state_dict())
    plain_model.load_state_dict(safetensors.torch.load(safetensors.torch.save(model.state_dict())))
    with torch.no_grad():
        difference = (method.predict(model, x) - plain_model.eval()(x)).abs().max()
    assert (difference == 0) if method.deployable else (difference > 0.01)


def test_chain_is_deployable_if_all_its_methods_are():
    assert (ER() + EWC()).deployable and Chain(LwF()).deployable
    assert not (EWC() + METHODS["packnet"]()).deployable


class NegatingHook(Method):
    """Predicts through a hook, but claims to be deployable."""

    def begin_task(self, model, task):
        model[1].register_forward_hook(lambda layer, args, output: -output)


class EquivalentPredict(Method):
    """Overrides predict with an equivalent computation."""

    def predict(self, model, x, task=None):
        return 2 * super().predict(model, x, task) / 2


def test_method_that_predicts_through_hooks_is_refused(deployment):
    files_before = read_files(deployment)
    for dry_run in (True, False):
        with pytest.raises(
            ValueError, match=r"predicts differently from a model that the factory makes .* deployable = False"
        ):
            run_update(digits(0, 1, shift=1), NegatingHook(), dry_run=dry_run)
    assert read_files(deployment) == files_before
    assert run_update(digits(0, 1, shift=1), EquivalentPredict()).accepted, "predictions are compared, not methods"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: 3, "must return a torch.nn.Module, it returned a int"),
        (make_model(), "must be given as a function that makes it"),
        (lambda: nn.Sequential(make_model(), nn.Unflatten(1, (2, 2))), "does not fit the model"),
    ],
)
def test_invalid_factories_are_refused(factory, message, deployment):
    with pytest.raises((TypeError, ValueError), match=message):
        run_update(digits(0, 1), factory=factory)


def test_output_layer_that_cannot_grow_is_reported(deployment):
    class Headless(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 8)

        def forward(self, x):
            return self.conv(x).flatten(1)

    safetensors.torch.save_file(Headless().state_dict(), "model.safetensors")
    assert run_update(digits(0, 1), factory=Headless).accepted
    with pytest.raises(ValueError, match=r"Headless has no nn\.Linear layer"):
        run_update(digits(4, 5), factory=Headless)
