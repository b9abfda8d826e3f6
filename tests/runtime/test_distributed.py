"""Two processes with half of every batch each learn the same as one process with the joint batch."""

import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

import everlearn
from everlearn import (
    AGEM,
    DER,
    ER,
    ERACE,
    EWC,
    GEM,
    HAT,
    MAS,
    SI,
    Batch,
    ExpandableRepresentation,
    ExpandNet,
    LwF,
    Method,
    PackNet,
    curvature,
    nets,
    streams,
)
from everlearn.methods.replay.reference_gradients import reference_gradient
from everlearn.runtime import distributed
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.train import TaskTraining

METHODS = {
    "finetune": Method,
    "ewc": lambda: EWC(50.0),
    "online, Kronecker": lambda: EWC(50.0, mode="online", structure="kronecker"),
    "mas": lambda: MAS(0.5),
    "si": lambda: SI(1.0),
    "lwf": LwF,
    # All 640 examples of two epochs are stored and replayed, so that the result does not depend on a random draw.
    "er": lambda: ER(800, 800),
    "der": lambda: DER(800, 800),
    "er-ace": lambda: ERACE(800, 800),
    "agem": lambda: AGEM(800, 800),
    "gem": lambda: GEM(800),
    "packnet": PackNet,
    "hat": HAT,
}


@pytest.fixture
def data(double):
    (x, y), _ = streams.digits_data()
    x = x.double()
    rows = torch.cat([(y < 5).nonzero()[:160], (y > 4).nonzero()[:160]]).flatten()
    return (x[rows], y[rows]), (x[-101:], y[-101:])


def learn(make, data, size, net=None, scenario="task", **settings):
    """Train on a stream, and return the weights and the accuracies."""
    models = []

    def model(inputs, outputs):
        if net is None:
            models.append(nets.mlp(inputs, outputs, hidden=(20,)))
        else:
            models.append(net(inputs, outputs))
        return models[-1]

    stream = streams.split(*data, tasks=2, scenario=scenario, class_order=range(10))
    settings = {"epochs": 2, "progress": False, **settings}
    result = everlearn.run(model, make(), stream, batch_size=size, **settings)
    return {n: v.clone() for n, v in models[-1].state_dict().items()}, result.accuracy, result.initial_accuracy


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_learn_the_same_as_one_with_the_doubled_batch(name, run_two_processes, data):
    weights, accuracy, initial = learn(METHODS[name], data, 32)
    results = run_two_processes(lambda: learn(METHODS[name], data, 16))
    for process_weights, process_accuracy, process_initial in results:
        for n in weights:
            torch.testing.assert_close(process_weights[n], weights[n], rtol=1e-6, atol=1e-6)
        assert np.allclose(process_accuracy, accuracy)
        assert np.allclose(process_initial, initial)


@pytest.mark.parametrize(
    "name", ["ewc", "er", *(pytest.param(n, marks=pytest.mark.slow) for n in ("finetune", "er-ace", "der", "agem"))]
)
def test_the_last_batch_may_be_smaller(name, run_two_processes, data):
    (x, y), test = data
    uneven = (x[:-26], y[:-26]), test
    weights, *_ = learn(METHODS[name], uneven, 32)
    for process_weights, *_ in run_two_processes(lambda: learn(METHODS[name], uneven, 16)):
        for n in weights:
            torch.testing.assert_close(process_weights[n], weights[n], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"accumulate": 2, "clip": 0.1}, {"keep_optimizer": True, "scenario": "class"}], ids=str
)
def test_other_training_settings(settings, run_two_processes, data):
    weights, *_ = learn(lambda: EWC(50.0), data, 32, **settings)
    for process_weights, *_ in run_two_processes(lambda: learn(lambda: EWC(50.0), data, 16, **settings)):
        for n in weights:
            torch.testing.assert_close(process_weights[n], weights[n], rtol=1e-6, atol=1e-6)


def test_both_processes_have_identical_weights_with_batchnorm_and_separate_draws(run_two_processes, data):
    def net(inputs, outputs):
        return nets.cnn(inputs, outputs, channels=(4, 8))

    (first, *_), (second, *_) = run_two_processes(lambda: learn(lambda: ER(50) + EWC(10.0), data, 16, net))
    assert all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("make", [lambda: ExpandNet(threshold=1.0), lambda: ExpandableRepresentation(40)])
