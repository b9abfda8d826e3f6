"""Locks, deleted versions and damaged files of the state folder."""

from pathlib import Path

import pytest

from everlearn.runtime import files
from tests.updating.deployments import digits, overwrite, read_files, run_update


def test_concurrent_update_is_refused(deployment, monkeypatch):
    run_update(digits(0, 1))
    with files.exclusive_lock(Path("state/.lock")) as is_locked:
        assert is_locked
        with pytest.raises(OSError, match="Another update is running in state"):
            run_update(digits(2, 3))
    assert run_update(digits(2, 3)).number == 2


def test_old_versions_are_deleted(deployment):
    for shift in range(4):
        run_update(digits(0, 1, shift=shift), versions=2)
    assert sorted(path.name for path in Path("state").glob("update-*")) == ["update-0003", "update-0004"]
    assert len(run_update(digits(2, 3)).held_out_sets) == 5, "held-out sets of deleted versions are kept"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (overwrite("state/current.json", b"{"), "state/current.json cannot be read"),
        (overwrite("state/current.json", b"[1]"), "state/current.json cannot be read"),
        (overwrite("state/current.json", b'{"format": 9}'), "not of this version of Everlearn"),
        (overwrite("state/current.json", b'{"format": 1, "version": "2", "facts": ""}'), "of Everlearn, or damaged"),
        (overwrite("state/update-0002/facts.json", b"{}"), "facts.json is not the file that was written"),
        (overwrite("state/update-0002/method.pt", b"x"), "method.pt is not the file that was written"),
        (overwrite("state/update-0002/held-out-0001.safetensors", b"x"), "held-out-0001.safetensors is not the file"),
        (overwrite("state/update-0002/learned-0001.bin", b"x"), "learned-0001.bin is not the file"),
        (lambda: Path("state/update-0002/facts.json").unlink(), "facts.json is missing, so the state is incomplete"),
        (lambda: Path("state/update-0002/method.pt").unlink(), "method.pt is missing, so the state is incomplete"),
        (lambda: Path("state/current.json").unlink(), "state/current.json is missing"),
        (lambda: Path("model.safetensors").unlink(), "state/update-0002/model.safetensors: copy it there"),
        (
            overwrite("model.safetensors", b"other"),
            "model.safetensors is not what update 2 wrote, it was changed",
        ),
    ],
)
def test_damage_is_reported_in_one_sentence(damage, message, deployment):
    run_update(digits(0, 1, shift=1))
    run_update(digits(2, 3, shift=1))
    damage()
    files_before = read_files(deployment)
    with pytest.raises((ValueError, OSError)) as error:
        run_update(digits(0, 1, shift=2))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert read_files(deployment) == files_before


def test_foreign_state_folder_is_refused(deployment):
    Path("state").mkdir()
    Path("state/holiday.jpg").write_text("")
    with pytest.raises(ValueError, match=r"state is not a state folder, it holds holiday.jpg"):
        run_update(digits(0, 1))
    assert not Path("state/.lock").exists()
    with pytest.raises(OSError, match="it is a file"):
        run_update(digits(0, 1), state="model.safetensors")
