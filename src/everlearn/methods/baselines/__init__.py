"""Baselines: what a method must beat."""
