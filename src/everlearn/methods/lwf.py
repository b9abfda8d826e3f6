"""Learning without forgetting: on the new data, go on saying what the old model would have said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.batch import Batch
from everlearn.curvature.divergence import output_kl
from everlearn.data import inputs_alone
from everlearn.fields import NonNegative, Range, Search
from everlearn.forward import ask, read_outputs
from everlearn.heads import output_layer
from everlearn.likelihood import Bernoulli, Categorical, Likelihood
from everlearn.method import Method
from everlearn.params import unwrap
from everlearn.teacher import answer, check_known, questions, remember, softened_kl, with_task
from everlearn.traits import Traits


@dataclass(eq=False)
class LwF(Method):
    """Learning without forgetting (Li & Hoiem, TPAMI 2017).

        L = L_task + strength · Σ over old tasks k of KL( softmax(tₖ/T) ‖ softmax(zₖ/T) ), a mean over the new labels

    z are the outputs of the model and t those of the model as it was before this task, for the *new* inputs; the index k
    selects the outputs that task k may be answered with. Old outputs and all weights keep learning. The paper writes a
    cross-entropy, whose gradient is the same and which is not zero where the two models agree. There is no factor T², as in
    the authors' code. The mean is that of L_task: over examples, or over tokens where every token has a label, without those
    whose label is ignored (-100). Outputs that are not classes are compared by the same divergence: a term per output for
    Bernoulli, with T, and half the squared error over the variance for Gaussian, where a temperature has no meaning and T no part.

    Args:
        strength: λ_o; 0 is fine-tuning. The weights of van de Ven & Tolias (2019), 1/t and (1 - 1/t) T², are T² here, up to
            the scale of the whole loss.
        temperature: T; higher ones make the model keep also what it thinks unlikely.
        refuse_new: let outputs that are new to an old task take part in its softmax z, with target 0, as van de Ven & Tolias
            do in class-incremental learning: the model is also taught that the new images are of no new class.
        warmup: steps at the start of every later task in which only outputs that are new in it learn. Where a task brings
            no new outputs there is nothing to warm up.
        output: name of the output layer, for the warm-up; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="regularisation",
        pro="nothing of old tasks is kept but the model itself, and strong where tasks have outputs of their own",
        con="works as far as new inputs resemble old ones",
        step=1.6,
        copies=(2.0,),
        needs_labels=False,
        weak={
            "domain": "where tasks share outputs, a teacher that is sure keeps the model from learning",
            "class": "what it distils on new inputs does not bring the outputs of old classes back up",
        },
    )

    strength: Annotated[NonNegative, Search(1e-2, 100, late=True)] = 1.0
    temperature: Annotated[float, Range(1e-3), Search(0.5, 10, late=True)] = 2.0
    refuse_new: bool = False
    warmup: Annotated[int, Range(0)] = 0
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.latest: dict[str, Any] = {}  # the model as the last task left it, and what it can be asked
        self.teacher: dict[str, Any] = {}  # the one that teaches now
        self.learned: list[int] = []
        self.current: int | None = None
        self.begun: bool = False
        self.warmed = 0  # steps of this task's warm-up that are done
        self._asked: list[tuple[Tensor, Tensor, int, int]] | None = None
        self._likelihood: Likelihood = Categorical()
        self._warmup = Warmup()

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """The model as the last task left it becomes the teacher; chunks of one task share theirs."""
        self.current, self.begun, self._asked = getattr(task, "id", None), True, None
        if self.latest and (self.current is None or self.current != self.latest["ids"][-1]):
            self.teacher = self.latest
            self.warmed = 0
            self.resume(model, task)

    def resume(self, model: nn.Module, task: Any) -> None:
        """What is left of the warm-up."""
        self._warmup = Warmup()
        if self.warmup > self.warmed and self.teacher:
            self._warmup.begin(unwrap(model), task, self.teacher, self.warmup - self.warmed, self.output)

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """How far the answers have moved from the teacher's.

        Args:
            model: the student.
            batch: the new examples; a tensor of inputs will do.
            out: what the model answers to them, if that is known already; a Hugging Face output, read by its ``.logits``, will do.
        """
        teacher = self.teacher if self.begun else self.latest  # a loop of one's own need not begin tasks
        if not teacher or not self.strength:
            return 0.0
        if batch is None:
            raise ValueError("LwF compares answers: give the inputs, penalty(model, batch) or penalty(model, x, out).")
        if isinstance(batch, Batch):
            x, likelihood = batch.x, batch.likelihood
        else:
            x, likelihood = inputs_alone(batch), self._likelihood
        out = ask(model, x) if out is None else read_outputs(out)
        if self.warmup and not self.begun:
            raise ValueError(
                "LwF.warmup needs to know where a task begins: call begin_task(model, task) before its first step."
            )
        if isinstance(likelihood, Categorical) and out.shape[-1] == 1:
            raise ValueError(
                "One output is no choice between classes: give Batch(x, likelihood=Gaussian()) or Bernoulli()."
            )
        self._check_statistics(model)
        if not self._checked_outputs:
            self._checked_outputs = True
            likelihood.check_outputs(out)
        target = answer(model, teacher, x)
        if out.dim() != target.dim() or len(out) != len(target) or (torch.is_grad_enabled() and not out.requires_grad):
            raise ValueError(
                f"out must be what the model answers to these inputs, with its graph, of shape {tuple(target.shape)}; got "
                f"{tuple(out.shape)}{'' if out.requires_grad else ' without a graph'}."
            )
        if self._asked is None:
            now = (out, batch.allowed if isinstance(batch, Batch) else None) if self.refuse_new else None
            self._asked = questions(teacher, self.current, target, now)
            self._check_finite(likelihood, target)
        counted = likelihood.counted(batch.y) if isinstance(batch, Batch) else None
        total = out.new_zeros(())
        for old, new, times, _ in self._asked:
            apart = self._apart(likelihood, target[..., old], out[..., old], out[..., new])
            total = total + times * (apart if counted is None else apart * counted).sum()
        labels = likelihood.label_count(out) if counted is None else counted.sum().clamp(min=1)
        return self._noted(self.strength * (total / labels))

    def _apart(self, likelihood: Likelihood, t: Tensor, z: Tensor, new: Tensor) -> Tensor:
        """The terms whose sum is KL(teacher ‖ student); ``new`` are outputs that the teacher gives no probability."""
        if isinstance(likelihood, Categorical):
            return softened_kl(t, z, new, self.temperature)[..., None]
        if isinstance(likelihood, Bernoulli):
            return output_kl(likelihood, t / self.temperature, z / self.temperature)
        return output_kl(likelihood, t, z)

    def _check_finite(self, likelihood: Likelihood, target: Tensor) -> None:
        """Refuse a teacher that rules out every answer to an old task: nothing can be distilled from it."""
        for old, _, _, k in self._asked or ():
            if isinstance(likelihood, Categorical) and target[..., old].isneginf().all(-1).any():
                raise ValueError(
                    f"LwF's teacher gives minus infinity for every output of task {k} on some of these inputs, so there is nothing "
                    "to distill: return the outputs as they are, and say which count by a task's table of allowed classes."
                )

    def before_step(self, model: nn.Module) -> None:
        """During the warm-up only new outputs have a gradient."""
        self._warmup.before_step()

    def after_step(self, model: nn.Module) -> None:
        """During the warm-up everything else stays, whatever the optimizer carries along."""
        self.warmed += self._warmup.left > 0
        self._warmup.after_step()

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Remember the model as it is."""
        self._likelihood = getattr(task, "likelihood", self._likelihood)
        self.learned = with_task(self.learned, task)
        self.latest, self._asked, self.begun = remember(model, task, self.learned), None, False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned."""
        super().load_state_dict(state)
        self._asked = None


