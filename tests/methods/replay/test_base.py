"""What ER, A-GEM, GEM, DER, DER++ and ER-ACE have in common."""

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
from everlearn.methods.replay.base import gradient_on

KINDS = [ER, ERACE, DER, DERpp, AGEM, GEM]


def batch(n=8, t=0, epoch=0, **fields):
    return Batch(torch.randn(n, 4), torch.randint(3, (n,)), torch.full((n,), t), epoch=epoch, **fields)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_memory_is_fine_tuning(kind):
    """The first step bit for bit; A-GEM and GEM the whole first task."""
    task = streams.digits("class")[0]
    ends = []
    for method in (Method(), kind(50)):
        torch.manual_seed(0)
        model = nets.mlp(task.train.x.shape[1:], 10, hidden=(8,))
        train(model, method, task, optimizer=sgd, iterations=20 if kind in (AGEM, GEM) else 1)
        ends.append(model)
    assert same(*ends)


@pytest.mark.parametrize("kind", KINDS)
def test_every_presentation_is_offered_in_every_epoch(kind):
    """As in the authors' code: three epochs of thirty examples are ninety presentations."""
    task = Task((torch.randn(30, 4), torch.randint(3, (30,))), id=0)
    method, model = kind(100), nn.Linear(4, 3)
    train(model, method, task, epochs=3, batch_size=10)
    assert len(method.memory) == method.memory.seen == 90
    stored = method.memory["x"].sort(0).values
    assert torch.equal(stored, task.train.x.repeat(3, 1).sort(0).values)


@pytest.mark.parametrize("policy", ["reservoir", "balanced", "ring"])
def test_shares_of_classes_and_tasks_stay_equal_over_epochs(policy):
    x, y = torch.randn(120, 4), torch.arange(120) % 3
    method, model = ER(24, policy=policy), nn.Linear(4, 3)
    for number in range(2):
        train(model, method, Task((x, y), id=number), epochs=5, batch_size=10)
    assert method.memory.seen == 2 * 5 * 120
    if policy == "balanced":
        assert method.memory["y"].bincount().tolist() == [8, 8, 8]
    if policy == "ring":
        assert method.memory["t"].bincount().tolist() == [12, 12]
        last = [row for b in Task((x, y), id=1).batches(10, epochs=5) for row in b.x][-12:]
        assert torch.equal(method.memory["x"][method.memory["t"] == 1].sort(0).values, torch.stack(last).sort(0).values)


def test_a_memory_that_is_balanced_draws_from_all_epochs():
    """Of one class every presentation is kept with the same probability: over many runs as many of the last epoch as of the first."""
    late = 0
    for seed in range(200):
        method = ER(10, policy="balanced")
        method.memory = Memory(10, "balanced", seed=seed)
        for epoch in range(4):
            y = torch.zeros(20, dtype=torch.long)
            method.observe(Batch(torch.full((20, 1), float(epoch)), y), torch.zeros(20, 2))
        late += int((method.memory["x"] == 3).sum())
    assert abs(late / 2000 - 0.25) < 0.04  # four standard deviations


def test_examples_whose_labels_are_ignored_are_not_kept():
    method = DERpp(20)
    y = torch.tensor([0, -100, 2, -100])
    x = torch.arange(4.0)[:, None]
    method.observe(Batch(x, y), torch.zeros(4, 3))
    assert method.memory["x"].flatten().tolist() == [0, 2] and method.memory.seen == 2
    method.observe(Batch(x, torch.full((4,), -100)), torch.zeros(4, 3))
    assert method.memory.seen == 2


@pytest.mark.parametrize("kind", [AGEM, GEM])
def test_sparse_gradients_and_frozen_parameters(kind):
    """The edited gradient is that of the dense twin, sparse where it was; what is frozen is left alone."""
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 3))
        model[3].requires_grad_(False)
        model[3].weight.grad = torch.full_like(model[3].weight, 7.0)  # as a backward pass before the freezing leaves it
        method = kind(20)
        x = torch.randint(6, (8, 3))
        method.observe(Batch(x, torch.arange(8) % 3, torch.zeros(8, dtype=torch.long)), torch.zeros(8, 3))
        now = Batch(x[:, :3], (torch.arange(8) + 1) % 3, torch.ones(8, dtype=torch.long))
        method.loss(model, now).backward()
        plain = model[0].weight.grad.to_dense().clone()
        method.before_step(model)
        assert model[0].weight.grad.is_sparse == sparse
        assert not torch.allclose(model[0].weight.grad.to_dense(), plain), "the labels contradict: something is edited"
        assert (model[3].weight.grad == 7).all()
        ends.append([model[0].weight.grad.to_dense(), model[2].weight.grad])
        if sparse:
            torch.optim.SparseAdam([model[0].weight]).step()
    for dense, from_sparse in zip(*ends, strict=True):
        torch.testing.assert_close(dense, from_sparse)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_before_augmentation_and_augmented_when_replayed(kind):
    seen = []

    def noisy(x):
        seen.append(len(x))
        return x + torch.randn_like(x)

    x, y = torch.randn(40, 4), torch.arange(40) % 3
    method, model = kind(100, 5), nn.Linear(4, 3)
    for t in range(2):
        train(model, method, Task((x, y), id=t, transform=noisy), epochs=1, batch_size=10)
    stored = {tuple(row.tolist()) for row in method.memory["x"]}
    assert stored <= {tuple(row.tolist()) for row in x}
    assert len(seen) > 8, "replayed examples go through the augmentation too"


