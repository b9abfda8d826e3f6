"""Statistics of per-example gradients of any module."""
