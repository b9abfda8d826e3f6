"""Running statistics: methods warn that they do not protect them, and Freeze("statistics") does."""

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
from tests import helpers

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
    """Five digits, then the other five, inverted and brighter, which shifts the mean and variance of activations."""
    (x, y), _ = streams.digits_data()
    is_first_task = y < 5
    return (x[is_first_task], y[is_first_task]), (3.0 - 2 * x[~is_first_task], y[~is_first_task])


def convolutional_net():
    torch.manual_seed(0)
    return nets.cnn((1, 8, 8), 10, channels=(8, 16))


def train_tasks(model, method, tasks, epochs=1):
    adam = lambda parameters: torch.optim.Adam(parameters, 1e-3)
    helpers.train_tasks(model, method, tasks, epochs=epochs, batch_size=32, optimizer=adam)


def train_by_penalty(model, method, tasks, epochs=1):
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


def copy_statistics(model):
    return {n: b.clone() for n, b in model.named_buffers()}


@pytest.mark.parametrize("name", UNPROTECTED)
def test_unprotected_statistics_raise_one_warning_that_names_them(name):
    model = convolutional_net()
    method = UNPROTECTED[name]()
    first, second = ((x[:96], y[:96]) for x, y in shifted_tasks())
    train_tasks(model, method, [first])  # without a warning, which would be an error
    with pytest.warns(UserWarning, match=rf"statistics of 0\.1, 1\.1 \(2 in all, BatchNorm2d\).*{name}") as caught:
        train_tasks(model, method, [second], epochs=2)
    assert len(caught) == 1


@pytest.mark.parametrize("kind", [Method, Freeze, PackNet, HAT, PNN, ExpandNet, DEN, ExpandableRepresentation])
def test_methods_with_statistics_per_task_or_without_protection_do_not_warn(kind):
    train_tasks(convolutional_net(), kind(), [(x[:96], y[:96]) for x, y in shifted_tasks()])


def test_a_loop_that_only_adds_the_penalty_raises_the_warning():
    model = convolutional_net()
    tasks = [(x[:96], y[:96]) for x, y in shifted_tasks()]
    with pytest.warns(UserWarning, match=r'EWC\(…\) \+ Freeze\("statistics"\)'):
        train_by_penalty(model, EWC(1.0), tasks)


@pytest.mark.parametrize("freeze_first", [True, False], ids=["freeze first", "freeze last"])
@pytest.mark.parametrize("name", UNPROTECTED)
def test_frozen_statistics_are_constant_and_raise_no_warning(name, freeze_first):
    model = convolutional_net()
    method = UNPROTECTED[name]()
    freeze = Freeze("statistics")
    method = freeze + method if freeze_first else method + freeze
    tasks = [(x[:96], y[:96]) for x, y in shifted_tasks()]
    train_tasks(model, method, tasks[:1])
    frozen_statistics = copy_statistics(model)
    initial_scale = model[0][1].weight.detach().clone()
    train_tasks(model, method, tasks[1:])
    assert all(torch.equal(v, frozen_statistics[n]) for n, v in copy_statistics(model).items())
    assert not torch.equal(model[0][1].weight, initial_scale), "scales and shifts are still trained"


