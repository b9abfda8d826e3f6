"""How models are called: whatever inputs they take, and whatever object their outputs come in."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from everlearn import DER, ER, EWC, L2, MAS, PNN, SI, Batch, DERpp, LwF, Method, Task, evaluate, train
from everlearn.core.forward import arguments, check_next_tokens, forward, next_token_labels
from everlearn.curvature import fisher, predictive_kl, sensitivity

X, Z, Y = torch.randn(12, 4), torch.randn(12, 4), torch.arange(12) % 3


@dataclass
class Answer:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Named(nn.Module):
    """As transformers' models: arguments by name, an object of outputs, more names than it has arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **more):
        return Answer(self.layer(input_ids * attention_mask))


class Plain(nn.Module):
    """The same function of one tensor, which the others are compared with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class Two(Plain):
    def forward(self, left, right):
        return self.layer(left * right)


class OfDict(Plain):
    def forward(self, inputs):
        return self.layer(inputs["input_ids"] * inputs["attention_mask"])


class OfPair(Plain):
    def forward(self, pair, scale=1.0):
        return self.layer(pair[0] * pair[1] * scale)


class PassOn(nn.Module):
    """As PEFT and Accelerate wrap a model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


NAMES = {"input_ids": X, "attention_mask": Z}
KINDS = {
    "named": (Named, NAMES),
    "named, and more": (Named, {**NAMES, "token_type_ids": X}),
    "passed on": (lambda: PassOn(Named()), NAMES),
    "compiled": (lambda: torch.compile(Named(), backend="eager"), NAMES),
    "a dict": (OfDict, NAMES),
    "two": (Two, (X, Z)),
    "two in a list": (Two, [X, Z]),
    "a pair": (OfPair, (X, Z)),
}


def made(kind, seed=0):
    torch.manual_seed(seed)
    return KINDS[kind][0](), KINDS[kind][1]


def plain(model):
    other = Plain()
    other.layer.load_state_dict({n.rpartition(".")[2]: p.detach() for n, p in model.named_parameters()})
    return other


def last_names(values):
    return {n.rpartition(".")[2]: v for n, v in values.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_importances_are_those_of_the_plain_function(kind):
    model, x = made(kind)
    other = plain(model)
    torch.testing.assert_close(forward(model, x), other(X * Z))
    for measure in (fisher, sensitivity, lambda m, data: fisher(m, data, "true")):
        found = last_names(measure(model, [(x, Y)]).values)
        right = last_names(measure(other, [(X * Z, Y)]).values)
        for name in ("weight", "bias"):
            torch.testing.assert_close(found[name], right[name])


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
@pytest.mark.parametrize("kind", ["named", "two", "two in a list"])
def test_a_loop_of_one_s_own_ends_where_that_of_the_plain_function_does(make, kind):
    ends = []
    for own in (True, False):
        model, x = made(kind)
        model, x = (model, x) if own else (plain(model), X * Z)
        method = make()
        for shift in (0, 1):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            y = (Y + shift) % 3
            method.begin_task(model, [(x, y)])
            for _ in range(3):
                optimizer.zero_grad()
                method.loss(model, Batch(x, y)).backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
            method.end_task(model, [(x, y)])
        assert method.predict(model, x).shape == (12, 3)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends)


def test_attached_to_a_model_of_named_inputs():
    """Distillation sees what was passed by name, and what the loss is taken of."""
    model, x = made("named")
    method = LwF(2.0)
    method.end_task(model, [(x, Y)])
    with torch.no_grad():
        model.layer.weight.add_(0.3)
    twin, _ = made("named")
    twin.load_state_dict(model.state_dict())
    method.loss(twin, Batch(x, Y)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with method.attach(model, optimizer) as attached:
        outputs = model(**x)
        attached.loss(nn.functional.cross_entropy(outputs.logits, Y), x, Y, outputs).backward()
        optimizer.step()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)


