"""Streams of tasks: builders for any labeled data, and benchmarks by name."""

from collections.abc import Callable

from everlearn.core.stream import Stream
from everlearn.streams.bag_of_words import bag
from everlearn.streams.builders import permuted, rotated, split
from everlearn.streams.cifar import split_cifar10, split_cifar100
from everlearn.streams.clinc150 import clinc150
from everlearn.streams.core50 import core50_nc, core50_ni
from everlearn.streams.digits import digits, disjoint_digits, online_digits, permuted_digits, rotated_digits
from everlearn.streams.digits import load as digits_data
from everlearn.streams.digits_domains import digits_domains
from everlearn.streams.features import features
from everlearn.streams.five_datasets import five_datasets
from everlearn.streams.from_tasks import from_tasks
from everlearn.streams.gas_drift import gas_drift
from everlearn.streams.mas_sequence import mas_sequence
from everlearn.streams.mnist import permuted_mnist, permuted_mnist_32, rotated_mnist, split_fashion_mnist, split_mnist
from everlearn.streams.omniglot import omniglot
from everlearn.streams.online import online
from everlearn.streams.pretrained import cifar100_mobilenet, clinc150_minilm

STREAMS: dict[str, Callable[..., Stream]] = {
    "digits": digits,
    "permuted-digits": permuted_digits,
    "disjoint-digits": disjoint_digits,
    "rotated-digits": rotated_digits,
    "online-digits": online_digits,
    "split-mnist": split_mnist,
    "permuted-mnist": permuted_mnist,
    "permuted-mnist-32": permuted_mnist_32,
    "rotated-mnist": rotated_mnist,
    "split-fashion-mnist": split_fashion_mnist,
    "split-cifar10": split_cifar10,
    "split-cifar100": split_cifar100,
    "cifar100-mobilenet": cifar100_mobilenet,
    "digits-domains": digits_domains,
    "five-datasets": five_datasets,
    "omniglot": omniglot,
    "mas-sequence": mas_sequence,
    "core50-ni": core50_ni,
    "core50-nc": core50_nc,
    "gas-drift": gas_drift,
    "clinc150": clinc150,
    "clinc150-minilm": clinc150_minilm,
}

__all__ = [
    "STREAMS",
    "bag",
    "cifar100_mobilenet",
    "clinc150",
    "clinc150_minilm",
    "core50_nc",
    "core50_ni",
    "digits",
    "digits_data",
    "digits_domains",
    "disjoint_digits",
    "features",
    "five_datasets",
    "from_tasks",
    "gas_drift",
    "mas_sequence",
    "omniglot",
    "online",
    "online_digits",
    "permuted",
    "permuted_digits",
    "permuted_mnist",
    "permuted_mnist_32",
    "rotated",
    "rotated_digits",
    "rotated_mnist",
    "split",
    "split_cifar10",
    "split_cifar100",
    "split_fashion_mnist",
    "split_mnist",
]
