"""Behavior that ER, A-GEM, GEM, DER, DER++ and ER-ACE share."""

import pytest
import torch
from torch import nn

import everlearn
from everlearn import (
    AGEM,
    DER,
    ER,
    ERACE,
    EWC,
    GEM,
    MAS,
    Batch,
    DERpp,
    Freeze,
    LwF,
    Memory,
    Method,
    Task,
    nets,
    streams,
    train,
)
from everlearn.methods.replay.reference_gradients import reference_gradient

KINDS = [ER, ERACE, DER, DERpp, AGEM, GEM]


def batch(n=8, t=0, epoch=0, **fields):
    return Batch(torch.randn(n, 4), torch.randint(3, (n,)), torch.full((n,), t), epoch=epoch, **fields)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def have_equal_states(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_memory_is_fine_tuning(kind):
    """Bit-identical in the first step; for A-GEM and GEM in the entire first task."""
    task = streams.digits("class")[0]
    ends = []
    for method in (Method(), kind(50)):
        torch.manual_seed(0)
        model = nets.mlp(task.train.x.shape[1:], 10, hidden=(8,))
        train(model, method, task, optimizer=sgd, iterations=20 if kind in (AGEM, GEM) else 1)
        ends.append(model)
    assert have_equal_states(*ends)


@pytest.mark.parametrize("kind", KINDS)
def test_every_presentation_is_offered_in_every_epoch(kind):
    """As in the authors' code: three epochs of thirty examples are ninety presentations."""
    task = Task((torch.randn(30, 4), torch.randint(3, (30,))), id=0)
    method = kind(100)
    model = nn.Linear(4, 3)
    train(model, method, task, epochs=3, batch_size=10)
    assert len(method.memory) == method.memory.num_seen == 90
    stored = method.memory["x"].sort(0).values
    assert torch.equal(stored, task.train.x.repeat(3, 1).sort(0).values)


@pytest.mark.parametrize("policy", ["reservoir", "balanced", "ring"])
def test_quotas_of_classes_and_tasks_stay_equal_over_epochs(policy):
    x = torch.randn(120, 4)
    y = torch.arange(120) % 3
    method = ER(24, policy=policy)
    model = nn.Linear(4, 3)
    for number in range(2):
        train(model, method, Task((x, y), id=number), epochs=5, batch_size=10)
    assert method.memory.num_seen == 2 * 5 * 120
    if policy == "balanced":
        assert method.memory["y"].bincount().tolist() == [8, 8, 8]
    if policy == "ring":
        assert method.memory["t"].bincount().tolist() == [12, 12]
        last = [row for b in Task((x, y), id=1).batches(10, epochs=5) for row in b.x][-12:]
        assert torch.equal(method.memory["x"][method.memory["t"] == 1].sort(0).values, torch.stack(last).sort(0).values)


def test_a_balanced_memory_stores_presentations_of_all_epochs():
    """Within a class every presentation is stored with equal probability, whatever its epoch."""
    late = 0
    for seed in range(200):
        method = ER(10, policy="balanced")
        method.memory = Memory(10, "balanced", seed=seed)
        for epoch in range(4):
            y = torch.zeros(20, dtype=torch.long)
            method.observe(Batch(torch.full((20, 1), float(epoch)), y), torch.zeros(20, 2))
        late += int((method.memory["x"] == 3).sum())
    assert abs(late / 2000 - 0.25) < 0.04  # four standard deviations


def test_examples_with_only_ignored_labels_are_not_stored():
    method = DERpp(20)
    y = torch.tensor([0, -100, 2, -100])
    x = torch.arange(4.0)[:, None]
    method.observe(Batch(x, y), torch.zeros(4, 3))
    assert method.memory["x"].flatten().tolist() == [0, 2] and method.memory.num_seen == 2
    method.observe(Batch(x, torch.full((4,), -100)), torch.zeros(4, 3))
    assert method.memory.num_seen == 2


@pytest.mark.parametrize("kind", [AGEM, GEM])
def test_sparse_gradients_and_frozen_parameters(kind):
    """The edited gradient equals that of a dense model and stays sparse; frozen parameters are not edited."""
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 3))
        model[3].requires_grad_(False)
        model[3].weight.grad = torch.full_like(model[3].weight, 7.0)  # left by a backward pass before it was frozen
        method = kind(20)
        x = torch.randint(6, (8, 3))
        method.observe(Batch(x, torch.arange(8) % 3, torch.zeros(8, dtype=torch.long)), torch.zeros(8, 3))
        current = Batch(x[:, :3], (torch.arange(8) + 1) % 3, torch.ones(8, dtype=torch.long))
        method.loss(model, current).backward()
        unedited = model[0].weight.grad.to_dense().clone()
        method.before_step(model)
        assert model[0].weight.grad.is_sparse == sparse
        assert not torch.allclose(model[0].weight.grad.to_dense(), unedited), (
            "the labels contradict, so the gradient is edited"
        )
        assert (model[3].weight.grad == 7).all()
        ends.append([model[0].weight.grad.to_dense(), model[2].weight.grad])
        if sparse:
            torch.optim.SparseAdam([model[0].weight]).step()
    for dense, from_sparse in zip(*ends, strict=True):
        torch.testing.assert_close(dense, from_sparse)


