"""Heads on frozen features in loops, models and streams of all kinds."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import ER, EWC, KLDA, FeCAM, Freeze, Method, NearestMean, RanPAC, StreamingLDA, nets, streams
from everlearn.core.batch import Batch
from everlearn.core.likelihood import Gaussian
from everlearn.core.task import Task
from everlearn.surgery.feature_head import FeatureHead, restore_feature_head
from everlearn.trainer.checkpoints import CheckpointEvery
from tests.helpers import train_tasks

# Most tests give classes one after the other, without a stream.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no examples of:UserWarning")

HEADS = {
    "nearest mean": NearestMean(),
    "LDA": StreamingLDA(),
    "RanPAC": RanPAC(100),
    "recursive": RanPAC(100, ridge=10.0, recursive=True),
    "KLDA": KLDA(100),
    "FeCAM": FeCAM(),
}


@pytest.fixture(params=HEADS, ids=str)
def head(request):
    return replace(HEADS[request.param])


def make_net(outputs=10, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, outputs))


def predict(method, model, stream):
    x = torch.cat([batch.x for task in stream for batch in task.examples(1000, "test")])
    return method.predict(model, x)


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_heads_on_random_features_of_digits(head, scenario):
    stream = streams.digits(scenario)
    result = everlearn.run(make_net(stream.outputs), head, stream)
    threshold = {"task": 0.93, "domain": 0.65, "class": 0.75}[scenario]
    assert result.average_accuracy > threshold
    assert result.accuracy.shape == (5, 5)


def test_the_model_alone_gives_the_outputs(head):
    stream = streams.digits("class")
    model = make_net()
    train_tasks(model, head, stream)
    if isinstance(head, FeCAM):
        pytest.skip("FeCAM is not deployable: it is not linear in the features")
    x = next(stream[0].examples(50)).x
    model.eval()
    torch.testing.assert_close(model(x), head.predict(model, x))
    if isinstance(head, NearestMean):
        assert isinstance(model[-1], nn.Linear) and set(model.state_dict()) == set(make_net().state_dict())
    else:
        assert isinstance(model[-1], FeatureHead)


def test_nothing_below_the_output_layer_changes(head):
    stream = streams.digits("class")
    torch.manual_seed(0)
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))  # with BatchNorm
    features = copy.deepcopy(nn.Sequential(*list(model)[:-1])).state_dict()
    model.train()
    train_tasks(model, head, stream)
    later = nn.Sequential(*list(model)[:-1]).state_dict()
    assert all(torch.equal(features[key], later[key]) for key in features)
    assert not any(p.requires_grad for p in model.parameters())
    head.detach(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("form", ["pair", "loader", "chunks", "dataset"])
def test_all_forms_of_data_give_the_same_head(head, form):
    stream = streams.digits("class")
    x = torch.cat([task.train.x for task in stream])
    y = torch.cat([task.train.y for task in stream])
    reference = replace(head)
    reference_model = make_net()
    reference.end_task(reference_model, (x, y))

    model = make_net()
    forms = {
        "pair": [(x, y)],
        "loader": [DataLoader(TensorDataset(x, y), 64, shuffle=True)],
        "chunks": list(zip(x.split(33), y.split(33), strict=True)),
        "dataset": [TensorDataset(x, y)],
    }
    for data in forms[form]:
        head.end_task(model, data)
    difference = (predict(head, model, stream) - predict(reference, reference_model, stream)).abs().max()
    scale = predict(reference, reference_model, stream).abs().max()
    assert difference < 1e-4 * scale


def test_online_equals_by_task(head):
    stream = streams.digits("class")
    by_task_model, online_model = make_net(), make_net()
    train_tasks(by_task_model, head, stream)
    online = replace(head, online=True)
    train_tasks(online_model, online, stream, batch_size=7, epochs=2)
    expected = predict(head, by_task_model, stream)
    torch.testing.assert_close(predict(online, online_model, stream), expected, rtol=1e-4, atol=1e-4)


def test_online_needs_no_end_of_a_task():
    stream = streams.digits("class")
    model = make_net()
    method = StreamingLDA(online=True)
    method.begin_task(model, stream[0])
    model.eval()
    for task in stream:
        for batch in task.batches(32):
            method.observe(batch, model(batch.x).detach())
    reference, reference_model = StreamingLDA(), make_net()
    train_tasks(reference_model, reference, stream)
    expected = predict(reference, reference_model, stream)
    torch.testing.assert_close(predict(method, model, stream), expected, rtol=1e-4, atol=1e-4)


def test_forgetting_equals_never_having_seen(head):
    stream = streams.digits("class")
    x, y = stream[0].train.x, stream[0].train.y
    model, other_model = make_net(), make_net()
    other = replace(head)
    head.end_task(model, (x, y))
    head.end_task(model, stream[1])
    head.forget(model, (x[:60], y[:60]))
    other.end_task(other_model, (x[60:], y[60:]))
    other.end_task(other_model, stream[1])
    expected = predict(other, other_model, stream)
    torch.testing.assert_close(predict(head, model, stream), expected, rtol=1e-4, atol=1e-4)
    for key, value in other.statistics.items():
        torch.testing.assert_close(head.statistics[key], value, rtol=1e-7, atol=1e-9)


def test_forgetting_a_class_makes_it_unpredictable():
    stream = streams.digits("class")
    method, model = NearestMean(), make_net()
    train_tasks(model, method, stream)
    x, y = stream[0].train.x, stream[0].train.y
    method.forget(model, (x[y == 0], y[y == 0]))
    assert 0 not in predict(method, model, stream).argmax(1)


def test_forgetting_what_was_not_learned_is_refused(head):
    stream = streams.digits("class")
    model = make_net()
    head.end_task(model, stream[0])
    statistics = copy.deepcopy(head.statistics)
    with pytest.raises(ValueError, match=r"examples of class 2 are to be forgotten, but 0 were learned"):
        head.forget(model, stream[1])
    assert all(torch.equal(statistics[key], head.statistics[key]) for key in statistics)


def test_a_failed_pass_changes_nothing(head):
    stream = streams.digits("class")
    model = make_net()
    head.end_task(model, stream[0])
    statistics = copy.deepcopy(head.statistics)
    x, y = stream[1].train.x.clone(), stream[1].train.y
    x[-1] = torch.nan
    with pytest.raises(ValueError, match="not finite numbers"):
        head.end_task(model, (x, y))
    assert all(torch.equal(statistics[key], head.statistics[key]) for key in statistics)


def test_adapt_first_trains_the_first_task_only(head):
    stream = streams.digits("class")
    adapted = replace(head, adapt_first=True)
    model, tuned = make_net(), make_net()
    assert adapted.trains
    everlearn.train(model, adapted, stream[0], epochs=3)
    assert not adapted.trains
    everlearn.train(tuned, Method(), stream[0], epochs=3)
    assert torch.equal(model[1].weight, tuned[1].weight)
    everlearn.train(model, adapted, stream[1], epochs=3)
    assert torch.equal(model[1].weight, tuned[1].weight)


def test_features_that_change_are_noticed(head):
    stream = streams.digits("class")
    model = make_net()
    head.end_task(model, stream[0])
    with torch.no_grad():
        model[1].weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="have changed since"):
        head.end_task(model, stream[1])


def test_outputs_grow_with_new_classes(head):
    stream = streams.digits("class")
    model = make_net(outputs=2)
    for task in stream:
        head.end_task(model, task)
    outputs = predict(head, model, stream)
    assert outputs.shape[1] == 10
    y = torch.cat([task.test.y for task in stream])
    assert (outputs.argmax(1) == y).float().mean() > 0.7


def test_classes_without_examples_are_never_predicted(head):
    stream = streams.digits("class")
    model = make_net(outputs=30)
    head.end_task(model, stream[2])
    outputs = predict(head, model, stream)
    assert outputs.shape[1] == 30 and set(outputs.argmax(1).tolist()) <= {4, 5}


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_without_bias_gets_one(bias):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=bias))
    NearestMean().end_task(model, streams.digits("class")[0])
    assert model[1].bias is not None and model(torch.rand(3, 64)).argmax(1).max() < 2


def test_state_and_model_are_restored(head):
    stream = streams.digits("class")
    model = make_net()
    train_tasks(model, head, stream.tasks[:3])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "method": head.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    loaded, loaded_model = replace(head), make_net(seed=1)
    restore_feature_head(loaded_model, saved["model"])
    loaded_model.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["method"])
    for continued, continued_model in ((head, model), (loaded, loaded_model)):
        train_tasks(continued_model, continued, stream.tasks[3:])
    assert torch.equal(predict(head, model, stream), predict(loaded, loaded_model, stream))


def test_the_head_can_be_written_into_a_new_model(head):
    stream = streams.digits("class")
    model = make_net()
    train_tasks(model, head, stream)
    loaded, fresh_model = replace(head), make_net()
    loaded.load_state_dict(head.state_dict())
    with torch.no_grad():
        loaded.write_head(fresh_model)
    torch.testing.assert_close(predict(loaded, fresh_model, stream), predict(head, model, stream))


@pytest.mark.parametrize("change", [{"seed": 1}, {"dimension": 50}])
@pytest.mark.parametrize("name", ["RanPAC", "KLDA"])
def test_other_random_features_than_saved_are_refused(name, change):
    stream = streams.digits("class")
    method, model = replace(HEADS[name]), make_net()
    method.end_task(model, stream[0])
    other = replace(method, **change)
    with pytest.raises(ValueError, match=r"The statistics are those of .*create it with the fields"):
        other.load_state_dict(method.state_dict())


def test_the_state_of_another_head_is_refused():
    method = RanPAC(100)
    method.end_task(make_net(), streams.digits("class")[0])
    with pytest.raises(ValueError, match=r"This state is of RanPAC, got StreamingLDA"):
        StreamingLDA().load_state_dict(method.state_dict())


@pytest.mark.filterwarnings("error")
def test_outputs_without_examples_are_warned_of_in_a_loop(head):
    x, y = streams.digits("class")[1].train.x, streams.digits("class")[1].train.y
    with pytest.warns(UserWarning, match=r"has no examples of 8 of the model's 10 outputs \(0, 1, 4, 5, 6, …\)"):
        head.end_task(make_net(), (x, y))
    replace(head).end_task(make_net(), streams.digits("class")[1])
    replace(head).end_task(make_net(outputs=1), (x, y - 2))


def test_a_layer_inside_the_model_is_not_the_output_layer(head):
    with pytest.raises(ValueError, match=r"The layer '1' has 40 outputs, and Sequential gives 10"):
        replace(head, output="1").end_task(make_net(), streams.digits("class")[0])


def test_wrong_labels_are_refused(head):
    x = torch.rand(6, 1, 8, 8)
    wrong_labels = {
        r"label -1: classes count from 0": torch.full((6,), -1),
        r"has no labeled examples": torch.full((6,), -100),
        r"number the classes from 0 on": torch.full((6,), 1_000_000),
        r"not one class for each feature vector": torch.zeros(6, 1, dtype=torch.long),
    }
    for message, y in wrong_labels.items():
        with pytest.raises(ValueError, match=message):
            head.end_task(make_net(), (x, y))
        assert not head.statistics


def test_forgetting_what_makes_the_statistics_impossible_is_explained():
    stream = streams.digits("class")
    method, model = StreamingLDA(normalize=False), make_net()
    method.end_task(model, stream[0])
    statistics = copy.deepcopy(method.statistics)
    never_learned = 100 * torch.rand(30, 1, 8, 8), torch.zeros(30, dtype=torch.long)
    with pytest.raises(ValueError, match=r"some were never learned, had other labels"):
        method.forget(model, never_learned)
    assert all(torch.equal(statistics[key], method.statistics[key]) for key in statistics)


def test_models_of_transformers_know_their_number_of_labels():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30, num_labels=2
    )
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(30, (12, 5))
    y = torch.arange(12) % 4
    RanPAC(50).end_task(model, ({"input_ids": ids}, y))
    assert model(input_ids=ids, labels=y).loss.isfinite() and model.config.num_labels == 4


def test_runs_resume_bit_for_bit(head, tmp_path, monkeypatch):
    stream = streams.digits("class")
    expected = everlearn.run(make_net(), head, stream)

    class Interrupted(Exception):
        pass

    original = type(head).end_task
    calls = []

    def interrupt(self, model, task):
        calls.append(task.id)
        if len(calls) == 4:
            raise Interrupted
        original(self, model, task)

    monkeypatch.setattr(type(head), "end_task", interrupt)
    settings = {"out": tmp_path, "checkpoint": CheckpointEvery(minutes=0)}
    with pytest.raises(Interrupted):
        everlearn.run(make_net(), head, stream, **settings)
    result = everlearn.run(make_net(), head, stream, **settings)
    assert (result.accuracy == expected.accuracy).all()
    assert calls == [0, 1, 2, 3, 3, 4]


class Tagger(nn.Module):
    """A label for every token, and several named inputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(16, 4)

    def forward(self, tokens, mask=None):
        return self.classifier(self.drop(self.embed(tokens)))