def test_a_loader_of_dicts_with_labels_and_one_of_two_inputs():
    dicts = DataLoader(
        [{"input_ids": x, "attention_mask": z, "labels": int(y)} for x, z, y in zip(X, Z, Y, strict=True)], 5
    )
    pairs = DataLoader([((x, z), int(y)) for x, z, y in zip(X, Z, Y, strict=True)], 5)  # collated to lists
    for kind, loader in (("named", dicts), ("two", pairs)):
        model, _ = made(kind)
        right = last_names(fisher(plain(model), (X * Z, Y), "true").values)
        for name, value in last_names(fisher(model, loader, "true").values).items():
            torch.testing.assert_close(value, right[name])
        train(model, EWC(), loader, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))


def test_steps_of_parameters_are_tried_by_name():
    model, x = made("named")
    delta = {"layer.weight": 0.1 * torch.randn(3, 4)}
    torch.testing.assert_close(predictive_kl(model, delta, [(x, Y)]), predictive_kl(plain(model), delta, (X * Z, Y)))


def test_options_among_named_inputs_stay_what_they_are():
    class Optional(Named):
        def forward(self, input_ids=None, attention_mask=None, doubled=False, name="", layers=()):
            assert doubled is True and name == "first" and layers == [1, 2]
            return Answer(2 * self.layer(input_ids * attention_mask))

    model, method = Optional(), LwF()
    options = {**NAMES, "doubled": True, "name": "first", "layers": [1, 2]}
    right = plain(model)(X * Z)
    torch.testing.assert_close(method.predict(model, options), 2 * right)
    torch.testing.assert_close(Method().loss(model, Batch(options, Y)), nn.functional.cross_entropy(2 * right, Y))


def test_how_inputs_are_spread():
    assert arguments(OfPair(), (1, 2)) == (((1, 2),), {}), "the second would be taken for the scale"
    assert arguments(Two(), (1, 2, 3)) == (((1, 2, 3),), {})
    assert arguments(Plain(), {}) == (({},), {})
    assert arguments(Plain(), {1: 2}) == (({1: 2},), {})
    assert arguments(nn.Sequential(Plain()), {"a": 1}) == (({"a": 1},), {})


def test_outputs_without_logits_say_what_to_do():
    class Many(Plain):
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
            call(Many())


class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids, labels=None):
        return Answer(self.layer(self.words(input_ids)))


@pytest.mark.parametrize("padding", [0, 2])
def test_a_causal_model_s_inputs_are_not_its_labels(padding):
    """Whoever takes the loss of logits must shift labels, as such a model itself does."""
    model, tokens = TinyForCausalLM(), torch.randint(9, (6, 5))
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


def test_a_causal_model_s_labels_are_compared_once(synced):
    """It waits for the device, which no later step should."""
    model, tokens = TinyForCausalLM(), torch.randint(9, (6, 5))
    batch = Batch({"input_ids": tokens}, next_token_labels(tokens))
    method = Method()
    assert synced(lambda: method.loss(model, batch)) > 0
    assert synced(lambda: method.loss(model, batch)) == 0


class NamedDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask=None):
        return Answer(self.layer(self.first(input_ids * attention_mask).relu()))


class PlainDeep(NamedDeep):
    def forward(self, x):
        return self.layer(self.first(x).relu())


@pytest.mark.parametrize("laterals", ["adapter", "none"])
def test_columns_take_named_inputs(laterals):
    ends = []
    for kind, x in ((NamedDeep, NAMES), (PlainDeep, X * Z)):
        torch.manual_seed(0)
        model, method = kind(), PNN(laterals=laterals)
        for number in (0, 1):
            train(model, method, Task([(x, Y)], id=number), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), epochs=3)
        ends.append([method.predict(model, x, number) for number in (0, 1)])
        ends[-1].append(forward(method.export(model, 1), x))
    torch.testing.assert_close(*ends)
