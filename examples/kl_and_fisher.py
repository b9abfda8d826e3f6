"""The Fisher information is the curvature of the KL divergence: KL(p_θ ‖ p_θ+δ) ≈ ½ δᵀ F δ."""

import torch

from everlearn import Method, nets, streams, train
from everlearn.curvature import fisher, predictive_kl

torch.manual_seed(0)
task = streams.digits("class").joint()[0]
model = nets.mlp(64, 10, hidden=(16,))
train(model, Method(), task, epochs=5, batch_size=32)

direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
forms = {structure: fisher(model, task, structure=structure) for structure in ("full", "kronecker", "diagonal")}
for scale in (1e-1, 1e-2, 1e-3):
    delta = {name: scale * v for name, v in direction.items()}
    kl = predictive_kl(model, delta, task).item()
    quadratics = [f"{structure} {0.5 * form.quad(delta).item():.3g}" for structure, form in forms.items()]
    print(f"|δ| × {scale:g}: KL {kl:.3g}, ½ δᵀFδ {', '.join(quadratics)}")
