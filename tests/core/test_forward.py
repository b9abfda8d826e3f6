"""Calls of models with tensors, tuples or dicts as inputs and tensors or objects as outputs."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from everlearn import DER, ER, EWC, L2, MAS, PNN, SI, Batch, DERpp, LwF, Method, Task, evaluate, train
from everlearn.core.forward import arguments, check_next_tokens, forward, next_token_labels
from everlearn.curvature import fisher, predictive_kl, sensitivity

X = torch.randn(12, 4)
Z = torch.randn(12, 4)
Y = torch.arange(12) % 3


@dataclass
class ModelOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Named(nn.Module):
    """As the models of transformers: named arguments, an output object, and unused keyword arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **unused):
        return ModelOutput(self.layer(input_ids * attention_mask))


class Plain(nn.Module):
    """The same function of one tensor, as the reference for the other models."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class TwoInputs(Plain):
    def forward(self, first, second):
        return self.layer(first * second)


class DictInput(Plain):
    def forward(self, inputs):
        return self.layer(inputs["input_ids"] * inputs["attention_mask"])


class PairInput(Plain):
    def forward(self, pair, scale=1.0):
        return self.layer(pair[0] * pair[1] * scale)


class Wrapper(nn.Module):
    """Forwards all arguments, as the wrappers of PEFT and Accelerate."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


NAMED_INPUTS = {"input_ids": X, "attention_mask": Z}
KINDS = {
    "named": (Named, NAMED_INPUTS),
    "named, with unused names": (Named, {**NAMED_INPUTS, "token_type_ids": X}),
    "wrapped": (lambda: Wrapper(Named()), NAMED_INPUTS),
    "compiled": (lambda: torch.compile(Named(), backend="eager"), NAMED_INPUTS),
    "a dict": (DictInput, NAMED_INPUTS),
    "two inputs": (TwoInputs, (X, Z)),
    "two inputs in a list": (TwoInputs, [X, Z]),
    "a pair": (PairInput, (X, Z)),
}


def make_model_and_inputs(kind, seed=0):
    torch.manual_seed(seed)
    return KINDS[kind][0](), KINDS[kind][1]


def plain_copy(model):
    plain_model = Plain()
    plain_model.layer.load_state_dict({n.rpartition(".")[2]: p.detach() for n, p in model.named_parameters()})
    return plain_model


def without_prefix(values):
    return {n.rpartition(".")[2]: v for n, v in values.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_importances_equal_the_plain_model(kind):
    model, x = make_model_and_inputs(kind)
    plain_model = plain_copy(model)
    torch.testing.assert_close(forward(model, x), plain_model(X * Z))
    for estimate in (fisher, sensitivity, lambda m, data: fisher(m, data, "true")):
        actual = without_prefix(estimate(model, [(x, Y)]).values)
        expected = without_prefix(estimate(plain_model, [(X * Z, Y)]).values)
        for name in ("weight", "bias"):
            torch.testing.assert_close(actual[name], expected[name])


@pytest.mark.parametrize(
    "make",
    [
        lambda: EWC(10.0),
        lambda: MAS(1.0),
        lambda: SI(10.0),
        lambda: L2(1.0),
        lambda: LwF(2.0),
        lambda: ER(8),
        lambda: DER(8),
        lambda: DERpp(8),
    ],
)
@pytest.mark.parametrize("kind", ["named", "two inputs", "two inputs in a list"])
def test_a_custom_loop_trains_as_with_the_plain_model(make, kind):
    weights = []
    for use_plain in (False, True):
        model, x = make_model_and_inputs(kind)
        if use_plain:
            model = plain_copy(model)
            x = X * Z
        method = make()
        for label_shift in (0, 1):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            y = (Y + label_shift) % 3
            method.begin_task(model, [(x, y)])
            for _ in range(3):
                optimizer.zero_grad()
                method.loss(model, Batch(x, y)).backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
            method.end_task(model, [(x, y)])
        assert method.predict(model, x).shape == (12, 3)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)


def test_attachment_to_a_model_with_named_inputs():
    """Distillation uses the named inputs and the logits of the output object."""
    model, x = make_model_and_inputs("named")
    method = LwF(2.0)
    method.end_task(model, [(x, Y)])
    with torch.no_grad():
        model.layer.weight.add_(0.3)
    reference, _ = make_model_and_inputs("named")
    reference.load_state_dict(model.state_dict())
    method.loss(reference, Batch(x, Y)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer) as attached:
        outputs = model(**x)
        attached.loss(nn.functional.cross_entropy(outputs.logits, Y), x, Y, outputs).backward()
        optimizer.step()
    torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)


def test_a_loader_of_dicts_with_labels_and_one_of_two_inputs():
    dicts = DataLoader(
        [{"input_ids": x, "attention_mask": z, "labels": int(y)} for x, z, y in zip(X, Z, Y, strict=True)], 5
    )
    pairs = DataLoader([((x, z), int(y)) for x, z, y in zip(X, Z, Y, strict=True)], 5)  # collated to lists
    for kind, loader in (("named", dicts), ("two inputs", pairs)):
        model, _ = make_model_and_inputs(kind)
        expected = without_prefix(fisher(plain_copy(model), (X * Z, Y), "true").values)
        for name, value in without_prefix(fisher(model, loader, "true").values).items():
            torch.testing.assert_close(value, expected[name])
        train(model, EWC(), loader, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))


