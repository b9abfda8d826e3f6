"""Baselines: what other methods are compared with."""
