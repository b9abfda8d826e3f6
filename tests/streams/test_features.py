import sys
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import Gaussian, Method, nets, streams
from everlearn.streams import features as features_function

# The package exports the function under the name of the module.
features_module = sys.modules[features_function.__module__]


class Encoder(nn.Module):
    """BatchNorm and dropout below the output layer, which is not registered last."""

    def __init__(self, inputs=12, outputs=6):
        super().__init__()
        self.output = nn.Linear(7, outputs)
        self.layers = nn.Sequential(nn.Linear(inputs, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x):
        count(self)
        return self.output(self.layers(x))


PASSES = []


def count(model):
    PASSES.append(type(model).__name__)


def make_stream(scenario="class", **options):
    x, y = torch.rand(60, 12), torch.arange(60) % 6
    return streams.split((x, y), (x[:30] + 1, y[:30]), tasks=3, scenario=scenario, **options)


def trained_encoder():
    model = Encoder()
    model(torch.rand(50, 12))  # running statistics
    PASSES.clear()
    return model


def naive_features(model, x):
    """The formula of the layers, without torch.nn in evaluation mode."""
    linear, norm = model.layers[0], model.layers[1]
    hidden = x @ linear.weight.T + linear.bias
    scaled = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return scaled.clamp(min=0).detach()


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_features_equal_a_naive_loop_and_tasks_keep_everything_else(scenario, tmp_path):
    model = trained_encoder()
    stream = make_stream(scenario, valid=0.2)
    stream[1].name = "second"
    result = streams.features(model, stream, output="output", folder=tmp_path, batch_size=8)

    assert result.inputs == (7,) and result.outputs == stream.outputs and result.scenario == scenario
    assert result.settings["backbone"]["output"] == "output" and result.settings["seed"] == 0
    assert result.test_tasks is result.tasks
    for new, old in zip(result, stream, strict=True):
        for split in ("train", "valid", "test"):
            torch.testing.assert_close(getattr(new, split).x, naive_features(model, getattr(old, split).x))
            assert torch.equal(getattr(new, split).y, getattr(old, split).y)
        assert new.allowed is old.allowed and new.known_at_test == old.known_at_test
        assert (new.id, new.name, new.labels, new.likelihood) == (old.id, old.name, old.labels, old.likelihood)


def test_modes_are_restored_and_the_mode_of_the_model_does_not_matter(tmp_path):
    model = trained_encoder()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.layers[1].eval()
    stream = make_stream()
    in_training = streams.features(model, stream, output="output", folder=tmp_path / "a")
    assert model.training and model.layers[3].training and not model.layers[1].training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    in_evaluation = streams.features(model.eval(), stream, output="output", folder=tmp_path / "b")
    assert torch.equal(in_training[0].train.x, in_evaluation[0].train.x)
    assert not in_training[0].train.x.requires_grad


def test_a_second_call_reads_and_changed_weights_data_or_transform_compute_again(tmp_path):
    model = trained_encoder()
    stream = make_stream()
    first = streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 6  # train and test of three tasks
    again = streams.features(model.eval(), stream, output="output", folder=tmp_path)
    assert len(PASSES) == 6
    assert torch.equal(first[2].test.x, again[2].test.x) and torch.equal(first[2].test.y, again[2].test.y)

    # Another example in one task: that file alone is new.
    stream[1].train.x[0, 0] += 1
    streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 7

    for task in stream:
        task.eval_transform = lambda x: 2 * x
    doubled = streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 13
    torch.testing.assert_close(doubled[0].test.x, naive_features(model, 2 * stream[0].test.x))
    assert doubled[0].eval_transform is None

    with torch.no_grad():
        model.layers[0].weight[0, 0] += 1
    changed = streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 19
    assert changed.settings["backbone"]["digest"] != doubled.settings["backbone"]["digest"]


def test_an_interrupted_call_continues(tmp_path):
    model = trained_encoder()
    stream = make_stream()
    compute = features_module._Extraction._forward

    def interrupted(self, batch):
        if len(PASSES) == 3:
            raise KeyboardInterrupt
        return compute(self, batch)

    with patch.object(features_module._Extraction, "_forward", interrupted), pytest.raises(KeyboardInterrupt):
        streams.features(model, stream, output="output", folder=tmp_path)
    assert not list(tmp_path.rglob("*.everlearn-part"))
    result = streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 6
    torch.testing.assert_close(result[2].train.x, naive_features(model, stream[2].train.x))


@pytest.mark.parametrize("suffix", ["bin", "pt"])
@pytest.mark.parametrize("damage", [lambda c: c[:-3], lambda c: c.replace(c[96:104], b"damaged!"), lambda c: b""])
def test_a_damaged_file_is_computed_again_with_a_warning(suffix, damage, tmp_path):
    model = trained_encoder()
    stream = make_stream().first(1)
    first = streams.features(model, stream, output="output", folder=tmp_path)
    path = min(tmp_path.rglob(f"*.{suffix}"))
    content = path.read_bytes()
    path.write_bytes(damage(content))

    PASSES.clear()
    with pytest.warns(UserWarning, match="damaged"):
        again = streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 1
    for split in ("train", "test"):
        assert torch.equal(getattr(again[0], split).x, getattr(first[0], split).x)
    with warnings.catch_warnings(action="error"):
        streams.features(model, stream, output="output", folder=tmp_path)
    assert len(PASSES) == 1


def test_a_missing_data_file_is_computed_again(tmp_path):
    model = trained_encoder()
    stream = make_stream().first(1)
    streams.features(model, stream, output="output", folder=tmp_path)
    next(tmp_path.rglob("*.bin")).unlink()
    with pytest.warns(UserWarning, match="damaged"):
        streams.features(model, stream, output="output", folder=tmp_path)


def mapped_files():
    with open("/proc/self/maps") as file:
        return file.read()


def test_large_features_are_memory_mapped_and_train_like_others(tmp_path, monkeypatch):
    model = trained_encoder()
    stream = make_stream()
    loaded = streams.features(model, stream, output="output", folder=tmp_path)
    assert str(tmp_path) not in mapped_files()

    monkeypatch.setattr(features_module, "MAX_MEMORY_BYTES", 0)
    mapped = streams.features(model, stream, output="output", folder=tmp_path)
    assert mapped_files().count(str(tmp_path)) >= 6
    assert mapped[0].train.rows(slice(0, 4))[0].data_ptr() == mapped[0].train.x.data_ptr()

    def train(data):
        return everlearn.run(lambda inputs, outputs: nets.mlp(inputs, outputs, hidden=()), Method(), data, epochs=2)

    results = [train(mapped), train(loaded)]
    assert results[0].average_accuracy == results[1].average_accuracy
    assert results[0].config["fingerprints"] == results[1].config["fingerprints"]


def test_the_output_layer_is_found_if_it_computes_the_outputs(tmp_path):
    net = nets.mlp(12, 6, hidden=(5,))
    stream = make_stream()
    found = streams.features(net, stream, folder=tmp_path)
    named = streams.features(net, stream, output="3", folder=tmp_path)
    assert found.inputs == (5,) and found.settings == named.settings

    # The last linear layer is not the output layer here.
    with pytest.raises(ValueError, match=r"'layers\.0', does not compute the outputs of Encoder: name"):
        streams.features(Encoder(), stream, folder=tmp_path)


def test_outputs_of_an_encoder(tmp_path):
    encoder = nn.Sequential(nn.Linear(12, 5), nn.Tanh())
    stream = make_stream()
    result = streams.features(encoder, stream, encoder=True, folder=tmp_path)
    torch.testing.assert_close(result[1].test.x, encoder(stream[1].test.x).detach())

    with pytest.raises(ValueError, match="give one of them"):
        streams.features(encoder, stream, encoder=True, output="0", folder=tmp_path)
    with pytest.raises(ValueError, match=r"has no nn.Linear layer.*give encoder=True"):
        streams.features(nn.Flatten(), stream, folder=tmp_path)


def test_datasets_and_loaders_with_dicts(tmp_path):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.output = nn.Linear(4, 3)

        def forward(self, input_ids, attention_mask):
            count(self)
            mask = attention_mask.unsqueeze(-1)
            return self.output((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))

    ids = torch.randint(9, (20, 5))
    rows = [{"input_ids": i, "attention_mask": (i > 0).float() + 0.1, "labels": k % 3} for k, i in enumerate(ids)]
    loader = DataLoader(rows, 8)
    stream = streams.from_tasks([(loader, loader)], scenario="domain", outputs=3)
    model = Tokens()
    PASSES.clear()
    result = streams.features(model, stream, folder=tmp_path)
    mask = (ids > 0).float().unsqueeze(-1) + 0.1
    torch.testing.assert_close(result[0].train.x, (model.embedding(ids) * mask).sum(1).div(mask.sum(1)).detach())
    assert result[0].train.y.tolist() == [k % 3 for k in range(20)]

    num_passes = len(PASSES)
    streams.features(model, stream, folder=tmp_path)
    assert len(PASSES) == num_passes

    dataset = TensorDataset(torch.rand(20, 12), torch.arange(20) % 2)
    encoder = trained_encoder()
    for workers in (0, 1):
        stream = streams.from_tasks([(dataset, dataset)], scenario="domain", workers=workers)
        result = streams.features(encoder, stream, output="output", folder=tmp_path)
        torch.testing.assert_close(result[0].test.x, naive_features(encoder, dataset.tensors[0]))
    assert len(PASSES) == 1  # training and test data are the same, for any number of workers


def test_an_iterator_is_computed_without_a_file(tmp_path):
    model = trained_encoder()
    x, y = torch.rand(10, 12), torch.arange(10) % 2
    batches = ((x[i : i + 5], y[i : i + 5]) for i in (0, 5))
    stream = streams.from_tasks([(batches, None)], scenario="domain", outputs=2)
    with pytest.warns(UserWarning, match="cannot be hashed"):
        result = streams.features(model, stream, output="output", folder=tmp_path)
    torch.testing.assert_close(result[0].train.x, naive_features(model, x))
    assert torch.equal(result[0].train.y, y) and result[0].test is None
    assert not list(tmp_path.rglob("*.bin"))


def test_joint_and_online_streams_and_regression(tmp_path):
    model = trained_encoder()
    stream = make_stream("task")
    joint = streams.features(model, stream.joint(), output="output", folder=tmp_path)
    assert sorted(joint[0].train.t.unique().tolist()) == [0, 1, 2] and joint.merged == 3
    assert len(joint.test_tasks) == 3 and joint.test_tasks[0].test.x.shape == (10, 7)

    online = streams.online(streams.features(model, stream, output="output", folder=tmp_path), chunk=5)
    assert online.inputs == (7,) and len(online[0].train) == 5
    chunks = streams.features(model, streams.online(stream, chunk=10), output="output", folder=tmp_path)
    assert len(chunks.tasks) == 6 and len(chunks.test_tasks) == 3 and chunks.single_pass

    x, y = torch.rand(10, 12), torch.rand(10, 2)
    regression = streams.from_tasks([((x, y), (x, y))], scenario="domain", likelihood=Gaussian())
    result = streams.features(model, regression, output="output", folder=tmp_path)
    assert torch.equal(result[0].train.y, y) and isinstance(result[0].likelihood, Gaussian)


def test_refused_streams_and_features(tmp_path):
    augmented = make_stream(transform=lambda x: x + 0.1)
    with pytest.raises(ValueError, match=r"task 0 augments its training inputs .* without transform"):
        streams.features(Encoder(), augmented, output="output", folder=tmp_path)
    with pytest.raises(ValueError, match=r"one vector per example, of shape \(20, features\); .* \(20, 3, 4\)"):
        streams.features(nn.Unflatten(1, (3, 4)), make_stream(), encoder=True, folder=tmp_path)

    stream = make_stream()
    stream[1].test.x[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="features of the test data of task 1 are not all finite"):
        streams.features(nn.Flatten(), stream, encoder=True, folder=tmp_path)
    empty = replace(stream[0], train=(torch.zeros(0, 12), torch.zeros(0, dtype=torch.long)))
    with pytest.raises(ValueError, match="task 0 has no train examples"):
        streams.features(nn.Flatten(), replace(stream, tasks=[empty], test_tasks=[]), encoder=True, folder=tmp_path)


def test_the_default_folder_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLEARN_CACHE", str(tmp_path))
    streams.features(Encoder(), make_stream().first(1), output="output")
    assert len(list((tmp_path / "features").rglob("*.bin"))) == 2
    monkeypatch.delenv("EVERLEARN_CACHE")
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    assert features_module.default_folder() == tmp_path / ".cache" / "everlearn" / "features"


def test_features_have_the_default_dtype(tmp_path):
    result = streams.features(Encoder().double(), double_stream(), output="output", folder=tmp_path)
    assert result[0].train.x.dtype == torch.float32


def double_stream():
    stream = make_stream().first(1)
    for source in (stream[0].train, stream[0].test):
        source.x = source.x.double()
    return stream