def test_networks_grow_equally_in_both_processes(make, run_two_processes, data):
    (first, *_), (second, *_) = run_two_processes(lambda: learn(make, data, 16, scenario="class"))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_a_finished_run_is_loaded_by_all_processes(run_two_processes, data, tmp_path):
    def twice():
        return [learn(lambda: ER(50), data, 16, out=tmp_path / "out")[1] for _ in range(2)]

    for first, second in run_two_processes(twice):
        assert np.array_equal(first, second)
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_reference_gradients_use_the_labels_of_all_processes(run_two_processes, double):
    """One process may have many ignored labels, or only ignored labels."""
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    model = torch.nn.Linear(3, 2)
    for ignored in (slice(4, 7), slice(4, 8)):
        labels = y.clone()
        labels[ignored] = -100

        def reference(labels=labels):
            start = 4 * distributed.rank()
            part = slice(start, 8 if distributed.world_size() == 1 else start + 4)
            return reference_gradient(model, list(model.parameters()), Batch(x[part], labels[part]))

        for gradient in run_two_processes(reference):
            torch.testing.assert_close(gradient, reference())


def test_a_process_without_labels_is_ignored_even_if_its_loss_is_nan(run_two_processes):
    def averaged():
        p = torch.nn.Parameter(torch.zeros(2))
        has_labels = distributed.rank() == 0
        p.grad = torch.full((2,), 3.0 if has_labels else torch.nan)
        loss = distributed.average_gradients([p], 5.0 if has_labels else 0.0, 2.0 if has_labels else torch.nan)
        return p.grad, loss, distributed.average_gradients([p], 0.0, torch.nan)

    for gradient, loss, loss_without_labels in run_two_processes(averaged):
        assert gradient.tolist() == [3, 3] and loss == 2 and np.isnan(loss_without_labels)


def test_memory_capacity_is_divided_among_processes(run_two_processes, data):
    method = ER(61)  # created before the processes start

    def memory():
        stream = streams.split(*data, tasks=2, scenario="task", class_order=range(10))
        for task in stream:
            everlearn.train(nets.mlp(stream.inputs, stream.outputs), method, task, batch_size=16)
        return method.memory["x"].clone()

    first, second = run_two_processes(memory)
    assert len(first) == len(second) == 31
    assert not any((row == second).flatten(1).all(1).any() for row in first)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("labels", ["exact", "true", "auto", "sample"])
def test_the_fisher_information_uses_the_examples_of_all_processes(structure, labels, run_two_processes, data):
    torch.manual_seed(0)
    model = nets.mlp((1, 8, 8), 10, hidden=(5,))
    x = data[0][0][:51]
    y = data[0][1][:51]

    def diagonal():
        return curvature.fisher(model, (x, y), labels, structure).diagonal()

    for process_diagonal in run_two_processes(diagonal):
        for n, v in diagonal().items():
            torch.testing.assert_close(process_diagonal[n], v)


def test_a_grown_head_is_trained(run_two_processes, data):
    """A DistributedDataParallel wrapper created before the task would ignore the new weights."""

    def grown():
        torch.manual_seed(0)
        model = nets.mlp((1, 8, 8), 5, hidden=(10,))
        for classes in (range(5), range(5, 10)):
            everlearn.surgery.heads.grow_output(model, classes[-1] + 1)
            task_rows = torch.isin(data[0][1], torch.tensor(classes))
            everlearn.train(model, Method(), (data[0][0][task_rows], data[0][1][task_rows]), batch_size=16)
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_two_processes(grown)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["ewc", "lwf", "er", "agem"])
def test_attachment_with_distributed_data_parallel(name, run_two_processes, data):
    """DistributedDataParallel averages the loop's gradients; the method's gradients are averaged too."""

    def attached(size):
        torch.manual_seed(0)
        model = nets.mlp((1, 8, 8), 10, hidden=(10,))
        method = METHODS[name]()
        x, y = data[0]
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = method.attach(model, optimizer)
        for task in (slice(0, 160), slice(160, 320)):
            for rows in torch.arange(320)[task].split(2 * size):
                if dist.is_initialized():
                    rows = rows.tensor_split(2)[dist.get_rank()]
                outputs = wrapped(x[rows])
                task_loss = torch.nn.functional.cross_entropy(outputs, y[rows])
                loss = attachment.loss(task_loss, x[rows], y[rows], outputs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            method.end_task(model, (x[task], y[task]))
        return {n: v.clone() for n, v in model.state_dict().items()}

    weights = attached(16)
    for process_weights in run_two_processes(lambda: attached(16)):
        for n in weights:
            torch.testing.assert_close(process_weights[n], weights[n], rtol=1e-6, atol=1e-6)


class Threefold(Method):
    """Triple the task loss, so that gradients must be three times the loop's gradients."""

    def task_loss(self, model, batch):
        loss, outputs = super().task_loss(model, batch)
        return 3 * loss, outputs


@pytest.mark.parametrize("way", ["unequal shares", "a sum", "clipped", "scaled"])
def test_attached_losses_are_averaged_over_processes(way, run_two_processes, data):
    def gradients(is_attached):
        torch.manual_seed(0)
        model = nets.mlp((1, 8, 8), 10, hidden=(10,))
        x, y = data[0]
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rows = slice(0, 8)
        if dist.get_rank() == 1:
            rows = slice(8, 32 if way == "unequal shares" else 16)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=way == "scaled")
        with Threefold().attach(model, optimizer) as attached:
            is_sum = way == "a sum"
            outputs = wrapped(x[rows])
            loss = torch.nn.functional.cross_entropy(outputs, y[rows], reduction="sum" if is_sum else "mean")
            if is_attached:
                loss = attached.loss(loss, x[rows], y[rows], outputs, weight=len(y[rows]) if is_sum else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if way == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if is_attached:
                scaler.step(optimizer)
        return [p.grad.clone() for p in model.parameters()]

    for loop_gradients, method_gradients in run_two_processes(lambda: (gradients(False), gradients(True))):
        for a, b in zip(loop_gradients, method_gradients, strict=True):
            factor = 1 if way == "clipped" else 3  # three times the loss is clipped to the same norm
            torch.testing.assert_close(b, factor * a, rtol=1e-4, atol=1e-6)


def test_processes_may_start_from_different_weights(run_two_processes, data):
    def learned():
        torch.manual_seed(dist.get_rank())
        model = nets.mlp((1, 8, 8), 10, hidden=(10,))
        method = SI(10.0)
        for task in streams.split(*data, tasks=2, scenario="task", class_order=range(10)):
            everlearn.train(model, method, task, batch_size=16)
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_two_processes(learned)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_loader_with_a_distributed_sampler_is_not_split_again(run_two_processes, data):
    x, y = data[0]
    observed_sums = []

    class Recorder(Method):
        def observe(self, batch, out):
            observed_sums.extend(batch.x.flatten(1).sum(1).tolist())

    def rows():
        dataset = torch.utils.data.TensorDataset(x, y)
        sampler = torch.utils.data.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, 16, sampler=sampler)
        everlearn.train(nets.mlp((1, 8, 8), 10), Recorder(), loader)
        num_examples = sum(len(b) for b in everlearn.Task(loader).examples(16, shared=True))
        return observed_sums, num_examples

    (first_sums, first_count), (second_sums, second_count) = run_two_processes(rows)
    assert sorted(first_sums + second_sums) == pytest.approx(sorted(x.flatten(1).sum(1).tolist()))
    assert first_count == second_count == 160


