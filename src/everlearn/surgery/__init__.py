"""Look into and change a network: trace its units, resize layers, freeze entries, find the output layer."""

from everlearn.surgery import features, freezing, functional, heads, hooks, proximal, resize, tracing

__all__ = ["features", "freezing", "functional", "heads", "hooks", "proximal", "resize", "tracing"]
