"""What a method costs inside other people's trainers, as ratios of steps taken in turns in one run.

    python benchmarks/integrations.py [ROUNDS]

For each host: its step with the callback and a method that does nothing (fine-tuning), against its step alone; and
with methods after a task, against their loss written into the host's by hand. Seconds are of the process's own time,
on one thread. Target: 1.05 for what costs no second pass; LwF and ER ask the model once more than by hand.
"""

import logging
import sys
import tempfile
import time
import warnings

import lightning.pytorch as L
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader, TensorDataset

from everlearn import ER, EWC, Batch, DERpp, LwF, Method, nets
from everlearn.integrations import huggingface, lightning

warnings.simplefilter("ignore")
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS, SIZE = 60, 32


class Module(L.LightningModule):
    """A perceptron, and a method where its loss is written in by hand."""

    def __init__(self, method=None):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.method = nets.mlp(784, 10), method

    def forward(self, x):
        """Logits."""
        return self.net(x)

    def training_step(self, batch, index):
        """Cross-entropy."""
        return (
            F.cross_entropy(self(batch[0]), batch[1]) if self.method is None else self.method.loss(self, Batch(*batch))
        )

    def configure_optimizers(self):
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def by_lightning():
    """Functions that take the steps, by name."""
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 128, 784), torch.randint(10, (STEPS * 128,))), 128)

    def fit(callbacks=(), method=None):
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(Module(method), loader)

    return hosted(fit, Module, tuple(next(iter(loader))), lightning.Continual)


class Trainer(transformers.Trainer):
    """With a method where its loss is written in by hand."""

    method = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        """That of the model."""
        if self.method is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        y = inputs.pop("labels")
        return self.method.loss(huggingface.Outputs(model), Batch(dict(inputs), y))


def by_hugging_face():
    """Functions that take the steps, by name."""
    config = transformers.BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    ids, y = torch.randint(500, (STEPS * SIZE, 16)), torch.randint(2, (STEPS * SIZE,))
    data = [{"input_ids": i, "labels": label} for i, label in zip(ids, y.tolist(), strict=True)]

    def model():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(config)

    def fit(callbacks=(), method=None):
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(), num_train_epochs=1, per_device_train_batch_size=SIZE, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, logging_strategy="no", optim="sgd",
        )  # fmt: skip
        trainer = Trainer(model(), arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.method = method
        trainer.train()

    return hosted(
        fit, lambda: huggingface.Outputs(model()), ({"input_ids": ids[:SIZE]}, y[:SIZE]), huggingface.Continual
    )


def hosted(fit, model, batch, callback):
    """All that is compared; consolidation, which is no step, is left out."""
    ways = {"alone": fit, "with fine-tuning": lambda: fit([callback(Method())])}
    for held in (EWC(1e-3, labels="true"), LwF(), ER(256), DERpp(256)):
        net = model()
        held.begin_task(net, [batch])
        held.loss(net, Batch(*batch))
        held.end_task(net, [batch])
        held.begin_task = held.end_task = lambda model, task: None
        name = type(held).__name__
        ways[f"{name} by hand"] = lambda held=held: fit(method=held)
        ways[f"{name} by the callback"] = lambda held=held: fit([callback(held)])
    return ways


def main(rounds):
    """Best of several rounds, in turns."""
    for host, make in {"Lightning": by_lightning, "Hugging Face": by_hugging_face}.items():
        ways = make()
        best = dict.fromkeys(ways, float("inf"))
        for turn in range(rounds + 1):
            for name, way in ways.items():
                start = time.process_time()
                way()
                if turn:
                    best[name] = min(best[name], time.process_time() - start)
        plain = best["alone"]
        print(f"{host}: {1000 * plain / STEPS:.1f} ms a step; with the callback {best['with fine-tuning'] / plain:.3f}")
        for name in [way.removesuffix(" by hand") for way in ways if way.endswith(" by hand")]:
            hand, called = best[f"{name} by hand"], best[f"{name} by the callback"]
            print(
                f"  {name}: by hand {hand / plain:.3f}, callback {called / plain:.3f}, ratio {called / hand:.3f}",
                flush=True,
            )


main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
