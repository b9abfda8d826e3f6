"""The memory against slow references: what is kept, how it is drawn, where it lies, how it is resumed."""

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
from everlearn.memory.quotas import shares
from everlearn.runtime.randomness import generator

POLICIES = ["reservoir", "balanced", "ring", "herding"]


def table(n, start=0):
    """Rows that can be told apart by x alone; few classes, of unequal size, and a task that changes now and then."""
    i = torch.arange(start, start + n)
    return {"x": i[:, None].repeat(1, 2).float(), "y": (i % 7).clamp(max=3), "t": i // 40}


def fill(memory, n, size, start=0):
    rows = table(n, start)
    for cut in torch.arange(n).split(size):
        part = {k: v[cut] for k, v in rows.items()}
        memory.add(**part, **({"features": part["x"].sin()} if memory.policy == "herding" else {}))
    return memory


def kept(memory):
    """The numbers of the rows, as they lie."""
    return memory["x"][:, 0].long().tolist()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# Reservoir.


def slow_reservoir(n, capacity, source, off_by_one=False):
    places = []
    for i in range(n):
        if i < capacity:
            places.append(i)
        else:
            j = torch.empty(1, dtype=torch.int64).random_(generator=source).item() % (i if off_by_one else i + 1)
            if j < capacity:
                places[j] = i
    return places


@pytest.mark.parametrize("size", [1, 3, 10, 64, 500])
@pytest.mark.parametrize("capacity", [1, 5, 64, 1000])
def test_reservoir_is_the_sequential_one_however_the_stream_is_cut(capacity, size):
    memory = fill(Memory(capacity, seed=3), 500, size)
    assert kept(memory) == slow_reservoir(500, capacity, generator(3, "memory"))
    assert len(memory) == min(500, capacity) and memory.seen == 500
    assert torch.equal(memory["y"], (memory["x"][:, 0].long() % 7).clamp(max=3))  # a row stays a row


def test_the_first_rows_lie_in_order():
    memory = Memory(50)
    for n in range(1, 8):
        fill(memory, 7, 7, start=7 * (n - 1))
        assert kept(memory) == list(range(7 * n))


def chi_square(counts, runs, p):
    """Of inclusions without replacement: distributed with one degree of freedom less than there are items."""
    n = len(counts)
    return ((counts - runs * p) ** 2).sum() / (runs * p * (1 - p)) * (n - 1) / n


def test_every_row_is_kept_with_the_same_probability():
    runs, n, capacity, limit = 2000, 20, 5, 43.8  # 99.9 % of 19 degrees of freedom
    counts, wrong, source = np.zeros(n), np.zeros(n), generator(0, "wrong")
    for seed in range(runs):
        counts[kept(fill(Memory(capacity, seed=seed), n, 13))] += 1
        wrong[slow_reservoir(n, capacity, source, off_by_one=True)] += 1
    assert chi_square(counts, runs, capacity / n) < limit
    assert chi_square(wrong, runs, capacity / n) > 2 * limit  # the test would notice


# Equal shares.


def slow_shares(wanted, capacity, order):
    quota = [0] * len(wanted)
    while sum(quota) < min(capacity, sum(wanted)):
        for g in order:
            if quota[g] < wanted[g] and sum(quota) < capacity:
                quota[g] += 1
    return quota


def test_shares_are_those_dealt_one_by_one():
    draw = random.Random(0)
    for _ in range(300):
        n, capacity = draw.randint(1, 8), draw.randint(1, 30)
        wanted, order = [draw.randint(0, 12) for _ in range(n)], draw.sample(range(n), n)
        before = slow_shares(wanted, capacity, order)
        assert shares(np.array(wanted), capacity, np.array(order)).tolist() == before
        g = draw.randrange(n)
        wanted[g] += 1
        after = slow_shares(wanted, capacity, order)
        # What a policy relies on: nobody's share grows again once it was short.
        assert all(b >= a for i, (b, a) in enumerate(zip(before, after, strict=True)) if i != g or b < wanted[g] - 1)


def test_balanced_gives_every_class_its_share():
    memory = Memory(30, "balanced")
    memory.add(x=torch.zeros(100, 1), y=torch.zeros(100, dtype=torch.int64))
    assert len(memory) == 30  # nobody else needs the room
    memory.add(x=torch.ones(4, 1), y=torch.ones(4, dtype=torch.int64))
    assert memory["y"].bincount().tolist() == [26, 4]
    memory.add(x=torch.full((300, 1), 2.0), y=torch.full((300,), 2))
    assert memory["y"].bincount().tolist() == [13, 4, 13]
    memory.add(x=torch.ones(100, 1), y=torch.ones(100, dtype=torch.int64))
    assert memory["y"].bincount().tolist() == [10, 10, 10] and len(memory) == 30
    assert torch.equal(memory["x"][:, 0].long(), memory["y"])


@pytest.mark.parametrize("policy", ["balanced", "ring", "herding"])
def test_the_last_places_go_by_lot(policy):
    winners = set()
    for seed in range(12):
        memory = Memory(3, policy, by="y", seed=seed)
        for c in range(9):
            more = {"features": torch.rand(4, 2)} if policy == "herding" else {}
            memory.add(x=torch.full((4, 1), float(c)), y=torch.full((4,), c), **more)
        assert len(memory["y"].unique()) == 3
        winners |= set(memory["y"].tolist())
    assert len(winners) > 6


def test_within_a_class_every_row_is_kept_with_the_same_probability():
    runs, capacity = 1000, 12
    y = torch.tensor([0] * 12 + [1] * 6 + [0] * 4 + [2] * 8)
    x, counts = torch.arange(30.0)[:, None], torch.zeros(30)
    for seed in range(runs):
        memory = Memory(capacity, "balanced", seed=seed)
        for cut in torch.arange(30).split(11):
            memory.add(x=x[cut], y=y[cut])
        assert memory["y"].bincount().tolist() == [4, 4, 4]
        counts[kept(memory)] += 1
    for c, limit in ((0, 37.7), (1, 20.5), (2, 24.3)):  # 99.9 % of 15, 5 and 7 degrees of freedom
        own = counts[y == c].numpy()
        assert chi_square(own, runs, 4 / len(own)) < limit


@pytest.mark.parametrize("by", ["t", ("t", "y")])
def test_a_ring_keeps_the_last_of_each_group(by):
    memory, rows = Memory(64, "ring", by=by), table(400)
    for n in range(25, 401, 25):
        fill(memory, 25, 25, start=n - 25)
        own = rows["t"] if by == "t" else rows["t"] * 10 + rows["y"]
        here = set(kept(memory))
        counts = []
        for g in own[:n].unique():
            of_group = (own[:n] == g).nonzero().flatten().tolist()
            stay = here & set(of_group)
            assert stay == set(of_group[len(of_group) - len(stay) :])
            counts.append((len(stay), len(of_group)))
        assert len(memory) == min(n, 64) == sum(c for c, _ in counts)
        short = [c for c, seen in counts if c < seen]
        assert not short or (max(short) - min(short) <= 1 and max(c for c, _ in counts) <= max(short) + 1)


def test_a_group_may_have_a_limit_of_its_own():
    memory = fill(Memory(100, "ring", each=8), 100, 10)
    assert memory["t"].bincount().tolist() == [8, 8, 8] and sorted(kept(memory))[:8] == list(range(32, 40))
    assert fill(Memory(10, "ring", each=8), 100, 10)["t"].bincount().sum() == 10


@pytest.mark.parametrize("policy", ["balanced", "ring"])
def test_groups_do_not_depend_on_how_the_stream_is_cut(policy):
    whole, *others = [sorted(kept(fill(Memory(50, policy), 400, size))) for size in (400, 1, 10, 64)]
    assert all(other == whole for other in others)


# Herding.


def slow_herding(features, most):
    mean, chosen = features.mean(0), []
    for k in range(1, most + 1):
        distance = [
            torch.inf if i in chosen else (mean - (f + features[chosen].sum(0)) / k).norm().item()
            for i, f in enumerate(features)
        ]
        chosen.append(int(np.argmin(distance)))
    return chosen


def test_herding_is_the_greedy_one():
    for seed in range(5):
        features = torch.randn(30, 6, generator=generator(seed), dtype=torch.double) + 3
        order = herding_order(features, 30).tolist()
        assert order[:29] == slow_herding(features, 29) and sorted(order) == list(range(30))
        assert herding_order(features, 7).tolist() == order[:7]
    assert (features[order[:10]].mean(0) - features.mean(0)).norm() < (features[:10].mean(0) - features.mean(0)).norm()


def test_herding_keeps_the_first_choices_and_shrinks_to_them():
    memory, features = Memory(20, "herding"), torch.randn(90, 5)
    x, y = torch.arange(90.0)[:, None], torch.arange(90) % 3
    orders = {c: (y == c).nonzero().flatten()[herding_order(features[y == c], 20)].tolist() for c in range(3)}
    for c in range(3):
        memory.add(features=features[y == c], x=x[y == c], y=y[y == c])
        counts = memory["y"].bincount().tolist()
        assert sum(counts) == 20 and max(counts) - min(counts) <= 1
        for d in range(c + 1):
            assert set(memory["x"][memory["y"] == d, 0].long().tolist()) == set(orders[d][: counts[d]])
    all_at_once = Memory(20, "herding")
    all_at_once.add(features=features, x=x, y=y)
    assert set(kept(all_at_once)) == set(kept(memory))


def test_herding_twice_keeps_the_first_choices_of_both():
    memory, features = Memory(6, "herding"), torch.randn(20, 3)
    for half in (slice(10), slice(10, 20)):
        memory.add(features=features[half], x=torch.arange(20.0)[half, None], y=torch.zeros(10, dtype=torch.int64))
    first, second = herding_order(features[:10], 3), herding_order(features[10:], 3) + 10
    assert set(kept(memory)) == {*first.tolist(), *second.tolist()}


# Drawing.


def test_a_sample_has_no_row_twice_and_is_drawn_evenly():
    memory, counts = fill(Memory(30), 30, 30), torch.zeros(30)
    for _ in range(1000):
        rows = memory.sample(6)
        drawn = rows["x"][:, 0].long()
        assert len(drawn.unique()) == 6 and torch.equal(rows["y"], (drawn % 7).clamp(max=3))
        counts[drawn] += 1
    assert chi_square(counts.numpy(), 1000, 6 / 30) < 58.3  # 99.9 % of 29 degrees of freedom


def test_a_few_of_many_rows():
    memory, counts = fill(Memory(5000), 5000, 1000), torch.zeros(5000)
    for n in [1, 40, 999, 1250] * 5:
        drawn = memory.sample(n)["x"][:, 0].long()
        assert len(drawn.unique()) == n
        counts[drawn] += 1
    assert counts.view(50, 100).sum(1).std() < 25


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_never_exceeds_what_is_there(policy):
    memory = Memory(10, policy)
    assert memory.sample(4) == {} == memory.rows() and len(memory) == 0
    fill(memory, 3, 3)
    assert sorted(memory.sample(100)["x"][:, 0].tolist()) == [0, 1, 2]
    fill(memory, 200, 64, start=3)  # batches larger than the memory
    assert len(memory.sample(100)["x"]) == len(memory) == 10


def test_some_rows_only():
    memory = fill(Memory(50), 50, 10)
    old = memory["t"] == 0
    assert torch.equal(memory.rows(old)["x"][:, 0], torch.arange(40.0))
    assert len(memory.sample(100, where=~old)["x"]) == 10
    assert set(memory.sample(5, where=~old)["t"].tolist()) == {1}
    assert memory.sample(5, where=memory["t"] > 9) == {} == memory.rows(memory["t"] > 9)


@pytest.mark.parametrize("policy", POLICIES)
def test_global_random_numbers_are_left_alone(policy):
    before = torch.get_rng_state()
    memory = fill(Memory(20, policy), 200, 10)
    one, two = memory.sample(5), memory.sample(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(one, two)
    torch.rand(3)
    again = fill(Memory(20, policy), 200, 10)
    assert same(again.rows(), memory.rows()) and same(again.sample(5), one) and same(again.sample(5), two)
    assert policy != "reservoir" or not same(fill(Memory(20, policy, seed=1), 200, 10).rows(), memory.rows())


# What is held.


def test_rows_are_copies():
    source = table(8)
    weights = torch.rand(8, 3, requires_grad=True)
    memory = Memory(8)
    memory.add(**source, logits=weights * 2)
    before = memory.rows()
    assert not any(v.requires_grad for v in before.values())
    for v in source.values():
        v.zero_()
    weights.data.zero_()
    for v in [*memory.sample(8).values(), *memory.rows().values()]:
        v.fill_(99)
    assert same(memory.rows(), before)


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
    assert memory.seen == 100_000 and len(memory) == 40


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16, torch.double])
def test_dtypes_stay(dtype, on_disk, tmp_path):
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
    again = Memory(5)
    again.load_state_dict(memory.state_dict())
    assert torch.equal(again.rows()["x"]["text"][1], memory["x"]["text"][1])
    assert len(Batch(part, cut).like(**rows)) == 3
    with pytest.raises(ValueError, match="not the dict or tuple it was at first"):
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
    here, there = fill(Memory(50), 300, 10), fill(Memory(50, folder=folder), 300, 10)
    assert same(here.rows(), there.rows()) and same(here.sample(9), there.sample(9))
    assert os.listdir(folder) == []  # nothing to clean up, even after a crash
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            assert sum(str(folder) in line for line in maps) == 3
    partly = fill(Memory(1000, folder=folder), 10, 10).state_dict()["rows"]["x"]
    assert partly.shape == (10, 2) and partly.untyped_storage().nbytes() == 80  # saved without the empty places


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_on_a_device(policy):
    on_cpu, on_gpu = fill(Memory(20, policy), 100, 10), fill(Memory(20, policy, device="cuda"), 100, 10)
    assert on_gpu["x"].is_cuda and on_gpu.sample(3, where=on_gpu["t"] == 0)["x"].is_cuda
    on_cpu.add(
        **{k: v.cuda() for k, v in table(10).items()},
        **({"features": torch.rand(10, 2)} if policy == "herding" else {}),
    )
    assert not on_cpu["x"].is_cuda


