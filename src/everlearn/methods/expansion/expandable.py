"""Expandable representation: a feature extractor more for every task, and one classifier over all of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.batch import Batch, Transform
from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.likelihood import Categorical
from everlearn.core.parameters import Params, accumulate_dtype, check_finite, unwrap
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.memory import Memory
from everlearn.methods.expansion.balanced_finetuning import fitted, scaled, viewed
from everlearn.methods.expansion.feature_bank import FeatureBank, check_separate, wider
from everlearn.methods.replay.base import Replay, Rows
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.functional import filled_copy
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import move_like, remove_hooks, without_hooks

CHUNK = 256  # examples per pass when a task has ended


@dataclass(eq=False)
class ExpandableRepresentation(Replay):
    """Dynamically expandable representation (Yan, Xie & He, CVPR 2021), whose acronym DER is dark experience replay's here.

        representation: Φ(x) = [φ₁(x) … φ_T(x)], φ_T starts as φ_{T-1}; φ₁ … φ_{T-1} are frozen, in evaluation mode
        classifier:     out = W Φ(x) + b, one for all classes; W's columns for φ_T start anew, the others go on
        loss:           L = CE(W Φ + b, y) + auxiliary · CE(A φ_T + a, y′), over new and remembered examples as one batch
                        y′ = 0 for what was there before this task, 1 … n for the task's n new classes; no A in task 1
        after the task: W, b learned on, Φ fixed, from equally many examples of all classes, with softmax(out / temperature)

    Your model is always the newest extractor: φ is what its output layer is given, ``model(x)`` gives ``out`` in any loop, and
    the rest of W and the auxiliary head are ``method.parameters()``. Memory is filled when a task ends.

    Args:
        capacity: how many examples are kept.
        size: how many are replayed at a step; by default as many as the current batch has.
        policy: which are kept: "herding" (equal shares for all classes; of each those whose mean features follow the class's),
            "balanced" (equal shares, at random), "reservoir" or "ring" as in other replay.
        auxiliary: weight of the auxiliary loss.
        tune_epochs: passes of the fine-tuning at the end of a task; 0 for none.
        tune_from: where it starts: the classifier as "learned", or drawn "anew" as in the paper, which needs a larger memory.
        tune_lr: its learning rate.
        temperature: its softmax's; what is learned is kept divided by it, so that outputs are those that were fitted.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="growth",
        pro="old features stay as they are, and far less is forgotten than by replay of the same memory",
        con="a whole feature extractor more for every task, and examples besides",
        step=3.4,
        step_growth=0.8,
        copies=(-1.0, 1.0),
        keeps_examples=True,
        grows=True,
    )

    deployable: ClassVar[bool] = False  # the model is the newest of several extractors

    policy: Literal["herding", "balanced", "reservoir", "ring"] = field(default="herding", kw_only=True)  # type: ignore[assignment]
    auxiliary: NonNegative = field(default=1.0, kw_only=True)
    tune_epochs: Annotated[int, Range(0)] = field(default=50, kw_only=True)
    tune_from: Literal["learned", "anew"] = field(default="learned", kw_only=True)
    tune_lr: NonNegative = field(default=0.05, kw_only=True)
    temperature: Annotated[float, Range(1e-3)] = field(default=5.0, kw_only=True)
    output: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.extractors: list[Params] = []  # the frozen ones; the newest is the user's model
        self.blocks: list[Tensor] = []  # the classifier's weights for each of them
        self.head: Params = {}  # the auxiliary head
        self.new: list[int] = []  # the classes it tells apart
        self.known: list[int] = []  # classes that tasks before had
        self.current: int | None = None
        self.transformed: list[int] = []  # the tasks that see inputs through some transform
        self.begun = 0
        self.open: bool = False
        self.seed = 0
        self.sizes: dict[str, float] = {}
        self._live: FeatureBank | None = None
        self._start: list[Tensor] = []  # its own parameters when the task began
        self._old: Tensor | None = None  # which examples of the joined batch are of earlier tasks
        self._views: dict[int, Transform | None] = {}  # how each task's inputs are seen in tests

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze a copy of the extractor, let the model go on as the next one, beside it."""
        inner, (name, layer) = unwrap(model), output_layer(model, self.output)
        check_separate(inner, name, layer)
        number = getattr(task, "id", None)
        if self._is_new(number):
            if self.begun:
                self._expand(inner, layer)
            else:
                self.seed = torch.initial_seed()
            self._name_classes(task, layer)
            self.begun, self.current = self.begun + 1, number
        self.open = True
        self._note_views(task, number)
        self._start = [p.detach().clone() for p in self._attach(model).learning()]

    def make_memory(self) -> Memory:
        """The same in all processes, each of which passes over the whole task."""
        return Memory(self.capacity, self.policy)

    def resume(self, model: nn.Module, task: Any) -> None:
        """The extractors of the loaded state beside the model."""
        self.begin_task(model, task)

    def parameters(self) -> list[nn.Parameter]:
        """The classifier's weights for the frozen extractors, and the auxiliary head."""
        return [] if self._live is None else self._live.learning()

    def join(self, batch: Batch) -> Batch:
        """New and remembered examples."""
        drawn, whole, self._old = self.draw(batch), batch, None
        old = torch.zeros(len(batch), dtype=torch.bool, device=batch.labels().device)
        if drawn is not None:
            whole, t = batch + drawn[0], drawn[1]["t"]
            old = torch.cat([old, ~torch.isin(t, self._numbers(batch).to(t.device))])
        if self._live is not None and self._live.auxiliary is not None:
            self._old, self._live.listening = old, True
        return whole

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """Of the classifier, and of the auxiliary head."""
        if not self.begun:
            raise ValueError(
                "ExpandableRepresentation knows of no task: call begin_task(model, task) before the first step."
            )
        loss, old = batch.loss(out), self._old
        if not isinstance(batch.likelihood, Categorical) or batch.labels().dim() != 1:
            raise TypeError(
                f"ExpandableRepresentation is about one class per example, not {batch.likelihood} with labels of shape "
                f"{tuple(batch.labels().shape)}: use ER."
            )
        seen = None if self._live is None else self._live.heard()
        if old is None or seen is None or self._live is None or self._live.auxiliary is None:
            return loss
        self._old = None
        return loss + self.auxiliary * F.cross_entropy(self._live.auxiliary(seen), self.targets(batch.labels(), old))

    def targets(self, y: Tensor, old: Tensor) -> Tensor:
        """The auxiliary head's: 0 for examples of earlier tasks and classes known before, else 1 + the place among the new.

        Labels that are ignored (-100) stay so.
        """
        new = torch.tensor(self.new, device=y.device)
        known = torch.where(old, 0, ((y[:, None] == new) * torch.arange(1, len(new) + 1, device=y.device)).sum(1))
        return torch.where(y == -100, y, known)

    def observe(self, batch: Batch, out: Tensor) -> None:
        """Nothing: the memory is filled when the task ends, with features that are learned."""

    def _after_forward(self, model: nn.Module) -> None:
        """Nothing to check: every extractor keeps the running statistics of its own task."""

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Balance the classifier, then remember some of the task's examples."""
        if not self.begun:
            raise ValueError("ExpandableRepresentation.end_task before any begin_task(model, task).")
        if not self.open:
            return
        inner, live = unwrap(model), self._attach(model)
        wanted = [
            (p, a) for p, a in zip(live.learning(), self._start, strict=False) if p.grad is not None and p.grad.any()
        ]
        if wanted and all(torch.equal(p, a) for p, a in wanted):
            raise ValueError(
                "The optimizer does not move ExpandableRepresentation's own parameters: make it after begin_task(model, task), of "
                "[*model.parameters(), *method.parameters()]."
            )
        check_finite({**dict(inner.named_parameters()), **{str(i): p for i, p in enumerate(live.learning())}})
        phi, rows = self._pass_over(inner, live, task)
        if len(live) and self.tune_epochs and len(self.memory):
            self._balance(inner, live, task, phi, rows)
        for p in live.learning():
            p.grad = None  # a live optimizer would go on moving them
        self.memory.add(**rows, **({"features": F.normalize(phi, dim=-1)} if self.policy == "herding" else {}))
        count = len(live) + 1
        self.sizes = {"extractors": count, "feature width": count * output_layer(inner, self.output)[1].in_features}
        self.open = False
        super().end_task(model, task)

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """With all extractors; the task of an example is not needed."""
        if self.begun:
            self._attach(model)
        return super().predict(model, x, task)

    def extra_parameters(self, model: nn.Module) -> int:
        """The frozen extractors, and the classifier's weights for them; the auxiliary head serves training alone."""
        names = {name for name, _ in unwrap(model).named_parameters()}
        blocks = self.blocks if self._live is None else list(self._live.blocks)
        frozen = sum(v.numel() for extractor in self.extractors for name, v in extractor.items() if name in names)
        return frozen + sum(block.numel() for block in blocks)

    def diagnostics(self) -> dict[str, float]:
        """How many extractors there are, and how wide their features are together."""
        return dict(self.sizes)

    def export(self, model: nn.Module) -> nn.Module:
        """A plain module of its own that answers with all extractors, in evaluation mode."""
        live, layer = self._attach(model), output_layer(model, self.output)[1]
        return live.together(unwrap(model), layer)

    def detach(self, model: nn.Module) -> None:
        """The model stays the newest extractor, with the classifier's weights for it alone."""
        remove_hooks(unwrap(model))

    def state_dict(self) -> dict[str, Any]:
        """With the classifier and the auxiliary head as they are just now."""
        if self._live is not None:
            self.blocks = [b.detach().clone() for b in self._live.blocks]
            head = self._live.auxiliary
            self.head = {} if head is None else {n: v.detach().clone() for n, v in head.named_parameters()}
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned; the next ``begin_task`` or ``predict`` puts the extractors beside the model."""
        self._live = None
        super().load_state_dict(state)

    def _note_views(self, task: Any, number: int | None) -> None:
        """How the task's inputs are seen; tell if nobody knows any more how those of a remembered task were."""
        view, augmented = getattr(task, "eval_transform", None), getattr(task, "transform", None)
        if number is not None:
            self._views[number] = view
            if self._transforms or augmented is not None:
                self._transforms[number] = augmented
            self.transformed = sorted({*self.transformed, *([number] if view or augmented else [])})
        lost = [k for k in (self.memory["t"].unique().tolist() if len(self.memory) else ()) if k not in self._views]
        self._views |= dict.fromkeys(k for k in lost if k >= 0 and k not in self.transformed)
        if unknown := [str(k) for k in lost if k in self.transformed]:
            warnings.warn(
                f"ExpandableRepresentation remembers examples of task {', '.join(unknown)}, whose transforms it does not know: a "
                f"checkpoint holds no functions. They are seen through those of {as_task(task)}; if theirs were others, give tasks "
                "inputs that are transformed already.",
                stacklevel=3,
            )

    def _is_new(self, number: int | None) -> bool:
        """Whether this is another task than the last one begun, and not a part of it."""
        new = not self.begun or (not self.open if number is None else self.current != number)
        if new and self.open:
            raise ValueError(f"Task {self.current} has not ended: call end_task(model, task) before the next begins.")
        return new

    def _expand(self, inner: nn.Module, layer: nn.Linear) -> None:
        """The extractor as it is, frozen, with its part of the classifier; the model's own part of it starts anew."""
        live, own = self._extractors(inner), {id(p) for p in layer.parameters()}
        tensors = [*inner.named_parameters(), *inner.named_buffers()]
        self.extractors.append({n: v.detach().clone() for n, v in tensors if id(v) not in own})
        with without_hooks(inner):
            live.add(filled_copy(inner, self.extractors[-1]), layer.weight)
        with seeded(derive(self.seed, "classifier", self.begun), layer.weight.device), torch.no_grad():
            live.widen(layer.out_features)
            layer.weight.copy_(wider(layer, layer.in_features).weight)

    def _name_classes(self, task: Any, layer: nn.Linear) -> None:
        """Which classes the task brings, as far as its table tells, and an auxiliary head for them."""
        number, table = getattr(task, "id", None), getattr(task, "allowed", None)
        every = list(range(layer.out_features)) if table is None else table[number].nonzero().flatten().tolist()
        self.new = [c for c in every if c not in self.known] or every
        self.known = sorted({*self.known, *every})
        if self._live is not None:
            self._live.auxiliary = None
        if self._live is not None and self.begun and self.auxiliary:
            with seeded(derive(self.seed, "auxiliary", self.begun), layer.weight.device):
                like = layer.weight
                self._live.auxiliary = nn.Linear(layer.in_features, len(self.new) + 1, True, like.device, like.dtype)

    def _extractors(self, inner: nn.Module) -> FeatureBank:
        """Those put away, where the model is."""
        if self._live is None:
            live = FeatureBank(output_layer(inner, self.output)[0])
            for tensors, weight in zip(self.extractors, self.blocks, strict=True):
                with without_hooks(inner):
                    live.add(filled_copy(inner, tensors), weight)
            if self.head:
                (outputs, inputs), like = self.head["weight"].shape, self.head["weight"]
                with seeded(0):
                    live.auxiliary = nn.Linear(inputs, outputs, True, like.device, like.dtype)
                live.auxiliary.load_state_dict(self.head)
            self._live = live
        move_like(self._live, inner)
        return self._live

    def _attach(self, model: nn.Module) -> FeatureBank:
        """Hooks on the user's model, unless they are there."""
        inner = unwrap(model)
        live = self._extractors(inner)
        if not live.is_on(inner):
            live.lead_into(inner, any("_orig_mod" in m._modules for m in model.modules()))
        return live

    def _numbers(self, batch: Batch) -> Tensor:
        """The tasks of a batch."""
        return torch.tensor([-1 - self.tasks]) if batch.t is None else batch.t.unique()

    def _pass_over(self, inner: nn.Module, live: FeatureBank, task: Any) -> tuple[Tensor, Rows]:
        """The features of all the task's examples, and what the memory may keep of each."""
        device, found, kept = next(inner.parameters()).device, [], []
        for batch in as_task(task).examples(CHUNK):
            rows = batch.labeled_rows()
            batch = batch if rows is None else batch[rows]
            found.append(live.all_features(inner, batch.to(device).x))
            kept.append(self.row_fields(batch, batch.labels()))
        if not kept:
            raise ValueError(
                f"There are no examples of {as_task(task)} to remember; a generator can be read once only: give a list or a "
                "DataLoader."
            )
        return torch.cat(found), {n: tree_map(lambda *v: torch.cat(v), *(k[n] for k in kept)) for n in ("x", "y", "t")}

    def _balance(self, inner: nn.Module, live: FeatureBank, task: Any, phi: Tensor, rows: Rows) -> None:
        """Let the classifier learn on, or anew, from every class of every task as often as from any other."""
        memory, view, seen = self.memory.rows(), getattr(task, "eval_transform", None), []
        old = ~torch.isin(memory["t"], rows["t"].cpu().unique())
        if not old.any():
            return
        for at in torch.arange(len(old)).split(CHUNK):
            x = tree_map(lambda v, at=at: v[at], memory["x"])
            x = viewed(x, memory["t"][at], self._views, view)
            seen.append(live.all_features(inner, tree_map(lambda v: v.to(phi.device), x)))
        y, t = (torch.cat([memory[n], rows[n].cpu()]) for n in ("y", "t"))
        groups = torch.stack([t, y]).unique(dim=1, return_inverse=True)[1]
        share = int(groups[: len(old)][old].bincount().max())
        layer = output_layer(inner, self.output)[1]
        inputs = torch.cat([*seen, phi]).to(accumulate_dtype(layer.weight))
        pool = Batch(inputs, y, t, getattr(task, "allowed", None)).to(phi.device)
        whole, seed = live.classifier(layer).to(inputs.dtype), derive(self.seed, "balance", self.tasks)
        if self.tune_from == "learned":
            scaled(whole, self.temperature)  # starts with the outputs it has
        else:
            with seeded(seed, phi.device):
                whole.reset_parameters()
        how = {"lr": self.tune_lr, "temperature": self.temperature}
        made = scaled(fitted(whole, pool, groups, share, self.tune_epochs, seed, **how), 1 / self.temperature)
        check_finite(dict(made.named_parameters()))
        live.write(layer, made)
