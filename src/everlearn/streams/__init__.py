"""Streams of tasks: made from any labelled data, and ready-made ones by name."""

from collections.abc import Callable

from everlearn.stream import Stream
from everlearn.streams.build import from_tasks, online, permuted, rotated, split
from everlearn.streams.cifar import load as cifar100_data
from everlearn.streams.cifar import split_cifar100
from everlearn.streams.digits import digits, online_digits, permuted_digits, rotated_digits
from everlearn.streams.digits import load as digits_data
from everlearn.streams.mnist import load as mnist_data
from everlearn.streams.mnist import load_fashion as fashion_mnist_data
from everlearn.streams.mnist import permuted_mnist, rotated_mnist, split_fashion_mnist, split_mnist

STREAMS: dict[str, Callable[..., Stream]] = {
    "digits": digits,
    "permuted-digits": permuted_digits,
    "rotated-digits": rotated_digits,
    "online-digits": online_digits,
    "split-mnist": split_mnist,
    "permuted-mnist": permuted_mnist,
    "rotated-mnist": rotated_mnist,
    "split-fashion-mnist": split_fashion_mnist,
    "split-cifar100": split_cifar100,
}

__all__ = [
    "STREAMS",
    "cifar100_data",
    "digits",
    "digits_data",
    "fashion_mnist_data",
    "from_tasks",
    "mnist_data",
    "online",
    "online_digits",
    "permuted",
    "permuted_digits",
    "permuted_mnist",
    "rotated",
    "rotated_digits",
    "rotated_mnist",
    "split",
    "split_cifar100",
    "split_fashion_mnist",
    "split_mnist",
]
