"""Regularization: penalties and distillation that keep the model near what it has learned."""
