"""Statistics of the per-example gradients of any module."""
