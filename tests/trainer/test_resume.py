"""A killed run is resumed from its checkpoint, with the results of an uninterrupted run."""

import errno
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import everlearn
from everlearn import ER, EWC, METHODS, SI, DERpp, LwF, Method, PackNet, nets, streams
from everlearn.results.result import load
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.checkpoints import Checkpoints
from everlearn.trainer.train import TaskTraining
from tests.helpers import TRAINED

STEPS = 12  # per task


class Killed(BaseException):
    """Simulate a signal that ends the process."""


@pytest.fixture
def run_with_kills(small_stream, tmp_path, monkeypatch):
    """Return a function that runs and resumes a run, killed after the given numbers of steps since each start."""

    def run(
        make_method,
        kills=(),
        *,
        folder="out",
        net=None,
        scenario="task",
        stream=None,
        steps=5,
        stop_after_kill=False,
        **settings,
    ):
        models = []
        remaining_kills = list(kills)
        num_steps = [0]
        step = TaskTraining._train_step

        def step_or_die(self, batch):
            if remaining_kills and num_steps[0] == remaining_kills[0]:
                raise Killed
            step(self, batch)
            num_steps[0] += 1

        def make_model(inputs, outputs):
            models.append((net or make_mlp)(inputs, outputs))
            return models[-1]

        monkeypatch.setattr(TaskTraining, "_train_step", step_or_die)
        settings = {"iterations": STEPS, "batch_size": 16, "progress": False, **settings}
        settings["checkpoint"] = CheckpointEvery(steps, None)
        while True:
            # A stream of loaders is created anew for every start.
            current_stream = stream or small_stream(scenario)
            if callable(stream):
                current_stream = stream()
            try:
                result = everlearn.run(make_model, make_method(), current_stream, out=tmp_path / folder, **settings)
                return models[-1].state_dict(), result
            except Killed:
                num_steps[0] = 0
                remaining_kills.pop(0)
                if stop_after_kill:
                    return None

    return run


def make_mlp(inputs, outputs):
    return nets.mlp(inputs, outputs, hidden=(20,))


def make_stateful_net(inputs, outputs):
    """A network with dropout and running statistics."""
    body = nets.cnn(inputs, outputs, channels=(4, 8))
    return nn.Sequential(body[0], nn.Dropout(0.2), *body[1:])


def assert_equal_runs(reference, resumed_run):
    weights, result = reference
    resumed_weights, resumed = resumed_run
    assert list(weights) == list(resumed_weights)
    for name in weights:
        assert torch.equal(weights[name], resumed_weights[name]), name
    assert np.array_equal(result.accuracy, resumed.accuracy)
    assert result.initial_accuracy == resumed.initial_accuracy
    assert result.config == resumed.config
    for key in ("parameters", "state_bytes", "diagnostics"):
        assert result.cost[key] == resumed.cost[key]


