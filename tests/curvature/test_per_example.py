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


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_equals_the_loop_over_single_examples(name, squared, chunk):
    model, x = make(name)
    columns = columns_for(model, x)
    expected = mean_of(model, x, columns, squared_size if squared else torch.abs)
    engine = PerExample(model)
    statistics = Elementwise(engine.parameters, squared)
    with preserve_model(model):
        for i in range(0, len(x), chunk):
            engine.update(x[i : i + chunk], lambda outputs, i=i: (c[i : i + chunk] for c in columns), statistics)
    for n, value in expected.items():
        torch.testing.assert_close(
            statistics.sums[n] / len(x), value, rtol=1e-9, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "complex"])
def test_outer_products_equal_the_loop(name):
    model, x = make(name)
    (column,) = columns_for(model, x, 1)
    engine = PerExample(model)
    statistics = OuterProducts(engine.parameters)
    with preserve_model(engine.model):
        engine.update(x, lambda outputs: [column], statistics)
    expected = torch.stack([torch.cat([g.flatten() for g in row.values()]) for row in gradients(model, x, column)])
    if statistics.rows is not None:
        torch.testing.assert_close(statistics.rows, expected, rtol=1e-9, atol=1e-12)
    else:
        torch.testing.assert_close(statistics.matrix, expected.t() @ expected, rtol=1e-9, atol=1e-12)


MODELS_WITHOUT_FALLBACK = {
    "mlp",
    "cnn",
    "resnet",
    "transformer",
    "encoder",
    "encoder, time first",
    "frames",
    "tied",
    "bert",
}


@pytest.mark.parametrize("name", list(MODELS))
def test_supported_models_need_no_fallback(name):
    model, x = make(name)
    engine = PerExample(model)
    with preserve_model(engine.model):
        engine.update(x, lambda outputs: [torch.ones_like(outputs)], Elementwise(engine.parameters))
    if name in MODELS_WITHOUT_FALLBACK:
        assert engine.plan.fallback == set()
    expected = {
        "position embeddings": {"position_embedding.weight"},
        "bare": {"matrix"},
        "folded": {"slope.weight"},
        "invisible": {"w"},
        "cross attention": {"attention.in_proj_weight", "attention.in_proj_bias"},
    }
    if name in expected:
        assert engine.plan.fallback == expected[name]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_model_and_random_state_are_unchanged(name):
    model, x = make(name)
    model.train()
    list(model.modules())[-1].eval()
    list(model.parameters())[-1].requires_grad_(False)
    loss = model(x).sum()
    loss.backward()
    initial_state = copy.deepcopy(model.state_dict())
    initial_flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    initial_gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    initial_rng_states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    engine = PerExample(model)
    with preserve_model(engine.model):
        engine.update(x, lambda outputs: [torch.ones_like(outputs)], Elementwise(engine.parameters))
    assert all(torch.equal(v, initial_state[k]) for k, v in model.state_dict().items())
    assert initial_flags == ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()])
    for p, initial_gradient in zip(model.parameters(), initial_gradients, strict=True):
        assert (p.grad is None and initial_gradient is None) or torch.equal(p.grad, initial_gradient)
    assert torch.equal(initial_rng_states[0], torch.get_rng_state()) and random.getstate() == initial_rng_states[2]
    assert (np.random.get_state()[1] == initial_rng_states[1]).all()
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
        engine.update(torch.randn(5, 4), lambda outputs: [torch.ones_like(outputs)], Elementwise(engine.parameters))


def test_outputs_that_are_not_a_tensor_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x), x

    engine = PerExample(Two())
    with pytest.raises(TypeError, match="a tensor of outputs, it gave a tuple"), preserve_model(engine.model):
        engine.update(torch.randn(5, 4), lambda outputs: [outputs], Elementwise(engine.parameters))


def test_no_tensors_are_kept_between_chunks():
    model, x = make("cnn")
    engine = PerExample(model)
    statistics = Elementwise(engine.parameters)

    def count_tensors():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with preserve_model(model):
        engine.update(x, lambda outputs: [torch.ones_like(outputs)], statistics)
        gc.collect()
        gc.disable()  # tensors in reference cycles would accumulate
        count_before = count_tensors()
        for _ in range(5):
            engine.update(x, lambda outputs: [torch.ones_like(outputs)] * 2, statistics)
        count_after = count_tensors()
        gc.enable()
    assert count_after <= count_before + 2


