"""Replay: train on stored or generated examples of earlier tasks again."""
