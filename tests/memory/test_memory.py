"""Memory against slow references: which rows are stored, drawn and resumed, and where."""

import copy
import gc
import io
import os
import pickle
import random
import weakref

import numpy as np
import pytest
import torch

from everlearn import ER, Batch, Method
from everlearn.memory import Memory, herding_order
from everlearn.memory.quotas import divide_capacity
from everlearn.runtime.randomness import generator

POLICIES = ["reservoir", "balanced", "ring", "herding"]


def table(n, start=0):
    """Rows that x identifies, with a few classes of unequal size and a task that changes every 40 rows."""
    i = torch.arange(start, start + n)
    return {"x": i[:, None].repeat(1, 2).float(), "y": (i % 7).clamp(max=3), "t": i // 40}


def fill(memory, n, size, start=0):
    rows = table(n, start)
    for cut in torch.arange(n).split(size):
        part = {k: v[cut] for k, v in rows.items()}
        memory.add(**part, **({"features": part["x"].sin()} if memory.policy == "herding" else {}))
    return memory


def stored_numbers(memory):
    """Numbers of the stored rows, in storage order."""
    return memory["x"][:, 0].long().tolist()


def have_equal_rows(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# Reservoir.


def slow_reservoir(n, capacity, source, off_by_one=False):
    stored = []
    for i in range(n):
        if i < capacity:
            stored.append(i)
        else:
            j = torch.empty(1, dtype=torch.int64).random_(generator=source).item() % (i if off_by_one else i + 1)
            if j < capacity:
                stored[j] = i
    return stored


@pytest.mark.parametrize("size", [1, 3, 10, 64, 500])
@pytest.mark.parametrize("capacity", [1, 5, 64, 1000])
def test_reservoir_equals_the_sequential_rule_for_any_batch_size(capacity, size):
    memory = fill(Memory(capacity, seed=3), 500, size)
    assert stored_numbers(memory) == slow_reservoir(500, capacity, generator(3, "memory"))
    assert len(memory) == min(500, capacity) and memory.num_seen == 500
    assert torch.equal(memory["y"], (memory["x"][:, 0].long() % 7).clamp(max=3))  # columns stay aligned


def test_the_first_rows_are_stored_in_order():
    memory = Memory(50)
    for n in range(1, 8):
        fill(memory, 7, 7, start=7 * (n - 1))
        assert stored_numbers(memory) == list(range(7 * n))


def chi_square(counts, runs, p):
    """Statistic of inclusions without replacement, with n - 1 degrees of freedom."""
    n = len(counts)
    return ((counts - runs * p) ** 2).sum() / (runs * p * (1 - p)) * (n - 1) / n


def test_every_row_is_stored_with_equal_probability():
    runs = 2000
    n = 20
    capacity = 5
    limit = 43.8  # 99.9 % of 19 degrees of freedom
    counts = np.zeros(n)
    wrong = np.zeros(n)
    source = generator(0, "wrong")
    for seed in range(runs):
        counts[stored_numbers(fill(Memory(capacity, seed=seed), n, 13))] += 1
        wrong[slow_reservoir(n, capacity, source, off_by_one=True)] += 1
    assert chi_square(counts, runs, capacity / n) < limit
    assert chi_square(wrong, runs, capacity / n) > 2 * limit  # the test detects a wrong rule


# Equal quotas.


def slow_quotas(wanted, capacity, order):
    quota = [0] * len(wanted)
    while sum(quota) < min(capacity, sum(wanted)):
        for g in order:
            if quota[g] < wanted[g] and sum(quota) < capacity:
                quota[g] += 1
    return quota


def test_quotas_equal_those_dealt_one_by_one():
    draw = random.Random(0)
    for _ in range(300):
        n = draw.randint(1, 8)
        capacity = draw.randint(1, 30)
        wanted = [draw.randint(0, 12) for _ in range(n)]
        order = draw.sample(range(n), n)
        old_quotas = slow_quotas(wanted, capacity, order)
        assert divide_capacity(np.array(wanted), capacity, np.array(order)).tolist() == old_quotas
        g = draw.randrange(n)
        wanted[g] += 1
        new_quotas = slow_quotas(wanted, capacity, order)
        # Policies rely on this: a quota never grows again once it was limited.
        assert all(
            old >= new
            for i, (old, new) in enumerate(zip(old_quotas, new_quotas, strict=True))
            if i != g or old < wanted[g] - 1
        )


def test_balanced_gives_every_class_its_quota():
    memory = Memory(30, "balanced")
    memory.add(x=torch.zeros(100, 1), y=torch.zeros(100, dtype=torch.int64))
    assert len(memory) == 30  # no other class needs the capacity
    memory.add(x=torch.ones(4, 1), y=torch.ones(4, dtype=torch.int64))
    assert memory["y"].bincount().tolist() == [26, 4]
    memory.add(x=torch.full((300, 1), 2.0), y=torch.full((300,), 2))
    assert memory["y"].bincount().tolist() == [13, 4, 13]
    memory.add(x=torch.ones(100, 1), y=torch.ones(100, dtype=torch.int64))
    assert memory["y"].bincount().tolist() == [10, 10, 10] and len(memory) == 30
    assert torch.equal(memory["x"][:, 0].long(), memory["y"])


@pytest.mark.parametrize("policy", ["balanced", "ring", "herding"])
def test_the_remainder_is_divided_at_random(policy):
    winners = set()
    for seed in range(12):
        memory = Memory(3, policy, group_by="y", seed=seed)
        for c in range(9):
            features = {"features": torch.rand(4, 2)} if policy == "herding" else {}
            memory.add(x=torch.full((4, 1), float(c)), y=torch.full((4,), c), **features)
        assert len(memory["y"].unique()) == 3
        winners |= set(memory["y"].tolist())
    assert len(winners) > 6


def test_within_a_class_every_row_is_stored_with_equal_probability():
    runs = 1000
    capacity = 12
    y = torch.tensor([0] * 12 + [1] * 6 + [0] * 4 + [2] * 8)
    x = torch.arange(30.0)[:, None]
    counts = torch.zeros(30)
    for seed in range(runs):
        memory = Memory(capacity, "balanced", seed=seed)
        for cut in torch.arange(30).split(11):
            memory.add(x=x[cut], y=y[cut])
        assert memory["y"].bincount().tolist() == [4, 4, 4]
        counts[stored_numbers(memory)] += 1
    for c, limit in ((0, 37.7), (1, 20.5), (2, 24.3)):  # 99.9 % of 15, 5 and 7 degrees of freedom
        class_counts = counts[y == c].numpy()
        assert chi_square(class_counts, runs, 4 / len(class_counts)) < limit


@pytest.mark.parametrize("by", ["t", ("t", "y")])
def test_a_ring_stores_the_last_rows_of_each_group(by):
    memory = Memory(64, "ring", group_by=by)
    rows = table(400)
    for n in range(25, 401, 25):
        fill(memory, 25, 25, start=n - 25)
        groups = rows["t"] if by == "t" else rows["t"] * 10 + rows["y"]
        stored = set(stored_numbers(memory))
        counts = []
        for g in groups[:n].unique():
            members = (groups[:n] == g).nonzero().flatten().tolist()
            stored_members = stored & set(members)
            assert stored_members == set(members[len(members) - len(stored_members) :])
            counts.append((len(stored_members), len(members)))
        assert len(memory) == min(n, 64) == sum(num_stored for num_stored, _ in counts)
        limited = [num_stored for num_stored, num_seen in counts if num_stored < num_seen]
        assert not limited or (
            max(limited) - min(limited) <= 1 and max(num_stored for num_stored, _ in counts) <= max(limited) + 1
        )


def test_rows_per_group_can_be_limited():
    memory = fill(Memory(100, "ring", max_per_group=8), 100, 10)
    assert memory["t"].bincount().tolist() == [8, 8, 8] and sorted(stored_numbers(memory))[:8] == list(range(32, 40))
    assert fill(Memory(10, "ring", max_per_group=8), 100, 10)["t"].bincount().sum() == 10


@pytest.mark.parametrize("policy", ["balanced", "ring"])
def test_groups_do_not_depend_on_the_batch_size(policy):
    expected, *results = [sorted(stored_numbers(fill(Memory(50, policy), 400, size))) for size in (400, 1, 10, 64)]
    assert all(result == expected for result in results)


# Herding.


def slow_herding(features, count):
    mean = features.mean(0)
    selected = []
    for k in range(1, count + 1):
        distance = [
            torch.inf if i in selected else (mean - (f + features[selected].sum(0)) / k).norm().item()
            for i, f in enumerate(features)
        ]
        selected.append(int(np.argmin(distance)))
    return selected


def test_herding_equals_the_greedy_rule():
    for seed in range(5):
        features = torch.randn(30, 6, generator=generator(seed), dtype=torch.double) + 3
        order = herding_order(features, 30).tolist()
        assert order[:29] == slow_herding(features, 29) and sorted(order) == list(range(30))
        assert herding_order(features, 7).tolist() == order[:7]
    assert (features[order[:10]].mean(0) - features.mean(0)).norm() < (features[:10].mean(0) - features.mean(0)).norm()


def test_herding_stores_the_first_choices_and_shrinks_to_them():
    memory = Memory(20, "herding")
    features = torch.randn(90, 5)
    x = torch.arange(90.0)[:, None]
    y = torch.arange(90) % 3
    orders = {c: (y == c).nonzero().flatten()[herding_order(features[y == c], 20)].tolist() for c in range(3)}
    for c in range(3):
        memory.add(features=features[y == c], x=x[y == c], y=y[y == c])
        counts = memory["y"].bincount().tolist()
        assert sum(counts) == 20 and max(counts) - min(counts) <= 1
        for d in range(c + 1):
            assert set(memory["x"][memory["y"] == d, 0].long().tolist()) == set(orders[d][: counts[d]])
    all_at_once = Memory(20, "herding")
    all_at_once.add(features=features, x=x, y=y)
    assert set(stored_numbers(all_at_once)) == set(stored_numbers(memory))


def test_herding_twice_stores_the_first_choices_of_both():
    memory = Memory(6, "herding")
    features = torch.randn(20, 3)
    for half in (slice(10), slice(10, 20)):
        memory.add(features=features[half], x=torch.arange(20.0)[half, None], y=torch.zeros(10, dtype=torch.int64))
    first = herding_order(features[:10], 3)
    second = herding_order(features[10:], 3) + 10
    assert set(stored_numbers(memory)) == {*first.tolist(), *second.tolist()}


# Drawing.


def test_a_sample_is_uniform_and_without_replacement():
    memory = fill(Memory(30), 30, 30)
    counts = torch.zeros(30)
    for _ in range(1000):
        rows = memory.sample(6)
        drawn = rows["x"][:, 0].long()
        assert len(drawn.unique()) == 6 and torch.equal(rows["y"], (drawn % 7).clamp(max=3))
        counts[drawn] += 1
    assert chi_square(counts.numpy(), 1000, 6 / 30) < 58.3  # 99.9 % of 29 degrees of freedom


def test_a_few_of_many_rows():
    memory = fill(Memory(5000), 5000, 1000)
    counts = torch.zeros(5000)
    for n in [1, 40, 999, 1250] * 5:
        drawn = memory.sample(n)["x"][:, 0].long()
        assert len(drawn.unique()) == n
        counts[drawn] += 1
    assert counts.view(50, 100).sum(1).std() < 25


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_has_at_most_all_rows(policy):
    memory = Memory(10, policy)
    assert memory.sample(4) == {} == memory.rows() and len(memory) == 0
    fill(memory, 3, 3)
    assert sorted(memory.sample(100)["x"][:, 0].tolist()) == [0, 1, 2]
    fill(memory, 200, 64, start=3)  # batches larger than the memory
    assert len(memory.sample(100)["x"]) == len(memory) == 10


def test_rows_selected_by_a_mask():
    memory = fill(Memory(50), 50, 10)
    old = memory["t"] == 0
    assert torch.equal(memory.rows(old)["x"][:, 0], torch.arange(40.0))
    assert len(memory.sample(100, mask=~old)["x"]) == 10
    assert set(memory.sample(5, mask=~old)["t"].tolist()) == {1}
    assert memory.sample(5, mask=memory["t"] > 9) == {} == memory.rows(memory["t"] > 9)


@pytest.mark.parametrize("policy", POLICIES)
def test_global_random_numbers_do_not_change(policy):
    global_state = torch.get_rng_state()
    memory = fill(Memory(20, policy), 200, 10)
    first_sample = memory.sample(5)
    second_sample = memory.sample(5)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert not have_equal_rows(first_sample, second_sample)
    torch.rand(3)
    refilled = fill(Memory(20, policy), 200, 10)
    assert (
        have_equal_rows(refilled.rows(), memory.rows())
        and have_equal_rows(refilled.sample(5), first_sample)
        and have_equal_rows(refilled.sample(5), second_sample)
    )
    assert policy != "reservoir" or not have_equal_rows(fill(Memory(20, policy, seed=1), 200, 10).rows(), memory.rows())


# Stored rows.


def test_rows_are_copies():
    source = table(8)
    weights = torch.rand(8, 3, requires_grad=True)
    memory = Memory(8)
    memory.add(**source, logits=weights * 2)
    stored = memory.rows()
    assert not any(v.requires_grad for v in stored.values())
    for v in source.values():
        v.zero_()
    weights.data.zero_()
    for v in [*memory.sample(8).values(), *memory.rows().values()]:
        v.fill_(99)
    assert have_equal_rows(memory.rows(), stored)


def test_a_small_memory_does_not_keep_the_data_alive():
    data = torch.zeros(1000, 100)
    alive = weakref.ref(data)
    memory = Memory(5)
    memory.add(x=data[:10], y=torch.zeros(10))
    del data
    gc.collect()
    assert alive() is None
    assert memory["x"].untyped_storage().nbytes() == 5 * 100 * 4


@pytest.mark.parametrize("policy", ["reservoir", "balanced", "ring"])
def test_bytes_are_bounded(policy):
    memory = Memory(40, policy)
    x = torch.zeros(1000, 3, dtype=torch.uint8)
    sizes = set()
    for step in range(100):
        memory.add(x=x, y=torch.full((1000,), step % 5), t=torch.full((1000,), step // 10))
        sizes.add(memory.nbytes)
    assert sizes == {40 * (3 + 8 + 8) + (0 if policy == "reservoir" else 40 * 16)}
    assert memory.num_seen == 100_000 and len(memory) == 40


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16, torch.double])
def test_dtypes_are_preserved(dtype, on_disk, tmp_path):
    x = torch.arange(24).view(6, 2, 2).to(dtype)
    memory = Memory(6, folder=tmp_path if on_disk else None)
    memory.add(x=x, y=torch.arange(6))
    assert memory["x"].dtype == memory.sample(2)["x"].dtype == dtype and torch.equal(memory.rows()["x"], x)
    assert memory.nbytes == x.nbytes + 48


def test_inputs_may_be_dicts_and_tuples_and_columns_none():
    x = {"image": torch.rand(9, 2), "text": (torch.arange(9), torch.rand(9, 4))}
    memory = Memory(5)
    for cut in torch.arange(9).split(4):
        part = {"image": x["image"][cut], "text": (x["text"][0][cut], x["text"][1][cut])}
        memory.add(t=None, y=cut, x=part) if cut[0] else memory.add(x=part, y=cut, t=None)
    rows = memory.sample(3)
    assert list(rows) == ["x", "y", "t"] and rows["t"] is None and memory["t"] is None
    assert torch.equal(rows["x"]["image"], x["image"][rows["y"]])
    assert torch.equal(rows["x"]["text"][1], x["text"][1][rows["y"]])
    assert torch.equal(memory["x"]["text"][0], memory["y"])
    loaded = Memory(5)
    loaded.load_state_dict(memory.state_dict())
    assert torch.equal(loaded.rows()["x"]["text"][1], memory["x"]["text"][1])
    assert len(Batch(part, cut).like(**rows)) == 3
    with pytest.raises(ValueError, match="another dict or tuple than in the first rows"):
        memory.add(x=part["image"], y=cut, t=None)


@pytest.mark.parametrize("on_disk", [False, True])
def test_logits_may_become_longer(on_disk, tmp_path):
    memory = Memory(6, folder=tmp_path if on_disk else None)
    memory.add(x=torch.zeros(2, 1), logits=torch.ones(2, 3))
    memory.add(x=torch.ones(3, 1), logits=torch.full((3, 5), 2.0))
    memory.add(x=torch.ones(1, 1), logits=torch.full((1, 4), 3.0))
    logits = memory.rows()["logits"]
    assert logits.isfinite().sum(1).tolist() == [3, 3, 5, 5, 5, 4]
    assert logits.nansum(1).tolist() == [3, 3, 10, 10, 10, 12]
    assert memory.nbytes == 6 * (4 + 5 * 4)


def test_rows_on_disk(tmp_path):
    folder = tmp_path / "new" / "folder"
    in_ram = fill(Memory(50), 300, 10)
    on_disk = fill(Memory(50, folder=folder), 300, 10)
    assert have_equal_rows(in_ram.rows(), on_disk.rows()) and have_equal_rows(in_ram.sample(9), on_disk.sample(9))
    assert os.listdir(folder) == []  # no file to delete, even after a crash
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            assert sum(str(folder) in line for line in maps) == 3
    partly = fill(Memory(1000, folder=folder), 10, 10).state_dict()["rows"]["x"]
    assert partly.shape == (10, 2) and partly.untyped_storage().nbytes() == 80  # saved without the empty positions


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_on_a_device(policy):
    on_cpu = fill(Memory(20, policy), 100, 10)
    on_gpu = fill(Memory(20, policy, device="cuda"), 100, 10)
    assert on_gpu["x"].is_cuda and on_gpu.sample(3, mask=on_gpu["t"] == 0)["x"].is_cuda
    on_cpu.add(
        **{k: v.cuda() for k, v in table(10).items()},
        **({"features": torch.rand(10, 2)} if policy == "herding" else {}),
    )
    assert not on_cpu["x"].is_cuda


# Saving and resuming.


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("num_seen", [0, 13, 230])
@pytest.mark.parametrize("policy", POLICIES)
def test_resuming_equals_an_uninterrupted_run(policy, num_seen, on_disk, tmp_path):
    folder = tmp_path if on_disk else None
    original = fill(Memory(32, policy, folder=folder), num_seen, 10)
    original.sample(3)
    state = saved(original.state_dict())
    resumed = fill(Memory(32, policy, seed=5), 50, 10)  # its rows are replaced
    resumed.load_state_dict(state)
    for memory in (original, resumed):
        fill(memory, 180, 10, start=num_seen)
    assert (
        have_equal_rows(original.rows(), resumed.rows())
        and original.num_seen == resumed.num_seen
        and original.nbytes == resumed.nbytes
    )
    for _ in range(3):
        assert have_equal_rows(original.sample(7), resumed.sample(7))
    assert len(original) == 32


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_is_a_copy(policy):
    memory = fill(Memory(20, policy), 100, 10)
    old_rows = memory.rows()
    state = memory.state_dict()
    fill(memory, 100, 10, start=100)
    continued = Memory(20, policy)
    loaded = Memory(20, policy)
    continued.load_state_dict(state)
    fill(continued, 100, 10, start=100)
    loaded.load_state_dict(state)
    assert have_equal_rows(loaded.rows(), old_rows) and have_equal_rows(continued.rows(), memory.rows())


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_are_equal_and_share_nothing(policy, make_copy, on_disk, tmp_path):
    original = fill(Memory(20, policy, folder=tmp_path if on_disk else None), 100, 10)
    copied = make_copy(original)
    old_rows = original.rows()
    fill(copied, 100, 10, start=100)
    assert have_equal_rows(original.rows(), old_rows) and repr(copied) == repr(original)
    fill(original, 100, 10, start=100)
    assert have_equal_rows(original.rows(), copied.rows()) and have_equal_rows(original.sample(5), copied.sample(5))


def test_a_method_saves_its_memory():
    original = Method()
    loaded = Method()
    original.memory = fill(Memory(20), 100, 10)
    loaded.memory = Memory(20)
    loaded.load_state_dict(saved(original.state_dict()))
    assert have_equal_rows(original.memory.rows(), loaded.memory.rows())
    assert have_equal_rows(copy.deepcopy(original).memory.sample(3), loaded.memory.sample(3))


def test_a_state_of_another_memory_is_refused():
    state = Memory(20).state_dict()
    with pytest.raises(ValueError, match="memory with capacity=20, this one has 30"):
        Memory(30).load_state_dict(state)
    with pytest.raises(ValueError, match="memory with policy='reservoir', this one has 'ring'"):
        Memory(20, "ring").load_state_dict(state)
    with pytest.raises(ValueError, match=r"memory with group_by=\['t'\], this one has \['t', 'y'\]"):
        Memory(20, "ring", group_by=("t", "y")).load_state_dict(Memory(20, "ring").state_dict())


# Errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "Memory.capacity: got 0, allowed: a whole number of rows, 1 or more"),
        ({"capacity": -3}, "Memory.capacity: got -3"),
        ({"capacity": 2.5}, "Memory.capacity: got 2.5"),
        ({"capacity": True}, "Memory.capacity: got True"),
        ({"max_per_group": 0, "policy": "ring"}, "Memory.max_per_group: got 0"),
        ({"policy": "fifo"}, "Memory.policy: got 'fifo', allowed: reservoir, balanced, ring, herding"),
        ({"group_by": "y"}, "A reservoir has no groups"),
        ({"device": "cuda", "folder": "here"}, "device=cuda and folder=here; leave one out"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Memory(**{"capacity": 5, **settings})


X, Y, T = table(4).values()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": X, "y": Y}, "Got columns x, y; this memory has x, y, t"),
        ({"x": X, "y": Y, "t": T, "z": T}, "Got columns x, y, t, z; this memory"),
        ({}, "Got columns none"),
        ({"x": X, "y": Y[:3], "t": T}, r"differ in length: \[3, 4\]"),
        ({"x": X[:, :1], "y": Y, "t": T}, r"x has rows of shape \(1,\) and torch.float32, the first rows had \(2,\)"),
        ({"x": X.repeat(1, 2), "y": Y, "t": T}, r"Only floating-point columns in Memory.growing"),
        ({"x": X.double(), "y": Y, "t": T}, "and torch.float64, the first rows"),
        ({"x": (X, X), "y": Y, "t": T}, "or from the first rows on a dict or tuple"),
        ({"x": X, "y": None, "t": T}, "y is None for some rows only"),
        ({"x": X.numpy(), "y": Y, "t": T}, "x must be a tensor"),
        ({"x": "abc", "y": Y, "t": T}, "x must be a tensor"),
        ({"x": X / X, "y": Y, "t": T}, "x has NaN"),
        ({"x": X, "y": Y, "t": T, "features": X}, "Features are for policy='herding'"),
    ],
)
@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_refused_rows_change_nothing(policy, columns, message):
    memory = fill(Memory(20, policy), 10, 10)
    old_rows = memory.rows()
    with pytest.raises((ValueError, TypeError), match=message):
        memory.add(**columns)
    assert have_equal_rows(memory.rows(), old_rows) and memory.num_seen == 10
    fill(memory, 100, 10, start=10)
    assert len(memory) == 20 and torch.equal(memory["y"], (memory["x"][:, 0].long() % 7).clamp(max=3))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "needs a column that is not None"),
        ({"x": None}, "needs a column that is not None"),
        ({"x": 3}, "x must be a tensor with one entry per row, .* got 3"),
        ({"x": torch.tensor(3)}, r"got tensor\(3\)"),
        ({"x": {"a": X, "b": "text"}}, r"x\['b'\] must be a tensor"),
        ({"x": X, "y": Y[:2]}, "differ in length"),
        ({"x": X / X, "y": Y}, "x has NaN"),
    ],
)
def test_refused_first_rows_change_nothing(columns, message):
    memory = Memory(5)
    with pytest.raises((ValueError, TypeError), match=message):
        memory.add(**columns)
    memory.add(a=torch.zeros(3), b=torch.zeros(3, 2))
    assert list(memory.rows()) == ["a", "b"] and len(memory) == memory.num_seen == 3


