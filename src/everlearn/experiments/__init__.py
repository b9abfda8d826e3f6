"""Grids of runs, their executors, published tables and advice, usable without the command line."""
