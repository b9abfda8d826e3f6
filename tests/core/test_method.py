import json
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import nn

import everlearn
from everlearn import (
    DEN,
    EWC,
    HAT,
    L2,
    MAS,
    PNN,
    SI,
    Batch,
    Chain,
    ExpandableRepresentation,
    ExpandNet,
    Freeze,
    LwF,
    Method,
    Task,
    train,
)
from everlearn.results.report.rows import as_csv, as_markdown, run_rows
from everlearn.results.report.table import table


@dataclass(eq=False)
class DoubledLoss(Method):
    def task_loss(self, model, batch):
        loss, outputs = super().task_loss(model, batch)
        return 2 * loss, outputs


@dataclass(eq=False)
class FixedPenalty(Method):
    amount: float = 1.0
    kind: Literal["a", "b"] = "a"
    name: str | None = None

    def penalty(self, model, batch=None, outputs=None):
        return self.amount


def batch():
    return Batch(torch.rand(4, 3), torch.tensor([0, 1, 1, 0]))


def test_fine_tuning_uses_the_task_loss():
    model = torch.nn.Linear(3, 2)
    b = batch()
    assert torch.equal(Method().loss(model, b), torch.nn.functional.cross_entropy(model(b.x), b.y))


def test_penalties_add_up_and_one_method_may_replace_the_task_loss():
    model = torch.nn.Linear(3, 2)
    b = batch()
    task_loss = Method().loss(model, b)
    torch.testing.assert_close(
        (FixedPenalty(0.5) + DoubledLoss() + FixedPenalty(0.25)).loss(model, b), 2 * task_loss + 0.75
    )


def test_two_methods_that_override_the_same_hook_are_refused():
    with pytest.raises(
        ValueError, match=r"DoubledLoss and DoubledLoss both define task_loss\(\); at most one method of a chain may"
    ):
        DoubledLoss() + DoubledLoss()


def test_chains_flatten_and_show_their_parts():
    chain = FixedPenalty() + (L2() + Freeze())
    assert isinstance(chain, Chain) and [type(m) for m in chain.methods] == [FixedPenalty, L2, Freeze]
    assert repr(Freeze(output="head") + L2()).startswith("Freeze(what='features', output='head') + L2(")


def test_hooks_run_in_order():
    calls = []

    @dataclass(eq=False)
    class Recorder(Method):
        name: str = ""

        def begin_task(self, model, task):
            calls.append(self.name)

    (Recorder("a") + Recorder("b")).begin_task(torch.nn.Linear(1, 1), None)
    assert calls == ["a", "b"]


def test_state_of_a_chain_is_nested_and_mismatches_are_refused():
    model = torch.nn.Linear(3, 2)
    chain = L2() + Freeze()
    chain.begin_task(model, None)
    chain.end_task(model, None)
    state = chain.state_dict()
    assert set(state) == {"0", "1"} and torch.equal(state["0"]["quadratic"]["anchor"]["weight"], model.weight)
    restored = L2() + Freeze()
    restored.load_state_dict(state)
    assert torch.equal(restored.methods[0].quadratic.anchor["bias"], model.bias)
    with pytest.raises(ValueError, match="does not match L2"):
        L2().load_state_dict(Freeze().state_dict())
    with pytest.raises(ValueError, match="chain of 2 methods"):
        (L2() + L2() + L2()).load_state_dict(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"amount": "much"}, r"FixedPenalty.amount: got 'much', allowed: float"),
        ({"amount": True}, r"FixedPenalty.amount: got True"),
        ({"kind": "c"}, r"FixedPenalty.kind: got 'c', allowed: 'a', 'b'"),
        ({"name": 3}, r"FixedPenalty.name: got 3, allowed: str, None"),
    ],
)
def test_wrong_hyperparameters_are_named(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        FixedPenalty(**fields)


def test_hyperparameters_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"L2.strength: got -1.0, allowed: 0 or more"):
        L2(-1.0)
    with pytest.raises(ValueError, match=r"L2.strength: got 'x', allowed: 'auto', float"):
        L2("x")
    with pytest.raises(ValueError, match="at least one method"):
        Chain()


