"""Heads on frozen features: statistics of the features instead of gradient steps."""
