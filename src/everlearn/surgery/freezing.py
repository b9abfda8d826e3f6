"""Freeze single entries of parameters, whole parameters, and running statistics."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from everlearn.core.parameters import Params, all_parameters, unwrap
from everlearn.core.running_statistics import hold_statistics
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import make_hook, recompile, remove_hooks

Checksum = tuple[str, int]  # dtype of the parameter, CRC-32 of its masked entries


class FrozenEntries:
    """Entries of parameters that no optimizer moves, parameters without gradients, and buffers that keep their values.

    A zero gradient is not enough: momentum, Adam's averages and weight decay move a weight without a gradient.
    Therefore the gradients of locked entries are zeroed before a step (which also keeps them out of gradient clipping),
    and their values are restored after it. A parameter whose entries are all locked gets ``grad = None``, which every
    torch optimizer skips.

        p ← (p AND free_bits) OR locked_bits

    Working on the bits is exact even if a step produced NaN, and on a CPU twenty times faster than a boolean mask.
    Everything is stored by name, so that a copy of the method serves a copy of the model.

    Args:
        owner: name of the method, which the hooks carry.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.masks: Params = {}  # True at locked entries
        self.values: Params = {}
        self.fully_locked: set[str] = set()
        self.buffers: Params = {}
        self.frozen_parameters: list[str] = []  # whose requires_grad was set to False
        self._model_id: int | None = None  # distinguishes the model from its copies
        self._free_bits: Params = {}  # all bits set at free entries, none at locked ones
        self._locked_bits: Params = {}  # the bits of locked entries, zero at free ones

    def lock(self, weights: nn.Module | Params, masks: Mapping[str, Tensor]) -> None:
        """Lock the masked entries of parameters at their current values, in place of those locked before.

        Args:
            weights: a model, or parameters by name.
            masks: True at entries to lock, by name of the parameter.
        """
        self.unlock()
        self._remember(weights)
        if not masks:
            return

        # One copy to the host tells which masks lock nothing, and which lock everything.
        device = next(iter(masks.values())).device
        num_locked = torch.stack([mask.count_nonzero().to(device) for mask in masks.values()]).tolist()
        parameters = _by_name(weights)
        for (name, mask), count in zip(masks.items(), num_locked, strict=True):
            if not count:
                continue
            value = parameters[name].detach().clone()
            self.masks[name] = mask
            self.values[name] = value
            if count == mask.numel():
                self.fully_locked.add(name)
                continue

            # 1 - 1 = 0 clears every bit of a locked entry; 0 - 1 = -1 keeps every bit of a free one.
            self._free_bits[name] = mask.to(_as_integers(value).dtype) - 1
            self._locked_bits[name] = _as_integers(value) & ~self._free_bits[name]

    def _remember(self, weights: nn.Module | Params) -> None:
        if isinstance(weights, nn.Module):
            self._model_id = id(unwrap(weights))

    def unlock(self) -> None:
        """Unlock all entries; buffers stay locked."""
        self.masks = {}
        self.values = {}
        self.fully_locked = set()
        self._free_bits = {}
        self._locked_bits = {}

    def lock_buffers(self, model: nn.Module, names: Iterable[str] | None = None, evaluate: bool = True) -> None:
        """Lock buffers at their current values.

        Args:
            model: the model.
            names: names of the buffers; by default all.
            evaluate: whether layers whose running statistics are locked normalize by them, also under
                ``model.train()``; otherwise by the statistics of each batch.
        """
        self._remember(model)
        buffers = dict(unwrap(model).named_buffers())
        locked_buffers = buffers
        if names is not None:
            locked_buffers = {name: buffers[name] for name in names}
        self.buffers |= {name: buffer.clone() for name, buffer in locked_buffers.items()}
        if not evaluate:
            return

        locked_ids = {id(buffer) for buffer in locked_buffers.values()}
        for module in unwrap(model).modules():
            has_locked_buffer = any(id(buffer) in locked_ids for buffer in module.buffers(recurse=False))
            if has_locked_buffer and getattr(module, "track_running_stats", False):
                module.register_forward_pre_hook(make_hook(self.owner, hold_statistics))
        recompile(model)

    def freeze_features(self, model: nn.Module, output: str | None = None) -> None:
        """Freeze all parameters and buffers outside the output layer; BatchNorm stays in evaluation mode.

        Parameters get no gradients, which saves the backward pass through the features. Call it before the optimizer
        is created, ``restore(model)`` after each step, and ``release(model)`` to make them trainable again.

        Args:
            model: the model.
            output: name of the output layer; by default the last ``nn.Linear``.
        """
        _, layer = output_layer(model, output)
        output_ids = {id(v) for v in [*layer.parameters(), *layer.buffers()]}
        for name, p in all_parameters(model).items():
            if p.requires_grad and id(p) not in output_ids:
                p.requires_grad_(False)
                p.grad = None  # an optimizer would still apply an old gradient
                self.frozen_parameters.append(name)
        buffers = unwrap(model).named_buffers()
        self.lock_buffers(model, [name for name, buffer in buffers if id(buffer) not in output_ids])

    @torch.no_grad()
    def mask_gradients(self, weights: nn.Module | Params) -> None:
        """Zero the gradients of locked entries. Call it before ``optimizer.step()``."""
        if not self.masks:
            return
        for name, p in _by_name(weights).items():
            if name in self.fully_locked:
                p.grad = None
            elif p.grad is not None and name in self.masks:
                _as_integers(p.grad).bitwise_and_(self._free_bits[name])

    @torch.no_grad()
    def restore(self, weights: nn.Module | Params, everything: bool = False) -> None:
        """Restore locked entries, and the locked buffers of a model. Call it after ``optimizer.step()``.

        Args:
            weights: a model, or parameters by name.
            everything: also restore fully locked parameters without a gradient, which no optimizer has moved.
        """
        if self.masks:
            for name, p in _by_name(weights).items():
                if name in self._free_bits:
                    _as_integers(p).bitwise_and_(self._free_bits[name]).bitwise_or_(self._locked_bits[name])
                # Another method may have given a fully locked parameter a gradient again.
                elif name in self.fully_locked and (everything or p.grad is not None):
                    p.copy_(self.values[name])
        if isinstance(weights, nn.Module):
            self.restore_buffers(weights)

    @torch.no_grad()
    def restore_buffers(self, model: nn.Module) -> None:
        """Restore locked buffers: a compiled model may ignore hooks registered after its compilation."""
        if not self.buffers:
            return
        buffers = dict(unwrap(model).named_buffers())
        for name, value in self.buffers.items():
            buffers[name].copy_(value)

    def check(self, model: nn.Module) -> None:
        """Raise if a locked entry has moved."""
        for name, p in all_parameters(model).items():
            if name not in self.masks:
                continue
            mask = self.masks[name]
            if not torch.equal(p.detach()[mask], self.values[name][mask]):
                raise ValueError(
                    f"Locked entries of {name} have moved, so the outputs of earlier tasks would change. Call "
                    f"{self.owner}.before_step(model) and {self.owner}.after_step(model) around every optimizer step, "
                    f"and {self.owner}.restore_locked(model) after copying averaged weights into the model."
                )

    def detach(self, model: nn.Module) -> None:
        """Make frozen parameters trainable and remove the hooks; unlock everything, unless the model is a copy.

        What is locked belongs to the original, which may still be trained.
        """
        parameters = all_parameters(model)
        for name in self.frozen_parameters:
            # A layer may have been replaced since.
            if name in parameters:
                parameters[name].requires_grad_(True)
        remove_hooks(unwrap(model), self.owner, hold_statistics)
        if id(unwrap(model)) == self._model_id:
            self._forget()

    def release(self, model: nn.Module) -> None:
        """Detach from a model and unlock everything, also if it was locked in another model."""
        self.detach(model)
        self._forget()

    def _forget(self) -> None:
        self.unlock()
        self.buffers = {}
        self.frozen_parameters = []
        self._model_id = None


