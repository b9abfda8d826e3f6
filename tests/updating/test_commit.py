"""An update that is killed at any write leaves a consistent state."""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from everlearn import Method
from everlearn.runtime import files
from everlearn.trainer import Training
from everlearn.updating.state_folder import StateFolder
from tests.updating.deployments import (
    QUICK,
    Killed,
    current_version,
    digits,
    kill_at_write,
    make_model,
    read_files,
    run_update,
    weights_equal,
)


@pytest.mark.slow
def test_killed_before_every_write(deployment, monkeypatch):
    data = [digits(0, 1, 2, 3), digits(0, 1, shift=1), digits(2, 3, shift=1)]
    initial_weights = Path("model.safetensors").read_bytes()
    options = {"training": Training(iterations=2, batch_size=8)}

    def update_twice(state):
        return [run_update(data[1], old=data[0], state=state, **options), run_update(data[2], state=state, **options)]

    with monkeypatch.context() as patch:
        written = kill_at_write(patch, index=-1)
        update_twice("reference")
        all_writes = list(written)
    assert all_writes.count("current.json") == 4 and all_writes.count("facts.json") == 3 and len(all_writes) == 29
    for index in range(len(all_writes)):
        state = f"state-{index}"
        Path("model.safetensors").write_bytes(initial_weights)
        with monkeypatch.context() as patch:
            written = kill_at_write(patch, index)
            with pytest.raises(Killed):
                update_twice(state)
        # The pointer is written twice per update: before and after the deployed file is replaced.
        num_committed = (written.count("current.json") + 1) // 2
        assert (current_version(state) if num_committed else 0) == num_committed
        versions = [
            initial_weights,
            *(Path(state, f"update-000{n}/model.safetensors").read_bytes() for n in range(1, num_committed + 1)),
        ]
        assert Path("model.safetensors").read_bytes() in versions[-2:], "a complete file, old or new"
        repeated = update_twice(state)  # repeat both commands
        assert [outcome.new for outcome in repeated] == [num_committed < 1, num_committed < 2]
        assert weights_equal("model.safetensors", "reference/update-0002/model.safetensors"), (
            "equal to an uninterrupted run"
        )
        assert read_files(state).keys() == read_files("reference").keys()


def test_killed_while_deleting_old_versions(deployment, monkeypatch):
    run_update(digits(0, 1, shift=1))
    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "delete_old_versions", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run_update(digits(0, 1, shift=2), versions=1)
    run_update(digits(0, 1, shift=3), versions=1)
    assert sorted(p.name for p in Path("state").glob("update-*")) == ["update-0003"]


def test_only_temporary_files_of_killed_writes_are_removed(deployment):
    run_update(digits(0, 1, shift=1), training=QUICK)

    def die(source, target):
        raise Killed

    temporary_files = []
    for path in (Path("model.safetensors"), Path("state/current.json")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.replace", die)
            patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans up nothing
            with pytest.raises(Killed):
                files.write(path, b"incomplete")
        temporary_files += path.parent.glob(f".{path.name}.*")
    assert len(temporary_files) == 2
    user_files = [
        Path(".model.safetensors.original"),
        Path(".model.safetensors.abcd1234"),
        Path("state/.current.json.original"),
    ]
    for path in user_files:
        path.write_text("copy of a user")
    assert run_update(digits(0, 1, shift=2), training=QUICK).accepted
    assert all(path.read_text() == "copy of a user" for path in user_files)
    assert not any(path.exists() for path in temporary_files)


@pytest.mark.slow
def test_process_killed_between_pointer_and_weights(deployment):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.updating.deployments import *\n"
        "from everlearn.updating import commit\n"
        "commit.replace_file = lambda weights: os._exit(9)\n"
        "run_update(digits(0, 1, shift=1))\n"
    )
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code, root], check=False).returncode == 9
    weights_before = Path("model.safetensors").read_bytes()
    assert current_version() == 1 and weights_before != Path("state/update-0001/model.safetensors").read_bytes()
    (Path("state") / "update-0002").mkdir()  # a second update was also interrupted
    outcome = run_update(digits(0, 1, shift=1))
    assert not outcome.new and "model.safetensors is now replaced" in str(outcome)
    assert Path("model.safetensors").read_bytes() == Path("state/update-0001/model.safetensors").read_bytes()
    assert not (Path("state") / "update-0002").exists()


def test_only_successful_update_completes_interrupted_one(deployment, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("everlearn.updating.commit.replace_file", lambda weights: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run_update(digits(0, 1, shift=1), Method())
    files_before = read_files(deployment)
    new_weights = Path("state/update-0001/model.safetensors").read_bytes()
    with pytest.raises(FileNotFoundError):
        run_update("nofile.csv", Method())
    with pytest.raises(FloatingPointError):
        run_update(digits(4, 5), Method(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))
    assert "Update 1 was interrupted before it replaced" in str(run_update(digits(4, 5), Method(), dry_run=True))
    dry_outcome = run_update(digits(4, 5), Method(), dry_run=True, accept_weights=True)
    assert "as requested" in str(dry_outcome) and read_files(deployment) == files_before, "no file is replaced"
    refused = run_update(digits(4, 5), Method(), tolerance=0.0)
    assert not refused.accepted and "is now replaced" in str(refused)
    assert Path("model.safetensors").read_bytes() == new_weights
    Path("model.safetensors").write_bytes(files_before["model.safetensors"])  # restored on purpose
    with pytest.raises(ValueError, match="it was changed"):
        run_update(digits(4, 5), Method())


def test_file_deployed_during_update_is_kept(deployment):
    def deploy_other_weights(parameters):
        safetensors.torch.save_file(make_model().state_dict(), "model.safetensors")
        return torch.optim.Adam(parameters)

    initial_weights = Path("model.safetensors").read_bytes()
    message = "was changed during this update"
    with pytest.raises(ValueError, match=message):
        run_update(digits(0, 1), optimizer=deploy_other_weights)
    hotfix = read_files(deployment)
    assert hotfix.keys() == {"model.safetensors"} and hotfix["model.safetensors"] != initial_weights
    run_update(digits(0, 1))
    files_before = read_files(deployment)
    with pytest.raises(ValueError, match=message):
        run_update(digits(2, 3), optimizer=deploy_other_weights)
    assert read_files(deployment) == files_before | hotfix
    with pytest.raises(ValueError, match=message):
        run_update(
            digits(2, 3),
            optimizer=lambda parameters: Path("model.safetensors").unlink(True) or torch.optim.Adam(parameters),
            accept_weights=True,
        )
