"""Two processes with half of every batch each learn what one process learns with the whole."""

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
from everlearn.methods.replay.base import gradient_on
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
    # All presentations, 640 in two epochs, are kept and seen again, so that a draw is no matter of luck.
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
    x, some = x.double(), torch.cat([(y < 5).nonzero()[:160], (y > 4).nonzero()[:160]]).flatten()
    return (x[some], y[some]), (x[-101:], y[-101:])


def learn(make, data, size, net=None, scenario="task", **settings):
    """The weights, and the accuracies."""
    made = []

    def model(inputs, outputs):
        made.append((net or (lambda i, o: nets.mlp(i, o, hidden=(20,))))(inputs, outputs))
        return made[-1]

    stream = streams.split(*data, tasks=2, scenario=scenario, class_order=range(10))
    settings = {"epochs": 2, "progress": False, **settings}
    result = everlearn.run(model, make(), stream, batch_size=size, **settings)
    return {n: v.clone() for n, v in made[-1].state_dict().items()}, result.accuracy, result.initial_accuracy


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_learn_what_one_does_with_the_doubled_batch(name, two, data):
    weights, accuracy, initial = learn(METHODS[name], data, 32)
    for other, again, first in two(lambda: learn(METHODS[name], data, 16)):
        for n in weights:
            torch.testing.assert_close(other[n], weights[n], rtol=1e-6, atol=1e-6)
        assert np.allclose(again, accuracy)
        assert np.allclose(first, initial)


@pytest.mark.parametrize(
    "name", ["ewc", "er", *(pytest.param(n, marks=pytest.mark.slow) for n in ("finetune", "er-ace", "der", "agem"))]
)
def test_the_last_batch_may_be_smaller(name, two, data):
    (x, y), test = data
    uneven = (x[:-26], y[:-26]), test
    weights, *_ = learn(METHODS[name], uneven, 32)
    for other, *_ in two(lambda: learn(METHODS[name], uneven, 16)):
        for n in weights:
            torch.testing.assert_close(other[n], weights[n], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"accumulate": 2, "clip": 0.1}, {"keep_optimizer": True, "scenario": "class"}], ids=str
)
def test_with_other_settings_too(settings, two, data):
    weights, *_ = learn(lambda: EWC(50.0), data, 32, **settings)
    for other, *_ in two(lambda: learn(lambda: EWC(50.0), data, 16, **settings)):
        for n in weights:
            torch.testing.assert_close(other[n], weights[n], rtol=1e-6, atol=1e-6)


def test_both_are_the_same_bit_for_bit_also_with_statistics_and_their_own_draws(two, data):
    def net(inputs, outputs):
        return nets.cnn(inputs, outputs, channels=(4, 8))

    (one, *_), (other, *_) = two(lambda: learn(lambda: ER(50) + EWC(10.0), data, 16, net))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("make", [lambda: ExpandNet(threshold=1.0), lambda: ExpandableRepresentation(40)])
def test_networks_grow_alike(make, two, data):
    (one, *_), (other, *_) = two(lambda: learn(make, data, 16, scenario="class"))
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_finished_run_is_read_by_all(two, data, tmp_path):
    def twice():
        return [learn(lambda: ER(50), data, 16, out=tmp_path / "out")[1] for _ in range(2)]

    for first, second in two(twice):
        assert np.array_equal(first, second)
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_reference_gradients_are_those_of_all_labels_that_count(two, double):
    """One process may have many labels that are ignored, or nothing else."""
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    model = torch.nn.Linear(3, 2)
    for ignored in (slice(4, 7), slice(4, 8)):
        labels = y.clone()
        labels[ignored] = -100

        def reference(labels=labels):
            part = slice(4 * distributed.rank(), 8 if distributed.world_size() == 1 else 4 * distributed.rank() + 4)
            return gradient_on(model, list(model.parameters()), Batch(x[part], labels[part]))

        for gradient in two(reference):
            torch.testing.assert_close(gradient, reference())


