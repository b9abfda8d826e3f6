"""ContinualClassifier: equal to the trainer, compatible with scikit-learn, with clear error messages."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import everlearn
from everlearn import (
    ER,
    EWC,
    KLDA,
    METHODS,
    FeCAM,
    Method,
    NearestMean,
    RanPAC,
    StreamingLDA,
    Task,
    allowed_classes,
    nets,
    streams,
)
from everlearn.integrations.sklearn import ContinualClassifier
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.heads import grow_output
from tests.helpers import make_method, state_vector


def small(inputs, outputs):
    return nets.mlp(inputs, outputs, hidden=(24,))


def with_dropout(inputs, outputs):
    return nn.Sequential(nn.Linear(*inputs, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, outputs))


def fast_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def digits(*classes, limit=120):
    x, y = streams.digits_data()[0]
    selected = torch.isin(y, torch.tensor(classes))
    return x[selected].flatten(1)[:limit].numpy(), y[selected][:limit].numpy()


def classifier(method=None, **options):
    return ContinualClassifier(**{"model": small, "method": method, "epochs": 2, "batch_size": 16, **options})


@pytest.mark.parametrize("make", [small, with_dropout])
@pytest.mark.parametrize("name", METHODS)
def test_training_equals_the_trainer(name, make):
    parts = [digits(0, 1), digits(2, 3), digits(0, 3)]
    classes = [0, 1, 2, 3]
    ours = classifier(make_method(name), model=make)
    for x, y in parts:
        ours.partial_fit(x, y, classes=classes)
    with seeded(derive(0, "model")):
        model = make((64,), 4)
    method = make_method(name)
    for call, (x, y) in enumerate(parts):
        with seeded(derive(0, "partial_fit", call + 1)):
            everlearn.train(model, method, Task((x, y), id=call), epochs=2, batch_size=16)
    assert torch.equal(state_vector(ours.model_), state_vector(model))
    x = torch.from_numpy(parts[2][0])
    assert np.array_equal(ours.predict(parts[2][0]), method.predict(model, x).argmax(1).numpy())


@pytest.mark.parametrize("name", ["ewc", "er", "packnet"])
def test_numbered_tasks_equal_the_task_incremental_trainer(name):
    parts = [digits(0, 1), digits(2, 3)]
    allowed = allowed_classes("task", [[0, 1], [2, 3]], 0)
    ours = classifier(make_method(name))
    for task, (x, y) in enumerate(parts):
        ours.partial_fit(x, y, task, classes=range(4))
    with seeded(derive(0, "model")):
        model = small((64,), 4)
    method = make_method(name)
    for number, (x, y) in enumerate(parts):
        with seeded(derive(0, "partial_fit", number + 1)):
            task = Task((x, y), id=number, allowed=allowed if number else allowed[:1, :2], known_at_test=True)
            everlearn.train(model, method, task, epochs=2, batch_size=16)
    assert torch.equal(state_vector(ours.model_), state_vector(model))
    for task, (x, y) in enumerate(parts):
        assert set(ours.predict(x, task)) <= {2 * task, 2 * task + 1}
        assert ours.predict_proba(x, task)[:, [2 - 2 * task, 3 - 2 * task]].max() == 0
        test_task = Task(test=(x, y), id=task, allowed=allowed, known_at_test=True)
        assert ours.score(x, y, task=task) == pytest.approx(everlearn.evaluate(model, method, [test_task])[0])
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    task_of_example = np.repeat([0, 1], [len(parts[0][1]), len(parts[1][1])])
    separate_predictions = [ours.predict(x, task) for task, (x, _) in enumerate(parts)]
    assert np.array_equal(ours.predict(x, task_of_example), np.concatenate(separate_predictions))
    assert ours.predict(x).shape == y.shape, "without the task all classes compete"


def test_parts_of_a_task_have_different_orders_of_examples():
    x, y = digits(0, 1)
    ours = classifier().partial_fit(x, y, 0).partial_fit(x, y, 0)
    with seeded(derive(0, "model")):
        model = small((64,), 2)
    for part in (0, 1):
        task = Task((x, y), id=0, part=part, allowed=torch.ones(1, 2, dtype=torch.bool))
        everlearn.train(model, Method(), task, epochs=2, batch_size=16)
    assert torch.equal(state_vector(ours.model_), state_vector(model))


def test_new_classes_widen_the_output():
    first = digits(3, 7)
    second = digits(1, 5, 7)
    ours = classifier(ER(100), epochs=8).partial_fit(*first)
    assert ours.classes_.tolist() == [3, 7] and ours.model_[3].out_features == 2
    manual = copy.deepcopy(ours)
    ours.partial_fit(*second)
    assert ours.classes_.tolist() == [1, 3, 5, 7] and ours.model_[3].out_features == 4
    assert ours.score(*first) > 0.8 and ours.score(*second) > 0.8
    probabilities = ours.predict_proba(first[0])
    assert probabilities.shape == (len(first[0]), 4) and np.allclose(probabilities.sum(1), 1)
    assert np.array_equal(ours.classes_[probabilities.argmax(1)], ours.predict(first[0])), "columns follow classes_"

    # Outputs are in order of first occurrence.
    model = manual.model_
    y = torch.tensor([{7: 1, 1: 2, 5: 3}[c] for c in second[1].tolist()])
    with seeded(derive(0, "partial_fit", 2)):
        grow_output(model, 4)
        everlearn.train(model, manual.method_, Task((second[0], y), id=1), epochs=8, batch_size=16)
    assert torch.equal(state_vector(model), state_vector(ours.model_))


def test_strings_and_other_labels():
    x, y = digits(0, 1, 2)
    names = np.array(["pear", "apple", "fig"])[y]
    ours = classifier(epochs=20).fit(x, names)
    assert ours.classes_.tolist() == ["apple", "fig", "pear"] and ours.score(x, names) > 0.9
    assert classifier(epochs=20).fit(x, names.astype(object)).score(x, names) > 0.9
    ours.partial_fit(x[:20], np.repeat(["pineapple"], 20))
    assert "pineapple" in ours.classes_ and "pineapple" in ours.predict(x)
    assert classifier().fit(x, y == 0).predict(x).dtype == bool
    assert classifier().fit(x, y.astype(float)).classes_.dtype == float
    assert classifier().fit(x.tolist(), y.tolist()).classes_.tolist() == [0, 1, 2]
    assert classifier().fit((x * 16).astype(int), y).n_features_in_ == 64


def test_a_module_is_copied_and_may_have_unused_outputs():
    x, y = digits(0, 1)
    module = small((64,), 9)
    initial_weights = state_vector(module).clone()
    ours = classifier(model=module).partial_fit(x, y)
    assert torch.equal(state_vector(module), initial_weights) and ours.predict_proba(x).shape == (len(x), 2)
    assert ours.partial_fit(*digits(2)).model_[3].out_features == 9
    images = classifier(model=nets.cnn).partial_fit(x.reshape(-1, 1, 8, 8), y)
    assert images.predict(x.reshape(-1, 1, 8, 8)).shape == y.shape


def test_method_and_random_state_are_unchanged():
    method = EWC()
    random_state = torch.get_rng_state()
    x, y = digits(0, 1)
    ours = classifier(method).partial_fit(x, y)
    assert repr(method.state_dict()) == repr(EWC().state_dict()) and torch.equal(torch.get_rng_state(), random_state)
    assert ours.method_.tasks == 1


def test_a_failed_call_changes_nothing():
    x, y = digits(0, 1)
    ours = classifier(EWC()).partial_fit(x, y)
    old_weights = state_vector(ours.model_).clone()
    old_predictions = ours.predict(x)
    ours.set_params(optimizer=lambda ps: torch.optim.SGD(ps, lr=1e30))
    with pytest.raises(FloatingPointError):
        ours.partial_fit(*digits(2, 3))
    assert torch.equal(state_vector(ours.model_), old_weights) and np.array_equal(ours.predict(x), old_predictions)
    assert ours.classes_.tolist() == [0, 1]


def test_copies_and_pickles_continue_equally():
    ours = classifier(ER(50)).partial_fit(*digits(0, 1))
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    final_weights = [state_vector(c.partial_fit(*digits(2, 3)).model_) for c in (ours, *copies)]
    assert torch.equal(final_weights[0], final_weights[1]) and torch.equal(final_weights[0], final_weights[2])


HEADS = {
    "nearest-mean": NearestMean(),
    "streaming-lda": StreamingLDA(),
    "ranpac": RanPAC(100),
    "recursive": RanPAC(100, ridge=1.0, recursive=True),
    "klda": KLDA(100),
    "fecam": FeCAM(),
    "online": RanPAC(100, online=True),
}


@pytest.fixture(params=HEADS, ids=str)
def head(request):
    return HEADS[request.param]


def pretrained():
    torch.manual_seed(0)
    return small((64,), 2)


def test_heads_learn_new_classes(head):
    """In two calls as in one, whatever the number of epochs."""
    first, second = digits(3, 7), digits(1, 5, 7)
    ours = classifier(head, model=pretrained(), epochs=3).partial_fit(*first).partial_fit(*second)
    joint = [np.concatenate(arrays) for arrays in zip(first, second, strict=True)]
    reference = classifier(head, model=pretrained(), epochs=1).fit(*joint)
    assert ours.classes_.tolist() == reference.classes_.tolist() == [1, 3, 5, 7]
    x = joint[0]
    assert np.allclose(ours.predict_proba(x), reference.predict_proba(x), atol=1e-4)
    assert np.array_equal(ours.predict(x), reference.predict(x)) and ours.score(*joint) > 0.75
    assert np.allclose(ours.predict_proba(x).sum(1), 1)
    assert torch.equal(ours.model_[1].weight, pretrained()[1].weight), "features are frozen"
    assert not head.statistics, "the given method is copied"


def test_forgotten_examples_equal_examples_never_seen(head):
    first, second = digits(3, 7), digits(1, 5, 7)
    ours = classifier(head, model=pretrained()).partial_fit(*first).partial_fit(*second)
    unchanged = copy.deepcopy(ours)
    assert ours.forget(second[0][:50], second[1][:50]) is ours
    reference = classifier(head, model=pretrained()).partial_fit(*first)
    reference.partial_fit(second[0][50:], second[1][50:], classes=[1, 5])
    x = np.concatenate([first[0], second[0]])
    assert np.allclose(ours.predict_proba(x), reference.predict_proba(x), atol=1e-4)
    assert not np.allclose(unchanged.predict_proba(x), reference.predict_proba(x), atol=1e-4), "a copy does not forget"

    is_one = second[1][50:] == 1
    ours.forget(second[0][50:][is_one], second[1][50:][is_one])
    assert 1 not in ours.predict(x) and ours.predict_proba(x)[:, 0].max() == 0 and ours.classes_.tolist()[0] == 1


def test_a_failed_forget_changes_nothing(head):
    x, y = digits(0, 1)
    ours = classifier(head, model=pretrained()).partial_fit(x, y)
    expected = ours.predict_proba(x)
    for arguments, message in [
        ((x, np.full(len(y), 9)), "y has the label 9, which was never learned"),
        ((np.concatenate([x, x]), np.concatenate([y, y])), "are to be forgotten, but"),
        ((x, y), "none would be left"),
        ((x[:3], y[:2]), "X has 3 examples and y has 2 labels"),
        ((x[:, :3], y), "X has 3 features"),
    ]:
        with pytest.raises(ValueError, match=message):
            ours.forget(*arguments)
    assert np.array_equal(ours.predict_proba(x), expected)


def test_copies_and_pickles_of_heads_continue_equally(head):
    ours = classifier(head, model=pretrained()).partial_fit(*digits(0, 1))
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    x, _ = digits(0, 1, 2, 3)
    expected = ours.partial_fit(*digits(2, 3)).predict_proba(x)
    assert all(np.array_equal(c.partial_fit(*digits(2, 3)).predict_proba(x), expected) for c in copies)


class NamedLayers(nn.Module):
    """A model whose last linear layer is not its output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.fc = nn.Linear(32, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.features(x))


