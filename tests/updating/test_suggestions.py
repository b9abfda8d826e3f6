"""Suggestions after a refused update."""

from pathlib import Path

import pytest
import torch

from everlearn import ER, ERACE, EWC, Method
from everlearn.updating.suggestions import suggest
from tests.updating.deployments import digits, run_update


def test_refusal_lists_suggestions(deployment):
    report = str(run_update(digits(4, 5), EWC(30.0), old=digits(0, 1, 2, 3), tolerance=2.0))
    suggestions = report.split("What to try:\n")[1].splitlines()
    assert suggestions[0] == (
        "- Replay: with new classes only stored examples preserve the old ones: --method er-ace, derpp or er. If the "
        "model is pretrained, ranpac stores no examples."
    )
    assert suggestions[1].startswith("- More protection: --set ewc.strength=300")
    assert Path("state/refused/report.txt").read_text() == f"{report}\n"

    def suggestion_text(method, **facts):
        defaults = {"is_first": True, "has_new_classes": False, "is_certain": True}
        return " ".join(suggest(method, **defaults | facts))

    full_memory = ER(200)
    full_memory.memory.add(x=torch.rand(200, 2), y=torch.arange(200), t=torch.zeros(200, dtype=torch.long))
    assert "--set er.capacity=800 stores 800 examples. " in suggestion_text(full_memory)
    assert "--set er.capacity=800 stores 800 examples, which needs a new folder" in suggestion_text(
        full_memory, is_first=False
    )
    partly_full_memory = ER(201)
    partly_full_memory.memory.add(x=torch.rand(200, 2), y=torch.arange(200), t=torch.zeros(200, dtype=torch.long))
    for is_first in (True, False):
        assert "capacity" not in suggestion_text(partly_full_memory, is_first=is_first)
        assert "--set er.size=128" in suggestion_text(partly_full_memory, is_first=is_first)
    assert "--set er.size=128" in suggestion_text(ER(200) + EWC(), is_first=False)
    assert "--method er-ace" in suggestion_text(Method())
    assert "More old examples" in suggestion_text(ER(), is_certain=False)
    assert "More old examples" not in suggestion_text(ER())


def test_later_refusal_suggests_only_valid_options(deployment):
    assert run_update(digits(0, 1, shift=1), EWC(30.0), old=digits(0, 1, 2, 3)).accepted
    report = str(run_update(digits(4, 5), EWC(30.0), tolerance=2.0))
    suggestions = report.split("What to try:\n")[1].splitlines()
    assert suggestions[0].startswith("- Replay")
    assert "--method er-ace, derpp or er, which needs a new folder" in suggestions[0]
    assert "--state NEW --accept-weights" in suggestions[0] and "--old" in suggestions[0]
    with pytest.raises(ValueError, match="is of EWC"):
        run_update(digits(4, 5), ERACE(200))
    new_state = run_update(digits(4, 5), ERACE(200), state="new", accept_weights=True, old=digits(0, 1, 2, 3))
    assert new_state.accepted and new_state.number == 1
