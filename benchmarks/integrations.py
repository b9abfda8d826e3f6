"""What a method costs inside other people's trainers, as ratios of steps taken in turns in one run.

    python benchmarks/integrations.py [ROUNDS]

For each host: its step with the callback and a method that does nothing (fine-tuning), against its step alone; and with EWC after a
task, against EWC's penalty written into the loss by hand. Seconds are of the process's own time, on one thread. Target: 1.05.
"""

import sys
import tempfile
import time
import warnings

import lightning.pytorch as L
import torch
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader, TensorDataset

from everlearn import EWC, Method, nets
from everlearn.integrations import huggingface, lightning

warnings.simplefilter("ignore")
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
STEPS, SIZE = 60, 32


class Module(L.LightningModule):
    """A perceptron, and a penalty where one is written into the loss."""

    def __init__(self, penalty=None):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.penalty = nets.mlp(784, 10), penalty

    def forward(self, x):
        """Logits."""
        return self.net(x)

    def training_step(self, batch, index):
        """Cross-entropy."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss if self.penalty is None else loss + self.penalty(self)

    def configure_optimizers(self):
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def by_lightning():
    """Functions that take the steps, by name."""
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 128, 784), torch.randint(10, (STEPS * 128,))), 128)

    def fit(callbacks=(), penalty=None):
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(Module(penalty), loader)

    held = EWC(1e-3)
    held.end_task(Module(), [next(iter(loader))])
    return hosted(fit, held, lightning.Continual)


class Trainer(transformers.Trainer):
    """With a penalty where one is written into the loss."""

    penalty = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        """That of the model."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss if self.penalty is None else loss + self.penalty(huggingface.Outputs(model))


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

    def fit(callbacks=(), penalty=None):
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(), num_train_epochs=1, per_device_train_batch_size=SIZE, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, logging_strategy="no", optim="sgd",
        )  # fmt: skip
        trainer = Trainer(model(), arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.penalty = penalty
        trainer.train()

    held = EWC(1e-3, labels="true")
    held.end_task(huggingface.Outputs(model()), [({"input_ids": ids[:SIZE]}, y[:SIZE])])
    return hosted(fit, held, huggingface.Continual)


def hosted(fit, held, callback):
    """The four that are compared; consolidation, which is no step, is left out."""
    held.end_task = lambda model, task: None
    return {
        "alone": fit,
        "with fine-tuning": lambda: fit([callback(Method())]),
        "EWC by hand": lambda: fit(penalty=held.penalty),
        "EWC by the callback": lambda: fit([callback(held)]),
    }


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
        plain, hand = best["alone"], best["EWC by hand"]
        print(
            f"{host}: {1000 * plain / STEPS:.1f} ms a step; with the callback {best['with fine-tuning'] / plain:.3f}; EWC by hand "
            f"{hand / plain:.3f}, by the callback {best['EWC by the callback'] / plain:.3f} = {best['EWC by the callback'] / hand:.3f} of it"
        )


main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