@pytest.mark.parametrize("name", TRAINED)
def test_every_method_resumes_exactly(name, run_with_kills):
    reference = run_with_kills(METHODS[name])
    # Killed in the first task, early and late in the second (after a pruning), and in its last step.
    assert_equal_runs(reference, run_with_kills(METHODS[name], [7, 6, 9, 11], folder="killed"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The running statistics")  # running statistics change on purpose
@pytest.mark.parametrize("name", ["finetune", "ewc", "er", "packnet", "hat", "generative"])
def test_resume_with_dropout_statistics_momentum_schedule_and_kept_optimizer(name, run_with_kills):
    def make_optimizer(parameters):
        groups = [{"params": parameters[:-2]}, {"params": parameters[-2:], "lr": 0.1}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    settings = {
        "net": make_stateful_net,
        "keep_optimizer": True,
        "clip": 1.0,
        "accumulate": 2,
        "optimizer": make_optimizer,
        "scheduler": lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps),
    }
    reference = run_with_kills(METHODS[name], **settings)
    assert_equal_runs(reference, run_with_kills(METHODS[name], [8, 13, 7], folder="killed", **settings))


@pytest.mark.parametrize(
    "make_method",
    [
        lambda: LwF(warmup=8),
        lambda: SI(consolidate_every=4) + ER(30),
        lambda: EWC(mode="online", structure="kronecker"),
        lambda: PackNet(retrain=0.5) + EWC(),
    ],
    ids=["warm-up", "without boundaries", "Kronecker", "chain"],
)
def test_resume_of_methods_that_count_steps(make_method, run_with_kills):
    assert_equal_runs(run_with_kills(make_method), run_with_kills(make_method, [7, 6, 9], folder="killed"))


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_resume_in_scenarios(scenario, run_with_kills):
    def make_method():
        return DERpp(40)

    assert_equal_runs(
        run_with_kills(make_method, scenario=scenario),
        run_with_kills(make_method, [9, 9], folder="killed", scenario=scenario),
    )


def test_resume_with_augmentation_and_epochs(run_with_kills):
    (x, y), test = streams.digits_data()

    def shift_randomly(x):
        return x.roll(int(torch.randint(3, ())), -1) + 0.01 * float(np.random.rand())

    stream = streams.split(
        (x[:200], y[:200]), test, tasks=2, scenario="task", transform=shift_randomly, class_order=range(10)
    )
    settings = {"stream": stream, "epochs": 3, "iterations": None}
    assert_equal_runs(
        run_with_kills(lambda: ER(30), **settings), run_with_kills(lambda: ER(30), [9, 14], folder="killed", **settings)
    )


@pytest.mark.parametrize("is_shared", [False, True])
def test_resume_with_loader_that_has_generator(is_shared, run_with_kills):
    (x, y), _ = streams.digits_data()

    def loaders():
        tasks = []
        shared_generator = torch.Generator().manual_seed(0)
        for classes in ((0, 1), (2, 3)):
            indices = torch.isin(y, torch.tensor(classes)).nonzero().flatten()[:64]
            data = torch.utils.data.TensorDataset(x[indices], y[indices])
            generator = shared_generator if is_shared else torch.Generator().manual_seed(classes[0])
            tasks.append(
                (torch.utils.data.DataLoader(data, 16, shuffle=True, generator=generator), (x[indices], y[indices]))
            )
        return streams.from_tasks(tasks, scenario="domain", outputs=10)

    def make_net(inputs=None, outputs=None):
        return nets.mlp((1, 8, 8), 10, hidden=(20,))

    settings = {"stream": loaders, "net": make_net, "epochs": 3, "iterations": None}
    assert_equal_runs(run_with_kills(Method, **settings), run_with_kills(Method, [7, 9], folder="killed", **settings))


def test_resume_with_non_persistent_buffers(run_with_kills):
    class Counting(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.register_buffer("num_calls", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.num_calls += self.training
            return super().forward(x) * (1 + self.num_calls / 100)

    settings = {"net": lambda inputs, outputs: Counting(make_mlp(inputs, outputs))}
    assert_equal_runs(run_with_kills(Method, **settings), run_with_kills(Method, [7, 14], folder="killed", **settings))


def test_full_disk_does_not_stop_run(run_with_kills, monkeypatch):
    write = everlearn.runtime.files.write

    def write_or_fail(path, *content, **settings):
        if path.suffix == ".checkpoint":
            raise OSError(28, "No space left on device")
        write(path, *content, **settings)

    reference = run_with_kills(EWC, folder="reference")
    monkeypatch.setattr(everlearn.runtime.files, "write", write_or_fail)
    with pytest.warns(UserWarning, match="could not be written"):
        assert_equal_runs(reference, run_with_kills(EWC))


def test_checkpoint_of_other_version_is_skipped(checkpoints, run_with_kills, monkeypatch):
    monkeypatch.setattr("everlearn.trainer.checkpoints._code_version", lambda: ["other", "code"])
    with pytest.warns(UserWarning, match="another version"):
        run_with_kills(EWC, [9], stop_after_kill=True)
    assert [path.stem for path in checkpoints[0].parent.glob("*.checkpoint")] == ["000000-000000005"], (
        "only its checkpoint, not those of the other version"
    )
    assert_equal_runs(run_with_kills(EWC, folder="reference"), run_with_kills(EWC))


@pytest.mark.parametrize("force", [False, True])
def test_concurrent_run_is_refused(force, checkpoints, run_with_kills):
    with (
        everlearn.runtime.files.exclusive_lock(checkpoints[0].parent / "lock"),
        pytest.raises(ValueError, match="Another process is at work"),
    ):
        run_with_kills(EWC, force=force)
    assert all(path.exists() for path in checkpoints)


NEEDS_UNLINK_OF_OPEN_FILES = pytest.mark.skipif(not hasattr(os, "fork"), reason="open files cannot be removed")


@NEEDS_UNLINK_OF_OPEN_FILES
def test_waiting_process_gets_exclusive_lock(tmp_path):
    saver = Checkpoints(tmp_path / "x.checkpoints", CheckpointEvery())
    locked = threading.Event()
    finished = threading.Event()

    def wait():
        with Checkpoints(saver.folder, CheckpointEvery()).alone(wait=True):
            locked.set()
            finished.wait(20)

    thread = threading.Thread(target=wait)
    with saver.alone():
        thread.start()
        time.sleep(0.2)  # until it waits for the lock
        saver.clear()
    try:
        assert locked.wait(20)
        with pytest.raises(ValueError, match="Another process is at work"), saver.alone():
            pass
    finally:
        finished.set()
        thread.join()
    assert not saver.folder.exists()


@NEEDS_UNLINK_OF_OPEN_FILES
def test_lock_is_exclusive_with_many_threads(tmp_path):
    errors = []
    folder = tmp_path / "x.checkpoints"

    def lock_repeatedly():
        try:
            for _ in range(100):
                with (saver := Checkpoints(folder, CheckpointEvery())).alone(wait=True):
                    (tmp_path / "inside").touch(exist_ok=False)
                    (folder / "000000-000000001.checkpoint").touch(exist_ok=False)
                    saver.clear()
                    (tmp_path / "inside").unlink()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=lock_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not folder.exists()


def test_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="it is a file"), Checkpoints(tmp_path / "file", CheckpointEvery()).alone():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has a different lock")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_disk_without_locks_does_not_stop_run(code, run_with_kills, tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    run_with_kills(EWC)
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".json"]


def test_resume_of_online_stream(run_with_kills, small_stream):
    stream = streams.online(small_stream("class"), chunk=16)
    settings = {"stream": stream, "iterations": None, "steps": 3}
    assert_equal_runs(
        run_with_kills(lambda: ER(30), **settings), run_with_kills(lambda: ER(30), [8, 9], folder="killed", **settings)
    )


@pytest.fixture
def checkpoints(run_with_kills, tmp_path):
    """Checkpoint files of a run that was killed in its second task, after two checkpoints there."""
    run_with_kills(EWC, [STEPS + 11], stop_after_kill=True)
    [folder] = (tmp_path / "out").glob("*.checkpoints")
    return sorted(folder.glob("*.checkpoint"))


def test_kept_checkpoints(checkpoints):
    assert [path.stem for path in checkpoints] == ["000000-000000010", *(f"000001-{n:09}" for n in (0, 5, 10))]


@pytest.fixture
def evaluations(monkeypatch):
    """Calls of the evaluation of a run: before training, and after each task."""
    calls = []
    evaluate = everlearn.trainer.stream_training.StreamTraining._test
    monkeypatch.setattr(
        everlearn.trainer.stream_training.StreamTraining,
        "_test",
        lambda *arguments: calls.append(1) or evaluate(*arguments),
    )
    return calls


DAMAGES = {
    "truncated": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "flipped bit": lambda b: b[:-100] + bytes([b[-100] ^ 1]) + b[-99:],
    "foreign": lambda b: b"PK\x03\x04 something else",
}


@pytest.mark.parametrize(
    ("damage", "damaged", "num_evaluations"),
    [
        *((damage, [3], 2) for damage in DAMAGES),
        ("flipped bit", [2, 3], 2),
        ("flipped bit", [1], 3),
        ("flipped bit", [0, 1, 2, 3], 4),
    ],
    ids=str,
)
def test_damaged_checkpoint_is_skipped(damage, damaged, num_evaluations, checkpoints, run_with_kills, evaluations):
    for i in damaged:
        checkpoints[i].write_bytes(DAMAGES[damage](checkpoints[i].read_bytes()))
    with pytest.warns(UserWarning, match="resumes from an earlier one"):
        resumed = run_with_kills(EWC)
    assert len(evaluations) == num_evaluations, "resumed from the last intact checkpoint"
    assert_equal_runs(run_with_kills(EWC, folder="reference"), resumed)


@pytest.mark.parametrize("source", [2, 1], ids=["of another step", "of the start of the task"])
def test_renamed_checkpoint_is_skipped(source, checkpoints, run_with_kills, evaluations):
    checkpoints[3].write_bytes(checkpoints[source].read_bytes())
    with pytest.warns(UserWarning, match="its name does not match its content"):
        resumed = run_with_kills(EWC)
    assert len(evaluations) == 2
    assert_equal_runs(run_with_kills(EWC, folder="reference"), resumed)


def test_checkpoint_of_another_run_is_skipped(checkpoints, run_with_kills, tmp_path):
    run_with_kills(EWC, [STEPS + 11], folder="other", seed=1, stop_after_kill=True)
    [folder] = (tmp_path / "other").glob("*.checkpoints")
    for path in checkpoints:
        path.write_bytes((folder / path.name).read_bytes())
    with pytest.warns(UserWarning, match="its name does not match its content"):
        resumed = run_with_kills(EWC)
    assert_equal_runs(run_with_kills(EWC, folder="reference"), resumed)


@pytest.mark.parametrize(("num_failures", "num_evaluations"), [(1, 3), (2, 4)], ids=["one", "two"])
def test_mismatched_checkpoint_is_skipped(
    num_failures, num_evaluations, checkpoints, run_with_kills, evaluations, tmp_path, monkeypatch
):
    """First the checkpoints of the second task fail to load, then that of the first task."""
    load = EWC.load_state_dict
    failures = [1] * num_failures

    def load_or_fail(self, state):
        if failures:
            failures.pop()
            raise KeyError("fisher")
        load(self, state)

    monkeypatch.setattr(EWC, "load_state_dict", load_or_fail)
    with pytest.warns(UserWarning, match=r"it does not fit: KeyError: 'fisher'.*resumes from an earlier one"):
        resumed = run_with_kills(EWC)
    assert not failures and len(evaluations) == num_evaluations
    assert_equal_runs(run_with_kills(EWC, folder="reference"), resumed)
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".json"]


def test_mismatched_checkpoint_within_task_is_skipped(run_with_kills, evaluations, monkeypatch):
    run_with_kills(EWC, [STEPS + 11], stop_after_kill=True)
    evaluations.clear()
    resume = TaskTraining._resume
    failures = [1]

    def resume_or_fail(self, resumed):
        if failures:
            failures.pop()
            raise RuntimeError("a parameter group has another size")
        resume(self, resumed)

    monkeypatch.setattr(TaskTraining, "_resume", resume_or_fail)
    with pytest.warns(UserWarning, match=r"000001-000000010.checkpoint is not usable \(it does not fit: RuntimeError"):
        resumed = run_with_kills(EWC)
    assert resumed[1].provenance["resumed_from"] == "task 2, step 6", "the checkpoint before"
    assert len(evaluations) == 2
    assert_equal_runs(run_with_kills(EWC, folder="reference"), resumed)


def test_memory_error_keeps_checkpoints(checkpoints, run_with_kills, monkeypatch):
    def fail(self, state):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(EWC, "load_state_dict", fail)
        with pytest.raises(MemoryError):
            run_with_kills(EWC)
    assert all(path.exists() for path in checkpoints)


def test_checkpoints_are_not_unpickled(checkpoints, run_with_kills, tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "malicious"),)

    with pytest.warns(UserWarning, match="more than tensors"):
        Checkpoints(checkpoints[0].parent, CheckpointEvery()).write(1, 11, {"model": Malicious()})
    with pytest.warns(UserWarning, match="more than tensors"):
        run_with_kills(EWC)
    assert not (tmp_path / "malicious").exists()