def test_loaded_state_is_a_copy():
    saved = L2()
    loaded = L2()
    saved.end_task(torch.nn.Linear(2, 2), None)
    loaded.load_state_dict(saved.state_dict())
    loaded.quadratic.anchor["weight"].zero_()
    assert saved.quadratic.anchor["weight"].abs().sum() > 0


def test_valid_hyperparameters_are_accepted():
    assert FixedPenalty(amount=1, kind="b", name="x").amount == 1


def test_only_methods_can_be_chained():
    with pytest.raises(TypeError, match="consists of methods, got a int"):
        Method() + 3


def test_a_new_method_is_a_few_lines():
    """A method that edits gradients works in the trainer without changes of the trainer."""

    @dataclass(eq=False)
    class HalvedGradients(Method):
        def before_step(self, model):
            for p in model.parameters():
                p.grad *= 0.5

    data = torch.rand(8, 3), torch.arange(8) % 2
    halved_model = torch.nn.Linear(3, 2)
    reference_model = torch.nn.Linear(3, 2)
    reference_model.load_state_dict(halved_model.state_dict())
    train(halved_model, HalvedGradients(), data, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.2))
    train(reference_model, Method(), data, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    torch.testing.assert_close(halved_model.weight, reference_model.weight)


INPUTS = 64  # sizes of the small net and stream
WIDTH = 20
OUTPUTS = 6
TASKS = 3
MODEL = (INPUTS + 1) * WIDTH + (WIDTH + 1) * OUTPUTS
HEAD = (WIDTH + 1) * OUTPUTS


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (Method(), MODEL),
        (everlearn.EWC(), MODEL),
        (everlearn.LwF(), MODEL),  # a teacher is part of the state, not of prediction
        (everlearn.ER(50), MODEL),  # as is a memory
        (everlearn.GenerativeReplay(hidden=5, latent=2), MODEL),  # and a generator
        (everlearn.PackNet(), MODEL + (TASKS - 1) * HEAD),
        (HAT(rest="frozen"), MODEL + (TASKS - 1) * HEAD + TASKS * WIDTH),  # gates of each task
        (HAT(), MODEL + (TASKS - 1) * (HEAD + WIDTH) + TASKS * WIDTH),  # and biases of each task
        (PNN(laterals="none"), TASKS * MODEL),
        (PNN(laterals="linear"), TASKS * MODEL + (1 + 2) * WIDTH * OUTPUTS),
        (ExpandableRepresentation(50, tune_epochs=1), TASKS * (INPUTS + 1) * WIDTH + (TASKS * WIDTH + 1) * OUTPUTS),
        (Method() + everlearn.PackNet() + everlearn.EWC(), MODEL + (TASKS - 1) * HEAD),
    ],
    ids=lambda value: everlearn.core.chain.label(value) if isinstance(value, Method) else str(value),
)
def test_all_parameters_that_prediction_needs_are_counted(method, needed, small_net, small_stream):
    parameters = everlearn.run(small_net, method, small_stream(), batch_size=64).cost["parameters"]
    assert parameters[-1] == needed and parameters[0] == MODEL + isinstance(method, HAT) * WIDTH


@pytest.mark.parametrize("make", [PNN, ExpandNet, DEN, HAT, lambda: ExpandableRepresentation(50, tune_epochs=1)])
def test_loaded_state_has_the_same_number_of_parameters(make, small_net, small_stream):
    stream = small_stream()
    method = make()
    restored = make()
    model = small_net(stream.inputs, stream.outputs)
    for task in stream:
        everlearn.train(model, method, task, batch_size=32)
    restored.load_state_dict(method.state_dict())
    assert restored.extra_parameters(model) == method.extra_parameters(model) > 0


