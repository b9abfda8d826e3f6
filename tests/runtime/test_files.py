"""Atomic writes, permissions, checksums and locks."""

import os
import random
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch

from everlearn.runtime import files

POSIX = pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")


@pytest.fixture
def umask():
    """Set the umask during a test."""
    previous = os.umask(0o022)
    yield os.umask
    os.umask(previous)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@POSIX
@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022, 0o002, 0o000])
def test_a_new_file_has_the_permissions_of_open(mask, umask, tmp_path):
    umask(mask)
    (tmp_path / "reference").write_bytes(b"1")
    files.write(tmp_path / "written", b"1")
    files.save({"examples": torch.rand(3)}, tmp_path / "state.pt")
    assert mode(tmp_path / "written") == mode(tmp_path / "state.pt") == mode(tmp_path / "reference")


@POSIX
def test_an_existing_file_keeps_its_permissions(umask, tmp_path):
    for name in ("reference", "written"):
        (tmp_path / name).write_bytes(b"1")
        (tmp_path / name).chmod(0o640)
    umask(0o000)
    (tmp_path / "reference").write_bytes(b"2")
    files.write(tmp_path / "written", b"2")
    assert mode(tmp_path / "written") == mode(tmp_path / "reference") == 0o640
    files.write(tmp_path / "written", b"3", mode=0o600)
    assert mode(tmp_path / "written") == 0o600 and (tmp_path / "written").read_bytes() == b"3"


@POSIX
def test_an_unfinished_file_has_the_final_permissions(umask, tmp_path, monkeypatch):
    umask(0o000)
    (tmp_path / "written").write_bytes(b"old")
    (tmp_path / "written").chmod(0o600)
    modes = []
    monkeypatch.setattr("os.fsync", lambda handle: modes.append(stat.S_IMODE(os.fstat(handle).st_mode)))
    files.write(tmp_path / "written", b"new")
    assert modes == [0o600]


def test_a_flipped_bit_is_detected(tmp_path):
    path = tmp_path / "state.pt"
    state = {"a": torch.arange(5000.0), "n": 3}
    content = files.save(state, path).read_bytes()
    assert torch.load(path, weights_only=True)["n"] == 3, "torch.load reads the file"
    rng = random.Random(0)
    num_refused = 0
    for _ in range(300):
        position = rng.randrange(len(content))
        flipped = content[position] ^ 1 << rng.randrange(8)
        path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        try:
            loaded = files.load(path)
        except ValueError as error:
            num_refused += 1
            assert "is damaged" in str(error)
        else:  # the bit was in padding
            assert torch.equal(loaded["a"], state["a"]) and loaded["n"] == 3
    assert num_refused > 250


def test_checksums_are_written_even_if_switched_off_in_torch(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        files.save({"a": torch.arange(9.0)}, tmp_path / "state.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(files.load(tmp_path / "state.pt")["a"], torch.arange(9.0))


@pytest.mark.parametrize("age", [-1e6, 0.0, 1e6], ids=["from the future", "current", "old"])
def test_a_lock_file_without_a_holder_blocks_nobody(age, tmp_path):
    lock = tmp_path / ".file.lock"
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    start = time.monotonic()
    with files.locked(tmp_path / "file"):
        pass
    assert time.monotonic() - start < 5 and not lock.exists()


HOLDER = """if True:
    import sys, time
    from pathlib import Path
    from everlearn.runtime import files
    with files.exclusive_lock(Path(sys.argv[1])) as is_acquired:
        print(is_acquired, flush=True)
        time.sleep(600)
"""


def test_a_killed_process_releases_its_lock(tmp_path):
    lock = tmp_path / "folder" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline().strip() == b"True"
        with files.exclusive_lock(lock) as is_acquired:
            assert not is_acquired
    finally:
        holder.kill()
        holder.communicate()
    assert lock.exists()
    with files.exclusive_lock(lock) as is_acquired:
        assert is_acquired


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_hold_the_lock_of_its_parent(tmp_path):
    with files.exclusive_lock(tmp_path / "lock"):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
    try:
        with files.exclusive_lock(tmp_path / "lock") as is_acquired:
            assert is_acquired
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has a different lock")
def test_a_locked_file_is_changed_by_one_process_at_a_time(tmp_path):
    (tmp_path / "count").write_text("0")
    code = """if True:
        import sys
        from pathlib import Path
        from everlearn.runtime import files
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