def test_state_that_cannot_be_loaded_gives_warning(run_with_kills):
    class Unloadable(Method):
        def state_dict(self):
            return {"what": {1}.__class__, "thing": object}

    with pytest.warns(UserWarning, match="more than tensors"):
        run_with_kills(Unloadable)


def test_finished_run_leaves_only_its_result(run_with_kills, tmp_path):
    run_with_kills(EWC, [9])
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".json"]


def test_force_starts_over(checkpoints, run_with_kills, evaluations):
    run_with_kills(EWC, force=True)
    assert len(evaluations) == 4


def test_checkpoints_of_finished_run_are_deleted(run_with_kills, tmp_path):
    _, result = run_with_kills(EWC)
    folder = tmp_path / "out" / f"{everlearn.results.file_name(result.config).removesuffix('.json')}.checkpoints"
    folder.mkdir()
    with everlearn.runtime.files.exclusive_lock(folder / "lock"):
        run_with_kills(EWC)
        assert folder.exists(), "locked by another process"
    run_with_kills(EWC)
    assert not folder.exists()


def test_stream_with_different_transforms_starts_over(small_stream, run_with_kills, tmp_path):
    stream = small_stream()
    for i, task in enumerate(stream):
        task.transform = [None, torch.clone, torch.Tensor.contiguous][i]
    reference = run_with_kills(lambda: ER(30), folder="reference", stream=stream)
    assert_equal_runs(reference, run_with_kills(lambda: ER(30), [STEPS + 8], stream=stream))


