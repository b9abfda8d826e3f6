"""Parts of a network with added units, as DEN needs them: what a unit reads, what lies outside a choice of units, and twins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everlearn.core.parameters import Params
from everlearn.methods.expansion.added_units import AFFINE, STATISTICS, AddedUnits, Block
from everlearn.surgery.proximal import group_norms
from everlearn.surgery.resize import unit_columns
from everlearn.surgery.tracing import repeat_per_input


def key(block: int, layer: str, leaf: str) -> str:
    """The name of a block's tensor among parameters."""
    return f"{block}:{layer}:{leaf}"


def incoming(beside: AddedUnits, blocks: list[Block], name: str) -> list[list[str]]:
    """What a layer's units read, by name, a row per unit: of the model's own units, then of each block's."""
    up = beside.feeds.get(name)
    written = [key(b, up.producer, "out") for b in range(len(blocks))] if up and name in beside.written else []
    leaves = ["weight", *(["inner"] if up else [])]
    return [[f"{name}.weight", *written], *([key(b, name, leaf) for leaf in leaves] for b in range(len(blocks)))]


def beside_rows(beside: AddedUnits, blocks: list[Block], name: str) -> list[list[str]]:
    """What else a layer's units have, an entry per unit: biases and BatchNorm's scales and shifts."""
    norms = beside.links_by_producer[name].norms
    own = [f"{name}.bias", *(f"{norm}.{leaf}" for norm in norms for leaf in AFFINE)]
    leaves = ["bias", *(f"norm{i}.{leaf}" for i in range(len(norms)) for leaf in AFFINE)]
    return [own, *([key(b, name, leaf) for leaf in leaves] for b in range(len(blocks)))]


def sizes(beside: AddedUnits, blocks: list[Block], name: str) -> list[int]:
    """How many units a layer has: its own, then of each block."""
    return [beside.links_by_producer[name].width, *(len(b[name]["weight"]) for b in blocks)]


def outside(beside: AddedUnits, blocks: list[Block], weights: Params, chosen: Mapping[str, Tensor]) -> Params:
    """True for every entry that does not lie between two chosen units; what lies on no link is chosen."""
    locked: Params = {}

    def lock(name: str, rows: Tensor, reads: Tensor | None = None) -> None:
        if name in weights:
            p = weights[name]
            both = rows if reads is None else rows[:, None] & reads
            locked[name] = ~both.view(*both.shape, *(1,) * (p.dim() - both.dim())).expand_as(p)

    for name, link in beside.links_by_producer.items():
        parts, up = chosen[name].split(sizes(beside, blocks, name)), beside.feeds.get(name)
        own = beside.weight(name).shape[1]
        read = chosen[name].new_ones(own) if up is None else repeat_per_input(chosen[up.producer], up)
        for b, (rows, names) in enumerate(zip(parts, beside_rows(beside, blocks, name), strict=True)):
            for other in names:
                lock(other, rows)
            lock(f"{name}.weight" if b == 0 else key(b - 1, name, "weight"), rows, read[:own])
            if b and up:
                prefix = blocks[b - 1][name]["inner"].shape[1]
                lock(key(b - 1, name, "inner"), rows, read[own : own + prefix])
            if b and link.consumer in beside.written:
                wide = blocks[b - 1][name]["out"].shape[0]
                heard = chosen.get(link.consumer, rows.new_ones(wide))[:wide]
                lock(key(b - 1, name, "out"), heard, repeat_per_input(rows, link))
        if link.consumer not in beside.links_by_producer and link.consumer != beside.head:
            every = parts[0].new_ones(len(beside.weight(link.consumer)))
            lock(f"{link.consumer}.weight", every, repeat_per_input(parts[0], link))
    return locked


