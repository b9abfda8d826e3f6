"""Replay: old examples, stored or generated, are trained on again."""
