import copy
import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from everlearn.curvature import fisher
from everlearn.curvature.per_example.engine import PerExample
from everlearn.curvature.per_example.preserve_model import preserve_model
from everlearn.curvature.per_example.statistics import Elementwise, OuterProducts
from tests.models import MODELS, make
from tests.reference import gradients, mean_of, squared_size


def columns_for(model, x, count=3):
    width = model.eval()(x).shape
    return list(torch.randn(count, *width, dtype=torch.double, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_equals_the_loop_over_single_examples(name, squared, chunk):
    model, x = make(name)
    columns = columns_for(model, x)
    right = mean_of(model, x, columns, squared_size if squared else torch.abs)
    engine = PerExample(model)
    found = Elementwise(engine.parameters, squared)
    with preserve_model(model):
        for i in range(0, len(x), chunk):
            engine.update(x[i : i + chunk], lambda out, i=i: (c[i : i + chunk] for c in columns), found)
    for n, value in right.items():
        torch.testing.assert_close(found.sums[n] / len(x), value, rtol=1e-9, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "complex"])
def test_rows_in_full_equal_the_loop(name):
    model, x = make(name)
    (column,) = columns_for(model, x, 1)
    engine = PerExample(model)
    found = OuterProducts(engine.parameters)
    with preserve_model(engine.model):
        engine.update(x, lambda out: [column], found)
    right = torch.stack([torch.cat([g.flatten() for g in row.values()]) for row in gradients(model, x, column)])
    if found.rows is not None:
        torch.testing.assert_close(found.rows, right, rtol=1e-9, atol=1e-12)
    else:
        torch.testing.assert_close(found.matrix, right.t() @ right, rtol=1e-9, atol=1e-12)


FAST = {"mlp", "cnn", "resnet", "transformer", "encoder", "encoder, time first", "frames", "tied", "bert"}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_fast_path_is_taken_where_it_exists(name):
    model, x = make(name)
    engine = PerExample(model)
    with preserve_model(engine.model):
        engine.update(x, lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))
    if name in FAST:
        assert engine.plan.fallback == set()
    expected = {
        "placed": {"places.weight"},
        "bare": {"matrix"},
        "folded": {"slope.weight"},
        "invisible": {"w"},
        "cross attention": {"attend.in_proj_weight", "attend.in_proj_bias"},
    }
    if name in expected:
        assert engine.plan.fallback == expected[name]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_model_is_left_exactly_as_it_was(name):
    model, x = make(name)
    model.train()
    list(model.modules())[-1].eval()
    list(model.parameters())[-1].requires_grad_(False)
    loss = model(x).sum()
    loss.backward()
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    engine = PerExample(model)
    with preserve_model(engine.model):
        engine.update(x, lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert flags == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    for p, g in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None and g is None) or torch.equal(p.grad, g)
    assert torch.equal(states[0], torch.get_rng_state()) and random.getstate() == states[2]
    assert (np.random.get_state()[1] == states[1]).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_only_trainable_parameters_are_tracked():
    model, _ = make("mlp")
    model[1].requires_grad_(False)
    engine = PerExample(model)
    assert set(engine.parameters) == {"3.weight", "3.bias", "5.weight", "5.bias"}
    with pytest.raises(ValueError, match="no trainable parameters"):
        PerExample(model.requires_grad_(False))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4, track_running_stats=False), "mixes the examples of a batch.*track_running_stats=True"),
        (type("Centre", (nn.Module,), {"forward": lambda self, x: x - x.mean(0)})(), "depends on the other examples"),
    ],
)
def test_layers_that_mix_examples_are_refused(layer, message):
    model = nn.Sequential(layer, nn.Linear(4, 2))
    engine = PerExample(model)
    with pytest.raises(ValueError, match=message), preserve_model(engine.model):
        engine.update(torch.randn(5, 4), lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))


def test_outputs_that_are_no_tensor_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x), x

    engine = PerExample(Two())
    with pytest.raises(TypeError, match="a tensor of outputs, it gave a tuple"), preserve_model(engine.model):
        engine.update(torch.randn(5, 4), lambda out: [out], Elementwise(engine.parameters))


