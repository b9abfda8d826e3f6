"""Training steps do not wait for an accelerator, counted on the CPU."""

import traceback
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import everlearn
from everlearn import METHODS, Method, nets, streams
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.losses import MAX_PENDING, PendingLosses
from everlearn.trainer.settings import Training, adam
from everlearn.trainer.train import TaskTraining
from tests.helpers import TRAINED

# Operations that read values of an accelerator, or whose result has a shape that depends on them.
READING_OPERATIONS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
READING_CALLS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}

# Functions that read values on the CPU only; what they decide needs no reading on an accelerator.
CPU_FUNCTIONS = {"_refuse_nan", "_is_one", "_is_known_finite"}

# Synchronizations of ten steps at most, with the reason; all other methods have none.
MAX_COUNTS = {
    "gem": 10,  # one copy per step: its quadratic program of a variable per task is solved on the CPU
    "den": 3,  # at the ends of phases: the loss that decides about growth, and which layers are locked completely
    "expandnet": 2,  # at its looks: the loss that decides about growth
}


class Accelerator(TorchDispatchMode):
    """Count the synchronizations of a pretended accelerator.

    Parameters and moved batches are on it, and so is every result of an operation on a tensor that is on it. A write
    of such a tensor into one that is not is a copy to the host.
    """

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.sites = Counter()

    def put(self, value):
        if isinstance(value, Tensor):
            # The reference keeps the address from being used again.
            storage = value.untyped_storage()
            self.storages[storage._cdata] = storage
        return value

    def take(self, value):
        """Copy a tensor to the host."""
        copy = value.detach().clone()
        self.storages.pop(copy.untyped_storage()._cdata)
        return copy

    def has(self, value):
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self.storages

    def count(self, name):
        frames = [frame for frame in traceback.extract_stack() if "/src/everlearn/" in frame.filename]
        if any(frame.name in CPU_FUNCTIONS for frame in frames):
            return
        lines = [f"{frame.filename.split('/src/everlearn/')[1]}:{frame.lineno}" for frame in frames[-2:]]
        self.sites[name, *lines] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        is_here = any(map(self.has, inputs))
        written = args[0] if args and name.endswith("_") and isinstance(args[0], Tensor) else None
        is_copy_to_host = is_here and written is not None and not self.has(written)
        if is_copy_to_host:
            self.count(f"{name} to the host")
        if is_here and name in READING_OPERATIONS:
            self.count(name)
        if name in INDEXING and any(self.has(i) and i.dtype == torch.bool for i in args[1] if i is not None):
            self.count(f"{name} with a mask")

        outputs = function(*args, **kwargs)
        if is_here and not is_copy_to_host:
            for output in tree_leaves(outputs):
                self.put(output)
        return outputs


class Calls(TorchFunctionMode):
    """Count calls that read a tensor without an operation, and copy what is moved to the accelerator."""

    def __init__(self, accelerator):
        super().__init__()
        self.accelerator = accelerator

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in READING_CALLS and self.accelerator.has(args[0]):
            self.accelerator.count(function.__name__)
            if function is Tensor.cpu:
                return self.accelerator.take(args[0])
        if function is Tensor.to and kwargs.get("non_blocking"):
            return self.accelerator.put(args[0].clone())
        outputs = function(*args, **kwargs)
        # Host tensors are created with a name of a device, or without one.
        if isinstance(kwargs.get("device"), torch.device):
            self.accelerator.put(outputs)
        return outputs


def as_on_accelerator(task_training):
    task_training.losses.max_pending = MAX_PENDING
    task_training._moves_batches = True
    return task_training


def count_synchronizations(method, scenario, num_steps=10, **settings):
    """Count the synchronizations of steps of a second task, from its third step on."""
    torch.manual_seed(0)
    stream = streams.digits(scenario=scenario, tasks=2)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=[16, 16])
    training = Training(iterations=20, batch_size=32, progress=False, **settings)
    accelerator = Accelerator()
    for tensor in model.state_dict().values():
        accelerator.put(tensor)
    with Calls(accelerator), accelerator:
        for _ in as_on_accelerator(TaskTraining(model, method, stream[0], training, adam)).steps():
            pass
        method.end_task(model, stream[0])

        steps = as_on_accelerator(TaskTraining(model, method, stream[1], training, adam)).steps()
        for _ in range(2):
            next(steps)
        accelerator.sites.clear()
        for _ in range(num_steps):
            next(steps)
    return accelerator.sites


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_steps_do_not_synchronize(name, scenario):
    sites = count_synchronizations(METHODS[name](), scenario)
    assert sum(sites.values()) <= MAX_COUNTS.get(name, 0), dict(sites)


