import pytest
import torch
from torch import nn

from everlearn import Freeze, Task, nets, streams, train

OPTIMIZERS = [
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
]


def body(model):
    return {k: v.clone() for k, v in model.state_dict().items() if not k.startswith("4.")}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("keep", [False, True])
def test_only_the_output_layer_moves_after_the_first_task(optimizer, keep):
    stream = streams.digits("class")
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))
    method = Freeze()
    first = train(model, method, stream[0], optimizer=optimizer)
    old_body = body(model)
    old_head = model[-1].weight.detach().clone()
    for task in stream.tasks[1:3]:
        train(model, method, task, optimizer=first.optimizer if keep else optimizer)
    new_body = body(model)
    assert any(k.endswith("running_mean") for k in old_body), "the model has running statistics to freeze"
    assert all(torch.equal(old_body[k], new_body[k]) for k in old_body)
    assert not torch.equal(old_head, model[-1].weight)


def test_statistics_are_frozen_in_a_compiled_model_too():
    model = nets.cnn((1, 8, 8), 10, channels=(4,))
    method = Freeze()
    model[0].requires_grad_(False)  # so that freezing changes nothing for the compiler
    compiled = torch.compile(model, backend="eager")
    stream = streams.digits("class")
    train(compiled, method, stream[0])
    old_mean = model[0][1].running_mean.clone()
    train(compiled, method, stream[1])
    assert torch.equal(old_mean, model[0][1].running_mean)


def test_detach_unfreezes_and_removes_all_hooks():
    model = nets.cnn((1, 8, 8), 10, channels=(4,))
    method = Freeze()
    for t in range(2):
        method.begin_task(model, Task((torch.rand(4, 1, 8, 8), torch.arange(4)), id=t))
    method.detach(model)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_revisited_first_task_stays_frozen_after_a_resume():
    tasks = [Task((torch.rand(4, 3), torch.arange(4) % 2), id=t) for t in (0, 1)]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    method = Freeze()
    for task in tasks:
        method.begin_task(model, task)
    resumed = Freeze()
    new_model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    resumed.load_state_dict(method.state_dict())
    resumed.begin_task(new_model, tasks[0])
    assert [p.requires_grad for p in new_model.parameters()] == [False, False, True, True]


def test_the_output_layer_can_be_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    method = Freeze(output="0")
    for t in range(2):
        method.begin_task(model, Task((torch.rand(4, 3), torch.arange(4) % 2), id=t))
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


def test_chunks_of_one_task_do_not_freeze():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    method = Freeze()
    for _ in range(3):
        method.begin_task(model, Task((torch.rand(4, 3), torch.arange(4) % 2), id=0))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("what", ["features", "statistics"])
def test_a_task_without_an_id_that_begins_again_is_resumed(what):
    model = nets.cnn((1, 8, 8), 10, channels=(4,))
    method = Freeze(what)
    for _ in range(2):
        method.begin_task(model, None)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    method.end_task(model, None)
    for _ in range(2):
        method.begin_task(model, None)
    assert model[0][0].weight.requires_grad == (what == "statistics")
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 1


def test_without_a_linear_layer_there_is_no_output_to_train():
    method = Freeze()
    model = nn.Conv2d(1, 1, 1)
    method.begin_task(model, None)
    method.end_task(model, None)
    with pytest.raises(ValueError, match=r"Conv2d has no nn.Linear layer"):
        method.begin_task(model, None)


class Tied(nn.Module):
    """A model whose output layer shares its weight with the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight

    def features(self, t):
        return torch.relu(self.mix(self.words(t).mean(1)))

    def forward(self, t):
        return self.head(self.features(t))


def test_an_output_layer_tied_to_an_embedding_is_refused_before_training():
    model = Tied()
    t = torch.randint(11, (32, 4))
    with pytest.raises(
        ValueError, match=r"'head' shares its weight with words.weight.* model.head.weight = nn.Parameter"
    ):
        Freeze().begin_task(model, Task((t, t[:, 0]), id=0))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    method = Freeze()
    train(model, method, Task((t, t[:, 0]), id=0), optimizer=OPTIMIZERS[1], batch_size=8)
    old_features = model.features(t)
    old_head = model.head.weight.detach().clone()
    train(model, method, Task((t, t[:, 1]), id=1), optimizer=OPTIMIZERS[1], batch_size=8)
    assert torch.equal(model.features(t), old_features) and not torch.equal(model.head.weight, old_head)


def test_a_loop_without_begin_task_raises():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"Freeze.end_task was called before begin_task"):
        Freeze().end_task(model, None)