def test_wrapped_models_are_unwrapped():
    model, x = make("mlp")
    columns = columns_for(model, x)
    expected = mean_of(model, x, columns, torch.square)
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        engine = PerExample(wrapped)
        statistics = Elementwise(engine.parameters)
        with preserve_model(engine.model):
            engine.update(x, lambda outputs: columns, statistics)
        torch.testing.assert_close(statistics.sums["1.weight"] / len(x), expected["1.weight"])


class Experts(nn.Module):
    """The data decide which rows go to which layer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(4, 3)

    def forward(self, x):
        outputs = x.new_zeros(len(x), 3)
        goes_to_a = x[:, 0] > 0
        outputs[goes_to_a] = self.a(x[goes_to_a])
        outputs[~goes_to_a] = self.b(x[~goes_to_a])
        return outputs


class SortedRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.layer(x[order])[order.argsort()]


class WrittenOrder(nn.Module):
    """The data are written into a constant tensor, which then indexes the rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        order = torch.arange(len(x))
        order[:] = x[:, 0].argsort()
        inverse_order = torch.zeros(len(x), dtype=torch.long)
        inverse_order.copy_(order.argsort())
        return self.layer(x[order])[inverse_order]


def check_against_the_loop(model, chunks):
    """Compare a pass over chunks of any shapes with the loop over single examples, and return the engine."""
    torch.manual_seed(1)
    columns = [torch.randn_like(model.eval()(x)) for x in chunks]
    engine = PerExample(model)
    statistics = Elementwise(engine.parameters)
    with preserve_model(model):
        for x, column in zip(chunks, columns, strict=True):
            engine.update(x, lambda outputs, column=column: [column], statistics)
    expected = [mean_of(model, x, [column], torch.square) for x, column in zip(chunks, columns, strict=True)]
    for n in statistics.sums:
        expected_sum = sum(r[n] * len(x) for r, x in zip(expected, chunks, strict=True))
        torch.testing.assert_close(statistics.sums[n], expected_sum, msg=lambda m, n=n: f"{n}: {m}")
    return engine


@pytest.mark.parametrize("kind", [Experts, SortedRows, WrittenOrder])
def test_data_dependent_row_orders(kind):
    torch.manual_seed(0)
    check_against_the_loop(kind().double(), [torch.randn(9, 4, dtype=torch.double)])


class ReorderedRows(nn.Module):
    """A layer between a permutation of the rows and its inverse."""

    def __init__(self, order):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.order = order

    def forward(self, x):
        order = self.order(x)
        return self.layer(torch.tanh(self.layer(x))[order])[torch.as_tensor(order).argsort()]


def sort_through_a_view(x):
    order = torch.zeros(len(x), dtype=torch.long)
    order.view(-1).copy_(x[:, 0].argsort())
    return order


def sort_through_a_slice(x):
    order = torch.arange(len(x))
    order[: len(x)][:] = x[:, 0].argsort()
    return order


def sort_through_out(x):
    order = torch.zeros(len(x), dtype=torch.long)
    torch.sort(x[:, 0], out=(torch.empty(len(x), dtype=x.dtype), order))
    return order


def sort_through_numpy(x):
    order = torch.arange(len(x))
    order.numpy()[:] = np.argsort(x[:, 0].numpy())
    return order


class RowWise(nn.Module):
    """Permute rows one by one, by slices, by flat indices, by writing, or on the second axis."""

    def __init__(self, variant):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.variant = variant

    def forward(self, x):
        order = x[:, 0].argsort()
        h = torch.tanh(self.layer(x))
        inverse_order = order.argsort()
        if self.variant == "rows":
            return torch.stack([*self.layer(torch.stack([h[i] for i in order.tolist()]))[inverse_order].unbind()])
        if self.variant == "slices":  # with two rows, slices keep the order
            y = self.layer(torch.cat([h[::2], h[1::2]]))
            half = (len(x) + 1) // 2
            return torch.stack([y[i // 2 + i % 2 * half] for i in range(len(x))])
        if self.variant == "take":
            y = self.layer(torch.take(h, order[:, None] * 4 + torch.arange(4)))
            return torch.zeros_like(y).scatter(0, order[:, None].expand(-1, 4), y)
        if self.variant == "written":
            y = self.layer(torch.zeros_like(h).index_copy(0, inverse_order, h))
            return torch.zeros_like(y).index_copy(0, order, y)
        return self.layer(h.t()[:, order].t()).t()[:, inverse_order].t()  # "second axis"


ORDERS = {
    "tensor of a list": lambda x: torch.tensor(x[:, 0].argsort().tolist()),
    "list": lambda x: x[:, 0].argsort().tolist(),
    "view": sort_through_a_view,
    "slice": sort_through_a_slice,
    "out": sort_through_out,
    "numpy": sort_through_numpy,
    "evens and odds": lambda x: torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)]),
    "four rows or more": lambda x: torch.arange(len(x)).flip(0) if len(x) > 3 else torch.arange(len(x)),
}


