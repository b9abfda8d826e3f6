"""Methods of four other kinds can be written with the eight hooks, each in at most 60 lines."""

import ast
import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everlearn
from everlearn import Method, streams
from everlearn.core.parameters import evaluating
from everlearn.methods.replay.base import Replay, forward_both


@dataclass(eq=False)
class DistilledReplay(Replay):
    """Distillation over new and replayed examples, and prediction by the nearest class mean, as iCaRL has them."""

    def __post_init__(self):
        super().__post_init__()
        self.teacher = {}
        self.old_outputs = 0
        self.new_outputs = 0
        self._model = None

    def begin_task(self, model, task):
        self.new_outputs = max(int(task.allowed.any(0).nonzero().max()) + 1, self.old_outputs)

    def task_loss(self, model, batch):
        drawn = self.draw(batch)
        if drawn is None:
            outputs = batch.forward(model)
            joint_batch = batch
            joint_outputs = outputs
        else:
            replayed, _ = drawn
            outputs, memory_outputs = forward_both(model, batch, replayed.x, joint=True)
            joint_batch = batch + replayed
            joint_outputs = torch.cat([outputs, memory_outputs])

        targets = F.one_hot(joint_batch.y, joint_outputs.shape[-1]).to(joint_outputs.dtype)
        if self.teacher:
            with torch.no_grad(), evaluating(model):
                teacher_outputs = torch.func.functional_call(model, self.teacher, (joint_batch.x,))
            targets[:, : self.old_outputs] = teacher_outputs[:, : self.old_outputs].sigmoid()
        seen_classes = slice(self.new_outputs)
        return F.binary_cross_entropy_with_logits(joint_outputs[:, seen_classes], targets[:, seen_classes]), outputs

    def end_task(self, model, task):
        super().end_task(model, task)
        self.teacher = {n: v.detach().clone() for n, v in model.state_dict().items()}
        self.old_outputs = self.new_outputs

    def predict(self, model, x, task=None):
        if not len(self.memory):
            return super().predict(model, x, task)
        rows = self.memory.rows()
        features = nn.Sequential(*list(model)[:-1])
        with torch.no_grad(), evaluating(model):
            memory_features = F.normalize(features(rows["x"]), dim=-1)
            classes = rows["y"].unique()
            means = torch.stack([F.normalize(memory_features[rows["y"] == c].mean(0), dim=0) for c in classes])
            similarity = F.normalize(features(x), dim=-1) @ means.T
        outputs = torch.full((len(similarity), model[-1].out_features), -torch.inf)
        outputs[:, classes] = similarity
        return outputs


@dataclass(eq=False)
class GradientProjection(Method):
    """GPM: steps of a layer stay orthogonal to the inputs that the layer had in earlier tasks."""

    threshold: float = 0.99

    def __post_init__(self):
        super().__post_init__()
        self.bases = {}  # M of each layer, with orthonormal columns

    def before_step(self, model):
        for name, basis in self.bases.items():
            gradient = model.get_submodule(name).weight.grad
            gradient -= (gradient @ basis) @ basis.T

    def end_task(self, model, task):
        inputs = {}
        handles = []
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                hook = lambda layer, args, outputs, name=name: inputs.setdefault(name, []).append(args[0])
                handles.append(layer.register_forward_hook(hook))
        with torch.no_grad(), evaluating(model):
            for batch in task.examples(128):
                model(batch.x)
        for handle in handles:
            handle.remove()

        for name, chunks in inputs.items():
            representation = torch.cat(chunks).T
            total_energy = representation.square().sum()
            basis = self.bases.get(name, representation.new_zeros(len(representation), 0))
            residual = representation - basis @ (basis.T @ representation)
            u, s, _ = torch.linalg.svd(residual, full_matrices=False)
            captured_energy = total_energy - residual.square().sum() + s.square().cumsum(0)
            num_vectors = int((captured_energy < self.threshold * total_energy).sum()) + 1
            self.bases[name] = torch.linalg.qr(torch.cat([basis, u[:, :num_vectors]], 1)).Q


@dataclass(eq=False)
class Prototypes(Method):
    """The nearest class mean of frozen features: sums of statistics, without a gradient step."""

    trains = False
    deployable = False

    def __post_init__(self):
        super().__post_init__()
        self.sums = torch.zeros(0)
        self.counts = torch.zeros(0)

    def observe(self, batch, outputs):
        if not len(self.counts):
            num_classes = batch.allowed.shape[1]
            self.sums = outputs.new_zeros(num_classes, outputs.shape[-1])
            self.counts = outputs.new_zeros(num_classes)
        self.sums = self.sums.index_add(0, batch.y, outputs)
        self.counts = self.counts + batch.y.bincount(minlength=len(self.counts))

    def predict(self, model, x, task=None):
        if not len(self.counts):
            return super().predict(model, x, task)
        means = self.sums / self.counts[:, None].clamp(min=1)
        distances = torch.cdist(super().predict(model, x), means)
        return -distances.masked_fill(self.counts == 0, torch.inf)