@pytest.mark.parametrize("kind", KINDS)
def test_examples_are_stored_unaugmented_and_augmented_when_replayed(kind):
    augmented_sizes = []

    def noisy(x):
        augmented_sizes.append(len(x))
        return x + torch.randn_like(x)

    x = torch.randn(40, 4)
    y = torch.arange(40) % 3
    method = kind(100, 5)
    model = nn.Linear(4, 3)
    for t in range(2):
        train(model, method, Task((x, y), id=t, transform=noisy), epochs=1, batch_size=10)
    stored = {tuple(row.tolist()) for row in method.memory["x"]}
    assert stored <= {tuple(row.tolist()) for row in x}
    assert len(augmented_sizes) > 8, "replayed examples are augmented too"


def test_every_task_keeps_its_own_augmentation():
    method = ER(40, 20)
    model = nn.Linear(4, 3)
    forward_inputs = []
    x = torch.rand(40, 4)
    y = torch.arange(40) % 3
    model.register_forward_pre_hook(lambda _, args: forward_inputs.append(args[0]))
    for t, shift in enumerate((100.0, -100.0, None)):
        transform = None if shift is None else (lambda x, shift=shift: x + shift)
        train(
            model,
            method,
            Task((x, y), id=t, transform=transform),
            epochs=1,
            batch_size=20,
            optimizer=lambda p: torch.optim.SGD(p, 1e-9),
        )
    replayed, _ = method.draw(Batch(x[:20], y[:20], torch.full((20,), 2)))
    shifts = {0: 100.0, 1: -100.0, 2: 0.0}
    for row, t in zip(replayed.x, replayed.t.tolist(), strict=True):
        assert (row - shifts[t]).min() >= 0 and (row - shifts[t]).max() <= 1
    assert len(replayed.t.unique()) > 1


def test_unnumbered_tasks_differ_from_numbered_ones():
    method = AGEM(20)
    method.observe(batch(t=1), None)
    method.end_task(nn.Linear(1, 1), None)
    later = Batch(torch.randn(4, 4), torch.randint(3, (4,)))
    assert method.earlier_task_rows(later).all()


