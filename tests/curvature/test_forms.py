import pytest
import torch

from everlearn.curvature import Diagonal, Full, fisher
from tests.models import make

DELTA = {"a": torch.randn(2, 3, dtype=torch.double), "b": torch.randn(4, dtype=torch.double)}


def vector(p):
    return torch.cat([p["a"].flatten(), p["b"]])


def random_diagonal():
    return Diagonal({n: torch.rand_like(v) for n, v in DELTA.items()})


def random_full(rows):
    return Full({"a": (2, 3), "b": (4,)}, torch.randn(rows, 10, dtype=torch.double))


def dense(form):
    return torch.diag(vector(form.values)) if isinstance(form, Diagonal) else form.dense()


@pytest.mark.parametrize(
    "make_form",
    [random_diagonal, lambda: random_full(3), lambda: random_full(30)],
    ids=["diagonal", "few rows", "full"],
)
def test_operations_equal_those_of_the_dense_matrix(make_form):
    form = make_form()
    other_form = make_form()
    matrix = dense(form)
    delta = vector(DELTA)
    torch.testing.assert_close(form.quad(DELTA), delta @ matrix @ delta)
    torch.testing.assert_close(vector(form.solve(DELTA, 0.5)), torch.linalg.solve(matrix + 0.5 * torch.eye(10), delta))
    torch.testing.assert_close(vector(form.diagonal()), matrix.diagonal())
    assert form.trace() == pytest.approx(float(matrix.trace()))
    torch.testing.assert_close(dense(form + other_form), matrix + dense(other_form))
    torch.testing.assert_close(dense(3 * form), 3 * matrix)
    torch.testing.assert_close(dense(form * 0.25), matrix / 4)
    restored = type(form)()
    restored.load_state_dict(form.state_dict())
    torch.testing.assert_close(dense(restored), matrix)


def test_a_full_form_uses_the_smaller_storage():
    assert random_full(9).matrix is None and random_full(10).rows is None
    total = random_full(6) + random_full(6)
    assert total.rows is None and total.matrix.shape == (10, 10)
    assert (random_full(2) + random_full(3)).rows.shape == (5, 10)


def test_forms_over_different_parameters():
    a = Diagonal({"a": torch.ones(2)})
    b = Diagonal({"b": torch.ones(2)})
    assert set((a + b).values) == {"a", "b"}
    assert Diagonal().quad({"a": torch.ones(2)}) == 0
    total = random_full(3) + Full({"c": (10,)}, torch.randn(3, 10))
    assert set(total.shapes) > {"c"} and total.rows.shape == (6, 20)
    with pytest.raises(TypeError, match="unsupported operand"):
        random_full(3) + a


def test_full_forms_are_added_by_name():
    b = Full({"b": (1,)}, matrix=torch.tensor([[1.0]]))
    both = Full({"a": (1,), "b": (1,)}, matrix=torch.diag(torch.tensor([10.0, 20.0])))
    for total in (b + both, both + b, b + both + Full(), Full() + b + both):
        assert {n: v.item() for n, v in total.diagonal().items()} == {"a": 10, "b": 21}
    reversed_order = Full({"b": (1,), "a": (1,)}, rows=torch.tensor([[2.0, 3.0]]))
    assert {n: v.item() for n, v in (both + reversed_order).diagonal().items()} == {"a": 19, "b": 24}
    assert {n: v.item() for n, v in (reversed_order + reversed_order + both).diagonal().items()} == {"a": 28, "b": 28}


def test_singular_forms_require_damping():
    with pytest.raises(ValueError, match="needs damping > 0"):
        random_full(3).solve(DELTA)
    singular = Full({"a": (2, 3), "b": (4,)}, matrix=torch.zeros(10, 10, dtype=torch.double))
    with pytest.raises(ValueError, match=r"singular with damping 0.0: use a larger one"):
        singular.solve(DELTA, 0.0)


def test_every_form_loads_with_weights_only(tmp_path):
    model, x = make("mlp")
    for structure in ("diagonal", "kronecker", "full"):
        form = fisher(model, x, structure=structure)
        torch.save(form.state_dict(), tmp_path / "form.pt")
        restored = type(form)()
        restored.load_state_dict(torch.load(tmp_path / "form.pt", weights_only=True))
        delta = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        torch.testing.assert_close(restored.quad(delta), form.quad(delta))