@pytest.mark.parametrize(
    "model",
    [ReorderedRows(order) for order in ORDERS.values()]
    + [RowWise(variant) for variant in ("rows", "slices", "take", "written", "second axis")],
    ids=[*ORDERS, "rows", "slices", "take", "written", "second axis"],
)
def test_row_orders_that_a_probe_of_the_first_rows_cannot_see(model):
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=torch.double)
    x[:3, 0] = torch.tensor([-5.0, -4.0, -3.0])
    check_against_the_loop(model.double(), [x])


def test_indexing_within_examples_needs_no_fallback():
    class LastToken(nn.Module):
        """Classify from the last token that is not padding, as language models do, with permuted features."""

        def __init__(self):
            super().__init__()
            self.token_embedding = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, t):
            h = torch.tanh(self.token_embedding(t)[..., [2, 0, 1, 3]])
            last_index = (t != 0).sum(1) - 1
            return self.head(h)[torch.arange(len(t)), last_index]

    engine = check_against_the_loop(LastToken().double(), [torch.randint(11, (7, 5)), torch.randint(11, (4, 3))])
    assert engine.plan.fallback == set()


class SharedPositions(nn.Module):
    """Position embeddings that all examples share, read in the way of `use`."""

    def __init__(self, use):
        super().__init__()
        self.token_embedding = nn.Embedding(11, 4)
        self.position_embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 3)
        self.use = use
        self.register_buffer("ids", torch.arange(6))

    def forward(self, t):
        return self.head(torch.tanh(self.token_embedding(t) + self.use(self, t)).sum(1))


def divide_by_length(model, t):
    vectors = model.position_embedding(torch.arange(t.shape[1]))
    return vectors / len(vectors)


@pytest.mark.parametrize(
    ("use", "shapes", "without_fallback"),
    [
        (lambda m, t: m.position_embedding(m.ids)[: t.shape[1]], [(7, 6), (3, 6), (30, 6)], False),
        (lambda m, t: m.position_embedding(m.ids)[: t.shape[1]], [(6, 6), (9, 6)], False),
        (divide_by_length, [(7, 2), (33, 2)], False),
        (divide_by_length, [(7, 3), (33, 3)], False),
        (divide_by_length, [(2, 2), (9, 2)], False),
        (divide_by_length, [(5, 3), (5, 2)], False),
        (lambda m, t: m.position_embedding(m.ids[: t.shape[1]]), [(7, 2), (3, 6), (1, 4), (30, 3)], True),
        (lambda m, t: m.position_embedding(torch.arange(t.shape[1])[None]), [(7, 2), (3, 6), (1, 4), (30, 3)], True),
    ],
    ids=["slice", "slice, batch as long", "length", "length 3", "two of two", "changing length", "ids", "row"],
)
@pytest.mark.parametrize("zero_init", [False, True])
def test_sharing_across_examples_is_confirmed_on_real_chunks(use, shapes, without_fallback, zero_init):
    torch.manual_seed(0)
    model = SharedPositions(use).double()
    if zero_init:  # a common initialization, with which the outputs show no difference
        nn.init.zeros_(model.position_embedding.weight)
    engine = check_against_the_loop(model, [torch.randint(1, 11, shape) for shape in shapes])
    assert engine.plan.fallback == (set() if without_fallback else {"position_embedding.weight"})


