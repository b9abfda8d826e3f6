"""A run that was killed goes on where it was, and ends as if nothing had happened."""

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

STEPS = 12  # of each of the three tasks


class Killed(BaseException):
    """As sudden as a signal, and not caught by anybody."""


@pytest.fixture
def outcome(small_stream, tmp_path, monkeypatch):
    """The weights and the result of a run, killed after these many steps by turns, each counted from its start."""

    def learn(
        make_method,
        kills=(),
        *,
        folder="out",
        net=None,
        scenario="task",
        stream=None,
        steps=5,
        left_there=False,
        **settings,
    ):
        made, left, taken = [], list(kills), [0]
        step = TaskTraining._train_step

        def take(self, batch):
            if left and taken[0] == left[0]:
                raise Killed
            step(self, batch)
            taken[0] += 1

        def make(inputs, outputs):
            made.append((net or plain)(inputs, outputs))
            return made[-1]

        monkeypatch.setattr(TaskTraining, "_train_step", take)
        settings = {"iterations": STEPS, "batch_size": 16, **settings}
        while True:
            try:
                result = everlearn.run(
                    make, make_method(), stream() if callable(stream) else stream or small_stream(scenario), out=tmp_path / folder,
                    checkpoint=CheckpointEvery(steps, None), progress=False, **settings,
                )  # fmt: skip
                return made[-1].state_dict(), result
            except Killed:
                taken[0] = 0
                left.pop(0)
                if left_there:
                    return None

    return learn


def plain(inputs, outputs):
    return nets.mlp(inputs, outputs, hidden=(20,))


def restless(inputs, outputs):
    """Everything that has a mode, statistics or random numbers."""
    body = nets.cnn(inputs, outputs, channels=(4, 8))
    return nn.Sequential(body[0], nn.Dropout(0.2), *body[1:])


def equal(one, other):
    (weights, result), (again, resumed) = one, other
    assert list(weights) == list(again)
    for name in weights:
        assert torch.equal(weights[name], again[name]), name
    assert np.array_equal(result.accuracy, resumed.accuracy)
    assert result.initial_accuracy == resumed.initial_accuracy
    assert result.config == resumed.config
    for fact in ("parameters", "state_bytes", "diagnostics"):
        assert result.cost[fact] == resumed.cost[fact]
    return True


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_exactly(name, outcome):
    whole = outcome(METHODS[name])
    # In the first task, then at once in the second, late in it (after a pruning), and in its last step.
    assert equal(whole, outcome(METHODS[name], [7, 6, 9, 11], folder="killed"))


@pytest.mark.filterwarnings("ignore:The running statistics")  # that they move is what is tested
@pytest.mark.parametrize("name", ["finetune", "ewc", "er", "packnet", "hat", "generative"])
def test_with_dropout_statistics_momenta_schedules_and_the_same_optimizer(name, outcome):
    settings = {
        "net": restless, "keep_optimizer": True, "clip": 1.0, "accumulate": 2,
        "optimizer": lambda p: torch.optim.SGD([{"params": p[:-2]}, {"params": p[-2:], "lr": 0.1}], lr=0.05, momentum=0.9),
        "scheduler": lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps),
    }  # fmt: skip
    whole = outcome(METHODS[name], **settings)
    assert equal(whole, outcome(METHODS[name], [8, 13, 7], folder="killed", **settings))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LwF(warmup=8),
        lambda: SI(consolidate_every=4) + ER(30),
        lambda: EWC(mode="online", structure="kronecker"),
        lambda: PackNet(retrain=0.5) + EWC(),
    ],
    ids=["warm-up", "without boundaries", "Kronecker", "chain"],
)
def test_settings_with_a_memory_of_steps(make, outcome):
    assert equal(outcome(make), outcome(make, [7, 6, 9], folder="killed"))


@pytest.mark.parametrize("scenario", ["class", "domain"])
def test_scenarios(scenario, outcome):
    def make():
        return DERpp(40)

    assert equal(outcome(make, scenario=scenario), outcome(make, [9, 9], folder="killed", scenario=scenario))


def test_augmentation_and_epochs_are_found_again(outcome):
    (x, y), test = streams.digits_data()

    def shifted(x):
        return x.roll(int(torch.randint(3, ())), -1) + 0.01 * float(np.random.rand())

    stream = streams.split((x[:200], y[:200]), test, tasks=2, scenario="task", transform=shifted, class_order=range(10))
    settings = {"stream": stream, "epochs": 3, "iterations": None}
    assert equal(outcome(lambda: ER(30), **settings), outcome(lambda: ER(30), [9, 14], folder="killed", **settings))


