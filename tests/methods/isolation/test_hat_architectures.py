"""HAT forgets nothing in models whose code symbolic tracing cannot follow."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import everlearn
from everlearn import HAT, Task
from tests.architectures import ConvNeXt, DataDependentDepth, VisionTransformer


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def gated_layers(method):
    return [fields["producer"] for fields in method.link_fields]


@pytest.mark.parametrize("rest", ["own", "frozen"])
@pytest.mark.parametrize("architecture", [VisionTransformer, ConvNeXt, DataDependentDepth])
def test_outputs_of_earlier_tasks_stay_equal(architecture, rest, small_stream, check_isolation):
    methods = []

    def make_method():
        methods.append(HAT(rest=rest))
        return methods[-1]

    check_isolation(make_method, lambda stream: architecture(stream.outputs), adamw, small_stream())
    expected = {
        VisionTransformer: ["blocks.0.fc1", "blocks.1.fc1"],
        ConvNeXt: ["blocks.0.expand", "blocks.1.expand"],
        DataDependentDepth: ["first", "hidden"],
    }
    assert set(gated_layers(methods[0])) >= set(expected[architecture])


def images_of_brightness(brightness, num_examples=24):
    labels = torch.arange(num_examples) % 2
    images = 0.3 * torch.randn(num_examples, 1, 8, 8) + brightness
    images[:, 0, 0, 0] += labels
    return images, labels


def test_depth_that_depends_on_the_data():
    torch.manual_seed(0)
    model = DataDependentDepth(2)
    method = HAT()
    shades = [images_of_brightness(brightness) for brightness in (-0.4, 0.0, 0.4)]
    mixed_data = torch.cat([x for x, _ in shades]), torch.cat([y for _, y in shades])

    everlearn.train(model, method, Task(mixed_data, id=0), optimizer=adamw, epochs=3, batch_size=12)
    assert gated_layers(method) == ["first", "blocks.0.0", "hidden"]
    reasons = dict(method.unlinked)
    for i in (1, 2):
        assert reasons[f"blocks.{i}.0"] == "it is called a varying number of times, depending on the data"
    assert "residual stream" in reasons["second"]

    depths = [model.depth(x) for x, _ in shades]
    assert depths == [1, 2, 3]
    before = [method.predict(model, x, 0) for x, _ in shades]
    for k in (1, 2):
        everlearn.train(model, method, Task(mixed_data, id=k), optimizer=adamw, epochs=3, batch_size=12)
    for (x, _), outputs in zip(shades, before, strict=True):
        assert torch.equal(method.predict(model, x, 0), outputs)
        assert not torch.equal(method.predict(model, x, 1), outputs)


def small_bert():
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=12,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def token_data(num_examples=32):
    input_ids = torch.randint(2, 30, (num_examples, 7))
    attention_mask = (torch.arange(7) < torch.randint(3, 8, (num_examples, 1))).long()
    labels = input_ids[:, 1] % 2
    return {"input_ids": input_ids, "attention_mask": attention_mask}, labels


def test_hugging_face_bert():
    torch.manual_seed(0)
    model = small_bert()
    method = HAT()
    tasks = [Task(token_data(), id=k) for k in range(3)]
    x, _ = token_data()
    before = {}
    for task in tasks:
        everlearn.train(model, method, task, optimizer=adamw, epochs=2, batch_size=8)
        before[task.id] = method.predict(model, x, task.id)
        for k, outputs in before.items():
            assert torch.equal(method.predict(model, x, k), outputs)
    assert not torch.equal(before[0], before[2])

    assert gated_layers(method) == [
        "bert.encoder.layer.0.intermediate.dense",
        "bert.encoder.layer.1.intermediate.dense",
        "bert.pooler.dense",
    ]
    reasons = dict(method.unlinked)
    assert "attention heads" in reasons["bert.encoder.layer.0.attention.self.query"]
    assert "residual stream" in reasons["bert.encoder.layer.0.output.dense"]

    # A loaded method needs no examples: the links are part of its state.
    loaded = HAT()
    loaded.load_state_dict(method.state_dict())
    other = small_bert()
    other.load_state_dict(model.state_dict())
    exported = loaded.export(other, 0)
    torch.testing.assert_close(exported(**x).logits, before[0], rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in exported.parameters()) < sum(p.numel() for p in other.parameters())


def test_nothing_to_gate_is_refused_with_reasons():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(4, 6)
            self.gate = torch.nn.Linear(4, 6)
            self.head = torch.nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.up(x) * torch.sigmoid(self.gate(x)))

    task = Task((torch.randn(8, 4), torch.arange(8) % 2), id=0)
    with pytest.raises(ValueError, match=r"finds no units to gate.*'up': mul combines its units with other values"):
        HAT().begin_task(Gated(), task)


def test_iterators_are_read_inside_a_task_only():
    images, labels = images_of_brightness(0.0)
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    task = Task(iter(batches), id=0, steps=3)
    method = HAT()
    method.begin_task(VisionTransformer(2), task)
    assert gated_layers(method) == ["blocks.0.fc1", "blocks.1.fc1"]
    assert sum(len(batch) for batch in task.batches(8)) == len(images)

    for data in (iter(batches), Task(id=0, steps=3)):
        with pytest.raises(
            ValueError, match=r"running the model on examples, and this task has none: give it training"
        ):
            HAT().begin_task(VisionTransformer(2), data)


@pytest.mark.parametrize("generator", [None, "own"])
def test_reading_examples_leaves_a_data_loader_as_it_was(generator):
    images, labels = images_of_brightness(0.0)

    def read_order(begin):
        own = None if generator is None else torch.Generator().manual_seed(3)
        dataset = torch.utils.data.TensorDataset(images, labels)
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, generator=own)
        torch.manual_seed(0)
        task = Task(loader, id=0)
        if begin:
            HAT().begin_task(VisionTransformer(2), task)
        return torch.cat([batch.x for batch in task.batches(8)])

    assert torch.equal(read_order(begin=True), read_order(begin=False))


class RareBranch(nn.Module):
    """A layer that only inputs far from the others reach."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.middle = nn.Linear(16, 16)
        self.rare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x).relu()
        z = self.middle(h)
        is_far = x[:, 0] > 2
        if is_far.any():
            z = z + self.rare(h) * is_far[:, None]
        return self.head(z.relu())


def test_a_branch_that_no_traced_example_takes_is_refused_when_it_is_taken():
    torch.manual_seed(0)
    x = torch.randn(40, 4).clamp(max=1.9)
    y = torch.arange(40) % 2
    model = RareBranch()
    method = HAT()
    everlearn.train(model, method, (x, y), batch_size=20)
    x[-1, 0] = 3.0
    with pytest.raises(ValueError, match=r"The layer 'rare' is called, but the examples on which HAT"):
        everlearn.train(model, method, (x, y), batch_size=20)
    method.detach(model)
    assert model(x).shape == (40, 4)
