"""Baselines that other methods are compared with."""
