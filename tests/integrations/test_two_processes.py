"""Lightning's and Hugging Face's Trainer in two processes give the weights of a loop of two processes."""

import os
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from everlearn import Batch, streams
from everlearn.core.task import as_task
from everlearn.runtime import distributed
from tests.core.test_attachment import METHODS, net
from tests.helpers import parameter_vector

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the hosts
    pytest.mark.enable_socket,
]


def set_environment():
    """Set the variables by which the hosts find out that there are two processes."""
    rank = str(dist.get_rank())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(variables, GROUP_RANK="0", MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")
    os.environ.setdefault("MASTER_PORT", str(random.randint(20000, 60000)))  # not used: the group exists


def train_with_hooks(method, model, loaders, make_optimizer):
    """Train on this process's share of every batch, with averaged gradients; each task sees all its data."""
    for loader in loaders:
        x, y = loader.dataset.tensors
        task = as_task(loader.dataset)
        task.steps = 2 * -(-len(x) // 32)
        method.begin_task(model, task)
        distributed.broadcast_(method.parameters())
        parameters = [*model.parameters(), *method.parameters()]
        optimizer = make_optimizer(parameters)
        for epoch in range(2):
            for rows in torch.arange(len(x)).split(32):
                share = rows[dist.get_rank() :: 2]
                optimizer.zero_grad()
                method.loss(model, Batch(x[share], y[share], epoch=epoch)).backward()
                distributed.average_gradients(parameters, 1.0, 0.0)
                method.before_step(model)
                optimizer.step()
                method.after_step(model)
        method.end_task(model, task)
    return parameter_vector(model)


@pytest.fixture
def loaders(double):
    (x, y), _ = streams.digits_data()
    loaders = []
    for k in range(2):
        rows = (y // 2 == k).nonzero().flatten()[:96]
        loaders.append(DataLoader(TensorDataset(x[rows].double(), y[rows] % 2), 16))
    return loaders


LIGHTNING = [n if n in ("ewc", "er", "hat") else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_in_two_processes(name, run_two_processes, loaders):
    pytest.importorskip("lightning.pytorch")

    def train_both():
        from everlearn.integrations.lightning import Continual
        from tests.integrations.test_lightning import Module, adam, trainer

        set_environment()
        method = METHODS[name]()
        module = Module()
        for loader in loaders:
            # Lightning's own sampler would shuffle.
            shares = DataLoader(loader.dataset, 16, sampler=DistributedSampler(loader.dataset, shuffle=False))
            settings = {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}
            task = loader.dataset if "expandable" in name else None
            trainer(Continual(method, task, model="net"), **settings).fit(module, shares)
        return parameter_vector(module), train_with_hooks(METHODS[name](), Module().net, loaders, adam)

    (first, expected), (second, _) = run_two_processes(train_both)
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first, expected, rtol=1e-7, atol=1e-9)


def test_a_share_of_the_examples_is_refused_where_all_are_needed(run_two_processes, loaders):
    def message():
        dataset = loaders[0].dataset
        loader = DataLoader(dataset, 16, sampler=DistributedSampler(dataset))
        try:
            METHODS["expandable"]().begin_task(net(), as_task(loader))
        except ValueError as error:
            return str(error)

    assert all("gives each process a share" in text for text in run_two_processes(message))


HUGGING_FACE = ["finetune", "ewc", "mas", "si", "lwf", "er", "der", "agem", "packnet", "chain"]


@pytest.mark.parametrize("name", [n if n == "ewc" else pytest.param(n, marks=pytest.mark.slow) for n in HUGGING_FACE])
@pytest.mark.parametrize("clip", [pytest.param(1e9, marks=pytest.mark.slow), 0.01])
def test_hugging_face_in_two_processes(name, clip, run_two_processes, tmp_path):
    pytest.importorskip("transformers")
    from tests.integrations import test_huggingface as hf

    tasks = hf.tasks.__wrapped__()

    def train_with_hooks():
        """Train on this process's share of every batch, as Accelerate divides it, with averaged gradients."""
        from everlearn.integrations.huggingface import Outputs

        method = hf.METHODS[name]()
        model = hf.tiny()
        wrapped = Outputs(model)
        for task in tasks:
            planned = as_task(hf.pairs(task))
            planned.steps = 2 * len(task) // 8
            method.begin_task(wrapped, planned)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
            model.train()
            for epoch in range(2):
                for x, y in hf.pairs(task, 4)[dist.get_rank() :: 2]:
                    optimizer.zero_grad()
                    method.loss(wrapped, Batch(x, y, epoch=epoch)).backward()
                    distributed.average_gradients(list(model.parameters()), 1.0, 0.0)
                    method.before_step(wrapped)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    method.after_step(wrapped)
            method.end_task(wrapped, planned)
        return parameter_vector(model)

    def train_both():
        set_environment()
        settings = {"per_device_train_batch_size": 4, "max_grad_norm": clip, "ddp_backend": "gloo"}
        actual = hf.train_with_trainer(hf.METHODS[name](), tasks, hf.tiny(), tmp_path / "trainer", **settings)
        return actual, train_with_hooks()

    (first, expected), (second, _) = run_two_processes(train_both)
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-8)