@pytest.mark.parametrize(
    ("policy", "columns", "message"),
    [
        ("balanced", {"x": X}, "grouped by y, which needs one integer per row; got NoneType"),
        ("ring", {"x": X, "t": None}, "grouped by t, .* got NoneType. Choose Memory.group_by"),
        ("balanced", {"x": X, "y": X}, r"got torch.float32 of shape \(4, 2\)"),
        ("herding", {"x": X, "y": Y}, "which needs them"),
        ("herding", {"x": X, "y": Y, "features": X[:2]}, "features of 2 rows for 4 rows"),
        ("herding", {"x": X, "y": Y, "features": X / X}, "features hold NaN"),
    ],
)
def test_groups_need_their_columns(policy, columns, message):
    with pytest.raises(ValueError, match=message):
        Memory(5, policy).add(**columns)


def test_wrong_arguments_raise():
    memory = Memory(5)
    with pytest.raises(KeyError, match="No column 'y' in this memory; its columns: none before the first rows"):
        memory["y"]
    memory.add(x=X, y=Y)
    memory.add(x=X[:0], y=Y[:0])  # an empty batch is accepted
    assert memory.num_seen == 4
    with pytest.raises(KeyError, match="its columns: x, y"):
        memory["z"]
    with pytest.raises(ValueError, match="got n=0, allowed: 1 or more"):
        memory.sample(0)
    with pytest.raises(ValueError, match=r"got torch.int64 of shape \(4,\), allowed: a mask"):
        memory.sample(2, mask=Y)


@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_a_memory_larger_than_the_machine_is_refused(policy):
    with pytest.raises(ValueError, match=r"needs 745\.1 GB on cpu|more rows than this machine can index"):
        Memory(10**11, policy).add(x=torch.zeros(2, 1, dtype=torch.double), y=torch.zeros(2, dtype=torch.long))
    method = ER(10**11)
    with pytest.raises(ValueError, match=r"A memory of 100,000,000,000 rows of this shape needs 1,490\.1 GB on cpu"):
        method.loss(torch.nn.Linear(4, 2), Batch(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)))
