"""Columns of a progressive network, and lateral connections from each column to later ones."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import Params
from everlearn.surgery.hooks import Hook
from everlearn.surgery.tracing import num_inputs

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LayerInputs = dict[str, list[Tensor]]  # inputs of the layers of a column, call by call


class Lateral(nn.Module):
    """Lateral connection from earlier columns into a layer, without biases.

        adapter:  U σ(V [α_j h_j])
        linear:   Σ_j U_j h_j

    h_j is the input of the same layer in column j. With α = 0 an adapter contributes nothing.

    Args:
        layer: the layer of the new column.
        widths: number of inputs of that layer in each earlier column.
        adapter: whether to use an adapter.
    """

    def __init__(self, layer: Any, widths: list[int], adapter: bool) -> None:
        super().__init__()
        width = num_inputs(layer)
        conv = _convolution_type(layer)
        self.adapter = adapter
        # Channels come before the spatial dimensions of a convolution.
        self.axis = -1
        if conv is not None:
            self.axis = -1 - len(layer.kernel_size)

        # α and V bring the inputs of all columns to the width of the layer's input; U has the shape of the layer.
        if adapter:
            self.alpha = nn.Parameter(0.1 * torch.randn(len(widths)))
            if conv is None:
                self.V = nn.Linear(sum(widths), width, bias=False)
            else:
                self.V = conv(sum(widths), width, 1, bias=False)
            widths = [width]
        self.U = nn.ModuleList(_layer_like(layer, n) for n in widths)
        self.to(layer.weight.device, layer.weight.dtype)

    def forward(self, h: list[Tensor]) -> Tensor:
        """Compute the contribution to the layer's outputs from its inputs in each earlier column."""
        if self.adapter:
            scaled = [alpha_j * h_j for alpha_j, h_j in zip(self.alpha.unbind(), h, strict=True)]
            h = [self.V(torch.cat(scaled, self.axis)).relu()]
        first, *remaining = [U_j(h_j) for U_j, h_j in zip(self.U, h, strict=True)]
        total: Tensor = sum(remaining, first)
        return total


class ColumnPass:
    """A forward pass of a column: it records the inputs of layers and adds the laterals to their outputs.

    Args:
        laterals: laterals into the column, by ``module_key`` of the layer.
        earlier_inputs: inputs of the layers of each earlier column; None before these columns have run.
    """

    def __init__(self, laterals: Any, earlier_inputs: list[LayerInputs] | None = None) -> None:
        self.laterals = laterals
        self.earlier_inputs = earlier_inputs
        self.inputs: LayerInputs = {}

    def register_hooks(self, net: nn.Module, layers: list[str]) -> list[Any]:
        """Register a hook on each of these layers."""
        candidates = find_layers(net)
        handles = []
        for name in layers:
            if name in candidates:
                hook = Hook(self.add_lateral, name)
                handles.append(candidates[name].register_forward_hook(hook, with_kwargs=True))
        return handles

    def add_lateral(self, name: str, layer: nn.Module, args: Any, kwargs: Any, outputs: Tensor) -> Tensor | None:
        """Record the input of a layer, and return its outputs plus its lateral; None if it has no lateral."""
        if self.earlier_inputs is None:
            raise RuntimeError(f"PNN's columns run together: call the model as a whole, not its part {name} alone.")
        calls = self.inputs.setdefault(name, [])
        calls.append(args[0] if args else kwargs["input"])

        if module_key(name) not in self.laterals:
            return None
        # An earlier column may have called this layer less often.
        if any(len(inputs.get(name, ())) < len(calls) for inputs in self.earlier_inputs):
            return None
        h = [inputs[name][len(calls) - 1] for inputs in self.earlier_inputs]
        contribution: Tensor = self.laterals[module_key(name)](h)
        return outputs + contribution


