"""Parameter isolation: each task has parameters of its own."""
