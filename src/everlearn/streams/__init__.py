"""Streams of tasks: made from any labelled data, and ready-made ones by name."""

from collections.abc import Callable

from everlearn.stream import Stream
from everlearn.streams.build import from_tasks, online, permuted, rotated, split
from everlearn.streams.digits import digits, online_digits, permuted_digits, rotated_digits
from everlearn.streams.digits import load as digits_data

STREAMS: dict[str, Callable[..., Stream]] = {
    "digits": digits,
    "permuted-digits": permuted_digits,
    "rotated-digits": rotated_digits,
    "online-digits": online_digits,
}

__all__ = [
    "STREAMS",
    "digits",
    "digits_data",
    "from_tasks",
    "online",
    "online_digits",
    "permuted",
    "permuted_digits",
    "rotated",
    "rotated_digits",
    "split",
]