def test_heads_use_the_named_output_layer(head):
    ours = classifier(head, model=NamedLayers(), output="fc").partial_fit(*digits(0, 1)).partial_fit(*digits(2, 3))
    assert ours.score(*digits(0, 1, 2, 3)) > 0.8 and ours.model_.unused.out_features == 3
    assert head.output is None


def test_heads_with_numbered_tasks(head):
    ours = classifier(head, model=pretrained()).partial_fit(*digits(0, 1), task=0).partial_fit(*digits(2, 3), task=1)
    assert set(ours.predict(digits(2, 3)[0], task=0)) <= {0, 1} and ours.score(*digits(2, 3), task=1) > 0.9


X = np.eye(4).repeat(3, 0)
Y = np.arange(4).repeat(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.predict(X), "is not trained yet: call partial_fit(X, y) first"),
        (lambda c: c.predict_proba(X), "is not trained yet"),
        (lambda c: c.score(X, Y), "is not trained yet"),
        (lambda c: c.partial_fit(X, Y).predict(X[:, :3]), "X has 3 features, but ContinualClassifier is expecting 4"),
        (lambda c: c.partial_fit(X, Y).partial_fit(X[:, :3], Y), "X has 3 features, but"),
        (lambda c: c.partial_fit(X, Y).predict(X.reshape(-1, 2, 2)), "X has 2 × 2 features, but"),
        (lambda c: c.partial_fit(np.where(X == 1, np.nan, X), Y), "12 of 12 rows of X hold NaN"),
        (lambda c: c.partial_fit(X, Y).predict(X * 1e300), "12 of 12 rows of X hold NaN or infinity"),
        (lambda c: c.partial_fit(X[0], Y), "X must have a row per example, got the shape (4,)"),
        (lambda c: c.partial_fit(X[:0], Y[:0]), "0 sample(s)"),
        (lambda c: c.partial_fit(X.astype(str), np.array(["a"] * 11)), "12 examples and y has 11 labels"),
        (lambda c: c.partial_fit([["a"]], ["b"]), "X must contain only numbers"),
        (lambda c: c.partial_fit(X, None), "requires y to be passed"),
        (lambda c: c.partial_fit(X, Y[:, None]), "got the shape (12, 1): give y.ravel()"),
        (lambda c: c.partial_fit(X, Y / 2), "Unknown label type"),
        (lambda c: c.partial_fit(X, np.full(12, np.nan)), "Input y contains NaN"),
        (lambda c: c.partial_fit(X, np.array([1, "a"] * 6, dtype=object)), "Unknown label type"),
        (lambda c: c.partial_fit(X, Y).partial_fit(X, Y.astype(str)), "strings in one call and numbers in another"),
        (lambda c: c.partial_fit(X, Y, task=-1), "task: got -1, allowed: an integer from 0"),
        (
            lambda c: c.partial_fit(X, Y, task=0).partial_fit(X, Y),
            "task: give it in every call of partial_fit or in none",
        ),
        (lambda c: c.partial_fit(X, Y).partial_fit(X, Y, task=0), "task: give it in every call"),
        (lambda c: c.partial_fit(X, Y).predict(X, task=0), "task: got 0, but tasks had no numbers"),
        (lambda c: c.partial_fit(X, Y, task=1).predict(X, task=2), "task: got 2, but the tasks learned are 1:"),
        (
            lambda c: c.partial_fit(X, Y, task=1).predict_proba(X, [1, 0] * 6),
            "task: got 0, but the tasks learned are 1:",
        ),
        (
            lambda c: c.partial_fit(X, Y, task=0).predict(X, task=0.5),
            "task: got float64 of shape (), allowed: one integer",
        ),
        (
            lambda c: c.partial_fit(X, Y, task=0).predict(X, task=[0, 0]),
            "task: got int64 of shape (2,), allowed: one integer",
        ),
        (lambda c: c.forget(X, Y), "is not trained yet"),
        (lambda c: c.partial_fit(X, Y).forget(X, Y), "Method cannot forget examples"),
        (lambda c: c.set_params(epoch=3), "has no parameter 'epoch'; there are: model, method, optimizer, epochs"),
        (lambda c: c.set_params(model=nn.Linear(4, 2)).fit(X, Y), "The model is the output layer itself"),
        (lambda c: c.set_params(model=nn.Linear(5, 2)).fit(X, Y), "The model cannot take the inputs of X"),
        (lambda c: c.set_params(model=nn.Flatten(0)).fit(X, Y), "a tensor with two axes; it gave one of shape (4,)"),
        (lambda c: c.set_params(epochs=0).fit(X, Y), "epochs must be a whole number of at least 1"),
    ],
)
def test_error_messages(call, message):
    with pytest.raises((ValueError, TypeError)) as error:
        call(classifier())
    assert message in str(error.value)