@pytest.mark.parametrize("kind", KINDS)
def test_augmenting_replayed_examples_does_not_change_other_random_numbers(kind):
    """Dropout draws the same numbers with and without an augmentation that draws some and changes nothing."""
    ends = []
    for transform in (lambda x: x, lambda x: x + 0 * torch.rand_like(x)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        method = kind(20, 4)
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
        for t in range(2):
            train(model, method, Task(data, id=t, transform=transform), epochs=1, batch_size=10)
        ends.append(model)
    assert have_equal_states(*ends)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_composes_with_every_regularizer(kind):
    stream = streams.digits("class")
    for second_method in (EWC(1.0), MAS(0.01), LwF(0.1), Freeze()):
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
        chain = kind(30) + second_method
        for task in stream.tasks[:2]:
            train(model, chain, task, iterations=3)
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_replay_in_a_custom_loop(kind):
    model = nn.Linear(4, 3)
    method = kind(20)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        for _ in range(3):
            loss = method.loss(model, Batch(torch.randn(8, 4), torch.randint(3, (8,))))
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        method.end_task(model, None)
    assert len(method.memory) == 20 and method.tasks == 2


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_labels_stay_within_their_task(kind):
    """Task-incremental: the loss of a replayed example is over the classes of its own task."""
    stream = streams.digits("task")
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    method = kind(40)
    for task in stream.tasks[:3]:
        train(model, method, task, iterations=4)
    t = method.memory["t"]
    y = method.memory["y"]
    assert torch.equal(t, y // 2) and len(t.unique()) == 3


def test_reference_gradients_do_not_update_batchnorm_statistics():
    """Running statistics follow only the batches of the current task."""
    stream = streams.digits("class")
    counts = []
    for method in (Method(), AGEM(40)):
        torch.manual_seed(0)
        model = nets.cnn(stream.inputs, stream.outputs, channels=(4,))
        for task in stream.tasks[:2]:
            train(model, method, task, iterations=5)
        counts.append(int(next(b for n, b in model.named_buffers() if n.endswith("tracked"))))
    assert counts == [10, 10]


def test_the_process_does_not_grow_with_the_stream():
    """After many tasks only the memory remains allocated."""
    method = ER(50)
    model = nn.Linear(784, 10)
    train(model, method, Task((torch.randn(500, 784), torch.randint(10, (500,))), id=0), epochs=1)
    memory_bytes = method.memory.nbytes
    initial_peak = everlearn.trainer.cost.reset_peak_memory(torch.device("cpu"))
    for t in range(1, 11):
        train(model, method, Task((torch.randn(2000, 784), torch.randint(10, (2000,))), id=t), epochs=1)
    growth = everlearn.trainer.cost.peak_memory(torch.device("cpu")) - initial_peak
    task_bytes = 2000 * 784 * 4
    assert method.memory.nbytes == memory_bytes == 50 * (784 * 4 + 8 + 8)
    assert growth < 4 * task_bytes, "storing ten tasks would take ten times as much"


@pytest.mark.parametrize("kind", [ER, DERpp, AGEM, GEM])
def test_a_loop_that_does_not_use_the_loss_raises(kind):
    with pytest.raises(ValueError, match=r"seen no example.*method.loss\(model, Batch\(x, y\)\)"):
        kind().end_task(nn.Linear(2, 2), None)
    with pytest.raises(TypeError, match=r"write Batch\(x, y\)"):
        kind().loss(nn.Linear(2, 2), (torch.randn(4, 2), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize("kind", [AGEM, GEM])
def test_a_loop_without_before_step_raises(kind):
    model = nn.Linear(2, 2)
    method = kind()
    method.loss(model, Batch(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))).backward()
    method.end_task(model, None)  # no edit is needed in the first task
    method.loss(model, Batch(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))).backward()
    with pytest.raises(ValueError, match="before_step was not called"):
        method.end_task(model, None)
    method.before_step(model)
    method.end_task(model, None)


def test_examples_of_another_shape_are_refused():
    method = ER(10)
    method.observe(Batch(torch.randn(4, 2), torch.zeros(4, dtype=torch.long)), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="cannot be concatenated into one batch"):
        method.loss(nn.Linear(3, 2), Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.long)))


def test_ignored_labels_are_found_before_the_transfer_to_the_device():
    """Without waiting for the device; the meta device would raise."""
    y = torch.tensor([0, -100, 2])
    assert Batch(torch.zeros(3, 4), y.clamp(min=0)).to("meta").labeled_rows() is None
    assert Batch(torch.zeros(3, 4), y).to("meta").labeled_rows().is_meta
    assert Batch(torch.zeros(3, 4), y).to("cpu").labeled_rows().tolist() == [True, False, True]


def test_reference_gradients_do_not_synchronize(count_synchronizations):
    model = nn.Linear(4, 3)
    gradient = []
    assert (
        count_synchronizations(lambda: gradient.extend(reference_gradient(model, list(model.parameters()), batch())))
        == 0
    )
    assert gradient[0].any() and reference_gradient(model, list(model.parameters()), None) is None


@pytest.mark.parametrize("kind", [ER, AGEM, DERpp])
def test_a_task_without_examples_warns(kind):
    """The loop uses the method's loss in the first task, and its own in the second."""
    model = torch.nn.Linear(3, 2)
    method = kind(10)
    x = torch.randn(8, 3)
    y = torch.randint(2, (8,))
    method.loss(model, Batch(x, y)).backward()
    method.end_task(model, (x, y))
    with pytest.warns(UserWarning, match=f"{kind.__name__} has seen no example since the last task ended"):
        method.end_task(model, (x, y))
