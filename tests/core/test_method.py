import json
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

import everlearn
from everlearn import DEN, HAT, L2, PNN, Batch, Chain, ExpandableRepresentation, ExpandNet, Freeze, Method
from everlearn.results.report.rows import as_csv, as_markdown, run_rows
from everlearn.results.report.table import table


@dataclass(eq=False)
class Doubles(Method):
    def task_loss(self, model, batch):
        loss, outputs = super().task_loss(model, batch)
        return 2 * loss, outputs


@dataclass(eq=False)
class Fixed(Method):
    amount: float = 1.0
    kind: Literal["a", "b"] = "a"
    name: str | None = None

    def penalty(self, model, batch=None, out=None):
        return self.amount


def batch():
    return Batch(torch.rand(4, 3), torch.tensor([0, 1, 1, 0]))


def test_fine_tuning_is_the_task_loss():
    model, b = torch.nn.Linear(3, 2), batch()
    assert torch.equal(Method().loss(model, b), torch.nn.functional.cross_entropy(model(b.x), b.y))


def test_penalties_add_and_one_may_replace_the_task_loss():
    model, b = torch.nn.Linear(3, 2), batch()
    plain = Method().loss(model, b)
    torch.testing.assert_close((Fixed(0.5) + Doubles() + Fixed(0.25)).loss(model, b), 2 * plain + 0.75)


def test_two_methods_that_replace_the_same_verb_are_refused():
    with pytest.raises(
        ValueError, match=r"Doubles and Doubles both define task_loss\(\); at most one method of a chain may"
    ):
        Doubles() + Doubles()


def test_chains_flatten_and_show_their_parts():
    chain = Fixed() + (L2() + Freeze())
    assert isinstance(chain, Chain) and [type(m) for m in chain.methods] == [Fixed, L2, Freeze]
    assert repr(Freeze(output="head") + L2()).startswith("Freeze(what='features', output='head') + L2(")


def test_verbs_run_in_order():
    calls = []

    @dataclass(eq=False)
    class Records(Method):
        name: str = ""

        def begin_task(self, model, task):
            calls.append(self.name)

    (Records("a") + Records("b")).begin_task(torch.nn.Linear(1, 1), None)
    assert calls == ["a", "b"]


def test_state_nests_and_refuses_what_does_not_fit():
    model = torch.nn.Linear(3, 2)
    chain = L2() + Freeze()
    chain.begin_task(model, None)
    chain.end_task(model, None)
    state = chain.state_dict()
    assert set(state) == {"0", "1"} and torch.equal(state["0"]["quadratic"]["anchor"]["weight"], model.weight)
    other = L2() + Freeze()
    other.load_state_dict(state)
    assert torch.equal(other.methods[0].quadratic.anchor["bias"], model.bias)
    with pytest.raises(ValueError, match="does not match L2"):
        L2().load_state_dict(Freeze().state_dict())
    with pytest.raises(ValueError, match="chain of 2 methods"):
        (L2() + L2() + L2()).load_state_dict(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"amount": "much"}, r"Fixed.amount: got 'much', allowed: float"),
        ({"amount": True}, r"Fixed.amount: got True"),
        ({"kind": "c"}, r"Fixed.kind: got 'c', allowed: 'a', 'b'"),
        ({"name": 3}, r"Fixed.name: got 3, allowed: str, None"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Fixed(**fields)


def test_ranges_are_kept():
    with pytest.raises(ValueError, match=r"L2.strength: got -1.0, allowed: 0 or more"):
        L2(-1.0)
    with pytest.raises(TypeError, match=r"L2.strength: got 'x', allowed: float"):
        L2("x")
    with pytest.raises(ValueError, match="at least one method"):
        Chain()


def test_loaded_state_is_a_copy():
    a, b = L2(), L2()
    a.end_task(torch.nn.Linear(2, 2), None)
    b.load_state_dict(a.state_dict())
    b.quadratic.anchor["weight"].zero_()
    assert a.quadratic.anchor["weight"].abs().sum() > 0


def test_right_fields_pass():
    assert Fixed(amount=1, kind="b", name="x").amount == 1


def test_only_methods_can_be_chained():
    with pytest.raises(TypeError, match="consists of methods, got a int"):
        Method() + 3


def test_a_new_method_is_a_few_lines():
    """Orthogonal-ish: a researcher's method that edits gradients works in the trainer without touching it."""

    @dataclass(eq=False)
    class Half(Method):
        def before_step(self, model):
            for p in model.parameters():
                p.grad *= 0.5

    from everlearn import train

    data = torch.rand(8, 3), torch.arange(8) % 2
    a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    b.load_state_dict(a.state_dict())
    train(a, Half(), data, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.2))
    train(b, Method(), data, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    torch.testing.assert_close(a.weight, b.weight)


INPUTS, WIDTH, OUTPUTS, TASKS = 64, 20, 6, 3  # of the small net and stream
MODEL = (INPUTS + 1) * WIDTH + (WIDTH + 1) * OUTPUTS
HEAD = (WIDTH + 1) * OUTPUTS


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (Method(), MODEL),
        (everlearn.EWC(), MODEL),
        (everlearn.LwF(), MODEL),  # a teacher is state
        (everlearn.ER(50), MODEL),  # so is a memory
        (everlearn.GenerativeReplay(hidden=5, latent=2), MODEL),  # and a generator
        (everlearn.PackNet(), MODEL + (TASKS - 1) * HEAD),
        (HAT(rest="frozen"), MODEL + (TASKS - 1) * HEAD + TASKS * WIDTH),  # gates
        (HAT(), MODEL + (TASKS - 1) * (HEAD + WIDTH) + TASKS * WIDTH),  # biases, too
        (PNN(laterals="none"), TASKS * MODEL),
        (PNN(laterals="linear"), TASKS * MODEL + (1 + 2) * WIDTH * OUTPUTS),
        (ExpandableRepresentation(50, tune_epochs=1), TASKS * (INPUTS + 1) * WIDTH + (TASKS * WIDTH + 1) * OUTPUTS),
        (Method() + everlearn.PackNet() + everlearn.EWC(), MODEL + (TASKS - 1) * HEAD),
    ],
    ids=lambda value: everlearn.core.chain.label(value) if isinstance(value, Method) else str(value),
)
def test_all_parameters_that_prediction_needs_are_counted(method, needed, small_net, small_stream):
    found = everlearn.run(small_net, method, small_stream(), batch_size=64).cost["parameters"]
    assert found[-1] == needed and found[0] == MODEL + isinstance(method, HAT) * WIDTH


