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

from everlearn.runtime.fingerprint import fingerprint, fingerprint_model
from tests.models import MODELS, make

A = torch.rand(5000, 3)


def changed():
    b = A.clone()
    b[1234, 1] += 1
    return b


def test_every_byte_and_shape_counts():
    digests = [fingerprint(t) for t in (A, changed(), A[:4999], A.double(), A.flatten())]
    assert len(set(digests)) == 5 and fingerprint(A) == fingerprint(A.clone())
    assert fingerprint([torch.tensor(1.0), torch.zeros(0)]) != fingerprint([torch.tensor(1.0), torch.zeros(0, 2)])


def test_models_of_libraries_with_decorated_code():
    transformers = pytest.importorskip("transformers")

    def bert(**settings):
        torch.manual_seed(0)
        shape = {"vocab_size": 9, "hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 4}
        return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **shape, **settings))

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
    dataset = TensorDataset(A)
    changed_dataset = TensorDataset(changed())
    assert fingerprint(dataset) == fingerprint(TensorDataset(A.clone())) != fingerprint(changed_dataset)
    assert fingerprint(DataLoader(dataset)) != fingerprint(DataLoader(changed_dataset))
    assert fingerprint({"a": np.arange(3)}) != fingerprint({"a": np.arange(4)})
    assert fingerprint({1, 2}) == fingerprint({2, 1})


def test_a_users_class_is_hashed_by_its_code():
    def scaling(factor):
        class Custom:
            def edit(self, g):
                return g * factor if factor else g

        return Custom()

    def identity():
        class Custom:
            def edit(self, g):
                return g

        return Custom()

    assert fingerprint(scaling(1)) == fingerprint(scaling(1)) != fingerprint(scaling(2))
    assert fingerprint(scaling(1)) != fingerprint(identity())


def test_cycles_end():
    a = []
    a.append(a)
    assert fingerprint(a)


def test_a_generator_has_no_fingerprint():
    assert fingerprint([1, (i for i in range(3))]) is None


@pytest.mark.parametrize(
    ("first", "second"),
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
def test_similar_values_differ(first, second):
    assert fingerprint(first) is not None and fingerprint(second) is not None
    assert fingerprint(first) != fingerprint(second)


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

    return [cls() for cls in (Attribute, Property, Cached, Static, Class, Inherited)]


def test_all_attributes_of_a_class_count():
    for first, equal, different in zip(classes(1), classes(1), classes(2), strict=True):
        assert fingerprint(first) == fingerprint(equal) != fingerprint(different), type(first).__name__


def test_unreadable_class_attributes_are_skipped():
    def make_object(k):
        class Custom:
            lock = threading.Lock()
            log = logging.getLogger("custom")
            slope = k

        return Custom()

    assert fingerprint(make_object(1)) == fingerprint(make_object(1)) != fingerprint(make_object(2))


class WithAttribute(nn.Module):
    def __init__(self, attribute=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(2, 2)
        self.attribute = attribute


def test_everything_in_a_model_counts_except_its_mode():
    with_buffer = WithAttribute()
    with_buffer.register_buffer("mask", torch.zeros(2), persistent=False)
    hooked = [WithAttribute() for _ in range(3)]
    for model, factor in zip(hooked, (2, 2, 3), strict=True):
        model.handle = model.layer.register_forward_hook(lambda m, i, o, k=factor: k, with_kwargs=False)
    heads = [torch.manual_seed(0) and nn.TransformerEncoderLayer(4, n) for n in (1, 2)]
    variants = [WithAttribute(), WithAttribute(1), WithAttribute(lambda x: x), with_buffer, *hooked[1:], *heads]
    digests = [fingerprint(model) for model in variants]
    assert None not in digests and len(set(digests)) == len(digests)
    assert fingerprint(hooked[0]) == fingerprint(hooked[1])
    assert fingerprint(WithAttribute().eval()) == fingerprint(WithAttribute())
    assert fingerprint(torch.compile(WithAttribute())) == fingerprint(torch.compile(WithAttribute()))


def test_models_with_unreadable_attributes_have_a_model_digest():
    with open(__file__) as file:
        for value in (threading.Lock(), (i for i in "ab"), file, torch.eye(2).to_sparse(), {object(), object()}):
            assert fingerprint(WithAttribute(value)) is None, value
            assert fingerprint_model(WithAttribute(value)) is not None, value
    dead_reference = weakref.ref(WithAttribute())
    assert fingerprint(WithAttribute(dead_reference)) == fingerprint(WithAttribute(dead_reference)) is not None
    assert fingerprint(nn.Linear(2, 2, device="meta")) is None


def test_deeply_nested_objects():
    nested = []
    model = nn.Linear(2, 2)
    for _ in range(5000):
        nested = [nested]
    for _ in range(400):
        model = nn.Sequential(model)
    assert fingerprint(nested) and fingerprint(model)


def digests_of_models():
    models = [make(name)[0] for name in MODELS if name != "bert" or find_spec("transformers")]
    hooked = WithAttribute({"x", "y", "z", nn.Linear, nn.ReLU})
    hooked.handle = hooked.layer.register_forward_hook(lambda m, i, o: o in {"a", "b", "c"})
    if find_spec("transformers"):
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        models.append(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=2, n_positions=8)))
    return [fingerprint(model) for model in [*models, *classes(1), hooked]]


@pytest.mark.slow
def test_digests_are_equal_in_every_process():
    code = """if True:
        import torch
        torch.set_num_threads(1)
        from tests.runtime.test_fingerprint import digests_of_models
        print(*digests_of_models())
    """
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    nn.Linear(1, 1).register_forward_hook(print)  # torch numbers hooks through all models of a process
    digests = digests_of_models()
    assert None not in digests and done.stdout.split() == digests