def test_nothing_stays_in_memory_between_chunks():
    model, x = make("cnn")
    engine = PerExample(model)
    found = Elementwise(engine.parameters)

    def tensors():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with preserve_model(model):
        engine.update(x, lambda out: [torch.ones_like(out)], found)
        gc.collect()
        gc.disable()  # what only the collector could free would pile up
        before = tensors()
        for _ in range(5):
            engine.update(x, lambda out: [torch.ones_like(out)] * 2, found)
        after = tensors()
        gc.enable()
    assert after <= before + 2


def test_wrapped_models_are_opened():
    model, x = make("mlp")
    columns = columns_for(model, x)
    right = mean_of(model, x, columns, torch.square)
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        engine = PerExample(wrapped)
        found = Elementwise(engine.parameters)
        with preserve_model(engine.model):
            engine.update(x, lambda out: columns, found)
        torch.testing.assert_close(found.sums["1.weight"] / len(x), right["1.weight"])


class Experts(nn.Module):
    """Which rows go to which layer depends on the data."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        out, first = x.new_zeros(len(x), 3), x[:, 0] > 0
        out[first], out[~first] = self.a(x[first]), self.b(x[~first])
        return out


class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.layer(x[order])[order.argsort()]


class Kept(nn.Module):
    """The data write into what was a constant, and pick by it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        order = torch.arange(len(x))
        order[:] = x[:, 0].argsort()
        back = torch.zeros(len(x), dtype=torch.long)
        back.copy_(order.argsort())
        return self.layer(x[order])[back]


def check_against_the_loop(model, chunks):
    """A whole pass over chunks of any shapes; returns the engine."""
    torch.manual_seed(1)
    columns = [torch.randn_like(model.eval()(x)) for x in chunks]
    engine = PerExample(model)
    found = Elementwise(engine.parameters)
    with preserve_model(model):
        for x, column in zip(chunks, columns, strict=True):
            engine.update(x, lambda out, column=column: [column], found)
    right = [mean_of(model, x, [column], torch.square) for x, column in zip(chunks, columns, strict=True)]
    for n in found.sums:
        wanted = sum(r[n] * len(x) for r, x in zip(right, chunks, strict=True))
        torch.testing.assert_close(found.sums[n], wanted, msg=lambda m, n=n: f"{n}: {m}")
    return engine


@pytest.mark.parametrize("kind", [Experts, Sorted, Kept])
def test_rows_that_the_data_reorder(kind):
    torch.manual_seed(0)
    check_against_the_loop(kind().double(), [torch.randn(9, 4, dtype=torch.double)])


class Reordered(nn.Module):
    """A layer between an order and its inverse."""

    def __init__(self, order):
        super().__init__()
        self.layer, self.order = nn.Linear(4, 4), order

    def forward(self, x):
        order = self.order(x)
        return self.layer(torch.tanh(self.layer(x))[order])[torch.as_tensor(order).argsort()]


def through_a_view(x):
    order = torch.zeros(len(x), dtype=torch.long)
    order.view(-1).copy_(x[:, 0].argsort())
    return order


def through_a_slice(x):
    order = torch.arange(len(x))
    order[: len(x)][:] = x[:, 0].argsort()
    return order


def through_out(x):
    order = torch.zeros(len(x), dtype=torch.long)
    torch.sort(x[:, 0], out=(torch.empty(len(x), dtype=x.dtype), order))
    return order


def through_numpy(x):
    order = torch.arange(len(x))
    order.numpy()[:] = np.argsort(x[:, 0].numpy())
    return order