def test_accumulated_steps_do_not_synchronize():
    assert not count_synchronizations(METHODS["er"](), "class", accumulate=2)


def test_the_counter_sees_what_a_method_reads():
    class Reading(Method):
        def after_step(self, model):
            for p in model.parameters():
                p.sum().item()
                p[p > 0]
                p.tolist()
                self.copy = torch.empty(p.shape)
                self.copy.copy_(p.detach())

    sites = count_synchronizations(Reading(), "class", num_steps=1)
    assert sorted(sites.values()) == [6, 6, 6, 6]


FAILING_STEPS = []  # numbers of steps, over all tasks, in which the loss is infinite


class Failing(Method):
    """Fine-tuning with an infinite loss in some steps."""

    def __post_init__(self):
        super().__post_init__()
        self.num_steps = 0

    def penalty(self, model, batch=None, outputs=None):
        return torch.tensor(torch.inf) if self.num_steps in FAILING_STEPS else 0.0

    def after_step(self, model):
        self.num_steps += 1


class RecordingTracker:
    def __init__(self):
        self.numbers = []

    def start(self, config):
        pass

    def log(self, numbers, step):
        self.numbers.append((step, dict(numbers)))

    def finish(self, result):
        pass


def run(folder, tracker=None, checkpoint_steps=10):
    return everlearn.run(
        lambda: nets.mlp((1, 8, 8), 10, hidden=[8]),
        Failing(),
        streams.digits(scenario="class", tasks=2),
        iterations=30,
        batch_size=16,
        out=folder,
        trackers=[] if tracker is None else [tracker],
        checkpoint=CheckpointEvery(steps=checkpoint_steps, minutes=None),
    )


@pytest.fixture
def late_reading(monkeypatch):
    """Read losses as on an accelerator."""
    monkeypatch.setattr(PendingLosses, "is_full", lambda self: len(self._pending) >= MAX_PENDING)
    monkeypatch.setattr(f"{__name__}.FAILING_STEPS", [])


def test_late_losses_are_logged_at_their_steps(tmp_path, late_reading, monkeypatch):
    late, at_once = RecordingTracker(), RecordingTracker()
    result = run(tmp_path / "late", late, checkpoint_steps=1000)
    monkeypatch.undo()
    assert np.array_equal(run(tmp_path / "at once", at_once).accuracy, result.accuracy)
    assert late.numbers == at_once.numbers


def test_infinite_loss_is_noticed_before_a_checkpoint(tmp_path, late_reading):
    undisturbed = run(tmp_path / "undisturbed")
    FAILING_STEPS.append(43)
    with pytest.raises(FloatingPointError, match=r"The loss is inf in task 1, epoch 1, step 14: .* after 7 further"):
        run(tmp_path / "failed")

    # The last checkpoint is from before the failure.
    FAILING_STEPS.clear()
    resumed = run(tmp_path / "failed")
    assert resumed.provenance["resumed_from"] == "task 2, step 11"
    assert np.array_equal(resumed.accuracy, undisturbed.accuracy)


def test_infinite_loss_is_noticed_at_the_end_of_the_task(late_reading):
    FAILING_STEPS.append(4)
    x, y = torch.rand(64, 5), torch.randint(3, (64,))
    with pytest.raises(FloatingPointError, match=r"step 5: lower the learning rate .* after 2 further"):
        everlearn.train(torch.nn.Linear(5, 3), Failing(), (x, y), iterations=6, batch_size=8)


def test_cause_is_found_in_the_batch_of_the_step(late_reading):
    x, y = torch.rand(64, 5), torch.randint(3, (64,))
    x[5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"1 of 64 examples \(first: example 5\) has NaN or infinite inputs"):
        everlearn.train(torch.nn.Linear(5, 3), Method(), (x, y), epochs=2, batch_size=8)