class Warmup:
    """Some steps in which only the outputs that are new in a task learn, bit for bit, under any optimizer."""

    def __init__(self) -> None:
        self.left = 0
        self.frozen: list[nn.Parameter] = []
        self.rows: list[tuple[nn.Parameter, Tensor]] = []  # of the output layer: the parameter, and its old rows
        self.values: list[tuple[Tensor, Tensor | None, Tensor]] = []

    def begin(self, model: nn.Module, task: Any, teacher: dict[str, Any], steps: int, output: str | None) -> None:
        """Find the new outputs; without any there is no warm-up."""
        check_known(model, teacher)
        name, layer = output_layer(model, output)
        old = torch.arange(layer.out_features) < len(teacher["state"][f"{name}.weight"])
        allowed = getattr(task, "allowed", None)
        if allowed is not None and teacher["rows"] is not None:
            new = allowed[task.id] & ~teacher["rows"].any(0)
            old[: len(new)] &= ~new
        if old.all():
            return
        own = {id(p) for p in layer.parameters()}
        self.left = steps
        self.frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
        self.rows = [(p, old.to(p.device)) for p in layer.parameters() if p.requires_grad]
        self.values = [(v, None, v.detach().clone()) for v in [*self.frozen, *model.buffers()]]
        self.values += [(p, rows, p.detach()[rows].clone()) for p, rows in self.rows]

    def before_step(self) -> None:
        """No gradient, so that optimizers pass over the frozen."""
        if self.left:
            for p in self.frozen:
                p.grad = None
            for p, old in self.rows:
                if p.grad is not None:
                    p.grad[old] = 0

    @torch.no_grad()
    def after_step(self) -> None:
        """Put back what has moved all the same: statistics, and rows by momentum or decay."""
        if self.left:
            for tensor, rows, value in self.values:
                if rows is None:
                    tensor.copy_(value)
                else:
                    tensor[rows] = value
            self.left -= 1
