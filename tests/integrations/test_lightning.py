"""The same batches through Lightning's Trainer and through our own loop give equal weights."""

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

L = pytest.importorskip("lightning.pytorch")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own: about workers, loggers and deprecations of torch
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
    pairs = [(x[(y == 2 * k) | (y == 2 * k + 1)][:96], y[(y == 2 * k) | (y == 2 * k + 1)][:96] % 2) for k in range(2)]
    return [DataLoader(TensorDataset(*pair), 32) for pair in pairs]


def trainer(callback, **settings):
    return L.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[callback], logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"enable_checkpointing": False, **settings},
    )  # fmt: skip


def ours(method, tasks, model, clip=1e9):
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
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_lightning_and_our_loop_end_alike(name, tasks):
    from everlearn.integrations.lightning import Continual

    method, module = METHODS[name](), Module()
    for task in tasks:
        trainer(Continual(method)).fit(module, task)
    torch.testing.assert_close(weights(module), ours(METHODS[name](), tasks, Module()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ewc", "si", "lwf", "er", "hat"])
def test_lightning_clips_the_whole_loss(name, tasks):
    from everlearn.integrations.lightning import Continual

    method, module = METHODS[name](), Module()
    for task in tasks:
        trainer(Continual(method), gradient_clip_val=0.01).fit(module, task)
    torch.testing.assert_close(weights(module), ours(METHODS[name](), tasks, Module(), 0.01), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ewc", "si", "lwf"])
def test_accumulation_makes_the_steps_of_whole_batches(name, tasks):
    from everlearn.integrations.lightning import Continual

    halves = [DataLoader(task.dataset, 16) for task in tasks]
    method, module = METHODS[name](), Module()
    for task in halves:
        trainer(Continual(method), accumulate_grad_batches=2).fit(module, task)
    torch.testing.assert_close(weights(module), ours(METHODS[name](), tasks, Module()), rtol=1e-4, atol=1e-6)


class Plain(Module):
    """By an optimizer that minds how large a gradient is."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["er", "der", "lwf"])
def test_a_window_that_is_not_full_is_a_part_of_a_step(name, tasks):
    """Lightning divides the last, shorter window by all that would fit in; replay is divided alike."""
    from everlearn.integrations.lightning import Continual

    method, module = METHODS[name](), Plain()
    for task in tasks:
        trainer(Continual(method), accumulate_grad_batches=2).fit(module, task)
    other, model = METHODS[name](), Plain()
    for task in tasks:
        other.begin_task(model, as_task(task))
        optimizer = model.configure_optimizers()
        for epoch in range(2):
            for i, (x, y) in enumerate(task):
                (other.loss(model, Batch(x, y, epoch=epoch)) / 2).backward()
                if i in (1, 2):
                    other.before_step(model)
                    optimizer.step()
                    other.after_step(model)
                    optimizer.zero_grad()
        other.end_task(model, as_task(task))
    torch.testing.assert_close(weights(module), weights(model), rtol=1e-4, atol=1e-6)


def test_importances_are_of_what_the_module_gets(tasks):
    """Batches that are changed on their way to the device."""
    from everlearn.integrations.lightning import Continual

    class Changing(Module):
        def on_after_batch_transfer(self, batch, index):
            return batch[0] / 100, batch[1]

    changed = DataLoader(TensorDataset(tasks[0].dataset.tensors[0] / 100, tasks[0].dataset.tensors[1]), 32)
    methods = []
    for kind, task in ((Changing, tasks[0]), (Module, changed)):
        methods.append(EWC(50.0))
        trainer(Continual(methods[-1])).fit(kind(), task)
    one, two = (m.quadratic.form.values for m in methods)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("name", ["ewc", "mas", "lwf", "er"])
def test_other_precisions_are_near(name, precision, tasks):
    from everlearn.integrations.lightning import Continual

    ends = []
    for kind in ("32-true", precision):
        method, module = METHODS[name](), Plain()
        for task in tasks:
            trainer(Continual(method), precision=kind).fit(module, task)
        ends.append(weights(module).double())
    moved = (ends[0] - weights(Plain()).double()).norm()
    assert 0 < (ends[1] - ends[0]).norm() < 0.1 * moved


def test_a_task_s_likelihood_is_that_of_every_step(tasks):
    from everlearn.integrations.lightning import Continual

    class Numbers(Plain):
        def training_step(self, batch, index):
            return Gaussian().loss(self(batch[0]), batch[1])

    numbers = [DataLoader(TensorDataset(x, F.one_hot(y, 2).float()), 32) for x, y in (t.dataset.tensors for t in tasks)]
    ends = []
    for in_task in (True, False):
        method, module = LwF(5.0), Numbers()
        for task in numbers:
            told = (Task(task, likelihood=Gaussian()), None) if in_task else (None, Gaussian())
            trainer(Continual(method, told[0], likelihood=told[1])).fit(module, task)
        ends.append(weights(module))
    assert torch.equal(*ends)


def test_a_submodule_can_be_meant(tasks):
    from everlearn.integrations.lightning import Continual

    method, module = EWC(50.0), Module()
    for task in tasks:
        trainer(Continual(method, model="net")).fit(module, task)
    assert all(name[0].isdigit() for name in method.quadratic.anchor)
    torch.testing.assert_close(weights(module), ours(EWC(50.0), tasks, Module()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ewc", "si", "der", "lwf", "packnet", "hat", "generative"])
def test_a_fit_resumed_from_a_checkpoint_ends_where_one_in_a_row_does(name, tasks, tmp_path):
    from everlearn.integrations.lightning import Continual

    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "half.ckpt")
            raise KeyboardInterrupt

    whole = ours(METHODS[name](), tasks, Module())
    method, module = METHODS[name](), Module()
    trainer(Continual(method)).fit(module, tasks[0])
    stopped = trainer(Continual(method))
    stopped.callbacks.append(Stop())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        stopped.fit(module, tasks[1])
    fresh, again = METHODS[name](), Module()  # another process: all it knows is in the checkpoint
    trainer(Continual(fresh)).fit(again, tasks[1], ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    torch.testing.assert_close(weights(again), whole, rtol=1e-4, atol=1e-6)


def test_a_fit_that_failed_early_leaves_the_module_as_it_was(tasks):
    from everlearn.integrations.lightning import Continual

    class Once(Module):
        failed = False

        def setup(self, stage):
            if not Once.failed:
                Once.failed = True
                raise RuntimeError("no room")

    module, method = Once(), EWC()
    with pytest.raises(RuntimeError, match="no room"):
        trainer(Continual(method)).fit(module, tasks[0])
    assert "configure_optimizers" not in vars(module)
    trainer(Continual(method)).fit(module, tasks[0])
    assert method.tasks == 1


def test_two_optimizers_are_refused(tasks):
    from everlearn.integrations.lightning import Continual

    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self):
            return [adam(self.parameters()), adam(self.parameters())]

    with pytest.raises(ValueError, match="one optimizer"):
        trainer(Continual(EWC())).fit(Two(), tasks[0])