# Going on.


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seen", [0, 13, 230])
@pytest.mark.parametrize("policy", POLICIES)
def test_resuming_equals_never_having_stopped(policy, seen, on_disk, tmp_path):
    folder = tmp_path if on_disk else None
    one = fill(Memory(32, policy, folder=folder), seen, 10)
    one.sample(3)
    state = saved(one.state_dict())
    two = fill(Memory(32, policy, seed=5), 50, 10)  # what it held is gone
    two.load_state_dict(state)
    for memory in (one, two):
        fill(memory, 180, 10, start=seen)
    assert same(one.rows(), two.rows()) and one.seen == two.seen and one.nbytes == two.nbytes
    for _ in range(3):
        assert same(one.sample(7), two.sample(7))
    assert len(one) == 32


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_is_a_copy(policy):
    memory = fill(Memory(20, policy), 100, 10)
    before, state = memory.rows(), memory.state_dict()
    fill(memory, 100, 10, start=100)
    one, two = Memory(20, policy), Memory(20, policy)
    one.load_state_dict(state)
    fill(one, 100, 10, start=100)
    two.load_state_dict(state)
    assert same(two.rows(), before) and same(one.rows(), memory.rows())


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("twin", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("policy", POLICIES)
def test_twins_are_equal_and_share_nothing(policy, twin, on_disk, tmp_path):
    one = fill(Memory(20, policy, folder=tmp_path if on_disk else None), 100, 10)
    two, before = twin(one), one.rows()
    fill(two, 100, 10, start=100)
    assert same(one.rows(), before) and repr(two) == repr(one)
    fill(one, 100, 10, start=100)
    assert same(one.rows(), two.rows()) and same(one.sample(5), two.sample(5))


def test_a_method_saves_its_memory():
    one, two = Method(), Method()
    one.memory, two.memory = fill(Memory(20), 100, 10), Memory(20)
    two.load_state_dict(saved(one.state_dict()))
    assert same(one.memory.rows(), two.memory.rows())
    assert same(copy.deepcopy(one).memory.sample(3), two.memory.sample(3))


def test_a_state_of_another_memory_is_refused():
    state = Memory(20).state_dict()
    with pytest.raises(ValueError, match="memory with capacity=20, this one has 30"):
        Memory(30).load_state_dict(state)
    with pytest.raises(ValueError, match="memory with policy='reservoir', this one has 'ring'"):
        Memory(20, "ring").load_state_dict(state)
    with pytest.raises(ValueError, match=r"memory with by=\['t'\], this one has \['t', 'y'\]"):
        Memory(20, "ring", by=("t", "y")).load_state_dict(Memory(20, "ring").state_dict())


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "Memory.capacity: got 0, allowed: a whole number of rows, 1 or more"),
        ({"capacity": -3}, "Memory.capacity: got -3"),
        ({"capacity": 2.5}, "Memory.capacity: got 2.5"),
        ({"capacity": True}, "Memory.capacity: got True"),
        ({"each": 0, "policy": "ring"}, "Memory.each: got 0"),
        ({"policy": "fifo"}, "Memory.policy: got 'fifo', allowed: reservoir, balanced, ring, herding"),
        ({"by": "y"}, "A reservoir has no groups"),
        ({"device": "cuda", "folder": "here"}, "on cuda or in a folder, not both"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Memory(**{"capacity": 5, **settings})


X, Y, T = table(4).values()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": X, "y": Y}, "Got columns x, y; rows here have x, y, t"),
        ({"x": X, "y": Y, "t": T, "z": T}, "Got columns x, y, t, z; rows"),
        ({}, "Got columns none"),
        ({"x": X, "y": Y[:3], "t": T}, r"differ in length: \[3, 4\]"),
        ({"x": X[:, :1], "y": Y, "t": T}, r"x has rows of shape \(1,\) and torch.float32, at first they were \(2,\)"),
        ({"x": X.repeat(1, 2), "y": Y, "t": T}, r"only floating columns in Memory.growing"),
        ({"x": X.double(), "y": Y, "t": T}, "and torch.float64, at first"),
        ({"x": (X, X), "y": Y, "t": T}, "or from the first rows on a dict or tuple"),
        ({"x": X, "y": None, "t": T}, "y is None for some rows only"),
        ({"x": X.numpy(), "y": Y, "t": T}, "x must be a tensor"),
        ({"x": "abc", "y": Y, "t": T}, "x must be a tensor"),
        ({"x": X / X, "y": Y, "t": T}, "x has NaN"),
        ({"x": X, "y": Y, "t": T, "features": X}, "Features are for policy='herding'"),
    ],
)
@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_rows_that_do_not_fit_are_refused_and_change_nothing(policy, columns, message):
    memory = fill(Memory(20, policy), 10, 10)
    before = memory.rows()
    with pytest.raises((ValueError, TypeError), match=message):
        memory.add(**columns)
    assert same(memory.rows(), before) and memory.seen == 10
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
def test_first_rows_that_cannot_be_kept_leave_no_trace(columns, message):
    memory = Memory(5)
    with pytest.raises((ValueError, TypeError), match=message):
        memory.add(**columns)
    memory.add(a=torch.zeros(3), b=torch.zeros(3, 2))
    assert list(memory.rows()) == ["a", "b"] and len(memory) == memory.seen == 3