@dataclass(eq=False)
class Prompt(Method):
    """A learned shift of the inputs for each task, in front of a frozen body: the idea of prompt tuning."""

    deployable = False

    def __post_init__(self):
        super().__post_init__()
        self.prompts = {}  # by task
        self.current = None
        self._prompt = None

    def begin_task(self, model, task):
        x = next(iter(task.examples(1))).x
        self.current = task.id
        value = self.prompts.get(task.id, torch.zeros_like(x))
        self._prompt = nn.Parameter(value.clone())
        for layer in list(model)[:-1]:
            layer.requires_grad_(False)

    def parameters(self):
        return [] if self._prompt is None else [self._prompt]

    def task_loss(self, model, batch):
        outputs = model(batch.x + self._prompt)
        return batch.loss(outputs), outputs

    def after_step(self, model):
        self.prompts[self.current] = self._prompt.detach().clone()

    def predict(self, model, x, task=None):
        shifts = torch.cat([self.prompts.get(int(t), torch.zeros_like(x[:1])) for t in task])
        return super().predict(model, x + shifts)


def test_no_method_is_longer_than_60_lines():
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    lengths = {node.name: node.end_lineno - node.lineno + 2 for node in tree.body if isinstance(node, ast.ClassDef)}
    assert len(lengths) == 4 and max(lengths.values()) <= 60, lengths


def mlp(inputs, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, outputs))


def test_distillation_over_new_and_replayed_examples():
    stream = streams.digits("class")
    result = everlearn.run(mlp, DistilledReplay(200), stream, epochs=10, batch_size=32)
    baseline = everlearn.run(mlp, Method(), stream, epochs=10, batch_size=32)
    assert result.average_accuracy > 0.8 > baseline.average_accuracy + 0.5


def test_gradient_projection_keeps_the_outputs_for_old_inputs():
    stream = streams.digits("task")
    method = GradientProjection(0.999)
    model = mlp((1, 8, 8), stream.outputs)
    everlearn.train(model, method, stream[0], epochs=5)
    x = next(stream[0].examples(100)).x
    old_outputs = model(x).detach()
    bases = copy.deepcopy(method.bases)
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in bases}
    everlearn.train(model, method, stream[1], epochs=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05))
    for name, basis in bases.items():
        update = model.get_submodule(name).weight.detach() - weights[name]
        assert update.norm() > 0 and (update @ basis).norm() < 1e-4 * update.norm()
    num_biases = sum((p.numel() for n, p in model.named_parameters() if n.endswith("bias")), 0)
    assert num_biases and (model(x) - old_outputs).abs().max() < 2 * old_outputs.abs().max()


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_need_no_optimizer_and_no_trainable_parameter(frozen):
    stream = streams.digits("class")

    def features(inputs, outputs):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU()).requires_grad_(not frozen)

    def no_optimizer(parameters):
        raise AssertionError("a method that takes no steps needs no optimizer")

    model = features(stream.inputs, stream.outputs)
    method = Prototypes()
    weights = copy.deepcopy(model.state_dict())
    for task in stream:
        result = everlearn.train(model, method, task, optimizer=no_optimizer)
        assert result.optimizer is None and result.steps > 0
    assert all(torch.equal(v, weights[n]) for n, v in model.state_dict().items())
    x = torch.cat([batch.x for task in stream for batch in task.examples(500)])
    y = torch.cat([batch.y for task in stream for batch in task.examples(500)])
    expected = torch.stack([model(x[y == c]).mean(0) for c in range(10)])
    torch.testing.assert_close(method.sums / method.counts[:, None], expected)

    result = everlearn.run(features, Prototypes(), stream)
    assert result.average_accuracy > 0.8


def test_zero_epochs_only_end_the_task():
    ended = []

    class Counts(Prototypes):
        def end_task(self, model, task):
            ended.append(task)

    everlearn.train(nn.Linear(2, 2), Counts(), (torch.randn(4, 2), torch.zeros(4, dtype=torch.long)), epochs=0)
    assert len(ended) == 1
    with pytest.raises(ValueError, match="at least 1, got 0"):
        everlearn.train(nn.Linear(2, 2), Method(), (torch.randn(4, 2), torch.zeros(4, dtype=torch.long)), epochs=0)


def test_a_prompt_of_each_task_is_kept():
    stream = streams.digits("task")
    method = Prompt()
    model = mlp((1, 8, 8), stream.outputs)
    everlearn.train(model, Method(), stream[0], epochs=5)
    body = copy.deepcopy(model[1].state_dict())
    for task in stream:
        everlearn.train(model, method, task, epochs=3)
    assert all(torch.equal(v, body[n]) for n, v in model[1].state_dict().items())
    assert len(method.prompts) == len(stream) and all(p.any() for p in method.prompts.values())
    batch = next(stream[1].examples(50))
    expected = model(batch.x + method.prompts[1])
    torch.testing.assert_close(method.predict(model, batch.x, torch.full((50,), 1)), expected)