class Rows(nn.Module):
    """The same, row by row, by slices, by flat numbers and by axes that do not come first."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        order, h = x[:, 0].argsort(), torch.tanh(self.layer(x))
        back = order.argsort()
        if self.how == "rows":
            return torch.stack([*self.layer(torch.stack([h[i] for i in order.tolist()]))[back].unbind()])
        if self.how == "slices":  # as they are with two rows
            y, half = self.layer(torch.cat([h[::2], h[1::2]])), (len(x) + 1) // 2
            return torch.stack([y[i // 2 + i % 2 * half] for i in range(len(x))])
        if self.how == "take":
            y = self.layer(torch.take(h, order[:, None] * 4 + torch.arange(4)))
            return torch.zeros_like(y).scatter(0, order[:, None].expand(-1, 4), y)
        if self.how == "written":
            y = self.layer(torch.zeros_like(h).index_copy(0, back, h))
            return torch.zeros_like(y).index_copy(0, order, y)
        return self.layer(h.t()[:, order].t()).t()[:, back].t()  # "second axis"


ORDERS = {
    "numbers": lambda x: torch.tensor(x[:, 0].argsort().tolist()),
    "list": lambda x: x[:, 0].argsort().tolist(),
    "view": through_a_view,
    "slice": through_a_slice,
    "out": through_out,
    "numpy": through_numpy,
    "evens and odds": lambda x: torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)]),
    "from four on": lambda x: torch.arange(len(x)).flip(0) if len(x) > 3 else torch.arange(len(x)),
}


@pytest.mark.parametrize(
    "model",
    [Reordered(order) for order in ORDERS.values()]
    + [Rows(how) for how in ("rows", "slices", "take", "written", "second axis")],
    ids=[*ORDERS, "rows", "slices", "take", "written", "second axis"],
)
def test_orders_that_leave_the_first_examples_in_place(model):
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=torch.double)
    x[:3, 0] = torch.tensor([-5.0, -4.0, -3.0])
    check_against_the_loop(model.double(), [x])


def test_picking_within_examples_takes_the_fast_way():
    class Last(nn.Module):
        """As language models do that classify: the last word that is no padding; and columns in another order."""

        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

        def forward(self, t):
            h = torch.tanh(self.words(t)[..., [2, 0, 1, 3]])
            last = (t != 0).sum(1) - 1
            return self.head(h)[torch.arange(len(t)), last]

    engine = check_against_the_loop(Last().double(), [torch.randint(11, (7, 5)), torch.randint(11, (4, 3))])
    assert engine.plan.fallback == set()


class Shared(nn.Module):
    """Vectors of places, the same for all sentences, used in a way of one's own."""

    def __init__(self, use):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 4), nn.Embedding(6, 4), nn.Linear(4, 3)
        self.use = use
        self.register_buffer("ids", torch.arange(6))

    def forward(self, t):
        return self.head(torch.tanh(self.words(t) + self.use(self, t)).sum(1))


def over_its_length(model, t):
    vectors = model.places(torch.arange(t.shape[1]))
    return vectors / len(vectors)


@pytest.mark.parametrize(
    ("use", "shapes", "fast"),
    [
        (lambda m, t: m.places(m.ids)[: t.shape[1]], [(7, 6), (3, 6), (30, 6)], False),
        (lambda m, t: m.places(m.ids)[: t.shape[1]], [(6, 6), (9, 6)], False),
        (over_its_length, [(7, 2), (33, 2)], False),
        (over_its_length, [(7, 3), (33, 3)], False),
        (over_its_length, [(2, 2), (9, 2)], False),
        (over_its_length, [(5, 3), (5, 2)], False),
        (lambda m, t: m.places(m.ids[: t.shape[1]]), [(7, 2), (3, 6), (1, 4), (30, 3)], True),
        (lambda m, t: m.places(torch.arange(t.shape[1])[None]), [(7, 2), (3, 6), (1, 4), (30, 3)], True),
    ],
    ids=["cut", "cut, as many", "length", "length 3", "two of two", "another length", "ids", "row"],
)
@pytest.mark.parametrize("zero", [False, True])
def test_what_all_examples_share_is_confirmed_on_real_chunks(use, shapes, fast, zero):
    torch.manual_seed(0)
    model = Shared(use).double()
    if zero:  # as many begin: nothing is to be seen in the outputs
        nn.init.zeros_(model.places.weight)
    engine = check_against_the_loop(model, [torch.randint(1, 11, shape) for shape in shapes])
    assert engine.plan.fallback == (set() if fast else {"places.weight"})


def test_models_that_share_nothing_are_not_run_once_more():
    model, x = make("mlp")
    engine, runs = PerExample(model), []
    with preserve_model(model):
        engine.update(x, lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))
        model.register_forward_hook(lambda *_: runs.append(1))
        for part in (x, x[:4]):
            engine.update(part, lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))
    assert len(runs) == 2


def test_mixing_is_seen_although_most_examples_are_alike():
    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model, x = nn.Sequential(Centre(), nn.Linear(4, 2)), torch.randn(8, 4)
    x[:7] = x[0].clone()
    engine = PerExample(model)
    with preserve_model(model), pytest.raises(ValueError, match="depends on the other examples"):
        engine.update(x, lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))