def test_growing_methods_report_their_parameters(tmp_path):
    method = ExpandableRepresentation(50, tune_epochs=0)
    result = everlearn.run(everlearn.nets.mlp, method, everlearn.streams.digits("class"), iterations=1, out=tmp_path)
    parameters = json.loads(next(tmp_path.glob("*.json")).read_text())["cost"]["parameters"]
    assert parameters == [186_400 * t + (400 * t + 1) * 10 for t in range(1, 6)] and parameters[-1] == 952_010
    assert "952,010" in table([result]) and "190,410" in table([result]), "the growth is shown task by task"
    (row,) = run_rows([result])
    assert row["parameters"] == 952_010 and [task["parameters"] for task in row["diagnostics"]] == parameters
    assert "952,010" in as_markdown([result]) and ",952010," in as_csv([result])


def test_diagnostics_of_a_chain_are_those_of_its_methods(small_net, small_stream):
    method = Method() + everlearn.PackNet()
    assert Method().diagnostics() == {} == method.diagnostics()
    result = everlearn.run(small_net, method, small_stream(), batch_size=16)
    capacities = [task["capacity used"] for task in result.cost["diagnostics"]]
    assert capacities == pytest.approx([0.5, 0.625, 0.71875], abs=1e-3)


def test_probabilities_as_outputs_raise_one_warning():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softmax(-1))
    method = Method()
    batch = Batch(torch.randn(5, 3), torch.arange(5) % 4)
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        method.loss(model, batch)
    method.loss(model, batch)


def test_a_dict_instead_of_a_batch_is_refused_with_the_correction():
    model = torch.nn.Linear(3, 2)
    data = {"input": batch().x, "labels": batch().y}
    with pytest.raises(TypeError, match=r"got a dict: write Batch\(\{") as error:
        Method().loss(model, data)
    advice = str(error.value).split("write ")[1].split(", the inputs by name")[0]
    corrected_batch = eval(advice, {"Batch": Batch, "batch": data})
    expected = torch.nn.functional.cross_entropy(model(data["input"]), data["labels"])
    assert torch.equal(Method().loss(model, corrected_batch), expected)
    with pytest.raises(TypeError, match=r"got a list: write Batch\(x, y\)\."):
        Method().loss(model, [batch().x, batch().y])


def test_a_misspelled_hook_is_refused():
    with pytest.raises(TypeError, match=r"Mine\.befor_step is not a hook .* rename it to before_step"):

        class Mine(Method):
            def befor_step(self, model):
                pass

    with pytest.raises(TypeError, match="rename it to end_task"):

        class Inherited(EWC):
            def end_tasks(self, model, task):
                pass


def test_functions_that_are_no_hooks_are_allowed():
    class Mine(Method):
        def observed(self):
            """Has other arguments than ``observe``."""

        def predict(self, model, x, task=None):
            return self.predicts(model, x, task)

        def predicts(self, model, x, task=None):
            """Stands beside ``predict``."""

        def importance_of(self, model):
            pass

        def _befor_step(self, model):
            pass

    Mine()


@pytest.mark.parametrize("make", [EWC, MAS, L2, SI, LwF, lambda: EWC() + LwF()])
@pytest.mark.parametrize("has_ids", [True, False])
def test_a_task_that_has_not_ended_is_noticed(make, has_ids):
    def tasks():
        x = torch.rand(8, 3)
        y = torch.arange(8) % 2
        return [Task((x, y), id=k if has_ids else None) for k in range(2)]

    def step(method, model, task):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        method.loss(model, next(iter(task.batches(8)))).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)

    first, second = tasks()
    method = make()
    model = nn.Linear(3, 2)
    method.begin_task(model, first)
    step(method, model, first)
    method.begin_task(model, first)  # training resumes
    if has_ids:
        method.begin_task(model, tasks()[0])  # a further chunk
    method.load_state_dict(method.state_dict())
    method.begin_task(model, first)
    step(method, model, first)
    with pytest.warns(UserWarning, match="does not protect what was learned since the last begin_task"):
        method.begin_task(model, second)
    step(method, model, second)
    method.end_task(model, second)
    method.begin_task(model, tasks()[0])
