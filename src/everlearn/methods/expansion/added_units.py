"""Units added to a model: stored in separate tensors and computed through hooks, while the model's tensors stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.parameters import Params, unwrap
from everlearn.runtime.randomness import generator
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import Hook, make_hook, remove_hooks
from everlearn.surgery.resize import draw_weights, unit_columns
from everlearn.surgery.tracing import Link

Block = dict[str, Params]  # tensors of added units by layer name; AddedUnits describes them
AFFINE = ("weight", "bias")
STATISTICS = ("running_mean", "running_var")


@dataclass
class View:
    """Added units that take part in a forward pass.

    Args:
        blocks: in the order of their addition; each receives from itself and from those before it.
        head: weight of the output layer for all added units together, if units lead into it.
        active_units: for each layer, how many units of the last block take part, counted from the first. That block is
            being trained, so that its BatchNorms use the statistics of the batch. None: all blocks are complete.
    """

    blocks: list[Block] = field(default_factory=list)
    head: Tensor | None = None
    active_units: Mapping[str, int] | None = None

    def count(self, name: str) -> int:
        """Count the added units of a layer that take part."""
        if self.active_units is None:
            return sum(len(block[name]["weight"]) for block in self.blocks)
        complete_units = sum(len(block[name]["weight"]) for block in self.blocks[:-1])
        return complete_units + self.active_units[name]


class AddedUnits:
    """Positions in a model where units can be added, and the hooks that compute them.

        new units:      [h; h'] = [f(W h₀); f(W' h₀ + V' h₀')]     ' marks added units and their weights
        output layer:   W h + H' h'
        chained layer:  its old units receive h alone, its new units h and h'
        other layers:   W h + O' h', where the outputs are the units of no link (a residual stream)

    A block holds for each layer ``weight`` W', ``bias``, ``inner`` V' (if the layer itself receives from added units),
    ``out`` O' (if its added units lead into neither the output layer nor a chained one) and the entries of BatchNorms,
    ``norm0.weight`` and so on.

    Args:
        model: hooks are registered on its layers.
        owner: name of the method, whose earlier hooks are removed.
        widened_links: the links whose producers get units.
        output: name of the output layer; by default the last ``nn.Linear``.
        old_units_read_added: whether old units of chained layers also receive from added units, through an ``out``.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: str,
        widened_links: list[Link],
        output: str | None,
        old_units_read_added: bool = False,
    ) -> None:
        self.model = unwrap(model)
        self.view = View()  # only this is copied and saved together with the model's hooks
        self.head = output_layer(self.model, output)[0]
        self.owner = owner
        remove_hooks(self.model, owner, AddedUnits)
        self.links = widened_links
        self.links_by_consumer = {link.consumer: link for link in self.links}
        self.links_by_producer = {link.producer: link for link in self.links}
        self.layer_names = list({**self.links_by_consumer, **self.links_by_producer})

        # Layers whose old outputs receive from added units, with the weights ``out``.
        self.direct_consumers = set()
        for name in self.links_by_consumer:
            if name != self.head and (old_units_read_added or name not in self.links_by_producer):
                self.direct_consumers.add(name)

        self._added_inputs: Params = {}  # the part of a layer's input from added units, during its forward pass
        self._register_hooks()

    def _register_hooks(self) -> None:
        for name in self.layer_names:
            layer = self.model.get_submodule(name)
            if name in self.links_by_consumer:
                split_input = make_hook(self.owner, self._split_input, name, self.links_by_consumer[name])
                layer.register_forward_pre_hook(split_input, with_kwargs=True)
            layer.register_forward_hook(make_hook(self.owner, self._add_outputs, name), with_kwargs=True)

        for link in self.links:
            for name in link.norms:
                norm = self.model.get_submodule(name)
                norm.register_forward_pre_hook(make_hook(self.owner, self._split_input, name, link), with_kwargs=True)
                norm.register_forward_hook(make_hook(self.owner, self._normalize, name, link))

    def is_attached_to(self, model: nn.Module) -> bool:
        """Whether all hooks are on a model: other methods remove them, and layers may be replaced."""
        return model is self.model and all(self._has_hook(name) for name in self.layer_names)

    def _has_hook(self, name: str) -> bool:
        for hook in self.model.get_submodule(name)._forward_hooks.values():
            if isinstance(hook, Hook) and getattr(hook.func, "__self__", None) is self:
                return True
        return False

    @contextmanager
    def using_view(self, view: View) -> Iterator[None]:
        """Compute the units of another view inside the context."""
        previous_view = self.view
        self.view = self.move_view(view)
        try:
            yield
        finally:
            self.view = previous_view

    def move_view(self, view: View) -> View:
        """Return a view with its tensors on the device and in the dtype of the model's weights."""
        blocks: list[Block] = []
        for block in view.blocks:
            moved_block: Block = {}
            for name, tensors in block.items():
                moved_block[name] = {
                    leaf: placed_like(v, self._reference_tensor(name, leaf)) for leaf, v in tensors.items()
                }
            blocks.append(moved_block)

        head = view.head
        if head is not None:
            head = placed_like(head, self.layer_weight(self.head))
        return View(blocks, head, view.active_units)

    def layer_weight(self, name: str) -> Tensor:
        """Return the weight of a layer of the model."""
        return cast(Tensor, self.model.get_submodule(name).weight)

    def _reference_tensor(self, name: str, leaf: str) -> Tensor:
        """Return the model's tensor that gives a tensor of a block its device and dtype."""
        link = self.links_by_producer[name]
        prefix, _, norm_leaf = leaf.partition(".")
        if norm_leaf:
            norm_name = link.norms[int(prefix.removeprefix("norm"))]
            return cast(Tensor, getattr(self.model.get_submodule(norm_name), norm_leaf))
        if leaf == "out":
            return self.layer_weight(link.consumer)
        return self.layer_weight(name)

    def create_block(self, earlier_units: Mapping[str, int], new_units: Mapping[str, int]) -> Block:
        """Create a block of zeros.

        Args:
            earlier_units: for each layer, how many units were added before.
            new_units: for each layer, how many units the block has.
        """
        block: Block = {}
        for name, link in self.links_by_producer.items():
            layer = self.model.get_submodule(name)
            weight = self.layer_weight(name)
            count = new_units[name]
            block[name] = {"weight": weight.new_zeros(count, *weight.shape[1:])}
            if layer.bias is not None:
                block[name]["bias"] = weight.new_zeros(count)

            # Weights to and from other added units.
            input_link = self.links_by_consumer.get(name)
            if input_link is not None:
                input_units = earlier_units[input_link.producer] + new_units[input_link.producer]
                inner_shape = (count, input_units * input_link.repeat, *weight.shape[2:])
                block[name]["inner"] = weight.new_zeros(inner_shape)
            if link.consumer in self.direct_consumers:
                consumer_weight = self.layer_weight(link.consumer)
                out_shape = (len(consumer_weight), count * link.repeat, *consumer_weight.shape[2:])
                block[name]["out"] = consumer_weight.new_zeros(out_shape)

            for i, norm_name in enumerate(link.norms):
                norm = self.model.get_submodule(norm_name)
                for leaf in (*AFFINE, *STATISTICS):
                    entries = getattr(norm, leaf)
                    if entries is not None:
                        block[name][f"norm{i}.{leaf}"] = entries.new_zeros(count)
        return block

    @torch.no_grad()
    def initialize_units(
        self,
        block: Block,
        earlier_units: Mapping[str, int],
        old_count: Mapping[str, int],
        new_count: Mapping[str, int],
        seed: int,
    ) -> None:
        """Initialize the units of a block from ``old_count`` up to ``new_count`` in each layer.

        Their outgoing weights stay zero, so that the model's outputs do not change. Weights from units of the same
        block, or from the model's input, are drawn as in a new layer. Weights from earlier units start at zero: those
        were trained for other tasks, and would dominate the new units if the tasks differ.

        Args:
            block: changed in place.
            earlier_units: for each layer, how many units were added before the block.
            old_count: for each layer, how many units of the block are initialized already.
            new_count: for each layer, how many units of the block are to be initialized in the end.
            seed: of the draws.
        """
        for name, tensors in block.items():
            count = new_count[name] - old_count[name]
            if count <= 0:
                continue
            rows = slice(old_count[name], new_count[name])
            weight = tensors["weight"]

            # Columns of V' for the units of the same block in the layer below.
            first_column = 0
            end_column = 0
            input_link = self.links_by_consumer.get(name)
            if input_link is not None:
                first_unit = earlier_units[input_link.producer]
                first_column = first_unit * input_link.repeat
                end_column = (first_unit + new_count[input_link.producer]) * input_link.repeat
            num_columns = end_column - first_column

            fan_in = (num_columns or weight.shape[1]) * weight[0, 0].numel()
            source = generator(seed, "units", name, old_count[name])
            for leaf, v in tensors.items():
                if leaf == "bias" or (leaf == "weight" and not num_columns):
                    v[rows] = draw_weights((count, *v.shape[1:]), fan_in, v, source)
                elif leaf == "inner":
                    inner_shape = (count, num_columns, *v.shape[2:])
                    v[rows, first_column:end_column] = draw_weights(inner_shape, fan_in, v, source)
                elif leaf.endswith((".weight", "_var")):
                    v[rows] = 1

    @torch.no_grad()
    def select_units(
        self, block: Block, head: Tensor | None, earlier_units: Mapping[str, int], selected: Mapping[str, Tensor]
    ) -> tuple[Block, Tensor | None]:
        """Copy selected units of a block.

        Args:
            block: the block.
            head: weight of the output layer for all added units.
            earlier_units: for each layer, how many units were added before the block.
            selected: for each layer, the indices of the selected units in the block.

        Returns:
            a smaller block, and the head for earlier and selected units.
        """
        smaller_block: Block = {}
        for name, tensors in block.items():
            rows = selected[name]
            smaller_block[name] = {n: v.detach()[rows] for n, v in tensors.items() if n not in ("inner", "out")}

            input_link = self.links_by_consumer.get(name)
            if input_link is not None:
                columns = _added_columns(input_link, earlier_units, selected)
                smaller_block[name]["inner"] = tensors["inner"].detach()[rows][:, columns]
            if "out" in tensors:
                columns = unit_columns(rows, self.links_by_producer[name].repeat)
                smaller_block[name]["out"] = tensors["out"].detach()[:, columns]

        if head is not None:
            head_columns = _added_columns(self.links_by_consumer[self.head], earlier_units, selected)
            head = head.detach()[:, head_columns]
        return smaller_block, head

    def layer_tensors(self, view: View, name: str) -> list[Params]:
        """List the tensors of a layer's added units, block by block; of the last block the active units only."""
        tensors_by_block = [block[name] for block in view.blocks]
        if view.active_units is None:
            return tensors_by_block

        current_tensors = tensors_by_block[-1]
        count = view.active_units[name]
        active_tensors = {leaf: v[:count] for leaf, v in current_tensors.items()}
        input_link = self.links_by_consumer.get(name)
        if input_link is not None:
            num_columns = view.count(input_link.producer) * input_link.repeat
            active_tensors["inner"] = active_tensors["inner"][:, :num_columns]
        if "out" in current_tensors:
            active_tensors["out"] = current_tensors["out"][:, : count * self.links_by_producer[name].repeat]
        return [*tensors_by_block[:-1], active_tensors]

    def _split_input(self, name: str, link: Link, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Give the layer the old units alone, and store the added ones for its other hook."""
        num_added = self.view.count(link.producer)
        if not num_added:
            return None

        repeat = 1
        if name == link.consumer:
            repeat = link.repeat
        x = _layer_input(args, kwargs)
        axis = _unit_axis(layer)
        expected_width = (link.width + num_added) * repeat
        if x.shape[axis] != expected_width:
            raise ValueError(
                f"{name!r} should get {expected_width} inputs, {link.width * repeat} from the model's units and the "
                f"rest from added ones, but it gets {x.shape[axis]}: the model's code must not fix a number of units, "
                "as x.view(-1, 64) does; write x.flatten(1)."
            )

        old_inputs, self._added_inputs[name] = x.split([link.width * repeat, num_added * repeat], axis)
        return (old_inputs, *args[1:]), {n: v for n, v in kwargs.items() if n != "input"}

    def _add_outputs(self, name: str, layer: nn.Module, args: Any, kwargs: Any, outputs: Tensor) -> Tensor:
        """Add what the layer receives from added units to its outputs, and append the outputs of its added units."""
        added_inputs = self._added_inputs.pop(name, None)
        if added_inputs is not None:
            outputs = self._add_contributions(name, layer, added_inputs, outputs)
        if name not in self.links_by_producer or not self.view.blocks:
            return outputs

        # f(W' h₀ + V' h₀') without the activation, which follows in the model.
        added_outputs = []
        for tensors in self.layer_tensors(self.view, name):
            if not len(tensors["weight"]):
                continue
            block_outputs = _apply(layer, _layer_input(args, kwargs), tensors["weight"], tensors.get("bias"))
            if added_inputs is not None and "inner" in tensors and tensors["inner"].shape[1]:
                block_inputs = added_inputs.narrow(_unit_axis(layer), 0, tensors["inner"].shape[1])
                block_outputs = block_outputs + _apply(layer, block_inputs, tensors["inner"])
            added_outputs.append(block_outputs)
        if not added_outputs:
            return outputs
        return torch.cat([outputs, *added_outputs], _unit_axis(layer))

    def _add_contributions(self, name: str, layer: nn.Module, added_inputs: Tensor, outputs: Tensor) -> Tensor:
        """Compute W h + H' h' for the output layer, and W h + O' h' for direct consumers."""
        axis = _unit_axis(layer)
        if name == self.head and self.view.head is not None:
            return outputs + _apply(layer, added_inputs, self.view.head[:, : added_inputs.shape[axis]])
        if name not in self.direct_consumers:
            return outputs

        link = self.links_by_consumer[name]
        start = 0
        for tensors in self.layer_tensors(self.view, link.producer):
            width = len(tensors["weight"]) * link.repeat
            if width:
                outputs = outputs + _apply(layer, added_inputs.narrow(axis, start, width), tensors["out"])
            start += width
        return outputs

    def _normalize(self, name: str, link: Link, norm: Any, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
        """Normalize added units with entries of their block; only the block in training uses the batch's statistics."""
        added_inputs = self._added_inputs.pop(name, None)
        if added_inputs is None:
            return outputs

        # The producer's mode is the one that the loop has set; a frozen norm stays in evaluation mode.
        is_training = self.view.active_units is not None and self.model.get_submodule(link.producer).training
        momentum = 0.1 if norm.momentum is None else norm.momentum
        prefix = f"norm{link.norms.index(name)}"

        normalized = [outputs]
        start = 0
        tensors_by_block = self.layer_tensors(self.view, link.producer)
        for tensors in tensors_by_block:
            width = len(tensors["weight"])
            if not width:
                continue
            mean, variance, scale, shift = (tensors.get(f"{prefix}.{leaf}") for leaf in (*STATISTICS, *AFFINE))
            uses_batch = mean is None or (is_training and tensors is tensors_by_block[-1])
            x = added_inputs.narrow(1, start, width)
            normalized.append(F.batch_norm(x, mean, variance, scale, shift, uses_batch, momentum, norm.eps))
            start += width
        return torch.cat(normalized, 1)


def _added_columns(link: Link, earlier_units: Mapping[str, int], selected: Mapping[str, Tensor]) -> Tensor:
    """Return a consumer's columns for all units added earlier and for the selected ones of a block."""
    rows = selected[link.producer]
    count = earlier_units[link.producer]
    earlier_rows = torch.arange(count, device=rows.device)
    return unit_columns(torch.cat([earlier_rows, rows + count]), link.repeat)


def placed_like(v: Tensor, reference: Tensor) -> Tensor:
    """Move a tensor to the device and dtype of a reference; return the same tensor if it has them."""
    if (v.device, v.dtype) == (reference.device, reference.dtype):
        return v
    return v.to(reference)


def as_parameters(block: Block) -> Block:
    """Return a block with its tensors as parameters, except running statistics."""
    return {name: {leaf: _as_parameter(leaf, v) for leaf, v in tensors.items()} for name, tensors in block.items()}


def _as_parameter(leaf: str, v: Tensor) -> Tensor:
    if "running" in leaf or isinstance(v, nn.Parameter):
        return v
    return nn.Parameter(v)


def _layer_input(args: Any, kwargs: Any) -> Tensor:
    """Return the input of a layer, given by position or by name."""
    return cast(Tensor, args[0] if args else kwargs["input"])


def _unit_axis(layer: nn.Module) -> int:
    """Return the axis of units in a layer's input and output."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return 1
    if isinstance(layer, nn.Linear):
        return -1
    return -1 - len(layer.kernel_size)  # type: ignore[arg-type]


def _apply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a layer with another weight and bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    return cast(Tensor, layer._conv_forward(x, weight, bias))
