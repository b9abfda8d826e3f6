"""Memory of the machine."""

from everlearn.runtime import machine_memory
from everlearn.runtime.machine_memory import available_memory


def test_available_memory_is_read_from_the_system(monkeypatch, tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n")
    monkeypatch.setattr(machine_memory, "_MEMINFO", file)
    assert available_memory() == 1024 * 20_000_000


def test_unknown_memory_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_memory, "_MEMINFO", tmp_path / "missing")
    assert available_memory() is None
    (tmp_path / "missing").write_text("nothing of the kind\n")
    assert available_memory() is None
