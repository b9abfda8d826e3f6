"""Updates train as the trainer does, with every method, and check their arguments."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import everlearn
from everlearn import ER, EWC, KLDA, METHODS, FrozenHead, Memory, NearestMean, RanPAC, StreamingLDA, Task
from everlearn.core.traits import traits_of
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery import heads
from everlearn.surgery.heads import output_layer
from everlearn.trainer import Training
from everlearn.updating import load
from tests.helpers import make_method
from tests.updating.deployments import digits, make_model, read_files, run_update, weights_equal


def test_update_equals_manual_training(deployment):
    parts = [digits(0, 1, 2, 3), digits(0, 1, shift=2), digits(2, 3, shift=2)]
    run_update(parts[1], old=parts[0])
    run_update(parts[2])
    model = make_model()
    method = ER(200)
    method.memory = Memory(200, "balanced", group_by=("t", "y"))  # the default of an update
    model.load_state_dict(safetensors.torch.load_file("state/update-0000/model.safetensors"))
    for batch in Task(parts[0][0], id=0).batches(32, 4):
        method.observe(batch, model(batch.x).detach())
    method.end_task(model, parts[0][0])
    for number in (1, 2):
        everlearn.train(model, method, Task(parts[number][0], id=number), epochs=4, batch_size=32)
    deployed_weights = safetensors.torch.load_file("model.safetensors")
    assert all(torch.equal(value, deployed_weights[name]) for name, value in model.state_dict().items())


def test_dropout_and_new_outputs_follow_seed(deployment):
    def make_with_dropout():
        net = make_model()
        return nn.Sequential(net[0], nn.Dropout(0.3), *net[1:])

    net = make_with_dropout()
    safetensors.torch.save_file(net.state_dict(), "model.safetensors")
    initial_weights = Path("model.safetensors").read_bytes()
    rng_state = torch.get_rng_state()
    run_update(data := digits(4, 5), factory=make_with_dropout, state="a", balance=False)
    assert torch.equal(rng_state, torch.get_rng_state()), "random state of the caller is unchanged"
    Path("model.safetensors").write_bytes(initial_weights)
    run_update(data, factory=make_with_dropout, state="b", balance=False)
    assert weights_equal("model.safetensors", "a/update-0001/model.safetensors")
    with seeded(derive(0, "update", 1)):
        heads.grow_output(net, 6)
        everlearn.train(net, ER(200), Task(data[0], id=1), epochs=4, batch_size=32)
    assert torch.equal(net[4].weight, load(make_with_dropout, "model.safetensors")[4].weight)


def test_method_of_caller_is_not_changed(deployment):
    method = EWC()
    run_update(digits(0, 1), method)
    assert repr(method.state_dict()) == repr(EWC().state_dict())


def test_dry_run_writes_nothing(deployment):
    files_before = read_files(deployment)
    outcome = run_update(digits(4, 5), dry_run=True)
    assert outcome.number == 1 and outcome.after[1] > outcome.before[1] == 0.0 and outcome.folder is None
    assert read_files(deployment) == files_before and not Path("state").exists()


def test_data_are_learned_once(deployment):
    run_update(digits(0, 1, shift=1))
    files_before = read_files(deployment)
    outcome = run_update(digits(0, 1, shift=1))
    assert not outcome.new and outcome.accepted and "was learned in update 1" in str(outcome)
    assert read_files(deployment) == files_before
    assert run_update(digits(0, 1, shift=1), repeat=True).number == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, method_class in METHODS.items() if method_class.deployable])
def test_every_method_learns_new_classes(name, deployment):
    method_class = METHODS[name]
    old = digits(0, 1, 2, 3)
    traits = traits_of(method_class)
    accepts_old_data = traits.keeps_examples or not traits.needs_labels or issubclass(method_class, FrozenHead)
    one_epoch = Training(epochs=1, batch_size=32)
    first = run_update(digits(4, 5), make_method(name), old=old if accepts_old_data else None, training=one_epoch)
    second = run_update(digits(0, 6), make_method(name), training=one_epoch)
    assert second.accepted and output_layer(load(make_model, "model.safetensors"))[1].out_features == 7
    assert (first.fall is not None) == accepts_old_data
    assert "New classes: 4, 5. The output layer grew from 4 to 6 outputs" in str(first)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            (np.zeros((9, 64)), np.array(["a", "b", "c"] * 3)),
            {},
            "are words (a, b, c), and it is unknown which output stands for which",
        ),
        ((np.zeros((9, 64), np.float32), np.arange(9) / 2), {}, "labels of the new data are fractions"),
        (
            (np.zeros((9, 64), np.float32), np.arange(9) % 2 * 100),
            {},
            "the outputs 0 to 3: number new classes from 4 on",
        ),
        ((np.zeros((9, 64), np.float32), np.zeros((9, 2), int)), {}, "more than one per example"),
        ((np.full((9, 64), np.nan, np.float32), np.arange(9) % 2), {}, "9 examples of the new data have NaN"),
        ((np.zeros((9, 63), np.float32), np.arange(9) % 2), {}, "The model cannot take the inputs of the new data"),
        ((np.zeros((1, 64), np.float32), np.zeros(1, int)), {}, "no example to hold out"),
        ((np.zeros((9, 64)), np.zeros(8, int)), {}, "9 inputs but 8 labels"),
        (3, {}, "got a int"),
        ("none.csv", {}, "There is no file or folder none.csv"),
        ("model.safetensors", {}, "ends in .csv, .tsv, .parquet or .npz; got 'model.safetensors'"),
        (".", {}, "give the side in pixels"),
        (digits(0, 1), {"tolerance": -1.0}, "tolerance: got -1.0, allowed: 0 or more"),
        (digits(0, 1), {"holdout": 0.0}, "holdout: got 0.0, allowed: a share between 0 and 1"),
        (digits(0, 1), {"keep": -1}, "keep: got -1, allowed: 0 or more"),
        (digits(0, 1), {"versions": 0}, "versions: got 0, allowed: 1 or more"),
        (digits(0, 1), {"classes": "zero"}, "classes are the names of the outputs"),
        (digits(0, 1), {"classes": ["a", "a"]}, "a is given twice"),
        (digits(0, 1), {"classes": list("abcdef")}, "6 are named, but the model has 4 outputs"),
        (digits(0, 1), {"method": "ewc"}, "must be a method such as EWC()"),
        (digits(0, 1), {"training": {"epochs": 3}}, "training must be a Training, as in everlearn.trainer.Training("),
        (digits(0, 1), {"device": "cuda:99"}, "device 'cuda:99' cannot be used ("),
        (digits(0, 1), {"device": 1.5}, "device 1.5 cannot be used ("),
        (
            digits(0, 1),
            {"old": (np.zeros((9, 64)), np.array(["a"] * 9)), "classes": ["b", "c"]},
            "classes without an output: a",
        ),
    ],
)
def test_invalid_data_and_options_are_refused(data, options, message, deployment):
    files_before = read_files(deployment)
    with pytest.raises((ValueError, TypeError, OSError)) as error:
        run_update(data, **options)
    assert message in str(error.value)
    assert read_files(deployment) == files_before


HEADS = {
    "nearest-mean": NearestMean(),
    "streaming-lda": StreamingLDA(),
    "ranpac": RanPAC(100),
    "recursive": RanPAC(100, ridge=1.0, recursive=True),
    "klda": KLDA(100),
}


@pytest.fixture(params=HEADS, ids=str)
def head(request):
    return HEADS[request.param]


def test_head_equals_one_that_got_all_data_at_once(head, deployment):
    parts = [digits(0, 1, 2, 3), digits(4, 5), digits(6, 7)]
    run_update(parts[1], head, old=parts[0])
    outcome = run_update(parts[2], head)
    deployed = load(make_model, "model.safetensors")

    model = make_model()
    model.load_state_dict(safetensors.torch.load_file("state/update-0000/model.safetensors"))
    reference = replace(head)
    reference.end_task(model, tuple(torch.cat(arrays) for arrays in zip(*(part[0] for part in parts), strict=True)))
    x, y = (torch.cat(arrays) for arrays in zip(*(part[1] for part in parts), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(deployed(x), reference.predict(model, x), rtol=1e-4, atol=1e-4)
    accuracy = (deployed(x).argmax(1) == y).double().mean()
    sizes = [len(held_out) for held_out in outcome.held_out_sets]
    weighted = sum(outcome.after[number] * size for number, size in enumerate(sizes)) / len(y)
    assert accuracy > 0.8 and weighted == pytest.approx(float(accuracy))
    assert torch.equal(deployed[1].weight, make_deployed_features()), "features do not change"


def make_deployed_features():
    return safetensors.torch.load_file("state/update-0000/model.safetensors")["1.weight"]


def test_epochs_do_not_count_for_heads(deployment):
    counts = []
    for epochs in (1, 9):
        training = Training(epochs=epochs, batch_size=32)
        run_update(digits(0, 1, 2, 3), RanPAC(50), training=training, state=f"state-{epochs}", accept_weights=True)
        counts.append(torch.load(f"state-{epochs}/update-0001/method.pt")["statistics"]["counts"])
    assert torch.equal(*counts) and counts[0].sum() == 160


def test_first_update_of_a_head_needs_examples_of_all_classes(head, deployment):
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match=r"has none of 2, 3, for which the model has outputs: these classes would be"):
        run_update(digits(0, 1, 4), head)
    assert read_files(deployment) == files_before
    with pytest.warns(UserWarning, match="examples of 3 to learn from: .* will never predict these classes"):
        outcome = run_update(digits(4, 5), head, old=digits(0, 1, 2), dry_run=True)
    assert "Warning: Neither the old nor the new data have examples of 3" in str(outcome)
    outcome = run_update(digits(0, 1, 2, 3), head)
    assert "has computed a new output layer from these data alone" in str(outcome)


@pytest.mark.parametrize("options", [{"online": True}, {"adapt_first": True}])
def test_heads_that_train_or_observe_are_refused(options, deployment):
    with pytest.raises(ValueError, match=f"has {next(iter(options))}=True, but an update gives it all rows at once"):
        run_update(digits(4, 5), RanPAC(50, **options), old=digits(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize": False}, r"statistics are those of RanPAC\(normalize=True\), and do not fit normalize=False"),
        ({"recursive": True, "ridge": 1.0}, r"those of RanPAC\(recursive=False\)"),
        ({"dimension": 60}, "The statistics are those of RanPAC"),
        ({"seed": 1}, "The statistics are those of RanPAC"),
    ],
)
def test_fields_of_the_statistics_cannot_change(change, message, deployment):
    run_update(digits(0, 1, 2, 3), RanPAC(50))
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match=message):
        run_update(digits(4, 5), RanPAC(**{"dimension": 50, **change}))
    assert read_files(deployment) == files_before


def test_another_head_in_a_new_state_folder(deployment):
    """The deployed file has the random features of the first head, which do not fit the second."""
    all_classes = digits(0, 1, 2, 3)
    run_update(all_classes, RanPAC(64))
    for number, method in enumerate([RanPAC(64, seed=1), KLDA(64), StreamingLDA(), NearestMean(), RanPAC(64)]):
        outcome = run_update(all_classes, method, state=f"state-{number}", accept_weights=True)
        model = make_model()
        model.load_state_dict(safetensors.torch.load_file("state/update-0000/model.safetensors"))
        reference = replace(method)
        reference.end_task(model, all_classes[0])
        x = all_classes[1][0]
        with torch.no_grad():
            torch.testing.assert_close(
                load(make_model, "model.safetensors")(x), reference.predict(model, x), rtol=1e-4, atol=1e-4
            )
        assert outcome.after[1] > 0.85


def test_replay_can_follow_a_head(deployment):
    run_update(digits(0, 1, 2, 3), RanPAC(64))
    outcome = run_update(digits(4, 5), ER(100), old=digits(0, 1, 2, 3), state="new", accept_weights=True)
    assert outcome.after[1] > 0.9 and load(make_model, "model.safetensors")[3].output.out_features == 6


class NamedLayers(nn.Module):
    """A model whose last linear layer is not its output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.fc = nn.Linear(32, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.features(x))


def test_named_output_layer(head, deployment):
    safetensors.torch.save_file(NamedLayers().state_dict(), "model.safetensors")
    options = {"factory": NamedLayers, "output": "fc"}
    run_update(digits(0, 1, 2, 3), head, **options)
    outcome = run_update(digits(4, 5), head, **options)
    model = load(NamedLayers, "model.safetensors", output="fc")
    assert model(digits(4, 5)[1][0]).shape[1] == 6 and model.unused.out_features == 3
    assert outcome.after[1] > 0.7 and outcome.after[2] > 0.7
    with pytest.raises(ValueError, match="output is 'unused', and the output layer is to be 'fc'"):
        run_update(digits(6, 7), replace(head, output="unused"), **options)