def test_tokens_with_ignored_labels(head):
    torch.manual_seed(0)
    model = Tagger().train()
    tokens = torch.randint(20, (50, 7))
    y = torch.where(torch.rand(50, 7) < 0.3, -100, tokens % 4)
    head.end_task(model, ({"tokens": tokens, "mask": torch.ones_like(tokens)}, y))
    assert int(head.statistics["counts"].sum()) == int((y >= 0).sum())
    assert (head.predict(model, tokens).argmax(-1) == tokens % 4).float().mean() > 0.7


def test_two_heads_or_a_method_that_trains_cannot_be_chained(head):
    for other in (ER(), EWC(), Freeze(), Method(), NearestMean()):
        with pytest.raises(ValueError, match=r"cannot be chained: \w+ freezes the model"):
            head + other


def test_labels_that_are_no_classes_are_refused(head):
    task = Task((torch.rand(5, 64), torch.rand(5, 10)), likelihood=Gaussian())
    with pytest.raises(ValueError, match="keeps statistics by class"):
        head.end_task(make_net(), task)


def test_a_dimension_larger_than_the_memory_is_refused():
    with pytest.raises(MemoryError, match=r"choose a smaller dimension"):
        RanPAC(2_000_000).add(torch.zeros(1, 2_000_000, dtype=torch.float64), torch.zeros(1, dtype=torch.long), 1.0)


