"""Loops of one's own with networks that grow: what is forgotten is told."""

import pytest
import torch
from torch import nn

from everlearn import DEN, ER, EWC, ExpandableRepresentation, ExpandNet, Method, nets
from everlearn.growth import widen
from everlearn.tracing import links

GROWING = [lambda: ExpandNet(units=4, threshold=0.0), lambda: DEN(units=4, threshold=0.0)]
ids = pytest.mark.parametrize("make", GROWING, ids=["expandnet", "den"])


def loop(method, stream, tasks=2, epochs=2, plan=1.0, begin=True, own=True, after=True, by_hand=None):
    """The guide's loop, with what people forget."""
    torch.manual_seed(0)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    for task in stream.tasks[:tasks]:
        task.steps = None if plan is None else int(plan * task.planned_steps(32, epochs))
        if begin:
            method.begin_task(model, task)
        optimizer = torch.optim.Adam([*model.parameters(), *(method.parameters() if own else ())], fused=True)
        for step, batch in enumerate(task.batches(32, epochs)):
            optimizer.zero_grad()
            method.loss(model, batch).backward()
            method.before_step(model)
            optimizer.step()
            if after:
                method.after_step(model)
            if by_hand and task.id and step in (0, 1, 2):
                by_hand(method, model)
        method.end_task(model, task)
    return model


@ids
def test_a_whole_loop_grows(make, small_stream):
    method = make()
    loop(method, small_stream())
    assert method.facts()["units added so far"] > 0


@ids
@pytest.mark.parametrize(
    ("forgotten", "told"),
    [
        ({"begin": False}, r"knows of no task: call begin_task\(model, task\) before the first step"),
        ({"own": False}, r"does not move \w+'s own parameters: make it after begin_task"),
        ({"after": False}, "after_step was not called"),
        ({"plan": None}, "has not looked whether to grow.* set task.steps"),
    ],
)
def test_what_a_loop_forgets_is_told(make, forgotten, told, small_stream):
    with pytest.raises(ValueError, match=told):
        loop(make(), small_stream(), **forgotten)


@ids
@pytest.mark.parametrize("plan", [3.0, 0.3])
def test_another_length_than_planned_is_told(make, plan, small_stream):
    with pytest.warns(UserWarning, match=r"was learned for \d+ steps, but \w+ had been told \d+ \(task.steps\)"):
        loop(make(), small_stream(), plan=plan)


def test_without_a_plan_one_looks_oneself(small_stream):
    method = GROWING[0]()
    loop(method, small_stream(), plan=None, by_hand=lambda m, model: m.look_now(model))
    assert method.facts()["units added so far"] > 0
    method = GROWING[1]()
    loop(method, small_stream(), plan=None, by_hand=lambda m, model: m.turn(model))
    assert method.facts()["units added so far"] > 0


def test_the_expandable_representation_tells_too(small_stream):
    with pytest.raises(ValueError, match="knows of no task: call begin_task"):
        loop(ExpandableRepresentation(50), small_stream(), begin=False)
    with pytest.raises(ValueError, match="does not move ExpandableRepresentation's own parameters"):
        loop(ExpandableRepresentation(50), small_stream(), own=False)
    loop(ExpandableRepresentation(50), small_stream())


def test_its_export_is_a_plain_module(small_stream):
    stream = small_stream()
    method = ExpandableRepresentation(50)
    model = loop(method, stream, tasks=3)
    alone, x = method.export(model), stream[0].test.x
    torch.testing.assert_close(alone(x), method.predict(model, x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in alone.modules())
    torch.testing.assert_close(torch.export.export(alone, (x,)).module()(x), alone(x))
    before = {n: v.clone() for n, v in alone.state_dict().items()}
    for p in model.parameters():
        nn.init.zeros_(p)
    assert all(torch.equal(v, before[n]) for n, v in alone.state_dict().items())  # a copy, of its own


@ids
def test_parameters_are_counted_and_statistics_are_not(make, small_stream):
    stream, method = small_stream(), make()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, stream.outputs))
    task = stream[0]
    task.steps = 1
    method.begin_task(model, task)
    method.end_task(model, task)
    assert method.facts()["all parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "method", [Method(), ER(10), EWC(), ExpandableRepresentation(10)], ids=lambda m: type(m).__name__
)
def test_predict_is_a_test_whatever_the_mode(method):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(8, 4)
    model[1].train()
    model[0].eval()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    said = method.predict(model, x)
    assert model[1].training and not model[0].training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(said, model.eval()(x))


def test_a_norm_of_another_width_is_refused():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3)
    )
    assert links(net, {"0": ["1", "2"]})[0].norms == ("1",)
    with pytest.raises(ValueError, match="'3' is for 6 units, '0' has 4"):
        links(net, {"0": ["3", "2"]})


def test_widen_wants_a_link():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"takes a link, as everlearn\.tracing\.links\(model\) finds it"):
        widen(net, "0", 5)
    with pytest.raises(TypeError, match=r"got .* and 2\.5"):
        widen(net, links(net)[0], 2.5)