def test_predictive_kl_with_named_inputs():
    model, x = make_model_and_inputs("named")
    delta = {"layer.weight": 0.1 * torch.randn(3, 4)}
    torch.testing.assert_close(
        predictive_kl(model, delta, [(x, Y)]), predictive_kl(plain_copy(model), delta, (X * Z, Y))
    )


def test_options_among_named_inputs_are_passed_unchanged():
    class Optional(Named):
        def forward(self, input_ids=None, attention_mask=None, doubled=False, name="", layers=()):
            assert doubled is True and name == "first" and layers == [1, 2]
            return ModelOutput(2 * self.layer(input_ids * attention_mask))

    model = Optional()
    method = LwF()
    options = {**NAMED_INPUTS, "doubled": True, "name": "first", "layers": [1, 2]}
    expected = plain_copy(model)(X * Z)
    torch.testing.assert_close(method.predict(model, options), 2 * expected)
    torch.testing.assert_close(Method().loss(model, Batch(options, Y)), nn.functional.cross_entropy(2 * expected, Y))


def test_when_inputs_are_unpacked_into_arguments():
    assert arguments(PairInput(), (1, 2)) == (((1, 2),), {}), "the second element must not become the scale"
    assert arguments(TwoInputs(), (1, 2, 3)) == (((1, 2, 3),), {})
    assert arguments(Plain(), {}) == (({},), {})
    assert arguments(Plain(), {1: 2}) == (({1: 2},), {})
    assert arguments(nn.Sequential(Plain()), {"a": 1}) == (({"a": 1},), {})


def test_outputs_without_logits_are_refused():
    class TupleOutput(Plain):
        def forward(self, x):
            return self.layer(x), x

    for call in (
        lambda m: forward(m, X),
        lambda m: fisher(m, X),
        lambda m: MAS().end_task(m, (X, Y)),
        lambda m: EWC().loss(m, Batch(X, Y)),
        lambda m: Method().predict(m, X),
    ):
        with pytest.raises(TypeError, match=r"a tensor of outputs, it gave a tuple without a tensor of \.logits"):
            call(TupleOutput())


class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(9, 4)
        self.layer = nn.Linear(4, 9)

    def forward(self, input_ids, labels=None):
        return ModelOutput(self.layer(self.token_embedding(input_ids)))


@pytest.mark.parametrize("padding", [0, 2])
def test_unshifted_labels_of_a_causal_model_are_refused(padding):
    """A loss of the logits needs shifted labels, because only the model's internal loss shifts them."""
    model = TinyForCausalLM()
    tokens = torch.randint(9, (6, 5))
    labels = tokens.clone()
    labels[:, :padding] = -100
    loader = [{"input_ids": tokens, "labels": labels}]
    for call in (
        lambda: EWC().loss(model, Batch({"input_ids": tokens}, labels)),
        lambda: fisher(model, loader, "true"),
        lambda: train(model, Method(), loader, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)),
        lambda: evaluate(model, Method(), Task(test=loader)),
    ):
        with pytest.raises(ValueError, match="TinyForCausalLM equal its inputs"):
            call()
    EWC().loss(model, Batch({"input_ids": tokens}, next_token_labels(labels))).backward()
    check_next_tokens(nn.Linear(1, 1), {"input_ids": tokens}, tokens)


def test_labels_of_a_causal_model_are_compared_once(count_synchronizations):
    """The comparison synchronizes with the device, so later steps skip it."""
    model = TinyForCausalLM()
    tokens = torch.randint(9, (6, 5))
    batch = Batch({"input_ids": tokens}, next_token_labels(tokens))
    method = Method()
    assert count_synchronizations(lambda: method.loss(model, batch)) > 0
    assert count_synchronizations(lambda: method.loss(model, batch)) == 0


class NamedDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layer = nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask=None):
        return ModelOutput(self.layer(self.first(input_ids * attention_mask).relu()))


class PlainDeep(NamedDeep):
    def forward(self, x):
        return self.layer(self.first(x).relu())


@pytest.mark.parametrize("laterals", ["adapter", "none"])
def test_pnn_columns_accept_named_inputs(laterals):
    predictions = []
    for kind, x in ((NamedDeep, NAMED_INPUTS), (PlainDeep, X * Z)):
        torch.manual_seed(0)
        model = kind()
        method = PNN(laterals=laterals)
        for task_id in (0, 1):
            train(model, method, Task([(x, Y)], id=task_id), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), epochs=3)
        predictions.append([method.predict(model, x, task_id) for task_id in (0, 1)])
        predictions[-1].append(forward(method.export(model, 1), x))
    torch.testing.assert_close(*predictions)