def test_too_few_examples_for_the_ridge_are_refused():
    with pytest.raises(ValueError, match="fewer examples than features"):
        RanPAC(200, ridge=0.0).end_task(make_net(), _few())


def _few():
    torch.manual_seed(0)
    return torch.rand(10, 1, 8, 8), torch.arange(10) % 2


def test_too_few_examples_for_a_covariance_are_refused():
    with pytest.raises(ValueError, match="raise the shrinkage"):
        StreamingLDA(shrinkage=0.0).end_task(make_net(), _few())


def test_a_class_with_one_example():
    x, y = _few()
    y[:] = 0
    y[0] = 1
    with pytest.warns(UserWarning, match="one example of class 1"):
        FeCAM().end_task(make_net(), (x, y))
    for method in (NearestMean(), StreamingLDA(), RanPAC(50, ridge=0.01)):
        model = make_net()
        method.end_task(model, (x, y))
        assert method.predict(model, x)[0].argmax() == 1


def test_a_recursive_head_needs_a_ridge():
    with pytest.raises(ValueError, match=r"give a number, as in RanPAC\(ridge=100.0, recursive=True\)"):
        RanPAC(recursive=True)


def test_check_describes_the_statistics(head):
    model = make_net()
    head.end_task(model, streams.digits("class")[0])
    report = str(head.check(model))
    assert "of 2 classes" in report and "all layers are frozen" in report


