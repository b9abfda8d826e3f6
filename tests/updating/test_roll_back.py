"""Updates after an earlier version was restored."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

import everlearn
from everlearn import ER, EWC, MAS, DERpp, LwF, Method, NearestMean, RanPAC, Result
from everlearn.sources import Data
from everlearn.surgery.heads import output_layer
from everlearn.updating import class_names, load
from tests.updating.deployments import (
    NAMES,
    QUICK,
    Killed,
    current_version,
    digits,
    grow_and_roll_back,
    kill_at_write,
    make_model,
    overwrite,
    read_files,
    run_update,
    weights_equal,
    with_class_names,
)


def test_roll_back_is_not_undone(deployment):
    for shift in (1, 2):
        run_update(digits(0, 1, 2, 3, shift=shift))
    old_weights = Path("state/update-0001/model.safetensors")
    Path("model.safetensors").write_bytes(old_weights.read_bytes())  # as docs/updating.md describes
    files_before = read_files(deployment)
    data = digits(0, 1, 2, 3, shift=3)
    with pytest.raises(FileNotFoundError, match=r"There is no file or folder nofile\.csv"):
        run_update("nofile.csv", accept_weights=True)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="is not what update 2 wrote, it was changed"):
            run_update(data, dry_run=dry_run)
    dry_outcome = run_update(data, accept_weights=True, dry_run=True)
    assert read_files(deployment) == files_before
    outcome = run_update(data, accept_weights=True)
    for checked in (dry_outcome, outcome):
        assert "model.safetensors is not what update 2 wrote, but that of update 1: as requested" in str(checked)
        assert "stopped" not in str(checked)
        assert checked.number == 3
        assert [e.number for e in checked.held_out_sets] == [1, 3]
        assert [checked.before[1]] == everlearn.evaluate(
            load(make_model, old_weights), Method(), [outcome.held_out_sets[0].task]
        )
    assert weights_equal("model.safetensors", "state/update-0003/model.safetensors")
    assert run_update(digits(0)).number == 4


METHODS_TO_ROLL_BACK = {"er": ER(50), "derpp": DERpp(50), "ewc": EWC(5.0), "lwf": LwF(), "mas": MAS()}
METHODS_TO_ROLL_BACK |= {"nearest-mean": NearestMean(), "ranpac": RanPAC(50)}


@pytest.mark.parametrize("named", [True, False], ids=["named", "numbered"])
@pytest.mark.parametrize("method", METHODS_TO_ROLL_BACK.values(), ids=METHODS_TO_ROLL_BACK.keys())
def test_roll_back_after_output_grew(method, named, deployment):
    first, new_class_data = grow_and_roll_back(method, named)
    files_before = read_files("state", excluded=("refused", ".lock", "current.json"))
    data = with_class_names(digits(0, 1, 2, 3, shift=-1), named)
    outcome = run_update(data, method, training=QUICK, accept_weights=True)
    assert outcome.accepted
    assert outcome.number == 3
    assert "this update continues from update 1, with the method state" in str(outcome)
    assert [held_out.number for held_out in outcome.held_out_sets] == [
        0,
        1,
        3,
    ]
    assert outcome.before.items() >= first.after.items()
    assert class_names("model.safetensors") == (NAMES[:4] if named else [])
    assert output_layer(load(make_model, "model.safetensors"))[1].out_features == 4
    assert read_files("state").items() >= files_before.items(), "earlier versions are unchanged"
    facts = json.loads(Path("state/update-0003/facts.json").read_text())
    assert facts["from"] == 1 and sorted(facts["learned"].values()) == [1, 3] and set(facts["history"]) == set("013")
    assert not {"held-out-0002.safetensors", "learned-0002.bin"} & facts["files"].keys()
    assert not np.isnan(np.tril(Result.load("state/update-0003/result.json").accuracy)).any()
    repeated = run_update(new_class_data, method, training=QUICK)
    assert repeated.new and repeated.accepted and repeated.number == 4, "data of the rolled back update can be learned"
    assert class_names("model.safetensors") == (NAMES[:5] if named else [])
    assert output_layer(load(make_model, "model.safetensors"))[1].out_features == 5 and len(repeated.held_out_sets) == 4


@pytest.mark.parametrize("named", [True, False], ids=["named", "numbered"])
@pytest.mark.parametrize("method", METHODS_TO_ROLL_BACK.values(), ids=METHODS_TO_ROLL_BACK.keys())
def test_weights_with_fewer_outputs_than_state(method, named, deployment):
    # Update 1 is deleted, so the file matches no version.
    first, new_class_data = grow_and_roll_back(method, named, versions=1)
    with pytest.raises(ValueError, match="it was changed"):
        run_update(new_class_data, method, training=QUICK)
    data = with_class_names(digits(0, 1, 2, 3, 5 if named else 4, shift=-1), named)
    outcome = run_update(data, method, training=QUICK, accept_weights=True)
    assert outcome.accepted
    assert outcome.number == 3
    assert [held_out.number for held_out in outcome.held_out_sets] == [0, 1, 2, 3]
    assert outcome.before.items() >= first.after.items(), "evaluated with 4 outputs"
    assert "The weights have 4 outputs, those of the last update had 5: the others are newly initialized." in str(
        outcome
    )
    assert ("New classes: five. The output layer grew from 4 to 6 outputs" in str(outcome)) == named
    assert class_names("model.safetensors") == (NAMES if named else [])
    assert output_layer(load(make_model, "model.safetensors"))[1].out_features == (6 if named else 5)
    assert not run_update(new_class_data, method, training=QUICK).new, "data of the last update are remembered"


def test_killed_during_roll_back(deployment, monkeypatch):
    grow_and_roll_back(ER(50), True)
    data = with_class_names(digits(0, 1, 2, 3, shift=-1), True)

    def roll_back(state):
        shutil.copytree("state", state, dirs_exist_ok=True)
        shutil.copy("of-update-1.safetensors", "model.safetensors")
        return run_update(data, ER(50), training=QUICK, state=state, accept_weights=True)

    with monkeypatch.context() as patch:
        all_writes = kill_at_write(patch, index=-1)
        roll_back("reference")
    old_weights = Path("of-update-1.safetensors").read_bytes()
    kept_files = read_files("state", excluded=(".lock", "current.json"))
    assert all_writes.count("current.json") == 2 and all_writes.count("model.safetensors") == 2
    for index in range(len(all_writes)):
        state = f"state-{index}"
        with monkeypatch.context() as patch:
            written = kill_at_write(patch, index)
            with pytest.raises(Killed):
                roll_back(state)
        is_committed = "current.json" in written
        is_replaced = written.count("model.safetensors") == 2
        assert current_version(state) == (3 if is_committed else 2) and read_files(state).items() >= kept_files.items()
        expected_weights = Path(state, "update-0003/model.safetensors").read_bytes() if is_replaced else old_weights
        assert Path("model.safetensors").read_bytes() == expected_weights
        if is_committed:
            outcome = run_update(data, ER(50), training=QUICK, state=state)
            assert not outcome.new and ("is now replaced" in str(outcome)) != is_replaced
        else:
            assert run_update(data, ER(50), training=QUICK, state=state, accept_weights=True).number == 3
        assert weights_equal("model.safetensors", "reference/update-0003/model.safetensors"), (
            "equal to an uninterrupted run"
        )
        assert read_files(state).keys() == read_files("reference").keys()


def test_interrupted_roll_back_can_be_repeated(deployment, monkeypatch):
    grow_and_roll_back(ER(50), False)
    data = digits(0, 1, 2, 3, shift=-1)
    options = {"training": QUICK, "accept_weights": True}
    with monkeypatch.context() as patch:
        patch.setattr("everlearn.updating.commit.replace_file", lambda weights: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run_update(data, ER(50), **options)
    outcome = run_update(data, ER(50), **options)
    assert outcome.new
    assert outcome.number == 4
    assert "but that of update 1" in str(outcome), "the deployed file was accepted"
    assert weights_equal("model.safetensors", "state/update-0004/model.safetensors")
    assert not run_update(data, ER(50), **options).new


def test_roll_back_to_first_deployed_model(deployment):
    initial_weights = Path("model.safetensors").read_bytes()
    old = digits(0, 1, 2, 3)
    first_update = run_update(digits(4, shift=1), old=old, training=QUICK)
    Path("model.safetensors").write_bytes(initial_weights)
    outcome = run_update(Data(digits(0, 1, shift=1)[0], old[0]), training=QUICK, accept_weights=True)
    assert (
        "that of update 0, the model before the first update: as requested, this update continues from update 0"
        in str(outcome)
    )
    assert [held_out.number for held_out in outcome.held_out_sets] == [0, 2]
    assert outcome.before[0] == first_update.before[0]
    assert "160 held-out examples of the new data were trained on" in str(outcome), "old data that the method observed"
    assert outcome.accepted and output_layer(load(make_model, "model.safetensors"))[1].out_features == 4


def test_version_that_was_rolled_back_to_is_kept(deployment):
    grow_and_roll_back(ER(50), False, versions=2)
    run_update(digits(0, 1, 2, 3, shift=-1), ER(50), training=QUICK, versions=2, accept_weights=True)
    assert sorted(path.name for path in Path("state").glob("update-*")) == ["update-0001", "update-0003"]


def test_roll_back_to_damaged_version_is_refused(deployment):
    grow_and_roll_back(ER(50), False)
    data = digits(0, 1, 2, 3, shift=-1)
    facts = Path("state/update-0001/facts.json")
    content = facts.read_bytes()
    for damage, message in [
        (lambda: facts.write_bytes(content.replace(b"learned", b"leorned")), "facts.json is not the file that was"),
        (facts.unlink, "facts.json is missing, so the state is incomplete"),
        (overwrite("state/update-0001/method.pt", b"x"), "method.pt is not the file that was written"),
    ]:
        damage()
        files_before = read_files(deployment)
        with pytest.raises((ValueError, OSError), match=message):
            run_update(data, ER(50), training=QUICK, accept_weights=True)
        assert read_files(deployment) == files_before
        facts.write_bytes(content)


def test_file_with_other_class_names_is_refused(deployment):
    grow_and_roll_back(ER(50), True, versions=1)
    weights = safetensors.torch.load_file("model.safetensors")
    for names, fits in [(["one", "zero"], False), (NAMES[:3], True)]:
        safetensors.torch.save_file(weights, "model.safetensors", {"everlearn.classes": json.dumps(names)})
        data = with_class_names(digits(0, 1, shift=-1), True)
        if fits:
            assert run_update(data, ER(50), training=QUICK, accept_weights=True).accepted
        else:
            with pytest.raises(ValueError, match="names its outputs one, zero, but in state they are zero, one, two"):
                run_update(data, ER(50), training=QUICK, accept_weights=True)
