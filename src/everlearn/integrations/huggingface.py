"""Methods in Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.attachment import Attachment
from everlearn.core.data_source import as_rows
from everlearn.core.forward import next_token_labels, shifts_labels
from everlearn.core.likelihood import Likelihood
from everlearn.core.method import Method
from everlearn.core.task import Task, as_task
from everlearn.runtime import files
from everlearn.runtime.optional_imports import import_optional

TrainerCallback: Any = import_optional("transformers", "huggingface", "The Hugging Face callback").TrainerCallback
FILE = "everlearn.pt"


class Outputs(nn.Module):
    """A Hugging Face model as a function of one input, a dict of tensors, that gives the logits alone.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        """The logits."""
        return logits(self.model, self.model(**x) if isinstance(x, Mapping) else self.model(x))


class Continual(TrainerCallback):  # type: ignore[misc]
    """A Trainer callback that carries a method through ``trainer.train()``: one training is one task.

    The Trainer's own loss stays what it is. The method's state lies in the Trainer's checkpoints, beside an adapter where there is
    one, and is found there when training resumes; what it knows once the task has ended, in the output folder itself. The Trainer clips gradients by norm, the method's part too, and has no place for
    parameters of the method's own, as HAT has them.

    Args:
        method: kept from training to training; it speaks of ``Outputs(model)``, whose parameters are named ``model.…``.
        task: the data or a ``Task``, for methods that look at it; by default what the Trainer loads.
        likelihood: what the outputs mean.
        checkpoint: the folder that training resumes from, where it is not one of the Trainer's output folder.
    """

    def __init__(
        self,
        method: Method,
        task: Any = None,
        likelihood: Likelihood | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.method, self.task, self.likelihood, self.checkpoint = method, task, likelihood, checkpoint
        self._attached: Attachment | None = None
        self._hooks: list[Any] = []
        self._learned = Task()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the task, or go on with it, and into the optimizer's steps."""
        self._off()  # a training that was interrupted has left its own
        model = Outputs(given["model"])
        data = Pairs(given["train_dataloader"], given["model"]) if self.task is None else self.task
        self._learned = as_task(data, self.likelihood)
        self._learned.steps = self._learned.steps or state.max_steps
        if state.global_step:
            self._load(Path(self.checkpoint or Path(args.output_dir) / f"checkpoint-{state.global_step}"))
            self.method.resume(model, self._learned)
        else:
            self.method.begin_task(model, self._learned)
        if list(self.method.parameters()):
            raise TypeError(
                f"{type(self.method).__name__} has parameters of its own, for which Hugging Face's Trainer has no place: use "
                "everlearn.train, your own loop or Lightning."
            )
        self._attached = self.method.attach(model, given["optimizer"], self._learned.likelihood)
        self._hooks = [
            model.model.register_forward_pre_hook(self._attached.before_pass, with_kwargs=True),
            model.model.register_forward_hook(self._passed, with_kwargs=True),
        ]

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Consolidate; checkpoints were written before that."""
        if self._attached is not None:
            model = self._attached.model
            self._off()
            self.method.end_task(model, self._learned)
            if args.save_strategy != "no":
                save(self.method, args.output_dir)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The method's state beside the model's."""
        save(self.method, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def _load(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            raise FileNotFoundError(
                f"Training goes on, but what the method knew is not in {folder}: name the checkpoint's folder, "
                "Continual(method, checkpoint=…)."
            )
        load(self.method, folder)

    def _off(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            for hook in self._hooks:
                hook.remove()
            self._attached = None

    def _passed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        said = logits(model, out)
        if self._attached is None or self._attached.busy or not (model.training and torch.is_grad_enabled()):
            return
        if self.method.of_parameters:  # of which the outputs alone tell when gradients come
            self._attached.see(kwargs, out=said)
        else:
            x, y = pair(model, {name: v for name, v in kwargs.items() if isinstance(v, Tensor) and v.dim()})
            self._attached.see(x, y, out=said)


class Pairs:
    """Batches as pairs of what the model is asked and what it should say.

    Args:
        loader: batches as dicts with labels.
        model: whose they are.
    """

    def __init__(self, loader: Any, model: nn.Module) -> None:
        self.loader, self.model = loader, model

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor | None]]:
        for batch in self.loader:
            yield pair(self.model, batch)


def pair(model: nn.Module, batch: Any) -> tuple[Any, Tensor | None]:
    """Inputs and labels as the model means them, which makes something of labels that it is given.

    A causal language model takes them one place later; one with a decoder makes the decoder's inputs of them.
    """
    x, y, _ = as_rows(batch)
    if y is None:
        return x, y
    if shifts_labels(model):
        return x, next_token_labels(y)
    inner: Any = model
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if hasattr(inner, "prepare_decoder_input_ids_from_labels") and "decoder_input_ids" not in x:
        x = {**x, "decoder_input_ids": inner.prepare_decoder_input_ids_from_labels(labels=y)}
    return x, y


def logits(model: nn.Module, out: Any) -> Tensor:
    """The outputs that count among all that a model gives."""
    said = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if said is None:
        raise TypeError(
            f"{type(model).__name__} gives no logits ({', '.join(out) if isinstance(out, Mapping) else type(out).__name__}), which a method looks "
            "at: wrap it in a module whose forward(x) gives one tensor, and use everlearn.train or method.attach."
        )
    return said


def save(method: Method, folder: str | Path) -> Path:
    """Write a method's state beside a model or an adapter."""
    return files.save(method.state_dict(), files.writable_folder(folder) / FILE)


def load(method: Method, folder: str | Path) -> None:
    """Give a method the state that lies beside a model or an adapter."""
    method.load_state_dict(files.load(Path(folder) / FILE))