def test_a_process_without_labels_adds_nothing_though_its_loss_is_no_number(two):
    def averaged():
        p = torch.nn.Parameter(torch.zeros(2))
        last = distributed.rank() == 1
        p.grad = torch.full((2,), torch.nan if last else 3.0)
        loss = distributed.average_gradients([p], 0.0 if last else 5.0, torch.nan if last else 2.0)
        return p.grad, loss, distributed.average_gradients([p], 0.0, torch.nan)

    for gradient, loss, of_nothing in two(averaged):
        assert gradient.tolist() == [3, 3] and loss == 2 and np.isnan(of_nothing)


def test_memories_are_shared_out(two, data):
    method = ER(61)  # made before there are several

    def memory():
        stream = streams.split(*data, tasks=2, scenario="task", class_order=range(10))
        for task in stream:
            everlearn.train(nets.mlp(stream.inputs, stream.outputs), method, task, batch_size=16)
        return method.memory["x"].clone()

    one, other = two(memory)
    assert len(one) == len(other) == 31
    assert not any((row == other).flatten(1).all(1).any() for row in one)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("labels", ["exact", "true"])
def test_the_fisher_information_is_that_of_all_examples(structure, labels, two, data):
    torch.manual_seed(0)
    model, (x, y) = nets.mlp((1, 8, 8), 10, hidden=(5,)), (data[0][0][:51], data[0][1][:51])

    def found():
        return curvature.fisher(model, (x, y), labels, structure).diagonal()

    for other in two(found):
        for n, v in found().items():
            torch.testing.assert_close(other[n], v)


def test_a_grown_head_learns_too(two, data):
    """What a wrapper made before the task would leave out."""

    def grown():
        torch.manual_seed(0)
        model = nets.mlp((1, 8, 8), 5, hidden=(10,))
        for classes in (range(5), range(5, 10)):
            everlearn.surgery.heads.grow_output(model, classes[-1] + 1)
            own = torch.isin(data[0][1], torch.tensor(classes))
            everlearn.train(model, Method(), (data[0][0][own], data[0][1][own]), batch_size=16)
        return [p.detach().clone() for p in model.parameters()]

    one, other = two(grown)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["ewc", "lwf", "er", "agem"])
def test_attached_beside_torch_s_own_wrapper(name, two, data):
    """DistributedDataParallel averages the loop's gradients; the method's own are averaged too."""

    def attached(size):
        torch.manual_seed(0)
        model, method, (x, y) = nets.mlp((1, 8, 8), 10, hidden=(10,)), METHODS[name](), data[0]
        wrapped = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = method.attach(model, optimizer)
        for task in (slice(0, 160), slice(160, 320)):
            for rows in torch.arange(320)[task].split(2 * size):
                own = rows.tensor_split(2)[dist.get_rank()] if dist.is_initialized() else rows
                attachment.see(x[own], y[own])
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(wrapped(x[own]), y[own]).backward()
                optimizer.step()
            method.end_task(model, (x[task], y[task]))
        return {n: v.clone() for n, v in model.state_dict().items()}

    weights = attached(16)
    for other in two(lambda: attached(16)):
        for n in weights:
            torch.testing.assert_close(other[n], weights[n], rtol=1e-6, atol=1e-6)


class Threefold(Method):
    """So that gradients must be thrice the loop's, whatever that has done to them."""

    def task_loss(self, batch, out):
        return 3 * batch.loss(out)


@pytest.mark.parametrize("way", ["unequal shares", "a sum", "clipped", "scaled"])
def test_attached_it_weighs_as_processes_do_together(way, two, data):
    def gradients():
        torch.manual_seed(0)
        model, (x, y) = nets.mlp((1, 8, 8), 10, hidden=(10,)), data[0]
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        own = slice(0, 8) if dist.get_rank() == 0 else slice(8, 32 if way == "unequal shares" else 16)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=way == "scaled")
        with Threefold().attach(model, optimizer) as attached:
            attached.see(x[own], y[own])
            reduction = "sum" if way == "a sum" else "mean"
            scaler.scale(torch.nn.functional.cross_entropy(wrapped(x[own]), y[own], reduction=reduction)).backward()
            scaler.unscale_(optimizer)
            if way == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            before = [p.grad.clone() for p in model.parameters()]
            scaler.step(optimizer)
        return before, [p.grad.clone() for p in model.parameters()]

    for before, after in two(gradients):
        for a, b in zip(before, after, strict=True):
            factor = 1 if way == "clipped" else 3  # three times the loss is clipped to the same norm
            torch.testing.assert_close(b, factor * a, rtol=1e-4, atol=1e-6)