@pytest.mark.parametrize("shared", [False, True])
def test_a_loader_that_counts_its_passes_is_read_from_the_start(shared, outcome):
    (x, y), _ = streams.digits_data()

    def loaders():
        tasks, one = [], torch.Generator().manual_seed(0)
        for classes in ((0, 1), (2, 3)):
            own = torch.isin(y, torch.tensor(classes)).nonzero().flatten()[:64]
            data = torch.utils.data.TensorDataset(x[own], y[own])
            order = one if shared else torch.Generator().manual_seed(classes[0])
            tasks.append((torch.utils.data.DataLoader(data, 16, shuffle=True, generator=order), (x[own], y[own])))
        return streams.from_tasks(tasks, scenario="domain", outputs=10)

    def net(inputs=None, outputs=None):
        return nets.mlp((1, 8, 8), 10, hidden=(20,))

    settings = {"stream": loaders, "net": net, "epochs": 3, "iterations": None}
    assert equal(outcome(Method, **settings), outcome(Method, [7, 9], folder="killed", **settings))


def test_buffers_that_a_model_does_not_save_are_found_again(outcome):
    class Counting(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.seen += self.training
            return super().forward(x) * (1 + self.seen / 100)

    settings = {"net": lambda inputs, outputs: Counting(plain(inputs, outputs))}
    assert equal(outcome(Method, **settings), outcome(Method, [7, 14], folder="killed", **settings))


def test_a_disk_without_room_does_not_end_a_run(outcome, monkeypatch):
    write = everlearn.runtime.files.write

    def full(path, *content, **settings):
        if path.suffix == ".checkpoint":
            raise OSError(28, "No space left on device")
        write(path, *content, **settings)

    whole = outcome(EWC, folder="whole")
    monkeypatch.setattr(everlearn.runtime.files, "write", full)
    with pytest.warns(UserWarning, match="could not be written"):
        assert equal(whole, outcome(EWC))


def test_a_checkpoint_of_other_code_is_passed_over(checkpoints, outcome, monkeypatch):
    monkeypatch.setattr("everlearn.trainer.checkpoints._code_version", lambda: ["other", "code"])
    with pytest.warns(UserWarning, match="another version"):
        outcome(EWC, [9], left_there=True)
    assert [p.stem for p in checkpoints[0].parent.glob("*.checkpoint")] == ["000000-000000005"], (
        "its own, not the others"
    )
    assert equal(outcome(EWC, folder="whole"), outcome(EWC))


@pytest.mark.parametrize("force", [False, True])
def test_one_process_at_a_time(force, checkpoints, outcome):
    with (
        everlearn.runtime.files.exclusive_lock(checkpoints[0].parent / "lock"),
        pytest.raises(ValueError, match="Another process is at work"),
    ):
        outcome(EWC, force=force)
    assert all(p.exists() for p in checkpoints)


FLOCK = pytest.mark.skipif(not hasattr(os, "fork"), reason="what is open cannot be removed there")


@FLOCK
def test_who_has_waited_for_a_run_is_alone_there_too(tmp_path):
    saver, inside, done = (
        Checkpoints(tmp_path / "x.checkpoints", CheckpointEvery()),
        threading.Event(),
        threading.Event(),
    )

    def wait():
        with Checkpoints(saver.folder, CheckpointEvery()).alone(wait=True):
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=wait)
    with saver.alone():
        thread.start()
        time.sleep(0.2)  # it waits at the lock by now
        saver.clear()
    try:
        assert inside.wait(20)
        with pytest.raises(ValueError, match="Another process is at work"), saver.alone():
            pass
    finally:
        done.set()
        thread.join()
    assert not saver.folder.exists()


@FLOCK
def test_however_many_come_and_go_one_is_inside(tmp_path):
    wrong, folder = [], tmp_path / "x.checkpoints"

    def come_and_go():
        try:
            for _ in range(100):
                with (saver := Checkpoints(folder, CheckpointEvery())).alone(wait=True):
                    (tmp_path / "inside").touch(exist_ok=False)
                    (folder / "000000-000000001.checkpoint").touch(exist_ok=False)
                    saver.clear()
                    (tmp_path / "inside").unlink()
        except OSError as error:
            wrong.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not folder.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="it is a file"), Checkpoints(tmp_path / "file", CheckpointEvery()).alone():
        pass


def test_a_disk_without_locks_is_no_reason_to_stop(outcome, monkeypatch):
    def refuse(handle, wait):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(everlearn.runtime.files, "_lock", refuse)
    outcome(EWC)


