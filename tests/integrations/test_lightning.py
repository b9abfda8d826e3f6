"""Lightning's Trainer and a plain training loop give equal weights on the same batches."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from everlearn import (
    AGEM,
    DER,
    ER,
    EWC,
    HAT,
    MAS,
    SI,
    Batch,
    Gaussian,
    GenerativeReplay,
    LwF,
    Method,
    PackNet,
    Task,
    streams,
)
from everlearn.core.task import as_task
from tests.helpers import parameter_vector

L = pytest.importorskip("lightning.pytorch")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of Lightning about workers, loggers and torch
    pytest.mark.enable_socket,
]
METHODS = {
    "finetune": Method,
    "ewc": lambda: EWC(50.0),
    "mas": lambda: MAS(0.5),
    "si": lambda: SI(20.0),
    "lwf": lambda: LwF(2.0),
    "er": lambda: ER(60),
    "der": lambda: DER(60),
    "agem": lambda: AGEM(60),
    "packnet": PackNet,
    "hat": lambda: HAT(anneal="task"),
    "generative": lambda: GenerativeReplay(hidden=20, latent=5),
    "chain": lambda: EWC(50.0) + ER(60),
}


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return adam(self.parameters())


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture
def tasks():
    (x, y), _ = streams.digits_data()
    loaders = []
    for k in range(2):
        selected = (y == 2 * k) | (y == 2 * k + 1)
        loaders.append(DataLoader(TensorDataset(x[selected][:96], y[selected][:96] % 2), 32))
    return loaders


def trainer(callback, **settings):
    return L.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[callback], logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"enable_checkpointing": False, **settings},
    )  # fmt: skip


def train_with_loop(method, tasks, model, clip=1e9):
    for task in tasks:
        planned = as_task(task)
        planned.steps = 2 * len(task)
        method.begin_task(model, planned)
        optimizer = adam([*model.parameters(), *method.parameters()])
        for epoch in range(2):
            for x, y in task:
                loss = method.loss(model, Batch(x, y, epoch=epoch))
                optimizer.zero_grad()
                loss.backward()
                method.before_step(model)
                torch.nn.utils.clip_grad_norm_([*model.parameters(), *method.parameters()], clip)
                optimizer.step()
                method.after_step(model)
        method.end_task(model, planned)
    return parameter_vector(model)


@pytest.mark.parametrize("name", METHODS)
def test_lightning_equals_a_plain_loop(name, tasks):
    from everlearn.integrations.lightning import Continual

    method = METHODS[name]()
    module = Module()
    for task in tasks:
        trainer(Continual(method)).fit(module, task)
    expected = train_with_loop(METHODS[name](), tasks, Module())
    torch.testing.assert_close(parameter_vector(module), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er", "hat"])
def test_lightning_clips_the_gradient_of_the_total_loss(name, tasks):
    from everlearn.integrations.lightning import Continual

    method = METHODS[name]()
    module = Module()
    for task in tasks:
        trainer(Continual(method), gradient_clip_val=0.01).fit(module, task)
    expected = train_with_loop(METHODS[name](), tasks, Module(), 0.01)
    torch.testing.assert_close(parameter_vector(module), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ewc", "si", "lwf"])
def test_accumulated_micro_batches_equal_full_batches(name, tasks):
    from everlearn.integrations.lightning import Continual

    halves = [DataLoader(task.dataset, 16) for task in tasks]
    method = METHODS[name]()
    module = Module()
    for task in halves:
        trainer(Continual(method), accumulate_grad_batches=2).fit(module, task)
    expected = train_with_loop(METHODS[name](), tasks, Module())
    torch.testing.assert_close(parameter_vector(module), expected, rtol=1e-4, atol=1e-6)


class SGDModule(Module):
    """Module with an optimizer that depends on the scale of the gradients."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["er", "der", "lwf"])
def test_an_incomplete_accumulation_window_is_scaled_like_lightning_does(name, tasks):
    """Lightning divides the last, shorter window by the full number of micro-batches, and so is replay."""
    from everlearn.integrations.lightning import Continual

    method = METHODS[name]()
    module = SGDModule()
    for task in tasks:
        trainer(Continual(method), accumulate_grad_batches=2).fit(module, task)
    expected_method = METHODS[name]()
    model = SGDModule()
    for task in tasks:
        expected_method.begin_task(model, as_task(task))
        optimizer = model.configure_optimizers()
        for epoch in range(2):
            for i, (x, y) in enumerate(task):
                (expected_method.loss(model, Batch(x, y, epoch=epoch)) / 2).backward()
                if i in (1, 2):
                    expected_method.before_step(model)
                    optimizer.step()
                    expected_method.after_step(model)
                    optimizer.zero_grad()
        expected_method.end_task(model, as_task(task))
    torch.testing.assert_close(parameter_vector(module), parameter_vector(model), rtol=1e-4, atol=1e-6)


