"""Fabric and Accelerate give the weights of a plain loop, with a method attached."""

import pytest
import torch
import torch.nn.functional as F

from tests.core.test_attachment import METHODS, as_task, net, tasks, train  # noqa: F401 - tasks is a fixture
from tests.helpers import state_vector

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the hosts
    pytest.mark.enable_socket,
]


def fabric():
    host = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return host.setup, host.backward


def accelerate():
    host = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return host.prepare, host.backward


@pytest.mark.parametrize("host", [fabric, accelerate])
@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er", "derpp", "agem", "packnet", "chain"])
def test_hosts_equal_a_plain_loop(name, host, tasks):  # noqa: F811
    setup, backward = host()
    method = METHODS[name]()
    model = net()
    for number, task in enumerate(tasks):
        torch.manual_seed(number)
        method.begin_task(model, as_task(task))
        parameters = [*model.parameters(), *method.parameters()]
        wrapped, optimizer = setup(model, torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01))
        with method.attach(model, optimizer) as attached:
            for _ in range(3):
                for x, y in task:
                    outputs = wrapped(x)
                    loss = attached.loss(F.cross_entropy(outputs, y), x, y, outputs)
                    optimizer.zero_grad()
                    backward(loss)
                    optimizer.step()
        method.end_task(model, as_task(task))
    expected = train(METHODS[name](), net(), tasks, attach=False)
    torch.testing.assert_close(state_vector(model), expected, rtol=1e-7, atol=1e-9)
