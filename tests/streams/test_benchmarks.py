"""Benchmarks by name, from small copies of the published files, and from the real ones where they are."""

import inspect

import pytest
import torch

import everlearn
from everlearn import Method, nets, streams
from everlearn.sources.gas_drift import BATCH_SIZES
from everlearn.streams import STREAMS, bag
from everlearn.streams.subset import ImageResizer
from tests import layouts

NAMES = [name for name in STREAMS if not name.endswith("-digits") and name != "digits"]


@pytest.fixture
def root(tmp_path, without_checksums):
    """A folder with small copies of all sets but CORe50."""
    layouts.write_mnist(tmp_path / "mnist")
    layouts.write_mnist(tmp_path / "fashion_mnist", seed=1)
    layouts.write_notmnist(tmp_path / "notmnist_10k")
    layouts.write_cifar10(tmp_path / "cifar-10-batches-bin")
    layouts.write_cifar100(tmp_path / "cifar-100-binary")
    layouts.write_usps(tmp_path / "usps")
    layouts.write_svhn(tmp_path / "svhn")
    layouts.write_omniglot(tmp_path / "omniglot" / "images_background")
    layouts.write_clinc150(tmp_path / "clinc150")
    layouts.write_gas(tmp_path / "gas_drift", {b: BATCH_SIZES[b] for b in (4, 5, 8)})
    return tmp_path


@pytest.fixture
def core50(tmp_path):
    for s in range(1, 12):
        layouts.write_images(
            tmp_path / "core50_128x128" / f"s{s}", [f"o{o}" for o in range(1, 51)], images_per_class=1, seed=s
        )
    return tmp_path


def all_of(task, which="train"):
    batches = list(task.examples(1000, which))
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


def classes(task, which="train"):
    return all_of(task, which)[1].unique().tolist()


def test_every_benchmark_is_asked_in_one_way():
    for name in NAMES:
        wanted = inspect.signature(STREAMS[name]).parameters
        assert list(wanted)[:5] == ["scenario", "tasks", "seed", "valid", "root"], name
        assert STREAMS[name].__doc__


@pytest.mark.parametrize("name", ["split-mnist", "permuted-mnist", "rotated-mnist", "split-fashion-mnist"])
def test_mnist_streams(name, root):
    stream = STREAMS[name](root=root, tasks=2)
    x, y = all_of(stream[0])
    assert stream.inputs == (1, 28, 28) and x.dtype == torch.float32 and x.min() >= 0 and x.max() <= 1
    assert y.dtype == torch.int64 and stream.name == name and len(stream) == 2


