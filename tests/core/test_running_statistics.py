"""Running statistics: methods say that they do not protect them, and Freeze("statistics") does."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everlearn
from everlearn import (
    AGEM,
    DEN,
    DER,
    ER,
    EWC,
    GEM,
    HAT,
    L2,
    MAS,
    PNN,
    SI,
    Batch,
    DERpp,
    ExpandableRepresentation,
    ExpandNet,
    Freeze,
    LwF,
    Method,
    PackNet,
    nets,
    streams,
)
from everlearn.core.running_statistics import tracking_layers

pytestmark = pytest.mark.filterwarnings("error:The running statistics of:UserWarning")

UNPROTECTED = {
    "EWC": lambda: EWC(1.0),
    "SI": lambda: SI(1.0),
    "MAS": lambda: MAS(1.0),
    "L2": lambda: L2(1.0),
    "LwF": LwF,
    "ER": lambda: ER(50),
    "DER": lambda: DER(50),
    "DERpp": lambda: DERpp(50),
    "AGEM": lambda: AGEM(50),
    "GEM": lambda: GEM(50),
}


def shifted_tasks():
    """Five digits, then the other five, brighter and inverted, so that activations have another mean and variance."""
    (x, y), _ = streams.digits_data()
    first = y < 5
    return (x[first], y[first]), (3.0 - 2 * x[~first], y[~first])


def convolutional_net():
    torch.manual_seed(0)
    return nets.cnn((1, 8, 8), 10, channels=(8, 16))


def learn(model, method, tasks, epochs=1, lr=1e-3):
    for task in tasks:
        everlearn.train(model, method, task, epochs=epochs, batch_size=32, optimizer=lambda p: torch.optim.Adam(p, lr))


def learn_by_penalty(model, method, tasks, epochs=1):
    """The README's shortest loop: it neither begins tasks nor edits gradients, and sets the mode in every epoch."""
    for x, y in tasks:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(epochs):
            model.train()
            for inputs, labels in zip(x.split(32), y.split(32), strict=True):
                loss = F.cross_entropy(model(inputs), labels) + method.penalty(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        method.end_task(model, (x, y))


def accuracy(model, task):
    model.eval()
    with torch.no_grad():
        return 100 * float((model(task[0]).argmax(1) == task[1]).float().mean())


def statistics(model):
    return {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("name", UNPROTECTED)
def test_methods_say_once_and_by_name_that_statistics_follow_new_data(name):
    model, method = convolutional_net(), UNPROTECTED[name]()
    first, second = ((x[:96], y[:96]) for x, y in shifted_tasks())
    learn(model, method, [first])  # a warning would be an error here
    with pytest.warns(UserWarning, match=rf"statistics of 0\.1, 1\.1 \(2 in all, BatchNorm2d\).*{name}") as caught:
        learn(model, method, [second], epochs=2)
    assert len(caught) == 1


@pytest.mark.parametrize("kind", [Method, Freeze, PackNet, HAT, PNN, ExpandNet, DEN, ExpandableRepresentation])
def test_methods_that_keep_statistics_for_each_task_or_promise_nothing_are_silent(kind):
    learn(convolutional_net(), kind(), [(x[:96], y[:96]) for x, y in shifted_tasks()])


def test_a_loop_that_only_adds_the_penalty_is_told_too():
    model, tasks = convolutional_net(), [(x[:96], y[:96]) for x, y in shifted_tasks()]
    with pytest.warns(UserWarning, match=r'EWC\(…\) \+ Freeze\("statistics"\)'):
        learn_by_penalty(model, EWC(1.0), tasks)


@pytest.mark.parametrize("first", [True, False], ids=["freeze first", "freeze last"])
@pytest.mark.parametrize("name", UNPROTECTED)
def test_frozen_statistics_stay_and_nobody_complains(name, first):
    model, method = convolutional_net(), UNPROTECTED[name]()
    method = Freeze("statistics") + method if first else method + Freeze("statistics")
    tasks = [(x[:96], y[:96]) for x, y in shifted_tasks()]
    learn(model, method, tasks[:1])
    kept, scale = statistics(model), model[0][1].weight.detach().clone()
    learn(model, method, tasks[1:])
    assert all(torch.equal(v, kept[n]) for n, v in statistics(model).items())
    assert not torch.equal(model[0][1].weight, scale), "scales and shifts go on learning"


def test_held_weights_are_not_enough_and_held_statistics_are():
    """The trial's case: EWC(1e6) hardly moves a weight, and the first task is lost by its statistics."""
    tasks = shifted_tasks()
    ends = {}
    for frozen in (False, True):
        model = convolutional_net()
        learn(model, Method(), tasks[:1], epochs=10)
        before = accuracy(model, tasks[0])
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        method = EWC(1e6) + Freeze("statistics") if frozen else EWC(1e6)
        method.end_task(model, tasks[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learn_by_penalty(model, method, tasks[1:])
        moved = max(float((p.detach() - weights[n]).abs().max()) for n, p in model.named_parameters())
        ends[frozen] = before - accuracy(model, tasks[0])
        assert before > 95
        assert moved < 0.02
    assert ends[False] > 30
    assert ends[True] < 3


def test_frozen_layers_normalize_by_what_they_keep_whatever_mode_the_loop_sets():
    model, method = convolutional_net(), Freeze("statistics")
    x, y = shifted_tasks()[0]
    learn(model, method, [(x[:96], y[:96])])
    reference = copy.deepcopy(model).eval()
    model.train()
    assert torch.equal(model(x[:8]), reference(x[:8]))


def test_a_penalty_that_is_asked_before_the_forward_pass_is_not_mistaken():
    model, method = convolutional_net(), EWC(1.0) + Freeze("statistics")
    first, second = ((x[:64], y[:64]) for x, y in shifted_tasks())
    learn_by_penalty(model, method, [first])
    model.train()
    loss = method.penalty(model) + F.cross_entropy(model(second[0]), second[1])
    assert loss.isfinite()


@pytest.mark.parametrize("begins", [True, False])
def test_a_loop_that_takes_only_the_loss_of_replay_is_told(begins):
    model, method = convolutional_net(), ER(50)
    first, second = ((x[:64], y[:64]) for x, y in shifted_tasks())
    method.loss(model, Batch(*first))
    method.end_task(model, first)
    if begins:
        method.begin_task(model, second)
    with pytest.warns(UserWarning, match="The running statistics of"):
        method.loss(model, Batch(*second))


def test_statistics_are_frozen_again_after_loading_where_no_task_was_begun():
    model, method = convolutional_net(), Freeze("statistics")
    first, second = ((x[:64], y[:64]) for x, y in shifted_tasks())
    learn_by_penalty(model, method, [first])
    other, resumed = convolutional_net(), Freeze("statistics")
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(method.state_dict())
    resumed.begin_task(other, second)
    kept = statistics(other)
    other.train()(second[0])
    assert all(torch.equal(v, kept[n]) for n, v in statistics(other).items())


def test_a_copied_model_has_one_hook_and_is_freed_like_the_original():
    model, method = convolutional_net(), Freeze("statistics")
    first = tuple(v[:64] for v in shifted_tasks()[0])
    learn_by_penalty(model, method, [first])
    copied_model, copied_method = copy.deepcopy(model), copy.deepcopy(method)
    copied_method.begin_task(copied_model, first)
    assert [len(layer._forward_pre_hooks) for layer in tracking_layers(copied_model).values()] == [1, 1]
    copied_method.detach(copied_model)
    assert [len(layer._forward_pre_hooks) for layer in tracking_layers(copied_model).values()] == [0, 0]
    assert [len(layer._forward_pre_hooks) for layer in tracking_layers(model).values()] == [1, 1]


def test_statistics_stay_frozen_after_loading_and_are_free_after_detach():
    model, method = convolutional_net(), Freeze("statistics") + ER(50)
    tasks = [(x[:96], y[:96]) for x, y in shifted_tasks()]
    learn(model, method, tasks[:1])
    other, resumed = convolutional_net(), Freeze("statistics") + ER(50)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(method.state_dict())
    kept = statistics(other)
    learn(other, resumed, tasks[1:])
    assert all(torch.equal(v, kept[n]) for n, v in statistics(other).items())
    resumed.detach(other)
    other.train()(tasks[1][0][:8])
    assert not any(torch.equal(v, kept[n]) for n, v in statistics(other).items())


def test_chunks_of_the_first_task_still_move_its_statistics():
    x, y = shifted_tasks()[0]
    stream = streams.online(streams.from_tasks([((x[:64], y[:64]), (x[:8], y[:8]))] * 2, scenario="domain"), chunk=32)
    model, method = convolutional_net(), Freeze("statistics")
    counts = []
    for chunk in stream:
        everlearn.train(model, method, chunk, batch_size=32)
        counts.append(int(model[0][1].num_batches_tracked))
    assert counts == [1, 2, 2, 2]


def test_the_compiled_model_freezes_too():
    model, method = convolutional_net(), Freeze("statistics")
    compiled = torch.compile(model, backend="eager")
    x, y = shifted_tasks()[0]
    compiled.train()(x[:8])
    method.end_task(compiled, (x, y))
    kept = statistics(model)
    compiled.train()(x[:8])
    assert all(torch.equal(v, kept[n]) for n, v in statistics(model).items())


def test_only_layers_with_statistics_count():
    norms = nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2), nn.GroupNorm(1, 2)
    model = nn.Sequential(*norms, nn.InstanceNorm1d(2, track_running_stats=True), nn.LayerNorm(2))
    assert list(tracking_layers(nn.DataParallel(model))) == ["0", "4"]


def test_a_model_without_such_layers_is_silent():
    model, method = nets.mlp((1, 8, 8), 10, hidden=(8,)), EWC(1.0)
    learn_by_penalty(model, method, [(x[:64], y[:64]) for x, y in shifted_tasks()])
    assert method.loss(model, Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))).isfinite()