def test_a_checkpoint_that_one_process_cannot_write_is_discarded(run_two_processes, data, tmp_path):
    write = everlearn.runtime.files.write

    def full(path, *content, **settings):
        if path.suffix == ".checkpoint" and dist.get_rank() == 1 and "000000005" in path.name:
            raise OSError(28, "No space left on device")
        write(path, *content, **settings)

    def learned():
        everlearn.runtime.files.write = full
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights, *_ = learn(EWC, data, 16, out=tmp_path / "out", checkpoint=CheckpointEvery(5, None))
        return weights, len(caught)

    expected = learn(EWC, data, 32)[0]
    (weights, first_warnings), (_, second_warnings) = run_two_processes(learned)
    assert (first_warnings, second_warnings) == (0, 2)
    for n in expected:
        torch.testing.assert_close(weights[n], expected[n], rtol=1e-6, atol=1e-6)


def test_processes_resume_together_after_a_kill(run_two_processes, data, tmp_path):
    early = ER(50)  # created before the processes start

    def net(inputs, outputs):
        return nets.cnn(inputs, outputs, channels=(4, 8))

    uninterrupted = run_two_processes(lambda: learn(lambda: ER(50), data, 16, net))
    step = TaskTraining._train_step
    steps_taken = [0]

    def dies(self, batch):
        if steps_taken[0] == 16 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        steps_taken[0] += 1
        step(self, batch)

    def train(is_killed):
        TaskTraining._train_step = dies if is_killed else step
        return learn(lambda: early, data, 16, net, out=tmp_path / "out", checkpoint=CheckpointEvery(5, None))

    with pytest.raises(AssertionError):
        run_two_processes(lambda: train(True))
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    assert len(list(tmp_path.rglob("*.checkpoint"))) >= 4
    resumed = run_two_processes(lambda: train(False))
    for (weights, accuracy, _), (resumed_weights, resumed_accuracy, _) in zip(uninterrupted, resumed, strict=True):
        assert all(torch.equal(weights[n], resumed_weights[n]) for n in weights)
        assert np.array_equal(accuracy, resumed_accuracy)
    assert [p.suffix for p in (tmp_path / "out").iterdir()] == [".json"]


@pytest.mark.slow
@pytest.mark.enable_socket
def test_torchrun_starts_the_command(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["-m", "everlearn", "run", "--methods", "ewc", "--epochs", "1", "--out", str(tmp_path)]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, check=True)
    assert done.stdout.count("EWC (digits") == 1
    assert len(list(tmp_path.glob("*.json"))) == 1