class ColumnStack(nn.Module):
    """Frozen columns in evaluation mode, with laterals from each to all later ones; returns the last one's outputs.

    Hooks are registered for each pass and removed after it. Between passes all columns are plain modules, which can be
    copied, saved and exported. The hooks also keep torch's transformer layers off their fast path, which calls no
    layers.
    """

    def __init__(self, layers: list[str]) -> None:
        super().__init__()
        self.layers = layers
        self.columns = nn.ModuleList()
        self.laterals = nn.ModuleList()
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of the last column."""
        return self.run(len(self.columns), *args, **kwargs)[0]

    def run(self, count: int, *args: Any, **kwargs: Any) -> tuple[Any, list[LayerInputs]]:
        """Run the first ``count`` columns.

        Returns:
            The outputs of the last of them, and the inputs of the layers of each.
        """
        outputs = None
        earlier_inputs: list[LayerInputs] = []
        for net, laterals in islice(zip(self.columns, self.laterals, strict=True), count):
            column_pass = ColumnPass(laterals, list(earlier_inputs))
            handles = column_pass.register_hooks(net, self.layers)
            try:
                outputs = net(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()
            earlier_inputs.append(column_pass.inputs)
        return outputs, earlier_inputs

    def add(self, net: nn.Module, laterals: nn.ModuleDict) -> None:
        """Add a column and the laterals into it."""
        self.columns.append(net.eval().requires_grad_(False))
        self.laterals.append(laterals.eval().requires_grad_(False))

    def shorten(self, count: int) -> None:
        """Keep the first ``count`` columns."""
        del self.columns[count:]
        del self.laterals[count:]

    def create_laterals(
        self, net: nn.Module, k: int, adapter: bool, stored: dict[str, Params] | None = None
    ) -> nn.ModuleDict:
        """Create the laterals from the first k columns into a network.

        Args:
            net: the network of column k.
            k: number of earlier columns.
            adapter: whether to use adapters.
            stored: saved laterals by layer, which decide about adapters; None for new ones.
        """
        laterals = nn.ModuleDict()
        if not k:
            return laterals
        candidates = find_layers(net)
        names = list(self.layers)
        if stored is not None:
            names = list(stored)
        for name in names:
            if name not in candidates:
                continue
            widths = [num_inputs(column.get_submodule(name)) for column in islice(self.columns, k)]
            if stored is None:
                laterals[module_key(name)] = Lateral(candidates[name], widths, adapter)
            else:
                lateral = Lateral(candidates[name], widths, "alpha" in stored[name])
                lateral.load_state_dict(stored[name])
                laterals[module_key(name)] = lateral
        return laterals

    def connect(self, net: nn.Module, k: int, laterals: nn.ModuleDict, compiled: bool = False) -> None:
        """Register hooks that run the first k columns before each pass of a network and add these laterals to it."""
        column_pass = ColumnPass(laterals)
        run_columns = _run_columns
        clear_inputs = _clear_inputs
        if compiled:
            # The columns' own hooks come and go, which cannot be compiled.
            run_columns = torch.compiler.disable(_run_columns)
            clear_inputs = torch.compiler.disable(_clear_inputs)
        net.register_forward_pre_hook(Hook(run_columns, self, k, column_pass), with_kwargs=True)
        net.register_forward_hook(Hook(clear_inputs, column_pass))
        column_pass.register_hooks(net, self.layers)


def record_layers(net: nn.Module, layers: list[str]) -> None:
    """Register hooks that append to ``layers`` each layer that is called with an input that depends on parameters."""
    for name, layer in find_layers(net).items():
        layer.register_forward_hook(Hook(_record_layer, layers, name), with_kwargs=True)


def is_connected(net: nn.Module, laterals: nn.ModuleDict) -> bool:
    """Whether these laterals lead into a network."""
    for hook in net._forward_pre_hooks.values():
        if isinstance(hook, Hook) and isinstance(hook.args[-1], ColumnPass) and hook.args[-1].laterals is laterals:
            return True
    return False


def find_layers(net: nn.Module) -> dict[str, Any]:
    """Return the layers that can have laterals, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, (nn.Linear, *CONVOLUTIONS))}


def module_key(name: str) -> str:
    """Turn the name of a layer into a key of an ``nn.ModuleDict``, which may contain no dot."""
    return name.replace(".", "/")


def _record_layer(layers: list[str], name: str, layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
    layer_input = args[0] if args else kwargs["input"]
    if layer_input.requires_grad and torch.is_grad_enabled() and name not in layers:
        layers.append(name)


def _run_columns(stack: ColumnStack, k: int, column_pass: ColumnPass, net: nn.Module, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        _, column_pass.earlier_inputs = stack.run(k, *args, **kwargs)
    column_pass.inputs = {}


def _clear_inputs(column_pass: ColumnPass, net: nn.Module, args: Any, outputs: Any) -> None:
    column_pass.earlier_inputs = None
    column_pass.inputs = {}


def _convolution_type(layer: Any) -> Any:
    return next((kind for kind in CONVOLUTIONS if isinstance(layer, kind)), None)


def _layer_like(layer: Any, width: int) -> nn.Module:
    """Create a layer with outputs of the same shape from ``width`` inputs; ungrouped, without a bias."""
    conv = _convolution_type(layer)
    if conv is None:
        return nn.Linear(width, layer.out_features, bias=False)
    options = {n: getattr(layer, n) for n in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    new_layer: nn.Module = conv(width, layer.out_channels, **options, bias=False)
    return new_layer
