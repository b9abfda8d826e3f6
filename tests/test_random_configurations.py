"""Random methods, optimizers, rates, widths and scales of inputs never end in a NaN without a word."""

import pytest
from benchmarks import random_configurations


@pytest.mark.slow
def test_no_random_configuration_fails_silently():
    counts, silent = random_configurations.run(150, seed=1)
    assert silent == []
    assert counts["trainer", "finite"] > 100


def test_a_nan_without_a_word_is_noticed(monkeypatch):
    """Weights that are not finite count as silent where fine-tuning is finite."""

    def spoil(config, method, tasks):
        model = random_configurations.train_in_own_loop(config, random_configurations.Method(), tasks)
        if type(method) is not random_configurations.Method:
            model[0].weight.data.fill_(float("nan"))
        return model

    config = {"method": "ewc", "fields": {}, "optimizer": "Adam", "rate": 0.01, "width": 4, "inputs": 1.0, "seed": 0}
    assert random_configurations.outcome(config, spoil) == "silent"
    assert random_configurations.outcome(config, random_configurations.train_in_own_loop) == "finite"