def test_importances_use_the_transferred_batches(tasks):
    """Batches may be changed by the hooks of the transfer to the device."""
    from everlearn.integrations.lightning import Continual

    class Changing(Module):
        def on_after_batch_transfer(self, batch, index):
            return batch[0] / 100, batch[1]

    changed = DataLoader(TensorDataset(tasks[0].dataset.tensors[0] / 100, tasks[0].dataset.tensors[1]), 32)
    methods = []
    for module_class, task in ((Changing, tasks[0]), (Module, changed)):
        methods.append(EWC(50.0))
        trainer(Continual(methods[-1])).fit(module_class(), task)
    actual, expected = (method.quadratic.form.values for method in methods)
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("name", ["ewc", "mas", "lwf", "er"])
def test_other_precisions_are_close(name, precision, tasks):
    from everlearn.integrations.lightning import Continual

    final_weights = []
    for setting in ("32-true", precision):
        method = METHODS[name]()
        module = SGDModule()
        for task in tasks:
            trainer(Continual(method), precision=setting).fit(module, task)
        final_weights.append(parameter_vector(module).double())
    distance = (final_weights[0] - parameter_vector(SGDModule()).double()).norm()
    assert 0 < (final_weights[1] - final_weights[0]).norm() < 0.1 * distance


def test_the_likelihood_of_the_task_is_used_in_every_step(tasks):
    from everlearn.integrations.lightning import Continual

    class Regression(SGDModule):
        def training_step(self, batch, index):
            return Gaussian().loss(self(batch[0]), batch[1])

    pairs = [task.dataset.tensors for task in tasks]
    loaders = [DataLoader(TensorDataset(x, F.one_hot(y, 2).float()), 32) for x, y in pairs]
    final_weights = []
    for is_in_task in (True, False):
        method = LwF(5.0)
        module = Regression()
        for loader in loaders:
            if is_in_task:
                callback = Continual(method, Task(loader, likelihood=Gaussian()))
            else:
                callback = Continual(method, likelihood=Gaussian())
            trainer(callback).fit(module, loader)
        final_weights.append(parameter_vector(module))
    assert torch.equal(*final_weights)


def test_a_submodule_can_be_named(tasks):
    from everlearn.integrations.lightning import Continual

    method = EWC(50.0)
    module = Module()
    for task in tasks:
        trainer(Continual(method, model="net")).fit(module, task)
    assert all(name[0].isdigit() for name in method.quadratic.anchor)
    torch.testing.assert_close(
        parameter_vector(module), train_with_loop(EWC(50.0), tasks, Module()), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", ["ewc", "si", "der", "lwf", "packnet", "hat", "generative"])
def test_a_resumed_fit_equals_an_uninterrupted_one(name, tasks, tmp_path):
    from everlearn.integrations.lightning import Continual

    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "half.ckpt")
            raise KeyboardInterrupt

    expected = train_with_loop(METHODS[name](), tasks, Module())
    method = METHODS[name]()
    module = Module()
    trainer(Continual(method)).fit(module, tasks[0])
    stopped = trainer(Continual(method))
    stopped.callbacks.append(Stop())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        stopped.fit(module, tasks[1])
    # As in a new process, everything comes from the checkpoint.
    resumed_method = METHODS[name]()
    resumed_module = Module()
    trainer(Continual(resumed_method)).fit(
        resumed_module, tasks[1], ckpt_path=tmp_path / "half.ckpt", weights_only=False
    )
    torch.testing.assert_close(parameter_vector(resumed_module), expected, rtol=1e-4, atol=1e-6)


def test_a_fit_that_fails_early_restores_the_module(tasks):
    from everlearn.integrations.lightning import Continual

    class FailsOnce(Module):
        failed = False

        def setup(self, stage):
            if not FailsOnce.failed:
                FailsOnce.failed = True
                raise RuntimeError("out of memory")

    module = FailsOnce()
    method = EWC()
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(Continual(method)).fit(module, tasks[0])
    assert "configure_optimizers" not in vars(module)
    trainer(Continual(method)).fit(module, tasks[0])
    assert method.tasks == 1


def test_two_optimizers_are_refused(tasks):
    from everlearn.integrations.lightning import Continual

    class TwoOptimizers(Module):
        automatic_optimization = False

        def configure_optimizers(self):
            return [adam(self.parameters()), adam(self.parameters())]

    with pytest.raises(ValueError, match="exactly one optimizer"):
        trainer(Continual(EWC())).fit(TwoOptimizers(), tasks[0])
