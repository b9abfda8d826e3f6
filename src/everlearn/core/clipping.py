"""Undo a loop's ``clip_grad_norm_``, so that it can be applied to the whole gradient."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import FrameType

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm

from everlearn.core.loops import GradSamples, common_factor, is_clipped, sample_entries, sample_gradients
from everlearn.core.parameters import is_sharded

TINY = 1e-6  # added to the norm by clip_grad_norm_
CLOSE = 0.05  # tolerance for a common factor


class Clipping:
    """Clipping by norm between ``backward()`` and the step, before a method adds its part.

        g' = s g,   s = c / (‖g‖ + 1e-6) < 1,     so that     c = ‖g'‖ + 1e-6 s

    s is measured at samples of each gradient. Once c is known, later gradients are clipped with the method's part in
    them, also where g alone is short enough. A norm that changes at every step has no fixed c and is left as it is.

    Args:
        model: whose gradients are clipped, together with other parameters of the optimizer that are clipped alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self.threshold: float | None = None  # c
        self.is_unknown = False  # whether this step was clipped in an unknown way
        self._varies = False
        self._with_others = False
        self._other_samples: GradSamples = []
        self._clipped: list[nn.Parameter] = []  # in this step
        self._model = model

    def sample_gradients(self, parameters: Iterable[nn.Parameter]) -> GradSamples:
        """Sample gradients after backward(): return those of the model, keep others of the optimizer."""
        model_ids = {id(p) for p in self._model.parameters()}
        self._other_samples = sample_gradients(p for p in parameters if id(p) not in model_ids)
        return sample_gradients(self._model.parameters())

    @torch.no_grad()
    def undo(self, grad_samples: GradSamples) -> float | None:
        """Undo the clipping; return the remaining change of the gradients since backward(), None if unknown."""
        grad_scale, residual = common_factor(grad_samples)
        other_samples, self._other_samples, self._clipped = self._other_samples, [], []
        if residual > _rounding(grad_samples):
            self.is_unknown = _is_cut(grad_samples)
            return grad_scale if residual <= CLOSE else None
        share = grad_scale if grad_scale == 1.0 else grad_scale * scale_under_way()
        self.is_unknown = is_short = share < 1 and is_clipped(share)
        if self._varies or self._is_sharded() or not (is_short or self.threshold):
            return grad_scale
        if is_short:
            with_them, gap = common_factor(other_samples)
            self._with_others = (
                bool(other_samples)
                and gap <= _rounding(other_samples)
                and math.isclose(with_them, grad_scale, rel_tol=1e-3)
            )
        clipped = [p for p in self._model.parameters() if p.requires_grad]
        clipped += [p for p, _ in other_samples if self._with_others]
        if self._is_known(clipped, share if is_short else 1.0):
            self._clipped = clipped
        if not is_short or not self._clipped:
            return grad_scale
        self.is_unknown = False
        for p in clipped:
            if p.grad is not None:
                p.grad.div_(share)
        return grad_scale / share

    def redo(self) -> None:
        """Clip the whole gradient to the loop's threshold."""
        if self._clipped and self.threshold is not None:
            clip_grad_norm_(self._clipped, self.threshold)

    def _is_known(self, clipped: list[nn.Parameter], share: float) -> bool:
        """Return whether the loop clips to a fixed norm, and record it."""
        gradients = [p.grad for p in clipped if p.grad is not None]
        norm, known = float(get_total_norm(gradients)), self.threshold
        if not math.isfinite(norm):
            return False
        rounding = max([1e-4, *(8 * torch.finfo(g.dtype).eps for g in gradients)])
        if share == 1.0:
            if known is not None and norm > known * (1 + rounding):
                self.threshold = None  # the loop stopped clipping
            return self.threshold is not None
        threshold = norm + TINY * share
        self._varies = known is not None and abs(threshold - known) > rounding * known
        self.threshold = None if self._varies else threshold
        return not self._varies

    def _is_sharded(self) -> bool:
        """Return whether this process holds only shards of the gradients."""
        wrapped = any(type(m).__name__ == "FullyShardedDataParallel" for m in self._model.modules())
        return wrapped or any(map(is_sharded, self._model.parameters()))


def scale_under_way() -> float:
    """Return the scale of the GradScaler that performs this step, 1 without one.

    There is no hook for it, and unscaling cannot be told from clipping by the gradients alone.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    scaler: GradScaler | None = None if frame is None else frame.f_locals["self"]
    return 1.0 if scaler is None else scaler.get_scale()


def _rounding(grad_samples: GradSamples) -> float:
    """Return the tolerance of a common factor in the precision of the gradients."""
    return min(CLOSE, math.sqrt(max((torch.finfo(earlier.dtype).eps for _, earlier in grad_samples), default=0.0)))


def _is_cut(grad_samples: GradSamples) -> bool:
    """Return whether gradients were clipped individually, without a common factor."""
    sample_pairs = [
        (earlier, current)
        for p, earlier in grad_samples
        if (current := sample_entries(p)) is not None and current.any()
    ]
    scale = scale_under_way()
    pairs = [(earlier.double(), current.double() * scale) for earlier, current in sample_pairs]
    return bool(pairs) and all(
        bool((current * earlier >= 0).all() and (current.abs() <= earlier.abs() * (1 + 1e-3)).all())
        for earlier, current in pairs
    )