def test_models_without_sharing_run_once_per_chunk():
    model, x = make("mlp")
    engine = PerExample(model)
    runs = []
    with preserve_model(model):
        engine.update(x, lambda outputs: [torch.ones_like(outputs)], Elementwise(engine.parameters))
        model.register_forward_hook(lambda *_: runs.append(1))
        for part in (x, x[:4]):
            engine.update(part, lambda outputs: [torch.ones_like(outputs)], Elementwise(engine.parameters))
    assert len(runs) == 2


def test_mixing_is_detected_when_most_examples_are_equal():
    class Centre(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(Centre(), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    x[:7] = x[0].clone()
    engine = PerExample(model)
    with preserve_model(model), pytest.raises(ValueError, match="depends on the other examples"):
        engine.update(x, lambda outputs: [torch.ones_like(outputs)], Elementwise(engine.parameters))


def test_switching_the_active_head_triggers_a_new_probe():
    class Heads(nn.Module):
        head = 0

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 5)
            self.heads = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])

        def forward(self, x):
            return self.heads[self.head](self.body(x).relu())

    model = Heads()
    x = torch.randn(6, 4)
    engine = PerExample(model)
    for head in (0, 1, 0):
        model.head = head
        statistics = Elementwise(engine.parameters)
        with preserve_model(model):
            engine.update(x, lambda outputs: [torch.ones_like(outputs)], statistics)
        assert engine.plan.fallback == set()
        expected = mean_of(model, x, [torch.ones(6, 2)], torch.square)
        for n, value in expected.items():
            torch.testing.assert_close(statistics.sums[n] / 6, value)


def test_sparse_embeddings_and_changing_lengths():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.token_embedding = nn.Embedding(9, 4, sparse=True)
            self.head = nn.Linear(4, 3)

        def forward(self, t):
            return self.head(torch.tanh(self.token_embedding(t.flatten()).view(*t.shape, 4)).mean(1))

    model = Bag().double()
    engine = PerExample(model)
    statistics = Elementwise(engine.parameters)
    parts = [torch.randint(9, (5, n)) for n in (4, 7, 1)]
    with preserve_model(model):
        for t in parts:
            engine.update(t, lambda outputs: [torch.ones_like(outputs)], statistics)
    dense = nn.Embedding(9, 4, _weight=model.token_embedding.weight.detach()).double()
    model.token_embedding = dense
    expected = dict.fromkeys(statistics.sums, 0)
    for t in parts:
        for n, v in mean_of(model, t, [torch.ones(5, 3).double()], torch.square).items():
            expected[n] = expected[n] + 5 * v
    for n, value in expected.items():
        torch.testing.assert_close(statistics.sums[n], value)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [12, 16, 24])
def test_convolutions_of_several_examples_as_groups(stride, size, double):
    """For feature maps of medium size, several examples are the groups of one convolution."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, stride, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(2)
    )
    x = torch.randn(11, 3, size, size)
    y = torch.randint(2, (11,))
    model(x)
    statistics = fisher(model, (x, y), "true").values["0.weight"]
    expected_sum = torch.zeros_like(statistics)
    for i in range(len(x)):
        loss = torch.nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        expected_sum += torch.autograd.grad(loss, model[0].weight)[0].square()
    torch.testing.assert_close(statistics, expected_sum / len(x))


def test_wrapped_submodules(double):
    part = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4))
    head = nn.Linear(4, 3)
    x = torch.randn(10, 4)
    expected = fisher(nn.Sequential(part, head), x).values
    for wrapped in (torch.compile(part), checkpoint_wrapper(part)):
        statistics = fisher(nn.Sequential(wrapped, head), x).values
        assert set(statistics) == set(expected)
        for n, value in expected.items():
            torch.testing.assert_close(statistics[n], value)


@pytest.mark.parametrize("repeats", [torch.tensor([2, 2, 2, 1, 3, 2]), 2], ids=["by row", "constant"])
def test_repeated_rows(repeats, double):
    """The first examples have the same number of repeats, so a probe cannot see that it depends on the data."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            row_repeats = repeats if isinstance(repeats, int) else x[:, 0].long()
            row_indices = torch.arange(len(x)).repeat_interleave(row_repeats)
            return x.new_zeros(len(x), 3).index_add(
                0, row_indices, torch.tanh(self.layer(x.repeat_interleave(row_repeats, 0)))
            )

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
