"""Isolation: each task has parameters of its own, and forgets nothing if the task is known."""