def test_another_head_is_probed_anew():
    class Heads(nn.Module):
        head = 0

        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

        def forward(self, x):
            return self.heads[self.head](self.body(x).relu())

    model, x = Heads(), torch.randn(6, 4)
    engine = PerExample(model)
    for head in (0, 1, 0):
        model.head = head
        found = Elementwise(engine.parameters)
        with preserve_model(model):
            engine.update(x, lambda out: [torch.ones_like(out)], found)
        assert engine.plan.fallback == set()
        right = mean_of(model, x, [torch.ones(6, 2)], torch.square)
        for n, value in right.items():
            torch.testing.assert_close(found.sums[n] / 6, value)


def test_sparse_embeddings_and_lengths_that_change():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, t):
            return self.head(torch.tanh(self.words(t.flatten()).view(*t.shape, 4)).mean(1))

    model = Bag().double()
    engine = PerExample(model)
    found, parts = Elementwise(engine.parameters), [torch.randint(9, (5, n)) for n in (4, 7, 1)]
    with preserve_model(model):
        for t in parts:
            engine.update(t, lambda out: [torch.ones_like(out)], found)
    dense = nn.Embedding(9, 4, _weight=model.words.weight.detach()).double()
    model.words = dense
    right = dict.fromkeys(found.sums, 0)
    for t in parts:
        for n, v in mean_of(model, t, [torch.ones(5, 3).double()], torch.square).items():
            right[n] = right[n] + 5 * v
    for n, value in right.items():
        torch.testing.assert_close(found.sums[n], value)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [12, 16, 24])
def test_convolutions_side_by_side(stride, size, double):
    """Maps of middle size take several examples as the groups of one convolution."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, stride, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(2)
    )
    x, y = torch.randn(11, 3, size, size), torch.randint(2, (11,))
    model(x)
    found = fisher(model, (x, y), "true").values["0.weight"]
    truth = torch.zeros_like(found)
    for i in range(len(x)):
        loss = torch.nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        truth += torch.autograd.grad(loss, model[0].weight)[0].square()
    torch.testing.assert_close(found, truth / len(x))


def test_wrappers_inside_a_model(double):
    part, head, x = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), nn.Linear(4, 3), torch.randn(10, 4)
    right = fisher(nn.Sequential(part, head), x).values
    for wrapped in (torch.compile(part), checkpoint_wrapper(part)):
        found = fisher(nn.Sequential(wrapped, head), x).values
        assert set(found) == set(right)
        for n, value in right.items():
            torch.testing.assert_close(found[n], value)


@pytest.mark.parametrize("repeats", [torch.tensor([2, 2, 2, 1, 3, 2]), 2], ids=["by number", "all alike"])
def test_rows_that_are_repeated(repeats, double):
    """As often as a number says, which with the first examples is the same for all."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            times = repeats if isinstance(repeats, int) else x[:, 0].long()
            rows = torch.arange(len(x)).repeat_interleave(times)
            return x.new_zeros(len(x), 3).index_add(0, rows, torch.tanh(self.layer(x.repeat_interleave(times, 0))))

    x = torch.randn(6, 4)
    x[:, 0] = torch.as_tensor(repeats)
    check_against_the_loop(Repeated(), [x])


def test_gradients_that_cancel_do_not_need_the_fallback():
    """A bias of the keys does not change the attention: in float32 its gradient is nothing but rounding errors."""
    model, x = make("bert")
    model.float()
    engine = PerExample(model)
    with preserve_model(engine.model):
        engine.update(x, lambda out: [torch.ones_like(out)], Elementwise(engine.parameters))
    assert engine.plan.fallback == set()


def test_a_small_gradient_is_verified_all_the_same():
    """Beside large gradients, one without a rule is no rounding error."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.small = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.layer(x) + 1e-12 * torch.stack([row * self.small for row in self.layer(x)])

    torch.manual_seed(0)
    model, x = Small(), torch.randn(6, 4)
    engine = PerExample(model)
    squares = Elementwise(engine.parameters)
    with preserve_model(engine.model):
        engine.update(x, lambda out: [torch.ones_like(out)], squares)
    expected = (1e-12 * model.layer(x)).square().sum(0).detach()
    torch.testing.assert_close(squares.sums["small"], expected, rtol=1e-4, atol=0)
