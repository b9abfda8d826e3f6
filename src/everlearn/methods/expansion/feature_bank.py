"""A bank of frozen feature extractors, with one classifier over the features of all of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.parameters import evaluating, grown
from everlearn.runtime.randomness import seeded
from everlearn.surgery.features import compute_features
from everlearn.surgery.heads import tied_parameters
from everlearn.surgery.hooks import Hook, make_hook, remove_hooks, without_hooks

OWNER = "ExpandableRepresentation"  # of the hooks


class FeatureBank(nn.Module):
    """Frozen feature extractors, their blocks of the classifier's weights, and the auxiliary head of the newest one.

        out = W [φ₁(x) … φ_T(x)] + b = Σ_j W_j φ_j(x) + b

    The features φ are the inputs of a network's output layer. The newest extractor φ_T, its block W_T and b belong to
    the user's model. The bank holds the earlier extractors, in evaluation mode, and their blocks. Each block is a
    separate parameter, so that a new extractor does not change the shape of the existing ones.

    Args:
        output: name of the output layer.
    """

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output
        self.nets = nn.ModuleList()
        self.blocks = nn.ParameterList()
        self.auxiliary: nn.Linear | None = None
        # φ_T(x), the input of the auxiliary head, of the last two training passes.
        self._newest_features: list[Tensor] = []
        self._frozen_features: list[Tensor] | None = None
        self.eval()

    def __len__(self) -> int:
        return len(self.nets)

    def __bool__(self) -> bool:
        return True  # also when it is empty

    def add(self, net: nn.Module, weight: Tensor) -> None:
        """Add a frozen extractor with its block of the classifier's weights."""
        self.nets.append(net.eval().requires_grad_(False))
        self.blocks.append(nn.Parameter(weight.detach().clone()))

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer trains: the classifier's blocks and the auxiliary head."""
        if self.auxiliary is None:
            return list(self.blocks)
        return [*self.blocks, *self.auxiliary.parameters()]

    @torch.no_grad()
    def frozen_features(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Compute the features of each frozen extractor."""
        return [compute_features(net, self.output, *args, **kwargs) for net in self.nets]

    @torch.no_grad()
    def all_features(self, inner: nn.Module, x: Any) -> Tensor:
        """Compute [φ₁(x) … φ_T(x)] in evaluation mode; φ_T is the user's model."""
        with without_hooks(inner), evaluating(inner):
            features = [*self.frozen_features(x), compute_features(inner, self.output, x)]
        return torch.cat(features, -1)

    @torch.no_grad()
    def merge_classifier(self, layer: nn.Linear) -> nn.Linear:
        """Copy the classifier into one layer: the blocks of the bank, then the user's output layer."""
        blocks = [grown(w, layer.weight.shape) for w in [*self.blocks, layer.weight]]
        with seeded(0):
            classifier = new_classifier(layer, len(blocks) * layer.in_features)
        classifier.weight.copy_(torch.cat(blocks, 1))
        if layer.bias is not None:
            classifier.bias.copy_(layer.bias)
        return classifier

    @torch.no_grad()
    def write_classifier(self, layer: nn.Linear, classifier: nn.Linear) -> None:
        """Copy a merged classifier back into the blocks of the bank and the user's output layer."""
        new_blocks = classifier.weight.chunk(len(self) + 1, 1)
        for block, new_block in zip([*self.blocks, layer.weight], new_blocks, strict=True):
            block.copy_(new_block)
        if layer.bias is not None:
            layer.bias.copy_(classifier.bias)

    def merge(self, inner: nn.Module, layer: nn.Linear) -> JointClassifier:
        """Copy all extractors, including the user's model, into one module with the merged classifier."""
        with without_hooks(inner):
            extractors = [copy.deepcopy(net) for net in [*self.nets, inner]]

        # Without its output layer, a network returns its features.
        parent, _, leaf = self.output.rpartition(".")
        for net in extractors:
            setattr(net.get_submodule(parent), leaf, nn.Identity())
        return JointClassifier(extractors, self.merge_classifier(layer)).eval()

    @torch.no_grad()
    def grow_outputs(self, outputs: int) -> None:
        """Add rows to each block for an output layer that has grown, initialized as in a new layer."""
        for j, block in enumerate(self.blocks):
            new_outputs = outputs - len(block)
            if new_outputs > 0:
                rows = nn.Linear(block.shape[1], new_outputs, False, block.device, block.dtype).weight
                self.blocks[j] = nn.Parameter(torch.cat([block, rows]))

    def is_connected(self, inner: nn.Module) -> bool:
        """Whether the hooks of this bank are on the model."""
        hooks = inner.get_submodule(self.output)._forward_hooks.values()
        return any(isinstance(hook, Hook) and hook.args[:1] == (self,) for hook in hooks)

    def connect(self, inner: nn.Module, compiled: bool = False) -> None:
        """Register hooks that run the frozen extractors before the model and add their part to its outputs."""
        removed = remove_hooks(inner, OWNER)
        # A compiled model ignores changes of hooks after its first call.
        if (removed or len(self)) and compiled:
            torch.compiler.reset()
        if not len(self):
            return

        hooks: list[Any] = [_compute_frozen_features, _add_frozen_outputs, _clear_frozen_features]
        # The features pass from one hook to the next, which cannot be compiled.
        if compiled:
            hooks = [torch.compiler.disable(hook) for hook in hooks]
        compute_hook, add_hook, clear_hook = (make_hook(OWNER, hook, self) for hook in hooks)
        inner.register_forward_pre_hook(compute_hook, with_kwargs=True)
        inner.get_submodule(self.output).register_forward_hook(add_hook, with_kwargs=True)
        inner.register_forward_hook(clear_hook)

    def add_frozen_outputs(self, newest_features: Tensor, outputs: Tensor) -> Tensor:
        """Add Σ_{j<T} W_j φ_j(x) to the output layer's W_T φ_T(x) + b."""
        if self._frozen_features is None:
            raise RuntimeError(
                "The features of the frozen extractors are missing: call the entire model, not its layer "
                f"{self.output} alone, and let the model call that layer once."
            )
        if self.auxiliary is not None and newest_features.requires_grad:
            self._newest_features = [*self._newest_features[-1:], newest_features]

        block_outputs = [F.linear(phi, w) for phi, w in zip(self._frozen_features, self.blocks, strict=True)]
        self._frozen_features = None
        frozen_sum = sum(block_outputs[1:], block_outputs[0])

        # The output layer may have grown since the blocks were created.
        new_outputs = outputs.shape[-1] - frozen_sum.shape[-1]
        return outputs + F.pad(frozen_sum, (0, new_outputs))

    def pop_newest_features(self, num_rows: int) -> Tensor | None:
        """Return φ_T(x) of the last training pass, or of the last two if it has fewer rows, and clear it."""
        newest_features = self._newest_features
        self._newest_features = []
        if newest_features and len(newest_features[-1]) == num_rows:
            return newest_features[-1]
        if not newest_features:
            return None
        return torch.cat(newest_features)


class JointClassifier(nn.Module):
    """W [φ₁(x) … φ_T(x)] + b as a plain module."""

    def __init__(self, extractors: list[nn.Module], classifier: nn.Linear) -> None:
        super().__init__()
        self.extractors = nn.ModuleList(extractors)
        self.classifier = classifier

    def forward(self, x: Any) -> Tensor:
        """Compute the logits of all classes."""
        features = torch.cat([phi(x) for phi in self.extractors], -1)
        logits: Tensor = self.classifier(features)
        return logits


def new_classifier(layer: nn.Linear, in_features: int) -> nn.Linear:
    """Create a layer with the outputs of another, initialized as torch does."""
    weight = layer.weight
    return nn.Linear(in_features, layer.out_features, layer.bias is not None, weight.device, weight.dtype)


def check_separate(inner: nn.Module, name: str, layer: nn.Linear) -> None:
    """Raise if a model has no feature extractor, or if its output layer shares weights with the extractor."""
    layer_ids = {id(p) for p in layer.parameters()}
    if not name or all(id(p) in layer_ids for p in inner.parameters()):
        raise ValueError(
            f"ExpandableRepresentation finds no feature extractor in {type(inner).__name__}: it has no parameters "
            "besides those of the output layer. Use a deeper model, or name the output layer with output=…."
        )
    tied_names = tied_parameters(inner, name)
    if tied_names:
        raise ValueError(
            f"The output layer {name!r} shares its weights with {tied_names[0]}: they cannot be frozen with the "
            "extractor and trained with the classifier. Untie them."
        )


def _compute_frozen_features(bank: FeatureBank, net: nn.Module, args: Any, kwargs: Any) -> None:
    bank._frozen_features = bank.frozen_features(*args, **kwargs)


def _add_frozen_outputs(bank: FeatureBank, layer: nn.Module, args: Any, kwargs: Any, outputs: Tensor) -> Tensor:
    newest_features = args[0] if args else kwargs["input"]
    return bank.add_frozen_outputs(newest_features, outputs)


def _clear_frozen_features(bank: FeatureBank, net: nn.Module, args: Any, outputs: Any) -> None:
    bank._frozen_features = None
