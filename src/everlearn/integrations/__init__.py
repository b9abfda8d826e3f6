"""Adapters for other libraries; each needs its package, which an extra of the same name installs."""
