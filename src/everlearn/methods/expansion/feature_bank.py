"""Feature extractors side by side: frozen copies of a network, and one classifier over what all of them see."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.parameters import evaluating, grown
from everlearn.runtime.randomness import seeded
from everlearn.surgery.features import compute_features
from everlearn.surgery.hooks import Hook, remove_hooks, without_hooks


class FeatureBank(nn.Module):
    """Frozen feature extractors in evaluation mode, the classifier's weights for each, and the auxiliary head of the newest.

        out = W [φ₁(x) … φ_T(x)] + b = Σ_j W_j φ_j(x) + b

    φ is what the output layer of a network is given. The newest extractor, its W_T and b are the user's own model; the others
    are here. Blocks W_j are tensors of their own, so that what is learned for one extractor stands beside the others.

    Args:
        output: name of the output layer.
    """

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output
        self.nets, self.blocks = nn.ModuleList(), nn.ParameterList()
        self.auxiliary: nn.Linear | None = None
        self.listening = False  # whether the next pass is to leave what the newest extractor sees
        self.newest: Tensor | None = None
        self._before: list[Tensor] | None = None
        self.eval()

    def __len__(self) -> int:
        return len(self.nets)

    def __bool__(self) -> bool:
        return True  # also without an extractor

    def add(self, net: nn.Module, weight: Tensor) -> None:
        """One more that is frozen, with the classifier's weights for it."""
        self.nets.append(net.eval().requires_grad_(False))
        self.blocks.append(nn.Parameter(weight.detach().clone()))

    def learning(self) -> list[nn.Parameter]:
        """What an optimizer is to move: the classifier's weights and the auxiliary head."""
        return [*self.blocks, *([] if self.auxiliary is None else self.auxiliary.parameters())]

    @torch.no_grad()
    def earlier(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """What each frozen extractor sees."""
        return [compute_features(net, self.output, *args, **kwargs) for net in self.nets]

    @torch.no_grad()
    def all_features(self, inner: nn.Module, x: Any) -> Tensor:
        """[φ₁(x) … φ_T(x)] in evaluation mode, the last by the user's model."""
        with without_hooks(inner), evaluating(inner):
            return torch.cat([*self.earlier(x), compute_features(inner, self.output, x)], -1)

    @torch.no_grad()
    def classifier(self, layer: nn.Linear) -> nn.Linear:
        """A copy of the whole classifier as one layer, from the user's output layer and the other blocks."""
        blocks = [grown(w, layer.weight.shape) for w in [*self.blocks, layer.weight]]
        with seeded(0):
            whole = wider(layer, len(blocks) * layer.in_features)
        whole.weight.copy_(torch.cat(blocks, 1))
        if layer.bias is not None:
            whole.bias.copy_(layer.bias)
        return whole

    def together(self, inner: nn.Module, layer: nn.Linear) -> JointClassifier:
        """Copies of all extractors, the newest among them, under one classifier."""
        with without_hooks(inner):
            nets = [copy.deepcopy(net) for net in [*self.nets, inner]]
        for net in nets:
            parent, _, leaf = self.output.rpartition(".")
            setattr(net.get_submodule(parent), leaf, nn.Identity())  # what the output layer is given, the net now gives
        return JointClassifier(nets, self.classifier(layer)).eval()

    @torch.no_grad()
    def write(self, layer: nn.Linear, whole: nn.Linear) -> None:
        """Give the classifier the weights of a layer such as ``classifier`` gives."""
        for own, new in zip([*self.blocks, layer.weight], whole.weight.chunk(len(self) + 1, 1), strict=True):
            own.copy_(new)
        if layer.bias is not None:
            layer.bias.copy_(whole.bias)

    @torch.no_grad()
    def widen(self, outputs: int) -> None:
        """New outputs of an output layer that has grown: rows as in a new layer."""
        for j, block in enumerate(self.blocks):
            if (more := outputs - len(block)) > 0:
                rows = nn.Linear(block.shape[1], more, False, block.device, block.dtype).weight
                self.blocks[j] = nn.Parameter(torch.cat([block, rows]))

    def is_on(self, inner: nn.Module) -> bool:
        """Whether this model's output layer is told by these extractors."""
        hooks = inner.get_submodule(self.output)._forward_hooks.values()
        return any(isinstance(h, Hook) and h.args[:1] == (self,) for h in hooks)

    def lead_into(self, inner: nn.Module, compiled: bool = False) -> None:
        """From now on the frozen extractors run before a model does, and its output layer is told what they see."""
        if (remove_hooks(inner) or len(self)) and compiled:
            torch.compiler.reset()  # or what was compiled before would go on without the hooks
        if not len(self):
            return
        hooks: list[Any] = [_ask, _tell, _forget]
        if compiled:  # what passes from one to the other cannot be compiled
            hooks = [torch.compiler.disable(hook) for hook in hooks]
        ask, tell, forget = (Hook(hook, self) for hook in hooks)
        inner.register_forward_pre_hook(ask, with_kwargs=True)
        inner.get_submodule(self.output).register_forward_hook(tell, with_kwargs=True)
        inner.register_forward_hook(forget)

    def tell(self, newest: Tensor, out: Tensor) -> Tensor:
        """To what the output layer makes of the newest features, what the classifier makes of the others."""
        if self._before is None:
            raise RuntimeError(
                f"The extractors work together: call the model as a whole, not its part {self.output} alone, nor twice."
            )
        if self.listening:
            self.newest, self.listening = newest, False
        said = [F.linear(h, w) for h, w in zip(self._before, self.blocks, strict=True)]
        self._before = None
        return out + F.pad(sum(said[1:], said[0]), (0, out.shape[-1] - said[0].shape[-1]))

    def heard(self) -> Tensor | None:
        """What the newest extractor saw in the last pass, once."""
        newest, self.newest, self.listening = self.newest, None, False
        return newest


class JointClassifier(nn.Module):
    """W [φ₁(x) … φ_T(x)] + b, as a module like any other."""

    def __init__(self, extractors: list[nn.Module], classifier: nn.Linear) -> None:
        super().__init__()
        self.extractors, self.classifier = nn.ModuleList(extractors), classifier

    def forward(self, x: Any) -> Tensor:
        """Outputs."""
        said: Tensor = self.classifier(torch.cat([phi(x) for phi in self.extractors], -1))
        return said


def wider(layer: nn.Linear, inputs: int) -> nn.Linear:
    """A new layer with the outputs of another, drawn as torch does."""
    return nn.Linear(inputs, layer.out_features, layer.bias is not None, layer.weight.device, layer.weight.dtype)


def check_separate(inner: nn.Module, name: str, layer: nn.Linear) -> None:
    """Refuse a model without an extractor, or whose output layer is part of it."""
    own = {id(p) for p in layer.parameters()}
    if not name or not any(id(p) not in own for p in inner.parameters()):
        raise ValueError(
            f"ExpandableRepresentation finds no feature extractor in {type(inner).__name__}: there are no parameters besides "
            "the output layer's. Use a deeper model, or name the output layer with output=…."
        )
    names = [
        n for n, p in inner.named_parameters(remove_duplicate=False) if id(p) in own and not n.startswith(f"{name}.")
    ]
    if names:
        raise ValueError(
            f"The output layer {name!r} shares its weights with {names[0]}: they cannot be frozen with the extractor and go on "
            "learning with the classifier. Untie them."
        )


def _ask(extractors: FeatureBank, net: nn.Module, args: Any, kwargs: Any) -> None:
    extractors._before = extractors.earlier(*args, **kwargs)


def _tell(extractors: FeatureBank, layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
    return extractors.tell(args[0] if args else kwargs["input"], out)


def _forget(extractors: FeatureBank, net: nn.Module, args: Any, out: Any) -> None:
    extractors._before = None