def test_protected_weights_still_forget_without_frozen_statistics():
    """EWC(1e6) hardly moves a weight, and the first task is forgotten through the statistics alone."""
    tasks = shifted_tasks()
    accuracy_drop = {}
    for frozen in (False, True):
        model = convolutional_net()
        train_tasks(model, Method(), tasks[:1], epochs=10)
        initial_accuracy = accuracy(model, tasks[0])
        initial_weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        method = EWC(1e6) + Freeze("statistics") if frozen else EWC(1e6)
        method.end_task(model, tasks[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_by_penalty(model, method, tasks[1:])
        max_change = max(float((p.detach() - initial_weights[n]).abs().max()) for n, p in model.named_parameters())
        accuracy_drop[frozen] = initial_accuracy - accuracy(model, tasks[0])
        assert initial_accuracy > 95
        assert max_change < 0.02
    assert accuracy_drop[False] > 30
    assert accuracy_drop[True] < 3


def test_frozen_layers_use_running_statistics_in_any_mode():
    model = convolutional_net()
    method = Freeze("statistics")
    x, y = shifted_tasks()[0]
    train_tasks(model, method, [(x[:96], y[:96])])
    reference = copy.deepcopy(model).eval()
    model.train()
    assert torch.equal(model(x[:8]), reference(x[:8]))


def test_a_penalty_before_the_forward_pass_raises_no_warning():
    model = convolutional_net()
    method = EWC(1.0) + Freeze("statistics")
    first, second = ((x[:64], y[:64]) for x, y in shifted_tasks())
    train_by_penalty(model, method, [first])
    model.train()
    loss = method.penalty(model) + F.cross_entropy(model(second[0]), second[1])
    assert loss.isfinite()


@pytest.mark.parametrize("calls_begin_task", [True, False])
def test_a_loop_that_only_calls_loss_of_replay_raises_the_warning(calls_begin_task):
    model = convolutional_net()
    method = ER(50)
    first, second = ((x[:64], y[:64]) for x, y in shifted_tasks())
    method.loss(model, Batch(*first))
    method.end_task(model, first)
    if calls_begin_task:
        method.begin_task(model, second)
    with pytest.warns(UserWarning, match="The running statistics of"):
        method.loss(model, Batch(*second))


def test_statistics_are_frozen_after_loading_without_a_begun_task():
    model = convolutional_net()
    method = Freeze("statistics")
    first, second = ((x[:64], y[:64]) for x, y in shifted_tasks())
    train_by_penalty(model, method, [first])
    restored_model = convolutional_net()
    restored_method = Freeze("statistics")
    restored_model.load_state_dict(model.state_dict())
    restored_method.load_state_dict(method.state_dict())
    restored_method.begin_task(restored_model, second)
    frozen_statistics = copy_statistics(restored_model)
    restored_model.train()(second[0])
    assert all(torch.equal(v, frozen_statistics[n]) for n, v in copy_statistics(restored_model).items())


def test_a_copied_model_has_one_hook_and_is_freed_like_the_original():
    model = convolutional_net()
    method = Freeze("statistics")
    first = tuple(v[:64] for v in shifted_tasks()[0])
    train_by_penalty(model, method, [first])
    copied_model = copy.deepcopy(model)
    copied_method = copy.deepcopy(method)
    copied_method.begin_task(copied_model, first)
    assert [len(layer._forward_pre_hooks) for layer in tracking_layers(copied_model).values()] == [1, 1]
    copied_method.detach(copied_model)
    assert [len(layer._forward_pre_hooks) for layer in tracking_layers(copied_model).values()] == [0, 0]
    assert [len(layer._forward_pre_hooks) for layer in tracking_layers(model).values()] == [1, 1]


def test_statistics_stay_frozen_after_loading_and_are_free_after_detach():
    model = convolutional_net()
    method = Freeze("statistics") + ER(50)
    tasks = [(x[:96], y[:96]) for x, y in shifted_tasks()]
    train_tasks(model, method, tasks[:1])
    restored_model = convolutional_net()
    restored_method = Freeze("statistics") + ER(50)
    restored_model.load_state_dict(model.state_dict())
    restored_method.load_state_dict(method.state_dict())
    frozen_statistics = copy_statistics(restored_model)
    train_tasks(restored_model, restored_method, tasks[1:])
    assert all(torch.equal(v, frozen_statistics[n]) for n, v in copy_statistics(restored_model).items())
    restored_method.detach(restored_model)
    restored_model.train()(tasks[1][0][:8])
    assert not any(torch.equal(v, frozen_statistics[n]) for n, v in copy_statistics(restored_model).items())


def test_chunks_of_the_first_task_update_its_statistics():
    x, y = shifted_tasks()[0]
    stream = streams.online(streams.from_tasks([((x[:64], y[:64]), (x[:8], y[:8]))] * 2, scenario="domain"), chunk=32)
    model = convolutional_net()
    method = Freeze("statistics")
    counts = []
    for chunk in stream:
        everlearn.train(model, method, chunk, batch_size=32)
        counts.append(int(model[0][1].num_batches_tracked))
    assert counts == [1, 2, 2, 2]


def test_statistics_of_a_compiled_model_are_frozen():
    model = convolutional_net()
    method = Freeze("statistics")
    compiled = torch.compile(model, backend="eager")
    x, y = shifted_tasks()[0]
    compiled.train()(x[:8])
    method.end_task(compiled, (x, y))
    frozen_statistics = copy_statistics(model)
    compiled.train()(x[:8])
    assert all(torch.equal(v, frozen_statistics[n]) for n, v in copy_statistics(model).items())


def test_only_layers_with_running_statistics_are_tracked():
    model = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2),
        nn.GroupNorm(1, 2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.LayerNorm(2),
    )
    assert list(tracking_layers(nn.DataParallel(model))) == ["0", "4"]


def test_a_model_without_running_statistics_raises_no_warning():
    model = nets.mlp((1, 8, 8), 10, hidden=(8,))
    method = EWC(1.0)
    train_by_penalty(model, method, [(x[:64], y[:64]) for x, y in shifted_tasks()])
    assert method.loss(model, Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))).isfinite()
