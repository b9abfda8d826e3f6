import pytest
import torch

from everlearn.curvature import Diagonal, Full, fisher
from tests.models import make

DELTA = {"a": torch.randn(2, 3, dtype=torch.double), "b": torch.randn(4, dtype=torch.double)}


def vector(p):
    return torch.cat([p["a"].flatten(), p["b"]])


def diagonal():
    return Diagonal({n: torch.rand_like(v) for n, v in DELTA.items()})


def full(rows):
    return Full({"a": (2, 3), "b": (4,)}, torch.randn(rows, 10, dtype=torch.double))


def dense(form):
    return torch.diag(vector(form.values)) if isinstance(form, Diagonal) else form.dense()


@pytest.mark.parametrize(
    "make_form", [diagonal, lambda: full(3), lambda: full(30)], ids=["diagonal", "few rows", "full"]
)
def test_every_form_is_its_matrix(make_form):
    one, two = make_form(), make_form()
    f, v = dense(one), vector(DELTA)
    torch.testing.assert_close(one.quad(DELTA), v @ f @ v)
    torch.testing.assert_close(vector(one.solve(DELTA, 0.5)), torch.linalg.solve(f + 0.5 * torch.eye(10), v))
    torch.testing.assert_close(vector(one.diagonal()), f.diagonal())
    assert one.trace() == pytest.approx(float(f.trace()))
    torch.testing.assert_close(dense(one + two), f + dense(two))
    torch.testing.assert_close(dense(3 * one), 3 * f)
    torch.testing.assert_close(dense(one * 0.25), f / 4)
    again = type(one)()
    again.load_state_dict(one.state_dict())
    torch.testing.assert_close(dense(again), f)


def test_a_full_form_lives_in_the_smaller_space():
    assert full(9).matrix is None and full(10).rows is None
    many = full(6) + full(6)
    assert many.rows is None and many.matrix.shape == (10, 10)
    assert (full(2) + full(3)).rows.shape == (5, 10)


def test_forms_over_other_parameters():
    a, b = Diagonal({"a": torch.ones(2)}), Diagonal({"b": torch.ones(2)})
    assert set((a + b).values) == {"a", "b"}
    assert Diagonal().quad({"a": torch.ones(2)}) == 0
    both = full(3) + Full({"c": (10,)}, torch.randn(3, 10))
    assert set(both.shapes) > {"c"} and both.rows.shape == (6, 20)
    with pytest.raises(TypeError, match="unsupported operand"):
        full(3) + a


def test_full_forms_are_added_by_name():
    b = Full({"b": (1,)}, matrix=torch.tensor([[1.0]]))
    both = Full({"a": (1,), "b": (1,)}, matrix=torch.diag(torch.tensor([10.0, 20.0])))
    for total in (b + both, both + b, b + both + Full(), Full() + b + both):
        assert {n: v.item() for n, v in total.diagonal().items()} == {"a": 10, "b": 21}
    turned = Full({"b": (1,), "a": (1,)}, rows=torch.tensor([[2.0, 3.0]]))
    assert {n: v.item() for n, v in (both + turned).diagonal().items()} == {"a": 19, "b": 24}
    assert {n: v.item() for n, v in (turned + turned + both).diagonal().items()} == {"a": 28, "b": 28}


def test_singular_forms_ask_for_damping():
    with pytest.raises(ValueError, match="needs damping > 0"):
        full(3).solve(DELTA)
    singular = Full({"a": (2, 3), "b": (4,)}, matrix=torch.zeros(10, 10, dtype=torch.double))
    with pytest.raises(ValueError, match=r"singular with damping 0.0: use a larger one"):
        singular.solve(DELTA, 0.0)


def test_weights_only_loading_reads_every_form(tmp_path):
    model, x = make("mlp")
    for structure in ("diagonal", "kronecker", "full"):
        form = fisher(model, x, structure=structure)
        torch.save(form.state_dict(), tmp_path / "form.pt")
        again = type(form)()
        again.load_state_dict(torch.load(tmp_path / "form.pt", weights_only=True))
        delta = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        torch.testing.assert_close(again.quad(delta), form.quad(delta))
