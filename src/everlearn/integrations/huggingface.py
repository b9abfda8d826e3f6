"""Methods in Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everlearn import atomic
from everlearn.attachment import Attachment
from everlearn.data import as_rows
from everlearn.extras import needs
from everlearn.likelihood import Likelihood
from everlearn.method import Method
from everlearn.stream import as_task

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
    one, and is found there when training resumes. The Trainer clips gradients before the method edits them.

    Args:
        method: kept from training to training; it speaks of ``Outputs(model)``, whose parameters are named ``model.…``.
        task: the data or a ``Task``, for methods that look at it; by default what the Trainer loads.
        likelihood: what the outputs mean.
    """

    def __init__(self, method: Method, task: Any = None, likelihood: Likelihood | None = None) -> None:
        self.method, self.task, self.likelihood = method, task, likelihood
        self._attached: Attachment | None = None
        self._hook: Any = None
        self._epoch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the task, and into the optimizer's steps."""
        model, optimizer = Outputs(given["model"]), given["optimizer"]
        before = {id(p) for p in model.parameters()}
        self.method.begin_task(model, given["train_dataloader"] if self.task is None else self.task)
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
        if state.global_step and saved.exists():
            self.method.load_state_dict(torch.load(saved, weights_only=True))
        new = [p for p in [*model.parameters(), *self.method.parameters()] if p.requires_grad and id(p) not in before]
        if new:
            optimizer.add_param_group({"params": new})
        self._attached = self.method.attach(model, optimizer, self.likelihood)
        self._hook = model.model.register_forward_hook(self._passed, with_kwargs=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Which pass it is."""
        self._epoch = int(state.epoch or 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Consolidate."""
        if self._attached is None:
            return
        model = self._attached.model
        self._attached.remove()
        self._hook.remove()
        self._attached = None
        data = given["train_dataloader"] if self.task is None else self.task
        self.method.end_task(model, as_task(data, self.likelihood))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The method's state beside the model's."""
        save(self.method, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def _passed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self._attached is None or self._attached.busy or not model.training or not torch.is_grad_enabled():
            return
        known = {name: v for name, v in kwargs.items() if isinstance(v, Tensor) and v.dim()}
        x, y, _ = as_rows(known)
        self._attached.see(x, y, epoch=self._epoch, out=out.logits.detach())


def save(method: Method, folder: str | Path) -> Path:
    """Write a method's state beside a model or an adapter."""
    return atomic.save(method.state_dict(), atomic.writable_folder(folder) / FILE)


def load(method: Method, folder: str | Path) -> None:
    """Give a method the state that lies beside a model or an adapter."""
    method.load_state_dict(torch.load(Path(folder) / FILE, weights_only=True))
