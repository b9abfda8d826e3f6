"""Consolidation of old data and balanced replay memories."""

import pytest
import torch
from torch import nn

from everlearn import ER, EWC, METHODS, SI, DERpp, streams
from everlearn.sources import Data
from everlearn.trainer import Training
from everlearn.updating.learning import TrainingOptions, consolidate_old_data, train_update
from tests.updating.deployments import QUICK, digits, run_update


@pytest.mark.parametrize("method", [ER(60), DERpp(60), ER(60) + EWC(1.0)], ids=["er", "derpp", "er+ewc"])
def test_memory_is_balanced_over_updates_and_classes(method, deployment):
    old = Data(tuple(values[:80] for values in digits(0, 1, 2, 3)[0]), digits(0, 1, 2, 3)[1])
    all_digits = streams.digits_data()
    many_new = Data(*((x[y > 3], y[y > 3]) for x, y in all_digits))
    one_epoch = Training(epochs=1, batch_size=32)
    run_update(many_new, method, old=old, training=one_epoch)
    run_update(digits(0, 1, shift=2), method, training=one_epoch)
    state = torch.load("state/update-0002/method.pt", weights_only=True)
    rows = state.get("0", state)["memory"]["rows"]
    groups = list(zip(rows["t"].tolist(), rows["y"].tolist(), strict=True))
    assert {groups.count(group) for group in set(groups)} == {5} and len(set(groups)) == 4 + 6 + 2


def test_chosen_memory_policy_is_kept(deployment):
    for name, method, options in [
        ("ring", ER(60, policy="ring"), {}),
        ("reservoir", ER(60), {"balance": False}),
        ("ring", METHODS["gem"](60), {}),
    ]:
        state = f"{name}-{type(method).__name__}"
        run_update(digits(0, 1, shift=1), method, training=QUICK, state=state, accept_weights=True, **options)
        run_update(digits(0, 1, shift=2), method, training=QUICK, state=state)  # policy is read from the state
        memory_state = torch.load(f"{state}/update-0002/method.pt", weights_only=True)["memory"]
        assert memory_state["policy"] == name


def test_balanced_memory_forgets_less(deployment):
    """Few old examples, and many new examples of two new classes."""
    small_old_data = Data(tuple(values[:100] for values in digits(0, 1, 2, 3)[0]), digits(0, 1, 2, 3)[1])
    x, y = streams.digits_data()[0]
    new = (x[y > 3].clone(), torch.where(y[y > 3] > 6, 5, 4))
    training = Training(epochs=10, batch_size=32)
    outcomes = {
        balance: run_update(new, ER(60), old=small_old_data, training=training, balance=balance, dry_run=True)
        for balance in (True, False)
    }
    assert outcomes[True].after[0] > outcomes[False].after[0] + 0.05
    assert outcomes[True].after[1] > 0.8


@pytest.mark.parametrize("method", [SI(), METHODS["generative"]()])
def test_methods_without_consolidation_refuse_old_data(method, deployment):
    with pytest.raises(ValueError, match="cannot use old data afterwards"):
        run_update(digits(0, 1), method, old=digits(2, 3))


def test_old_data_are_observed_as_often_as_new_data():
    """Otherwise ten epochs of new data would displace old data from a reservoir."""
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    model = nn.Linear(4, 3)
    method = ER(60)
    options = TrainingOptions(Training(epochs=10, batch_size=20), lambda p: torch.optim.SGD(p, lr=0.1), None)
    consolidate_old_data(model, method, (x, y), options)
    assert method.memory.num_seen == 600
    train_update(model, method, (x, y), 1, None, options)
    assert method.memory.num_seen == 1200
    assert abs(method.memory["t"].bincount()[0] - 30) < 12  # three standard deviations
