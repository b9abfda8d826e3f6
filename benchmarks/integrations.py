"""Measure the cost of methods in other trainers, as ratios of alternating steps in one process.

    python benchmarks/integrations.py [ROUNDS]

For each trainer: a step with the callback and fine-tuning relative to a step without the callback, and a step with a
method in the callback relative to the same method in a handwritten loss. Times are process times on one thread. The
target is 1.05; ER has one more forward pass than a handwritten loss, on the replayed examples.
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
NUM_STEPS = 60
LIGHTNING_BATCH = 128
HUGGING_FACE_BATCH = 32


class Module(L.LightningModule):
    """An MLP, with the loss of a method if one is given."""

    def __init__(self, method=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nets.mlp(784, 10)
        self.method = method

    def forward(self, x):
        """Return the logits."""
        return self.net(x)

    def training_step(self, batch, index):
        """Return the cross-entropy, or the loss of the method."""
        x, y = batch
        if self.method is None:
            return F.cross_entropy(self(x), y)
        return self.method.loss(self, Batch(x, y))

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def lightning_variants():
    """Return functions that train with Lightning, by name."""
    num_examples = NUM_STEPS * LIGHTNING_BATCH
    data = TensorDataset(torch.randn(num_examples, 784), torch.randint(10, (num_examples,)))
    loader = DataLoader(data, LIGHTNING_BATCH)

    def fit(callbacks=(), method=None):
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        trainer.fit(Module(method), loader)

    return make_variants(fit, Module, tuple(next(iter(loader))), lightning.Continual)


class Trainer(transformers.Trainer):
    """A Trainer that uses the loss of a method if one is given."""

    method = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Return the loss of the model, or that of the method."""
        if self.method is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        y = inputs.pop("labels")
        return self.method.loss(huggingface.Outputs(model), Batch(dict(inputs), y))


def hugging_face_variants():
    """Return functions that train with Hugging Face, by name."""
    config = transformers.BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    num_examples = NUM_STEPS * HUGGING_FACE_BATCH
    ids = torch.randint(500, (num_examples, 16))
    y = torch.randint(2, (num_examples,))
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, y.tolist(), strict=True)]
    first_batch = ({"input_ids": ids[:HUGGING_FACE_BATCH]}, y[:HUGGING_FACE_BATCH])

    def make_model():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(config)

    def fit(callbacks=(), method=None):
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(),
            num_train_epochs=1,
            per_device_train_batch_size=HUGGING_FACE_BATCH,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
            logging_strategy="no",
            optim="sgd",
        )
        trainer = Trainer(make_model(), arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.method = method
        trainer.train()

    return make_variants(fit, lambda: huggingface.Outputs(make_model()), first_batch, huggingface.Continual)


def make_variants(fit, make_model, batch, callback):
    """Return the variants to compare, by name; consolidation is left out, because it is not part of a step."""
    variants = {"without callback": fit, "fine-tuning": lambda: fit([callback(Method())])}
    for method in (EWC(1e-3, labels="true"), LwF(), ER(256), DERpp(256)):
        model = make_model()
        method.begin_task(model, [batch])
        method.loss(model, Batch(*batch))
        method.end_task(model, [batch])
        method.begin_task = lambda model, task: None
        method.end_task = lambda model, task: None

        name = type(method).__name__
        variants[f"{name} by hand"] = lambda method=method: fit(method=method)
        variants[f"{name} in the callback"] = lambda method=method: fit([callback(method)])
    return variants


def main(rounds):
    """Alternate between the variants, and print ratios of minimum times."""
    for trainer, make in {"Lightning": lightning_variants, "Hugging Face": hugging_face_variants}.items():
        variants = make()
        best = dict.fromkeys(variants, float("inf"))
        # The first round warms up.
        for round_number in range(rounds + 1):
            for name, variant in variants.items():
                start = time.process_time()
                variant()
                if round_number:
                    best[name] = min(best[name], time.process_time() - start)

        baseline = best["without callback"]
        callback_ratio = best["fine-tuning"] / baseline
        print(f"{trainer}: {1000 * baseline / NUM_STEPS:.1f} ms per step; with the callback {callback_ratio:.3f}")
        for name in [variant.removesuffix(" by hand") for variant in variants if variant.endswith(" by hand")]:
            by_hand = best[f"{name} by hand"]
            in_callback = best[f"{name} in the callback"]
            print(
                f"  {name}: by hand {by_hand / baseline:.3f}, callback {in_callback / baseline:.3f}, "
                f"ratio {in_callback / by_hand:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
