"""Isolation: each task has parameters of its own."""