def test_what_an_online_stream_has_learned_is_kept(outcome, small_stream):
    stream = streams.online(small_stream("class"), chunk=16)
    settings = {"stream": stream, "iterations": None, "steps": 3}
    assert equal(outcome(lambda: ER(30), **settings), outcome(lambda: ER(30), [8, 9], folder="killed", **settings))


@pytest.fixture
def checkpoints(outcome, tmp_path):
    """The files of a run that was killed in its second task, after two checkpoints there."""
    outcome(EWC, [STEPS + 11], left_there=True)
    [folder] = (tmp_path / "out").glob("*.checkpoints")
    return sorted(folder.glob("*.checkpoint"))


def test_the_last_two_are_kept_and_one_of_the_task_before(checkpoints):
    assert [p.stem for p in checkpoints] == ["000000-000000010", *(f"000001-{n:09}" for n in (0, 5, 10))]


@pytest.fixture
def tests_taken(monkeypatch):
    """How often a run tests its model: once untrained, and after each task."""
    taken, test = [], everlearn.trainer.stream_training.StreamTraining._test
    monkeypatch.setattr(
        everlearn.trainer.stream_training.StreamTraining, "_test", lambda *a: taken.append(1) or test(*a)
    )
    return taken


HARMS = {
    "truncated": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "a bit": lambda b: b[:-100] + bytes([b[-100] ^ 1]) + b[-99:],
    "foreign": lambda b: b"PK\x03\x04 something else",
}


@pytest.mark.parametrize(
    ("harm", "torn", "tests"),
    [*((harm, [3], 2) for harm in HARMS), ("a bit", [2, 3], 2), ("a bit", [1], 3), ("a bit", [0, 1, 2, 3], 4)],
    ids=str,
)
def test_a_damaged_checkpoint_is_passed_over(harm, torn, tests, checkpoints, outcome, tests_taken):
    for i in torn:
        checkpoints[i].write_bytes(HARMS[harm](checkpoints[i].read_bytes()))
    with pytest.warns(UserWarning, match="resumes from an earlier one"):
        resumed = outcome(EWC)
    assert len(tests_taken) == tests, "it resumes from the last intact one"
    assert equal(outcome(EWC, folder="whole"), resumed)


@pytest.mark.parametrize("source", [2, 1], ids=["of another step", "of the start of the task"])
def test_a_checkpoint_under_another_name_is_passed_over(source, checkpoints, outcome, tests_taken):
    checkpoints[3].write_bytes(checkpoints[source].read_bytes())
    with pytest.warns(UserWarning, match="its name does not match its content"):
        resumed = outcome(EWC)
    assert len(tests_taken) == 2
    assert equal(outcome(EWC, folder="whole"), resumed)


def test_a_checkpoint_of_another_run_is_passed_over(checkpoints, outcome, tmp_path):
    outcome(EWC, [STEPS + 11], folder="other", seed=1, left_there=True)
    [folder] = (tmp_path / "other").glob("*.checkpoints")
    for path in checkpoints:
        path.write_bytes((folder / path.name).read_bytes())
    with pytest.warns(UserWarning, match="its name does not match its content"):
        resumed = outcome(EWC)
    assert equal(outcome(EWC, folder="whole"), resumed)


@pytest.mark.parametrize(("refused", "tests"), [(1, 3), (2, 4)], ids=["one", "two"])
def test_a_whole_checkpoint_that_does_not_fit_is_passed_over(
    refused, tests, checkpoints, outcome, tests_taken, tmp_path, monkeypatch
):
    """First the one of the second task's start is refused, and with it those within; then the one of the first task."""
    load, failures = EWC.load_state_dict, [1] * refused

    def refuse(self, state):
        if failures:
            failures.pop()
            raise KeyError("fisher")
        load(self, state)

    monkeypatch.setattr(EWC, "load_state_dict", refuse)
    with pytest.warns(UserWarning, match=r"it does not fit: KeyError: 'fisher'.*resumes from an earlier one"):
        resumed = outcome(EWC)
    assert not failures and len(tests_taken) == tests
    assert equal(outcome(EWC, folder="whole"), resumed)
    assert [p.suffix for p in (tmp_path / "out").iterdir()] == [".json"]