def test_checkpoints_are_due_by_time(tmp_path):
    saver = Checkpoints(tmp_path, CheckpointEvery(minutes=0))
    assert saver.is_due()
    assert not Checkpoints(tmp_path, CheckpointEvery(minutes=None)).is_due()
    with pytest.raises(ValueError, match=r"CheckpointEvery\.steps"):
        CheckpointEvery(steps=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_process_is_resumed(tmp_path):
    reference_folder = tmp_path / "reference"
    killed_folder = tmp_path / "killed"

    def train_in_folder(folder):
        models = []

        def make_model(inputs, outputs):
            models.append(make_mlp(inputs, outputs))
            return models[-1]

        settings = {"iterations": 60, "progress": False, "checkpoint": CheckpointEvery(7, None)}
        everlearn.run(make_model, DERpp(50), streams.digits(scenario="task"), out=folder, **settings)
        torch.save(models[-1].state_dict(), folder / "weights.pt")

    def run_in_child(folder, kill):
        if not (pid := os.fork()):
            train_in_folder(folder)
            os._exit(0)
        previous_files = None
        find_files = folder.rglob
        while kill and (previous_files is None or sorted(find_files("*.checkpoint")) == previous_files):
            previous_files = sorted(find_files("*.checkpoint"))
            time.sleep(0.002)
        if kill:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]

    assert run_in_child(reference_folder, False) == 0
    for _ in range(5):
        assert run_in_child(killed_folder, True) == signal.SIGKILL
    assert not (killed_folder / "weights.pt").exists()
    assert run_in_child(killed_folder, False) == 0
    reference_weights, resumed_weights = (
        torch.load(folder / "weights.pt", weights_only=True) for folder in (reference_folder, killed_folder)
    )
    assert all(torch.equal(reference_weights[name], resumed_weights[name]) for name in reference_weights)
    (reference,) = everlearn.results.load(reference_folder)
    (resumed,) = everlearn.results.load(killed_folder)
    assert resumed.provenance["resumed_from"].startswith("task ") and "resumed_from" not in reference.provenance
    assert np.array_equal(load(reference_folder)[0].accuracy, load(killed_folder)[0].accuracy)
