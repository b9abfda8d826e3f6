"""Expansion: the network grows with its tasks."""