@pytest.mark.parametrize(
    ("policy", "columns", "message"),
    [
        ("balanced", {"x": X}, "grouped by y, which needs one integer per row; got NoneType"),
        ("ring", {"x": X, "t": None}, "grouped by t, .* got NoneType. Choose Memory.by"),
        ("balanced", {"x": X, "y": X}, r"got torch.float32 of shape \(4, 2\)"),
        ("herding", {"x": X, "y": Y}, "which needs them"),
        ("herding", {"x": X, "y": Y, "features": X[:2]}, "features of 2 rows for 4 rows"),
        ("herding", {"x": X, "y": Y, "features": X / X}, "features hold NaN"),
    ],
)
def test_groups_need_what_they_are_made_of(policy, columns, message):
    with pytest.raises(ValueError, match=message):
        Memory(5, policy).add(**columns)


def test_wrong_questions_are_refused():
    memory = Memory(5)
    with pytest.raises(KeyError, match="No column 'y' in this memory; there are: none before rows come"):
        memory["y"]
    memory.add(x=X, y=Y)
    memory.add(x=X[:0], y=Y[:0])  # no rows are no mistake
    assert memory.seen == 4
    with pytest.raises(KeyError, match="there are: x, y"):
        memory["z"]
    with pytest.raises(ValueError, match="got n=0, allowed: 1 or more"):
        memory.sample(0)
    with pytest.raises(ValueError, match=r"got torch.int64 of shape \(4,\), allowed: a mask"):
        memory.sample(2, where=Y)


@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_a_memory_larger_than_the_machine_is_refused(policy):
    with pytest.raises(ValueError, match=r"needs 745\.1 GB on cpu|no room for the numbers"):
        Memory(10**11, policy).add(x=torch.zeros(2, 1, dtype=torch.double), y=torch.zeros(2, dtype=torch.long))
    method = ER(10**11)
    with pytest.raises(ValueError, match=r"A memory of 100,000,000,000 rows such as these needs 1,490\.1 GB on cpu"):
        method.loss(torch.nn.Linear(4, 2), Batch(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)))
