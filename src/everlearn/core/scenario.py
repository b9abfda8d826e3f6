"""The three scenarios of continual learning, and the kinds of data."""

from __future__ import annotations

from typing import Literal, get_args

Scenario = Literal["task", "domain", "class"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)

DataKind = Literal["images", "text", "table"]
