"""Methods in Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.attachment import Attachment
from everlearn.core.batch import Batch
from everlearn.core.check import refuse_problems
from everlearn.core.data_source import as_rows
from everlearn.core.forward import next_token_labels, shifts_labels
from everlearn.core.likelihood import Likelihood
from everlearn.core.loss_weight import common_weights, find_ratio, is_close
from everlearn.core.method import Method
from everlearn.core.task import Task, as_task
from everlearn.runtime import files
from everlearn.runtime.optional_imports import import_optional

TrainerCallback: Any = import_optional("transformers", "huggingface", "The Hugging Face callback").TrainerCallback
FILE = "everlearn.pt"


class Outputs(nn.Module):
    """Wrapper of a Hugging Face model that takes a dict of tensors and returns the logits.

    Args:
        model: the Hugging Face model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        """Return the logits."""
        if isinstance(x, Mapping):
            return extract_logits(self.model, self.model(**x))
        return extract_logits(self.model, self.model(x))


class Continual(TrainerCallback):  # type: ignore[misc]
    """Trainer callback that applies a method in ``trainer.train()``; each call is one task.

    The loss that the model computes gets the method's terms. The method's state is saved in the Trainer's checkpoints,
    next to an adapter if there is one, and loaded from there when training resumes. The consolidated state after the
    task is saved in the output folder itself. The Trainer clips the gradient of the total loss. It cannot train
    parameters of the method itself, as HAT has them.

    Args:
        method: the method; use the same object for every task. It sees the model as ``Outputs(model)``, so that names
            of parameters begin with ``model.``.
        task: the data or a ``Task``, for methods that need it; by default the Trainer's data.
        likelihood: distribution of the outputs.
        checkpoint: folder to resume from, if it is not a checkpoint in the Trainer's output folder.
        weight: factor of a mean over the batch's labels in the model's loss, or a function of the model's keyword
            arguments that returns it; by default it is recognized. See ``Attachment.loss``.
    """

    def __init__(
        self,
        method: Method,
        task: Any = None,
        likelihood: Likelihood | None = None,
        checkpoint: str | Path | None = None,
        weight: float | Callable[[dict[str, Any]], float] | None = None,
    ) -> None:
        self.method = method
        self.task = task
        self.likelihood = likelihood
        self.checkpoint = checkpoint
        self.weight = weight
        self._attached: Attachment | None = None
        self._hook: Any = None
        self._loss_kind: str | None = None
        self._max_grad_norm: float | None = None
        self._training_arguments: Any = None
        self._current_task = Task()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin or resume the task, and attach the method to the optimizer."""
        self._detach()  # an interrupted training has left its hooks
        inner_model = kwargs["model"]
        model = Outputs(inner_model)
        data = self.task
        if data is None:
            data = Pairs(kwargs["train_dataloader"], inner_model)
        self._current_task = as_task(data, self.likelihood)
        self._current_task.steps = self._current_task.steps or state.max_steps

        if state.global_step:
            default_checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._load(Path(self.checkpoint or default_checkpoint))
        self.method.begin_task(model, self._current_task)
        if list(self.method.parameters()):
            raise TypeError(
                f"{type(self.method).__name__} has parameters of its own, which Hugging Face's Trainer cannot train: "
                "use everlearn.train, your own loop or Lightning."
            )

        refuse_problems(self.method.check(model))
        self._attached = self.method.attach(model, kwargs["optimizer"], self._current_task.likelihood)
        self._loss_kind = None
        self._hook = inner_model.register_forward_hook(self._after_pass, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the task, and save the consolidated state; checkpoints were written before."""
        if self._attached is None:
            return
        model = self._attached.model
        self._detach()
        self.method.end_task(model, self._current_task)
        if args.save_strategy != "no":
            save(self.method, args.output_dir)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Postpone the Trainer's clipping, which has no hook before it: methods edit gradients before it."""
        if self._attached is not None and self.method.changes("before_step"):
            self._max_grad_norm = args.max_grad_norm
            args.max_grad_norm = 0.0
            self._training_arguments = args

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the method edit the gradients, then clip them."""
        if self._attached is None or self._training_arguments is None:
            return
        self._restore_clipping()
        self._attached.before_step()
        if args.max_grad_norm:
            clip_gradients(kwargs["model"], args.max_grad_norm)

    def _restore_clipping(self) -> None:
        if self._training_arguments is not None:
            self._training_arguments.max_grad_norm = self._max_grad_norm
            self._training_arguments = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the method's state in the model's checkpoint."""
        save(self.method, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def _load(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            raise FileNotFoundError(
                f"Training resumes, but the state of the method is not in {folder}: name the checkpoint's folder, "
                "Continual(method, checkpoint=…)."
            )
        load(self.method, folder)

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            self._hook.remove()
            self._attached = None
        self._restore_clipping()

    def _after_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Add the method's terms to the loss that the model has computed."""
        is_training_pass = model.training and torch.is_grad_enabled()
        if self._attached is None or self._attached.is_computing or not is_training_pass:
            return None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is None:
            if self.method.needs_batch:
                raise ValueError(
                    f"{type(self.method).__name__} adds terms to the loss that the model computes, and this one "
                    "computed none: the Trainer computes it itself with label smoothing and compute_loss_func. Leave "
                    "these out, or use method.attach in your own loop."
                )
            return None

        batch = {name: value for name, value in kwargs.items() if isinstance(value, Tensor) and value.dim()}
        x, y = split_batch(model, batch)
        logits = extract_logits(model, outputs)
        weight = self._find_weight(loss, y, logits, kwargs)
        outputs["loss"] = self._attached.loss(loss, x, y, logits, weight=weight)
        return outputs

    def _find_weight(self, loss: Tensor, y: Tensor | None, logits: Tensor, kwargs: dict[str, Any]) -> float:
        """Return the factor of a mean over labels in the model's loss.

        Some models divide a sum by the number of labels of all accumulated batches, others ignore that number and
        take a mean. Losses of regression and of several labels are means over outputs, too. Which of these a loss is,
        is found by computing them, once.
        """
        if self.weight is not None:
            return self.weight(kwargs) if callable(self.weight) else self.weight
        if y is None:
            return 1.0
        likelihood = self._current_task.likelihood
        batch = Batch(logits, likelihood.labels(y), likelihood=likelihood, outputs=logits.detach())
        weights = {"a mean": 1.0, **common_weights(batch)}
        num_items = kwargs.get("num_items_in_batch")
        if num_items is not None:
            weights["a share of all accumulated labels"] = batch.weight / float(num_items)
        if self._loss_kind is not None:
            return weights[self._loss_kind]
        if not batch.weight:
            return 0.0

        ratio = find_ratio(loss, batch)
        kinds = [kind for kind, weight in weights.items() if ratio is not None and is_close(ratio, weight, loss)]
        if len(kinds) == 1:
            self._loss_kind = kinds[0]
        if kinds:
            return weights[kinds[0]]
        if num_items is not None and batch.weight != float(num_items):
            raise ValueError(
                f"The loss of {type(self._attached.model).__name__ if self._attached else 'the model'} is neither the "
                f"mean loss of {likelihood} nor its share of all accumulated labels, so that the method's terms cannot "
                "be weighted: give their weight, Continual(method, weight=1.0) for a mean over the batch, or a "
                "function of the model's keyword arguments."
            )
        return 1.0


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Clip gradients by their norm over all processes; FullyShardedDataParallel knows how for its flat shards."""
    clip: Any = getattr(model, "clip_grad_norm_", None)
    if clip is not None:
        clip(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class Pairs:
    """Batches of a loader as pairs of inputs and labels.

    Args:
        loader: yields dicts with labels.
        model: the model that the batches are for.
    """

    def __init__(self, loader: Any, model: nn.Module) -> None:
        self.loader = loader
        self.model = model
        # They show whether the examples are divided among processes.
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor | None]]:
        for batch in self.loader:
            yield split_batch(self.model, batch)


def split_batch(model: nn.Module, batch: Any) -> tuple[Any, Tensor | None]:
    """Split a batch into inputs and labels, such that the labels match the logits.

    A causal language model shifts its labels by one position. A model with a decoder computes the decoder's inputs from
    the labels.
    """
    x, y, _ = as_rows(batch)
    if y is None:
        return x, y
    if shifts_labels(model):
        return x, next_token_labels(y)

    inner: Any = model
    if hasattr(inner, "get_base_model"):  # an adapter of PEFT
        inner = inner.get_base_model()
    if hasattr(inner, "prepare_decoder_input_ids_from_labels") and "decoder_input_ids" not in x:
        x = {**x, "decoder_input_ids": inner.prepare_decoder_input_ids_from_labels(labels=y)}
    return x, y


def extract_logits(model: nn.Module, outputs: Any) -> Tensor:
    """Return the logits among the outputs of a model."""
    if isinstance(outputs, Tensor):
        return outputs
    logits: Tensor | None = getattr(outputs, "logits", None)
    if logits is None:
        output_names = ", ".join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise TypeError(
            f"{type(model).__name__} returns no logits ({output_names}), which methods need: wrap it in a module whose "
            "forward(x) returns one tensor, and use everlearn.train or method.attach."
        )
    return logits


def save(method: Method, folder: str | Path) -> Path:
    """Save a method's state in the folder of a model or an adapter."""
    return files.save(method.state_dict(), files.writable_folder(folder) / FILE)


def load(method: Method, folder: str | Path) -> None:
    """Load a method's state from the folder of a model or an adapter."""
    method.load_state_dict(files.load(Path(folder) / FILE))
