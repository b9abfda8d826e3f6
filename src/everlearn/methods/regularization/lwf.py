"""Learning without forgetting: distill the old model on the inputs of the new task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.data_source import inputs_alone
from everlearn.core.forward import read_outputs
from everlearn.core.hyperparameters import NonNegative, Range, Search
from everlearn.core.likelihood import Categorical, Gaussian, Likelihood
from everlearn.core.method import Method
from everlearn.core.traits import Traits
from everlearn.methods.regularization.teacher import (
    DistillationGroup,
    Teacher,
    append_task,
    check_distillable,
    check_student_outputs,
    distillation_groups,
    divergence_terms,
    find_teacher_conflict,
    snapshot_teacher,
    teacher_outputs,
)
from everlearn.methods.regularization.warmup import lock_all_but_new_outputs
from everlearn.surgery.freezing import FrozenEntries


@dataclass(eq=False)
class LwF(Method):
    """Learning without forgetting (Li & Hoiem, TPAMI 2017): distill the old model's outputs on the new data.

        L = L_task + strength · Σₖ KL( softmax(tₖ/T) ‖ softmax(zₖ/T) ),   k: old tasks; a mean over the new labels

    For the *new* inputs, z are the outputs of the model and t those of the model before this task. The index k selects
    the outputs of task k. Old outputs and all weights keep learning. The paper has a cross-entropy, with the same
    gradient but not zero where both models agree. There is no factor T², as in the authors' code. The mean is that of
    L_task: over examples, or over labeled tokens, without ignored labels (-100). Outputs that are not classes use the
    same divergence: a term per output for Bernoulli, with T; half the squared error over the variance for Gaussian,
    without T.

    Args:
        strength: λ_o; 0 is fine-tuning. "auto" is T², which undoes the 1/T² in the gradient of the KL divergence
            (Hinton et al., 2015), and 1 for Gaussian outputs. The weights of van de Ven & Tolias (2019), 1/t and
            (1 - 1/t) T², correspond to it, up to the scale of the total loss.
        temperature: T; higher values also preserve small probabilities.
        refuse_new: include outputs that are new to an old task in the softmax of z, with target 0, as van de Ven &
            Tolias do in class-incremental learning: the model also learns that new images have no new class.
        warmup: steps at the start of each later task in which only outputs that are new in it learn; none if a task
            has no new outputs.
        output: name of the output layer, for the warm-up; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="regularization",
        pro="stores only the last model; strong if tasks have separate outputs",
        con="needs new inputs that resemble old ones",
        step=1.5,
        copies=(2.0,),
        needs_labels=False,
        weak={
            "domain": "where tasks share outputs, a confident teacher keeps the model from learning",
            "class": "distillation on new inputs does not raise the outputs of old classes",
        },
    )

    strength: Annotated[NonNegative | Literal["auto"], Search(1e-2, 100, late=True)] = 1.0
    temperature: Annotated[float, Range(1e-3), Search(0.5, 10, late=True)] = 2.0
    refuse_new: bool = False
    warmup: Annotated[int, Range(0)] = 0
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.next_teacher: Teacher = {}  # the model at the end of the last task
        self.teacher: Teacher = {}  # the teacher of the current task
        self.task_ids: list[int] = []  # of the ended tasks
        self.current_task: int | None = None
        self.is_task_open: bool = False
        self.warmup_steps = 0  # done in this task
        self._groups: list[DistillationGroup] | None = None
        self._likelihood: Likelihood = Categorical()
        self._frozen = FrozenEntries("LwF")
        self._is_warming_up = False

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Make the model of the last task the teacher; chunks of one task share theirs."""
        self._open(task)
        task_id = getattr(task, "id", None)
        is_resumed = self.is_task_open and task_id == self.current_task
        self.current_task = task_id
        self.is_task_open = True
        self._groups = None

        is_new = bool(self.next_teacher) and (task_id is None or task_id != self.next_teacher["ids"][-1])
        if is_new and not is_resumed:
            self.teacher = self.next_teacher
            self.warmup_steps = 0

        # A resumed task continues its warm-up for the remaining steps.
        self._frozen.release(model)
        self._is_warming_up = False
        if self.warmup_steps < self.warmup and self.teacher:
            self._is_warming_up = lock_all_but_new_outputs(self._frozen, model, task, self.teacher, self.output)

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Return λ_o Σₖ KL(teacher ‖ model).

        Args:
            model: the student.
            batch: the new examples, or a tensor of their inputs.
            outputs: outputs of the model for them, if computed already; also a Hugging Face output with ``.logits``.
        """
        # A custom loop need not call begin_task: then the last task's model is the teacher.
        teacher = self.teacher if self.is_task_open else self.next_teacher
        if not teacher or not self.strength:
            return 0.0
        if self.warmup and not self.is_task_open:
            raise ValueError("LwF.warmup needs the start of each task: call begin_task(model, task) before its steps.")
        if batch is None:
            raise ValueError(
                "LwF compares outputs: give the inputs, penalty(model, batch) or penalty(model, x, outputs)."
            )
        if not isinstance(batch, Batch):
            batch = Batch(inputs_alone(batch), likelihood=self._likelihood)

        z = batch.forward(model) if outputs is None else read_outputs(outputs)
        self._check_statistics(model)
        if not self._checked_outputs:
            self._checked_outputs = True
            batch.likelihood.check_outputs(z)

        t = teacher_outputs(model, teacher, batch.x)
        check_student_outputs(batch.likelihood, t, z)
        if self._groups is None:
            student = (z, batch.allowed) if self.refuse_new else None
            self._groups = distillation_groups(teacher, self.current_task, t, student)
            check_distillable(batch.likelihood, t, self._groups)
        return self._note_loss(self._weigh(batch.likelihood) * self._distillation_loss(batch, t, z, self._groups))

    def _weigh(self, likelihood: Likelihood) -> float:
        """Return λ_o; T² if it is "auto", and 1 for outputs that have no temperature."""
        if self.strength != "auto":
            return self.strength
        return 1.0 if isinstance(likelihood, Gaussian) else self.temperature**2

    def _distillation_loss(self, batch: Batch, t: Tensor, z: Tensor, groups: list[DistillationGroup]) -> Tensor:
        """Return Σₖ KL(teacher ‖ model), a mean over labels that count."""
        counted = batch.likelihood.counted(batch.y)
        total = z.new_zeros(())
        for old, new, num_tasks, _ in groups:
            divergence = divergence_terms(batch.likelihood, t[..., old], z[..., old], z[..., new], self.temperature)
            if counted is not None:
                divergence = divergence * counted
            total = total + num_tasks * divergence.sum()

        if counted is None:
            return total / batch.likelihood.label_count(z)
        return total / counted.sum().clamp(min=1)

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Return what the teacher costs."""
        if not self.next_teacher:
            return {"teacher": "none yet: the model at the end of this task will be the next one's teacher"}
        return {"teacher": f"of {len(self.task_ids)} tasks; one more forward pass per step, without gradients"}

    def before_step(self, model: nn.Module) -> None:
        """Keep only the gradients of new outputs during the warm-up."""
        if self._is_warming_up:
            self._frozen.mask_gradients(model)

    def after_step(self, model: nn.Module) -> None:
        """Restore all but the new outputs during the warm-up: momentum moves weights without a gradient, too."""
        if not self._is_warming_up:
            return
        self._frozen.restore(model)
        self.warmup_steps += 1
        if self.warmup_steps == self.warmup:
            self._frozen.release(model)
            self._is_warming_up = False

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Store the model as the next teacher."""
        self._open_task = None
        self._likelihood = getattr(task, "likelihood", self._likelihood)
        self.task_ids = append_task(self.task_ids, task)
        self.next_teacher = snapshot_teacher(model, task, self.task_ids)
        self._groups = None
        self.is_task_open = False

    def conflict_with(self, other: Method) -> str:
        """Refuse methods that predict with more than the model's weights, which the teacher lacks."""
        return find_teacher_conflict(other)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of an LwF with the same settings."""
        super().load_state_dict(state)
        self._groups = None
