import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from everlearn import Bernoulli, Gaussian, streams
from everlearn.streams import from_tasks, online, permuted, rotated, split

X, Y = torch.rand(40, 1, 4, 4), torch.arange(40) % 8
DATA = (X, Y), (X[:16], Y[:16])
ITEMS = TensorDataset(*DATA[0]), TensorDataset(*DATA[1])
SCENARIOS = ["task", "domain", "class"]


def load_all(task, split_name="train"):
    batches = list(task.examples(100, split_name))
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


@pytest.mark.parametrize("data", [DATA, ITEMS], ids=["arrays", "dataset"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_split_assigns_every_class_to_one_task(scenario, data):
    stream = split(*data, tasks=4, scenario=scenario)
    assert stream.outputs == (2 if scenario == "domain" else 8) and stream.inputs == (1, 4, 4)
    for index, task in enumerate(stream):
        x, y = load_all(task)
        is_in_task = (2 * index == Y) | (2 * index + 1 == Y)
        assert torch.equal(x, X[is_in_task])
        assert torch.equal(y, Y[is_in_task] % 2 if scenario == "domain" else Y[is_in_task])
        assert task.known_at_test == (scenario == "task")
        assert len(load_all(task, "test")[0]) == 4


def test_class_order_is_natural_for_seed_0_random_otherwise_or_given():
    assert split(*DATA, tasks=4).settings["class_order"] == list(range(8))
    orders = [split(*DATA, tasks=4, seed=seed).settings["class_order"] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(8))
    stream = split(*DATA, tasks=2, class_order=[7, 0, 3, 1])
    assert load_all(stream[0])[1].unique().tolist() == [0, 7]
    assert stream[0].allowed[0].nonzero().flatten().tolist() == [0, 7]


def test_validation_share_is_held_out():
    stream = split(*DATA, tasks=2, valid=0.25)
    for task in stream:
        train = load_all(task)[0]
        valid = load_all(task, "valid")[0]
        assert len(train) == 15 and len(valid) == 5
        assert torch.cat([train, valid]).unique(dim=0).shape[0] == 20


@pytest.mark.parametrize("data", [DATA, ITEMS], ids=["arrays", "dataset"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_permuted_tasks_are_permutations(scenario, data):
    stream = permuted(*data, tasks=3, scenario=scenario, seed=5)
    assert stream.outputs == (8 if scenario == "domain" else 24)
    views = [load_all(task)[0] for task in stream]
    for t, view in enumerate(views):
        assert not torch.equal(view, X) and view.shape == X.shape
        assert torch.equal(view.flatten(1).sort(1).values, X.flatten(1).sort(1).values)
        assert torch.equal(load_all(stream[t])[1], Y if scenario == "domain" else Y + 8 * t)
    assert not torch.equal(views[0], views[1])
    repeated = permuted(*data, tasks=3, scenario=scenario, seed=5)
    assert torch.equal(load_all(repeated[1])[0], views[1])


def test_views_share_memory_of_their_data():
    stream = permuted(*DATA, tasks=3)
    assert len({task.train.x.data_ptr() for task in stream}) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_rotated_by_quarter_turns_is_exact(scenario):
    stream = rotated(*DATA, tasks=4, angles=[0, 90, 180, 270], scenario=scenario)
    for k, task in enumerate(stream):
        torch.testing.assert_close(load_all(task)[0], torch.rot90(X, k, (2, 3)), atol=1e-6, rtol=0)


def test_rotation_keeps_center_of_wide_image():
    x = torch.zeros(1, 1, 3, 7)
    x[0, 0, 1, 3] = 1
    assert rotated((x, Y[:1]), (x, Y[:1]), tasks=1, angles=[33.0])[0].train.view(x)[0, 0, 1, 3] > 0.99


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_online_chunks_cover_each_task_once(scenario):
    offline_stream = split(*DATA, tasks=4, scenario=scenario)
    stream = online(offline_stream, chunk=3)
    assert len(stream) == 4 * 4 and stream.test_tasks is offline_stream.test_tasks
    assert [task.id for task in stream] == [i // 4 for i in range(16)]
    rows = torch.cat([load_all(task)[0] for task in stream])
    assert sorted(rows.flatten(1).tolist()) == sorted(X.flatten(1).tolist())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_from_tasks(scenario):
    pairs = [((X[Y < 4], Y[Y < 4]), (X[:4], Y[:4])), ((X[Y >= 4], Y[Y >= 4]), (X[4:8], Y[4:8]))]
    stream = from_tasks(pairs, scenario=scenario, names=["low", "high"])
    assert [str(task) for task in stream] == ["low", "high"] and stream.outputs == 8
    if scenario != "domain":
        assert stream[0].allowed[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_from_tasks_of_loaders_need_classes():
    loader = DataLoader(ITEMS[0], batch_size=8)
    with pytest.raises(TypeError, match=r"name them, as in classes=\[\[0, 1\], \[2, 3\]\]"):
        from_tasks([(loader, loader)], scenario="class")
    assert from_tasks([(loader, loader)], scenario="class", classes=[range(8)]).outputs == 8
    assert from_tasks([(loader, loader)], scenario="domain", outputs=8).outputs == 8


def test_inputs_with_several_parts():
    inputs = {"ids": X, "mask": X > 0.5}
    stream = from_tasks([((inputs, Y), (inputs, Y))], scenario="domain")
    assert stream.inputs == (1, 4, 4) and set(next(stream[0].batches(4)).x) == {"ids", "mask"}
    stream = from_tasks([(((X, X), Y), ((X, X), Y))], scenario="domain")
    assert len(next(stream[0].batches(4)).x) == 2


def test_joint_rotated_stream_in_small_batches():
    joint = rotated(*DATA, tasks=4).joint()
    assert sum(len(batch) for batch in joint[0].batches(2)) == 160


def test_tasks_with_different_transforms_are_not_joined():
    stream = split(*DATA, tasks=2)
    stream[0].transform = torch.neg
    with pytest.raises(ValueError, match="differ in their transform"):
        stream.joint()


def test_inspecting_dataset_keeps_random_state():
    class Random(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return torch.rand(4), i % 2

    rng_state = torch.get_rng_state()
    split(Random(), Random(), tasks=2)
    assert torch.equal(rng_state, torch.get_rng_state())


def test_from_tasks_with_regression_and_multi_label_targets():
    targets = torch.rand(40, 3)
    assert from_tasks([((X, targets), (X, targets))], scenario="domain", likelihood=Gaussian()).outputs == 3
    labels = targets > 0.5
    assert from_tasks([((X, labels), (X, labels))], scenario="domain", likelihood=Bernoulli()).outputs == 3
    with pytest.raises(ValueError, match="is about classes: use scenario='domain'"):
        from_tasks([((X, targets), (X, targets))], scenario="class", likelihood=Gaussian())


@pytest.mark.parametrize(
    ("make_stream", "message"),
    [
        (lambda: split(*DATA, tasks=9), "Cannot split 8 classes into 9 tasks"),
        (lambda: split(*DATA, tasks=3, scenario="domain"), "8 cannot be divided by 3"),
        (lambda: split(*DATA, class_order=[0, 0]), "name classes of the data once"),
        (lambda: split(*DATA, scenario="time"), "Unknown scenario 'time'"),
        (lambda: split(*DATA, valid=1.0), "share of the training examples"),
        (lambda: split((X, Y.float()), (X, Y.float())), "must be integers"),
        (lambda: split(DataLoader(ITEMS[0]), DataLoader(ITEMS[1])), "use streams.from_tasks"),
        (lambda: rotated((X.flatten(1), Y), (X.flatten(1), Y)), "Only images"),
        (lambda: online(split(*DATA, tasks=2), chunk=0), "whole number of at least 1 example"),
        (lambda: from_tasks([(X, Y, X)]), "Task 0 must be a pair"),
        (
            lambda: from_tasks([(X, Y), (X, Y)]),
            (
                r"Task 0 has training .* pair \(train, test\), such as \(\(x, y\), \(x_test, y_test\)\), "
                r"or \(\(x, y\), None\)"
            ),
        ),
        (lambda: from_tasks([((X[:0], Y[:0]), (X, Y))]), "Task 0 has no examples"),
        (lambda: from_tasks([]), "at least one task"),
        (lambda: from_tasks([DATA], names=["a", "b"]), "1 tasks but 2 names"),
        (lambda: from_tasks([DATA], classes=[[0], [1]]), "1 tasks but 2 classes"),
        (lambda: split((X[:8], Y[:8]), (X[:8], Y[:8]), tasks=8, valid=0.5), "leaves none to train on"),
        (lambda: rotated(*DATA, tasks=3, angles=[0, 90]), "2 angles make 2 tasks, not 3"),
    ],
)
def test_invalid_streams_are_refused(make_stream, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_stream()


def test_included_digits():
    streams.digits_data()[0][0].zero_()  # changes only a copy
    (x, y), (x_test, y_test) = streams.digits_data()
    assert len(x) + len(x_test) == 1797 and x.shape[1:] == (1, 8, 8)
    assert x.min() == 0 and x.max() == 1
    assert y.bincount().tolist() == [143, 146, 142, 147, 145, 146, 145, 144, 140, 144]
    assert y_test.bincount(minlength=10).min() >= 34


@pytest.mark.parametrize("name", [name for name in streams.STREAMS if name.endswith("digits")])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_named_streams_exist_in_every_scenario(name, scenario):
    stream = streams.STREAMS[name](scenario=scenario, seed=1, valid=0.1)
    assert stream.name == name and stream.scenario == scenario
    assert str(stream).startswith(f"{name}: ")


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_disjoint_digits_share_out_the_images(scenario):
    stream = streams.disjoint_digits(scenario, seed=2)
    (x, y), (x_test, y_test) = streams.digits_data()
    assert len(stream) == 4 and stream.outputs == (10 if scenario == "domain" else 40)

    # Sorted pixels do not depend on permutations: together the tasks have each image once.
    shares = [task.train.x for task in stream]
    images = torch.cat(shares).flatten(1).sort(1).values
    assert sorted(images.tolist()) == sorted(x.flatten(1).sort(1).values.tolist())
    counts = torch.stack([torch.bincount(task.train.y % 10) for task in stream])
    assert (counts.max(0).values - counts.min(0).values).max() <= 1
    assert counts.sum(0).equal(torch.bincount(y))

    # Every task has all test images in its own order of pixels.
    for t, task in enumerate(stream):
        labels = y_test if scenario == "domain" else y_test + 10 * t
        assert task.test.y.equal(labels)
        assert task.test.x.flatten(1).sort(1).values.equal(x_test.flatten(1).sort(1).values)
    assert not stream[0].test.x.equal(stream[1].test.x)
    assert streams.disjoint_digits(scenario, seed=2)[1].train.x.equal(stream[1].train.x)