def test_every_task_keeps_its_own_augmentation():
    method, model, seen = ER(40, 20), nn.Linear(4, 3), []
    x, y = torch.rand(40, 4), torch.arange(40) % 3
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
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
    where = {0: 100.0, 1: -100.0, 2: 0.0}
    for row, t in zip(replayed.x, replayed.t.tolist(), strict=True):
        assert (row - where[t]).min() >= 0 and (row - where[t]).max() <= 1
    assert len(replayed.t.unique()) > 1


def test_unnumbered_tasks_do_not_meet_numbered_ones():
    method = AGEM(20)
    method.observe(batch(t=1), None)
    method.end_task(nn.Linear(1, 1), None)
    later = Batch(torch.randn(4, 4), torch.randint(3, (4,)))
    assert method.earlier(later).all()


@pytest.mark.parametrize("kind", KINDS)
def test_augmenting_what_is_replayed_leaves_other_random_numbers_alone(kind):
    """Dropout sees the same random numbers with and without an augmentation that draws some and changes nothing."""
    ends = []
    for transform in (lambda x: x, lambda x: x + 0 * torch.rand_like(x)):
        torch.manual_seed(0)
        model, method = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)), kind(20, 4)
        data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
        for t in range(2):
            train(model, method, Task(data, id=t, transform=transform), epochs=1, batch_size=10)
        ends.append(model)
    assert same(*ends)


@pytest.mark.parametrize("kind", KINDS)
def test_every_one_composes_with_every_regulariser(kind):
    stream = streams.digits("class")
    for other in (EWC(1.0), MAS(0.01), LwF(0.1), Freeze()):
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
        chain = kind(30) + other
        for task in stream.tasks[:2]:
            train(model, chain, task, iterations=3)
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_replay_in_a_loop_of_ones_own(kind):
    model, method = nn.Linear(4, 3), kind(20)
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
def test_labels_of_old_tasks_keep_their_own_outputs(kind):
    """Task-incremental: a replayed example is judged among its own task's classes."""
    stream = streams.digits("task")
    model, method = nets.mlp(stream.inputs, stream.outputs, hidden=(8,)), kind(40)
    for task in stream.tasks[:3]:
        train(model, method, task, iterations=4)
    t, y = method.memory["t"], method.memory["y"]
    assert torch.equal(t, y // 2) and len(t.unique()) == 3


def test_memory_and_statistics_of_batchnorm():
    """A-GEM's reference pass leaves running statistics to the current task."""
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
    """Many tasks through a small memory: what stays is the memory."""
    method, model = ER(50), nn.Linear(784, 10)
    train(model, method, Task((torch.randn(500, 784), torch.randint(10, (500,))), id=0), epochs=1)
    held = method.memory.nbytes
    before = everlearn.trainer.cost.reset_peak_memory(torch.device("cpu"))
    for t in range(1, 11):
        train(model, method, Task((torch.randn(2000, 784), torch.randint(10, (2000,))), id=t), epochs=1)
    grown = everlearn.trainer.cost.peak_memory(torch.device("cpu")) - before
    one_task = 2000 * 784 * 4
    assert method.memory.nbytes == held == 50 * (784 * 4 + 8 + 8)
    assert grown < 4 * one_task, "ten tasks would be ten times as much"


@pytest.mark.parametrize("kind", [ER, DERpp, AGEM, GEM])
def test_a_loop_that_shows_it_nothing_is_told(kind):
    with pytest.raises(ValueError, match=r"seen no example.*method.loss\(model, Batch\(x, y\)\)"):
        kind().end_task(nn.Linear(2, 2), None)
    with pytest.raises(TypeError, match=r"write Batch\(x, y\)"):
        kind().loss(nn.Linear(2, 2), (torch.randn(4, 2), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize("kind", [AGEM, GEM])
def test_a_loop_that_forgets_to_edit_is_told(kind):
    model, method = nn.Linear(2, 2), kind()
    method.loss(model, Batch(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))).backward()
    method.end_task(model, None)  # a first task has nothing to edit for
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


def test_labels_are_looked_at_before_they_go_to_the_device():
    """Whether some are ignored is known without waiting for it; the meta device would refuse to tell."""
    y = torch.tensor([0, -100, 2])
    assert Batch(torch.zeros(3, 4), y.clamp(min=0)).to("meta").labeled_rows() is None
    assert Batch(torch.zeros(3, 4), y).to("meta").labeled_rows().is_meta
    assert Batch(torch.zeros(3, 4), y).to("cpu").labeled_rows().tolist() == [True, False, True]


def test_the_gradient_of_remembered_examples_does_not_wait(synced):
    model = nn.Linear(4, 3)
    found = []
    assert synced(lambda: found.extend(gradient_on(model, list(model.parameters()), batch()))) == 0
    assert found[0].any() and gradient_on(model, list(model.parameters()), None) is None


@pytest.mark.parametrize("kind", [ER, AGEM, DERpp])
def test_a_task_of_which_it_saw_nothing_is_told(kind):
    """The loop took the method's loss in the first task, and in the second its own."""
    model, method, x, y = torch.nn.Linear(3, 2), kind(10), torch.randn(8, 3), torch.randint(2, (8,))
    method.loss(model, Batch(x, y)).backward()
    method.end_task(model, (x, y))
    with pytest.warns(UserWarning, match=f"{kind.__name__} has seen no example since the last task ended"):
        method.end_task(model, (x, y))
