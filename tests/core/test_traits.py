"""What methods say of themselves is true, as far as it can be measured."""

import copy
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

import everlearn
from everlearn import METHODS, Batch, Method, Task, Traits, nets, streams
from everlearn.core.traits import traits_of
from everlearn.trainer.cost import state_bytes

TRAITS = {name: traits_of(kind) for name, kind in METHODS.items()}
ROOT = Path(__file__).parents[2]


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.01, momentum=0.9, weight_decay=1e-3)


def data(task):
    """Two classes of a task's own."""
    x = torch.randn(64, 784, generator=torch.Generator().manual_seed(task))
    return x, 2 * task + (x[:, 0] > 0).long()


@cache
def learned(name):
    """Three tasks with the network of the benchmarks; what is kept after each, and what is said of the first one's inputs."""
    torch.manual_seed(0)
    model, method = nets.mlp(784, 10), METHODS[name]()
    size, copies, said = sum(p.numel() for p in model.parameters()), [], []
    for k in range(3):
        allowed = everlearn.allowed_classes("task", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], current_task=k)
        task = Task(data(k), id=k, allowed=allowed)
        everlearn.train(model, method, task, optimizer=sgd, iterations=24, batch_size=16)
        state = method.state_dict()
        rows = state_bytes(state.get("memory", {}))
        copies.append((state_bytes(state) - rows) / (4 * size))
        said.append([method.predict(model, data(0)[0], torch.full((64,), t)) for t in range(k + 1)])
    grown = sum(p.numel() for p in model.parameters()) - size
    return SimpleNamespace(state=state, copies=copies, said=said, model_grew=grown)


def test_every_method_has_traits_of_its_own():
    assert all(isinstance(t, Traits) and t.pro and t.con for t in TRAITS.values())


def test_a_method_of_ones_own_needs_no_traits(small_net, small_stream):
    class Mine(everlearn.EWC):
        pass

    assert traits_of(Mine) is None
    everlearn.run(small_net, Mine(), small_stream(), epochs=1)


@pytest.mark.parametrize("name", METHODS)
def test_who_keeps_no_examples_has_none_in_its_state(name):
    seen = {tuple(row.tolist()) for k in range(3) for row in data(k)[0]}
    tensors = [v for v in tree_leaves(learned(name).state) if isinstance(v, torch.Tensor) and v.numel() % 784 == 0]
    kept = {tuple(row.tolist()) for v in tensors for row in v.reshape(-1, 784)} & seen
    assert bool(kept) == TRAITS[name].keeps_examples


@pytest.mark.parametrize("name", METHODS)
def test_copies_of_the_model(name):
    for tasks, copies in enumerate(learned(name).copies, 1):
        if tasks > 1:  # teachers and grown parts come with the second task
            assert copies == pytest.approx(TRAITS[name].copies_after(tasks), rel=0.15, abs=0.1)


@pytest.mark.parametrize("name", METHODS)
def test_who_does_not_grow_keeps_its_size_but_for_output_layers(name):
    found = learned(name)
    assert found.model_grew == 0, "what is added is the method's own, where it is counted"
    assert (found.copies[2] - found.copies[1] > 0.03) == TRAITS[name].grows


@pytest.mark.parametrize("name", METHODS)
def test_who_forgets_nothing_says_the_same_for_ever(name):
    first, *later = [said[0] for said in learned(name).said]
    assert all(torch.equal(first, now) for now in later) == TRAITS[name].zero_forgetting


@pytest.mark.parametrize("name", METHODS)
def test_who_needs_the_task_answers_by_it(name):
    first, second, _ = learned(name).said[-1]
    assert torch.equal(first, second) == (not TRAITS[name].needs_task)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "finetune"])
def test_who_needs_no_boundaries_differs_from_fine_tuning_without_them(name):
    def ends(method):
        torch.manual_seed(0)
        model = nets.mlp(784, 10, hidden=(16,))
        optimizer = sgd([*model.parameters(), *method.parameters()])
        for x, y in (data(0), data(1)):
            for i in torch.arange(64).split(8):
                loss = method.loss(model, Batch(x[i], y[i]))
                optimizer.zero_grad()
                loss.backward()
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
        return model[1].weight.detach()

    settings = TRAITS[name].without_boundaries
    if settings is None:
        try:
            assert torch.equal(ends(METHODS[name]()), ends(Method()))
        except ValueError as error:
            assert "begin_task" in str(error)
    else:
        soon = {"consolidate_every": 3} if "consolidate_every" in settings else settings  # the run is short
        assert not torch.equal(ends(METHODS[name](**soon)), ends(Method()))


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if n != "finetune" and not t.needs_labels])
def test_who_needs_no_labels_protects_a_trained_model_by_inputs_alone(name):
    first, second = streams.split(*streams.digits_data(), tasks=2, scenario="task", class_order=range(4))
    x, plain = first.train.x, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    torch.manual_seed(0)
    trained = nets.mlp((1, 8, 8), 4, hidden=(32,))
    everlearn.train(trained, Method(), first, optimizer=plain, batch_size=16)

    def moved(method):
        model, unlabelled = copy.deepcopy(trained), Task(x, id=0, allowed=first.allowed)
        before = model(x)[:, :2].softmax(1).detach()
        method.begin_task(model, unlabelled)
        method.end_task(model, unlabelled)
        everlearn.train(model, method, second, optimizer=plain, epochs=3, batch_size=16)
        now = method.predict(model, x, torch.zeros(len(x), dtype=torch.long))[:, :2].softmax(1).detach()
        return float((now - before).norm())

    firmly = {"l2": {"strength": 1.0}, "mas": {"strength": 1.0}, "ewc": {"cap": 10.0}}
    assert moved(METHODS[name](**firmly.get(name, {}))) < 0.8 * moved(Method())


def test_the_page_says_what_the_traits_say():
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\w.*", page, re.MULTILINE)  # not those of options
    should = [*map(needs_and_costs, METHODS), *(f"| `{name}` | {t.pro} | {t.con} |" for name, t in TRAITS.items())]
    assert rows == should, "\n".join(["The rows of both tables should read:", *should])


def needs_and_costs(name):
    """A row of the page's first table."""
    t, yes = TRAITS[name], lambda trait: "yes" if trait else "no"
    weak = dict.fromkeys(t.weak, "no") | ({"domain": "infers", "class": "infers"} if t.needs_task else {})
    boundaries = "yes" if t.without_boundaries is None else "no"
    if t.without_boundaries:
        boundaries = f"no, with `{next(iter(t.without_boundaries))}`"
    keeps = " and examples" if t.keeps_examples else ""
    memory = ("" if keeps and t.memory == "0" else t.memory) + keeps
    step = f"{t.step:g}" + (f" + {t.step_growth:g} (N - 3)" if t.step_growth else "")
    cells = [
        f"`{name}`",
        *(weak.get(s, "yes") for s in ("task", "domain", "class")),
        yes(t.zero_forgetting),
        yes(t.grows),
        yes(t.needs_labels),
        boundaries,
        memory.removeprefix(" and "),
        step,
    ]
    return f"| {' | '.join(cells)} |"