@pytest.mark.parametrize("online", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_equal_one(head, online, run_two_processes):
    stream = streams.digits("class")
    reference, reference_model = replace(head), make_net()
    train_tasks(reference_model, reference, stream)

    def learn():
        method, model = replace(head, online=online), make_net()
        train_tasks(model, method, stream, batch_size=5)
        return method.statistics, predict(method, model, stream)

    (statistics, outputs), (other_statistics, other_outputs) = run_two_processes(learn)
    assert torch.equal(outputs, other_outputs)
    assert all(torch.equal(statistics[key], other_statistics[key]) for key in statistics)

    # Online, the remainder of a last batch that cannot be divided among the processes is dropped.
    if not online:
        for key, value in reference.statistics.items():
            torch.testing.assert_close(statistics[key], value, rtol=1e-6, atol=1e-9)
    agreement = (outputs.argmax(1) == predict(reference, reference_model, stream).argmax(1)).float().mean()
    assert agreement > 0.98


def test_fields_that_statistics_depend_on_are_checked():
    method = RanPAC(50, ridge=1.0, recursive=True)
    method.end_task(make_net(), streams.digits("class")[0])
    for change in ({"normalize": False}, {"recursive": False}, {"ridge": 2.0}):
        with pytest.raises(ValueError, match=rf"do not fit {next(iter(change))}="):
            replace(method, **change).load_state_dict(method.state_dict())
    ridge = RanPAC(50, ridge=1.0)
    ridge.end_task(make_net(), streams.digits("class")[0])
    replace(ridge, ridge=2.0).load_state_dict(ridge.state_dict())
    fecam = FeCAM()
    fecam.end_task(make_net(), streams.digits("class")[0])
    with pytest.raises(ValueError, match=r"FeCAM\(power=0.5\)"):
        FeCAM(power=1.0).load_state_dict(fecam.state_dict())


def test_a_loaded_state_replaces_what_was_computed(head):
    """Of a method that has learned something else before."""
    stream = streams.digits("class")
    model, other_model = make_net(), make_net()
    head.end_task(model, stream[0])
    other = replace(head)
    other.end_task(other_model, stream[1])
    other.predict(other_model, stream[1].train.x)
    other.load_state_dict(head.state_dict())
    other_model.load_state_dict(model.state_dict())
    x = torch.cat([stream[0].train.x, stream[1].train.x])
    assert torch.equal(other.predict(other_model, x), head.predict(model, x))


@pytest.mark.parametrize("other", HEADS.values(), ids=HEADS)
def test_a_head_replaces_any_other(head, other):
    """Heads with equally many but other random features do not share them."""
    stream = streams.digits("class")
    model, fresh_model = make_net(), make_net()
    replace(other).end_task(model, stream[0])
    reference = replace(head)
    if hasattr(head, "seed"):
        head = replace(head, seed=5)
        reference = replace(reference, seed=5)
    head.end_task(model, stream[1])
    reference.end_task(fresh_model, stream[1])
    torch.testing.assert_close(predict(head, model, stream), predict(reference, fresh_model, stream))


def test_all_examples_cannot_be_forgotten(head):
    stream = streams.digits("class")
    model = make_net()
    head.end_task(model, stream[0])
    with pytest.raises(ValueError, match="none would be left"):
        head.forget(model, stream[0])


def test_models_in_half_precision():
    x, y = streams.digits("class")[0].train.x.half(), streams.digits("class")[0].train.y
    model = make_net(outputs=5).half()
    method = NearestMean()
    method.end_task(model, (x, y))
    outputs = method.predict(model, x)
    assert outputs.isfinite().all() and outputs.argmax(1).max() == 1


def test_online_learning_continues_after_a_prediction():
    stream = streams.digits("class")
    model, reference_model = make_net(), make_net()
    method, reference = RanPAC(50, online=True), RanPAC(50)
    model.eval()
    method.begin_task(model, stream[0])
    for batch in stream[0].batches(32):
        method.observe(batch, model(batch.x).detach())
        method.predict(model, batch.x)
    reference.end_task(reference_model, stream[0])
    torch.testing.assert_close(
        predict(method, model, stream), predict(reference, reference_model, stream), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("online", [False, True])
def test_a_compiled_model_equals_a_plain_one(head, online):
    stream = streams.digits("class")
    plain_method, plain_model = replace(head, online=online), make_net()
    train_tasks(plain_model, plain_method, stream.tasks[:2])
    method, model = replace(head, online=online), torch.compile(make_net(), backend="eager")
    x = next(stream[0].examples(50)).x
    model(x)
    train_tasks(model, method, stream.tasks[:2])
    torch.testing.assert_close(method.predict(model, x), plain_method.predict(plain_model, x))


def test_a_head_that_cannot_be_solved_does_not_count_its_examples():
    x, y = _few()
    method, model = StreamingLDA(shrinkage=0.0), make_net()
    with pytest.raises(ValueError, match="raise the shrinkage"):
        method.end_task(model, (x, y))
    method.shrinkage = 1e-3
    method.end_task(model, (x, y))
    assert method.statistics["counts"].sum() == len(x)


def test_an_output_layer_tied_to_an_embedding_is_refused(head):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.out = nn.Linear(8, 20, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x).mean(1))

    with pytest.raises(ValueError, match=r"shares its weight with embed.weight"):
        head.end_task(Tied(), (torch.randint(20, (8, 3)), torch.arange(8) % 2))


class InnerLayerLast(nn.Module):
    """A model whose last registered linear layer is not the output layer."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.aux = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(x.flatten(1)) + 0 * self.aux(x.flatten(1))


class LayerInList(nn.Module):
    """A model that calls its output layer by another reference than its registered one."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.layers = [self.out]

    def forward(self, x):
        return self.layers[0](x.flatten(1))


@pytest.mark.parametrize("model_class", [InnerLayerLast, LayerInList])
def test_a_layer_that_does_not_compute_the_outputs_is_refused(model_class):
    with pytest.raises(ValueError, match=r"does not compute the outputs|is called 0 times"):
        RanPAC(50).end_task(model_class(), streams.digits("class")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_predictions_of_float32(head, dtype):
    stream = streams.digits("class")
    model = make_net().to(dtype)
    reference, reference_model = replace(head), make_net()
    for task in stream:
        head.end_task(model, (task.train.x.to(dtype), task.train.y))
        reference.end_task(reference_model, task)
    x = torch.cat([task.test.x for task in stream])
    agreement = (head.predict(model, x.to(dtype)).argmax(1) == reference.predict(reference_model, x).argmax(1)).float()
    assert agreement.mean() > 0.9
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = reference.predict(reference_model, x)
    assert (outputs.argmax(1) == reference.predict(reference_model, x).argmax(1)).float().mean() > 0.9


def test_features_with_dropout_are_refused_online(head):
    method, model = replace(head, online=True), make_net()
    method.begin_task(model, None)
    model.train()
    batch = next(streams.digits("class")[0].batches(32))
    with pytest.raises(ValueError, match=r"call model.eval\(\) before the forward pass"):
        method.observe(batch, model(batch.x))


def test_nothing_observed_is_refused(head):
    with pytest.raises(ValueError, match=r"has observed no examples"):
        everlearn.train(make_net(), replace(head, online=True), streams.digits("class")[0], epochs=0)


def test_a_head_that_could_not_be_solved_is_still_stale():
    method, model = StreamingLDA(online=True, shrinkage=0.0), make_net()
    method.begin_task(model, None)
    x, y = _few()
    method.observe(Batch(x, y), model.eval()(x))
    for _ in range(2):
        with pytest.raises(ValueError, match="raise the shrinkage"):
            method.predict(model, x)