def test_a_checkpoint_within_a_task_that_does_not_fit_is_passed_over(outcome, tests_taken, monkeypatch):
    outcome(EWC, [STEPS + 11], left_there=True)
    tests_taken.clear()
    resume, failures = TaskTraining._resume, [1]

    def refuse(self, resumed):
        if failures:
            failures.pop()
            raise RuntimeError("a parameter group has another size")
        resume(self, resumed)

    monkeypatch.setattr(TaskTraining, "_resume", refuse)
    with pytest.warns(UserWarning, match=r"000001-000000010.checkpoint is not usable \(it does not fit: RuntimeError"):
        resumed = outcome(EWC)
    assert resumed[1].provenance["resumed_from"] == "task 2, step 6", "the one before"
    assert len(tests_taken) == 2
    assert equal(outcome(EWC, folder="whole"), resumed)


def test_a_full_memory_is_no_fault_of_a_checkpoint(checkpoints, outcome, monkeypatch):
    def full(self, state):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(EWC, "load_state_dict", full)
        with pytest.raises(MemoryError):
            outcome(EWC)
    assert all(path.exists() for path in checkpoints)


def test_nothing_is_unpickled(checkpoints, outcome, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    with pytest.warns(UserWarning, match="more than tensors"):
        Checkpoints(checkpoints[0].parent, CheckpointEvery()).write(1, 11, {"model": Harm()})
    with pytest.warns(UserWarning, match="more than tensors"):
        outcome(EWC)
    assert not (tmp_path / "harm").exists()


def test_a_state_that_cannot_be_read_back_is_told_at_once(outcome):
    class Odd(Method):
        def state_dict(self):
            return {"what": {1}.__class__, "thing": object}

    with pytest.warns(UserWarning, match="more than tensors"):
        outcome(Odd)


def test_a_finished_run_leaves_its_result_alone(outcome, tmp_path):
    outcome(EWC, [9])
    assert [p.suffix for p in (tmp_path / "out").iterdir()] == [".json"]


def test_force_begins_anew(checkpoints, outcome, tests_taken):
    outcome(EWC, force=True)
    assert len(tests_taken) == 4


def test_what_is_left_of_a_finished_run_is_taken_away(outcome, tmp_path):
    _, result = outcome(EWC)
    left = tmp_path / "out" / f"{everlearn.results.file_name(result.config).removesuffix('.json')}.checkpoints"
    left.mkdir()
    with everlearn.runtime.files.exclusive_lock(left / "lock"):
        outcome(EWC)
        assert left.exists(), "another process works there"
    outcome(EWC)
    assert not left.exists()


def test_what_cannot_go_on_as_it_was_begins_anew(small_stream, outcome, tmp_path):
    stream = small_stream()
    for i, task in enumerate(stream):
        task.transform = [None, torch.clone, torch.Tensor.contiguous][i]
    whole = outcome(lambda: ER(30), folder="whole", stream=stream)
    assert equal(whole, outcome(lambda: ER(30), [STEPS + 8], stream=stream))


def test_time_too_makes_a_checkpoint_due(tmp_path):
    saver = Checkpoints(tmp_path, CheckpointEvery(minutes=0))
    assert saver.is_due()
    assert not Checkpoints(tmp_path, CheckpointEvery(minutes=None)).is_due()
    with pytest.raises(ValueError, match=r"CheckpointEvery\.steps"):
        CheckpointEvery(steps=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are started anew here, which takes long")
def test_a_process_killed_by_the_system_goes_on(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def learn(folder):
        made = []

        def make(inputs, outputs):
            made.append(plain(inputs, outputs))
            return made[-1]

        settings = {"iterations": 60, "progress": False, "checkpoint": CheckpointEvery(7, None)}
        everlearn.run(make, DERpp(50), streams.digits(scenario="task"), out=folder, **settings)
        torch.save(made[-1].state_dict(), folder / "weights.pt")

    def child(folder, kill):
        if not (pid := os.fork()):
            learn(folder)
            os._exit(0)
        before, files = None, folder.rglob
        while kill and (before is None or sorted(files("*.checkpoint")) == before):
            before = sorted(files("*.checkpoint"))
            time.sleep(0.002)
        if kill:
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]

    assert child(whole, False) == 0
    for _ in range(5):
        assert child(killed, True) == signal.SIGKILL
    assert not (killed / "weights.pt").exists()
    assert child(killed, False) == 0
    one, other = (torch.load(f / "weights.pt", weights_only=True) for f in (whole, killed))
    assert all(torch.equal(one[n], other[n]) for n in one)
    (undisturbed,), (gone_on,) = everlearn.results.load(whole), everlearn.results.load(killed)
    assert gone_on.provenance["resumed_from"].startswith("task ") and "resumed_from" not in undisturbed.provenance
    assert np.array_equal(load(whole)[0].accuracy, load(killed)[0].accuracy)
