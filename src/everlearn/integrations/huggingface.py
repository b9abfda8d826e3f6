"""Methods in Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn import atomic
from everlearn.attachment import Attachment
from everlearn.data import as_rows
from everlearn.extras import needs
from everlearn.likelihood import Likelihood
from everlearn.method import Method
from everlearn.stream import Task, as_task

TrainerCallback: Any = needs("transformers", "huggingface", "The Hugging Face callback").TrainerCallback
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
        out = self.model(**x) if isinstance(x, Mapping) else self.model(x)
        return out if isinstance(out, Tensor) else out.logits


class Continual(TrainerCallback):  # type: ignore[misc]
    """A Trainer callback that carries a method through ``trainer.train()``: one training is one task.

    The Trainer's own loss stays what it is. The method's state lies in the Trainer's checkpoints, beside an adapter where there is
    one, and is found there when training resumes. The Trainer clips gradients before the method edits them, and has no place for
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
        self._hook: Any = None
        self._learned = Task()
        self._epoch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the task, or go on with it, and into the optimizer's steps."""
        self._off()  # a training that was interrupted has left its own
        model = Outputs(given["model"])
        data = Shifted(given["train_dataloader"]) if _shifts(given["model"]) else given["train_dataloader"]
        self._learned = as_task(data if self.task is None else self.task, self.likelihood)
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
        self._attached = self.method.attach(model, given["optimizer"], self.likelihood)
        self._hook = model.model.register_forward_hook(self._passed, with_kwargs=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Which pass it is."""
        self._epoch = int(state.epoch or 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Consolidate."""
        if self._attached is not None:
            model = self._attached.model
            self._off()
            self.method.end_task(model, self._learned)

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
            self._hook.remove()
            self._attached = None

    def _passed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self._attached is None or self._attached.busy or self.method.of_parameters:
            return
        if model.training and torch.is_grad_enabled():
            known = {name: v for name, v in kwargs.items() if isinstance(v, Tensor) and v.dim()}
            x, y, _ = as_rows(known)
            y = shifted(y) if y is not None and _shifts(model) else y
            self._attached.see(x, y, epoch=self._epoch, out=out.logits)


class Shifted:
    """Batches of a causal language model, whose labels are its inputs, as pairs: each place's label is the next word.

    Args:
        loader: batches as dicts with labels.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor | None]]:
        for batch in self.loader:
            x, y, _ = as_rows(batch)
            yield x, None if y is None else shifted(y)


def shifted(labels: Tensor) -> Tensor:
    """The label of each place is the next one; the last has none.

    >>> shifted(torch.tensor([[5, 6, 7]]))
    tensor([[   6,    7, -100]])
    """
    return F.pad(labels[..., 1:], (0, 1), value=-100)


def _shifts(model: nn.Module) -> bool:
    """Whether the model itself takes labels one place later, as transformers' causal ones do."""
    inner: Any = model
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    name, kind = type(inner).__name__, getattr(inner, "loss_type", None)
    return kind == "ForCausalLM" or (kind is None and name.endswith(("LMHeadModel", "ForCausalLM")))


def save(method: Method, folder: str | Path) -> Path:
    """Write a method's state beside a model or an adapter."""
    return atomic.save(method.state_dict(), atomic.writable_folder(folder) / FILE)


def load(method: Method, folder: str | Path) -> None:
    """Give a method the state that lies beside a model or an adapter."""
    method.load_state_dict(atomic.load(Path(folder) / FILE))
