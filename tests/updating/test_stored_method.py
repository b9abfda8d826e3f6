"""The method state that later updates load."""

import pytest

from everlearn import ER, EWC, METHODS
from everlearn.trainer import Training
from everlearn.updating.state_folder import StateFolder
from everlearn.updating.stored_method import latest_method
from tests.helpers import make_method
from tests.updating.deployments import QUICK, digits, read_files, run_update


def test_another_method_is_refused(deployment):
    run_update(digits(0, 1, shift=1), EWC(30.0))
    with pytest.raises(ValueError, match=r"is of EWC\(strength=30.0\), got ER:"):
        run_update(digits(2, 3), ER())
    with pytest.raises(ValueError, match=r"got EWC \+ ER:"):
        run_update(digits(2, 3), EWC() + ER())
    with pytest.warns(UserWarning, match="Tasks in this state keep their strength 30"):
        assert run_update(digits(2, 3), EWC(10.0)).accepted, "values of fields may change"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (ER(200), ER(300), "of a memory with capacity=200, this one has 300"),
        (METHODS["generative"](hidden=8), METHODS["generative"](hidden=9), "Error(s) in loading state_dict for VAE"),
    ],
)
def test_changed_structural_fields_are_refused(first, second, reason, deployment):
    run_update(digits(0, 1, shift=1), first, training=Training(iterations=1, batch_size=8))
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match="cannot load it") as error:
        run_update(digits(2, 3), second)
    assert reason in str(error.value)
    assert "leave the fields that determine its state (capacity, policy" in str(error.value)
    assert "\n" not in str(error.value) and read_files(deployment) == files_before


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, kind in METHODS.items() if kind.deployable])
def test_method_is_restored_from_state(name, deployment):
    method = make_method(name)
    run_update(digits(0, 1, 2, 3, shift=1), method, training=QUICK)
    assert repr(latest_method(StateFolder("state"))) == repr(method)