def test_processes_may_begin_with_weights_of_their_own(two, data):
    def learned():
        torch.manual_seed(dist.get_rank())
        model, method = nets.mlp((1, 8, 8), 10, hidden=(10,)), SI(10.0)
        for task in streams.split(*data, tasks=2, scenario="task", class_order=range(10)):
            everlearn.train(model, method, task, batch_size=16)
        return [p.detach().clone() for p in model.parameters()]

    one, other = two(learned)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_loader_that_is_shared_out_already_is_taken_as_it_is(two, data):
    (x, y), seen = data[0], []

    class Watching(Method):
        def observe(self, batch, out):
            seen.extend(batch.x.flatten(1).sum(1).tolist())

    def rows():
        every = torch.utils.data.TensorDataset(x, y)
        sampler = torch.utils.data.DistributedSampler(every)
        loader = torch.utils.data.DataLoader(every, 16, sampler=sampler)
        everlearn.train(nets.mlp((1, 8, 8), 10), Watching(), loader)
        examples = sum(len(b) for b in everlearn.Task(loader).examples(16, shared=True))
        return seen, examples

    (one, few), (other, more) = two(rows)
    assert sorted(one + other) == pytest.approx(sorted(x.flatten(1).sum(1).tolist()))
    assert few == more == 160


def test_a_checkpoint_that_one_process_cannot_write_is_none(two, data, tmp_path):
    write = everlearn.runtime.files.write

    def full(path, *content, **settings):
        if path.suffix == ".checkpoint" and dist.get_rank() == 1 and "000000005" in path.name:
            raise OSError(28, "No space left on device")
        write(path, *content, **settings)

    def learned():
        everlearn.runtime.files.write = full
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            weights, *_ = learn(EWC, data, 16, out=tmp_path / "out", checkpoint=CheckpointEvery(5, None))
        return weights, len(told)

    whole = learn(EWC, data, 32)[0]
    (one, quiet), (_, loud) = two(learned)
    assert (quiet, loud) == (0, 2)
    for n in whole:
        torch.testing.assert_close(one[n], whole[n], rtol=1e-6, atol=1e-6)


def test_together_they_go_on_after_a_kill(two, data, tmp_path):
    early = ER(50)  # made before there are several

    def net(inputs, outputs):
        return nets.cnn(inputs, outputs, channels=(4, 8))

    whole = two(lambda: learn(lambda: ER(50), data, 16, net))
    step, taken = TaskTraining._train_step, [0]

    def dies(self, batch):
        if taken[0] == 16 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        taken[0] += 1
        step(self, batch)

    def once(deadly):
        TaskTraining._train_step = dies if deadly else step
        return learn(lambda: early, data, 16, net, out=tmp_path / "out", checkpoint=CheckpointEvery(5, None))

    with pytest.raises(AssertionError):
        two(lambda: once(True))
    (tmp_path / "meet").unlink(missing_ok=True)
    assert len(list(tmp_path.rglob("*.checkpoint"))) >= 4
    for (one, accuracy, _), (other, again, _) in zip(whole, two(lambda: once(False)), strict=True):
        assert all(torch.equal(one[n], other[n]) for n in one)
        assert np.array_equal(accuracy, again)
    assert [p.suffix for p in (tmp_path / "out").iterdir()] == [".json"]


@pytest.mark.slow
@pytest.mark.enable_socket
def test_torchrun_starts_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "everlearn", "run", "--methods", "ewc",
         "--epochs", "1", "--out", str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count("EWC (digits") == 1
    assert len(list(tmp_path.glob("*.json"))) == 1