def test_parameters():
    ours = classifier(EWC(3.0))
    assert ours.get_params(deep=False).keys() == set(ContinualClassifier.__dataclass_fields__)
    assert ours.get_params()["method__strength"] == 3.0 and ours.get_params()["epochs"] == 2
    method = ours.method
    assert ours.set_params(method__strength=5.0, epochs=7) is ours
    assert ours.method.strength == 5.0 and ours.epochs == 7 and method.strength == 3.0
    assert "method__strength" not in classifier(EWC() + ER()).get_params()
    er = ER(5)
    ours.set_params(method__capacity=7, method=er)
    assert ours.method.capacity == 7 and er.capacity == 5, "the method first, then its hyperparameters"
    with pytest.raises(ValueError, match="has no parameter 'method__strength'"):
        ours.set_params(method__strength=1.0)


def test_scikit_learn_is_not_imported():
    code = "import sys; import everlearn.integrations.sklearn; assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestInScikitLearn:
    """Tests that need scikit-learn."""

    def test_clone(self):
        base = pytest.importorskip("sklearn.base")
        ours = classifier(EWC(3.0), model=small((64,), 3)).partial_fit(*digits(0, 1))
        cloned = base.clone(ours)
        assert cloned.method.strength == 3.0 and not hasattr(cloned, "classes_") and base.is_classifier(cloned)
        assert torch.equal(state_vector(cloned.partial_fit(*digits(0, 1)).model_), state_vector(ours.model_))

    def test_pipelines_cross_validation_and_grids(self):
        selection = pytest.importorskip("sklearn.model_selection")
        pipeline = pytest.importorskip("sklearn.pipeline")
        preprocessing = pytest.importorskip("sklearn.preprocessing")
        x, y = digits(0, 1, 2, limit=150)
        names = np.array(["pear", "apple", "fig"])[y]
        scaled = pipeline.make_pipeline(preprocessing.StandardScaler(), classifier(epochs=20))
        assert selection.cross_val_score(scaled, x, names, cv=3).mean() > 0.85
        assert selection.cross_val_score(scaled, x, names, cv=3, scoring="neg_log_loss").mean() > -0.5
        grid = selection.GridSearchCV(classifier(EWC()), {"method__strength": [1.0, 9.0], "epochs": [1, 9]}, cv=2)
        assert grid.fit(x, names).best_params_["epochs"] == 9
        sizes, _, scores = selection.learning_curve(
            classifier(epochs=9), x, names, train_sizes=[30, 60], exploit_incremental_learning=True, cv=2
        )
        assert sizes.tolist() == [30, 60] and scores[-1].mean() > 0.7

    def test_heads_in_cross_validation_and_grids(self, head):
        selection = pytest.importorskip("sklearn.model_selection")
        x, y = digits(0, 1, 2, limit=150)
        names = np.array(["pear", "apple", "fig"])[y]
        ours = classifier(head, model=pretrained())
        assert selection.cross_val_score(ours, x, names, cv=3).mean() > 0.8
        grid = selection.GridSearchCV(ours, {"method__normalize": [True, False]}, cv=2)
        assert grid.fit(x, names).best_estimator_.method_.normalize == grid.best_params_["method__normalize"]

    def test_linear_discriminants_equal_those_of_scikit_learn(self):
        discriminant_analysis = pytest.importorskip("sklearn.discriminant_analysis")
        parts = [digits(0, 1), digits(2, 3)]
        net = pretrained()
        ours = classifier(StreamingLDA(shrinkage=1e-9, normalize=False), model=net)
        for x, y in parts:
            ours.partial_fit(x, y)
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        with torch.no_grad():
            features = net[:3](torch.from_numpy(x)).double().numpy()
        is_used = features.std(0) > 0
        priors = np.full(4, 0.25)
        reference = discriminant_analysis.LinearDiscriminantAnalysis(solver="lsqr", priors=priors)
        reference.fit(features[:, is_used], y)
        assert (ours.predict(x) == reference.predict(features[:, is_used])).mean() > 0.99

    @pytest.mark.filterwarnings("ignore:Estimator ContinualClassifier does not inherit")  # by design
    def test_the_estimator_checks_of_scikit_learn(self):
        checks = pytest.importorskip("sklearn.utils.estimator_checks")
        expected_failures = {"check_supervised_y_2d": "a column of labels is refused, not flattened with a warning"}
        results = checks.check_estimator(
            classifier(optimizer=fast_adam, epochs=8),
            expected_failed_checks=expected_failures,
            on_fail=None,
            on_skip=None,
        )
        failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
        assert not failed and len(results) > 40