@pytest.mark.parametrize(("name", "tasks", "outputs"), [("split-cifar10", 5, 10), ("split-cifar100", 10, 100)])
def test_cifar_streams(name, tasks, outputs, root):
    stream = STREAMS[name](root=root)
    assert len(stream) == tasks and stream.outputs == outputs and stream.inputs == (3, 32, 32)
    assert classes(stream[0]) == list(range(outputs // tasks))


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_five_datasets(scenario, root):
    stream = streams.five_datasets(scenario, root=root)
    assert [str(t) for t in stream] == ["mnist", "fashion_mnist", "notmnist", "svhn", "cifar10"]
    assert stream.name == "five-datasets" and stream.inputs == (3, 32, 32)
    assert stream.outputs == (10 if scenario == "domain" else 50)
    for t, task in enumerate(stream):
        first = 0 if scenario == "domain" else 10 * t
        assert classes(task) == classes(task, "test") == list(range(first, first + 10))
        x, _ = all_of(task)
        assert x.shape[1:] == (3, 32, 32) and x.min() >= 0 and x.max() <= 1
    x, _ = all_of(stream[0])
    assert torch.equal(x[:, 0], x[:, 2]), "grey images have three equal channels"
    assert stream[0].train.x.dtype == torch.uint8, "they are kept in bytes"
    assert sum(len(b) for b in stream.joint()[0].batches(32)) == sum(len(t.train) for t in stream)


def test_sets_that_are_not_here_are_named(root, tmp_path):
    (root / "svhn" / "test_32x32.mat").unlink()
    (root / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.warns(UserWarning, match="five-datasets is built without svhn, cifar10, which were not found"):
        stream = streams.five_datasets(root=root)
    assert stream.name == "five-datasets-of-mnist-fashion_mnist-notmnist"
    assert stream.settings["sets"] == ["mnist", "fashion_mnist", "notmnist"]
    with pytest.warns(UserWarning):
        assert streams.five_datasets(root=root, tasks=2).name == "five-datasets-of-mnist-fashion_mnist"
    with pytest.raises(
        FileNotFoundError, match=r"needs at least two of its data sets, and has none. mnist is incomplete"
    ):
        streams.five_datasets(root=tmp_path / "empty")


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_digits_domains(scenario, root):
    stream = streams.digits_domains(scenario, root=root)
    assert [str(t) for t in stream] == ["mnist", "usps"] and stream.inputs == (1, 28, 28)
    assert stream.outputs == (10 if scenario == "domain" else 20)
    small = streams.digits_domains(root=root, size=16)
    assert small.inputs == (1, 16, 16) and torch.equal(all_of(small[1])[0], small[1].train.x)


def test_fitted_images_keep_their_mean_and_refuse_other_shapes():
    x = torch.rand(4, 1, 28, 28)
    assert ImageResizer(1, 28)(x) is not None and torch.equal(ImageResizer(1, 28)(x), x)
    torch.testing.assert_close(ImageResizer(3, 14)(x).mean((1, 2, 3)), x.mean((1, 2, 3)), atol=0.02, rtol=0)
    for shape in [(4, 28, 28), (4, 2, 28, 28)]:
        with pytest.raises(ValueError, match="Images with 1 or 3 channels"):
            ImageResizer(3, 32)(torch.rand(shape))


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_omniglot_has_an_alphabet_per_task(scenario, root):
    stream = streams.omniglot(scenario, root=root)
    assert [str(t) for t in stream] == ["Greek", "Korean", "Latin"] and stream.outputs == 9
    assert [classes(t) for t in stream] == [classes(t, "test") for t in stream] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert all_of(stream[0])[0].shape == (12, 1, 28, 28)
    orders = [streams.omniglot(root=root, seed=s).settings["alphabets"] for s in range(8)]
    assert orders[0] == ["Greek", "Korean", "Latin"] and len({tuple(o) for o in orders}) > 1
    assert [len(t.train) for t in streams.omniglot(root=root, tasks=2)] == [12, 16]
    for task in streams.omniglot(root=root, seed=3):
        own = task.allowed[task.id].nonzero().flatten().tolist()
        assert set(classes(task)) == set(own)
    with pytest.raises(ValueError, match="no domain-incremental form"):
        streams.omniglot("domain", root=root)


def test_mas_sequence_from_folders_and_published_files(root):
    layouts.write_images(root / "scenes", ["hall", "roof", "pool"])
    layouts.write_images(root / "birds", ["auk", "jay"])
    with pytest.warns(UserWarning, match="without flowers, cars, aircraft, actions, letters, which"):
        stream = streams.mas_sequence(root=root, size=16)
    assert stream.settings["sets"] == ["scenes", "birds", "svhn"] and stream.settings["size"] == 16
    assert stream.name == "mas-sequence-of-scenes-birds-svhn"
    assert [classes(t) for t in stream] == [[0, 1, 2], [3, 4], list(range(5, 15))] and stream.inputs == (3, 16, 16)
    layouts.write_images(root / "flowers", ["rose", "lily"])  # class folders in place of the published files
    layouts.write_images(root / "chars74k" / "English" / "Fnt", [f"Sample{i:03d}" for i in range(1, 63)])
    with pytest.warns(UserWarning, match="without cars, aircraft, actions, which"):
        stream = streams.mas_sequence("class", root=root, size=16)
    assert [str(t) for t in stream] == ["flowers", "scenes", "birds", "letters", "svhn"] and stream.outputs == 79
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="no domain-incremental form"):
        streams.mas_sequence("domain", root=root)
    with pytest.raises(FileNotFoundError, match=r"has none.*Where is scenes\? Give root=… or EVERLEARN_DATA"):
        streams.mas_sequence()


def test_mas_sequence_does_not_take_half_a_published_set_for_folders_of_images(root):
    layouts.write_images(root / "birds", ["auk", "jay"])
    layouts.write_images(root / "cars", ["van", "cab"])
    layouts.write_images(root / "flowers", ["jpg"])
    (root / "svhn" / "test_32x32.mat").unlink()
    with pytest.warns(UserWarning, match=r"missing imagelabels.mat, setid.mat .*missing test_32x32.mat; get it from"):
        stream = streams.mas_sequence(root=root, size=16)
    assert stream.settings["sets"] == ["birds", "cars"]


def test_core50_new_instances(core50):
    stream = streams.core50_ni(root=core50, size=8)
    assert [str(t) for t in stream] == [f"session {s}" for s in (1, 2, 4, 5, 6, 8, 9, 11)]
    assert stream.outputs == 50 and stream.inputs == (3, 8, 8)
    for task in stream:
        assert classes(task) == list(range(50)) and len(task.test) == 150
        assert {p.split("/")[-3] for p in task.test.dataset.paths} == {"s3", "s7", "s10"}
        assert len({p.split("/")[-3] for p in task.train.dataset.paths} - {"s3", "s7", "s10"}) == 1
    orders = [streams.core50_ni(root=core50, seed=s, size=8).settings["sessions"] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match="are domain-incremental, got 'class'; see core50_nc"):
        streams.core50_ni("class", root=core50)


def test_core50_new_classes(core50):
    stream = streams.core50_nc(root=core50 / "core50_128x128", size=8, valid=0.1)
    assert [len(classes(t)) for t in stream] == [10] + [5] * 8 and stream.outputs == 50
    assert classes(stream[1]) == [10, 11, 12, 13, 14] == classes(stream[1], "test")
    assert len(stream[1].train) + len(stream[1].valid) == 5 * 8 and len(stream[1].test) == 5 * 3
    other = streams.core50_nc("task", root=core50, size=8, seed=1, tasks=3)
    assert len(other) == 3 and other.settings["class_order"] != stream.settings["class_order"]
    with pytest.raises(ValueError, match="are class- or task-incremental"):
        streams.core50_nc("domain", root=core50)
    (core50 / "core50_128x128" / "s4" / "o7").rename(core50 / "away")
    with pytest.raises(FileNotFoundError, match=r"1 of 550 folders are missing, s4/o7 among them"):
        streams.core50_nc(root=core50)


def test_core50_when_it_is_not_here(tmp_path, monkeypatch):
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"550 of 550 folders are missing.*vlomonaco.github.io/core50"):
        streams.core50_ni(root=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"Where is core50\?"):
        streams.core50_ni()
    for s in range(1, 12):
        for o in range(1, 51):
            (tmp_path / f"s{s}" / f"o{o}").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no images in its folders"):
        streams.core50_ni(root=tmp_path)


class TestGasDrift:
    def test_a_task_per_batch_in_the_order_of_time(self, root):
        stream = streams.gas_drift(root=root)
        names = ["batch 4 (months 14-15)", "batch 5 (month 16)", "batch 8 (months 22-23)"]
        assert [str(t) for t in stream] == names == stream.settings["sets"]
        assert stream.outputs == 6 and stream.inputs == (128,) and stream.scenario == "domain"
        assert [len(t.train) + len(t.test) for t in stream] == [BATCH_SIZES[b] for b in (4, 5, 8)]

    def test_only_the_first_tasks_training_examples_are_the_measure(self, root):
        stream = streams.gas_drift(root=root, valid=0.25)
        x = stream[0].train.x
        torch.testing.assert_close(x.mean(0), torch.zeros(128), atol=1e-4, rtol=0)
        torch.testing.assert_close(x.std(0), torch.ones(128), atol=1e-4, rtol=0)
        assert stream[0].valid.x.mean(0).abs().max() > 1e-3 and stream[2].train.x.mean() > 1, "later batches drift"
        alone = streams.gas_drift(root=root, valid=0.25, tasks=1)
        assert torch.equal(alone[0].train.x, x), "what comes later changes nothing before"

    def test_the_split_is_by_seed(self, root):
        one, again, other = (streams.gas_drift(root=root, seed=s) for s in (1, 1, 2))
        assert torch.equal(one[1].test.x, again[1].test.x) and not torch.equal(one[1].test.y, other[1].test.y)
        both = torch.cat([one[1].train.x, one[1].test.x])
        assert len(both.unique(dim=0)) == len(both) == BATCH_SIZES[5], "no measurement is in both"
        assert len(streams.gas_drift(root=root, test=0.5)[0].test) == 80
        for share in (0, 1):
            with pytest.raises(ValueError, match="share of measurements for tests must lie between"):
                streams.gas_drift(root=root, test=share)

    @pytest.mark.parametrize("scenario", ["task", "class"])
    def test_classes_of_their_own(self, scenario, root):
        stream = streams.gas_drift(scenario, root=root)
        assert stream.outputs == 18 and classes(stream[1]) == list(range(6, 12))

    def test_a_wrong_number_of_tasks(self, root):
        for tasks in (0, 4, 1.5):
            with pytest.raises(ValueError, match="gas-drift has 3 tasks here: ask for 1 to 3"):
                streams.gas_drift(root=root, tasks=tasks)

    def test_the_real_drift(self, shared_data):
        stream = streams.gas_drift(root=shared_data)
        assert [int(str(t).split()[1]) for t in stream] == [1, 2, 3, 4, 5, 6, 8, 9]
        assert stream.outputs == 6 and classes(stream[2]) == [0, 1, 2, 3, 4], "no toluene in batches 3 to 5"
        x, y = (torch.cat(parts) for parts in zip(*(all_of(task) for task in stream.tasks[:2]), strict=True))
        ones = torch.nn.functional.one_hot(y, 6).double()
        x = x.double()
        w = torch.linalg.solve(x.T @ x + torch.eye(128), x.T @ ones)  # least squares, of what the first months show
        right = [(all_of(t, "test")[0].double() @ w).argmax(1).eq(all_of(t, "test")[1]).double().mean() for t in stream]
        assert right[0] > 0.9 and right[1] > 0.9 and max(right[6:]) < 0.75, "it fails on the sensors of later months"


class TestIntents:
    @pytest.mark.parametrize("scenario", ["task", "domain", "class"])
    def test_a_domain_per_task(self, scenario, root):
        stream = streams.clinc150(scenario, root=root)
        assert [str(t) for t in stream] == [f"domain{d}" for d in range(10)] == stream.settings["domains"]
        assert stream.outputs == (15 if scenario == "domain" else 150) and stream.inputs == (2048,)
        for t, task in enumerate(stream):
            first = 0 if scenario == "domain" else 15 * t
            assert classes(task) == classes(task, "test") == list(range(first, first + 15))

    def test_domain_labels_are_places_within_the_domain(self, root):
        by_class, by_domain = (streams.clinc150(s, root=root, seed=2) for s in ("class", "domain"))
        assert [str(t) for t in by_class] == [str(t) for t in by_domain] != [f"domain{d}" for d in range(10)]
        for a, b in zip(by_class, by_domain, strict=True):
            assert torch.equal(all_of(a)[1] % 15, all_of(b)[1]) and torch.equal(all_of(a)[0], all_of(b)[0])

    def test_numbers_of_the_users_own(self, root):
        def length(texts):
            return torch.tensor([[float(len(t))] for t in texts])

        stream = streams.clinc150(root=root, features=length, tasks=5)
        assert stream.inputs == (1,) and stream.settings["features"] == "length" and len(classes(stream[0])) == 30
        assert str(stream[0]) == "task 0"
        with pytest.raises(TypeError, match=r"features are 'bag' or a function .* got 'tfidf'"):
            streams.clinc150(root=root, features="tfidf")

    def test_the_real_intents_are_learned_by_a_small_net(self, shared_data):
        stream = streams.clinc150("task", root=shared_data, tasks=10)
        assert str(stream[0]) == "banking" and [len(t.train) for t in stream] == [1500] * 10
        task = stream[5]
        one = streams.from_tasks([((task.train.x, task.train.y), (task.test.x, task.test.y))], scenario="class")
        result = everlearn.run(lambda: nets.mlp(2048, 90, hidden=(64,)), Method(), one, epochs=5, batch_size=32)
        assert result.average_accuracy > 0.85


class TestBag:
    def test_rows(self):
        x = bag(["turn on the light", "Turn ON, the light?", "", "light the on turn"])
        assert x.shape == (4, 2048) and torch.equal(x[0], x[1]) and not x[2].any()
        assert x[[0, 3]].norm(dim=1).tolist() == pytest.approx([1, 1])
        assert 0.2 < x[0] @ x[3] < 0.99, "the same words, other pairs"
        assert bag(["a b"], width=5).shape == (1, 5) and bag([]).shape == (0, 2048)
        with pytest.raises(ValueError, match="at least 1 wide"):
            bag(["a"], width=0)

    def test_equals_a_count_by_hand(self):
        import zlib

        x = torch.zeros(16)
        for gram in ("my", "bank", "my bank"):
            code = zlib.crc32(gram.encode())
            x[(code >> 1) % 16] += 1 if code % 2 else -1
        torch.testing.assert_close(bag(["My bank"], 16)[0], x / x.norm())


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_one_stream(name, root, core50):
    def make():
        with pytest.warns(UserWarning) if name == "mas-sequence" else _silence():
            return STREAMS[name](seed=1, valid=0.2, root=root)

    if name == "mas-sequence":
        layouts.write_images(root / "birds", ["auk", "jay"])
    one, other = make(), make()
    assert one.settings == other.settings and one.settings["seed"] == 1
    for a, b in zip(one, other, strict=True):
        for which in ("train", "valid", "test"):
            assert all(torch.equal(u, v) for u, v in zip(all_of(a, which), all_of(b, which), strict=True))
    model = nets.mlp(one.inputs, one.outputs, hidden=(4,))
    assert model(next(one[0].batches(3)).x).shape == (3, one.outputs)


def _silence():
    from contextlib import nullcontext

    return nullcontext()


def test_the_real_five_datasets(shared_data):
    with pytest.warns(UserWarning, match="without svhn, cifar10"):
        stream = streams.five_datasets(root=shared_data)
    assert [len(t.train) for t in stream] == [60_000, 60_000, 8_031] and stream.outputs == 30


def test_the_real_digits_of_two_places(shared_data):
    stream = streams.digits_domains(root=shared_data)
    assert [(len(t.train), len(t.test)) for t in stream] == [(60_000, 10_000), (7_291, 2_007)]


def test_the_real_alphabets(shared_data):
    stream = streams.omniglot("class", root=shared_data)
    assert len(stream) == 8 and stream.outputs == 242
    x, _ = all_of(stream[0])
    assert 0.01 < x.mean() < 0.2, "a little ink on paper of zeros"
