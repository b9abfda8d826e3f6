"""Memory of the machine."""

import torch

from everlearn.runtime import machine_memory
from everlearn.runtime.machine_memory import available_memory


def test_available_memory_falls_with_allocations():
    before = available_memory()
    if before is None:
        assert not machine_memory._MEMINFO.exists()
        return
    block = torch.ones(400_000_000, dtype=torch.uint8)
    assert before - available_memory() > 0.5 * len(block)


def test_unknown_memory_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_memory, "_MEMINFO", tmp_path / "missing")
    assert available_memory() is None
