"""Reading and writing of the weights file."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import everlearn
from everlearn import KLDA, Method, NearestMean, RanPAC, StreamingLDA, nets
from everlearn.updating import load
from everlearn.updating.weights_file import read_weights, round_to_file_dtypes
from tests.updating.deployments import digits, make_model, run_update


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04pickle", "not a safetensors file, or is damaged"),
        (b"", "not a safetensors file"),
        (safetensors.torch.save({"a": torch.zeros(2)}), "it lacks 1.weight, 1.bias, 3.weight, …; the model has no a"),
        (
            safetensors.torch.save({k: v.clone() for k, v in nets.mlp(64, 4, hidden=(9,)).state_dict().items()}),
            "shapes differ in 1.weight, 1.bias, 3.weight",
        ),
        (
            safetensors.torch.save({k: v.char() for k, v in make_model().state_dict().items()}),
            "one has integers and the other floating-point numbers in 1.weight",
        ),
    ],
)
def test_invalid_weights_are_refused(content, message, deployment):
    Path("model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="safetensors") as error:
        run_update(digits(0, 1))
    assert message in str(error.value)


def test_dtypes_and_metadata_of_file_are_kept(deployment):
    half_weights = {
        name: value.half() if "weight" in name else value
        for name, value in safetensors.torch.load_file("model.safetensors").items()
    }
    safetensors.torch.save_file(half_weights, "model.safetensors", {"owner": "me", "git": "a9c2"})
    outcome = run_update(digits(4, 5))
    new_weights = safetensors.torch.load_file("model.safetensors")
    assert {name: value.dtype for name, value in new_weights.items()} == {
        name: value.dtype for name, value in half_weights.items()
    }
    with safetensors.safe_open("model.safetensors", "pt") as file:
        assert file.metadata().items() >= {"owner": "me", "git": "a9c2", "everlearn.update": "1"}.items()
    assert "The new weights are rounded to float16, the dtype in model.safetensors, before they are evaluated." in str(
        outcome
    )
    assert everlearn.evaluate(load(make_model, "model.safetensors"), Method(), [outcome.held_out_sets[0].task]) == [
        outcome.after[1]
    ]
    model = load(make_model, "model.safetensors")
    with torch.no_grad():
        model[1].weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"1\.weight has become too large for torch\.float16"):
        round_to_file_dtypes(model, read_weights("model.safetensors"))


def test_symlink_and_permissions_are_kept(deployment):
    Path("model.safetensors").rename("real.safetensors")
    Path("real.safetensors").chmod(0o600)
    Path("model.safetensors").symlink_to("real.safetensors")
    run_update(digits(0, 1))
    assert Path("model.safetensors").is_symlink()
    assert os.stat("real.safetensors").st_mode & 0o777 == 0o600


def test_tied_weights_are_kept(deployment):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = nn.Linear(64, 64)
            self.head = nn.Linear(64, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.head(self.b(self.a(x.flatten(1)).relu()).relu())

    safetensors.torch.save_model(Tied(), "model.safetensors")  # stores the shared tensor once
    run_update(digits(0, 1), factory=Tied)
    model = load(Tied, "model.safetensors")
    assert model.a.weight is model.b.weight and run_update(digits(2, 3), factory=Tied).number == 2
    safetensors.torch.load_model(model, "model.safetensors")  # requires that the shared tensor is stored once


HALF_HEADS = {"nearest-mean": NearestMean(), "streaming-lda": StreamingLDA(shrinkage=0.1), "ranpac": RanPAC(100)}


@pytest.mark.parametrize("method", HALF_HEADS.values(), ids=HALF_HEADS.keys())
def test_heads_in_half_precision_files(method, deployment):
    """The logit of a class without examples, -1e30, does not fit float16."""
    weights = {name: value.half() for name, value in safetensors.torch.load_file("model.safetensors").items()}
    safetensors.torch.save_file(weights, "model.safetensors")
    with pytest.warns(UserWarning, match="will never predict"):
        first = run_update(digits(4, 5), method, old=digits(0, 1, 2))
    second = run_update(digits(6, 7), method)
    stored = safetensors.torch.load_file("model.safetensors")
    assert stored["1.weight"].dtype == torch.half and all(value.isfinite().all() for value in stored.values())
    model = load(make_model, "model.safetensors")
    predicted = model(digits(0, 1, 2, 3, 4, 5, 6, 7)[1][0]).argmax(1)
    assert 3 not in predicted and second.after[1] > 0.8 and first.after[0] > 0.8


@pytest.mark.parametrize("method", [RanPAC(100), KLDA(100, shrinkage=0.01)], ids=["ranpac", "klda"])
def test_file_of_a_head_that_was_converted_to_half_precision(method, deployment):
    run_update(digits(0, 1, 2, 3), method)
    expected = load(make_model, "model.safetensors")
    weights = {name: value.half() for name, value in safetensors.torch.load_file("model.safetensors").items()}
    safetensors.torch.save_file(weights, "half.safetensors")
    x = digits(0, 1, 2, 3)[1][0]
    loaded = load(make_model, "half.safetensors")
    assert loaded(x).dtype == torch.float32, "the dtype of the factory's model"
    assert (loaded(x).argmax(1) == expected(x).argmax(1)).double().mean() > 0.97
    assert loaded(torch.zeros(2, 1, 8, 8)).isfinite().all()
