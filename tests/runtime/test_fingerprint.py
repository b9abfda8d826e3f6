import logging
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from everlearn.runtime.fingerprint import fingerprint
from everlearn.trainer.config import _model_digest
from tests.models import MODELS, make

A = torch.rand(5000, 3)


def changed():
    b = A.clone()
    b[1234, 1] += 1
    return b


def test_every_byte_and_shape_counts():
    words = [fingerprint(t) for t in (A, changed(), A[:4999], A.double(), A.flatten())]
    assert len(set(words)) == 5 and fingerprint(A) == fingerprint(A.clone())
    assert fingerprint([torch.tensor(1.0), torch.zeros(0)]) != fingerprint([torch.tensor(1.0), torch.zeros(0, 2)])


def test_models_of_libraries_whose_code_is_decorated():
    transformers = pytest.importorskip("transformers")

    def bert(**given):
        torch.manual_seed(0)
        shape = {"vocab_size": 9, "hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 4}
        return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **shape, **given))

    assert fingerprint(bert()) == fingerprint(bert()) is not None
    assert fingerprint(bert()) != fingerprint(bert(hidden_act="relu"))


def test_order_and_repetition_count():
    b = changed()
    assert len({fingerprint(v) for v in ([A, b, A], [A, b, b], [b, A, A])}) == 3


def test_objects_functions_and_closures():
    def scaled(k):
        return lambda x: x * k

    assert fingerprint(scaled(1)) == fingerprint(scaled(1)) != fingerprint(scaled(2))
    assert fingerprint(partial(max, 1)) != fingerprint(partial(max, 2))
    assert fingerprint(partial(max, 1)) == fingerprint(partial(max, 1))
    one, other = TensorDataset(A), TensorDataset(changed())
    assert fingerprint(one) == fingerprint(TensorDataset(A.clone())) != fingerprint(other)
    assert fingerprint(DataLoader(one)) != fingerprint(DataLoader(other))
    assert fingerprint({"a": np.arange(3)}) != fingerprint({"a": np.arange(4)})
    assert fingerprint({1, 2}) == fingerprint({2, 1})


def test_a_users_class_is_its_code():
    def kind(factor):
        class Mine:
            def edit(self, g):
                return g * factor if factor else g

        return Mine()

    def other():
        class Mine:
            def edit(self, g):
                return g

        return Mine()

    assert fingerprint(kind(1)) == fingerprint(kind(1)) != fingerprint(kind(2))
    assert fingerprint(kind(1)) != fingerprint(other())


def test_cycles_end():
    a = []
    a.append(a)
    assert fingerprint(a)


def test_what_cannot_be_known():
    assert fingerprint([1, (i for i in range(3))]) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 23], [12, 3]),
        ([[1], 2], [[1, 2]]),
        ((1, 11), (11, 1)),
        (["a", "b"], ["a'", "'b"]),
        ({"a": {"x": 1}, "b": 2}, {"a": {"x": 1, "b": 2}}),
        ([A, A.view(torch.int32)], [A, A]),
        ([A, nn.Parameter(A)], [A, A]),
        ([torch.tensor(1j), torch.tensor(1j)], [torch.tensor(1j), torch.tensor(1j).conj()]),
        (np.array(["a", "bc"]), np.array(["ab", "c"])),
        (nn.Parameter(A), nn.Parameter(A, requires_grad=False)),
        (Path("a"), Path("b")),
        (random.Random(1), random.Random(2)),
        (re.compile("a"), re.compile("b")),
    ],
)
def test_where_one_part_ends_and_the_next_begins(one, other):
    assert fingerprint(one) is not None and fingerprint(other) is not None
    assert fingerprint(one) != fingerprint(other)


def classes(k):
    class Attribute(nn.Module):
        slope = k

    class Property(nn.Module):
        @property
        def slope(self):
            return k

    class Cached(nn.Module):
        @cached_property
        def slope(self):
            return k

    class Static(nn.Module):
        @staticmethod
        def slope():
            return k

    class Class(nn.Module):
        @classmethod
        def slope(cls):
            return k

    class Inherited(Static):
        pass

    return [kind() for kind in (Attribute, Property, Cached, Static, Class, Inherited)]


def test_all_that_a_class_says_counts():
    for one, again, other in zip(classes(1), classes(1), classes(2), strict=True):
        assert fingerprint(one) == fingerprint(again) != fingerprint(other), type(one).__name__


def test_a_class_with_something_unreadable_is_known_by_the_rest():
    def kind(k):
        class Mine:
            lock, log, slope = threading.Lock(), logging.getLogger("mine"), k

        return Mine()

    assert fingerprint(kind(1)) == fingerprint(kind(1)) != fingerprint(kind(2))


class Holding(nn.Module):
    def __init__(self, thing=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.thing = nn.LSTM(2, 2), thing


def test_all_that_is_in_a_model_counts_but_for_its_mode():
    with_buffer = Holding()
    with_buffer.register_buffer("mask", torch.zeros(2), persistent=False)
    hooked = [Holding() for _ in range(3)]
    for model, factor in zip(hooked, (2, 2, 3), strict=True):
        model.handle = model.layer.register_forward_hook(lambda m, i, o, k=factor: k, with_kwargs=False)
    heads = [torch.manual_seed(0) and nn.TransformerEncoderLayer(4, n) for n in (1, 2)]
    words = [fingerprint(m) for m in (Holding(), Holding(1), Holding(lambda x: x), with_buffer, *hooked[1:], *heads)]
    assert None not in words and len(set(words)) == len(words)
    assert fingerprint(hooked[0]) == fingerprint(hooked[1])
    assert fingerprint(Holding().eval()) == fingerprint(Holding())
    assert fingerprint(torch.compile(Holding())) == fingerprint(torch.compile(Holding()))


def test_models_that_hold_what_cannot_be_read_are_known_by_the_rest():
    with open(__file__) as file:
        for thing in (threading.Lock(), (i for i in "ab"), file, torch.eye(2).to_sparse(), {object(), object()}):
            assert fingerprint(Holding(thing)) is None, thing
            assert _model_digest(Holding(thing)) is not None, thing
    gone = weakref.ref(Holding())
    assert fingerprint(Holding(gone)) == fingerprint(Holding(gone)) is not None
    assert fingerprint(nn.Linear(2, 2, device="meta")) is None


def test_deep_things():
    nested, model = [], nn.Linear(2, 2)
    for _ in range(5000):
        nested = [nested]
    for _ in range(400):
        model = nn.Sequential(model)
    assert fingerprint(nested) and fingerprint(model)


def words_of_models():
    models = [make(name)[0] for name in MODELS if name != "bert" or find_spec("transformers")]
    hooked = Holding({"x", "y", "z", nn.Linear, nn.ReLU})
    hooked.handle = hooked.layer.register_forward_hook(lambda m, i, o: o in {"a", "b", "c"})
    if find_spec("transformers"):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        models.append(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=2, n_positions=8)))
    return [fingerprint(model) for model in [*models, *classes(1), hooked]]


@pytest.mark.slow
def test_words_are_the_same_in_every_process():
    code = "import torch; torch.set_num_threads(1); from tests.runtime.test_fingerprint import words_of_models; print(*words_of_models())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    nn.Linear(1, 1).register_forward_hook(print)  # hooks are numbered through a process
    words = words_of_models()
    assert None not in words and done.stdout.split() == words
