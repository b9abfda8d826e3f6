"""The Fisher information is the curvature of the KL divergence: KL(p_θ ‖ p_θ+δ) ≈ ½ δᵀ F δ."""

import torch

from everlearn import Method, nets, streams, train
from everlearn.curvature import fisher, predictive_kl

torch.manual_seed(0)
task = streams.digits("class").joint()[0]
model = nets.mlp(64, 10, hidden=(16,))
train(model, Method(), task, epochs=5, batch_size=32)

step = {n: torch.randn_like(p) for n, p in model.named_parameters()}
forms = {structure: fisher(model, task, structure=structure) for structure in ("full", "kronecker", "diagonal")}
for size in (1e-1, 1e-2, 1e-3):
    delta = {n: size * v for n, v in step.items()}
    kl = predictive_kl(model, delta, task).item()
    quadratic = {name: 0.5 * form.quad(delta).item() for name, form in forms.items()}
    print(f"|δ| × {size:g}: KL {kl:.3g}, ½ δᵀFδ " + ", ".join(f"{name} {v:.3g}" for name, v in quadratic.items()))