class UnitDuplicator:
    """Copies of drifted units, in the sleeping units of the block that learns.

    The copy goes on as the unit is now; the unit gets back what it read before the task. The output layer and all units of the
    learning block, which only the current task uses, read the copy instead of the unit.
    """

    def __init__(
        self, beside: AddedUnits, blocks: list[Block], live: Block, awake: dict[str, int], head: Tensor | None
    ) -> None:
        self.beside, self.blocks, self.live, self.awake, self.head = beside, blocks, live, awake, head
        self.before = {name: sum(sizes(beside, blocks, name)[1:]) for name in beside.links_by_producer}

    @torch.no_grad()
    def split(self, weights: Params, anchor: Params, drift: float, most: int) -> dict[str, list[int]]:
        """Copy the units that have drifted farther than allowed, the farthest first; which, by their place in the layer."""
        copied = {name: self.drifted(weights, anchor, name, drift)[:most] for name in self.beside.links_by_producer}
        slots = {name: range(self.awake[name], self.awake[name] + len(units)) for name, units in copied.items()}
        for name, units in copied.items():
            for unit, slot in zip(units, slots[name], strict=True):
                self._copy(name, unit, slot)
        for name, units in copied.items():
            self._give_back(weights, anchor, name, units)
            self.awake[name] += len(units)
        for name, units in copied.items():
            for unit, slot in zip(units, slots[name], strict=True):
                self._redirect(name, unit, slot)
        return copied

    def drifted(self, weights: Params, anchor: Params, name: str, drift: float) -> list[int]:
        """The units whose ρ = ‖w - w*‖₂ is above the bound, by their place in the layer, the largest ρ first."""
        counts, like = sizes(self.beside, self.blocks, name), self.beside.weight(name)
        rho = torch.cat([
            group_norms([like.new_zeros(n, 1), *(weights[w].detach() - anchor[w] for w in names if w in weights)])  # frozen: 0
            for n, names in zip(counts, incoming(self.beside, self.blocks, name), strict=True)
        ])  # fmt: skip
        order = rho.argsort(descending=True)
        return [int(i) for i in order[rho[order] > drift]]

    def _owner(self, name: str, unit: int) -> tuple[int, int]:
        """To whom a unit belongs, 0 the model or a block's number from 1 on, and its place there."""
        for owner, n in enumerate(sizes(self.beside, self.blocks, name)):
            if unit < n:
                return owner, unit
            unit -= n
        raise IndexError(unit)

    def _copy(self, name: str, unit: int, slot: int) -> None:
        (owner, i), mine, up = self._owner(name, unit), self.live[name], self.beside.feeds.get(name)
        link = self.beside.links_by_producer[name]
        if owner:
            for leaf, v in self.blocks[owner - 1][name].items():
                if leaf == "inner":
                    mine[leaf][slot, : v.shape[1]] = v[i]
                elif leaf != "out":
                    mine[leaf][slot] = v[i]
            return
        layer = self.beside.model.get_submodule(name)
        for leaf in ("weight", "bias"):
            if leaf in mine:
                mine[leaf][slot] = getattr(layer, leaf)[i]
        for n, norm in enumerate(link.norms):
            there = self.beside.model.get_submodule(norm)
            for leaf in (*AFFINE, *STATISTICS):
                if f"norm{n}.{leaf}" in mine:
                    mine[f"norm{n}.{leaf}"][slot] = getattr(there, leaf)[i]
        if up and name in self.beside.written:
            read = [block[up.producer]["out"][i] for block in [*self.blocks, self.live]]
            mine["inner"][slot] = torch.cat(read)

    def _give_back(self, weights: Params, anchor: Params, name: str, units: list[int]) -> None:
        up = self.beside.feeds.get(name)
        every = incoming(self.beside, self.blocks, name), beside_rows(self.beside, self.blocks, name)
        for unit in units:
            owner, i = self._owner(name, unit)
            for n in (n for names in every for n in names[owner] if n in weights):
                weights[n][i] = anchor[n][i]
            if up and owner == 0 and name in self.beside.written:
                self.live[up.producer]["out"][i] = 0  # new to it

    def _redirect(self, name: str, unit: int, slot: int) -> None:
        """Who may, reads the copy: its weight moves there."""
        link = self.beside.links_by_producer[name]
        at = unit_columns(torch.tensor([self.before[name] + slot]), link.repeat)
        own = unit < link.width
        old = unit_columns(torch.tensor([unit if own else unit - link.width]), link.repeat)
        readers: list[tuple[Tensor, Tensor]] = []
        if link.consumer == self.beside.head and self.head is not None:
            layer = self.beside.weight(self.beside.head)
            if not own or layer.requires_grad:  # a frozen output layer stays as it is
                readers.append((layer if own else self.head, self.head))
        elif link.consumer in self.live:
            theirs = self.live[link.consumer]
            readers.append((theirs["weight"] if own else theirs["inner"], theirs["inner"]))
        for source, target in readers:
            target[:, at] = source[:, old]
            source[:, old] = 0