@pytest.mark.parametrize("make", [PNN, ExpandNet, DEN, HAT, lambda: ExpandableRepresentation(50, tune_epochs=1)])
def test_a_state_that_was_loaded_counts_as_much(make, small_net, small_stream):
    stream, method, again = small_stream(), make(), make()
    model = small_net(stream.inputs, stream.outputs)
    for task in stream:
        everlearn.train(model, method, task, batch_size=32)
    again.load_state_dict(method.state_dict())
    assert again.extra_parameters(model) == method.extra_parameters(model) > 0


def test_growing_methods_do_not_look_free(tmp_path):
    grows = ExpandableRepresentation(50, tune_epochs=0)
    result = everlearn.run(everlearn.nets.mlp, grows, everlearn.streams.digits("class"), iterations=1, out=tmp_path)
    kept = json.loads(next(tmp_path.glob("*.json")).read_text())["cost"]["parameters"]
    assert kept == [186_400 * t + (400 * t + 1) * 10 for t in range(1, 6)] and kept[-1] == 952_010
    assert "952,010" in table([result]) and "190,410" in table([result]), "the growth is shown task by task"
    (row,) = run_rows([result])
    assert row["parameters"] == 952_010 and [facts["parameters"] for facts in row["diagnostics"]] == kept
    assert "952,010" in as_markdown([result]) and ",952010," in as_csv([result])


def test_facts_of_a_chain_are_those_of_its_methods(small_net, small_stream):
    method = Method() + everlearn.PackNet()
    assert Method().diagnostics() == {} == method.diagnostics()
    result = everlearn.run(small_net, method, small_stream(), batch_size=16)
    used = [facts["capacity used"] for facts in result.cost["diagnostics"]]
    assert used == pytest.approx([0.5, 0.625, 0.71875], abs=1e-3)


def test_a_loss_of_probabilities_is_told_once():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softmax(-1))
    method, batch = Method(), Batch(torch.randn(5, 3), torch.arange(5) % 4)
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        method.loss(model, batch)
    method.loss(model, batch)


def test_a_dict_in_place_of_a_batch_is_told_how_to_become_one():
    model, given = torch.nn.Linear(3, 2), {"input": batch().x, "labels": batch().y}
    with pytest.raises(TypeError, match=r"got a dict: write Batch\(\{") as told:
        Method().loss(model, given)
    advice = str(told.value).split("write ")[1].split(", the inputs by name")[0]
    made = eval(advice, {"Batch": Batch, "batch": given})
    expected = torch.nn.functional.cross_entropy(model(given["input"]), given["labels"])
    assert torch.equal(Method().loss(model, made), expected)
    with pytest.raises(TypeError, match=r"got a list: write Batch\(x, y\)\."):
        Method().loss(model, [batch().x, batch().y])