@torch.no_grad()
def compute_checksums(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Checksum]:
    """Compute a checksum of the masked entries of each parameter.

    A checksum can be saved in a state, where a copy of the entries would double the size of the model.
    """
    parameters = all_parameters(model)
    return {name: (str(parameters[name].dtype), _checksum(parameters[name], mask)) for name, mask in masks.items()}


@torch.no_grad()
def find_changed(model: nn.Module, masks: Mapping[str, Tensor], before: Mapping[str, Checksum]) -> list[str]:
    """List the parameters whose masked entries differ from their checksums.

    A model converted to a finer dtype still holds the same values. One that was rounded to a coarser dtype cannot be
    compared and is passed over.
    """
    parameters = all_parameters(model)
    changed_names = []
    for name, (dtype_name, checksum) in before.items():
        if name not in parameters or name not in masks:
            changed_names.append(name)
            continue

        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        is_rounded = torch.promote_types(parameters[name].dtype, dtype) != parameters[name].dtype
        if not is_rounded and _checksum(parameters[name].to(dtype), masks[name]) != checksum:
            changed_names.append(name)
    return changed_names


def _checksum(parameter: Tensor, mask: Tensor) -> int:
    masked = torch.where(mask.to(parameter.device), parameter, 0) + 0.0  # turns -0.0 into 0.0
    return zlib.crc32(_as_integers(masked.contiguous()).cpu().numpy().data)


def _as_integers(tensor: Tensor) -> Tensor:
    """View the memory of a floating-point tensor as integers of the same size."""
    integer_dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integer_dtypes[tensor.element_size()])


def _by_name(weights: nn.Module | Params) -> Params:
    if isinstance(weights, nn.Module):
        return all_parameters(weights)
    return weights
