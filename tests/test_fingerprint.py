from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from everlearn.fingerprint import fingerprint

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
