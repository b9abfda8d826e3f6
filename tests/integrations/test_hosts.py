"""Fabric's and Accelerate's steps are the README's, with a method attached."""

import pytest
import torch
import torch.nn.functional as F

from everlearn import Batch
from tests.core.test_attachment import METHODS, learn_ours, net, optimizer_of, tasks, weights, whole  # noqa: F401 - a fixture

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.enable_socket]  # their own; a free port


def fabric():
    host = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return host.setup, host.backward


def accelerate():
    host = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return host.prepare, host.backward


@pytest.mark.parametrize("host", [fabric, accelerate])
@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er", "agem", "packnet"])
def test_hosts_and_the_loop_of_the_readme_end_alike(name, host, tasks):  # noqa: F811
    setup, backward = host()
    method, model = METHODS[name](), net()
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
