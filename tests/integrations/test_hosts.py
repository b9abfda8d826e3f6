"""Fabric and Accelerate give the weights of the README's loop, with a method attached."""

import pytest
import torch
import torch.nn.functional as F

from everlearn import Batch
from tests.core.test_attachment import (  # noqa: F401 - tasks is a fixture
    METHODS,
    learn_ours,
    net,
    optimizer_of,
    tasks,
    weights,
    whole,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.enable_socket,
]  # warnings of the hosts; they open a port


def fabric():
    host = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return host.setup, host.backward


def accelerate():
    host = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return host.prepare, host.backward


@pytest.mark.parametrize("host", [fabric, accelerate])
@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er", "agem", "packnet"])
def test_hosts_equal_the_loop_of_the_readme(name, host, tasks):  # noqa: F811
    setup, backward = host()
    method = METHODS[name]()
    model = net()
    for task in tasks:
        method.begin_task(model, whole(task))
        wrapped, optimizer = setup(model, optimizer_of(model, method))
        with method.attach(model, optimizer) as attached:
            for epoch in range(3):
                for x, y in task:
                    attached.see(Batch(x, y, epoch=epoch))
                    optimizer.zero_grad()
                    backward(F.cross_entropy(wrapped(x), y))
                    optimizer.step()
        method.end_task(model, whole(task))
    torch.testing.assert_close(weights(model), learn_ours(METHODS[name], tasks), rtol=1e-7, atol=1e-9)
