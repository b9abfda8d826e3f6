"""Files that are whole or not there: who may read them, whether they are what was written, who may change them."""

import os
import random
import stat
import subprocess
import sys
import time

import pytest
import torch

from everlearn.runtime import files

POSIX = pytest.mark.skipif(os.name != "posix", reason="permissions are of another kind there")


@pytest.fixture
def umask():
    """Set it for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@POSIX
@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022, 0o002, 0o000])
def test_a_new_file_has_the_permissions_that_open_gives(mask, umask, tmp_path):
    umask(mask)
    (tmp_path / "usual").write_bytes(b"1")
    files.write(tmp_path / "own", b"1")
    files.save({"examples": torch.rand(3)}, tmp_path / "state.pt")
    assert mode(tmp_path / "own") == mode(tmp_path / "state.pt") == mode(tmp_path / "usual")


@POSIX
def test_a_file_that_is_there_keeps_its_permissions(umask, tmp_path):
    for name in ("usual", "own"):
        (tmp_path / name).write_bytes(b"1")
        (tmp_path / name).chmod(0o640)
    umask(0o000)
    (tmp_path / "usual").write_bytes(b"2")
    files.write(tmp_path / "own", b"2")
    assert mode(tmp_path / "own") == mode(tmp_path / "usual") == 0o640
    files.write(tmp_path / "own", b"3", mode=0o600)
    assert mode(tmp_path / "own") == 0o600 and (tmp_path / "own").read_bytes() == b"3"


@POSIX
def test_nobody_else_can_read_a_file_while_it_is_written(umask, tmp_path, monkeypatch):
    umask(0o000)
    (tmp_path / "own").write_bytes(b"old")
    (tmp_path / "own").chmod(0o600)
    seen = []
    monkeypatch.setattr("os.fsync", lambda handle: seen.append(stat.S_IMODE(os.fstat(handle).st_mode)))
    files.write(tmp_path / "own", b"new")
    assert seen == [0o600]


def test_a_turned_bit_is_never_taken_for_a_state(tmp_path):
    path, state = tmp_path / "state.pt", {"a": torch.arange(5000.0), "n": 3}
    content = files.save(state, path).read_bytes()
    assert torch.load(path, weights_only=True)["n"] == 3, "it is a file as torch has them"
    rng = random.Random(0)
    told = 0
    for _ in range(300):
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        try:
            found = files.load(path)
        except ValueError as error:
            told += 1
            assert "is damaged" in str(error)
        else:  # in what only fills a gap
            assert torch.equal(found["a"], state["a"]) and found["n"] == 3
    assert told > 250


def test_checksums_are_written_whatever_torch_is_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        files.save({"a": torch.arange(9.0)}, tmp_path / "state.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(files.load(tmp_path / "state.pt")["a"], torch.arange(9.0))


@pytest.mark.parametrize("age", [-1e6, 0.0, 1e6], ids=["of the future", "of now", "old"])
def test_a_lock_that_nobody_holds_keeps_nobody_out(age, tmp_path):
    lock = tmp_path / ".file.lock"
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    start = time.monotonic()
    with files.locked(tmp_path / "file"):
        pass
    assert time.monotonic() - start < 5 and not lock.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the lock is another one there")
def test_one_at_a_time_changes_a_file(tmp_path):
    (tmp_path / "count").write_text("0")
    code = """if True:
        import sys
        from pathlib import Path
        from everlearn import atomic
        path = Path(sys.argv[1])
        for _ in range(100):
            with files.locked(path):
                files.write(path, str(int(path.read_text()) + 1).encode())
    """
    command = [sys.executable, "-c", code, str(tmp_path / "count")]
    children = [subprocess.Popen(command) for _ in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    assert (tmp_path / "count").read_text() == "200"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]
